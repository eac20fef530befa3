"""Evaluations of the center, when a run stops early, when it only guesses, and when it goes back after a divergence."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from daskcnn.errors import Diverged
from daskcnn.events import EpochEnded
from daskcnn.job.network import network_of, reconstructs, training_samples
from daskcnn.job.tables import Job
from daskcnn.nn import walk
from daskcnn.nn.layers import Auxiliary
from daskcnn.nn.losses import USUAL
from daskcnn.nn.score import Score
from daskcnn.ps import NoiseScale
from daskcnn.store import Dataset
from daskcnn.training.round_report import RoundReport

_SURE = 2.0
"""An accuracy counts as better than guessing from this many standard errors above it."""
_FEW = 10
"""Fewest validation samples on which guessing can be recognized."""
_FAR = 2.0
"""A network that guesses has diverged if its loss is more than this many times that of guessing."""
_HIGH = 1.2
"""A network that guesses with a training loss of more than this many times that of guessing has too high a rate."""
_APART = 3.0
"""Training images are known by heart if their accuracy lies this many standard errors above that on others."""
FEW_STEPS, SETTLED = 300, 50
"""Steps of a replica below which there may have been too few, and from which running statistics are settled."""
_FEW_IMAGES = 10_000
"""Training samples below which there may be too few."""


@dataclass(frozen=True, slots=True)
class Guessing:
    """A guess that goes by the classes' shares alone.

    share: of the commonest class, the accuracy of naming it always. loss: of giving each class its share as
    probability; None if the loss is not the softmax's. samples: those that are trained on. losses: how many times the
    loss counts in training, by the network's last layer and by heads in its middle.
    """

    share: float
    loss: float | None = None
    samples: int = 0
    losses: float = 1.0

    def like(self, *scores: Score) -> bool:
        """Return True if no score is clearly better. Without samples it is not known, and counts as better."""
        for score in scores:
            if not score.samples or score.accuracy is None:
                return False
            if score.accuracy > self.share + _SURE * math.sqrt(self.share * (1 - self.share) / score.samples):
                return False
        return True

    def ruined(self, center: Score, trained: Score) -> bool:
        """Return True if the center guesses and the losses are far above those of guessing: it has diverged."""
        if self.loss is None or not center.samples or not trained.samples:
            return False
        far = not center.loss <= _FAR * self.loss and not trained.loss <= _FAR * self.losses * self.loss
        return far and self.like(center)

    def by_heart(self, center: Score, trained: Score) -> bool:
        """Return True if the network knows its training images, and guesses on others."""
        if self.like(trained) or not self.like(center) or trained.accuracy is None or center.accuracy is None:
            return False
        return trained.accuracy - center.accuracy > _APART * 0.5 / math.sqrt(center.samples)

    def warning(self, center: Score, trained: Score, epoch: float, steps: float) -> str:
        """Return the warning of a run that guesses, with the reasons that apply.

        steps: those that each replica has made so far.
        """
        assert center.accuracy is not None, "asked of scores that have one"
        begin, reasons = "the network is no better than guessing", self._of_training(trained, steps)
        if self.by_heart(center, trained):
            begin = f"the network is no better than guessing, but on its training images ({_percent(trained)} right)"
            reasons = self._of_images()
        return (
            f"after {epoch:.3g} epochs {begin}: {_percent(center)} of the validation samples are right, and "
            f"{100 * self.share:.1f} % are of the commonest class. Likely reasons: {', '.join(reasons)}"
        )

    def _of_training(self, trained: Score, steps: float) -> Iterator[str]:
        """Yield reasons why a network does not even learn its training images."""
        if steps < FEW_STEPS:
            yield (
                f"few steps of the weights ({steps:.0f} so far; train more epochs or lower train.batch_size, and where "
                "each worker makes steps of its own use fewer workers)"
            )
        guessing = None if self.loss is None else self.losses * self.loss
        if guessing is not None and trained.loss > _HIGH * guessing:
            high = f"training loss {trained.loss:.3g}, that of guessing {guessing:.3g}"
            yield f"too high a learning rate ({high}; try a third of train.lr)"
        else:
            yield "an unsuitable learning rate (try three times train.lr, and a third)"
        yield "labels that belong to other images (look with `daskcnn data show`)"

    def _of_images(self) -> Iterator[str]:
        """Yield reasons why a network learns its training images alone."""
        if self.samples < _FEW_IMAGES:
            yield f"few training images ({self.samples:,}; give more, or let data.augment change them)"
            yield (
                "a network with too many weights for them (try one with batch normalising and globalpool, such as "
                "resnet20, or start from a trained one: model.from)"
            )
        yield "labels that belong to other images (look with `daskcnn data show`)"


def _percent(score: Score) -> str:
    return "-" if score.accuracy is None else f"{100 * score.accuracy:.1f} %"


def guessing_on(job: Job, dataset: Dataset) -> Guessing | None:
    """Return the guess on the job's validation samples; None if they are few, or are not of several classes."""
    if dataset.labels != "classes" or reconstructs(job):
        return None
    samples = training_samples(job, dataset)
    labels = np.asarray(dataset.train.labels()[samples:])
    shares = np.unique(labels, return_counts=True)[1] / len(labels)
    if len(labels) < _FEW or len(shares) < 2:
        return None
    softmax = (job.train.loss or USUAL[dataset.labels]) == "softmax"
    loss = math.log(len(dataset.classes)) if softmax else None
    layers = [layer for _, layer, _ in walk(network_of(job, dataset), dataset.shape, composite=True)]
    heads = sum(layer.weight for layer in layers if isinstance(layer, Auxiliary))
    return Guessing(float(shares.max()), loss, samples, 1 + heads)


