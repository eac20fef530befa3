"""Updates of long vectors, one pass over memory each: the parameter server's merges, casts, and the optimizers' steps.

Every operation is rounded by itself in the order written, so the numbers are those of NumPy's expressions. The sums of
squares, of which norms are made, are the exception.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np

from daskcnn.compiled.loop import (
    Array,
    boolean,
    float64,
    inner_as_written,
    intp,
    loop,
    uint16,
    uint32,
    uint64,
    vector_at,
)

BLOCK = 1024
"""Numbers that are added up at once. With more the processor fetches less of the vectors ahead: half the speed."""
STEPPED = 256
"""Numbers of an optimizer's step that are made in memory of their own before they are written: the new vectors may be
the old ones, and over vectors that may be the same the compiler lets no loop run in vector registers."""
_SIGN, _SMALLEST, _LARGEST = np.uint32(0x8000), np.uint32(0x38800000), np.uint32(0x477FF000)
_HALF, _REBASED, _MORE = np.uint32(0x3F000000), np.uint32(0xC8000FFF), np.float32(2.0**112)
_INFINITE, _INFINITE_HALF, _NAN_HALF = np.uint32(0x7F800000), np.uint32(0x7C00), np.uint32(0x7E00)
_1, _13, _16 = np.uint32(1), np.uint32(13), np.uint32(16)


@loop(lambda T: (T[::1], T, T[::1], T[::1]), as_written=True)
def add_scaled(center: Array, factor: float, delta: Array, result: Array) -> bool:
    """result = center + factor · delta. Return whether all of it is finite."""
    wrong = False
    for i in range(len(result)):
        result[i] = delta[i] * factor + center[i]
        wrong |= not abs(result[i]) < np.inf
    return not wrong


@loop(lambda T: (uint64[::1], float64[::1], float64[::1], T[::1]), as_written=True)
def weighted_sum(addresses: Array, weights: Array, total: Array, result: Array) -> bool:
    """result = Σ weights_k · vector_k, added up in this order in float64, rounded once. Return whether it is finite.

    addresses: of the vectors, which are like the result. total: (BLOCK,), scratch memory.
    """
    wrong = False
    for start in range(0, len(result), BLOCK):
        part = result[start : start + BLOCK]
        for k in range(len(addresses)):
            vector = vector_at(addresses[k], result, len(result))[start : start + BLOCK]
            if k == 0:
                _scale(vector, weights[k], total)
            else:
                _add(vector, weights[k], total)
        wrong |= not _round(total, part)
    return not wrong


@inner_as_written
def _round(total: Array, result: Array) -> bool:
    """Write the sums in the result's dtype; return whether they are finite there."""
    wrong = False
    for i in range(len(result)):
        result[i] = total[i]
        wrong |= not abs(result[i]) < np.inf
    return not wrong


@inner_as_written
def _scale(vector: Array, weight: float, total: Array) -> None:
    for i in range(len(vector)):
        total[i] = vector[i] * weight


@inner_as_written
def _add(vector: Array, weight: float, total: Array) -> None:
    for i in range(len(vector)):
        total[i] += vector[i] * weight


@loop(lambda T: (T[::1], T[::1], T, T[::1], T[::1]), as_written=True)
def elastic(center: Array, other: Array, alpha: float, difference: Array, result: Array) -> bool:
    """difference = alpha · (other - center), result = center + difference. Return whether the result is finite."""
    wrong = False
    for i in range(len(result)):
        difference[i] = (other[i] - center[i]) * alpha
        result[i] = difference[i] + center[i]
        wrong |= not abs(result[i]) < np.inf
    return not wrong


@loop(lambda T: (T[::1], T[::1], T[::1], T, T, T[::1], T[::1]), as_written=True)
def adagrad(
    center: Array, squares: Array, delta: Array, lr: float, least: float, new_squares: Array, result: Array
) -> bool:
    """new_squares = squares + delta², result = center + lr · delta / (√new_squares + least).

    Return whether both are finite.
    """
    wrong = False
    for i in range(len(result)):
        new_squares[i] = delta[i] * delta[i] + squares[i]
        result[i] = delta[i] / (np.sqrt(new_squares[i]) + least) * lr + center[i]
        wrong |= not (abs(result[i]) < np.inf and new_squares[i] < np.inf)
    return not wrong


