"""A zarr store behind a path or URL. Its metadata are read and checked before zarr acts on them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import zarr
from zarr.abc.store import RangeByteRequest, Store
from zarr.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore

from daskcnn.documents import BOUNDS, parse_json, unknown_keys
from daskcnn.errors import DataError, UserError, installing
from daskcnn.files import check_regular, local_path, open_regular

_OTHER_FIELDS: dict[str, Any] = dict.fromkeys(("attributes", "dimension_names"))  # without a meaning here
_REMADE = "check that the path is right, or write it anew"
_DAMAGED = "the store is damaged, make it again"
_CREDENTIALS = ("credential", "forbidden", "accessdenied", "access key", "signature", "token", "403")
EMPTY_CHUNKS_TOO: Any = {"write_empty_chunks": True}
"""Chunks of zeros are written: a missing file means damage."""


def is_url(path: str) -> bool:
    """Return True if this path goes to fsspec and not to the file system."""
    return "://" in path


@dataclass(frozen=True)
class Files:
    """One zarr store, and its path as messages name it. `folder` is where a local one lies."""

    path: str
    store: Store
    folder: Path | None = None

    @classmethod
    def at(cls, path: str, *, read_only: bool = True) -> Files:
        """Return the store at a path or fsspec URL. Raises DataError for an unknown protocol or a missing package."""
        if not is_url(path):
            folder = local_path(path)
            return cls(path, LocalStore(folder, read_only=read_only), folder)
        try:
            folders = {"auto_mkdir": True} if path.startswith(("file://", "local://")) and not read_only else None
            return cls(path, FsspecStore.from_url(path, folders, read_only=read_only))
        except ImportError as error:
            extra = installing("s3") if path.startswith(("s3:", "s3a:")) else "pip install what it names"
            raise DataError(path, error, f"{extra}, or use a local path") from error
        except Exception as error:  # every file system of fsspec has errors of its own
            raise DataError(path, _words(error), "give a local path or the URL of a store that fsspec knows") from error

    def size(self, key: str) -> int | None:
        """Return the bytes stored under a key, None if there is nothing. Raises DataError if the storage fails."""
        try:
            with self.reading(key):
                return sync(self.store.getsize(key)) if self.folder is None else check_regular(self.folder / key)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def is_empty(self) -> bool:
        """Return True if nothing is stored here."""
        with self.reading(""):
            return sync(self.store.is_empty(""))

    def names(self, most: int) -> list[str]:
        """Return the first `most` names directly inside this store, sorted."""
        with self.reading(""):
            if self.folder is not None:
                found = [entry.name for entry in islice(os.scandir(self.folder), most)]
            else:
                found = sync(_first(self.store.list_dir(""), most))
        return sorted(name.rstrip("/").rpartition("/")[2] for name in found)

    def keys(self, most: int) -> list[str] | None:
        """Return all keys of this store by one listing; None where it cannot list, or has more than that."""
        try:
            with self.reading(""):
                found = sync(_first(self.store.list(), most + 1))
        except (DataError, FileNotFoundError, NotADirectoryError):
            return None
        return None if len(found) > most else found

    @contextmanager
    def reading(self, key: str) -> Iterator[None]:
        """Turn a storage's errors into DataError, except that nothing is there."""
        try:
            yield
        except (UserError, FileNotFoundError, NotADirectoryError):
            raise
        except Exception as error:  # every file system of fsspec has errors of its own
            where = f"{self.path}/{key}".removesuffix("/")
            raise DataError(where, f"cannot be read ({_words(error)})", _remedy_for(self.path, error)) from error

    def json(self, key: str) -> dict[str, Any] | None:
        """Return the JSON object under a key, None if there is nothing. Raises DataError for anything else."""
        content = self.content(key, BOUNDS.size)
        if content is None:
            return None
        if len(content) > BOUNDS.size:
            reason = f"{self.size(key):,} bytes of metadata, more than {BOUNDS.size:,}"
            raise DataError(f"{self.path}/{key}", reason, "not a data set")
        found = parse_json(content, f"{self.path}/{key}", remedy=_DAMAGED)
        if not isinstance(found, dict):
            raise DataError(f"{self.path}/{key}", "a JSON object was expected", _DAMAGED)
        return found

    def content(self, key: str, most: int) -> bytes | None:
        """Return the first `most` + 1 bytes under a key, None if there is nothing. Raises DataError if that fails."""
        try:
            with self.reading(key):
                if self.folder is not None:
                    with open_regular(self.folder / key) as file:
                        return file.read(most + 1)
                buffer = sync(self.store.get(key, default_buffer_prototype(), RangeByteRequest(0, most + 1)))
                return None if buffer is None else buffer.to_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def plain_array(self, name: str, shape: tuple[int, ...], chunk: int, dtype: str) -> zarr.Array[Any]:
        """Open the array of this name. Its metadata must be those of a plain array of this type with these chunks."""
        found = self.json(f"{name}/zarr.json")
        if found is None:
            raise DataError(self.path, f"array {name} is missing", "make the data set again")
        wanted = array_metadata(shape, chunk, dtype)
        if (field := unknown_keys(found, wanted | _OTHER_FIELDS)) is not None:
            where = f"{self.path}/{name}/zarr.json"
            raise DataError(where, f"{field!r:.80}: a field that plain arrays do not have", _DAMAGED)
        for field, want in wanted.items():
            if found.get(field) != want:
                reason = f"array {name} has {field} = {found.get(field)!r:.120}, not {want!r}"
                raise DataError(self.path, reason, "make the data set again")
        with self.reading(name):
            return zarr.open_array(self.store, path=name, mode="r", zarr_format=3)


def _remedy_for(path: str, error: Exception) -> str:
    """Remedy for a storage's error: a bucket mostly lacks the right credentials."""
    words = f"{type(error).__name__} {error}".lower()
    if not path.startswith(("s3:", "s3a:")):
        return _REMADE if isinstance(error, ValueError | TypeError | KeyError) else "check the path and its permissions"
    if isinstance(error, PermissionError) or any(sign in words for sign in _CREDENTIALS):
        keys = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile in ~/.aws"
        return f"{keys}, to credentials that may read it, here and on every worker"
    return "check the bucket's name, its region and AWS_ENDPOINT_URL, here and on every worker"


async def _first(names: AsyncIterator[str], most: int) -> list[str]:
    found = []
    async for name in names:
        found.append(name)
        if len(found) == most:
            break
    return found


def _words(error: Exception) -> str:
    """A storage's own message, or the kind of its error where there is none."""
    return str(error) or type(error).__name__


def array_metadata(shape: tuple[int, ...], chunk: int, dtype: str) -> dict[str, Any]:
    """Return what an array's `zarr.json` must say: chunked along the first axis only, no codec but plain bytes."""
    codec: dict[str, Any] = {"name": "bytes"}
    if not dtype.endswith("int8"):
        codec["configuration"] = {"endian": "little"}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [chunk, *shape[1:]]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [codec],
        "storage_transformers": [],
    }


def create_array(group: zarr.Group, name: str, shape: tuple[int, ...], chunk: int, dtype: str) -> zarr.Array[Any]:
    """Make an empty array as `array_metadata` describes it."""
    return group.create_array(
        name,
        shape=shape,
        chunks=(chunk, *shape[1:]),
        dtype=dtype,
        compressors=None,
        filters=None,
        fill_value=0,
        config=EMPTY_CHUNKS_TOO,
    )
