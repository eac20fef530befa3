"""Tables and lines of a report as people read them: what text and pages are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from daskcnn.show.text import aligned, count

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
