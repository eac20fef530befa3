"""The gain of a run: its time to its best evaluation, against that of its fastest worker by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from daskcnn.events import CalibratedWorker, RoundNumbers
from daskcnn.partition.step_shares import fixed_samples
from daskcnn.show.history import EvaluationRow, History

LAYER = "layer"


@dataclass(frozen=True, slots=True)
class AloneEstimate:
    """The time of a run to its best evaluation, and that which its fastest worker would expect by itself.

    accuracy: of that evaluation; None for a network without one, and then it is the last. seconds: of the run until
    then; alone: of the worker, for as many samples. at_most: it may need fewer, as the run's steps are not those of one
    machine.
    """

    worker: str
    epoch: float
    accuracy: float | None
    seconds: float
    alone: float
    at_most: bool


def surely(look: EvaluationRow) -> float:
    """Return the accuracy that an evaluation shows the weights to have: two standard errors less, if of a part."""
    chance = 0.0 if look.judged is None else 2 * (look.validation_error or 0.0)
    return (look.validation_accuracy or 0.0) - chance


def alone_of(run: History) -> AloneEstimate | None:
    """Return the estimate by what workers measured of themselves; None for a run of one worker, or without evaluation.

    A worker is as fast as it was calibrated, or slower by as much as its rounds were. So the estimate takes the speeds
    of the run: a worker that shares its host with others may be slower because of them. A sample that is judged takes a
    third of one that is trained on.
    """
    start = run.start
    if not (run.looks and start.samples):
        return None
    rates = {name: _rate(run, row) for name, row in run.calibrated.items()}
    fastest = max(rates, key=lambda name: rates[name], default="")
    if not rates.get(fastest) or {row.worker for row in run.rows} <= {fastest}:
        return None
    sure = [surely(look) for look in run.looks]
    known = any(look.validation_accuracy is not None for look in run.looks)
    last = sure.index(max(sure)) if known else len(sure) - 1
    best, looks = run.looks[last], run.looks[: last + 1]
    shares = start.step_samples is not None and start.step_samples == start.batch_size
    apart = run.choice is not None and run.choice.candidates[0].needed > 1
    judged = sum(start.validation_samples or 0 if look.judged is None else look.judged for look in looks)
    return AloneEstimate(
        worker=fastest,
        epoch=best.epoch,
        accuracy=best.validation_accuracy,
        seconds=best.at,
        alone=(best.epoch * start.samples + judged / 3) / rates[fastest],
        at_most=start.strategy != LAYER and (apart or not shares),
    )


def _rate(run: History, row: CalibratedWorker) -> float:
    """The images a second of a worker by itself. Rounds of sharded layers do not tell its speed in whole steps."""
    rate, own = row.images_per_second or 0.0, [each.numbers for each in run.rows if each.worker == row.name]
    if not rate or run.start.strategy == LAYER:
        return rate
    busy, expected = sum(each.busy for each in own), _expected(row, own, 1 / rate, run.start.batch_size or 1)
    return rate / max(1.0, busy / expected) if expected else rate


def _expected(row: CalibratedWorker, own: Sequence[RoundNumbers], seconds: float, batch: int) -> float:
    """The seconds of these rounds at the calibrated speed. Where steps are shared each has a push of its own."""
    fixed = fixed_samples(row.step_fixed, seconds, batch)
    taken = sum(each.samples + fixed * max(each.pushes, each.samples / batch) for each in own)
    return taken * seconds / (1 + fixed / batch)
