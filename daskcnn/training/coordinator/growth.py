"""The samples of a step, which grow in the course of a run as the gradient noise scale allows. No I/O, no clock.

A step of b samples takes F + c·b seconds: F however few its samples are, for its meeting and for what each pass takes
at any size. With the noise scale B the same progress takes steps in proportion to 1 + B / b (McCandlish et al. 2018,
arXiv 1812.06162, section 2.3), so it takes seconds in proportion to::

    (1 + B / b) · (F + c·b)

That is the goodput of Pollux (Qiao et al. 2021, arXiv 2008.12260). It is least at b = √(B·F / c): where F is small
nothing is gained by more samples, however large the noise scale is. After each round of all, b is the job's times that
power of two which has the least, if that saves enough.

The learning rate grows with b, by the power that fits the optimizer (`rate_power`): 1 for sgd and lars, ½ for adamw.
The optimizer's state stays as it is, momentum included, and so does the schedule, which goes by samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from daskcnn.events import StepResized
from daskcnn.partition.rounds import Round
from daskcnn.ps import NoiseScale
from daskcnn.training.coordinator.roster import Measured
from daskcnn.training.coordinator.settings import Settings
from daskcnn.training.round_report import RoundReport

_WORTH: Final = 0.05
"""The part of the seconds to the same progress that another step must save."""
_COST: Final = 0.01
"""The part of its time that a worker alone may spend on measuring the noise."""


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """The seconds of a step of the slowest worker: those that more samples do not change, and those in proportion."""

    fixed: float
    growing: float


def better_step(
    now: int, first: int, most: int, noise: NoiseScale | None, seconds: StepSeconds, worth: float = _WORTH
) -> int:
    """Return the samples of the next steps: those of the present ones, or `first` times a better power of two.

    now, first: samples of a step at present, and at the start of the run. most: that memory and job allow. No step has
    more samples than the noise scale; the present one stays as long as it has no more than that with its error.
    """
    most = max(first, most)
    if noise is None or not noise.known:
        return _largest(first, min(now, most))
    upper = _largest(first, min(most, noise.scale))
    sizes = [first << k for k in range((upper // first).bit_length())]

    def cost(samples: int) -> float:
        return (1 + noise.scale / samples) * (seconds.fixed + seconds.growing * samples / now)

    best = min(sizes, key=cost)
    stays = now <= min(most, max(first, noise.scale + noise.error))
    return now if stays and cost(best) > (1 - worth) * cost(now) else best


def _largest(first: int, most: float) -> int:
    """Return `first` times the largest power of two that is at most this."""
    return first << int(math.log2(max(1.0, most / first)))


class StepGrowth:
    """The samples of the steps of one run.

    book: its entries of a checkpoint, if any.

    Attributes
    ----------
    samples : Of a step, from the next round on.
    """

    def __init__(self, settings: Settings, book: Mapping[str, Any]) -> None:
        self._first, self._allowed, self._power = settings.batch_size, settings.largest_step, settings.rate_power
        kept = book.get("growth", {})
        self.samples = int(kept.get("samples", self._first)) if self.grows else self._first
        self._noise = tuple(map(float, kept.get("noise", ())))  # as a worker alone has measured it
        self._steps: list[StepSeconds] = []  # of the reports since the last decision
        self._scale: NoiseScale | None = None

    @property
    def grows(self) -> bool:
        """True if the job lets steps grow."""
        return self._allowed is not None

    @property
    def rate(self) -> float:
        """The factor of the learning rate."""
        return (self.samples / self._first) ** self._power

    def fit(self, workers: Iterable[Measured]) -> None:
        """Let steps be no larger than each of these workers has memory for: others may have made them so far."""
        if self._allowed is not None:
            self.samples = min(self.samples, _largest(self._first, self._most(workers)))

    def _most(self, workers: Iterable[Measured]) -> int:
        assert self._allowed is not None, "grows"
        return min([self._allowed, *(own.row.largest_step for own in workers if own.row.largest_step is not None)])

    def book(self) -> dict[str, Any]:
        """Return the entries of a checkpoint."""
        return {"growth": {"samples": self.samples, "noise": [*self._noise]}} if self.grows else {}

    def measuring(self, round_: Round, row: Measured | None) -> Round:
        """Return the round of a worker that is alone as it measures the noise, where that may pay at all.

        A step by halves takes the fixed time twice.
        """
        if not (self.grows and round_.alone and row):
            return round_
        fixed = row.row.step_fixed or 0.0
        part = fixed / max(row.seconds * self.samples, fixed) if fixed else 0.0
        if part < _WORTH:  # not even the largest step would save enough
            return round_
        return replace(round_, halved=math.ceil(part / _COST), noise=self._noise)

    def add(self, report: RoundReport, row: Measured | None) -> None:
        """Take in the report of a round. One that ended early says too little of its steps."""
        if not self.grows or report.cut is not None:
            return
        steps = report.round.steps or -(-report.samples // self.samples)
        exchange = 0.0 if report.round.alone else report.communication / steps
        fixed = (row.row.step_fixed or 0.0) if row else 0.0
        self._steps.append(StepSeconds(fixed + exchange, max(report.busy / steps - fixed, 0.0)))
        self._scale, self._noise = report.noise or self._scale, report.norms or self._noise

    def decide(self, workers: Iterable[Measured]) -> StepResized | None:
        """Decide on the steps of the next round, once all have reported. Returns the event of other ones.

        workers: all that may train, each of which must be able to make a whole step.
        """
        if self._allowed is None or not self._steps:
            return None
        slowest = max(self._steps, key=lambda each: each.fixed + each.growing)
        self._steps = []
        before, noise = self.samples, self._scale
        self.samples = better_step(before, self._first, self._most(workers), noise, slowest)
        if self.samples == before:
            return None
        known = {"noise_scale": noise.scale, "noise_error": noise.error} if noise and noise.known else {}
        return StepResized(samples=self.samples, before=before, rate=self.rate, fixed=slowest.fixed, **known)
