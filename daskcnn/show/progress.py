"""How a run's events are shown while it goes on: a live display on a terminal, plain lines anywhere else."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Protocol, Self, TextIO

from rich.console import Console

from daskcnn.events import Event, Warned, WorkerIgnored, WorkerLeftOut, WorkerLost
from daskcnn.show.lines import stamped
from daskcnn.show.live import TerminalProgress


class Progress(Protocol):
    """Shows a run's events; a context manager around the run."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...

    def handle(self, event: Event) -> None:
        """Show one event; those that a display has no use for are passed over. A failing stream ends no run."""
        ...


class PlainProgress:
    """A line an epoch, and a line for what is out of the ordinary; no control characters. Each begins with the time."""

    def __init__(self, stream: TextIO, now: Callable[[], datetime] = datetime.now) -> None:
        self._stream, self._now = stream, now

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def handle(self, event: Event) -> None:
        """Write the event's lines and flush."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        for line in stamped(event, self._now()):
            with suppress(OSError):  # a full disk behind a redirected log
                print(line.encode(encoding, "replace").decode(encoding), file=self._stream, flush=True)


class WarningsOnly(PlainProgress):
    """Lines for warnings, and for workers that are not used or lost."""

    def handle(self, event: Event) -> None:
        """Write the event's lines if it is a warning."""
        if isinstance(event, Warned | WorkerLost | WorkerIgnored | WorkerLeftOut):
            super().handle(event)


def choose(stream: TextIO, json_mode: bool, quiet: bool = False) -> Progress:
    """The display for a stream: live on a terminal that can show it, plain lines otherwise.

    With `json_mode` stdout belongs to the summary, and stderr takes the stream's place. `quiet`: warnings, on stderr.
    """
    if quiet:
        return WarningsOnly(sys.stderr)
    stream = sys.stderr if json_mode else stream
    return TerminalProgress(Console(file=stream, highlight=False)) if _can_show(stream) else PlainProgress(stream)


def _can_show(stream: TextIO) -> bool:
    utf8 = (getattr(stream, "encoding", None) or "").lower().replace("-", "") == "utf8"
    return stream.isatty() and utf8 and os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown")


def shown(say: Callable[[str], None]) -> Callable[[str, int, int], None]:
    """Tell a stage once, and every tenth of it."""
    told: dict[str, int] = {}

    def progress(stage: str, done: int, total: int) -> None:
        tenth = 10 * done // total if total else 0
        if told.get(stage) != tenth:
            told[stage] = tenth
            say(f"data: {stage}" + (f" {10 * tenth} %" if total else ""))

    return progress
