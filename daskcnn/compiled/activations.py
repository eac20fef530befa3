"""Activations of runs of numbers, in place.

With one array for both sides of an assignment, loops compile to vectors: two might overlap.
"""

from __future__ import annotations

from daskcnn.compiled.exponential import exp, expm1
from daskcnn.compiled.loop import Array, inner
from daskcnn.compiled.program import RELU, SIGMOID


@inner
def forward(code: int, x: Array) -> None:
    """Replace x by the activation of this code."""
    if code == RELU:
        _relu(x)
    elif code == SIGMOID:
        _sigmoid(x)
    else:
        _tanh(x)


@inner
def backward(code: int, y: Array, dy: Array) -> None:
    """Replace dy by dx; y is the activation's output."""
    one, zero = y.dtype.type(1), y.dtype.type(0)
    if code == RELU:
        for i in range(len(y)):
            d = dy[i]
            dy[i] = d if y[i] > zero else zero
    elif code == SIGMOID:
        for i in range(len(y)):
            dy[i] *= y[i] * (one - y[i])
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
    """The magnitude is (1 - e^-2|x|) / (1 + e^-2|x|)."""
    T = x.dtype.type
    two, zero = T(2), T(0)
    for i in range(len(x)):
        value = x[i]
        e = expm1(-two * abs(value), T)
        magnitude = -e / (two + e)
        x[i] = -magnitude if value < zero else magnitude
