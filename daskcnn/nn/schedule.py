"""Learning rates over a run: `rate(lr, progress, epoch)`, progress from 0 to 1, epochs passed with their fraction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Schedule(Protocol):
    """Rate at a moment of the run, from the job's `lr`."""

    def rate(self, lr: float, progress: float, epoch: float) -> float: ...


@dataclass(frozen=True)
class Constant:
    """lr throughout."""

    def rate(self, lr: float, progress: float, epoch: float) -> float:
        return lr


@dataclass(frozen=True)
class Step:
    """Times `factor` after every so many epochs (Theano-MPI §4)."""

    every: float
    factor: float = 0.1

    def __post_init__(self) -> None:
        if self.every <= 0:
            raise ValueError(f"every={self.every}: the step schedule needs a positive number of epochs")
        if not 0 < self.factor <= 1:
            raise ValueError(f"factor={self.factor}: the step schedule needs 0 < factor <= 1")

    def rate(self, lr: float, progress: float, epoch: float) -> float:
        return float(lr * self.factor ** (epoch // self.every))


@dataclass(frozen=True)
class Poly:
    """lr · (1 - progress)^power: the 0.5 of Theano-MPI §4 by default; 1 falls linearly."""

    power: float = 0.5

    def __post_init__(self) -> None:
        if self.power <= 0:
            raise ValueError(f"power={self.power}: the poly schedule needs a positive one; constant does not fall")

    def rate(self, lr: float, progress: float, epoch: float) -> float:
        return float(lr * max(0.0, 1 - progress) ** self.power)


SCHEDULES: dict[str, type[Constant] | type[Step] | type[Poly]] = {
    "constant": Constant,
    "step": Step,
    "poly": Poly,
}
