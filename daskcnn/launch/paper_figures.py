"""The papers' figures that a simulation gives, as numbers: for the job and the cluster at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from daskcnn.arrays import single_threaded_blas
from daskcnn.errors import DataError
from daskcnn.launch.resolve import resolve
from daskcnn.launch.simulate import Scenario, learner_of, simulate
from daskcnn.launch.simulation_text import constants_of
from daskcnn.ps import RULES
from daskcnn.show.report_tables import Report, tables
from daskcnn.sim.cluster import Cluster, Server, Worker, kinds
from daskcnn.sim.papers_step import ceiling
from daskcnn.sim.points import LAYERS, clusters_of_points
from daskcnn.sim.simulation import Simulation
from daskcnn.sim.workload import Workload

Curve = tuple[Sequence[float], Sequence[float]]

STRATEGIES = [("agwu", "idpa"), ("agwu", "udpa"), ("sgwu", "idpa"), ("sgwu", "udpa")]
SIZES = (5, 10, 15, 20, 25, 30, 35)
"""Workers, as in BPT-CNN's figures."""
THREADS = (1, 2, 4, 8, 16)
SHARES = (0.25, 0.5, 1.0, 1.5, 2.0)
"""Of the job's samples."""
DEVICES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
LINKS = (5e6, 1.25e8, 1.25e9)
"""Bytes a second: the 5 MB/s of Marques et al., 1 and 10 Gb/s."""
STEPS = 60
"""Of every worker, where pushes a second are counted."""
POINTS = 4400
"""Samples of the small problem, 400 of them to judge by."""
SMALL_RULES: Mapping[str, dict[str, Any]] = {
    "bsp": {"every": 4},
    "easgd": {"tau": 4},
    "downpour": {"n_push": 4, "n_fetch": 4},
    "admm": {"every": 4},
    "parallel-sgd": {"rounds": 5},
}
"""Parameters with which every rule learns the small problem in a few epochs."""


@dataclass(frozen=True)
class Figure:
    """Curves by name over one axis. like: the figures of the papers with these axes; empty: none has them.

    doubling: x goes in powers of 2. stacked: they are parts that add up, drawn as bars. rates: both axes go in powers
    of 10. ticks: what stands below the x of the first curve, if not its numbers. levels: lines across, by name; marks:
    lines up, by name; points: like curves, of which each point stands by itself. Nothing is below 0.
    """

    name: str
    title: str
    like: str
    x: str
    y: str
    curves: Mapping[str, Curve]
    doubling: bool = False
    levels: Mapping[str, float] = field(default_factory=dict)
    marks: Mapping[str, float] = field(default_factory=dict)
    stacked: bool = False
    rates: bool = False
    ticks: Sequence[str] = ()
    points: Mapping[str, Curve] = field(default_factory=dict)


def figures(chosen: Scenario, seed: int = 0) -> Iterator[Figure]:
    """All of them, one after the other."""
    yield from _accuracy(chosen, seed)
    yield _time_by_samples(chosen, seed)
    yield from _by_workers(chosen, seed)
    yield _time_by_threads(chosen, seed)
    yield from _layer_speedups(chosen)
    yield from _layer_steps(chosen)
    yield _downpour_saturation(chosen, seed)


# --- BPT-CNN ---


def _accuracy(chosen: Scenario, seed: int) -> Iterator[Figure]:
    """Every rule's center on the small problem, by epoch and by time."""
    dataset = clusters_of_points(POINTS, seed=seed)
    by_epoch, by_time = {}, {}
    for strategy, rule in RULES.items():
        if len(chosen.cluster.members()) < rule.fewest:
            continue
        small: dict[str, Any] = {
            "data": {"validation": 400},
            "model": {"layers": LAYERS},
            "train": {"strategy": strategy, "epochs": 10, "batch_size": 32, "lr": 0.02, "seed": seed},
            "rule": SMALL_RULES.get(strategy, {}),
        }
        job = resolve(small)
        workload = Workload.of(job, samples=POINTS - 400, numbers=chosen.numbers)
        looks: list[dict[str, Any]] = []
        learner = learner_of(job, dataset, workload)
        with single_threaded_blas():
            Simulation(workload, chosen.cluster, seed=seed, learner=learner, emit=looks.append).run()
        seen = [event for event in looks if event["event"] == "epoch"]
        accuracies = [100 * event["validation"]["accuracy"] for event in seen]
        by_epoch[strategy] = [event["epoch"] for event in seen], accuracies
        by_time[strategy] = [event["at"] for event in seen], accuracies
    title, y = "Accuracy of the center on a small problem", "validation accuracy, %"
    yield Figure("accuracy-by-epoch", title, "BPT-CNN fig. 11", "epoch", y, by_epoch)
    yield Figure("accuracy-by-time", title, "BPT-CNN fig. 11, over time", "seconds", y, by_time)


def _of_strategy(chosen: Scenario, strategy: str, partition: str) -> Scenario:
    """The same job by another rule and partitioner, their parameters the usual ones."""
    job = chosen.job
    increments = 1 if partition == "udpa" else min(4, 2 * job.train.epochs - 1)
    train = job.train.model_copy(
        update={"strategy": strategy, "partition": partition, "increments": increments, "early_stopping": None}
    )
    return replace(chosen, job=job.model_copy(update={"train": train, "rule": {}}))


