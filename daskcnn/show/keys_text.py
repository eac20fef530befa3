"""The reference of a job's keys as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from daskcnn.job.reference import KeyEntry, TableEntry

MOST = 110
"""Columns of the text where no width is given, and the most that it has."""


def readable_keys(tables: Iterable[TableEntry], width: int | None = None) -> str:
    """Every key with its type, its default and its meaning, under the heading of its table."""
    columns = max(40, min(width or MOST, MOST))
    return "\n\n".join("\n".join([*_heading(table, columns), *_keys(table, columns)]) for table in tables)


def _heading(table: TableEntry, columns: int) -> list[str]:
    of = "strategy" if table.name == "rule" else "step"
    where = f" of {of} {table.member}" if table.member else ""
    return [f"[{table.name}]{where}", *_wrapped(table.meaning, columns, "")]


def _keys(table: TableEntry, columns: int) -> list[str]:
    return [line for key in table.keys for line in _key(table, key, columns)]


def _key(table: TableEntry, key: KeyEntry, columns: int) -> list[str]:
    default = f" = {key.default}" if key.default else ""
    return [
        *_wrapped(f"{table.name}.{key.name}{default}  ({key.type})", columns, "  "),
        *_wrapped(key.meaning, columns, "      "),
    ]


def _wrapped(text: str, columns: int, indent: str) -> list[str]:
    plain = text.replace("`", "")
    further = indent if indent != "  " else "      "
    return textwrap.wrap(plain, columns, initial_indent=indent, subsequent_indent=further, break_on_hyphens=False)
