"""Looks at the center: what was trained since the last one, what the center scored, and when to stop early."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from daskcnn.events import EpochEnded
from daskcnn.nn.score import Score
from daskcnn.training.guessing import Guessing
from daskcnn.training.reports import RoundReport

NOTHING = Score(0.0, 0, 0)


@dataclass(frozen=True, slots=True)
class Look:
    """An interval that has ended.

    Attributes
    ----------
    trained : loss and right answers while training. center : those of the center on validation samples.
    samples, seconds : presented in the interval, and its length.
    """

    trained: Score
    center: Score
    samples: int
    seconds: float

    def event(self, *, epoch: float, epochs: float, step: int, lr: float | None) -> EpochEnded:
        """The interval as it is logged."""
        trained = self.trained.judged
        return EpochEnded(
            epoch=epoch,
            epochs=epochs,
            step=step,
            loss=trained.loss,
            accuracy=trained.accuracy,
            validation=self.center.judged,
            samples_per_second=self.samples / self.seconds if self.seconds else 0.0,
            lr=lr,
            seconds=self.seconds,
        )


_SOON = 3
"""Epochs before a run is told that it is no better than guessing; a run of two is told at its end, one of one never."""


class Looks:
    """Behind a barrier the center is judged at the end of every round, by all; else once an epoch, by one replica.

    Attributes
    ----------
    best : the best quality on the validation samples so far (`Score.quality`).
    worse : looks since.
    mark : the next whole epoch; an asynchronous run judges its center when rounds up to there are given out.
    told : whether the run was told that it is no better than guessing.
    """

    def __init__(
        self, *, patience: int | None, epoch: float, best: float, worse: int, now: float, told: bool = False
    ) -> None:
        self.patience, self.best, self.worse = patience, best, worse
        self.mark, self.told = math.floor(epoch) + 1, told
        self._begin(now)

    def book(self, epochs: int) -> dict[str, Any]:
        """What a checkpoint keeps of the looks. epochs: those to train."""
        return {"best": self.best, "worse": self.worse, "epochs": epochs, "told": self.told}

    def _begin(self, now: float) -> None:
        self._begun, self._samples, self.judged = now, 0, False
        self._trained = self._center = NOTHING

    @property
    def stopping(self) -> bool:
        """Whether the run has gone for too long without a better center."""
        return self.patience is not None and self.worse >= self.patience

    def due(self, issued: float) -> bool:
        """Whether a round that is given out now is to judge the center at its end. issued: epochs given out so far."""
        if issued < self.mark:
            return False
        self.mark = math.floor(issued) + 1
        return True

    def add(self, report: RoundReport, *, judged: bool) -> None:
        """Count a round that has ended. judged: its replica was asked to judge the center."""
        self._samples += report.samples
        self.judged |= judged
        if report.score is not None:
            self._trained += report.score
        if report.center is not None:
            self._center += report.center

    def trained(self, score: Score) -> None:
        """Count samples that were trained on."""
        self._samples += score.samples
        self._trained += score

    def scored(self, score: Score) -> None:
        """Count samples that the center was judged on."""
        self._center += score
        self.judged = True

    def guesses(self, look: Look, guess: Guessing | None, *, epoch: float, epochs: int, steps: float) -> str | None:
        """Return a warning where the run is no better than guessing after some epochs; once.

        Parameters
        ----------
        guess : None: guessing has no accuracy.
        steps : that each replica has made so far.
        """
        if (
            guess is None
            or self.told
            or epoch < min(_SOON, max(2, epochs))
            or not guess.like(look.center, look.trained)
        ):
            return None
        self.told = True
        return guess.warning(look.center, epoch, steps)

    def restart(self, now: float) -> None:
        """Forget what was counted since the last look: it is trained again."""
        self._begin(now)

    def look(self, now: float) -> tuple[Look, bool]:
        """End the interval: what came of it, and whether the center is better than all before."""
        found = Look(self._trained, self._center, self._samples, now - self._begun)
        better = found.center.samples > 0 and found.center.quality > self.best
        if found.center.samples:
            self.best, self.worse = max(self.best, found.center.quality), 0 if better else self.worse + 1
        self._begin(now)
        return found, better


def looks_from(book: Mapping[str, Any], patience: int | None, epochs: int, epoch: float, now: float) -> Looks:
    """Return the looks that go on from a checkpoint's book, at this epoch of a run of `epochs` epochs.

    A run that was given another number of epochs since is patient anew.
    """
    best, worse = float(book.get("best", 0.0)), int(book.get("worse", 0))
    if book.get("epochs", epochs) != epochs:
        worse = 0
    told = bool(book.get("told", False))
    return Looks(patience=patience, epoch=epoch, best=best, worse=worse, now=now, told=told)
