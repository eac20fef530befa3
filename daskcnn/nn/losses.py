"""Losses of a batch, with their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from daskcnn.arrays import Array


class Loss(Protocol):
    """scores (N, classes) and labels (N,) of one backend `xp` -> (mean loss, 0-d; dscores (N, classes))."""

    def __call__(self, scores: Array, labels: Array, xp: Any = np) -> tuple[Any, Array]: ...


@dataclass(frozen=True)
class SoftmaxCrossEntropy:
    """-log of the softmax of the right class's score, averaged over the batch, in nats."""

    def __call__(self, scores: Array, labels: Array, xp: Any = np) -> tuple[Any, Array]:
        N, rows = len(scores), xp.arange(len(scores))
        shifted = scores - scores.max(axis=1, keepdims=True)
        dscores = xp.exp(shifted)
        total = dscores.sum(axis=1, keepdims=True)
        loss = (xp.log(total[:, 0]) - shifted[rows, labels]).mean()
        dscores /= total
        dscores[rows, labels] -= 1
        dscores *= 1 / N
        return loss, dscores


@dataclass(frozen=True)
class SquaredError:
    """Half the squared distance of the scores from the right class's unit vector, averaged over the batch."""

    def __call__(self, scores: Array, labels: Array, xp: Any = np) -> tuple[Any, Array]:
        N = len(scores)
        dscores = scores.copy()
        dscores[xp.arange(N), labels] -= 1
        loss = (dscores * dscores).sum(axis=1).mean() * 0.5
        dscores *= 1 / N
        return loss, dscores


LOSSES: dict[str, Loss] = {"softmax": SoftmaxCrossEntropy(), "squared": SquaredError()}


def correct(scores: Array, labels: Array) -> Any:
    """Return the number of samples whose highest score is at their label: 0-d."""
    return (scores.argmax(axis=1) == labels).sum()


def softmax(scores: Array) -> Array:
    """Return the probability of each class, (N, classes), from scores (N, classes) on the host."""
    exp = np.exp(scores - scores.max(axis=1, keepdims=True))
    return exp / exp.sum(axis=1, keepdims=True)
