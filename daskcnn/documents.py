"""JSON and TOML from outside, in bounds; JSON without NaN for a run's files; pydantic's errors in words.

JSON is bounded before it is parsed: a byte of it can take thirty bytes of memory, as in `[]`. Bytes are counted without
memory, and no document has more values than it has commas, colons and opening brackets.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskcnn.errors import DataError
from daskcnn.files import read_regular, replace_file

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

_LARGE = 8 << 20
_STRETCH = 64 << 10
_MOST_DOTS = 100
_TABLE = "fields"


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most that a document may hold: bytes, keys and values of all kinds at all depths, tables and lists."""

    size: int = 64 << 20
    values: int = 1 << 20
    tables: int = 1 << 18


BOUNDS = Bounds()
"""The bounds of a manifest and of a checkpoint's state. They leave room for a manifest of 400,000 chunks.

Two checksums of a chunk take 160 bytes, as zarr indents them. Reading such a manifest takes less than 500 MB.
"""


def read_json(path: Path, *, remedy: str, bounds: Bounds = BOUNDS) -> Any:
    """Return what a JSON file holds. Raises DataError naming the file and ending in `remedy`."""
    try:
        data = read_regular(path, bounds.size, remedy=remedy)
    except OSError as error:
        raise DataError(path, error.strerror or error, remedy) from error
    return parse_json(data, path, remedy=remedy, bounds=bounds)


def parse_json(data: bytes, where: object, *, remedy: str, bounds: Bounds = BOUNDS) -> Any:
    """Return what JSON text holds. Raises DataError naming `where` it stands and ending in `remedy`."""
    if problem := _excess(data, bounds):
        raise DataError(where, problem, remedy)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(where, f"not JSON ({error})", remedy) from error


def _excess(data: bytes, bounds: Bounds) -> str | None:
    """Return what the text has too much of, None if nothing. It may count what stands in strings too."""
    if len(data) > bounds.size:
        return f"{len(data):,} bytes, more than the {bounds.size:,} allowed"
    tables = data.count(b"[") + data.count(b"{")
    if tables > bounds.tables:
        return f"{tables:,} lists and tables, more than the {bounds.tables:,} allowed"
    values = tables + data.count(b",") + data.count(b":") + 1
    if values > bounds.values:
        return f"{values:,} values, more than the {bounds.values:,} allowed"
    if len(data) > _LARGE and _may_widen(data):
        return f"{len(data):,} bytes with characters that take four bytes each, at most {_LARGE:,} allowed"
    return None


def _may_widen(data: bytes) -> bool:
    """Return True if one rare character may make a long text take four bytes each. Ours are ASCII, in short strings."""
    if not data.isascii():
        return True
    starts = range(0, len(data) - _STRETCH, _STRETCH)
    return b"\\u" in data and any(data.find(b'"', start, start + _STRETCH) < 0 for start in starts)


def parse_toml(data: bytes) -> dict[str, Any]:
    """Return what TOML text holds. Raises ValueError for other text, and for keys of very many parts."""
    if any(part.count(b".") > _MOST_DOTS for part in re.split(rb"[={,\n]", data)):  # parsing takes their square
        raise ValueError(f"a key of more than {_MOST_DOTS} parts")
    try:
        return tomllib.loads(data.decode())
    except RecursionError as error:
        raise ValueError(str(error)) from error


def unknown_keys(found: Mapping[str, Any], known: Mapping[str, Any]) -> str | None:
    """Return the first key that is not known, None where there is none. A model would build an error for each."""
    return next((key for key in found if key not in known), None)


class Problem(NamedTuple):
    """A value that a model refuses, and the keys to it, such as `a.b.0`; "fields" stands for a whole table."""

    where: str
    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}" if self.where == _TABLE else f"{self.where} = {self.value}: {self.reason}"


def first_problem(error: ValidationError) -> Problem:
    """Return the first problem that pydantic found."""
    item = error.errors(include_url=False)[0]
    where = ".".join(map(str, item["loc"])) or _TABLE
    return Problem(f"{where:.80}", f"{item['input']!r:.80}", reason_of(item))


def reason_of(item: ErrorDetails) -> str:
    """Return what pydantic says of a problem, as part of a sentence."""
    reason = item["msg"].removeprefix("Value error, ")
    return reason[:1].lower() + reason[1:]


def jsonable(value: Any) -> Any:
    """Return a value for JSON: NaN and infinities become null, tuples and arrays lists, keys and paths strings."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, np.generic | np.ndarray):
        return jsonable(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.isoformat() if isinstance(value, datetime) else value


def dumps(value: Any, *, indent: int | None = None, sort_keys: bool = False) -> str:
    """Return JSON text in ASCII, on one line unless indented. Raises TypeError for what is no JSON."""
    return json.dumps(jsonable(value), allow_nan=False, indent=indent, sort_keys=sort_keys)


def write_json(path: Path, value: Any) -> None:
    """Put JSON in place of `path` in one step. Raises OSError; then the old file stays."""
    replace_file(path, (dumps(value, indent=1) + "\n").encode())
