"""Sums over long vectors at memory speed, with no temporaries of their length."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from daskcnn.ps.instructions import Code, Objection
from daskcnn.ps.requests import Push, Vector

_BLOCK = 1 << 15  # elements: 256 KB of float64, which stay in the processor's cache


def weighted_sum(vectors: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """Σ weights_i · vectors_i, added up in this order in float64, rounded once. A new array of the vectors' dtype."""
    result = np.empty_like(vectors[0])
    total, term = np.empty(_BLOCK), np.empty(_BLOCK)
    for block in _blocks(result.size):
        t, x = total[: block.stop - block.start], term[: block.stop - block.start]
        np.multiply(vectors[0][block], weights[0], out=t, dtype=np.float64)
        for vector, weight in zip(vectors[1:], weights[1:], strict=True):
            t += np.multiply(vector[block], weight, out=x, dtype=np.float64)
        result[block] = t
    return result


def add_scaled(center: Vector, factor: float, delta: Vector) -> Vector:
    """center + factor · delta, in their dtype. A new array, and the only one made."""
    result = np.multiply(delta, factor)
    result += center
    return result


def sample_weights(pushes: Sequence[Push]) -> list[float]:
    """Each push's part of the samples that all of them were trained on."""
    total = sum(push.n_samples for push in pushes)
    return [push.n_samples / total for push in pushes]


def all_finite(vector: Vector) -> bool:
    """Whether the vector holds no NaN and no infinity. One pass without temporaries for a sane vector."""
    squares = np.vdot(vector, vector)  # at the speed of BLAS, twice that of a sum; warns of nothing, unlike `dot`
    # a sum of finite values may overflow
    return math.isfinite(squares) or all(bool(np.isfinite(vector[b]).all()) for b in _blocks(vector.size))


def misfit(payload: Vector, center: Vector) -> Objection | None:
    """Why the payload cannot be merged into the center: dtype, length, or a number that is not finite."""
    dtype = getattr(payload, "dtype", None)
    if dtype != center.dtype:
        return Objection(Code.DTYPE, f"dtype={dtype}: must be {center.dtype}; cast it before pushing")
    if payload.shape != center.shape:
        return Objection(Code.LENGTH, wrong_shape(payload.shape, center.shape))
    if not all_finite(payload):
        return Objection(Code.FINITE, "payload: holds NaN or infinity; lower the learning rate")
    return None


def wrong_shape(shape: tuple[int, ...], needed: tuple[int, ...]) -> str:
    """The reason for refusing a payload of this shape."""
    return f"shape={shape}: must be {needed}; is it the same network?"


def _blocks(size: int) -> Iterator[slice]:
    return (slice(start, min(start + _BLOCK, size)) for start in range(0, size, _BLOCK))
