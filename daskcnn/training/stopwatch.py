"""The seconds of a replica's work, and the pauses of a worker that is slowed down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, TypeVar

T = TypeVar("T")
Clock = Callable[[], float]


class Stopwatch:
    """Measures the seconds of a replica's work.

    synchronize: waits until the device has done its work. throttle: factor by which the worker takes longer than its
    machine would. pause: spends seconds; without it no throttle applies.
    """

    def __init__(
        self, clock: Clock, synchronize: Callable[[], Any], throttle: float, pause: Callable[[float], Any] | None
    ) -> None:
        self.clock, self._synchronize = clock, synchronize
        self._throttle, self._pause = throttle, pause

    def seconds(self, work: Callable[[], Any]) -> float:
        """Return the seconds that the work takes once, throttled."""
        begun = self.clock()
        work()
        self._synchronize()
        return self.slowed(self.clock() - begun)

    def median_seconds(self, work: Callable[[], Any], times: int) -> float:
        """Return the median seconds of the work, throttled, without the first time."""
        return median([self.seconds(work) for _ in range(times + 1)][1:])

    def slowed(self, seconds: float) -> float:
        """Pause for the throttle. Returns the seconds including the pause."""
        if self._throttle > 1 and self._pause is not None:
            self._pause(seconds * (self._throttle - 1))
            return seconds * self._throttle
        return seconds

    def waited(self, ready: Iterator[T]) -> Iterator[tuple[float, T]]:
        """Yield each item with the seconds of waiting for it."""
        begun = self.clock()
        for item in ready:
            yield self.clock() - begun, item
            begun = self.clock()
