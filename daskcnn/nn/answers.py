"""Counts of a network's right and wrong answers by class, taken in batch by batch: what precision and recall are of."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]

TOP = 5
"""The right class counts if it is among this number of highest scores. Needs twice as many classes."""
MOST_CONFUSED = 1000
"""Classes up to which a confusion matrix is counted: 8 MB."""


class ClassAnswers:
    """Counts of samples that have one class each.

    Parameters
    ----------
    classes : how many there are

    Attributes
    ----------
    present, answered, hits
        Samples of each class; that were answered with it; both.
    confusion
        Samples (classes, classes): of the class of the row, answered with the class of the column. None of more than
        `MOST_CONFUSED` classes.
    in_top
        Samples whose class is among the `TOP` highest scores; of equal scores the first ones count as higher.
    """

    def __init__(self, classes: int) -> None:
        self.present: Counts = np.zeros(classes, np.int64)
        self.answered: Counts = np.zeros(classes, np.int64)
        self.hits: Counts = np.zeros(classes, np.int64)
        self.confusion: Counts | None = np.zeros((classes, classes), np.int64) if classes <= MOST_CONFUSED else None
        self.in_top = 0

    def add(self, scores: npt.NDArray[Any], labels: npt.NDArray[np.integer]) -> None:
        """Count a batch: scores (N, classes), labels (N,)."""
        answers, classes = scores.argmax(axis=1), scores.shape[1]
        for counts, found in ((self.present, labels), (self.answered, answers), (self.hits, labels[answers == labels])):
            counts += np.bincount(found, minlength=classes)
        if self.confusion is not None:
            np.add.at(self.confusion, (labels, answers), 1)
        own = scores[np.arange(len(labels)), labels][:, None]
        before = np.arange(classes) < labels[:, None]
        higher = ((scores > own) | (before & (scores == own))).sum(axis=1)
        self.in_top += int(((higher < TOP) & np.isfinite(own[:, 0])).sum())


class LabelAnswers:
    """Counts of samples that have several labels each.

    Parameters
    ----------
    labels : how many there are

    Attributes
    ----------
    present, answered, hits
        Samples that have each label; that were answered with it, by a score above 0; both.
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
