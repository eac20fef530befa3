"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from daskcnn.arrays import Array, Device
from daskcnn.nn.optimizers.optimizer import Loop, OneStep, Optimizer


@dataclass(frozen=True)
class SGD(Optimizer):
    """Momentum, plain or Nesterov's, and weight decay, as in PyTorch: g + decay·p first, then the momentum."""

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    usual_rate: ClassVar[float] = 0.005

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum}: SGD needs 0 <= momentum < 1")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov=true with momentum=0: there is no momentum to look ahead with; set one")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay={self.weight_decay}: SGD needs 0 or more")

    @property
    def vectors(self) -> tuple[str, ...]:
        """The velocity, which stays zero without momentum."""
        return ("velocity",)

    def by_arrays(self, step: OneStep, device: Device) -> None:
        """v = momentum · v + g, and down by lr times that, or with Nesterov's by lr · (g + momentum · v)."""
        (velocity,), (new_velocity,) = step.rows, step.new_vectors
        g: Array = step.grads + self.weight_decay * step.params if step.decays else step.grads
        down = g
        new_velocity[...] = velocity
        if self.momentum:
            new_velocity[...] = down = self.momentum * velocity + g
            if self.nesterov:
                down = g + self.momentum * down
        step.new_params[...] = step.params - step.lr * down

    def loops(self, step: OneStep, device: Device) -> Sequence[Loop]:
        """Return the one loop."""
        from daskcnn.compiled.optimizer import sgd

        (velocity,), (new_velocity,) = step.rows, step.new_vectors
        decay = self.weight_decay if step.decays else 0.0
        numbers = (*step.scalars(step.lr, self.momentum, decay), self.nesterov)
        own = (step.params, step.grads, velocity, *numbers, step.new_params, new_velocity)
        return [lambda part: sgd(*(*own, part.start, part.stop))]
