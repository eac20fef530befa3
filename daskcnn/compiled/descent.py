"""Gradient descent in one pass over the weights, rounded as NumPy and GPUs round it: the same bits everywhere."""

from __future__ import annotations

from typing import Any

from daskcnn.compiled.loop import Array, boolean, inner_as_written, intp, loop
from daskcnn.compiled.runs import copy

BLOCK = 4096
"""Numbers that stay in the first cache from one operation to the next."""


@loop(
    lambda T: (T[::1], T[::1], T[::1], T[::1], T[::1], boolean, intp, intp, T, T, T, boolean),
    as_written=True,
)
def step(
    params: Array,
    velocity: Array,
    grads: Array,
    new_params: Array,
    new_velocity: Array,
    elsewhere: bool,
    first: int,
    last: int,
    lr: Any,
    momentum: Any,
    decay: Any,
    nesterov: bool,
) -> None:
    """One step of weights first, …, last - 1; `grads` is overwritten.

    elsewhere: whether the new vectors are others than the old ones.
    """
    for start in range(first, last, BLOCK):
        stop = min(last, start + BLOCK)
        p, v, g = new_params[start:stop], new_velocity[start:stop], grads[start:stop]
        if elsewhere:
            copy(params[start:stop], p)
            copy(velocity[start:stop], v)
        _step(p, v, g, lr, momentum, decay, nesterov)


@inner_as_written
def _step(p: Array, v: Array, g: Array, lr: Any, momentum: Any, decay: Any, nesterov: bool) -> None:
    zero = p.dtype.type(0)
    if decay != zero:
        for i in range(len(p)):
            g[i] += decay * p[i]
    if momentum != zero:
        for i in range(len(p)):
            v[i] = v[i] * momentum + g[i]
            g[i] = g[i] + momentum * v[i] if nesterov else v[i]
    for i in range(len(p)):
        g[i] *= lr
        p[i] -= g[i]
