"""The papers' figures by simulation, for a job and a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from daskcnn.arrays import single_threaded_blas
from daskcnn.events import EpochEnded, Event
from daskcnn.job.resolve import resolve, resolved_train
from daskcnn.planning.simulate import Scenario, constants_of, learner_of, simulate
from daskcnn.ps import RULES
from daskcnn.ps.downpour import Downpour
from daskcnn.show.report_tables import RunReport
from daskcnn.show.run_figures import Curve, Figure, stacked
from daskcnn.sim.cluster import Server, SimulatedCluster, Worker, kinds
from daskcnn.sim.learners import LAYERS, clusters_of_points
from daskcnn.sim.papers_costs import ceiling
from daskcnn.sim.simulation import Simulation
from daskcnn.sim.workload import Workload

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
    "dc-asgd": {"every": 4},
    "admm": {"every": 4},
    "local-sgd": {"every": 4},
    "parallel-sgd": {"rounds": 5},
}
"""Parameters with which every rule learns the small problem in a few epochs."""


def paper_figures(chosen: Scenario, seed: int = 0) -> Iterator[Figure]:
    """Yield all figures: of BPT-CNN, of Marques, Falcao and Alexandre, and of Hegde and Usmani."""
    yield from _accuracy(chosen, seed)
    yield time_by_samples(chosen, seed)
    yield from by_workers(chosen, seed)
    yield time_by_threads(chosen, seed)
    yield from _layer_speedups(chosen)
    yield from _layer_steps(chosen)
    yield _downpour_saturation(chosen, seed)


def _accuracy(chosen: Scenario, seed: int) -> Iterator[Figure]:
    """Yield the accuracy of every rule's center on the small problem, by epoch and by time."""
    dataset = clusters_of_points(POINTS, seed=seed)
    by_epoch, by_time = {}, {}
    for strategy, rule in RULES.items():
        if len(chosen.cluster.members()) < rule.fewest or rule.chooses_workers:  # it makes steps of bsp
            continue
        small: dict[str, Any] = {
            "data": {"validation": 400},
            "model": {"layers": LAYERS},
            "train": {"strategy": strategy, "epochs": 10, "batch_size": 32, "lr": 0.02, "seed": seed},
            "rule": SMALL_RULES.get(strategy, {}),
        }
        job = resolve(small)
        workload, log = Workload.of_job(job, samples=POINTS - 400, numbers=chosen.numbers), list[Event]()
        learner = learner_of(job, dataset, workload)
        with single_threaded_blas():
            Simulation(workload, chosen.cluster, seed=seed, learner=learner, emit=log.append).run()
        seen = [(event, event.validation) for event in log if isinstance(event, EpochEnded)]
        accuracies = [100 * (judged.accuracy or 0.0) for _, judged in seen if judged]
        by_epoch[strategy] = [event.epoch for event, judged in seen if judged], accuracies
        by_time[strategy] = [event.at or 0.0 for event, judged in seen if judged], accuracies
    title, y = "Accuracy of the center on made-up points", "validation accuracy, %"
    yield Figure("accuracy-by-epoch", title, "BPT-CNN fig. 11 in its axes alone", "epoch", y, by_epoch)
    yield Figure("accuracy-by-time", title, "", "seconds", y, by_time)


def _of_strategy(chosen: Scenario, strategy: str, partition: str) -> Scenario:
    """The same job by another rule and partitioner with their usual parameters."""
    update = {"strategy": strategy, "partition": partition, "increments": None, "early_stopping": None}
    train = chosen.job.train.model_copy(update=update)
    job = chosen.job.model_copy(update={"train": train, "rule": RULES[strategy]()})
    return replace(chosen, job=job.model_copy(update={"train": resolved_train(job)}))


def reports_of_strategies(seed: int, cases: Sequence[Scenario]) -> Iterator[tuple[str, list[RunReport]]]:
    """Yield every strategy's name and its reports of these cases."""
    for strategy, partition in STRATEGIES:
        found = [simulate(_of_strategy(case, strategy, partition), seed=seed).report for case in cases]
        yield f"{strategy} + {partition}", found


def time_by_samples(chosen: Scenario, seed: int) -> Figure:
    """Return the time of a run by its samples."""
    sizes = [max(chosen.job.train.batch_size, round(share * chosen.samples)) for share in SHARES]
    cases = [replace(chosen, samples=size) for size in sizes]
    curves = {name: (sizes, [r.seconds for r in found]) for name, found in reports_of_strategies(seed, cases)}
    return Figure("time-by-samples", "Time by the size of the data", "BPT-CNN fig. 14", "samples", "seconds", curves)


