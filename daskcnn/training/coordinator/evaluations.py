"""Guessing: what it comes to on the validation samples, and whether a run is better.

Looks at the center: what was trained since the last one, what the center scored, and when to stop early.

Divergence: a run goes back to its last good weights once, with a lower learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from daskcnn.errors import Diverged
from daskcnn.events import EpochEnded
from daskcnn.job.network import reconstructs, training_samples
from daskcnn.job.tables import Job
from daskcnn.nn.losses import USUAL
from daskcnn.nn.score import Score
from daskcnn.store import Dataset
from daskcnn.training.round_report import RoundReport

_SURE = 2.0
"""Standard errors that an accuracy lies above that of guessing before the network counts as better."""
_FEW = 10
"""Validation samples from which on a guess can be told from more."""
_FAR = 2.0
"""Times the loss of guessing from which a network that guesses is worth less than its initial weights."""


@dataclass(frozen=True, slots=True)
class Guessing:
    """A guess that goes by the classes' shares alone.

    Attributes
    ----------
    share : of the commonest class: the accuracy of naming it always.
    loss : of giving each class its share as probability; None where the loss is not the softmax's.
    """

    share: float
    loss: float | None = None

    def like(self, *scores: Score) -> bool:
        """Return whether no score is clearly better. Without samples it is not known, and counts as better."""
        return all(map(self._is_like, scores))

    def _is_like(self, score: Score) -> bool:
        if not score.samples or score.accuracy is None:
            return False
        error = math.sqrt(self.share * (1 - self.share) / score.samples)
        return score.accuracy <= self.share + _SURE * error

    def ruined(self, center: Score, trained: Score) -> bool:
        """Return whether the center guesses, and the losses are far above those of guessing: it has diverged."""
        if self.loss is None or not center.samples or not trained.samples:
            return False
        far = all(not score.loss <= _FAR * self.loss for score in (center, trained))
        return far and self.like(center)

    def warning(self, center: Score, epoch: float, steps: float) -> str:
        """Return what the log says of a run that guesses. steps: that each replica has made so far."""
        commonest = f"{100 * self.share:.1f} % are of the commonest class"
        reasons = (
            f"too few steps ({steps:.0f} so far; train more epochs, or lower train.batch_size)",
            "an unsuitable learning rate (try a third of train.lr, and three times)",
            "labels that belong to other images (look with `daskcnn data show`)",
        )
        return (
            f"after {epoch:.3g} epochs the network is no better than guessing: {_right(center)} % of the validation "
            f"samples are right, and {commonest}. Likely reasons: {', '.join(reasons)}"
        )


def _right(score: Score) -> str:
    assert score.accuracy is not None, "asked of scores that have one"
    return f"{100 * score.accuracy:.1f}"


def guessing_on(job: Job, dataset: Dataset) -> Guessing | None:
    """The guess on the job's validation samples; None where they are few, or are not of several classes."""
    if dataset.labels != "classes" or reconstructs(job):
        return None
    labels = np.asarray(dataset.train.labels()[training_samples(job, dataset) :])
    shares = np.unique(labels, return_counts=True)[1] / len(labels)
    if len(labels) < _FEW or len(shares) < 2:
        return None
    softmax = (job.train.loss or USUAL[dataset.labels]) == "softmax"
    return Guessing(float(shares.max()), math.log(len(dataset.classes)) if softmax else None)


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


LOWER = 1 / 3
"""Factor of the learning rate behind a divergence."""


@dataclass
class Divergence:
    """How often a run may still go back, and at which rate it trains.

    Attributes
    ----------
    lowers : whether the job lets it go back.
    scale : factor of the learning rate; below 1 once the run went back.
    """

    lowers: bool
    scale: float = 1.0

    @classmethod
    def from_book(cls, book: Mapping[str, Any], *, lowers: bool) -> Divergence:
        """What a checkpoint's book says: a run that went back before it was resumed does not go back again."""
        return cls(lowers, float(book.get("rate_scale", 1.0)))

    def book(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"rate_scale": self.scale}

    def goes_back(self) -> bool:
        """Whether the run goes back now; if so at a third of the rate."""
        if not self.lowers or self.scale < 1.0:
            return False
        self.scale *= LOWER
        return True

    def ruined(self, look: Look, guess: Guessing | None) -> Diverged | None:
        """What is wrong with a center that is worth less than the initial weights, where the run may go back."""
        if not self.lowers or self.scale < 1.0:
            return None
        finite = math.isfinite(look.center.loss_sum)
        if finite and (guess is None or not guess.ruined(look.center, look.trained)):
            return None
        value = f"loss = {look.center.loss:.4g} on the validation samples"
        return Diverged(value, "training diverged", "lower train.lr")

    def warning(self, error: Diverged, place: str) -> str:
        """What the log says where the run goes back. place: the state that it goes back to."""
        return f"{error.value or error.reason}: training diverged; back to {place}, with a third of the learning rate"

    def last(self, error: Diverged) -> Diverged:
        """The error that ends the run."""
        if self.scale == 1.0:
            return error
        remedy = (
            "a third of the rate was tried, and diverged too; lower train.lr to a tenth, and look for pixels that are "
            "far too large (`daskcnn data show`)"
        )
        return Diverged(error.value, error.reason, remedy)
