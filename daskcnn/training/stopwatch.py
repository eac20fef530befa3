"""Seconds of a worker's work, stretched where its speed is throttled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, TypeVar

T = TypeVar("T")
Clock = Callable[[], float]


class Stopwatch:
    """Measures what a replica does.

    Parameters
    ----------
    clock : gives the time in seconds.
    synchronize : waits until the device has done what it was asked for.
    throttle : factor by which the worker takes longer than its machine would.
    pause : spends seconds; without it no throttle applies.
    """

    def __init__(
        self,
        clock: Clock,
        synchronize: Callable[[], Any],
        throttle: float = 1.0,
        pause: Callable[[float], Any] | None = None,
    ) -> None:
        self.clock, self._synchronize = clock, synchronize
        self._throttle, self._pause = throttle, pause

    def seconds(self, work: Callable[[], Any]) -> float:
        """Seconds that the work takes this once, throttled."""
        begun = self.clock()
        work()
        self._synchronize()
        return self.slowed(self.clock() - begun)

    def median_seconds(self, work: Callable[[], Any], times: int) -> float:
        """Median of the seconds that the work takes, throttled. A first time is left out."""
        return median([self.seconds(work) for _ in range(times + 1)][1:])

    def slowed(self, seconds: float) -> float:
        """The same seconds times the throttle, spent."""
        if self._throttle > 1 and self._pause is not None:
            self._pause(seconds * (self._throttle - 1))
            return seconds * self._throttle
        return seconds

    def waited(self, ready: Iterator[T]) -> Iterator[tuple[float, T]]:
        """Each item with the seconds that it was waited for."""
        begun = self.clock()
        for item in ready:
            yield self.clock() - begun, item
            begun = self.clock()
