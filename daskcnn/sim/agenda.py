"""The agenda of a simulation: a heap of events on a simulated clock."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any


class Agenda:
    """Calls actions in the order of their times, those of one time in the order they were noted. Starts at 0 s."""

    __slots__ = ("_heap", "_serial", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = count()

    def at(self, when: float, action: Callable[..., None], *args: Any) -> None:
        """Note an action for this time, which is not in the past."""
        assert when >= self.now, f"{action}: {when} is before now, {self.now}"
        heappush(self._heap, (when, next(self._serial), action, args))

    def run(self) -> None:
        """Until nothing is left to be done."""
        heap = self._heap
        while heap:
            self.now, _, action, args = heappop(heap)
            action(*args)
