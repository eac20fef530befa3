"""Learning rates over a run: `rate(lr, progress, epoch)`. Progress runs from 0 to 1; epochs include their fraction."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, floor, pi
from typing import Protocol, TypeAlias


class RateSchedule(Protocol):
    """The learning rate at a moment of the run."""

    def rate(self, lr: float, progress: float, epoch: float) -> float:
        """Return the rate, from the job's `lr`, after `progress` of the run and `epoch` epochs."""


@dataclass(frozen=True)
class ConstantRate:
    """lr throughout."""

    def rate(self, lr: float, progress: float, epoch: float) -> float:
        """Return lr."""
        return lr


ROUNDING = 1e-9
"""Of a period: an epoch this near to a change counts as there.

Epochs, computed as progress · epochs, round by about 4e-16 · epochs, so this holds for 2 million periods. A minibatch
that truly begins before the change does so by more, in periods of fewer than 1e9 minibatches.
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


@dataclass(frozen=True)
class CosineDecay:
    """Half a cosine from lr to lr · final (Loshchilov and Hutter 2017, equation 5, without restarts)."""

    final: float = 0.0

    def __post_init__(self) -> None:
        _check_shares(self, "final")

    def rate(self, lr: float, progress: float, epoch: float) -> float:
        """Return lr · (final + (1 - final) · (1 + cos(π · progress)) / 2)."""
        return lr * (self.final + (1 - self.final) * (1 + cos(pi * min(1.0, progress))) / 2)


@dataclass(frozen=True)
class OneCycle:
    """Straight up from lr · first to lr at `peak` of the run, straight down to lr · final (Smith and Topin 2018)."""

    peak: float = 0.3
    first: float = 0.04
    final: float = 0.0

    def __post_init__(self) -> None:
        _check_shares(self, "peak", "first", "final")

    def rate(self, lr: float, progress: float, epoch: float) -> float:
        """Return the rate on the line up or down."""
        if progress < self.peak:
            return lr * (self.first + (1 - self.first) * progress / self.peak)
        down = (min(1.0, progress) - self.peak) / (1 - self.peak) if self.peak < 1 else 0.0
        return lr * (1 - (1 - self.final) * down)


@dataclass(frozen=True)
class WarmUp:
    """A schedule whose rates rise from 0 in the first `epochs` (Goyal et al. 2017, section 2.2)."""

    then: RateSchedule
    epochs: float

    def rate(self, lr: float, progress: float, epoch: float) -> float:
        """Return the schedule's rate, times the part of the warm-up that is over."""
        return self.then.rate(lr, progress, epoch) * min(1.0, epoch / self.epochs)


def _check_shares(schedule: object, *names: str) -> None:
    for name in names:
        if not 0 <= (value := getattr(schedule, name)) <= 1:
            raise ValueError(f"{name}={value}: the schedule needs 0 <= {name} <= 1")


Decay: TypeAlias = ConstantRate | StepDecay | PolyDecay | CosineDecay | OneCycle
SCHEDULES: dict[str, type[Decay]] = {
    "constant": ConstantRate,
    "step": StepDecay,
    "poly": PolyDecay,
    "cosine": CosineDecay,
    "onecycle": OneCycle,
}
