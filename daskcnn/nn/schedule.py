"""Learning rates over a run: `rate(lr, progress, epoch)`. Progress runs from 0 to 1; epochs include their fraction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Schedule(Protocol):
    """The learning rate at a moment of the run, from the job's `lr`."""

    def rate(self, lr: float, progress: float, epoch: float) -> float:
        """Return the rate after `progress` of the run and `epoch` epochs."""
        ...


@dataclass(frozen=True)
class Constant:
    """lr throughout."""

    def rate(self, lr: float, progress: float, epoch: float) -> float:
        """Return lr."""
        return lr


@dataclass(frozen=True)
class Step:
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
        return float(lr * self.factor ** (epoch // self.every))


@dataclass(frozen=True)
class Poly:
    """lr · (1 - progress)^power. Theano-MPI §4 has 0.5, the default here; 1 falls linearly."""

    power: float = 0.5

    def __post_init__(self) -> None:
        if self.power <= 0:
            raise ValueError(f"power={self.power}: the poly schedule needs a positive one; constant does not fall")

    def rate(self, lr: float, progress: float, epoch: float) -> float:
        """Return lr · (1 - progress)^power."""
        return float(lr * max(0.0, 1 - progress) ** self.power)


SCHEDULES: dict[str, type[Constant] | type[Step] | type[Poly]] = {
    "constant": Constant,
    "step": Step,
    "poly": Poly,
}
