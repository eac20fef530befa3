"""Sums over long vectors and casts between float32 and float16, at memory speed and without long temporaries.

The casts give the same numbers as NumPy's, which are tens of times slower for a vector of small increments. The driver
reads this module without Numba, as the compiled loops are imported at their first call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn import compiled
from daskcnn.compiled.given import addresses, readable
from daskcnn.ps.messages import COUNT, Code, Objection, Push, RuleState, Vector


def cast(vector: Any, dtype: npt.DTypeLike) -> Any:
    """The array in this dtype, itself where it has it. Overflow gives infinity, without a warning."""
    if vector.dtype == dtype:
        return vector
    if isinstance(vector, np.ndarray) and vector.flags.c_contiguous:
        flat, names = vector.reshape(-1), (vector.dtype.name, np.dtype(dtype).name)
        if names == ("float32", "float16"):
            half = np.empty(flat.shape, np.float16)
            compiled.updates.to_half(readable(flat).view(np.uint32), half.view(np.uint16))
            return half.reshape(vector.shape)
        if names == ("float16", "float32"):
            single = np.empty(flat.shape, np.float32)
            compiled.updates.from_half(readable(flat).view(np.uint16), single.view(np.uint32))
            return single.reshape(vector.shape)
    with np.errstate(over="ignore"):
        return vector.astype(dtype, copy=False)


_BLOCK = 1 << 15  # elements


def weighted_sum(vectors: Sequence[Vector], weights: Sequence[float]) -> tuple[Vector, bool]:
    """Σ weights_i · vectors_i, new, added up in this order in float64, rounded once; and whether it is finite."""
    assert len(weights) == len(vectors)
    given, result = _alike(*vectors), np.empty_like(vectors[0])
    finite = compiled.updates.weighted_sum(
        addresses(given), np.array(weights, float), np.empty(compiled.updates.BLOCK), result
    )
    return result, finite


def add_scaled(center: Vector, factor: float, delta: Vector) -> tuple[Vector, bool]:
    """center + factor · delta, in their dtype, a new array; and whether it is finite."""
    result, (c, d) = np.empty_like(center), _alike(center, delta)
    return result, compiled.updates.add_scaled(c, center.dtype.type(factor), d, result)


def elastic(center: Vector, other: Vector, alpha: float) -> tuple[Vector, Vector, bool]:
    """The difference d = alpha · (other - center), center + d, and whether that is finite. New arrays."""
    difference, result = np.empty_like(center), np.empty_like(center)
    factor, (c, o) = center.dtype.type(alpha), _alike(center, other)
    return difference, result, compiled.updates.elastic(c, o, factor, difference, result)


def adagrad(center: Vector, squares: Vector, delta: Vector, lr: float, *, least: float) -> tuple[Vector, Vector, bool]:
    """center + lr · delta / (√squares + least) and squares + delta², used there already, new; are both finite?"""
    rate, smallest = center.dtype.type(lr), center.dtype.type(least)
    c, s, d = _alike(center, squares, delta)
    result, new = np.empty_like(center), np.empty_like(center)
    return result, new, compiled.updates.adagrad(c, s, d, rate, smallest, new, result)


def toward(here: Vector, there: Vector, part: float) -> Vector:
    """here + part · (there - here), in their dtype, a new array."""
    result, (h, t) = np.empty_like(here), _alike(here, there)
    compiled.updates.toward(h, t, here.dtype.type(part), result, result, 0, len(result))
    return result


def _alike(*vectors: Vector) -> list[Vector]:
    """The vectors as loops read them. Loops look at no bounds, so their lengths and dtypes must be the same."""
    assert all(vector.shape == vectors[0].shape and vector.dtype == vectors[0].dtype for vector in vectors)
    return [readable(vector) for vector in vectors]


def sample_weights(pushes: Sequence[Push]) -> list[float]:
    """Each push's part of the samples that all of them were trained on."""
    total = sum(push.n_samples for push in pushes)
    return [push.n_samples / total for push in pushes]


def within(places: Sequence[slice], lo: int, hi: int) -> tuple[slice, ...]:
    """The parts of these places that lie in the range lo…hi, counted from its start."""
    cut = ((max(place.start, lo) - lo, min(place.stop, hi) - lo) for place in places)
    return tuple(slice(start, stop) for start, stop in cut if start < stop)


def cut_state(state: RuleState, lo: int, hi: int) -> RuleState:
    """The state of the range lo…hi, as views."""
    return {name: v if name.endswith(COUNT) else v[lo:hi] for name, v in state.items()}


def whole_vector(name: str, parts: Sequence[Vector]) -> Vector:
    """The state's vector of this name that these are the ranges of."""
    return parts[0] if name.endswith(COUNT) else np.concatenate(parts)


def all_finite(vector: Vector) -> bool:
    """True if the vector holds no NaN and no infinity. One pass without temporaries for a sane vector."""
    squares = np.vdot(vector, vector)  # at the speed of BLAS, twice that of a sum; warns of nothing, unlike `dot`
    starts = range(0, vector.size, _BLOCK)  # a sum of finite values may overflow
    return math.isfinite(squares) or all(bool(np.isfinite(vector[lo : lo + _BLOCK]).all()) for lo in starts)


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
