"""A run's files: JSON without NaN."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from daskcnn.errors import DataError
from daskcnn.files import replace_file

JSON_LIMIT = 64 << 20
"""Bytes: a larger JSON file is none of ours and is refused unread."""


def jsonable(value: Any) -> Any:
    """`value` as JSON can hold it: NaN and infinities become null, tuples and arrays lists, keys and paths strings."""
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
    """JSON text in ASCII, on one line unless indented. Raises TypeError for what is no JSON."""
    return json.dumps(jsonable(value), allow_nan=False, indent=indent, sort_keys=sort_keys)


def write_json(path: Path, value: Any) -> None:
    """Put JSON in place of `path` in one step. Raises OSError; then the old file stays."""
    replace_file(path, (dumps(value, indent=1) + "\n").encode())


def read_json(path: Path, *, remedy: str) -> Any:
    """What `write_json` wrote. Raises DataError naming the file and ending in `remedy`."""
    try:
        if (size := path.stat().st_size) > JSON_LIMIT:
            raise DataError(path, f"{size:,} bytes, more than the {JSON_LIMIT:,} allowed", remedy)
        return json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(path, error.strerror or error, remedy) from error
    except (ValueError, RecursionError) as error:
        raise DataError(path, f"not JSON ({error})", remedy) from error
