"""Files that survive a crash: written whole or not at all, and JSON without NaN."""

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


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and wait until it is on the disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Put JSON in place of `path` in one step: a reader, or a crash, finds the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write_synced(temporary, (dumps(value, indent=1) + "\n").encode())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


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
