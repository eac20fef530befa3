"""A cluster as a run has measured it: medians of what its log says of every worker.

What a log cannot tell apart stays together. All of a run's exchanges carry vectors of one length, so what they took is
one constant a worker, half of it each way. Loading is part of a sample's seconds. Under a barrier there is a wait that
even the last to come had (no two steps take equally long): it counts as part of the exchange.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import Any

from daskcnn.errors import DataError
from daskcnn.partition.sharding import proportional
from daskcnn.sim.cluster import Cluster, Costs, Worker
from daskcnn.sim.workload import Workload

Event = Mapping[str, Any]
NOTHING = 1e-3
"""Seconds in which nobody has judged anything."""


def measured_cluster(events: Iterable[Event], workload: Workload) -> Cluster:
    """The cluster that a data-parallel run of this workload ran on.

    Raises DataError where its log has no calibration, or no round of a worker.
    """
    log = list(events)
    calibrated = calibration(log)
    rounds: dict[str, list[Event]] = {row["name"]: [] for row in calibrated}
    for event in log:
        if event["event"] == "round" and event["worker"] in rounds:
            rounds[event["worker"]].append(event)
    there = [row for row in calibrated if rounds[row["name"]]]
    if not there:
        raise DataError("no worker has ended a round in this run's log; give a run that got further, or a cluster file")
    parts = _judged_parts(there, workload)
    waits = _shared_waits(rounds) if workload.rule.barrier else {}
    workers = [_worker(row, rounds[row["name"]], parts[row["name"]], waits, workload) for row in there]
    return Cluster(costs=Costs(dispatch=_dispatch(rounds, barrier=workload.rule.barrier)), worker=workers)


def calibration(log: Sequence[Event]) -> list[dict[str, Any]]:
    """What the workers measured of themselves, the last time. Raises DataError where the log has nothing of it."""
    found = [event for event in log if event["event"] == "calibration"]
    if not found:
        raise DataError("this run's log has no calibration; give a run that began to train, or a cluster file")
    return list(found[-1]["workers"])


def calibrated_worker(row: Mapping[str, Any]) -> Worker:
    """The worker as its calibration alone has it."""
    return Worker(
        name=row["name"],
        kind=row["device"],
        threads=row["threads"],
        images_per_second=row["images_per_second"],
        conv_seconds=row.get("conv_seconds") or None,
    )


def sharded_cluster(events: Iterable[Event]) -> Cluster:
    """The cluster of a layer-sharded run, by its calibration alone. Raises DataError where its log has none."""
    return Cluster(worker=[calibrated_worker(row) for row in calibration(list(events))])


def step_seconds(events: Iterable[Event]) -> float | None:
    """Seconds of a step of a layer-sharded run, links and tasks and all; None where its log has none."""
    found = [event["seconds_per_step"] for event in events if event["event"] == "steps"]
    return median(found[1:] or found) if found else None  # the first ones wait for what is made once


def _worker(
    row: Mapping[str, Any], rounds: Sequence[Event], part: int, waits: Mapping[int, float], workload: Workload
) -> Worker:
    seconds = weighted_median([(r["busy"] / r["samples"], r["samples"]) for r in rounds])
    judging = _judging(rounds, part, workload)
    exchange = median(_exchange(r, waits.get(r["round"], 0.0), workload) for r in rounds)
    update = {
        "images_per_second": 1 / seconds,
        "evaluations_per_second": 1 / judging if judging else None,
        "latency": exchange / 2,
    }
    return calibrated_worker(row).model_copy(update=update)


def weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """The median of (value, weight), so that a last round of few samples says little."""
    ordered = sorted(values)
    half, passed = sum(weight for _, weight in ordered) / 2, 0.0
    for value, weight in ordered:
        passed += weight
        if passed >= half:
            return value
    raise ValueError("no values")


def _judged_parts(there: Sequence[Mapping[str, Any]], workload: Workload) -> dict[str, int]:
    """How many validation samples each worker judges the center by, when it does."""
    names = [row["name"] for row in there]
    if not workload.rule.barrier:
        return dict.fromkeys(names, workload.validation)
    speeds = [row["images_per_second"] for row in there]
    return dict(zip(names, proportional(workload.validation, speeds), strict=True))


def _judging(rounds: Sequence[Event], part: int, workload: Workload) -> float | None:
    """Seconds a sample takes to be judged; None where nothing was."""
    longest, found = max(r["evaluation"] for r in rounds), []
    for r in rounds:
        judged = r.get("pushes", 1) * workload.validation if workload.judges_pushes else 0
        if workload.rule.barrier or not judged:
            judged += part
        if judged and r["evaluation"] > longest / 10:  # where nothing is judged, a clock was read twice
            found.append(r["evaluation"] / judged)
    return median(found) if found and longest > NOTHING else None


def _exchange(r: Event, shared_wait: float, workload: Workload) -> float:
    """Seconds of one call of the server in this round.

    Where exchanges go on while the replica trains, only those at the round's end were waited for.
    """
    pushes, whole = r.get("pushes", 1), r["bytes_down"] // workload.nbytes
    pulls = whole if workload.rule.answers == "nothing" else max(0, whole - pushes)
    if workload.overlaps:
        judged = r["evaluation"] > NOTHING  # a replica that goes its own way has pulled the center for it
        pushes, pulls = 1, {"nothing": 1, "difference": int(judged), "center": 0}[workload.rule.answers]
    return (r["communication"] + shared_wait) / max(1, pushes + pulls)


def _shared_waits(rounds: Mapping[str, Sequence[Event]]) -> dict[int, float]:
    """The wait that all workers had, by the number of the round."""
    found: dict[int, list[float]] = defaultdict(list)
    for own in rounds.values():
        for r in own:
            found[r["round"]].append(r["wait"])
    return {number: min(waits) for number, waits in found.items()}


def _dispatch(rounds: Mapping[str, Sequence[Event]], *, barrier: bool) -> float:
    """Seconds between the report that a round waits for and the round's first step."""
    gaps = []
    if barrier:
        last: dict[int, tuple[float, float]] = {}
        for own in rounds.values():
            for r in own:
                last[r["round"]] = max(last.get(r["round"], (0.0, 0.0)), (seconds_of(r["at"]), _spent(r)))
        gaps = [at - last[n - 1][0] - spent for n, (at, spent) in last.items() if n - 1 in last]
    else:
        for own in rounds.values():
            for before, r in pairwise(own):
                gaps.append(seconds_of(r["at"]) - seconds_of(before["at"]) - _spent(r))
    return max(0.0, median(gaps)) if gaps else 0.0


def _spent(r: Event) -> float:
    return float(r["busy"] + r["wait"] + r["communication"] + r["evaluation"])


def seconds_of(at: str | float) -> float:
    """An event's time in seconds: a log has dates, a simulation seconds."""
    return datetime.fromisoformat(at).timestamp() if isinstance(at, str) else float(at)
