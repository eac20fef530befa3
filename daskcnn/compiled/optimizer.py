"""Steps of the optimizers, each in one pass over the vectors; and the sums of squares that norms are made of."""

from __future__ import annotations

from math import sqrt
from typing import Any

from daskcnn.compiled.loop import boolean, float64, intp, loop


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
    for i in range(start, stop):
        g = grads[i] + decay * params[i]
        v = momentum * velocity[i] + g
        new_params[i] = params[i] - lr * (g + momentum * v if nesterov else v)
        new_velocity[i] = v if momentum != 0 else velocity[i]


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
    for i in range(start, stop):
        g = grads[i]
        m = beta1 * mean[i] + rest1 * g
        s = beta2 * square[i] + rest2 * (g * g)
        new_params[i] = kept * params[i] - rate * m / (sqrt(s) * root + epsilon)
        new_mean[i] = m
        new_square[i] = s


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
    for i in range(start, stop):
        v = momentum * velocity[i] + rate * (grads[i] + decay * params[i])
        new_params[i] = params[i] - v
        new_velocity[i] = v


@loop(lambda T: (T[::1], T[::1], T, T[::1], T[::1], intp, intp), as_written=True)
def toward(here: Any, there: Any, part: float, new: Any, also: Any, start: int, stop: int) -> None:
    """Write here + part · (there - here) to both new vectors, from `start` to `stop`. They may be the old ones."""
    for i in range(start, stop):
        moved = here[i] + part * (there[i] - here[i])
        new[i] = moved
        also[i] = moved


@loop(lambda T: (T[::1], intp, float64[::1], intp, intp))
def squares(vector: Any, block: int, sums: Any, start: int, stop: int) -> None:
    """Write the sums of squares of blocks of this length, from number `start` to number `stop`."""
    for b in range(start, stop):
        total = 0.0
        for i in range(b * block, min((b + 1) * block, len(vector))):
            total += float64(vector[i]) * float64(vector[i])
        sums[b] = total
