"""The records of a layer-sharded run: its snapshot, the last one saved, its evaluations, and the costs of an epoch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from daskcnn.errors import Diverged
from daskcnn.events import EpochWorker, Spent, StepsEnded, StepWorker
from daskcnn.nn.score import Score
from daskcnn.training.coordinator import orders
from daskcnn.training.coordinator.evaluations import NOTHING, Divergence, Evaluation, Evaluations
from daskcnn.training.coordinator.orders import Outbox
from daskcnn.training.coordinator.settings import LayerSettings
from daskcnn.training.coordinator.shares import Shares, ShareWatch
from daskcnn.training.judging import JudgedPart, Judging


class StepCosts:
    """The workers' counters since the epoch began. They are asked for now and then, and add up."""

    def __init__(self) -> None:
        self.spent: dict[str, Spent] = {}
        self.awaited = False
        self._ask = 0
        self._watch: ShareWatch | None = None
        self._since: dict[str, float] = {}  # of each worker that has kernels: from when on in this epoch
        self._before: dict[str, float] = {}  # seconds that those had some that have none now

    def ask(self, watch: ShareWatch) -> int:
        """Return the number of a new ask. watch: that of the shares that the workers have now."""
        self._ask += 1
        self.awaited, self._watch = True, watch
        return self._ask

    def answered(self, ask: int, spent: Mapping[str, Spent]) -> ShareWatch | None:
        """Add an answer up. Returns the watch that it was asked for; None if it is of no use any more."""
        if not self.awaited or ask != self._ask:
            return None
        self.awaited = False
        self.spent |= {worker: added_up(self.spent.get(worker), own) for worker, own in spent.items()}
        return self._watch

    def forget(self, now: float) -> None:
        """Count anew; an answer that is to come is of no use any more."""
        self.spent, self.awaited = {}, False
        self._since, self._before = dict.fromkeys(self._since, now), {}

    def shared(self, workers: Collection[str], now: float) -> None:
        """Note that these workers have the kernels from now on."""
        for worker in self._since.keys() - workers:
            self.gone(worker, now)
        for worker in workers:
            self._since.setdefault(worker, now)

    def gone(self, worker: str, now: float) -> None:
        """Note that this worker has no kernels any more."""
        self._before[worker] = self._there(worker, now)
        self._since.pop(worker, None)

    def rows(self, epoch: Evaluation, now: float) -> list[EpochWorker]:
        """Return the epoch's costs as they are logged: a worker that was there waited whenever it did not compute."""
        samples = epoch.trained.samples
        waits = {worker: min(epoch.seconds, self._there(worker, now)) - own.busy for worker, own in self.spent.items()}
        return [
            EpochWorker(**own.model_dump(), samples=samples, wait=max(0.0, waits[worker]), communication=0.0)
            for worker, own in self.spent.items()
        ]

    def _there(self, worker: str, now: float) -> float:
        return self._before.get(worker, 0.0) + now - self._since.get(worker, now)


def added_up(some: Spent | None, more: Spent) -> Spent:
    """Return the sum of a worker's counters of two times."""
    if some is None:
        return more
    return Spent(
        name=more.name,
        busy=some.busy + more.busy,
        conv_seconds=_sum(some.conv_seconds, more.conv_seconds),
        conv_samples=_sum(some.conv_samples, more.conv_samples),
        bytes_up=some.bytes_up + more.bytes_up,
        bytes_down=some.bytes_down + more.bytes_down,
    )


def _sum(a: Mapping[str, float], b: Mapping[str, Any]) -> dict[str, float]:
    return {key: a.get(key, 0) + b.get(key, 0) for key in {**a, **b}}


REPLICA = "layer"
"""The name of the only replica."""


@dataclass(frozen=True, slots=True)
class LayerSnapshot:
    """The state that a life begins from, without its arrays: fields as in `Keep`."""

    step: int = 0
    epoch: float = 0.0
    book: Mapping[str, Any] = field(default_factory=dict)
    validation: Score | None = None


