"""The result of judging a network on some samples: loss, accuracy, AUC, and counts of answers by class.

AUC says how well a classifier's scores tell the classes apart, whatever the threshold. It does not add up over parts of
a split, because it compares samples of one part with those of another. So the workers that judge parts return the class
scores themselves (`ClassScores`), whose sum has the AUC of the whole, to the last bit. Their size is bounded: of a
split with more than `MOST` numbers (samples × classes) every n-th sample is kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.events import Judged

MOST = 1 << 20
"""Class scores kept of a whole split: 4 MiB."""


@dataclass(frozen=True, slots=True, eq=False)
class ClassScores:
    """Class scores (N, classes) float32 and labels, (N,) or (N, classes) of 0 and 1; adds up over parts of a split."""

    scores: npt.NDArray[np.floating]
    labels: npt.NDArray[np.integer]

    def __add__(self, other: ClassScores) -> ClassScores:
        return ClassScores.joined([self, other])

    @classmethod
    def joined(cls, parts: Sequence[ClassScores]) -> ClassScores:
        """Return the parts as one."""
        return cls(np.concatenate([part.scores for part in parts]), np.concatenate([part.labels for part in parts]))

    @property
    def auc(self) -> float | None:
        """Macro AUC of these samples, the mean of `areas` that there are; None without any, or where a score is NaN."""
        known = [area for area in self.areas if area is not None]
        return sum(known) / len(known) if known else None

    @property
    def areas(self) -> list[float | None]:
        """AUC of each class by itself; None where there is none, and everywhere where a score is NaN."""
        if np.isnan(self.scores).any():
            return [None] * self.scores.shape[1]
        return areas_under_curves(self.scores, self.labels)


class Collected:
    """Takes in the scores of a part of a split, from sample `begin` on, batch by batch. whole: samples of all parts."""

    def __init__(self, begin: int, whole: int) -> None:
        self._next, self._whole = begin, whole
        self._kept: list[ClassScores] = []

    def add(self, scores: npt.NDArray[Any], labels: npt.NDArray[np.integer]) -> None:
        """Take in the next batch: scores (N, classes), labels (N,) or (N, classes), on the host. They are copied."""
        every = -(-self._whole * scores.shape[1] // MOST)
        first = -self._next % every
        self._next += len(labels)
        self._kept.append(ClassScores(np.array(scores[first::every], np.float32), np.array(labels[first::every])))

    def done(self) -> ClassScores | None:
        """Return all that was kept; None where there was no batch."""
        return ClassScores.joined(self._kept) if self._kept else None


def areas_under_curves(scores: npt.NDArray[np.floating], labels: npt.NDArray[np.integer]) -> list[float | None]:
    """Return the AUC of each class of scores (N, classes) for labels (N,), or (N, classes) of 0 and 1.

    The AUC of one class against the rest is the chance that a sample of the class scores higher than one of the rest;
    ties count half. A class without samples, or without other samples, has None.
    """
    classes = range(scores.shape[1])
    return [_one_against_rest(scores[:, c], labels[:, c] > 0 if labels.ndim == 2 else labels == c) for c in classes]


def _one_against_rest(scores: npt.NDArray[np.floating], positive: npt.NDArray[np.bool_]) -> float | None:
    """Return the AUC from the sum of the positives' ranks (Mann and Whitney's U), in the time of sorting."""
    n = int(positive.sum())
    others = len(positive) - n
    if not n or not others:
        return None
    _, which, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[which]  # from 1; equal scores share the mean of their places
    return float((ranks[positive].sum() - n * (n + 1) / 2) / (n * others))


@dataclass(frozen=True, slots=True)
class Score:
    """Summed loss and right answers over `samples`; adds up over parts of a split.

    correct: right answers; None where the loss knows none. classes: what the AUC is made of, where it was asked for; a
    sum has it where every part has. answers: how many a sample has that may be right: 1, or one for each label.
    metrics: summed, by name; a sum has those that every part has.
    """

    loss_sum: float
    correct: int | None
    samples: int
    classes: ClassScores | None = field(default=None, compare=False, repr=False)
    answers: int = 1
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)

    @classmethod
    def of_batch(cls, loss: float, right: int | None, labels: Any) -> Score:
        """Return the score of a batch with these labels, as `Loss` has them, from its mean loss and right answers."""
        samples = labels.shape[2] if labels.ndim == 4 else len(labels)
        return cls(loss * samples, right, samples, answers=labels.shape[1] if labels.ndim == 2 else 1)

    def __add__(self, other: Score) -> Score:
        correct = None if self.correct is None or other.correct is None else self.correct + other.correct
        if self.samples and other.samples:
            classes = self.classes + other.classes if self.classes and other.classes else None
            metrics = {
                name: value + other.metrics[name] for name, value in self.metrics.items() if name in other.metrics
            }
        else:
            classes, metrics = self.classes or other.classes, {**self.metrics, **other.metrics}
        total = self.loss_sum + other.loss_sum, correct, self.samples + other.samples
        return Score(*total, classes, max(self.answers, other.answers), metrics)

    @property
    def loss(self) -> float:
        """Mean loss of a sample; NaN without samples."""
        return self.loss_sum / self.samples if self.samples else math.nan

    @property
    def accuracy(self) -> float | None:
        """Share of right answers; 0 without samples, None where the loss knows no right answers."""
        if self.correct is None:
            return None
        return self.correct / (self.samples * self.answers) if self.samples else 0.0

    @property
    def quality(self) -> float:
        """The network's quality, 0 to 1, higher is better: the accuracy, or without one 1 / (1 + loss).

        Rules weigh by it, checkpoints and early stopping go by it. A loss that is no number counts as 0.
        """
        if (accuracy := self.accuracy) is not None:
            return accuracy
        return 0.0 if math.isnan(self.loss) else 1 / (1 + max(0.0, self.loss))

    @property
    def judged(self) -> Judged:
        """As events have it; without samples nothing is known."""
        if not self.samples:
            return Judged(accuracy=None, loss=None, auc=None)
        found = Judged(accuracy=self.accuracy, loss=self.loss, auc=self.classes and self.classes.auc)
        means = {name: value / self.samples for name, value in self.metrics.items()}
        known = {name: mean if math.isfinite(mean) else None for name, mean in means.items()}
        return found.model_copy(update={"metrics": known}) if known else found

    def error(self, of: int) -> float | None:
        """Return the standard error of the accuracy as that of `of` samples, of which these were drawn at random.

        It is 0 if these are all. One right and one wrong answer are added, for a part without either may be by chance.
        The labels of one sample count as one answer.
        """
        if self.accuracy is None or not self.samples:
            return None
        share = (self.accuracy * self.samples + 1) / (self.samples + 2)
        left = max(0, of - self.samples) / max(1, of - 1)
        return math.sqrt(share * (1 - share) / self.samples * left)

    def judged_of(self, of: int) -> Judged:
        """Return `judged`, with the standard error if these are a part of `of` samples."""
        if not 0 < self.samples < of:
            return self.judged
        return self.judged.model_copy(update={"samples": self.samples, "error": self.error(of)})


Counts = npt.NDArray[np.int64]

TOP = 5
"""The right class counts if it is among this number of highest scores. Needs twice as many classes."""
MOST_CONFUSED = 1000
"""Classes up to which a confusion matrix is counted: 8 MB."""


class ClassAnswers:
    """Counts of samples that have one of this number of classes each.

    A sample whose highest score is not finite has no answer: it counts as present alone.

    Attributes
    ----------
    present, answered, hits : samples of each class; that were answered with it; both
    confusion : samples (classes, classes) of the class of the row, answered with the class of the column; None of more
        than `MOST_CONFUSED` classes
    in_top : samples whose class is among the `TOP` highest scores; of equal scores the first ones count as higher
    """

    def __init__(self, classes: int) -> None:
        self.present: Counts = np.zeros(classes, np.int64)
        self.answered: Counts = np.zeros(classes, np.int64)
        self.hits: Counts = np.zeros(classes, np.int64)
        self.confusion: Counts | None = np.zeros((classes, classes), np.int64) if classes <= MOST_CONFUSED else None
        self.in_top = 0

    def add(self, scores: npt.NDArray[Any], labels: npt.NDArray[np.integer]) -> None:
        """Count a batch: scores (N, classes), labels (N,)."""
        classes, known = scores.shape[1], np.isfinite(scores.max(axis=1))
        self.present += np.bincount(labels, minlength=classes)
        scores, labels = scores[known], labels[known]
        answers = scores.argmax(axis=1)
        self.answered += np.bincount(answers, minlength=classes)
        self.hits += np.bincount(labels[answers == labels], minlength=classes)
        if self.confusion is not None:
            np.add.at(self.confusion, (labels, answers), 1)
        own = scores[np.arange(len(labels)), labels][:, None]
        before = np.arange(classes) < labels[:, None]
        higher = ((scores > own) | (before & (scores == own))).sum(axis=1)
        self.in_top += int((higher < TOP).sum())


class LabelAnswers:
    """Counts of samples that have several of this number of labels each.

    present, answered, hits: samples that have each label; that were answered with it, by a score above 0; both.
    """

    def __init__(self, labels: int) -> None:
        self.present: Counts = np.zeros(labels, np.int64)
        self.answered: Counts = np.zeros(labels, np.int64)
        self.hits: Counts = np.zeros(labels, np.int64)

    def add(self, scores: npt.NDArray[Any], labels: npt.NDArray[np.integer]) -> None:
        """Count a batch: scores (N, labels), labels (N, labels) of 0 and 1."""
        yes, has = scores > 0, labels > 0
        self.present += has.sum(axis=0)
        self.answered += yes.sum(axis=0)
        self.hits += (yes & has).sum(axis=0)


def shares(of: Counts, among: Counts) -> list[float | None]:
    """Return each count as a share of another; None where that is 0."""
    return [int(a) / int(b) if b else None for a, b in zip(of, among, strict=True)]
