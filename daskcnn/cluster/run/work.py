"""Work that a worker or a replica of the run has under way: tasks, and the facts that their results stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from distributed import Future

from daskcnn.training.coordinator.facts import Fact


class PendingWork(Protocol):
    """Tasks whose results a shell waits for."""

    def expects(self, future: Future) -> bool:
        """Whether it is one of those that are waited for now."""
        ...

    def take(self, future: Future, result: Any, now: float) -> list[Fact]:
        """Go on with a result. Returns what the coordinator is to know. Raises Diverged."""
        ...

    def cancel(self) -> None:
        """Give up all that is under way."""
        ...


class TaskWork:
    """One task, and the fact that its result stands for."""

    def __init__(self, future: Future, fact: Callable[[Any, float], Fact]) -> None:
        self._future, self._fact = future, fact

    def expects(self, future: Future) -> bool:
        """Whether this is the task."""
        return future is self._future

    def take(self, future: Future, result: Any, now: float) -> list[Fact]:
        """The fact that the result stands for."""
        return [self._fact(result, now)]

    def cancel(self) -> None:
        """Cancel the task."""
        self._future.cancel()
