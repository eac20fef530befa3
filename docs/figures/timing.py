"""Figures of how long things take, by the simulator (`daskcnn.sim`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from common import BLUE, COLOURS, GREY, LIGHT, PICTURES, RED, panels

from daskcnn.events import Event, RoundEnded, RunStarted
from daskcnn.job.resolve import resolve
from daskcnn.planning.simulate import Scenario, constants_of, scenario_of, simulate
from daskcnn.runs.log import read_events
from daskcnn.sim.cluster import parse_cluster
from daskcnn.sim.measured import measured_cluster
from daskcnn.sim.simulation import Simulation
from daskcnn.sim.workload import Workload

LINKS = {"10 Mb/s": 1.25e6, "100 Mb/s": 1.25e7, "1 Gb/s": 1.25e8}
MISSING = "nowhere.zarr"
"""A path without a data set: the simulator knows the sizes of those that have a name."""


def scenario(
    strategy: str, workers: int, bandwidth: float, *, model: str = "quick", speed: float = 500, **tables: Any
) -> Scenario:
    """A job on CIFAR-10's sizes over equal workers of this speed, behind links of this many bytes a second."""
    train = {"strategy": strategy, "epochs": 1, "batch_size": 64, **tables.pop("train", {})}
    job = {"data": {"name": "cifar10", "path": MISSING}, "model": {"name": model}, "train": train, **tables}
    worker = {"name": "desk", "count": workers, "images_per_second": speed, "bandwidth": bandwidth, "latency": 0.0003}
    cluster = parse_cluster({"server": {"bandwidth": bandwidth}, "worker": [worker]})
    return scenario_of(resolve(job), cluster, "figure")


def bsp() -> Any:
    """Seconds of an epoch by the steps between two meetings."""
    figure, ax = panels()
    every = (1, 2, 4, 8, 16, 32, 64)
    for colour, (label, bandwidth) in zip(COLOURS, LINKS.items(), strict=False):
        runs = [simulate(scenario("bsp", 4, bandwidth, rule={"every": n})) for n in every]
        ax.plot(every, [run.report.seconds for run in runs], "o-", ms=4, color=colour, label=label)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(every, [str(n) for n in every])
    ax.set_yticks((25, 50, 100, 200), ["25", "50", "100", "200"], minor=False)
    ax.minorticks_off()
    ax.set(xlabel="steps between two meetings (rule.every)", ylabel="seconds of an epoch")
    ax.legend(title="links of workers and server")
    return figure


def downpour() -> Any:
    """Pushes a second by the number of workers, and the two bounds."""
    figure, ax = panels()
    constants = constants_of(_pushing(1))
    full = constants.saturation or 1.0
    workers = sorted({max(1, round(full * part)) for part in (0.1, 0.25, 0.5, 0.75, 0.9, 1, 1.15, 1.35, 1.6, 2)})
    rates = []
    for number in workers:
        report = simulate(_pushing(number)).report
        rates.append(report.total.pushes / report.seconds)
    ax.plot(workers, rates, "o", color=BLUE, label="simulated", zorder=3)
    ax.plot([0, 2 * full], [0, 2 * full / constants.T], "--", color=GREY, label="k / T")
    ax.axhline(1 / constants.tau, color=RED, ls="--", label="1 / τ")
    ax.axvline(full, color=RED, lw=0.6)
    ax.text(full, 0, f" T/τ = {full:.1f}", color=RED, va="bottom")
    ax.set(xlabel="workers, k", ylabel="pushes a second", ylim=(0, 1.25 / constants.tau), xlim=(0, 2.05 * full))
    ax.legend(loc="upper left")
    return figure


def _pushing(workers: int) -> Scenario:
    """Workers that push after every step, and pull at the end of a round only."""
    rule, train = {"n_fetch": 10**6}, {"partition": "udpa"}
    return scenario("downpour", workers, LINKS["100 Mb/s"], rule=rule, train=train)


def simulation() -> Any:
    """Busy and waiting seconds of two real runs beside the simulated ones."""
    figure, axes = panels(2, sharex=True)
    for ax, name in zip(axes, ("udpa", "idpa"), strict=True):
        measured = read_events(PICTURES / f"run-{name}.jsonl")
        real, made = spent(measured), spent(again(measured, name))
        kinds = {"run": real, "simulated": made}
        bars = [(f"{worker}, {kind}", found[worker]) for worker in real for kind, found in kinds.items()]
        busy, wait = [b for _, (b, _) in bars], [w for _, (_, w) in bars]
        ax.barh(range(len(bars)), busy, color=[BLUE, LIGHT] * len(real))
        ax.barh(range(len(bars)), wait, left=busy, color=RED, alpha=0.8)
        ax.set_yticks(range(len(bars)), [label for label, _ in bars])
        ax.invert_yaxis()
        ax.set(title=name, xlabel="seconds; red: waiting")
    return figure


def again(log: Sequence[Event], partition: str) -> list[Event]:
    """The run of a log in simulated time, on the cluster that the log measured."""
    start = next(event for event in log if isinstance(event, RunStarted))
    job = resolve({"data": {"name": "synthetic"}, "train": {"partition": partition}})
    workload = Workload.of_job(job, samples=start.samples or 1, numbers=start.parameters or 1)
    found: list[Event] = []
    Simulation(workload, measured_cluster(log, workload), emit=found.append).run()
    return found


def spent(log: Sequence[Event]) -> dict[str, tuple[float, float]]:
    """Seconds busy and waiting by worker."""
    names = {"cpu-0": "fast", "cpu-1": "middle", "cpu-2": "slow"}
    busy: dict[str, float] = defaultdict(float)
    wait: dict[str, float] = defaultdict(float)
    for event in log:
        if isinstance(event, RoundEnded):
            busy[event.worker] += event.busy
            wait[event.worker] += event.wait or 0.0
    return {names[worker]: (busy[worker], wait[worker]) for worker in sorted(busy)}
