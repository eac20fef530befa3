"""How far a long command has come: a bar on a terminal, a line for every tenth anywhere else. On stderr."""

from __future__ import annotations

import sys
import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from daskcnn.show.stderr import say

_TURNS = 2  # times a second that the bar is drawn


class Counter:
    """Counts up to a total. A context manager around the work; `done` is what was there before it."""

    def __init__(self, what: str, total: int, done: int = 0) -> None:
        self._what, self._total, self._done = what, total, done
        self._told = 10 * done // max(1, total)
        self._begun, self._before = time.monotonic(), done
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> Self:
        self._begun = time.monotonic()
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            console = Console(stderr=True)
            self._bar = Progress(*columns, console=console, refresh_per_second=_TURNS, transient=True)
            self._task = self._bar.add_task(self._what, total=self._total, completed=self._done)
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, count: int) -> None:
        """Count more of it."""
        self._done += count
        if self._bar is not None:
            self._bar.advance(self._task, count)
            return
        tenth = 10 * self._done // max(1, self._total)
        if tenth > self._told:
            self._told = tenth
            rate = (self._done - self._before) / max(1e-9, time.monotonic() - self._begun)
            say(f"{self._what}: {10 * tenth} %, {rate:,.0f} a second")
