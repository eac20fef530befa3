"""Small damage to a JSON document: every key dropped, every value replaced."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

Path = tuple[Any, ...]
Document = dict[str, Any]

DROPPED = object()

VALUES: tuple[Any, ...] = (
    *(DROPPED, None, True, 0, -1, 10**30, 0.5, 1e308, -1e308, "", "x", "\x1b[2J", [], [[]], [None], [0, 1, 2]),
    *({}, {"a": {}}, [["x"] * 3] * 3, {"": None}),
)
"""What takes the place of a value."""


def mutations(document: Document, one_in: int = 1) -> Iterator[tuple[str, Document]]:
    """Changes of one place, each with its name: every value at every place, or one value in a few, in turns."""
    for number, place in enumerate(_places(document)):
        for value in VALUES[number % one_in :: one_in]:
            changed = copy.deepcopy(document)
            *above, last = place
            inner: Any = changed
            for key in above:
                inner = inner[key]
            if value is DROPPED:
                del inner[last]
            elif inner[last] == value and type(inner[last]) is type(value):
                continue
            else:
                inner[last] = value
            shown = "dropped" if value is DROPPED else json.dumps(value)
            yield f"{'.'.join(map(str, place))}: {shown}", changed
    yield "an unknown key", document | {"unknown": {"a": [1]}}


def _places(inner: Any, place: Path = ()) -> Iterator[Path]:
    """The keys of tables, and the first and last of lists."""
    if isinstance(inner, dict):
        keys: list[Any] = list(inner)
    elif isinstance(inner, list) and inner:
        keys = sorted({0, len(inner) - 1})
    else:
        return
    for key in keys:
        yield (*place, key)
        yield from _places(inner[key], (*place, key))
