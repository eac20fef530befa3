"""The softmax's loss and its gradient, sample by sample."""

from __future__ import annotations

import numpy as np

from daskcnn.compiled.exponential import exp
from daskcnn.compiled.loop import Array, float64, inner, int64, loop


@loop(lambda T: (T[:, ::1], int64[::1], T[::1], float64, T[:, ::1]))
def cross_entropy(scores: Array, labels: Array, weights: Array, smoothing: float, dscores: Array) -> float:
    """Mean of each sample's -log probability of its label times its weight; dscores: its gradient by the scores.

    weights: (N,), or (0,) where all are 1. smoothing: the part of each label that all classes share.
    """
    T = scores.dtype.type
    N, loss, mine, shared = len(scores), 0.0, T(1 - smoothing), T(smoothing / scores.shape[1])
    for n in range(N):
        weight = weights[n] if len(weights) else T(1)
        row, out, label = scores[n], dscores[n], labels[n]
        highest = row[0]
        for k in range(1, len(row)):
            highest = max(highest, row[k])
        total = _exponentials(row, highest, out)
        loss += weight * (np.log(total) - mine * (row[label] - highest))
        if shared > T(0):
            loss -= weight * shared * _distance(row, highest)
        each = weight / T(N)
        factor = each / total
        for k in range(len(row)):
            out[k] = out[k] * factor - each * shared
        out[label] -= each * mine
    return loss / N


@inner
def _exponentials(row: Array, highest: float, out: Array) -> float:
    """out = e^(row - highest); returns their sum."""
    T = row.dtype.type
    total = T(0)
    for k in range(len(row)):
        power = exp(row[k] - highest, T)
        out[k] = power
        total += power
    return total


@inner
def _distance(row: Array, highest: float) -> float:
    """Sum of row - highest."""
    total = row.dtype.type(0)
    for k in range(len(row)):
        total += row[k] - highest
    return total
