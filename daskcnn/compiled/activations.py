"""Activations of runs of numbers. y may lie where x does, and dx where dy does."""

from __future__ import annotations

from daskcnn.compiled.exponential import expm1
from daskcnn.compiled.loop import Array, inner
from daskcnn.compiled.program import RELU, SIGMOID


@inner
def forward(code: int, x: Array, y: Array) -> None:
    """The activation of this code."""
    if code == RELU:
        _relu(x, y)
    elif code == SIGMOID:
        _sigmoid(x, y)
    else:
        _tanh(x, y)


@inner
def backward(code: int, y: Array, dy: Array, dx: Array) -> None:
    """Dx from dy and the activation's output."""
    one, zero = y.dtype.type(1), y.dtype.type(0)
    if code == RELU:
        for i in range(len(y)):
            dx[i] = dy[i] if y[i] > zero else zero
    elif code == SIGMOID:
        for i in range(len(y)):
            dx[i] = dy[i] * y[i] * (one - y[i])
    else:
        for i in range(len(y)):
            dx[i] = dy[i] * (one - y[i] * y[i])


@inner
def _relu(x: Array, y: Array) -> None:
    zero = x.dtype.type(0)
    for i in range(len(x)):
        y[i] = zero if x[i] <= zero else x[i]  # what is not a number goes through


@inner
def _sigmoid(x: Array, y: Array) -> None:
    """1 / (1 + e^-x) = e^x / (e^x + 1): the one whose exponential does not overflow."""
    T = x.dtype.type
    one, zero = T(1), T(0)
    for i in range(len(x)):
        small = expm1(-abs(x[i]), T) + one
        y[i] = (small if x[i] < zero else one) / (one + small)


@inner
def _tanh(x: Array, y: Array) -> None:
    """The magnitude is (1 - e^-2|x|) / (1 + e^-2|x|)."""
    T = x.dtype.type
    two, zero = T(2), T(0)
    for i in range(len(x)):
        e = expm1(-two * abs(x[i]), T)
        magnitude = -e / (two + e)
        y[i] = -magnitude if x[i] < zero else magnitude
