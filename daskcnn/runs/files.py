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

from daskcnn.files import replace_file


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
