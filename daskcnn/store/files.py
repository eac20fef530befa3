"""A zarr store behind a path or URL. Its metadata are read and checked before zarr acts on them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zarr
from zarr.abc.store import Store
from zarr.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore

from daskcnn.errors import DataError
from daskcnn.store.manifest import Images

_MAX_METADATA = 64 << 20


def is_url(path: str) -> bool:
    """Return whether this path goes to fsspec rather than to the file system."""
    return "://" in path


@dataclass(frozen=True)
class Files:
    """One zarr store, and its path as messages name it."""

    path: str
    store: Store

    @classmethod
    def at(cls, path: str, *, read_only: bool = True) -> Files:
        """Return the store at a local path or fsspec URL.

        Raises DataError for an unknown protocol or a missing package.
        """
        if not is_url(path):
            return cls(path, LocalStore(Path(path).expanduser(), read_only=read_only))
        try:
            return cls(path, FsspecStore.from_url(path, read_only=read_only))
        except ImportError as error:
            raise DataError(path, error, "pip install what it names, or use a local path") from error
        except ValueError as error:
            raise DataError(path, error, "give a local path or the URL of a store that fsspec knows") from error

    def size(self, key: str) -> int | None:
        """Return the bytes stored under a key, None if there is nothing. Raises DataError if the storage fails."""
        try:
            return sync(self.store.getsize(key))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise DataError(
                f"{self.path}/{key}", f"cannot be read ({error})", "check the path and its permissions"
            ) from error

    def is_empty(self) -> bool:
        """Return whether nothing is stored here."""
        return sync(self.store.is_empty(""))

    def json(self, key: str) -> dict[str, Any] | None:
        """Return the JSON object under a key, None if there is nothing. Raises DataError for anything else."""
        size = self.size(key)
        if size is None:
            return None
        if size > _MAX_METADATA:
            raise DataError(
                f"{self.path}/{key}", f"{size} bytes of metadata, more than {_MAX_METADATA}", "not a data set"
            )
        try:
            found = json.loads(self._bytes(key))
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{self.path}/{key}", f"not JSON ({error})", "the store is damaged, make it again"
            ) from error
        if not isinstance(found, dict):
            raise DataError(f"{self.path}/{key}", "a JSON object was expected", "the store is damaged, make it again")
        return found

    def _bytes(self, key: str) -> bytes:
        try:
            buffer = sync(self.store.get(key, default_buffer_prototype()))
        except OSError as error:
            raise DataError(
                f"{self.path}/{key}", f"cannot be read ({error})", "check the path and its permissions"
            ) from error
        return b"" if buffer is None else buffer.to_bytes()

    def uint8_array(self, name: str, shape: tuple[int, ...], chunk: int) -> zarr.Array[Any]:
        """Return the array of this name.

        It is opened only if its metadata are those of a plain uint8 array with these chunks.
        """
        found = self.json(f"{name}/zarr.json")
        if found is None:
            raise DataError(self.path, f"array {name} is missing", "make the data set again")
        for field, want in array_metadata(shape, chunk).items():
            if found.get(field) != want:
                raise DataError(
                    self.path,
                    f"array {name} has {field} = {found.get(field)!r:.120}, not {want!r}",
                    "make the data set again",
                )
        return zarr.open_array(self.store, path=name, mode="r", zarr_format=3)


def array_metadata(shape: tuple[int, ...], chunk: int) -> dict[str, Any]:
    """Return what an array's `zarr.json` must say: chunked along the first axis only, no codec but plain bytes."""
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [chunk, *shape[1:]]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [{"name": "bytes"}],
        "storage_transformers": [],
    }


def create_array(group: zarr.Group, name: str, data: Images, chunk: int) -> None:
    """Write one array as `array_metadata` describes it.

    Chunks of zeros are written too: a missing file means damage.
    """
    array = group.create_array(
        name,
        shape=data.shape,
        chunks=(chunk, *data.shape[1:]),
        dtype="uint8",
        compressors=None,
        filters=None,
        fill_value=0,
        config={"write_empty_chunks": True},
    )
    array[...] = data
