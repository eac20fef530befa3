"""Stochastic gradient descent on flat vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from daskcnn.arrays import Array, Device

Vectors: TypeAlias = tuple[Array, Array]
AT_LEAST = 1 << 16
"""Fewest parameters for each thread: their step takes about as long as waking it."""


@dataclass(frozen=True)
class SGD:
    """Momentum, plain or Nesterov's, and weight decay, as in PyTorch: g + decay·p first, then the momentum."""

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum}: SGD needs 0 <= momentum < 1")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov=true with momentum=0: there is no momentum to look ahead with; set one")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay={self.weight_decay}: SGD needs 0 or more")

    def step(
        self, params: Array, grads: Array, velocity: Array, lr: float, device: Device, *, out: Vectors | None = None
    ) -> None:
        """Make one step on vectors of one length, in place; `grads` stays as it is.

        Parameters
        ----------
        params, grads, velocity : vectors of one length, of the device; velocity starts at zero
        lr : learning rate
        device : its threads are used
        out : vectors for the new parameters and velocity; the old ones then stay unchanged
        """
        new = out or (params, velocity)
        if not device.backend.compiled:
            _step(self, params, grads, velocity, lr, *new)
            return
        from daskcnn.compiled.optimizer import sgd

        p, g, v = (device.backend.contiguous(vector) for vector in (params, grads, velocity))
        rate, momentum, decay = (params.dtype.type(value) for value in (lr, self.momentum, self.weight_decay))

        def step(part: slice) -> None:
            sgd(p, g, v, rate, momentum, decay, self.nesterov, *new, part.start, part.stop)

        device.pool.map(step, device.pool.slices(len(params), at_least=AT_LEAST))


def _step(sgd: SGD, params: Array, grads: Array, velocity: Array, lr: float, *new: Array) -> None:
    """Write `new` parameters and velocity."""
    new_params, new_velocity = new
    g = step = grads + sgd.weight_decay * params
    new_velocity[...] = velocity
    if sgd.momentum:
        new_velocity[...] = step = sgd.momentum * velocity + g
        if sgd.nesterov:
            step = g + sgd.momentum * step
    new_params[...] = params - lr * step
