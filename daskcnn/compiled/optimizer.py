"""Stochastic gradient descent in one pass over the vectors."""

from __future__ import annotations

from typing import Any

from daskcnn.compiled.loop import boolean, intp, loop


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