NOTHING = Score(0.0, 0, 0)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation of the center, and the training since the one before.

    trained, center: scores while training, and of the center on validation samples. samples, seconds: presented in the
    interval; its length. validation: all validation samples, of which the center's may be a part.
    """

    trained: Score
    center: Score
    samples: int
    seconds: float
    validation: int = 0

    @property
    def whole(self) -> bool:
        """True if the center was judged on all validation samples, or a simulation knows no score."""
        return not 0 < self.center.samples < self.validation

    def event(
        self,
        *,
        epoch: float,
        epochs: float,
        step: int,
        lr: float | None,
        noise: NoiseScale | None = None,
        step_samples: int | None = None,
    ) -> EpochEnded:
        """Return the event that is logged. step_samples: of a step, where they may grow."""
        trained, of_noise = self.trained.judged, dict[str, Any]()
        if noise is not None:
            known = {"noise_scale": noise.scale, "noise_error": noise.error}
            of_noise = known if noise.known else {"noise_within_error": True}
        return EpochEnded(
            epoch=epoch,
            epochs=epochs,
            step=step,
            loss=trained.loss,
            accuracy=trained.accuracy,
            validation=self.center.judged_of(self.validation),
            samples_per_second=self.samples / self.seconds if self.seconds else 0.0,
            lr=lr,
            seconds=self.seconds,
            **of_noise,
            **({} if step_samples is None else {"step_samples": step_samples}),
        )


_SOON = 3
"""Epochs before a run is told that it is no better than guessing; a run of two is told at its end, one of one never."""


class Evaluations:
    """Evaluations of the center: behind a barrier after every round, by all; else once an epoch, by one replica.

    Parameters
    ----------
    book : Their entries of a checkpoint, if any.
    epochs : Epochs to train. A run that was given another number since is patient anew.
    epoch : The epoch to go on from.
    validation : All validation samples. An evaluation of a part of them decides nothing about the best center.

    Attributes
    ----------
    best : The best quality on the validation samples so far (`Score.quality`).
    worse : Evaluations since.
    begun, samples : The time when the interval began, and the samples trained on since.
    mark : The next whole epoch; an asynchronous run judges its center when rounds up to there are given out.
    told : True once the run was told that it is no better than guessing. by_heart: that but on its training images.
    """

    def __init__(
        self,
        book: Mapping[str, Any],
        patience: int | None,
        epochs: int,
        epoch: float,
        now: float,
        *,
        validation: int = 0,
    ) -> None:
        self.patience, self._epochs, self._validation = patience, epochs, validation
        self.best, self.told = float(book.get("best", 0.0)), bool(book.get("told", False))
        self.by_heart = bool(book.get("by_heart", False))
        self.worse = int(book.get("worse", 0)) if book.get("epochs", epochs) == epochs else 0
        self.mark = math.floor(epoch) + 1
        self.restart(now)

    def book(self) -> dict[str, Any]:
        """Return the entries of a checkpoint."""
        told = {"told": self.told, "by_heart": self.by_heart}
        return {"best": self.best, "worse": self.worse, "epochs": self._epochs, **told}

    def restart(self, now: float) -> None:
        """Begin an interval: the counts since the last evaluation are logged, or trained again."""
        self.begun, self.samples, self.judged = now, 0, False
        self._trained = self._center = NOTHING

    @property
    def sums(self) -> tuple[int, Score]:
        """Samples trained on since the interval began, and their score."""
        return self.samples, self._trained

    def go_back(self, sums: tuple[int, Score]) -> None:
        """Count on from earlier sums of this interval: what was trained since is trained again."""
        self.restart(self.begun)
        self.samples, self._trained = sums

    @property
    def stopping(self) -> bool:
        """True if the run has gone for too long without a better center."""
        return self.patience is not None and self.worse >= self.patience

    def due(self, issued: float) -> bool:
        """Return True if a round given out now is to judge the center at its end. issued: epochs given out so far."""
        if issued < self.mark:
            return False
        self.mark = math.floor(issued) + 1
        return True

    def add(self, report: RoundReport, *, judged: bool) -> None:
        """Count a round that has ended. judged: its replica was asked to judge the center."""
        self.samples += report.samples
        self.judged |= judged
        if report.score is not None:
            self._trained += report.score
        if report.center is not None:
            self._center += report.center

    def trained(self, score: Score) -> None:
        """Count samples that were trained on."""
        self.samples += score.samples
        self._trained += score

    def scored(self, score: Score) -> None:
        """Count samples that the center was judged on."""
        self._center += score
        self.judged = True

    def guesses(self, found: Evaluation, guess: Guessing | None, *, epoch: float, steps: float) -> str | None:
        """Return a warning if the run is no better than guessing after some epochs: once, and once if but by heart.

        steps: those that each replica has made so far.
        """
        if guess is None or epoch < min(_SOON, max(2, self._epochs)):
            return None
        if not self.told and guess.like(found.center, found.trained):
            self.told = True
        elif not self.by_heart and steps >= SETTLED and guess.by_heart(found.center, found.trained):
            self.by_heart = True
        else:
            return None
        return guess.warning(found.center, found.trained, epoch, steps)

    def end_interval(self, now: float) -> tuple[Evaluation, bool]:
        """Begin the next interval. Returns the evaluation, and True if the center is better than all before."""
        found = Evaluation(self._trained, self._center, self.samples, now - self.begun, self._validation)
        counts = found.center.samples > 0 and found.whole
        better = counts and found.center.quality > self.best
        if counts:
            self.best, self.worse = max(self.best, found.center.quality), 0 if better else self.worse + 1
        self.restart(now)
        return found, better


LOWER = 1 / 3
"""Factor of the learning rate after a divergence."""


class Divergence:
    """Decides if a run goes back, which it does once, resumed or not, and at which rate it trains.

    scale: factor of the learning rate; below 1 once the run went back.
    """

    def __init__(self, book: Mapping[str, Any], *, lowers: bool) -> None:
        self._lowers, self.scale = lowers, float(book.get("rate_scale", 1.0))

    def book(self) -> dict[str, Any]:
        """Return the entries of a checkpoint."""
        return {"rate_scale": self.scale}

    def goes_back(self) -> bool:
        """Return True if the run goes back now, at a third of the rate."""
        if not self._lowers or self.scale < 1.0:
            return False
        self.scale *= LOWER
        return True

    def ruined(self, found: Evaluation, guess: Guessing | None) -> Diverged | None:
        """Return the error of a center that is worth less than the initial weights, if the run may go back."""
        if not self._lowers or self.scale < 1.0:
            return None
        finite = math.isfinite(found.center.loss_sum)
        if finite and (guess is None or not guess.ruined(found.center, found.trained)):
            return None
        value = f"loss = {found.center.loss:.4g} on the validation samples"
        return Diverged(value, "training diverged", "lower train.lr")

    def warning(self, error: Diverged, place: str) -> str:
        """Return the warning of a run that goes back. place: the state that it goes back to."""
        return f"{error.value or error.reason}: training diverged; back to {place}, with a third of the learning rate"

    def last(self, error: Diverged) -> Diverged:
        """Return the error that ends the run."""
        if self.scale == 1.0:
            return error
        remedy = (
            "a third of the rate was tried, and diverged too; lower train.lr to a tenth, and look for pixels that are "
            "far too large (`daskcnn data show`)"
        )
        return Diverged(error.value, error.reason, remedy)
