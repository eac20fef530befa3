"""Files that survive a crash: on the disk before anybody is told, and whole or not there at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and wait until it is on the disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Put a file in place of `path` in one step: a reader, or a crash, finds the old file or the new one.

    Two writers at a time need a lock: they share the name of the temporary file. Raises OSError; then the old file
    stays.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write_synced(temporary, data)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)
