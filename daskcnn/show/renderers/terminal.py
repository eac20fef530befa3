"""Displays in a terminal: the live display of a run, plain lines, a bar, notes on stderr."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Literal, Protocol, Self, TextIO

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from daskcnn.events import Event, RunResumed, WorkerJoined
from daskcnn.show.board import Board, WorkerLine
from daskcnn.show.lines import WARNINGS, describe, stamped
from daskcnn.show.text import clean, clock, count, epochs, number, percent, plain

_SCROLLED = (*WARNINGS, WorkerJoined, RunResumed)
_GOOD = (WorkerJoined, RunResumed)
_STATE_STYLES = {"lost": "bold red", "left": "dim", "ignored": "dim"}
_STATUS_STYLES = {"starting": "yellow", "calibrating": "yellow", "training": "cyan", "done": "bold green"}
_WIDE = 112  # columns from which a worker's line has room for its bar
_NARROW = 80  # columns below which it has room for what matters most
_MAX_WIDTH, _BAR_CELLS = 120, 12
_SHARE_STYLES = ("green", "yellow", "blue")
_CHROME_LINES = 9  # of the display besides the workers' lines


class TerminalProgress:
    """A panel, redrawn in place: the run, its progress, a line a worker; warnings scroll by above it."""

    def __init__(self, console: Console, *, now: Callable[[], float] = time.monotonic) -> None:
        self._console, self._now, self._began = console, now, now()
        self._board = Board()
        self._lock = threading.Lock()  # events come from the driver, redraws from rich's thread
        redirects = console.file is sys.stdout
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=4, redirect_stdout=redirects)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._live.stop()

    def handle(self, event: Event) -> None:
        """Take in the event; the next redraw shows it."""
        with self._lock:
            self._board.apply(event, self._now())
        if isinstance(event, _SCROLLED):
            with suppress(OSError):  # the terminal has gone
                for line in describe(event):
                    self._console.print(Text(line, style="dim" if isinstance(event, _GOOD) else "yellow"))

    def render(self) -> RenderableType:
        """Return the display as of now."""
        with self._lock:
            board, width = self._board, self._console.width
            parts: list[RenderableType] = [self._progress_line(), _figures(board, wide=width >= _WIDE)]
            if board.workers:
                rows = list(board.workers.values())
                room = max(3, self._console.height - _CHROME_LINES)
                parts += [Text(), _worker_table(board, rows[:room], width, bars=not self._console.no_color)]
                if len(rows) > room:
                    parts.append(Text(f"… and {len(rows) - room} more workers", style="dim"))
            look: dict[str, Any] = {"title_align": "left", "border_style": "bright_black"}
            return Panel(Group(*parts), title=_title(board), width=min(width, _MAX_WIDTH), **look)

    def _progress_line(self) -> Table:
        board, now = self._board, self._now()
        line = Table.grid(expand=True, padding=(0, 1))
        for ratio in (None, 1, None, None):
            line.add_column(ratio=ratio, no_wrap=True)
        of = f"{board.epochs:g}" if board.epochs else "-"
        remaining = board.remaining(now) if board.fraction < 1 else None
        left = "" if remaining is None else f" · {clock(remaining)} left"
        line.add_row(
            Text.assemble(("epoch ", "dim"), (f"{epochs(board.epoch)}/{of}", "bold")),
            ProgressBar(total=1.0, completed=board.fraction),
            f"{100 * board.fraction:.0f} %",
            Text(f"{clock(now - self._began)}{left}", style="dim"),
        )
        return line


def _title(board: Board) -> Text:
    status = clean(board.status)
    return Text.assemble(
        (clean(board.run) or "daskcnn", "bold"),
        f" · {clean(board.strategy)} · " if board.strategy else " · ",
        (status, _STATUS_STYLES.get(status, "bold red")),
    )


def _figures(board: Board, *, wide: bool) -> Columns | Text:
    if board.calibrating:
        return Text("workers measure how fast they are before they train", "dim")
    best = f" (best {percent(board.best_validation)})" if board.best_validation is not None else ""
    figures = [("loss", number(board.loss))]
    if board.accuracy is not None:
        figures.append(("accuracy", percent(board.accuracy)))
    if board.validation_accuracy is not None:
        figures.append(("validation", f"{percent(board.validation_accuracy, board.validation_error)}{best}"))
    elif board.validation_loss is not None:
        least = f" (least {number(board.least_validation_loss)})"
        figures.append(("validation loss", f"{number(board.validation_loss)}{least}"))
    if board.seconds_per_step is not None:
        figures += [("step", count(board.step)), ("", f"{number(board.seconds_per_step)} s/step")]
    if board.samples_per_second is not None:
        figures.append(("", f"{count(board.samples_per_second)} images/s"))
    if wide and board.lr is not None:
        figures.append(("lr", number(board.lr)))
    if wide and board.step_samples is not None:
        figures.append(("samples a step", count(board.step_samples)))
    if wide and board.noise_scale is not None:
        figures.append(("noise scale", count(board.noise_scale)))
    texts = [
        Text.assemble((f"{label} " if label else "", "dim"), (value, "bold"), no_wrap=True) for label, value in figures
    ]
    return Columns(texts, padding=(0, 2))


# --- the workers' table: a column is a heading, its alignment and the cell of a row ---

_Cell = Callable[[WorkerLine], str | Text]
_Column = tuple[str, Literal["left", "right"], _Cell]


def _names(board: Board, width: int) -> _Cell:
    """Names; long ones without what all end with, such as a domain, and of what is still long the end."""
    names = [clean(row.name) for row in board.workers.values()]
    same = os.path.commonprefix([name[::-1] for name in names])[::-1]  # noqa: RUF071 - letters are meant
    found = re.search(r"[-_. /:].*", same) if len(names) > 1 and max(map(len, names)) > width else None

    def cell(row: WorkerLine) -> Text:
        name = clean(row.name)
        name = name if found is None else f"{name.removesuffix(found[0])}…"
        return Text(name if len(name) <= width else f"…{name[1 - width :]}")

    return cell


def _share(index: int) -> _Cell:
    return lambda row: "-" if row.shares is None else f"{100 * row.shares[index]:.0f} %"


def _bar(row: WorkerLine) -> Text:
    """Busy, waiting and communicating as stretches of one line."""
    bar, edge, done = Text(), 0.0, 0
    for share, style in zip(row.shares or (), _SHARE_STYLES, strict=False):
        edge += share
        upto = round(edge * _BAR_CELLS)
        bar.append("━" * (upto - done), style)
        done = upto
    return bar


def _state(row: WorkerLine) -> Text:
    return Text(row.state or clean(row.doing), _STATE_STYLES.get(row.state, ""))


def _kernels(board: Board) -> _Cell:
    """Kernels by layer, or per cent of the samples, the numbers in line with those of the other workers."""
    rows = board.workers.values()
    layers = {layer: None for row in rows for layer in row.shards}
    widths = {layer: max(len(row.shards.get(layer, "0")) for row in rows) for layer in layers}
    return lambda row: Text("  ".join(f"{clean(k)} {n:>{widths[k]}}" for k, n in row.shards.items()))


def _columns(board: Board, width: int, *, bars: bool) -> list[_Column]:
    """The columns that there is room for. bars: True if colours can tell their parts."""
    wide, narrow = width >= _WIDE, width < _NARROW
    bar: list[_Column] = [("", "left", _bar)] if wide and bars else []
    name: _Column = ("worker", "left", _names(board, 22 if wide else 14))
    if board.calibrating and any(row.doing for row in board.workers.values()):
        return [name, ("measures", "left", _state)]
    device: _Column = ("device", "left", lambda row: Text(clean(row.device)))
    columns: list[_Column] = [name] if narrow else [name, device]
    if board.seconds_per_step is not None:
        columns += [("kernels", "left", _kernels(board)), ("conv s", "right", lambda row: number(row.conv_seconds))]
    else:
        given: _Column = ("samples", "right", lambda row: count(row.given))
        loss: _Column = ("loss", "right", lambda row: number(row.loss))
        shares = any(row.step is not None for row in board.workers.values())
        step: list[_Column] = [("a step", "right", lambda row: count(row.step))] if shares else []
        columns += [] if narrow else [given, *step, loss]
        columns += [("images/s", "right", lambda row: count(row.speed)), *bar]
        columns += [("busy", "right", _share(0)), ("wait", "right", _share(1)), ("comm", "right", _share(2))]
    if board.asynchronous:
        columns.append(("stale", "right", lambda row: count(row.staleness)))
    if any(row.state or row.doing for row in board.workers.values()):
        columns.append(("state", "left", _state))
    return columns


def _worker_table(board: Board, rows: Sequence[WorkerLine], width: int, *, bars: bool) -> Table:
    padding = 2 if width >= _WIDE else 1
    table = Table(box=None, padding=(0, padding, 0, 0), pad_edge=False, header_style="dim")
    columns = _columns(board, width, bars=bars)
    for heading, justify, _ in columns:
        table.add_column(heading, justify=justify, no_wrap=heading not in ("kernels", "measures"))
    for row in rows:
        table.add_row(*(cell(row) for _, _, cell in columns), style="dim" if row.state else "")
    return table


class Progress(Protocol):
    """Shows a run's events; a context manager around the run."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...

    def handle(self, event: Event) -> None:
        """Show one event; those that a display has no use for are passed over. A failing stream ends no run."""


