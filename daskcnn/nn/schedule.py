"""Learning rates over a run: `rate(lr, progress, epoch)`. Progress runs from 0 to 1; epochs include their fraction."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from typing import Protocol


class RateSchedule(Protocol):
    """The learning rate at a moment of the run, from the job's `lr`."""

    def rate(self, lr: float, progress: float, epoch: float) -> float:
        """Return the rate after `progress` of the run and `epoch` epochs."""
        ...


@dataclass(frozen=True)
class ConstantRate:
    """lr throughout."""

    def rate(self, lr: float, progress: float, epoch: float) -> float:
        """Return lr."""
        return lr


ROUNDING = 1e-9
"""Of a period: an epoch this near to a change counts as there.

Epochs are computed as progress · epochs, which may round below the whole number that it stands for: by about
4e-16 · epochs, so this holds for 2 million periods. A minibatch that truly begins before the change does so by more, in
periods of fewer than 1e9 minibatches.
"""


@dataclass(frozen=True)
class StepDecay:
    """lr times `factor` after every `every` epochs (Theano-MPI §4)."""

    every: float
    factor: float = 0.1

    def __post_init__(self) -> None:
        if self.every <= 0:
            raise ValueError(f"every={self.every}: the step schedule needs a positive number of epochs")
        if not 0 < self.factor <= 1:
            raise ValueError(f"factor={self.factor}: the step schedule needs 0 < factor <= 1")

    def rate(self, lr: float, progress: float, epoch: float) -> float:
        """Return lr · factor^(whole periods of `every` epochs)."""
        return float(lr * self.factor ** floor(epoch / self.every + ROUNDING))


@dataclass(frozen=True)
class PolyDecay:
    """lr · (1 - progress)^power. Theano-MPI §4 has 0.5, the default here; 1 falls linearly."""

    power: float = 0.5

    def __post_init__(self) -> None:
        if self.power <= 0:
            raise ValueError(f"power={self.power}: the poly schedule needs a positive one; constant does not fall")

    def rate(self, lr: float, progress: float, epoch: float) -> float:
        """Return lr · (1 - progress)^power."""
        return float(lr * max(0.0, 1 - progress) ** self.power)


SCHEDULES: dict[str, type[ConstantRate] | type[StepDecay] | type[PolyDecay]] = {
    "constant": ConstantRate,
    "step": StepDecay,
    "poly": PolyDecay,
}
