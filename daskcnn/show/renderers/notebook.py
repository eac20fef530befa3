"""The live display of a run in a Jupyter notebook: a piece of HTML that is replaced while the run goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from daskcnn.events import Event, RunEnded
from daskcnn.markup import as_lines, as_table
from daskcnn.show.board import Board, WorkerLine
from daskcnn.show.lines import WARNINGS, describe
from daskcnn.show.text import count, epochs, number, percent

EVERY = 0.5  # seconds between two drawings, at least: each is a message to the browser
_MOST = 20  # lines that are kept of what is out of the ordinary
_HEAD = ("worker", "device", "samples", "loss", "images/s", "busy", "wait", "comm", "state")


class NotebookView:
    """HTML that IPython displays, and text in its place."""

    def __init__(self, html: str, text: str) -> None:
        self._html, self._text = html, text

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        return self._html


class NotebookProgress:
    """A display of a run's progress and figures, a row a worker, and warnings."""

    def __init__(self, display: Callable[[NotebookView], Any], now: Callable[[], float] = time.monotonic) -> None:
        self._display, self._now = display, now
        self._board, self._lines = Board(), list[str]()
        self._shown: Any = None  # IPython's handle of what it displays
        self._drawn = float("-inf")

    def __enter__(self) -> Self:
        self._draw()
        return self

    def __exit__(self, *_: object) -> None:
        self._draw()

    def handle(self, event: Event) -> None:
        """Take in the event, and draw, unless that was done a moment ago."""
        self._board.apply(event, self._now())
        if isinstance(event, WARNINGS):
            self._lines = [*self._lines, *describe(event)][-_MOST:]
        if isinstance(event, RunEnded) or self._now() - self._drawn >= EVERY:
            self._draw()

    def _draw(self) -> None:
        self._drawn = self._now()
        drawing = NotebookView(self._html(), self._title())
        with suppress(Exception):  # the notebook's kernel may have lost its browser
            if self._shown is None:
                self._shown = self._display(drawing)
            else:
                self._shown.update(drawing)

    def _title(self) -> str:
        board = self._board
        epoch = f"epoch {epochs(board.epoch)}/{board.epochs:g}" if board.epochs else ""
        return " · ".join(filter(None, [board.run or "daskcnn", board.strategy, board.status, epoch]))

    def _html(self) -> str:
        board = self._board
        parts = [f'<progress max="1" value="{min(1.0, board.fraction):.4f}" style="width: 100%"></progress>']
        parts.append(as_table(self._title(), [list(filter(None, self._figures()))]))
        if board.workers:
            parts.append(as_table("Workers", map(_row, board.workers.values()), head=_HEAD))
        if self._lines:
            parts.append(as_lines("Out of the ordinary", "\n".join(self._lines)))
        return "".join(parts)

    def _figures(self) -> list[str]:
        board = self._board
        accuracy = percent(board.validation_accuracy, board.validation_error)
        return [
            f"loss {number(board.loss)}",
            "" if board.accuracy is None else f"accuracy {percent(board.accuracy)}",
            "" if board.validation_accuracy is None else f"validation {accuracy}",
            "" if board.best_validation is None else f"best {percent(board.best_validation)}",
            "" if board.samples_per_second is None else f"{count(board.samples_per_second)} images/s",
            "" if board.seconds_per_step is None else f"{number(board.seconds_per_step)} s/step",
            "" if board.lr is None else f"lr {number(board.lr)}",
            "" if board.step_samples is None else f"{count(board.step_samples)} samples a step",
            "" if board.noise_scale is None else f"noise scale {count(board.noise_scale)}",
        ]


def _row(row: WorkerLine) -> tuple[str, ...]:
    shares = ["-"] * 3 if row.shares is None else [f"{100 * share:.0f} %" for share in row.shares]
    state = row.state or row.doing
    return row.name, row.device, count(row.given), number(row.loss), count(row.speed), *shares, state


def in_notebook() -> NotebookProgress | None:
    """Return the display for this process's notebook; None outside of one."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is None:
        return None
    from IPython.display import display

    return NotebookProgress(lambda drawing: display(drawing, display_id=True))