@loop(lambda T: (uint32[::1], uint16[::1]), as_written=True)
def to_half(x: Array, y: Array) -> None:
    """y = the float16 nearest to each float32 of x, of two equally near ones the even. Both are the numbers' bits."""
    for i in range(len(y)):
        size = np.uint32(x[i] & np.uint32(0x7FFFFFFF))
        # the exponent counts from -15, not -127; half of the last place is added, less one where that place is even
        bits = np.uint32(np.uint32(size + ((size >> _13) & _1) + _REBASED) >> _13)
        if size < _SMALLEST:  # 2^-14: added to 0.5, which leaves the bits of a float16 that is not normal
            added = np.uint32(size).view(np.float32) + np.float32(0.5)
            bits = np.uint32(np.float32(added).view(np.uint32) - _HALF)
        if size >= _LARGEST:  # rounded up to 2^16
            bits = _INFINITE_HALF
        if size > _INFINITE:
            bits = _NAN_HALF
        y[i] = np.uint16(bits | ((x[i] >> _16) & _SIGN))


@loop(lambda T: (uint16[::1], uint32[::1]), as_written=True)
def from_half(x: Array, y: Array) -> None:
    """y = the float32 that is each float16 of x. Both are the numbers' bits."""
    for i in range(len(y)):
        half = np.uint32(x[i])
        size = np.uint32((half & np.uint32(0x7FFF)) << _13)
        bits = np.float32(np.uint32(size).view(np.float32) * _MORE).view(np.uint32)
        if size >= np.uint32(_INFINITE_HALF << _13):  # infinity or NaN
            bits = np.uint32(bits | _INFINITE)
        y[i] = bits | np.uint32((half & _SIGN) << _16)


@loop(lambda T: (T[::1], T[::1], T[::1], T, T, T, boolean, T[::1], T[::1], intp, intp), as_written=True)
def sgd(
    params: Any,
    grads: Any,
    velocity: Any,
    lr: float,
    momentum: float,
    decay: float,
    nesterov: bool,
    new_params: Any,
    new_velocity: Any,
    start: int,
    stop: int,
) -> None:
    """Write params and velocity after a step, from `start` to `stop`. The new vectors may be the old ones.

    g = grads + decay · params;  v = momentum · velocity + g;  params - lr · (v, or with Nesterov g + momentum · v).
    Without momentum the velocity stays as it is.
    """
    made = np.empty((2, STEPPED), params.dtype)
    for at in range(start, stop, STEPPED):
        end = min(at + STEPPED, stop)
        _sgd(params[at:end], grads[at:end], velocity[at:end], lr, momentum, decay, nesterov, made[0], made[1])
        _write(made[0], new_params[at:end])
        _write(made[1], new_velocity[at:end])


@inner_as_written
def _write(made: Any, target: Any) -> None:
    for i in range(len(target)):
        target[i] = made[i]


@inner_as_written
def _sgd(
    params: Any, grads: Any, velocity: Any, lr: Any, momentum: Any, decay: Any, nesterov: bool, new: Any, moving: Any
) -> None:
    for i in range(len(params)):
        g = grads[i] + decay * params[i]
        v = momentum * velocity[i] + g
        new[i] = params[i] - lr * (g + momentum * v if nesterov else v)
        moving[i] = v if momentum != 0 else velocity[i]


