"""AUC: how well a classifier's scores tell the classes apart, whatever the threshold.

AUC does not add up over parts of a split: it compares samples of one part with those of another. What adds up is the
class scores themselves (`ClassScores`), so the workers that judge parts return those, and their sum has the AUC of the
whole, to the last bit. Their size is bounded: of a split with more than `MOST` numbers (samples × classes) every n-th
sample is kept, and the AUC is that of these samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

MOST = 1 << 20
"""Class scores kept of a whole split: 4 MiB."""


@dataclass(frozen=True, slots=True, eq=False)
class ClassScores:
    """The class scores of samples, (N, classes) float32, and their labels, (N,); adds up over parts of a split."""

    scores: npt.NDArray[np.float32]
    labels: npt.NDArray[np.integer]

    def __add__(self, other: ClassScores) -> ClassScores:
        both = (self.scores, other.scores), (self.labels, other.labels)
        return ClassScores(np.concatenate(both[0]), np.concatenate(both[1]))

    @property
    def auc(self) -> float | None:
        """Macro AUC of these samples, the same in whatever order the parts were added; None where a score is NaN."""
        return None if np.isnan(self.scores).any() else area_under_curve(self.scores, self.labels)


class Collected:
    """Takes in the class scores of a part of a split, batch by batch.

    Parameters
    ----------
    begin : the part's first sample in the split
    whole : samples of the split that are judged, all parts together
    """

    def __init__(self, begin: int, whole: int) -> None:
        self._next, self._whole = begin, whole
        self._kept: list[ClassScores] = []

    def add(self, scores: npt.NDArray[Any], labels: npt.NDArray[np.integer]) -> None:
        """The next batch: scores (N, classes), labels (N,), both on the host. They are copied."""
        every = -(-self._whole * scores.shape[1] // MOST)
        first = -self._next % every
        self._next += len(labels)
        self._kept.append(ClassScores(np.array(scores[first::every], np.float32), np.array(labels[first::every])))

    def done(self) -> ClassScores | None:
        """All that was kept; None where there was no batch."""
        if not self._kept:
            return None
        scores, labels = ([getattr(kept, name) for kept in self._kept] for name in ("scores", "labels"))
        return ClassScores(np.concatenate(scores), np.concatenate(labels))


def area_under_curve(scores: npt.NDArray[np.floating], labels: npt.NDArray[np.integer]) -> float | None:
    """Return the macro AUC of scores (N, classes) for labels (N,): the mean over the classes.

    Higher scores mean likelier.

    The AUC of one class against the rest is the chance that a sample of the class scores higher than one of the rest;
    ties count half. A class without samples, or without other samples, is left out. Returns None if all are left out.
    """
    each = [_one_against_rest(scores[:, c], labels == c) for c in range(scores.shape[1])]
    known = [area for area in each if area is not None]
    return sum(known) / len(known) if known else None


def _one_against_rest(scores: npt.NDArray[np.floating], positive: npt.NDArray[np.bool_]) -> float | None:
    """Return the AUC from the sum of the positives' ranks (Mann and Whitney's U), in the time of sorting."""
    n = int(positive.sum())
    others = len(positive) - n
    if not n or not others:
        return None
    return float((_ranks(scores)[positive].sum() - n * (n + 1) / 2) / (n * others))


def _ranks(scores: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Return each score's place in ascending order, from 1. Equal scores share the mean of their places."""
    _, which, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[which]
