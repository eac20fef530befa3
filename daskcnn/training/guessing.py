"""Guessing: what it comes to on the validation samples, and whether a run is better."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from daskcnn.job.network import reconstructs, training_samples
from daskcnn.job.tables import Job
from daskcnn.nn.losses import USUAL
from daskcnn.nn.score import Score
from daskcnn.store import Dataset

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
