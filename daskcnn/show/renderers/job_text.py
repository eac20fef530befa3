"""A job's keys and its data set in aligned text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from daskcnn.job.reference import KeyEntry, TableEntry
from daskcnn.show.text import aligned, clean, count, number, plural, size

_MOST_CHANNELS = 16


def readable_dataset(found: Mapping[str, Any]) -> str:
    """The facts of a data set, then a line for each class."""
    train, test = found["train"], found["test"]
    H, W, C = found["shape"]
    several = found["labels"] == "several"
    shuffle = f", seed {found['seed']}" if found["order"] == "shuffled" else ""
    rows = [
        ("data", f"{clean(found['name'])} at {clean(found['path'])}, fingerprint {found['fingerprint'][:12]}"),
        ("images", f"{H}x{W}x{C} {found['dtype']}, {size(found['bytes'])} in all{_nodata(found['nodata'])}"),
        ("samples", f"{count(train['samples'])} to train, {count(test['samples'])} to test"),
        ("chunks", f"{train['chunks']:,} + {test['chunks']:,} of {count(found['chunk'])} samples"),
        ("order", f"{found['order']}{shuffle}; {plural(count(found['sources']), 'source file')}"),
        ("labels", "several a sample" if several else "one class a sample"),
        ("mean", _numbers(found["mean"])),
        ("deviation", _numbers(found["deviation"])),
        *(_weights(found["weights"]) if found["weights"] else ()),
        *(("picture", clean(file)) for file in found["pictures"]),
    ]
    head = [f"{name:<10}{text}" for name, text in rows]
    label = "label" if several else "class"
    table = [(label, "train", "test"), *((clean(c["class"]), count(c["train"]), count(c["test"])) for c in _of(found))]
    return "\n".join([*head, "", *aligned(table)])


def _of(found: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    classes: Sequence[Mapping[str, Any]] = found["classes"]
    return classes


def _nodata(value: float | None) -> str:
    return "" if value is None else f"; {value:g} stands for no data"


def _numbers(values: Sequence[float]) -> str:
    """Those of the first channels."""
    more = f", ... ({len(values):,} channels)" if len(values) > _MOST_CHANNELS else ""
    return ", ".join(map(number, values[:_MOST_CHANNELS])) + more


def _weights(weights: Mapping[str, float]) -> list[tuple[str, str]]:
    text = ", ".join(f"{name} {number(weights[name])}" for name in ("least", "mean", "most"))
    return [("weights", f"one for each training sample: {text}")]


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
