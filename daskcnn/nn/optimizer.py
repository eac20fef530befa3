"""Stochastic gradient descent on flat vectors."""

from __future__ import annotations

from dataclasses import dataclass

from daskcnn.arrays import Array, Device

THREAD_NUMBERS = 1 << 14
"""Fewest weights for each thread: waking one takes about as long as their step."""


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

        With a device the step runs on the device's threads. The numbers are the same.

        Parameters
        ----------
        params, grads, velocity : vectors of one length; velocity starts at zero
        lr : learning rate
        device : its threads are used; None for the calling thread
        out : vectors for the new parameters and velocity; the old ones then stay unchanged
        """
        new = out or (params, velocity)
        if device is None or not device.backend.compiled:
            if out is not None:
                out[0][...], out[1][...] = params, velocity
            self._step(new[0], grads, new[1], lr)
            return

        from daskcnn.compiled import descent

        numbers = [params.dtype.type(x) for x in (lr, self.momentum, self.weight_decay)]

        def step(part: slice) -> None:
            descent.step(
                *(params, velocity, grads, *new, out is not None, part.start, part.stop, *numbers, self.nesterov)
            )

        device.pool.map(step, device.pool.slices(len(params), at_least=THREAD_NUMBERS))

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
