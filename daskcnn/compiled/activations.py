"""Activations of runs of numbers, in place.

With one array for both sides of an assignment, loops compile to vectors: two might overlap.
"""

from __future__ import annotations

from math import erfc
from typing import Any

from daskcnn.compiled.exponential import exp, expm1
from daskcnn.compiled.loop import Array, inner, inner_in_order
from daskcnn.compiled.program import GELU, LEAKY_RELU, RELU, SIGMOID


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
    """The part of the normal distribution below x; its tail is e^(-x²/2) · t/2 · a polynomial in t = 2 / (2 + |x|/√2).

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
