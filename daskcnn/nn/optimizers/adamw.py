"""Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

from daskcnn.arrays import Device
from daskcnn.nn.optimizers.optimizer import Loop, OneStep, Optimizer


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

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: AdamW needs 0 <= {name} < 1")
        if self.epsilon <= 0:
            raise ValueError(f"epsilon={self.epsilon}: AdamW needs more than 0, for it divides by it where all is 0")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay={self.weight_decay}: AdamW needs 0 or more")

    @property
    def vectors(self) -> tuple[str, ...]:
        """The moving means of the gradient and of its square."""
        return ("mean", "square")

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
        from daskcnn.compiled.optimizer import adamw

        kept, rate, root = self._factors(step)
        decays = self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2
        numbers = step.scalars(kept, rate, *decays, root, self.epsilon)
        own = (step.params, step.grads, *step.rows, *numbers, step.new_params, *step.new_vectors)
        return [lambda part: adamw(*(*own, part.start, part.stop))]
