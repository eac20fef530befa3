"""AUC: how well a classifier's scores tell the classes apart, whatever the threshold."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def area_under_curve(scores: npt.NDArray[np.floating], labels: npt.NDArray[np.integer]) -> float | None:
    """Macro AUC of scores (N, classes), the higher the likelier, for labels (N,): the mean over the classes.

    Of one class against the rest it is the chance that a sample of the class has a higher score than one of the rest,
    ties counting half. Classes without samples, or without others, are left out; None where that leaves none.
    """
    each = [_one_against_rest(scores[:, c], labels == c) for c in range(scores.shape[1])]
    known = [area for area in each if area is not None]
    return sum(known) / len(known) if known else None


def _one_against_rest(scores: npt.NDArray[np.floating], positive: npt.NDArray[np.bool_]) -> float | None:
    """From the sum of the positives' ranks (Mann and Whitney's U), in the time of sorting."""
    n = int(positive.sum())
    others = len(positive) - n
    if not n or not others:
        return None
    return float((_ranks(scores)[positive].sum() - n * (n + 1) / 2) / (n * others))


def _ranks(scores: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Each score's place in ascending order, from 1; equal ones share the mean of theirs."""
    _, which, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[which]
