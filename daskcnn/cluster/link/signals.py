"""Signals that end the process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

from daskcnn.errors import Interrupted


class Signals:
    """The first SIGINT or SIGTERM: raised at once, or once `polled` kept for who asks. A second ends the process.

    While threads are at work, Dask's or our own, an exception that may come anywhere, even within the start of one,
    would leave them behind or print a traceback.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self.polled = False

    def _handle(self, signum: int, _: FrameType | None) -> None:
        if self.first is not None:
            os._exit(128 + signum)
        self.first = signum
        if not self.polled:
            self.check()

    def check(self) -> None:
        """Raise Interrupted if there was a signal."""
        if self.first is not None:
            raise Interrupted(f"interrupted by signal {self.first} before training began", self.first)

    @contextmanager
    def installed(self) -> Iterator[Self]:
        """Handle signals inside, where this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)
