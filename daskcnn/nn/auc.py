"""AUC: how well a classifier's scores separate the classes, whatever the threshold."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


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
