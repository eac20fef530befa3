"""The seconds of a replica's work, and the pauses of a worker that is slowed down."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, TypeVar

ENOUGH = 2.0
"""Seconds of measurements after which none is repeated: a slow worker would calibrate for as long as it trains."""
T = TypeVar("T")
Clock = Callable[[], float]
Begun = tuple[float, float]
"""A moment by the clock, and by the thread's own."""


class Stopwatch:
    """Measures the seconds of a replica's work.

    synchronize: waits until the device has done its work. throttle: factor by which the worker takes longer than its
    machine would. pause: spends seconds; without it no throttle applies. own: seconds that the machine would take, as
    the processor's time of the calling thread, so that work which waits for a core is not slowed down by the factor as
    well; by default those of the clock.
    """

    def __init__(
        self,
        clock: Clock,
        synchronize: Callable[[], Any],
        throttle: float,
        pause: Callable[[float], Any] | None,
        own: Clock | None = None,
    ) -> None:
        self.clock, self._synchronize = clock, synchronize
        self._throttle, self._pause, self._own = throttle, pause, own

    def seconds(self, work: Callable[[], Any]) -> float:
        """Return the seconds that the work takes once, throttled."""
        begun = self.begin()
        work()
        self._synchronize()
        return self.since(begun)

    def median_seconds(self, work: Callable[[], Any], times: int) -> float:
        """Return the median seconds of the work, throttled, measured as `rounds` does."""
        return median(seconds for (seconds,) in self.rounds([work], times))

    def rounds(self, works: Sequence[Callable[[], Any]], times: int) -> list[list[float]]:
        """Return the seconds of each work in each turn, throttled, without a first turn that warms up.

        There are `times` turns, or fewer once they have taken `ENOUGH` seconds.
        """
        for work in works:
            self.seconds(work)
        found: list[list[float]] = []
        while len(found) < times and sum(map(sum, found)) < ENOUGH:
            found.append([self.seconds(work) for work in works])
        return found

    def begin(self) -> Begun:
        """Return the moment at which work begins."""
        return self.clock(), self._own() if self._own is not None else 0.0

    def since(self, begun: Begun) -> float:
        """Pause for the throttle behind work of this thread. Returns its seconds, including the pause."""
        seconds = self.clock() - begun[0]
        if self._throttle > 1 and self._pause is not None:
            own = seconds if self._own is None else self._own() - begun[1]
            pause = max(0.0, own * self._throttle - seconds)
            self._pause(pause)
            return seconds + pause
        return seconds

    def waited(self, ready: Iterator[T]) -> Iterator[tuple[float, T]]:
        """Yield each item with the seconds of waiting for it."""
        begun = self.clock()
        for item in ready:
            yield self.clock() - begun, item
            begun = self.clock()
