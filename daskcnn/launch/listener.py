"""A function of the user's that is told a run's events, and may end the run."""

from __future__ import annotations

from collections.abc import Callable
from inspect import iscoroutinefunction
from typing import Any, Self

from daskcnn.errors import Interrupted, JobError, Stop
from daskcnn.events import Event, WorkersCalibrated
from daskcnn.followers import Feeds
from daskcnn.show.progress import Progress

OnEvent = Callable[[Event], object]


def check_listener(function: Any) -> None:
    """Raise JobError for what cannot be told the events, before anything starts."""
    if function is None:
        return
    if not callable(function):
        raise JobError([f"on_event = {function!r:.60}: give a function of one argument, the event"])
    if iscoroutinefunction(function):
        raise JobError([f"on_event = {function!r:.60}: it is never awaited; give a function that is not async"])


ENDED_BY_LISTENER = 0
"""What stands for the number of a signal, where the function ends the run: the run ends as after a signal."""


class Listener:
    """A display that also tells tools and the function every event. What the function raises is kept, and ends the run.

    Attributes
    ----------
    stopped, reason : whether the function raised `Stop`, and what that says.
    error : any other exception that it raised. It is not called again.
    training : whether the workers are calibrated. Before that, what is raised waits: nothing could judge the network.
    """

    def __init__(self, display: Progress, function: OnEvent | None = None, tools: Feeds | None = None) -> None:
        self._display, self._function, self._tools = display, function, tools
        self.stopped = self.training = False
        self.reason: str | None = None
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        self._display.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._display.__exit__(*exc)

    def handle(self, event: Event) -> None:
        """Show the event, and tell the tools and the function."""
        self._display.handle(event)
        if self._tools is not None:
            self._tools.handle(event)
        self.training |= isinstance(event, WorkersCalibrated)
        if self._function is None or self.error is not None:
            return
        try:
            self._function(event)
        except Stop as stop:
            self.stopped, self.reason = True, str(stop) or None
        except Exception as error:
            self.error = error

    @property
    def signal(self) -> int | None:
        """What stands for a signal once the function has ended the run."""
        return ENDED_BY_LISTENER if self.training and (self.stopped or self.error is not None) else None

    def ended(self, interrupted: Interrupted) -> bool:
        """Whether it was the function that ended the run."""
        return interrupted.signum == ENDED_BY_LISTENER

    def raise_error(self) -> None:
        """Raise the function's error, if there was one."""
        if self.error is not None:
            raise self.error
