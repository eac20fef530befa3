"""Signals that ask a job to end: what was trained is saved first, in a command and in other Python code."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from daskcnn.errors import Interrupted

HEEDED: dict[signal.Signals, Callable[..., Any] | signal.Handlers] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGUSR1: signal.SIG_DFL,
    signal.SIGUSR2: signal.SIG_DFL,
    signal.SIGXCPU: signal.SIG_DFL,
}
"""Signals that end a job, with the handlers that Python has by itself."""
_TWICE = (signal.SIGINT, signal.SIGTERM)
"""The second of these ends the process at once. Others come again by themselves: a terminal that closes sends SIGHUP
twice, the system SIGXCPU every second, and a batch system SIGTERM after the signal that it was asked to send."""
_BEFORE = " before training began"


class Signals:
    """The first signal that asks the job to end, which is raised at once, or by `check` once `polled`.

    Signals are polled while threads run: an exception as one is started would leave threads or print a traceback. A
    signal that was ignored when the command began stays so, as by `nohup`; but for SIGINT and SIGTERM.

    Parameters
    ----------
    of_command : whether the process is a command's. In other Python code a signal ends in KeyboardInterrupt or
        SystemExit, a second one at once, and handlers that are not Python's own stay.
    limit : seconds after which `check` raises as after a signal; None: never
    """

    def __init__(self, *, of_command: bool = True, limit: float | None = None) -> None:
        self.first: int | None = None
        self.polled = False
        self.limit = limit
        self.ends = None if limit is None else time.monotonic() + limit
        self._of_command, self._asked = of_command, 0

    def _handle(self, signum: int, _: FrameType | None) -> None:
        self._asked += signum in _TWICE
        if self.first is None:
            self.first = signum
            if not self.polled:
                self.check()
        elif self._asked > 1:
            if not self._of_command:
                raise _in_python(Interrupted.by(signum))
            os._exit(128 + signum)

    def check(self) -> None:
        """Raise Interrupted if there was a signal, or the time is over."""
        if self.first is not None:
            raise Interrupted.by(self.first, _BEFORE)
        if self.limit is not None and self.ends is not None and time.monotonic() >= self.ends:
            raise Interrupted.at_limit(self.limit, _BEFORE)

    @contextmanager
    def installed(self) -> Iterator[Self]:
        """Handle signals inside, where this is the main thread."""
        handled: list[signal.Signals] = []
        if threading.current_thread() is threading.main_thread():
            handled = [signum for signum in HEEDED if self._takes(signum)]
        before = {signum: signal.signal(signum, self._handle) for signum in handled}
        try:
            yield self
        except Interrupted as error:
            if self._of_command:
                raise
            raise _in_python(error) from None
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _takes(self, signum: signal.Signals) -> bool:
        """Return True for a signal that no other code handles. dask-jobqueue sets a handler when it is imported."""
        handler = signal.getsignal(signum)
        if self._of_command:
            return signum in _TWICE or handler is not signal.SIG_IGN
        return handler is HEEDED[signum] or getattr(handler, "__module__", "").startswith("dask_jobqueue")


def _in_python(error: Interrupted) -> BaseException:
    """Return the exception that a signal is in Python: no `except Exception` of a loop or a search takes it."""
    text = str(error)
    if error.signum == signal.SIGINT:
        return KeyboardInterrupt(text)
    print(text, file=sys.stderr, flush=True)
    return SystemExit(error.exit_code)
