"""Optimizers by themselves: SGD, AdamW, LARS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, ClassVar

from daskcnn import compiled
from daskcnn.arrays import Array, Device
from daskcnn.nn.optimizers.optimizer import Loop, OneStep, Optimizer, sum_of_squares


@dataclass(frozen=True)
class SGD(Optimizer):
    """Momentum, plain or Nesterov's, and weight decay, as in PyTorch: g + decay·p first, then the momentum."""

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    usual_rate: ClassVar[float] = 0.005
    vectors = ("velocity",)  # it stays zero without momentum

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum}: SGD needs 0 <= momentum < 1")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov=true with momentum=0: there is no momentum to look ahead with; set one")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay={self.weight_decay}: SGD needs 0 or more")

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
        numbers = step.scalars(step.lr, self.momentum, self.weight_decay if step.decays else 0.0)
        own = step.params, step.grads, *step.rows, *numbers, self.nesterov, step.new_params, *step.new_vectors
        return [lambda part: compiled.updates.sgd(*(*own, part.start, part.stop))]


@dataclass(frozen=True)
class AdamW(Optimizer):
    """Steps by the mean gradient over the root of the mean square, each corrected for having begun at 0.

    The decay is no part of the gradient: parameters shrink by the factor 1 - lr · weight_decay. As PyTorch's AdamW.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0

    rate_power: ClassVar[float] = 0.5
    usual_rate: ClassVar[float] = 0.003
    vectors = ("mean", "square")  # moving means of the gradient and of its square

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: AdamW needs 0 <= {name} < 1")
        if self.epsilon <= 0:
            raise ValueError(f"epsilon={self.epsilon}: AdamW needs more than 0, for it divides by it where all is 0")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay={self.weight_decay}: AdamW needs 0 or more")

    def _factors(self, step: OneStep) -> tuple[float, float, float]:
        """Return what is left of the parameters, the mean's rate, and the factor of the root; both corrected."""
        made = step.count + 1
        kept = 1 - step.lr * self.weight_decay if step.decays else 1.0
        return kept, step.lr / (1 - self.beta1**made), 1 / sqrt(1 - self.beta2**made)

    def by_arrays(self, step: OneStep, device: Device) -> None:
        """Move both means, then the parameters."""
        (mean, square), (new_mean, new_square) = step.rows, step.new_vectors
        kept, rate, root = self._factors(step)
        new_mean[...] = self.beta1 * mean + (1 - self.beta1) * step.grads
        new_square[...] = self.beta2 * square + (1 - self.beta2) * (step.grads * step.grads)
        down = rate * new_mean / (device.xp.sqrt(new_square) * root + self.epsilon)
        step.new_params[...] = kept * step.params - down

    def loops(self, step: OneStep, device: Device) -> Sequence[Loop]:
        """Return the one loop."""
        kept, rate, root = self._factors(step)
        decays = self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2
        numbers = step.scalars(kept, rate, *decays, root, self.epsilon)
        own = step.params, step.grads, *step.rows, *numbers, step.new_params, *step.new_vectors
        return [lambda part: compiled.updates.adamw(*(*own, part.start, part.stop))]


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
    vectors = ("velocity",)
    by_tensor = True  # the trust ratio is of one parameter array

    def __post_init__(self) -> None:
        if self.trust <= 0:
            raise ValueError(f"trust={self.trust}: LARS needs more than 0; with 0 nothing would move")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum}: LARS needs 0 <= momentum < 1")
        if self.epsilon <= 0:
            raise ValueError(f"epsilon={self.epsilon}: LARS needs more than 0, for norms may be 0")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay={self.weight_decay}: LARS needs 0 or more")

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
        rate, decay = (self._rate(step, device), self.weight_decay) if step.decays else (step.lr, 0.0)
        numbers = step.scalars(rate, self.momentum, decay)
        own = step.params, step.grads, *step.rows, *numbers, step.new_params, *step.new_vectors
        return [lambda part: compiled.updates.lars(*(*own, part.start, part.stop))]
