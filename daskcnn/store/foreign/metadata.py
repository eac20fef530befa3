"""What the metadata of somebody else's zarr array say, format 2 or 3. They are checked before zarr acts on them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np

from daskcnn.errors import DataError, escaped
from daskcnn.store.files import Files
from daskcnn.store.foreign.codecs import Codecs, codecs_v2, codecs_v3, damaged, shards_of
from daskcnn.store.foreign.sized_store import Packing
from daskcnn.store.manifest import MAX_CHUNK_BYTES, sha256

_TEXT = {"string": 4, "variable_length_utf8": 4}
_MOST_NAMED = 20
_TEXT_BYTES = 64 << 20
_MOST_SHARD_BYTES = 1 << 30
_MOST_IN_A_SHARD = 1 << 18


@dataclass(frozen=True)
class ForeignMetadata:
    """A zarr array as its metadata describe it.

    Attributes
    ----------
    zarr_format : 2 or 3
    chunks : shape of what is decoded as a whole; of a sharded array, of a chunk inside a shard
    dtype : number type; None for text
    packing : how large its chunks are, and what compresses them
    digest : SHA-256 of shape, chunks and type
    """

    zarr_format: Literal[2, 3]
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype[Any] | None
    packing: Packing
    digest: str


def foreign_metadata(files: Files) -> ForeignMetadata:
    """Return what the metadata of the array at this place say.

    Raises DataError for what is no array, or none that can be used: text as objects, unknown codecs, wrong chunks.
    """
    found = files.json("zarr.json")
    if found is not None and found.get("node_type") == "array":
        return _checked(files.path, 3, found, codecs_v3(found, files.path))
    old = None if found is not None else files.json(".zarray")
    if old is not None:
        return _checked(files.path, 2, old, codecs_v2(old, files.path))
    raise DataError(files.path, *_no_array(files, found is not None))


def _no_array(files: Files, group: bool) -> tuple[str, str]:
    group = group or files.size(".zgroup") is not None
    try:
        names = array_names(files)
    except (FileNotFoundError, NotADirectoryError):
        names = []
    if not group and not names:
        return "no zarr array here", "give the path or URL of an array, such as PATH/tiles.zarr/x"
    named = ", ".join(map(escaped, names)) or "none was found"
    kind = "zarr group" if group else "folder"
    return f"a {kind}, not an array (arrays in it: {named})", "give the path of one of its arrays"


def array_names(files: Files) -> list[str]:
    """Return the names of arrays directly inside a group or folder, at most 20."""
    found = list[str]()
    for name in files.names(10 * _MOST_NAMED):
        if len(found) == _MOST_NAMED:
            break
        metadata = files.json(f"{name}/zarr.json") if files.size(f"{name}/zarr.json") is not None else None
        if (metadata or {}).get("node_type") == "array" or files.size(f"{name}/.zarray") is not None:
            found.append(name)
    return found


def _checked(path: str, zarr_format: Literal[2, 3], found: Mapping[str, Any], codecs: Codecs) -> ForeignMetadata:
    shape = _sizes(found.get("shape"), path, "shape", least=0)
    chunks = _sizes(_chunk_shape(found, zarr_format, path), path, "chunks", least=1)
    if len(chunks) == len(shape) and len(shape) > 4:
        raise DataError(path, f"an array of {len(shape)} axes, {shape}", "give images (N, H, W, C) or (N, H, W)")
    if len(chunks) != len(shape) or not shape:
        raise damaged(path, f"shape {shape} with chunks {chunks}")
    dtype, itemsize = _dtype(found, zarr_format, codecs.names, path)
    chunk_bytes = prod(chunks) * itemsize
    if chunk_bytes > MAX_CHUNK_BYTES:
        reason = f"chunks of shape {chunks}, {chunk_bytes:,} bytes each, are larger than {MAX_CHUNK_BYTES:,}"
        raise DataError(path, reason, "write it anew in smaller chunks, or with daskcnn.prepare")
    outer = chunks if zarr_format == 2 else tuple(found["chunk_grid"]["configuration"]["chunk_shape"])
    about = json.dumps([shape, chunks, "text" if dtype is None else dtype.str])
    packing = _packing(chunks, outer, dtype, itemsize, codecs, path)
    return ForeignMetadata(zarr_format, shape, chunks, dtype, packing, sha256(about.encode()))


def _packing(
    chunks: tuple[int, ...],
    outer: tuple[int, ...],
    dtype: np.dtype[Any] | None,
    itemsize: int,
    codecs: Codecs,
    path: str,
) -> Packing:
    """How large chunks and shards are. Of text only the least is known. Raises DataError for shards beyond measure."""
    chunk = max(prod(chunks) * itemsize, _TEXT_BYTES if dtype is None else 0)
    if codecs.index_first is None:
        return Packing(chunk, codecs.compressor)
    several = prod(outer) // prod(chunks)
    if (shard := several * prod(chunks) * itemsize) > _MOST_SHARD_BYTES or several > _MOST_IN_A_SHARD:
        reason = (
            f"shards of {shard:,} bytes in {several:,} chunks, more than {_MOST_SHARD_BYTES:,} or {_MOST_IN_A_SHARD:,}"
        )
        raise DataError(path, reason, "write it anew in smaller ones")
    return Packing(chunk, codecs.compressor, several, codecs.index_first, codecs.index_checksum)


def _chunk_shape(found: Mapping[str, Any], zarr_format: int, path: str) -> Any:
    if zarr_format == 2:
        return found.get("chunks")
    if found.get("storage_transformers"):
        raise damaged(path, "storage transformers, which are not read")
    grid = found.get("chunk_grid")
    if not isinstance(grid, dict) or grid.get("name") != "regular" or not isinstance(grid.get("configuration"), dict):
        raise damaged(path, f"chunk_grid = {grid!r:.80}: only regular grids are read")
    outer: Any = grid["configuration"].get("chunk_shape")
    if shards := shards_of(found):
        inner = shards.get("chunk_shape")
        whole = _sizes(outer, path, "chunk_shape", least=1)
        parts = _sizes(inner, path, "chunk_shape in shards", least=1)
        if len(whole) != len(parts) or any(a % b for a, b in zip(whole, parts, strict=True)):
            raise damaged(path, f"shards of {whole} with chunks of {parts}")
        return inner
    return outer


def _sizes(found: Any, path: str, what: str, *, least: int) -> tuple[int, ...]:
    ok = isinstance(found, list) and len(found) <= 8 and all(type(n) is int and least <= n <= 1 << 40 for n in found)
    if not ok:
        raise damaged(path, f"{what} = {found!r:.80}")
    return tuple(found)


def _dtype(
    found: Mapping[str, Any], zarr_format: int, codecs: tuple[str, ...], path: str
) -> tuple[np.dtype[Any] | None, int]:
    """The number type and its bytes; None for text, with the bytes of a short word."""
    name = found.get("dtype" if zarr_format == 2 else "data_type")
    if isinstance(name, dict) and isinstance(name.get("configuration"), dict):  # text of a fixed length
        size = name["configuration"].get("length_bytes")
        if (
            type(size) is int
            and 0 < size <= 1 << 12
            and name.get("name") in ("fixed_length_utf32", "fixed_length_ascii")
        ):
            return None, size
    if not isinstance(name, str):
        raise damaged(path, f"type {name!r:.80}: neither numbers nor text")
    if name in _TEXT:
        return None, _TEXT[name]
    try:
        dtype = np.dtype(name)
    except TypeError:
        raise damaged(path, f"type {name!r:.80}: neither numbers nor text") from None
    if dtype.kind == "O" and "vlen-utf8" in codecs:
        return None, _TEXT["string"]
    if dtype.kind == "U" and dtype.itemsize <= 1 << 12:
        return None, dtype.itemsize
    if dtype.kind not in "biuf":
        reason = f"holds {'Python objects' if dtype.kind == 'O' else dtype.name}, and not numbers or text"
        raise DataError(path, reason, "write it anew with a number type (daskcnn.prepare does)")
    return dtype.newbyteorder("="), dtype.itemsize