def by_workers(chosen: Scenario, seed: int) -> Iterator[Figure]:
    """Yield time, communication and balance by the number of workers, the cluster's own repeated in turn."""
    cases = [replace(chosen, cluster=chosen.cluster.of_size(size)) for size in SIZES]
    found = dict(reports_of_strategies(seed, cases))

    def curves(figure: Callable[[RunReport], float]) -> dict[str, Curve]:
        return {name: (SIZES, [figure(report) for report in reports]) for name, reports in found.items()}

    x, like = "workers", "BPT-CNN fig. 14"
    yield Figure("time-by-workers", "Time by the number of workers", like, x, "seconds", curves(lambda r: r.seconds))
    title = "Traffic of a run by the number of workers"
    moved = curves(lambda r: (r.traffic.up + r.traffic.down) / 1e6)
    yield Figure("communication-by-workers", title, "BPT-CNN fig. 15 a", x, "MB", moved)
    title = "Balance (mean busy by longest) by the number of workers"
    balance = curves(lambda r: (r.balance and r.balance.balance) or 0.0)
    yield Figure("balance-by-workers", title, "BPT-CNN fig. 15 b", x, "balance", balance)


def time_by_threads(chosen: Scenario, seed: int) -> Figure:
    """Return the time of a run by the threads of each processor."""

    def with_threads(threads: int) -> SimulatedCluster:
        workers = [each.with_threads(threads) if each.kind == "cpu" else each for each in chosen.cluster.worker]
        return chosen.cluster.model_copy(update={"worker": workers})

    cases = [replace(chosen, cluster=with_threads(threads)) for threads in THREADS]
    curves = {name: (THREADS, [r.seconds for r in found]) for name, found in reports_of_strategies(seed, cases)}
    title = "Time by the threads of a worker, by Amdahl's law"
    return Figure("time-by-threads", title, "BPT-CNN fig. 14", "threads", "seconds", curves, doubling=True)


def _layer_speedups(chosen: Scenario) -> Iterator[Figure]:
    """Yield speed-ups by the number of equal devices of each kind, over links of different speed."""
    for kind, pattern in kinds(chosen.cluster).items():
        alone = pattern.model_copy(update={"count": 1, "bandwidth": None, "latency": 0.0})
        curves = {}
        for link in LINKS:
            clusters = [equal_devices(alone, link, devices) for devices in DEVICES]
            curves[f"{link / 1e6:g} MB/s"] = DEVICES, [chosen.sharding(each).speedup() for each in clusters]
            if link == LINKS[0]:
                stars = [chosen.star(each) for each in clusters]
                curves["as the paper sends, 5 MB/s"] = DEVICES, [each.paper_speedup(link) for each in stars]
        serial = chosen.sharding(SimulatedCluster(worker=[alone])).serial
        yield Figure(
            f"layer-speedup-{kind}",
            f"Speed-up by sharded kernels, devices like {pattern.name}",
            "Marques et al. fig. 11 to 13, which are of unequal devices",
            f"{kind} devices",
            "speed-up",
            curves,
            levels={f"1/f, f = {100 * serial:.0f} %": ceiling(serial)},
        )


def equal_devices(pattern: Worker, link: float, devices: int) -> SimulatedCluster:
    """A cluster of workers like this one. link: bytes a second of each worker's link."""
    update = {"count": 1, "bandwidth": None if link == inf else link}
    return SimulatedCluster(worker=[pattern.model_copy(update=update)]).of_size(devices)


def _layer_steps(chosen: Scenario) -> Iterator[Figure]:
    """Yield a step's parts by the number of equal devices of each kind, over the slowest link."""
    for kind, pattern in kinds(chosen.cluster).items():
        steps = [chosen.sharding(equal_devices(pattern, LINKS[0], devices)).step() for devices in DEVICES]
        bars = {f"{devices}": (step.comm, step.conv, step.comp) for devices, step in zip(DEVICES, steps, strict=True)}
        title = f"A step's parts over {LINKS[0] / 1e6:g} MB/s, devices like {pattern.name}"
        yield stacked(f"layer-step-{kind}", title, "Marques et al. fig. 9 and 10", f"{kind} devices", bars)


def _downpour_saturation(chosen: Scenario, seed: int) -> Figure:
    """Updates a second by the number of equal workers, with the saturation of the server by T/τ."""
    first, server = chosen.cluster.members()[0], chosen.cluster.server
    if server.bandwidth is None and server.merge_rate is None:
        server = Server(bandwidth=LINKS[1])
    case = _of_strategy(chosen, "downpour", "udpa")
    train = case.job.train.model_copy(update={"epochs": 1})
    case = replace(case, job=case.job.model_copy(update={"train": train, "rule": Downpour(n_fetch=1 << 20)}))
    cluster = SimulatedCluster(server=server, costs=chosen.cluster.costs, worker=[first])
    saturation = constants_of(replace(case, cluster=cluster)).saturation or 1.0
    sizes = sorted({max(1, round(saturation * share)) for share in (0.05, 0.25, 0.5, 0.75, 0.9, 1, 1.1, 1.25, 1.5, 2)})
    batch = case.job.train.batch_size
    cases = [replace(case, cluster=cluster.of_size(size), samples=STEPS * size * batch) for size in sizes]
    reports = [simulate(each, seed=seed).report for each in cases]
    rates = [report.total.pushes / report.seconds for report in reports]
    return Figure(
        "downpour-saturation",
        "Downpour: pushes that the server merges a second",
        "Hegde & Usmani §5.2",
        "workers",
        "pushes a second",
        {"simulated": (sizes, rates), "without a server's limit": (sizes, [k * rates[0] / sizes[0] for k in sizes])},
        marks={f"T/τ = {saturation:.1f}": saturation},
    )
