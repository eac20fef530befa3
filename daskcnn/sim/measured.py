"""A cluster as a run has measured it: medians of every worker's numbers in its log.

Costs that a log cannot tell apart stay together. All of a run's exchanges carry vectors of one length, so their time is
one constant a worker, half of it each way. Loading is part of a sample's seconds. Under a barrier the exchange is the
time of a meeting beyond the slowest worker's training at its usual speed: no two steps take equally long, and the
barrier waits for the one that is late this time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile, zip_longest
from statistics import median

from daskcnn.errors import DataError
from daskcnn.events import (
    CalibratedWorker,
    EpochEnded,
    Event,
    LinkSpeeds,
    RoundEnded,
    RunStarted,
    SamplesAllocated,
    StepsEnded,
    StrategyChosen,
    WorkerJoined,
    WorkerLeftOut,
    WorkersCalibrated,
)
from daskcnn.partition.proportions import proportional
from daskcnn.ps.local_sgd import LocalSGD
from daskcnn.sim.cluster import Costs, SimulatedCluster, Worker
from daskcnn.sim.workload import Workload
from daskcnn.training.strategy_prices import MEETING, WorkerCost, worker_cost


@dataclass(frozen=True, slots=True)
class _Lap:
    """A round of a worker. judges: True if it judged the center after it."""

    ended: RoundEnded
    judges: bool


def measured_cluster(events: Iterable[Event], workload: Workload) -> SimulatedCluster:
    """Return the cluster that a data-parallel run of this workload ran on.

    A worker that ended no round, as one that the run left out, is a pattern for others: as fast as it was calibrated,
    in the proportion of those that trained, with a link like theirs. Where one trained alone, links are those that were
    probed. If the run chose its strategy itself, the rounds of the last one count. Raises DataError if its log has
    no calibration, or no round of a worker.
    """
    log = last_life(list(events), RoundEnded)
    calibrated = calibration(log)
    workload, chosen = _as_chosen(log, workload)
    rounds: dict[str, list[_Lap]] = {row.name: [] for row in calibrated}
    for event, after in zip_longest(log[chosen:], log[chosen + 1 :]):
        if isinstance(event, RoundEnded) and event.worker in rounds:
            # without a barrier, the evaluation of the center follows the round of its worker
            rounds[event.worker].append(_Lap(event, workload.rule.barrier or isinstance(after, EpochEnded)))
    there, idle = ([row for row in calibrated if bool(rounds[row.name]) is trains] for trains in (True, False))
    if not there:
        remedy = "give a run that got further, or a cluster file"
        raise DataError(reason="no worker has ended a round in this run's log", remedy=remedy)
    parts = dict.fromkeys(rounds, workload.validation)  # validation samples with which each evaluates the center
    if workload.rule.barrier:
        shares = proportional(workload.validation, [row.images_per_second or 0.0 for row in there])
        parts = {row.name: share for row, share in zip(there, shares, strict=True)}
    steps = next((event.step for event in reversed(log) if isinstance(event, SamplesAllocated)), {})
    own_steps = {row.name: steps.get(row.name) or workload.batch_size for row in there}
    workers = [_worker(row, rounds[row.name], parts[row.name], workload, own_steps[row.name]) for row in there]
    if workload.rule.barrier:
        meeting = _meeting_seconds({w.name: (w, own_steps[w.name]) for w in workers}, rounds, workload)
        workers = [worker.model_copy(update={"latency": meeting / 2}) for worker in workers]
    gaps = _gaps(rounds, barrier=workload.rule.barrier)
    dispatch = max(0.0, median(gaps)) if gaps else 0.0
    joined = {event.worker for event in log if isinstance(event, WorkerJoined)}
    began = [worker for worker in workers if worker.name not in joined] or workers
    firsts = [_first_gap(log, rounds[w.name], w, parts[w.name], workload, own_steps[w.name]) for w in began]
    start = max(0.0, median(firsts) - dispatch)
    workers += _patterns(idle, there, workers, workload.batch_size)
    costs, links = Costs(dispatch=dispatch, start=start), _links(log) if len(there) == 1 else {}
    if links:  # it met nobody
        workers = [worker.model_copy(update=links.get(worker.name, {})) for worker in workers]
        costs = costs.model_copy(update={"exchange": MEETING})
    return SimulatedCluster(costs=costs, worker=workers)


def _as_chosen(log: Sequence[Event], workload: Workload) -> tuple[Workload, int]:
    """Return the workload by the strategy chosen last of which there is a round, and the place where it began."""
    last = max((place for place, event in enumerate(log) if isinstance(event, RoundEnded)), default=0)
    chosen = [(i, event.candidates[0]) for i, event in enumerate(log[:last]) if isinstance(event, StrategyChosen)]
    if not chosen:
        return workload, 0
    _, present = chosen[-1]
    begun = [i for i, _ in takewhile(lambda each: each[1].strategy == present.strategy, reversed(chosen))]
    return (replace(workload, rule=LocalSGD(every=present.every)) if present.every else workload), begun[-1]


def _links(log: Iterable[Event]) -> dict[str, dict[str, float | None]]:
    """Return the last measured bandwidth and latency of workers."""
    rows = (row for event in log if isinstance(event, LinkSpeeds) for row in event.workers)
    return {row.name: {"bandwidth": row.bandwidth, "latency": row.latency} for row in rows}


def _patterns(
    idle: Sequence[CalibratedWorker], there: Sequence[CalibratedWorker], workers: Sequence[Worker], batch: int
) -> list[Worker]:
    """Return the patterns of workers that did not train, beside those that did. batch: samples of calibrated steps."""
    rates = [
        own.rate(batch) / calibrated_worker(row, batch).rate(batch) for row, own in zip(there, workers, strict=True)
    ]
    usual, latency = median(rates), median(own.latency for own in workers)
    alike = {"count": 0, "latency": latency}
    return [calibrated_worker(row, batch).times_as_fast(usual).model_copy(update=alike) for row in idle]


def last_life(log: Sequence[Event], kind: type[Event]) -> Sequence[Event]:
    """Return the events since the last start of the run after which there was one of this kind; all without any.

    A run that is resumed may have other workers under the same names, and the time of its absence is no round's.
    """
    seen = False
    for place in reversed(range(len(log))):
        seen |= isinstance(log[place], kind)
        if seen and isinstance(log[place], RunStarted):
            return log[place:]
    return log


def calibration(log: Sequence[Event]) -> Sequence[CalibratedWorker]:
    """Return the workers' last measurements of themselves, those of workers that joined included.

    A run that is resumed begins anew, with the workers that are there. Raises DataError if the log has none.
    """
    calibrated = (event for event in last_life(log, WorkersCalibrated) if isinstance(event, WorkersCalibrated))
    found = {row.name: row for event in calibrated for row in event.workers}
    if not found:
        remedy = "give a run that began to train, or a cluster file"
        raise DataError(reason="this run's log has no calibration", remedy=remedy)
    return list(found.values())


def calibrated_worker(row: CalibratedWorker, batch: int | None = None) -> Worker:
    """Return the worker as its calibration alone has it. Raises DataError if that has no speed.

    batch: samples of the steps that it was calibrated with, by which the fixed part of a step is told from the others.
    """
    if row.images_per_second is None:
        raise DataError(f"worker {row.name}", "its calibration has no images_per_second", "give a cluster file")
    seconds = 1 / row.images_per_second
    cost = worker_cost(row, seconds, batch) if batch else WorkerCost(row.name, 0.0, seconds)
    known = {
        "name": row.name,
        "kind": row.device,
        "threads": row.threads or 1,
        "images_per_second": 1 / cost.each if cost.fixed else row.images_per_second,
        "step_fixed": cost.fixed,
        "conv_seconds": row.conv_seconds or None,
        "conv_fixed": row.conv_fixed or None,
        "rest_seconds": row.rest_seconds,
    }
    return Worker.model_validate(known)


def sharded_cluster(events: Iterable[Event]) -> SimulatedCluster:
    """Return the cluster of a layer-sharded run, by its calibration and its links if it measured those.

    A worker that the run left out in the end is a pattern for others. Raises DataError if its log has no calibration.
    """
    log = list(events)
    by_name, tasks = _links(log), [event.task for event in log if isinstance(event, LinkSpeeds)]
    workers = [calibrated_worker(row) for row in calibration(log)]
    out = _left_out(log)
    out = set() if out >= {worker.name for worker in workers} else out  # it did not get far
    linked = [
        worker.model_copy(update={**by_name.get(worker.name, {}), "count": int(worker.name not in out)})
        for worker in workers
    ]
    return SimulatedCluster(worker=linked, costs=Costs(task=tasks[-1] if tasks else 0.0))


def _left_out(log: Iterable[Event]) -> set[str]:
    """Return the workers that were left out, and have not come back."""
    found = set[str]()
    for event in log:
        if isinstance(event, WorkerLeftOut):
            found.add(event.worker)
        elif isinstance(event, WorkerJoined):
            found.discard(event.worker)
        elif isinstance(event, WorkersCalibrated):
            found -= {row.name for row in event.workers}
    return found


def step_seconds(events: Iterable[Event]) -> float | None:
    """Return the seconds of a whole step of a layer-sharded run; None if its log has none."""
    log = last_life(list(events), StepsEnded)
    found = [event.seconds_per_step for event in log if isinstance(event, StepsEnded)]
    return median(found[1:] or found) if found else None  # the first ones wait for what is made once


def _worker(row: CalibratedWorker, rounds: Sequence[_Lap], part: int, workload: Workload, step: int) -> Worker:
    """Return the worker at its usual speed. step: its samples of a step; the fixed part is as calibrated, in them."""
    seconds = weighted_median([(r.ended.busy / r.ended.samples, r.ended.samples) for r in rounds])
    calibrated = calibrated_worker(row, workload.batch_size)
    if calibrated.step_fixed:
        slower = step * seconds / calibrated.step(step)
        fixed, seconds = calibrated.step_fixed * slower, calibrated.seconds * slower
    else:
        fixed = 0.0
    judging = [r.ended.evaluation / judged for r in rounds if (judged := _judged(r, part, workload))]
    each = median(judging) if judging else 0.0
    exchange = median(_exchange(r, workload) for r in rounds)
    measured = {
        "images_per_second": 1 / seconds,
        "step_fixed": fixed,
        "evaluations_per_second": 1 / each if each else None,
    }
    return calibrated.model_copy(update={**measured, "latency": exchange / 2})


def weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """Return the median of (value, weight), so that a last round of few samples says little."""
    ordered = sorted(values)
    half, passed = sum(weight for _, weight in ordered) / 2, 0.0
    for value, weight in ordered:
        passed += weight
        if passed >= half:
            return value
    raise ValueError("no values")


def _judged(r: _Lap, part: int, workload: Workload) -> int:
    """Return the samples judged in a round, for pushes and for the center. part: of the center, if the log has none."""
    center = r.judges * part if r.ended.judged is None else r.ended.judged
    return _judged_for_pushes(r.ended, workload) + center


def _judged_for_pushes(ended: RoundEnded, workload: Workload) -> int:
    """Return the samples on which Q was measured in a round: all for each push, if the log does not say."""
    if ended.q_samples is not None:
        return ended.q_samples * (ended.pushes if ended.q_measured is None else ended.q_measured)
    return ended.pushes * workload.validation if workload.rule.judges_pushes else 0


def _exchange(r: _Lap, workload: Workload) -> float:
    """Return the seconds of one call of the server in this round.

    If the replica trains during exchanges, only those at the round's end were waited for.
    """
    way = workload.way.answer_bytes(workload.numbers)
    answers, pushes, whole = workload.rule.answers, r.ended.pushes, r.ended.bytes_down // way
    pulls = {"nothing": whole, "difference": max(0, whole - pushes), "center": 0}[answers]
    if workload.overlaps:
        # a replica that goes its own way pulls the center to judge it
        pushes, pulls = 1, {"nothing": 1, "difference": int(r.judges), "center": 0}[answers]
    return float(r.ended.communication) / max(1, pushes + pulls)


def _meeting_seconds(
    workers: Mapping[str, tuple[Worker, int]], rounds: Mapping[str, Sequence[_Lap]], workload: Workload
) -> float:
    """Return the seconds of a meeting beyond the slowest worker's training and its judging of the push.

    workers: each with its samples of a step. If replicas train during meetings, the one at a round's end is what was
    waited for.
    """
    together: dict[int, list[_Lap]] = defaultdict(list)
    for own in rounds.values():
        for r in own:
            together[r.ended.round].append(r)
    found = []
    for laps in together.values():
        pushes = 1 if workload.overlaps else laps[0].ended.pushes
        own_laps = [(r.ended, *workers[r.ended.worker]) for r in laps]
        judged = [_judged_for_pushes(r, workload) * worker.judging for r, worker, _ in own_laps]
        usual = max(_training(r, w, step) + each for (r, w, step), each in zip(own_laps, judged, strict=True))
        took = median(r.busy + r.wait + r.communication + each for (r, *_), each in zip(own_laps, judged, strict=True))
        found.append(float(took - usual) / max(1, pushes))
    return max(0.0, median(found))


def _gaps(rounds: Mapping[str, Sequence[_Lap]], *, barrier: bool) -> list[float]:
    """Return the seconds between each report that a round waited for and the round's first step."""
    if not barrier:
        return [_at(r.ended) - _at(before.ended) - _spent(r) for own in rounds.values() for before, r in pairwise(own)]
    last: dict[int, tuple[float, float]] = {}
    for own in rounds.values():
        for r in own:
            last[r.ended.round] = max(last.get(r.ended.round, (0.0, 0.0)), (_at(r.ended), _spent(r)))
    return [at - last[number - 1][0] - spent for number, (at, spent) in last.items() if number - 1 in last]


def _training(ended: RoundEnded, worker: Worker, step: int) -> float:
    """Return the seconds that the round's samples usually take, in steps of this many."""
    return ended.samples * (worker.seconds + worker.step_fixed / step)


def _first_gap(
    log: Sequence[Event], rounds: Sequence[_Lap], worker: Worker, part: int, workload: Workload, step: int
) -> float:
    """Return the seconds of a worker's first round, from giving out its samples, beyond those of later rounds."""
    begun = next((_at(event) for event in log if isinstance(event, SamplesAllocated)), None)
    first = rounds[0].ended
    if begun is None or first.round:
        return 0.0
    judged = _judged(rounds[0], part, workload) * worker.judging
    usual = _training(first, worker, step) + judged + first.wait + first.communication
    return float(_at(first) - begun - usual - 2 * worker.latency)  # it joined


def _spent(r: _Lap) -> float:
    return float(r.ended.busy + r.ended.wait + r.ended.communication + r.ended.evaluation)


def _at(event: Event) -> float:
    """Return the time when it was logged, in seconds. Raises DataError if the log does not say."""
    if event.at is None:
        reason = f"an event {event.kind!r} of this run's log has no time"
        raise DataError(reason=reason, remedy="give a log as a run wrote it")
    return event.at
