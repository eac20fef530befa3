"""The index of arrays that are used in place: what a manifest says of a prepared data set, made by reading them once.

It is kept beside the run and in the user's cache folder, so that a second run does not read the data again.
"""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError
from zarr.core.sync import sync
from zarr.storage import FsspecStore

from daskcnn.documents import first_problem, read_json, unknown_keys
from daskcnn.errors import DataError
from daskcnn.files import cache_folder, replace_file
from daskcnn.store.files import Files
from daskcnn.store.manifest import Checksums, Level, in_range, sha256

INDEX = "index.json"
"""File of a run directory that keeps the index of arrays that the run uses in place."""
_REMEDY = "remove it, so that the array is read again"
_MOST_ENTRIES = 100_000


class ArrayChanged(DataError):
    """An array that is used in place is not what its index says."""


class ArrayIndex(BaseModel):
    """The facts of arrays in place that take all of their images to know: SHA-256 of each chunk, and the statistics.

    `identity` is that of what the arrays and the job say: an index is of no use for another.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    format: Literal[1] = 1
    identity: str = Field(min_length=64, max_length=64)
    images: Checksums
    test_images: Checksums = ()
    mean: Annotated[tuple[Level, ...], FailFast()]
    deviation: Annotated[tuple[float, ...], BeforeValidator(in_range)]

    def fingerprint(self) -> str:
        """SHA-256 of the index."""
        return sha256(self.model_dump_json().encode())


def read_index(path: Path) -> ArrayIndex | None:
    """Return the index in a file, None where there is no file. Raises DataError where it is damaged."""
    if not path.is_file():
        return None
    found = read_json(path, remedy=_REMEDY)
    if isinstance(found, dict) and (key := unknown_keys(found, ArrayIndex.model_fields)) is not None:
        raise DataError(path, f"no index of an array ({key!r:.80}: unknown key)", _REMEDY)
    try:
        return ArrayIndex.model_validate_json(json.dumps(found))
    except (ValidationError, RecursionError) as error:
        reason = first_problem(error) if isinstance(error, ValidationError) else error
        raise DataError(path, f"no index of an array ({reason})", _REMEDY) from error


def write_index(path: Path, index: ArrayIndex) -> None:
    """Write the index in one step. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, index.model_dump_json().encode())


def cached(key: str) -> Path:
    """Return the file of the user's cache folder that keeps the index of this key."""
    return cache_folder() / "indexes" / f"{key}.json"


def kept_in_cache(key: str) -> ArrayIndex | None:
    """Return the index that was kept under this key; None where there is none, or none that is whole."""
    with suppress(DataError, OSError):
        return read_index(cached(key))
    return None


def keep_in_cache(key: str, index: ArrayIndex) -> None:
    """Keep the index for later runs; a folder that cannot be written is left alone."""
    with suppress(OSError):
        write_index(cached(key), index)


def drop_from_cache(key: str) -> None:
    """Forget the index of this key."""
    with suppress(OSError):
        cached(key).unlink(missing_ok=True)


def storage_version(files: Files) -> str:
    """Return a SHA-256 of sizes, times and tags of an array's files, which changes with the array.

    Empty where the storage does not tell them, as plain HTTP, or where there are very many files.
    """
    entries = _local(files.folder) if files.folder is not None else _remote(files)
    if entries is None:
        return ""
    return sha256("".join(f"{entry}\n" for entry in sorted(entries)).encode(errors="surrogateescape"))


def _local(folder: Path) -> list[str] | None:
    entries = []
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                about = os.stat(os.path.join(parent, name))
                if stat.S_ISREG(about.st_mode):
                    entries.append(f"{parent}/{name} {about.st_size} {about.st_mtime_ns}")
        if len(entries) > _MOST_ENTRIES:
            return None
    return entries


def _remote(files: Files) -> list[str] | None:
    """Entries of a single listing."""
    if not isinstance(files.store, FsspecStore):
        return None
    try:
        found = sync(files.store.fs._find(files.store.path, detail=True))
    except Exception:  # every file system of fsspec has errors of its own, and some cannot list
        return None
    if not found or len(found) > _MOST_ENTRIES:
        return None
    told = [
        f"{name} {about.get('size')} {version}"
        for name, about in found.items()
        if (version := next((about[key] for key in ("ETag", "mtime", "LastModified", "created") if key in about), None))
    ]
    return told if len(told) == len(found) else None
