"""The progress of a run and its records: versions, evaluations, states that a life can begin from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from daskcnn.errors import Diverged
from daskcnn.nn.score import Score
from daskcnn.partition.rounds import Rounds
from daskcnn.training.coordinator import orders
from daskcnn.training.coordinator.evaluations import Divergence, Evaluations
from daskcnn.training.coordinator.growth import StepGrowth
from daskcnn.training.coordinator.orders import Outbox
from daskcnn.training.coordinator.settings import Settings
from daskcnn.training.judging import Judging
from daskcnn.training.round_report import RoundReport


@dataclass(frozen=True, slots=True)
class Kept:
    """The state that a life begins from: the coordinator's, by a checkpoint or the last `Save`.

    step, epoch: merges, and presentations a sample. book: rounds, server epoch, evaluations, and the epochs to train;
    empty before the first save. judged: True if its center was scored.
    """

    step: int = 0
    epoch: float = 0.0
    book: Mapping[str, Any] | None = None
    judged: bool = False

    @property
    def life(self) -> int:
        """The number of the life that it was kept in."""
        return int((self.book or {}).get("server_epoch", 0))


class Records:
    """The records of one run.

    Attributes
    ----------
    kept : The state that a life can begin from.
    good : The state that was saved last, or that the run began with.
    saving : States that are being kept, the oldest first.
    version : Version of the newest center that was reported.
    judging : Sizes evaluations.
    growth : Sizes steps.
    settings : Of the run, with the rule of the present life.
    ruined : The error of a center that has diverged without a loss that is not finite, by the last evaluation.
    """

    def __init__(self, settings: Settings, kept: Kept, out: Outbox) -> None:
        self.settings, self._out = settings, out
        self.kept = self.good = kept
        self.saving = list[Kept]()
        self.divergence = Divergence(kept.book or {}, lowers=settings.lowers)
        self.begin_life(0.0)

    def begin_life(self, now: float) -> None:
        """Go back to the state kept last."""
        self.saving.clear()
        self._since = now  # when a state was kept last
        self.ruined: Diverged | None = None
        self.version = self.kept.step
        book = self.kept.book or {}
        settings, epoch = self.settings, self.kept.epoch
        self.evaluations = Evaluations(
            book, settings.patience, settings.epochs, epoch, now, validation=settings.validation
        )
        self.judging = Judging(
            book, settings.validation, sized=settings.sized, even=settings.even, keeps_best=settings.keeps_best
        )
        self.growth = StepGrowth(settings, book)

    def epoch(self, rounds: Rounds) -> float:
        """Return the presentations a sample so far."""
        return rounds.done / self.settings.samples

    def up_to_date(self, rounds: Rounds) -> bool:
        """Return True if the state kept last has all rounds that have ended, and was judged."""
        return self.kept.judged and self.kept.epoch >= self.epoch(rounds)

    def evaluated(self, report: RoundReport, rounds: Rounds, life: int, now: float) -> None:
        """Log the center's score after a synchronous round, or an epoch; save a checkpoint if due.

        report: of the replica that ended it. rounds: with the samples of the steps that were made.
        """
        found, better = self.evaluations.end_interval(now)
        epoch, settings = self.epoch(rounds), self.settings
        of_run: dict[str, Any] = {"epoch": epoch, "epochs": settings.epochs, "step": self.version}
        step_samples = rounds.batch_size if self.growth.grows else None
        self._out.log(found.event(**of_run, lr=report.lr, noise=report.noise, step_samples=step_samples))
        steps = rounds.done / (settings.batch_size * (1 if settings.rule.shares_steps else len(rounds.seconds)))
        if told := self.evaluations.guesses(found, settings.guess, epoch=epoch, steps=steps):
            self._out.warn(told)
        if not (rounds.ended or self.evaluations.stopping):
            self.ruined = self.divergence.ruined(found, settings.guess)
        if self.ruined:  # such weights are none to go back to
            return
        if better or rounds.ended or epoch - self.kept.epoch >= settings.checkpoint_every:
            self.save(found.center if found.whole else None, rounds, life, judged=found.whole)
            self._since = now

    def snapshot_if_due(self, rounds: Rounds, life: int, now: float) -> None:
        """Keep the state as it is if that was long ago: what comes after is trained again if the server is lost."""
        if now - self._since > self.settings.snapshot_every and not (self.saving or self.ruined or rounds.ended):
            self.save(None, rounds, life, judged=False)
            self._since = now

    def save(self, validation: Score | None, rounds: Rounds, life: int, *, judged: bool = True) -> None:
        """Keep the state as it is now."""
        epoch, book = self.epoch(rounds), self._book(rounds, life)
        self.saving.append(Kept(0, epoch, book, judged))
        self._out.put(orders.Save(epoch, book, rounds.workers, validation))

    def saved(self, step: int) -> None:
        """Make the oldest of the states that are being kept the one to begin from. step: its merges."""
        self.kept = self.good = replace(self.saving.pop(0), step=step)

    def restore(self) -> None:
        """Go back to the state that was saved last: a center that was rescued may be spoilt."""
        self.kept = self.good
        self._out.put(orders.Restore())

    def begun(self) -> None:
        """Note that a life has begun. A center that was rescued for it is of no use to the next one."""
        self.kept = self.good

    def rescued(self, version: int, rounds: Rounds, life: int) -> None:
        """Let a life begin from this center, which a worker still has, with the rounds as they are now."""
        self.version = version
        self.kept = Kept(version, self.epoch(rounds), self._book(rounds, life), judged=False)

    def _book(self, rounds: Rounds, life: int) -> dict[str, Any]:
        own = self.evaluations.book() | self.divergence.book() | self.judging.book() | self.growth.book()
        return {"rounds": rounds.to_dict(), "server_epoch": life, **own}
