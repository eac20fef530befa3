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
    """The class scores of samples, (N, classes) float32, and their labels; adds up over parts of a split.

    Labels are (N,), or (N, classes) of 0 and 1 where a sample has several.
    """

    scores: npt.NDArray[np.float32]
    labels: npt.NDArray[np.integer]

    def __add__(self, other: ClassScores) -> ClassScores:
        both = (self.scores, other.scores), (self.labels, other.labels)
        return ClassScores(np.concatenate(both[0]), np.concatenate(both[1]))

    @property
    def auc(self) -> float | None:
        """Macro AUC of these samples, the same in whatever order the parts were added; None where a score is NaN."""
        return _mean(self.areas)

    @property
    def areas(self) -> list[float | None]:
        """AUC of each class by itself; None where there is none, and everywhere where a score is NaN."""
        if np.isnan(self.scores).any():
            return [None] * self.scores.shape[1]
        return areas_under_curves(self.scores, self.labels)


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
        """The next batch: scores (N, classes), labels (N,) or (N, classes), on the host. They are copied."""
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
    """Return the macro AUC of scores (N, classes) for labels (N,) or (N, classes): the mean over the classes.

    A class without samples, or without other samples, is left out. Returns None if all are left out.
    """
    return _mean(areas_under_curves(scores, labels))


def areas_under_curves(scores: npt.NDArray[np.floating], labels: npt.NDArray[np.integer]) -> list[float | None]:
    """Return the AUC of each class of scores (N, classes) for labels (N,), or (N, classes) of 0 and 1.

    Higher scores mean likelier.

    The AUC of one class against the rest is the chance that a sample of the class scores higher than one of the rest;
    ties count half. A class without samples, or without other samples, has None.
    """
    classes = range(scores.shape[1])
    return [_one_against_rest(scores[:, c], labels[:, c] > 0 if labels.ndim == 2 else labels == c) for c in classes]


def _mean(each: list[float | None]) -> float | None:
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