class LayerRecords:
    """Keeps the records of one run, and gives the orders to keep, save and log.

    Attributes
    ----------
    snapshot : The state to go on from.
    good : The snapshot that was saved last, or that the run began with.
    evaluations : Evaluations of the snapshots.
    costs : The epoch's cost to the workers so far.
    evaluated : The epoch that was judged and is yet to be logged, and True if its snapshot is the best so far.
    """

    def __init__(self, settings: LayerSettings, snapshot: LayerSnapshot, out: Outbox) -> None:
        self._settings, self._out = settings, out
        self.snapshot = self.good = snapshot
        self._begin_from(snapshot)
        self.costs = StepCosts()
        self.divergence = Divergence(snapshot.book, lowers=settings.lowers)
        self.evaluated: tuple[Evaluation, bool] | None = None
        self._lr: float | None = None  # of the last step
        self._judging_since = self._judged_at = 0.0
        self._reported = (0, 0.0)  # at which step and when the last report of steps was

    def _begin_from(self, snapshot: LayerSnapshot) -> None:
        """Go on with the evaluations of this snapshot."""
        self._sums = 0, NOTHING  # of its epoch, up to the snapshot
        settings, book, epoch = self._settings, snapshot.book, snapshot.epoch
        self.evaluations = Evaluations(
            book, settings.patience, settings.epochs, epoch, 0.0, validation=settings.validation
        )
        self.judging = Judging(
            book, settings.validation, sized=settings.sized, even=settings.even, keeps_best=settings.keeps_best
        )

    # --- steps ---

    def trained(self, score: Score, lr: float | None) -> None:
        """Count a step that has ended."""
        self.evaluations.trained(score)
        self._lr = lr

    def report_from(self, step: int, now: float) -> None:
        """Let the next report be of the steps from here on."""
        self._reported = step, now

    def report_due(self, done: int) -> bool:
        """Return True if the steps since the last report are to be reported."""
        return done - self._reported[0] >= self._settings.report_every or done >= self._settings.steps

    def report(self, done: int, last: Score, shares: Shares, now: float) -> None:
        """Log the steps since the last report. last: the score of the last of them."""
        before, since = self._reported
        self._reported = done, now
        epoch, seconds = done / self._settings.steps_per_epoch, (now - since) / (done - before)
        rows = [StepWorker(name=worker, kernels=own) for worker, own in shares.by_worker().items()]
        event = StepsEnded(step=done, epoch=epoch, loss=last.loss, lr=self._lr, seconds_per_step=seconds, workers=rows)
        self._out.log(event)

    # --- snapshots ---

    def keep(self, step: int, validation: Score | None, *, to_judge: bool) -> None:
        """Make the pieces collected last the snapshot. to_judge: it ends an epoch, and is yet to be judged."""
        book = self.evaluations.book() | self.divergence.book() | self.judging.book()
        book |= {"to_judge": True} if to_judge else {}
        self.snapshot = LayerSnapshot(step, step / self._settings.steps_per_epoch, book, validation)
        self._sums = self.evaluations.sums
        self._out.put(orders.Keep(step, self.snapshot.epoch, book, validation))

    def save(self) -> None:
        """Save the snapshot."""
        kept = self.good = self.snapshot
        self._out.put(orders.Save(kept.epoch, kept.book, (REPLICA,), kept.validation))

    def restore(self) -> None:
        """Go back to the snapshot that was saved last."""
        self.snapshot = self.good
        self._begin_from(self.good)
        self._out.put(orders.Restore())

    @property
    def saved(self) -> int:
        """The step of the last checkpoint."""
        return self.good.step

    @property
    def ruined(self) -> Diverged | None:
        """The error of the snapshot that was judged, if it is worth less than the initial weights."""
        assert self.evaluated is not None, "judged"
        return None if self.over else self.divergence.ruined(self.evaluated[0], self._settings.guess)

    @property
    def segment_end(self) -> int:
        """The last step of a segment from the snapshot: with the epoch, or where a checkpoint is due."""
        step, settings = self.snapshot.step, self._settings
        epoch_end = (step // settings.steps_per_epoch + 1) * settings.steps_per_epoch
        checkpoint = max(step + 1, self.saved + settings.between_checkpoints)
        return min(step + settings.chain, epoch_end, checkpoint)

    @property
    def save_due(self) -> bool:
        """True if the snapshot is to be saved, however good it is."""
        return self.over or self.snapshot.step - self.saved >= self._settings.between_checkpoints

    @property
    def unsaved(self) -> bool:
        """True if the snapshot is newer than the last checkpoint."""
        return self.snapshot.step > self.saved

    @property
    def to_judge_first(self) -> bool:
        """True if the snapshot ends an epoch that was not judged: a signal or a loss came before it was."""
        return bool(self.snapshot.book.get("to_judge"))

    @property
    def over(self) -> bool:
        """True if the snapshot is the last."""
        return self.ending(self.snapshot.step)

    def ending(self, done: int) -> bool:
        """Return True if no step is left to be trained after this many."""
        return done >= self._settings.steps or self.evaluations.stopping

    # --- epochs ---

    def judged_part(self, step: int, workers: Mapping[str, float], now: float) -> JudgedPart:
        """Return the samples to judge the snapshot on. workers: seconds of a sample of each, which judge together."""
        settings, samples = self._settings, max(1, self.evaluations.samples)
        self._judging_since, alone = now, 1 / sum(1 / seconds for seconds in workers.values())
        each = (now - self.evaluations.begun) / samples
        cost = self.judging.cost(REPLICA, samples, each, own=False, share=1.0, alone=alone)
        _, size = self.judging.sizes([cost], last=step >= settings.steps)
        return JudgedPart.of(settings.samples, size, settings.validation, step // settings.steps_per_epoch)

    def judged(self, step: int, score: Score | None, now: float) -> None:
        """End an epoch with the score of its snapshot."""
        if score is not None:
            self.evaluations.scored(score)
            begun, judged = self.evaluations.begun, self._judging_since
            busy, samples = judged - begun, self.evaluations.samples
            self.judging.add(
                REPLICA, samples, busy, own=0, center=score.samples, evaluation=now - judged, paid=(REPLICA,)
            )
        self.evaluated, self._judged_at = self.evaluations.end_interval(now), now
        self.keep(step, score if self.evaluated[0].whole else None, to_judge=False)

    def end_epoch(self, now: float) -> bool:
        """Log the epoch that was judged, and begin the next. Returns True if its snapshot is the best so far."""
        assert self.evaluated is not None
        found, better = self.evaluated
        epoch, step, settings = self.snapshot.epoch, self.snapshot.step, self._settings
        event = found.event(epoch=epoch, epochs=settings.epochs, step=step, lr=self._lr)
        self._out.log(event.model_copy(update={"workers": tuple(self.costs.rows(found, self._judged_at))}))
        if told := self.evaluations.guesses(found, settings.guess, epoch=epoch, steps=step):
            self._out.warn(told)
        self.begin_epoch(now)
        return better

    def go_back(self, now: float) -> None:
        """Count training from the snapshot on. Time and costs of an epoch that it lies within go on."""
        if not self._sums[0]:
            self.begin_epoch(now)
            return
        self.evaluations.go_back(self._sums)
        self.costs.awaited = False
        self.evaluated = None

    def begin_epoch(self, now: float) -> None:
        """Count training and its costs anew."""
        self.evaluations.restart(now)
        self.costs.forget(now)
        self.evaluated = None
