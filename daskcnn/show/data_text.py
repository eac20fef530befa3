"""What a data set holds, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