def _reports(chosen: Scenario, seed: int, cases: Sequence[Scenario]) -> Iterator[tuple[str, list[Report]]]:
    """Every strategy's reports of these cases, by its name."""
    for strategy, partition in STRATEGIES:
        found = [simulate(_of_strategy(case, strategy, partition), seed=seed).report for case in cases]
        yield f"{strategy} + {partition}", found


def _time_by_samples(chosen: Scenario, seed: int) -> Figure:
    sizes = [max(chosen.job.train.batch_size, round(share * chosen.samples)) for share in SHARES]
    cases = [replace(chosen, samples=size) for size in sizes]
    curves = {name: (sizes, [r.seconds for r in found]) for name, found in _reports(chosen, seed, cases)}
    return Figure("time-by-samples", "Time by the size of the data", "BPT-CNN fig. 14", "samples", "seconds", curves)


def _by_workers(chosen: Scenario, seed: int) -> Iterator[Figure]:
    """Time, communication and balance by the number of workers, the cluster's own repeated in turn."""
    cases = [replace(chosen, cluster=chosen.cluster.of_size(size)) for size in SIZES]
    found = dict(_reports(chosen, seed, cases))

    def curves(figure: Callable[[Report], float]) -> dict[str, Curve]:
        return {name: (SIZES, [figure(report) for report in reports]) for name, reports in found.items()}

    x, like = "workers", "BPT-CNN fig. 14"
    yield Figure("time-by-workers", "Time by the number of workers", like, x, "seconds", curves(lambda r: r.seconds))
    title = "Traffic of a run by the number of workers"
    moved = curves(lambda r: (r.traffic.up + r.traffic.down) / 1e6)
    yield Figure("communication-by-workers", title, "BPT-CNN fig. 15 a", x, "MB", moved)
    title = "Balance (mean busy by longest) by the number of workers"
    yield Figure("balance-by-workers", title, "BPT-CNN fig. 15 b", x, "balance", curves(_balance))


def _balance(report: Report) -> float:
    return report.balance.balance or 0.0 if report.balance else 0.0


def _time_by_threads(chosen: Scenario, seed: int) -> Figure:
    cases = [replace(chosen, cluster=_with_threads(chosen.cluster, threads)) for threads in THREADS]
    curves = {name: (THREADS, [r.seconds for r in found]) for name, found in _reports(chosen, seed, cases)}
    title = "Time by the threads of a worker, by Amdahl's law"
    return Figure("time-by-threads", title, "BPT-CNN fig. 14", "threads", "seconds", curves, doubling=True)


def _with_threads(cluster: Cluster, threads: int) -> Cluster:
    """Every processor with so many; a GPU stays what it is."""
    workers = [worker.with_threads(threads) if worker.kind == "cpu" else worker for worker in cluster.worker]
    return cluster.model_copy(update={"worker": workers})


# --- Marques, Falcao and Alexandre ---


def _layer_speedups(chosen: Scenario) -> Iterator[Figure]:
    """By the number of equal devices of each kind, over links of different speed."""
    for kind, pattern in kinds(chosen.cluster).items():
        alone = pattern.model_copy(update={"count": 1, "bandwidth": None, "latency": 0.0})
        curves = {}
        for link in LINKS:
            clusters = [equal_devices(alone, link, devices) for devices in DEVICES]
            curves[f"{link / 1e6:g} MB/s"] = DEVICES, [chosen.sharding(each).speedup() for each in clusters]
            if link == LINKS[0]:
                stars = [chosen.star(each) for each in clusters]
                curves["as the paper sends, 5 MB/s"] = DEVICES, [each.paper_speedup(link) for each in stars]
        serial = chosen.sharding(Cluster(worker=[alone])).serial
        yield Figure(
            f"layer-speedup-{kind}",
            f"Speed-up by sharded kernels, devices like {pattern.name}",
            "Marques et al. fig. 11 to 13",
            f"{kind} devices",
            "speed-up",
            curves,
            levels={f"1/f, f = {100 * serial:.0f} %": ceiling(serial)},
        )


def equal_devices(pattern: Worker, link: float, devices: int) -> Cluster:
    """So many workers like this one, each behind a link of so many bytes a second."""
    update = {"count": 1, "bandwidth": None if link == inf else link}
    return Cluster(worker=[pattern.model_copy(update=update)]).of_size(devices)


PARTS = ("communication", "convolutions", "the rest")
MILLI = 1e3
GAP = 0.8
"""Between the bars of two runs, in bars."""


def _layer_steps(chosen: Scenario) -> Iterator[Figure]:
    """What a step is made of, by the number of equal devices of each kind, over the slowest link."""
    for kind, pattern in kinds(chosen.cluster).items():
        steps = [chosen.sharding(equal_devices(pattern, LINKS[0], devices)).step() for devices in DEVICES]
        bars = {f"{devices}": (step.comm, step.conv, step.comp) for devices, step in zip(DEVICES, steps, strict=True)}
        title = f"A step's parts over {LINKS[0] / 1e6:g} MB/s, devices like {pattern.name}"
        yield stacked(f"layer-step-{kind}", title, "Marques et al. fig. 9 and 10", f"{kind} devices", bars)


