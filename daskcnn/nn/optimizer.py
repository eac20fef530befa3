"""Stochastic gradient descent on flat vectors."""

from __future__ import annotations

from dataclasses import dataclass

from daskcnn.arrays import Array, Device
from daskcnn.nn.blocks import over_rows


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
        self,
        params: Array,
        grads: Array,
        velocity: Array,
        lr: float,
        device: Device | None = None,
        *,
        out: tuple[Array, Array] | None = None,
    ) -> None:
        """Make one step on vectors of one length, in place; `grads` is overwritten too.

        With a device the step runs in blocks that stay in cache, on the device's threads. The numbers are the same.

        Parameters
        ----------
        params, grads, velocity : vectors of one length; velocity starts at zero
        lr : learning rate
        device : its threads are used; None for the calling thread
        out : vectors for the new parameters and velocity; the old ones then stay unchanged
        """
        new = out or (params, velocity)

        def step(block: slice) -> None:
            if out is not None:
                out[0][block], out[1][block] = params[block], velocity[block]
            self._step(new[0][block], grads[block], new[1][block], lr)

        if device is None:
            step(slice(None))
            return

        over_rows(device, step, len(params), params.itemsize)

    def _step(self, params: Array, grads: Array, velocity: Array, lr: float) -> None:
        if self.weight_decay:
            grads += self.weight_decay * params
        if self.momentum:
            velocity *= self.momentum
            velocity += grads
            if self.nesterov:
                grads += self.momentum * velocity
            else:
                grads[...] = velocity
        grads *= lr
        params -= grads
