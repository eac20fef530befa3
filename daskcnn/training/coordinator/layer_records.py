"""The records of a layer-sharded run: its snapshot, what was saved, what epochs and steps came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from daskcnn.errors import Diverged
from daskcnn.events import StepsEnded
from daskcnn.nn.score import Score
from daskcnn.training.coordinator import orders
from daskcnn.training.coordinator.costs import StepCosts
from daskcnn.training.coordinator.divergence import Divergence
from daskcnn.training.coordinator.looks import Look, looks_from
from daskcnn.training.coordinator.outbox import Outbox
from daskcnn.training.coordinator.settings import LayerSettings
from daskcnn.training.coordinator.shares import Shares

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