def stacked(name: str, title: str, like: str, x: str, bars: Mapping[str, Sequence[float]]) -> Figure:
    """Bars by what stands below them: seconds of communication, of the slowest convolutions, of the rest."""
    xs = range(len(bars))
    curves = {part: (xs, [bar[i] for bar in bars.values()]) for i, part in enumerate(PARTS)}
    return Figure(name, title, like, x, "seconds a step", curves, stacked=True, ticks=tuple(bars))


def step_parts(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Milliseconds of a step of sharded runs, from their logs by name: of each, the papers' bar and one a worker.

    The papers' bar is `breakdown`; a worker's communication is all in which it does not compute (`tables.StepParts`).
    Raises DataError naming the run whose log has no epoch of sharded layers.
    """
    places: list[float] = []
    bars: list[tuple[str, tuple[float, float, float]]] = []
    for run, log in runs.items():
        begin = places[-1] + 1 + GAP if places else 0.0
        own = [(run, _parts_of(run, log)), *((w, (p.comm, p.conv, p.comp)) for w, p in tables(log).breakdown.items())]
        places += [begin + i for i in range(len(own))]
        bars += own
    return Figure(
        "breakdown",
        "What a step of sharded layers takes",
        "Marques et al. fig. 6 and 8",
        "runs by the papers' definition, each with its workers beside it",
        "milliseconds a step",
        {part: (places, [MILLI * parts[i] for _, parts in bars]) for i, part in enumerate(PARTS)},
        stacked=True,
        ticks=[name for name, _ in bars],
    )


def _parts_of(run: str, log: Iterable[Mapping[str, Any]]) -> tuple[float, float, float]:
    try:
        return breakdown(log)
    except DataError as error:
        raise DataError(f"{run}: {error}") from error


def breakdown(events: Iterable[Mapping[str, Any]]) -> tuple[float, float, float]:
    """Seconds a step of communication, convolutions and the rest, as the papers define them, of a sharded run's log.

    Convolutions: of the worker that takes the longest for its shards, with the layers that are spread with them. The
    rest: of home, besides its shards. Communication is what remains. Raises DataError where the log has no epoch.
    """
    seconds = conv = comp = 0.0
    steps = 0
    for epoch, home, made in _sharded_epochs(events):
        shards = {row["name"]: sum(row["conv_seconds"].values()) for row in epoch["workers"]}
        conv += max(shards.values())
        comp += sum(max(0.0, row["busy"] - shards[home]) for row in epoch["workers"] if row["name"] == home)
        seconds, steps = seconds + epoch["seconds"], steps + made
    if not steps:
        raise DataError("this log has no epoch of sharded layers; give a run of strategy 'layer' that ended one")
    return max(0.0, seconds - conv - comp) / steps, conv / steps, comp / steps


def _sharded_epochs(events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], str, int]]:
    """Every epoch's event, its home, and how many steps it made: a resumed run makes some again."""
    home, before = None, 0
    for event in events:
        kind = event["event"]
        if kind in ("start", "resume"):
            before = event.get("step", 0)
        elif kind == "shards":
            home = event["home"]
        elif kind == "epoch" and home is not None:
            yield event, home, event["step"] - before
            before = event["step"]


# --- Hegde and Usmani ---


def _downpour_saturation(chosen: Scenario, seed: int) -> Figure:
    """Updates a second by the number of equal workers, and where T/τ says that the server is full."""
    first = chosen.cluster.members()[0]
    server = chosen.cluster.server
    if server.bandwidth is None and server.merge_rate is None:
        server = Server(bandwidth=LINKS[1])
    case = _of_strategy(chosen, "downpour", "udpa")
    train = case.job.train.model_copy(update={"epochs": 1})
    case = replace(case, job=case.job.model_copy(update={"train": train, "rule": {"n_fetch": 1 << 20}}))
    cluster = Cluster(server=server, costs=chosen.cluster.costs, worker=[first])
    saturation = constants_of(replace(case, cluster=cluster)).saturation or 1.0
    sizes = sorted({max(1, round(saturation * share)) for share in (0.05, 0.25, 0.5, 0.75, 0.9, 1, 1.1, 1.25, 1.5, 2)})
    rates = [_updates_a_second(replace(case, cluster=cluster.of_size(size)), seed) for size in sizes]
    return Figure(
        "downpour-saturation",
        "Downpour: pushes that the server merges a second",
        "Hegde & Usmani §5.2",
        "workers",
        "pushes a second",
        {"simulated": (sizes, rates), "without a server's limit": (sizes, [k * rates[0] / sizes[0] for k in sizes])},
        marks={f"T/τ = {saturation:.1f}": saturation},
    )


def _updates_a_second(case: Scenario, seed: int) -> float:
    workers = len(case.cluster.members())
    report = simulate(replace(case, samples=STEPS * workers * case.job.train.batch_size), seed=seed).report
    return report.total.pushes / report.seconds
