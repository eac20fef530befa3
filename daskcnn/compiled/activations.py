"""Activations of runs of numbers, mostly in place, and the loss of a softmax with its gradient.

A loop in place compiles to vectors, because two arrays might overlap. No library of vector functions is at hand, so
exponentials are made here in Cephes' way: x = n·ln 2 + r with |r| <= ln 2 / 2, a polynomial for e^r - 1, and n in the
exponent's bits. They are exact to a few units in the last place.
"""

from __future__ import annotations

from math import erfc
from typing import Any

import numpy as np

from daskcnn.compiled.loop import Array, float64, inner, inner_in_order, int64, loop
from daskcnn.compiled.program import GELU, LEAKY_RELU, RELU, SIGMOID


@inner_in_order
def _power_of_two(n: Any, T: Any) -> Any:
    """2ⁿ."""
    if T(1) + T(1e-10) == T(1):  # float32
        return T(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32))
    return T(np.int64((np.int64(n) + 1023) << 52).view(np.float64))


@inner_in_order
def exp(x: Any, T: Any) -> Any:
    """e^x for x <= 0, a number of type T; 0 where its exponent does not fit."""
    power, p = _factors(x, T)
    return power * p + power


@inner_in_order
def expm1(x: Any, T: Any) -> Any:
    """e^x - 1, likewise, exact near 0."""
    power, p = _factors(x, T)
    return power * p + (power - T(1))


@inner_in_order
def _factors(x: Any, T: Any) -> tuple[Any, Any]:
    """2ⁿ and e^r - 1."""
    double = T(1) + T(1e-10) > T(1)
    lowest = T(-709) if double else T(-88)  # where the exponent's bits become 0
    x = lowest if x < lowest else x
    n = np.floor(x * T(1.4426950408889634) + T(0.5))
    r = x - n * T(0.693359375) - n * T(-2.121944400546905827679e-4)
    high = T(0)
    if double:
        high = T(1 / 479001600) + r * T(1 / 6227020800)
        high = T(1 / 362880) + r * (T(1 / 3628800) + r * (T(1 / 39916800) + r * high))
        high = T(1 / 40320) + r * high
    p = T(1 / 24) + r * (T(1 / 120) + r * (T(1 / 720) + r * (T(1 / 5040) + r * high)))
    p = r + r * r * (T(1 / 2) + r * (T(1 / 6) + r * p))
    return _power_of_two(n, T), p


@inner
def forward(code: int, x: Array, slope: float) -> None:
    """Replace x by the activation of this code; slope: of a leaky ReLU."""
    if code == RELU:
        _relu(x)
    elif code == SIGMOID:
        _sigmoid(x)
    elif code == LEAKY_RELU:
        zero = x.dtype.type(0)
        for i in range(len(x)):
            value = x[i]
            x[i] = slope * value if value <= zero else value
    else:
        _tanh(x)


@inner
def backward(code: int, y: Array, dy: Array, slope: float) -> None:
    """Replace dy by dx; y is the activation's output."""
    one, zero = y.dtype.type(1), y.dtype.type(0)
    if code == RELU:
        for i in range(len(y)):
            d = dy[i]
            dy[i] = d if y[i] > zero else zero
    elif code == SIGMOID:
        for i in range(len(y)):
            dy[i] *= y[i] * (one - y[i])
    elif code == LEAKY_RELU:
        for i in range(len(y)):
            d = dy[i]
            dy[i] = d if y[i] > zero else slope * d
    else:
        for i in range(len(y)):
            dy[i] *= one - y[i] * y[i]


@inner
def _relu(x: Array) -> None:
    zero = x.dtype.type(0)
    for i in range(len(x)):
        value = x[i]
        x[i] = zero if value <= zero else value  # what is not a number goes through


