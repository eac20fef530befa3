"""Links, and the change of a worker's speed over time: constant, drifting, a random walk, or with pauses.

Bandwidths are bytes a second each way. A cluster file names the kind of speed. Its `pace` tells when work is done that
begins now and takes a number of seconds at the nominal speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal, Protocol, Self

import numpy as np
from pydantic import Field, model_validator

from daskcnn.job.options import Options

Factor = Annotated[float, Field(ge=1e-3, le=1e3)]
"""Times the nominal speed."""


class Line:
    """One direction of a shared link, which carries messages in the order of their beginnings."""

    __slots__ = ("_free", "bandwidth")

    def __init__(self, bandwidth: float = math.inf) -> None:
        self.bandwidth = bandwidth
        self._free = 0.0

    def carry(self, begin: float, nbytes: float) -> float:
        """Return the time when the last of these bytes has passed, if the first comes at `begin`."""
        if self.bandwidth == math.inf:
            return begin
        free = self._free
        self._free = free = (begin if begin > free else free) + nbytes / self.bandwidth  # `max` takes twice as long
        return free


class Link:
    """A worker's own link: latency in seconds a message."""

    __slots__ = ("bandwidth", "latency")

    def __init__(self, bandwidth: float = math.inf, latency: float = 0.0) -> None:
        self.bandwidth, self.latency = bandwidth, latency

    def arrival(self, begin: float, nbytes: float, shared: Line) -> float:
        """Return the time when a message sent at `begin` has passed both this link and a shared one.

        The slower of the two decides. The shared one is taken only for as long as the bytes need it, so that a slow
        worker does not keep it from the others.
        """
        first = begin + self.latency
        own, carried = first + nbytes / self.bandwidth, shared.carry(first, nbytes)
        return own if own > carried else carried


class Pace(Protocol):
    """A worker's speed over one run."""

    def end(self, begin: float, work: float) -> float:
        """Return the time when `work` seconds of nominal work are done that begin at `begin`.

        Calls never go back in time.
        """


def slowness(pace: Pace, at: float) -> float:
    """Return how many times its nominal seconds a worker needs at this time. In a pause it is not asked."""
    moment = 1e-3
    return 1.0 if at == 0 or isinstance(pace, Stalling) else (pace.end(at, moment) - at) / moment


class Constant(Options):
    """The nominal speed throughout."""

    kind: Literal["constant"] = "constant"

    def pace(self, rng: np.random.Generator) -> Pace:
        """Return the nominal speed."""
        return self

    def end(self, begin: float, work: float) -> float:
        """Return the time when the work is done."""
        return begin + work


class Drift(Options):
    """From the nominal speed to `to` times as fast within `seconds`, in a straight line; then it stays there.

    after: seconds of the nominal speed before that.
    """

    kind: Literal["drift"]
    to: Factor
    seconds: float = Field(ge=1e-6)
    after: float = Field(default=0.0, ge=0)

    def pace(self, rng: np.random.Generator) -> Pace:
        """Return the speed over time, which is not random."""
        return self

    def end(self, begin: float, work: float) -> float:
        """Return the time when the work is done, at speed 1 + (to - 1)·t/T until T, then `to`."""
        if (nominal := self.after - begin) > 0:
            if work <= nominal:
                return begin + work
            return self.end(self.after, work - nominal)
        return self.after + self._drifted(begin - self.after, work)

    def _drifted(self, begin: float, work: float) -> float:
        """Return the same, if the drift begins at 0."""
        to, until = self.to, self.seconds
        if begin >= until:
            return begin + work / to
        slope = (to - 1) / until
        speed = 1 + slope * begin
        if (possible := (speed + to) / 2 * (until - begin)) < work:
            return until + (work - possible) / to
        # speed·d + slope·d²/2 = work, in the form that a slope near 0 does no harm
        return begin + 2 * work / (speed + math.sqrt(speed * speed + 2 * slope * work))


class Walk(Options):
    """A random walk: every `every` seconds the speed is multiplied by e^x, x normal with deviation `spread`.

    It stays between `lowest` and `highest` times the nominal speed.
    """

    kind: Literal["walk"]
    every: float = Field(ge=1e-3)
    spread: float = Field(gt=0, le=10)
    lowest: float = Field(default=0.25, ge=1e-3, le=1)
    highest: float = Field(default=1.0, ge=1, le=1e3)

    def pace(self, rng: np.random.Generator) -> Pace:
        """Return the speed over time, drawn from this generator."""
        return Wandering(self, rng)


class Stall(Options):
    """Pauses of `seconds` each: at these moments, or at random ones, every `every` seconds on average."""

    kind: Literal["stall"]
    seconds: float = Field(gt=0, le=1e6)
    at: list[Annotated[float, Field(ge=0)]] | None = Field(default=None, min_length=1)
    every: float | None = Field(default=None, ge=1e-3)

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.at is None) == (self.every is None):
            raise ValueError("give either at = [moments] or every = seconds between two pauses")
        return self

    def pace(self, rng: np.random.Generator) -> Pace:
        """Return the speed over time, with pauses drawn from this generator."""
        return Stalling(self, rng)


Speed = Annotated[Constant | Drift | Walk | Stall, Field(discriminator="kind")]


class Slowest:
    """The pace of workers that do each piece of work together: that of the last one."""

    def __init__(self, paces: Sequence[Pace]) -> None:
        self._paces = paces

    def end(self, begin: float, work: float) -> float:
        """Return the time when the work of all is done."""
        return max(pace.end(begin, work) for pace in self._paces)


class Wandering:
    """Constant within each interval of `every` seconds."""

    def __init__(self, walk: Walk, rng: np.random.Generator) -> None:
        self._walk, self._rng = walk, rng
        self._interval, self._turn, self._speed = 1, walk.every, 1.0

    def end(self, begin: float, work: float) -> float:
        """Return the time when the work is done at the speeds drawn for its time."""
        walk = self._walk
        while True:
            while begin >= self._turn:  # draw the next interval's speed
                factor = math.exp(self._rng.normal(0.0, walk.spread))
                self._speed = min(walk.highest, max(walk.lowest, self._speed * factor))
                self._interval += 1
                self._turn = self._interval * walk.every
            if (end := begin + work / self._speed) <= self._turn:
                return end
            work -= (self._turn - begin) * self._speed
            begin = self._turn


class Stalling:
    """The nominal speed, and nothing at all in a pause. One that would overlap another begins after it."""

    def __init__(self, stall: Stall, rng: np.random.Generator) -> None:
        self._stall, self._rng = stall, rng
        self._moments = sorted(stall.at or ())[::-1]
        self._from = self._until = -math.inf
        self._next(0.0)

    def end(self, begin: float, work: float) -> float:
        """Return the time when the work is done, pauses included."""
        if not work:
            return begin  # even where a pause begins
        while True:
            while self._until <= begin:
                self._next(self._until)
            if begin < self._from:
                if begin + work <= self._from:
                    return begin + work
                work -= self._from - begin
            begin = self._until

    def _next(self, after: float) -> None:
        """Set the pause after this moment."""
        if self._stall.every is not None:
            self._from = after + self._rng.exponential(self._stall.every)
        else:
            self._from = max(after, self._moments.pop()) if self._moments else math.inf
        self._until = self._from + self._stall.seconds
