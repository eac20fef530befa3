"""Layer-wise adaptive rate scaling (You, Gitman and Ginsburg 2017, algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from daskcnn.arrays import Device
from daskcnn.nn.optimizers.norms import sum_of_squares
from daskcnn.nn.optimizers.optimizer import Loop, OneStep, Optimizer


@dataclass(frozen=True)
class LARS(Optimizer):
    """Momentum, where each parameter array w has a learning rate of its own: lr times its trust ratio.

    That is trust · ‖w‖ / (‖g‖ + weight_decay · ‖w‖ + epsilon). It is 1 where w or g is 0, and for arrays that do not
    decay: a bias that began at 0 would hardly move.
    """

    trust: float = 0.001
    momentum: float = 0.9
    epsilon: float = 1e-8
    weight_decay: float = 0.0

    usual_rate: ClassVar[float] = 2.0

    def __post_init__(self) -> None:
        if self.trust <= 0:
            raise ValueError(f"trust={self.trust}: LARS needs more than 0; with 0 nothing would move")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum}: LARS needs 0 <= momentum < 1")
        if self.epsilon <= 0:
            raise ValueError(f"epsilon={self.epsilon}: LARS needs more than 0, for norms may be 0")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay={self.weight_decay}: LARS needs 0 or more")

    @property
    def vectors(self) -> tuple[str, ...]:
        """The velocity."""
        return ("velocity",)

    @property
    def by_tensor(self) -> bool:
        """The trust ratio is of one parameter array."""
        return True

    def _rate(self, step: OneStep, device: Device) -> Any:
        """Return lr times the trust ratio of the array: 0-d, of the vectors' dtype, on the device."""
        xp = device.xp
        weights, grads = (xp.sqrt(sum_of_squares(each, device)) for each in (step.params, step.grads))
        ratio = self.trust * weights / (grads + self.weight_decay * weights + self.epsilon)
        return (step.lr * xp.where((weights > 0) & (grads > 0), ratio, 1.0)).astype(step.params.dtype)

    def by_arrays(self, step: OneStep, device: Device) -> None:
        """v = momentum · v + lr · ratio · (g + decay · w), and down by v."""
        (velocity,), (new_velocity,) = step.rows, step.new_vectors
        rate = self._rate(step, device) if step.decays else step.lr
        g = step.grads + self.weight_decay * step.params if step.decays else step.grads
        new_velocity[...] = self.momentum * velocity + rate * g
        step.new_params[...] = step.params - new_velocity

    def loops(self, step: OneStep, device: Device) -> Sequence[Loop]:
        """Return the one loop, which runs once the norms are known."""
        from daskcnn.compiled.optimizer import lars

        (velocity,), (new_velocity,) = step.rows, step.new_vectors
        rate = self._rate(step, device) if step.decays else step.lr
        decay = self.weight_decay if step.decays else 0.0
        numbers = step.scalars(rate, self.momentum, decay)
        own = (step.params, step.grads, velocity, *numbers, step.new_params, new_velocity)
        return [lambda part: lars(*(*own, part.start, part.stop))]