@inner
def _sigmoid(x: Array) -> None:
    """1 / (1 + e^-x) = e^x / (e^x + 1): the one whose exponential does not overflow."""
    T = x.dtype.type
    one, zero = T(1), T(0)
    for i in range(len(x)):
        value = x[i]
        small = exp(-abs(value), T)
        x[i] = (small if value < zero else one) / (one + small)


@inner
def _tanh(x: Array) -> None:
    for i in range(len(x)):
        x[i] = tanh(x[i], x.dtype.type)


@inner
def tanh(x: Any, T: Any) -> Any:
    """Its magnitude is (1 - e^-2|x|) / (1 + e^-2|x|)."""
    e = expm1(-T(2) * abs(x), T)
    magnitude = -e / (T(2) + e)
    return -magnitude if x < T(0) else magnitude


# --- those that go back with their input ---


@inner
def forward_to(code: int, x: Array, y: Array) -> None:
    """Write x times a share between 0 and 1: of the normal distribution below x, or the logistic function of x."""
    T = x.dtype.type
    for i in range(len(y)):
        y[i] = x[i]
    for i in range(len(y)):
        value = y[i]
        y[i] = value * (_normal(value, T) if code == GELU else _logistic(value, T))


@inner
def backward_from(code: int, x: Array, dy: Array) -> None:
    """Replace dy by dx; x is the activation's input."""
    T = x.dtype.type
    one, half, density = T(1), T(0.5), T(0.3989422804014327)
    if code == GELU:
        for i in range(len(x)):
            value = x[i]
            dy[i] *= _normal(value, T) + value * density * exp(-half * value * value, T)
    else:
        for i in range(len(x)):
            value = x[i]
            share = _logistic(value, T)
            dy[i] *= share * (one + value * (one - share))


@inner_in_order
def _logistic(x: Any, T: Any) -> Any:
    small = exp(-abs(x), T)
    return (small if x < T(0) else T(1)) / (T(1) + small)


@inner_in_order
def _normal(x: Any, T: Any) -> Any:
    """The share of the normal distribution below x; its tail is e^(-x²/2) · t/2 · a polynomial in t = 2 / (2 + |x|/√2).

    The polynomial, in u = 2·t - 1, interpolates e^(z²) · erfc(z) / t with z = |x|/√2 at Chebyshev's points.
    """
    if T(1) + T(1e-10) > T(1):
        return T(0.5) * T(erfc(-x * T(0.7071067811865476)))
    t = T(2) / (T(2) + abs(x) * T(0.7071067811865476))
    u = t + t - T(1)
    p = T(-2.9938270e-4) + u * (T(-3.6601876e-5) + u * T(4.2161199e-5))
    p = T(-3.2434519e-3) + u * (T(1.5291572e-3) + u * (T(4.3067048e-4) + u * p))
    p = T(0.13973573) + u * (T(0.018221669) + u * (T(-0.010751626) + u * p))
    p = T(0.51079136) + u * (T(0.34358031) + u * p)
    tail = T(0.5) * t * p * exp(T(-0.5) * x * x, T)
    return tail if x < T(0) else T(1) - tail


@loop(lambda T: (T[:, ::1], int64[::1], T[::1], float64, T[:, ::1]))
def cross_entropy(scores: Array, labels: Array, weights: Array, smoothing: float, dscores: Array) -> float:
    """Mean of each sample's -log probability of its label times its weight; dscores: its gradient by the scores.

    weights: (N,), or (0,) where all are 1. smoothing: the share of each label that is spread over all classes.
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
    """out = e^(row - highest); returns their sum.

    A loop that writes one array, reads another and adds up adds in an order that depends on which lies first in memory.
    """
    T = row.dtype.type
    for k in range(len(row)):
        out[k] = exp(row[k] - highest, T)
    total = T(0)
    for k in range(len(row)):
        total += out[k]
    return total


@inner
def _distance(row: Array, highest: float) -> float:
    """Sum of row - highest."""
    total = row.dtype.type(0)
    for k in range(len(row)):
        total += row[k] - highest
    return total