@loop(lambda T: (*(T[::1],) * 4, *(T,) * 8, *(T[::1],) * 3, intp, intp), as_written=True)
def adamw(
    params: Any,
    grads: Any,
    mean: Any,
    square: Any,
    kept: float,
    rate: float,
    beta1: float,
    rest1: float,
    beta2: float,
    rest2: float,
    root: float,
    epsilon: float,
    new_params: Any,
    new_mean: Any,
    new_square: Any,
    start: int,
    stop: int,
) -> None:
    """Write params and both moments after a step, from `start` to `stop`. The new vectors may be the old ones.

    m = beta1 · mean + rest1 · g;  s = beta2 · square + rest2 · g²;  kept · params - rate · m / (√s · root + epsilon).
    """
    made = np.empty((3, STEPPED), params.dtype)
    for at in range(start, stop, STEPPED):
        end = min(at + STEPPED, stop)
        p, g, old_mean, old_square = params[at:end], grads[at:end], mean[at:end], square[at:end]
        _moments(g, old_mean, old_square, beta1, rest1, beta2, rest2, made[1], made[2])
        _divided(p, made[1], made[2], kept, rate, root, epsilon, made[0])
        _write(made[0], new_params[at:end])
        _write(made[1], new_mean[at:end])
        _write(made[2], new_square[at:end])


@inner_as_written
def _moments(
    grads: Any, mean: Any, square: Any, beta1: Any, rest1: Any, beta2: Any, rest2: Any, new_mean: Any, new_square: Any
) -> None:
    for i in range(len(grads)):
        g = grads[i]
        new_mean[i] = beta1 * mean[i] + rest1 * g
        new_square[i] = beta2 * square[i] + rest2 * (g * g)


@inner_as_written
def _divided(params: Any, mean: Any, square: Any, kept: Any, rate: Any, root: Any, epsilon: Any, new: Any) -> None:
    for i in range(len(params)):
        new[i] = kept * params[i] - rate * mean[i] / (sqrt(square[i]) * root + epsilon)


@loop(lambda T: (T[::1], T[::1], T[::1], T, T, T, T[::1], T[::1], intp, intp), as_written=True)
def lars(
    params: Any,
    grads: Any,
    velocity: Any,
    rate: float,
    momentum: float,
    decay: float,
    new_params: Any,
    new_velocity: Any,
    start: int,
    stop: int,
) -> None:
    """Write params and velocity after a step, from `start` to `stop`. The new vectors may be the old ones.

    v = momentum · velocity + rate · (grads + decay · params);  params - v.
    """
    made = np.empty((2, STEPPED), params.dtype)
    for at in range(start, stop, STEPPED):
        end = min(at + STEPPED, stop)
        _lars(params[at:end], grads[at:end], velocity[at:end], rate, momentum, decay, made[0], made[1])
        _write(made[0], new_params[at:end])
        _write(made[1], new_velocity[at:end])


@inner_as_written
def _lars(params: Any, grads: Any, velocity: Any, rate: Any, momentum: Any, decay: Any, new: Any, moving: Any) -> None:
    for i in range(len(params)):
        v = momentum * velocity[i] + rate * (grads[i] + decay * params[i])
        new[i] = params[i] - v
        moving[i] = v


@loop(lambda T: (T[::1], T[::1], T, T[::1], T[::1], intp, intp), as_written=True)
def toward(here: Any, there: Any, part: float, new: Any, also: Any, start: int, stop: int) -> None:
    """Write here + part · (there - here) to both new vectors, from `start` to `stop`. They may be the old ones."""
    made = np.empty(STEPPED, here.dtype)
    for at in range(start, stop, STEPPED):
        end = min(at + STEPPED, stop)
        _toward(here[at:end], there[at:end], part, made)
        _write(made, new[at:end])
        _write(made, also[at:end])


@inner_as_written
def _toward(here: Any, there: Any, part: Any, moved: Any) -> None:
    for i in range(len(here)):
        moved[i] = here[i] + part * (there[i] - here[i])


@loop(lambda T: (T[::1], intp, float64[::1], intp, intp))
def squares(vector: Any, block: int, sums: Any, start: int, stop: int) -> None:
    """Write the sums of squares of blocks of this length, from number `start` to number `stop`."""
    for b in range(start, stop):
        total = 0.0
        for i in range(b * block, min((b + 1) * block, len(vector))):
            total += float64(vector[i]) * float64(vector[i])
        sums[b] = total