class PlainProgress:
    """A line, behind the time, for each epoch and for all out of the ordinary; without control characters."""

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
        if isinstance(event, WARNINGS):
            super().handle(event)


def choose(stream: TextIO, json_mode: bool, quiet: bool = False) -> Progress:
    """Return the display for a stream: live on a terminal that can show it, plain lines otherwise.

    With `json_mode` stdout belongs to the summary, and stderr takes the stream's place. `quiet`: warnings, on stderr.
    """
    if quiet:
        return WarningsOnly(sys.stderr)
    stream = sys.stderr if json_mode else stream
    utf8 = (getattr(stream, "encoding", None) or "").lower().replace("-", "") == "utf8"
    if stream.isatty() and utf8 and os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown"):
        return TerminalProgress(Console(file=stream, highlight=False))
    return PlainProgress(stream)


def shown(say: Callable[[str], None]) -> Callable[[str, int, int], None]:
    """Return a function that tells a stage once, and every tenth of it."""
    told: dict[str, int] = {}

    def progress(stage: str, done: int, total: int) -> None:
        tenth = 10 * done // total if total else 0
        if told.get(stage) != tenth:
            told[stage] = tenth
            say(f"data: {stage}" + (f" {10 * tenth} %" if total else ""))

    return progress


WARNING = "warning: "


def say(message: str) -> None:
    """Write a line to stderr, unless its terminal is gone. Names in it may come from outside."""
    with suppress(OSError):
        print(plain(message), file=sys.stderr, flush=True)


def say_warnings(message: str) -> None:
    """Say a message if it is a warning."""
    if message.startswith(WARNING):
        say(message)


def warnings_by(say: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that says a message as a warning."""
    return lambda message: say(f"{WARNING}{message}")


warn = warnings_by(say)  # says a warning on stderr
_TURNS = 2  # times a second that the bar is drawn


class Counter:
    """Counts up to a total. A context manager around the work; `done` counts before it."""

    def __init__(self, what: str, total: int, done: int = 0) -> None:
        self._what, self._total, self._done, self._before = what, total, done, done
        self._told, self._begun = 10 * done // max(1, total), time.monotonic()
        self._bar: Bar | None = None
        self._task = TaskID(0)

    def __enter__(self) -> Self:
        self._begun = time.monotonic()
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            console = Console(stderr=True)
            self._bar = Bar(*columns, console=console, refresh_per_second=_TURNS, transient=True)
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
