"""Costs of an epoch for the workers of a layer-sharded run: counters that are asked for now and then, and add up.

The records of a layer-sharded run: its snapshot, what was saved, what epochs and steps came to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from daskcnn.errors import Diverged
from daskcnn.events import EpochWorker, Spent, StepsEnded
from daskcnn.nn.score import Score
from daskcnn.training.coordinator import orders
from daskcnn.training.coordinator.evaluations import Divergence, Look, looks_from
from daskcnn.training.coordinator.orders import Outbox
from daskcnn.training.coordinator.settings import LayerSettings
from daskcnn.training.coordinator.shares import Shares, ShareWatch


class StepCosts:
    """Counters since the epoch's begin.

    Attributes
    ----------
    spent : by worker.
    awaited : whether an answer is to come.
    """

    def __init__(self) -> None:
        self.spent: dict[str, Spent] = {}
        self.awaited = False
        self._ask = 0
        self._watch: ShareWatch | None = None

    def ask(self, watch: ShareWatch) -> int:
        """The number of a new ask. watch: of the shares that the workers have now."""
        self._ask += 1
        self.awaited, self._watch = True, watch
        return self._ask

    def answered(self, ask: int, spent: Mapping[str, Spent]) -> ShareWatch | None:
        """Add an answer up. Returns the watch that it was asked for; None: it is of no use any more."""
        if not self.awaited or ask != self._ask:
            return None
        self.awaited = False
        self.spent |= {worker: added_up(self.spent.get(worker), own) for worker, own in spent.items()}
        return self._watch

    def forget(self) -> None:
        """Count anew; an answer that is to come is of no use any more."""
        self.spent, self.awaited = {}, False

    def rows(self, look: Look) -> list[EpochWorker]:
        """The epoch's costs as they are logged: a worker waited whenever it did not compute."""
        samples, seconds = look.trained.samples, look.seconds
        return [
            EpochWorker(**own.model_dump(), samples=samples, wait=max(0.0, seconds - own.busy), communication=0.0)
            for own in self.spent.values()
        ]


def added_up(some: Spent | None, more: Spent) -> Spent:
    """The sum of a worker's counters of two times."""
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
    """Keeps the records of one run, and puts what is to be kept, saved and logged into the outbox.

    Attributes
    ----------
    snapshot : the state to go on from.
    good : the snapshot that was saved last, or that the run began with.
    looks : evaluations of the snapshots, and what was trained since the last one.
    costs : what the epoch has cost the workers so far.
    divergence : the learning rate's factor, and whether the run may go back.
    look : the epoch that was judged and is yet to be logged, and whether its snapshot is the best so far.
    """

    def __init__(self, settings: LayerSettings, snapshot: LayerSnapshot, out: Outbox) -> None:
        self._settings, self._out = settings, out
        self.snapshot = self.good = snapshot
        self.looks = looks_from(snapshot.book, settings.patience, settings.epochs, snapshot.epoch, 0.0)
        self.costs = StepCosts()
        self.divergence = Divergence.from_book(snapshot.book, lowers=settings.lowers)
        self.look: tuple[Look, bool] | None = None
        self._lr: float | None = None  # of the last step
        self._reported = (0, 0.0)  # at which step and when the last report of steps was

    # --- steps ---

    def trained(self, score: Score, lr: float | None) -> None:
        """Count a step that has ended."""
        self.looks.trained(score)
        self._lr = lr

    def report_from(self, step: int, now: float) -> None:
        """The next report is of the steps from here on."""
        self._reported = step, now

    def report_due(self, done: int) -> bool:
        """Whether the steps since the last report are to be reported."""
        return done - self._reported[0] >= self._settings.report_every or done >= self._settings.steps

    def report(self, done: int, last: Score, shares: Shares, now: float) -> None:
        """Log the steps since the last report. last: the score of the last of them."""
        before, since = self._reported
        self._reported = done, now
        event = StepsEnded(
            step=done,
            epoch=self._epoch_of(done),
            loss=last.loss,
            lr=self._lr,
            seconds_per_step=(now - since) / (done - before),
            workers=shares.rows(),
        )
        self._out.log(event)

    def _epoch_of(self, step: int) -> float:
        return step / self._settings.steps_per_epoch

    # --- snapshots ---

    def keep(self, step: int, validation: Score | None) -> None:
        """Make the pieces that were collected last the snapshot."""
        book = self.looks.book(self._settings.epochs) | self.divergence.book()
        self.snapshot = LayerSnapshot(step, self._epoch_of(step), book, validation)
        self._out.put(orders.Keep(step, self.snapshot.epoch, book, validation))

    def save(self) -> None:
        """Save the snapshot."""
        kept = self.good = self.snapshot
        self._out.put(orders.Save(kept.epoch, kept.book, (REPLICA,), kept.validation))

    def restore(self) -> None:
        """Go back to the snapshot that was saved last."""
        self.snapshot = self.good
        self.looks = looks_from(self.good.book, self._settings.patience, self._settings.epochs, self.good.epoch, 0.0)
        self._out.put(orders.Restore())

    @property
    def saved(self) -> int:
        """The step of the last checkpoint."""
        return self.good.step

    @property
    def ruined(self) -> Diverged | None:
        """What is wrong with the snapshot that was judged, if it is worth less than the initial weights."""
        assert self.look is not None, "judged"
        return None if self.over else self.divergence.ruined(self.look[0], self._settings.guess)

    @property
    def segment_end(self) -> int:
        """Where a segment from the snapshot ends at the latest: with the epoch, or where a checkpoint is due."""
        step, settings = self.snapshot.step, self._settings
        epoch_end = (step // settings.steps_per_epoch + 1) * settings.steps_per_epoch
        checkpoint = max(step + 1, self.saved + settings.between_checkpoints)
        return min(step + settings.snapshot_every, epoch_end, checkpoint)

    @property
    def save_due(self) -> bool:
        """Whether the snapshot is to be saved, however good it is."""
        return self.over or self.snapshot.step - self.saved >= self._settings.between_checkpoints

    @property
    def unsaved(self) -> bool:
        """Whether the snapshot is newer than the last checkpoint."""
        return self.snapshot.step > self.saved

    @property
    def over(self) -> bool:
        """Whether the snapshot is the last."""
        return self.ending(self.snapshot.step)

    def ending(self, done: int) -> bool:
        """Whether no step is left to be trained after this many."""
        return done >= self._settings.steps or self.looks.stopping

    # --- epochs ---

    def judged(self, step: int, score: Score | None, now: float) -> None:
        """End an epoch with the score of its snapshot."""
        if score is not None:
            self.looks.scored(score)
        self.look = self.looks.look(now)
        self.keep(step, score)

    def end_epoch(self, now: float) -> bool:
        """Log the epoch that was judged, and begin the next. Returns whether its snapshot is the best so far."""
        assert self.look is not None
        look, better = self.look
        settings, snapshot = self._settings, self.snapshot
        event = look.event(epoch=snapshot.epoch, epochs=settings.epochs, step=snapshot.step, lr=self._lr)
        self._out.log(event.model_copy(update={"workers": tuple(self.costs.rows(look))}))
        told = self.looks.guesses(
            look, settings.guess, epoch=snapshot.epoch, epochs=settings.epochs, steps=snapshot.step
        )
        if told is not None:
            self._out.warn(told)
        self.begin_epoch(now)
        return better

    def begin_epoch(self, now: float) -> None:
        """Count anew what is trained and what it costs."""
        self.looks.restart(now)
        self.costs.forget()
        self.look = None
