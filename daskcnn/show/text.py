"""Numbers and messages as people read them, in ASCII.

Tables and lines of a report as people read them: what text and pages are made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from daskcnn.errors import escaped

_SPACES = str.maketrans("\n\t", "  ")


def clean(message: object) -> str:
    """One line without control characters: what a worker or an exception says must not drive the terminal.

    Line feeds and tabs become spaces, all else an escape.
    """
    return escaped(str(message).translate(_SPACES)).strip()


def plain(text: object) -> str:
    """Lines without control characters, as a terminal may have them."""
    return escaped(str(text), keep="\n")


def number(value: float | None) -> str:
    """Four significant digits: 0.1235, 1.235, 12.35; '-' where there is none."""
    if value is None:
        return "-"
    if not math.isfinite(value) or abs(value) >= 1e5 or 0 < abs(value) < 1e-3:
        return f"{value:.3g}"
    return f"{value:.{3 if abs(value) < 10 else 2 if abs(value) < 100 else 1}f}"


def percent(share: float | None) -> str:
    """A share of 1 as '55.1 %'; '-' where there is none."""
    return "-" if share is None else f"{100 * share:.1f} %"


def time_shares(
    of: float, *, busy: float, evaluation: float | None, wait: float | None, communication: float | None
) -> str:
    """What the workers' seconds went to: 'busy 67.5 %, waiting 1.5 %, other 31.0 %'; empty where no time passed.

    of: seconds of the run times its workers. Other is what lies before the first round, between two, and after a
    worker's loss. None: not measured apart.
    """
    measured = {"busy": busy, "evaluation": evaluation, "waiting": wait, "communication": communication}
    spent = {what: seconds for what, seconds in measured.items() if seconds is not None}
    if not of or not any(spent.values()):
        return ""
    shares = {what: seconds / of for what, seconds in (spent | {"other": max(0.0, of - sum(spent.values()))}).items()}
    return ", ".join(f"{what} {percent(share)}" for what, share in shares.items())


def judged(accuracy: float | None, loss: float | None, auc: float | None) -> str:
    """How good a network is: 'accuracy 55.1 %, loss 1.235, AUC 0.9012'; a loss without accuracy alone."""
    found = [] if accuracy is None and loss is not None else [f"accuracy {percent(accuracy)}"]
    return ", ".join([*found, f"loss {number(loss)}", *([] if auc is None else [f"AUC {auc:.4f}"])])


def count(value: float | None) -> str:
    """A whole number with separators, or one decimal below ten: '48,000', '2.5'; '-' where there is none."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.1f}" if abs(value) < 10 and value != int(value) else f"{value:,.0f}"


def shard_text(kernels: int, divided: str, of: int) -> str:
    """How much of a layer a worker has: its kernels, or its part of the samples."""
    return f"{100 * kernels / max(of, 1):.0f} %" if divided == "samples" else count(kernels)


def plural(amount: int | str, thing: str) -> str:
    """As one says it: '1 core', '2 cores', '0.5 epochs'."""
    return f"{amount} {thing}" if str(amount) == "1" else f"{amount} {thing}s"


def clock(seconds: float | None) -> str:
    """'1:23' or '2:01:23'; '-' where there is none."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def duration(seconds: float | None) -> str:
    """'4.2 s', '4 min 12 s' or '2 h 05 min'; '-' where there is none."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def size(nbytes: float | None) -> str:
    """'812 B', '12.3 MB', '1.2 GB', in powers of 1000; '-' where there is none."""
    if nbytes is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.1f} TB"


def aligned(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Rows of cells as lines of equal columns: the first `left` ones to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(_padded(row, widths, left)).rstrip() for row in rows]


def _padded(row: Sequence[str], widths: Sequence[int], left: int) -> list[str]:
    cells = enumerate(zip(row, widths, strict=True))
    return [cell.ljust(width) if i < left else cell.rjust(width) for i, (cell, width) in cells]


Row = TypeVar("Row")
Column = tuple[str, Callable[[Row], Any], Callable[[Any], str]]
"""A heading, what it shows of a row, and how that is written. A column without any value is left out."""


@dataclass(frozen=True, slots=True)
class TextTable:
    """Cells as people read them.

    left: columns that stand to the left. workers: the worker that each row is about, None where it is about several.
    note: what is left out. headed: the text has the headings too.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1
    workers: tuple[str | None, ...] = ()
    note: str = ""
    headed: bool = True

    def lines(self) -> list[str]:
        """Aligned text: the headings, a line for each row, and the note."""
        rows = [self.head, *self.rows] if self.headed else self.rows
        return [*aligned(rows, left=self.left), *([self.note] if self.note else [])] if self.rows else []


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a report: lines with their labels, or a table. name: for links; title: empty where text has none."""

    name: str
    title: str
    facts: tuple[tuple[str, str], ...] = ()
    table: TextTable | None = None


def text_table(
    rows: Sequence[Row],
    columns: Sequence[Column[Row]],
    *,
    left: int = 1,
    most: int | None = None,
    worker: Callable[[Row], str | None] | None = None,
) -> TextTable:
    """The table of these rows, or of `most` of them, evenly spread. worker: the one that a row is about."""
    shown = [(heading, value, text) for heading, value, text in columns if any(value(row) is not None for row in rows)]
    kept = spread(rows, most)
    note = "" if len(kept) == len(rows) else f"({len(kept)} of {count(len(rows))}; --rounds shows all)"
    return TextTable(
        head=tuple(heading for heading, _, _ in shown),
        rows=tuple(tuple("-" if (v := value(row)) is None else text(v) for _, value, text in shown) for row in kept),
        left=left,
        workers=tuple(worker(row) for row in kept) if worker else (None,) * len(kept),
        note=note,
    )


def spread(rows: Sequence[Row], most: int | None) -> list[Row]:
    """At most `most` of the rows, evenly spread, in their order; the first and the last among them."""
    if most is None or len(rows) <= most:
        return list(rows)
    return [rows[i * (len(rows) - 1) // max(most - 1, 1)] for i in range(most)]
