"""A job's keys and its data set in aligned text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from daskcnn.job.reference import TableEntry
from daskcnn.show.text import aligned, clean, count, number, plural, size

_MOST_CHANNELS = 16


def readable_dataset(found: Mapping[str, Any]) -> str:
    """Return the facts of a data set, then a line for each class."""
    train, test = found["train"], found["test"]
    H, W, C = found["shape"]
    several = found["labels"] == "several"
    shuffle = f", seed {found['seed']}" if found["order"] == "shuffled" else ""
    nodata = "" if found["nodata"] is None else f"; {found['nodata']:g} stands for no data"
    weights = ", ".join(
        f"{name} {number(found['weights'][name])}" for name in ("least", "mean", "most") if found["weights"]
    )
    rows = [
        ("data", f"{clean(found['name'])} at {clean(found['path'])}, fingerprint {found['fingerprint'][:12]}"),
        ("images", f"{H}x{W}x{C} {found['dtype']}, {size(found['bytes'])} in all{nodata}"),
        ("samples", f"{count(train['samples'])} to train, {count(test['samples'])} to test"),
        ("chunks", f"{train['chunks']:,} + {test['chunks']:,} of {count(found['chunk'])} samples"),
        ("order", f"{found['order']}{shuffle}; {plural(count(found['sources']), 'source file')}"),
        ("labels", "several a sample" if several else "one class a sample"),
        ("mean", _numbers(found["mean"])),
        ("deviation", _numbers(found["deviation"])),
        *([("weights", f"one for each training sample: {weights}")] if weights else ()),
        *(("picture", clean(file)) for file in found["pictures"]),
    ]
    head = [f"{name:<10}{text}" for name, text in rows]
    label = "label" if several else "class"
    table = [(label, "train", "test")]
    table += [(clean(c["class"]), count(c["train"]), count(c["test"])) for c in found["classes"]]
    return "\n".join([*head, "", *aligned(table)])


def _numbers(values: Sequence[float]) -> str:
    more = f", ... ({len(values):,} channels)" if len(values) > _MOST_CHANNELS else ""
    return ", ".join(map(number, values[:_MOST_CHANNELS])) + more


MOST = 110  # columns of the text without a width, and at the most


def readable_keys(tables: Iterable[TableEntry], width: int | None = None) -> str:
    """Return every key with its type, its default and its meaning, under the heading of its table."""
    columns = max(40, min(width or MOST, MOST))
    return "\n\n".join("\n".join(_table(table, columns)) for table in tables)


def _table(table: TableEntry, columns: int) -> Iterator[str]:
    of = "strategy" if table.name == "rule" else "step"
    yield f"[{table.name}]" + (f" of {of} {table.member}" if table.member else "")
    yield from _wrapped(table.meaning, columns, "")
    for key in table.keys:
        default = f" = {key.default}" if key.default else ""
        yield from _wrapped(f"{table.name}.{key.name}{default}  ({key.type})", columns, "  ")
        yield from _wrapped(key.meaning, columns, "      ")


def _wrapped(text: str, columns: int, indent: str) -> list[str]:
    plain = text.replace("`", "")
    further = indent if indent != "  " else "      "
    return textwrap.wrap(plain, columns, initial_indent=indent, subsequent_indent=further, break_on_hyphens=False)
