"""What the metadata of somebody else's zarr array say, format 2 or 3. They are checked before zarr acts on them.

Only codecs that turn bytes into numbers or text are allowed: one that unpickles runs what a file says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np

from daskcnn.errors import DataError, escaped
from daskcnn.store.files import Files
from daskcnn.store.manifest import MAX_CHUNK_BYTES, sha256

COMPRESSORS = frozenset({"blosc", "gzip", "lz4", "zlib", "zstd"})
FILTERS = frozenset({"adler32", "bitround", "crc32", "crc32c", "delta", "fletcher32", "shuffle", "vlen-utf8"})
_V3 = frozenset({"bytes", "transpose", "sharding_indexed", "zstd", "gzip", "blosc", "crc32c", "vlen-utf8"})
_TEXT = {"string": 4, "variable_length_utf8": 4}
_REWRITE = "write it anew with daskcnn.prepare, or with another codec"
_MOST_CODECS = 16
_MOST_NAMED = 20
_TEXT_BYTES = 64 << 20
_MOST_SHARD_BYTES = 1 << 30


@dataclass(frozen=True)
class ForeignMetadata:
    """A zarr array as its metadata describe it.

    Attributes
    ----------
    zarr_format : 2 or 3
    chunks : shape of what is decoded as a whole; of a sharded array, of a chunk inside a shard
    dtype : number type; None for text
    stored_bytes : bytes of what is kept under one key, unpacked: of a sharded array, of a shard
    digest : SHA-256 of shape, chunks and type
    """

    zarr_format: Literal[2, 3]
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype[Any] | None
    stored_bytes: int
    digest: str


def foreign_metadata(files: Files) -> ForeignMetadata:
    """Return what the metadata of the array at this place say.

    Raises DataError for what is no array, or none that can be used: text as objects, unknown codecs, wrong chunks.
    """
    found = files.json("zarr.json")
    if found is not None and found.get("node_type") == "array":
        return _checked(files.path, 3, found, list(_codecs_v3(found, files.path)))
    old = None if found is not None else files.json(".zarray")
    if old is not None:
        return _checked(files.path, 2, old, list(_codecs_v2(old, files.path)))
    raise DataError(files.path, *_no_array(files, found is not None))


def _no_array(files: Files, group: bool) -> tuple[str, str]:
    if not group and files.size(".zgroup") is None:
        return "no zarr array here", "give the path or URL of an array, such as PATH/tiles.zarr/x"
    named = ", ".join(escaped(name) for name in array_names(files)) or "none was found"
    return f"a zarr group, not an array (arrays in it: {named})", "give the path of one of its arrays"


def array_names(files: Files) -> list[str]:
    """Return the names of arrays directly inside a group, at most 20."""
    found = list[str]()
    for name in files.names(10 * _MOST_NAMED):
        if len(found) == _MOST_NAMED:
            break
        metadata = files.json(f"{name}/zarr.json") if files.size(f"{name}/zarr.json") is not None else None
        if (metadata or {}).get("node_type") == "array" or files.size(f"{name}/.zarray") is not None:
            found.append(name)
    return found


# --- what is allowed ---


def _codecs_v3(found: Mapping[str, Any], path: str) -> Iterator[str]:
    yield from _named(found.get("codecs"), path, "codecs", depth=0)


def _named(codecs: Any, path: str, where: str, depth: int) -> Iterator[str]:
    if not isinstance(codecs, list) or len(codecs) > _MOST_CODECS or depth > 2:
        raise _damaged(path, f"{where} = {codecs!r:.80}")
    for codec in codecs:
        name = codec.get("name") if isinstance(codec, dict) else codec
        if not isinstance(name, str):
            raise _damaged(path, f"{where} holds {codec!r:.80}")
        yield name
        configuration = codec.get("configuration") if isinstance(codec, dict) else None
        if name == "sharding_indexed" and isinstance(configuration, dict):
            for key in ("codecs", "index_codecs"):
                yield from _named(configuration.get(key), path, key, depth + 1)


def _codecs_v2(found: Mapping[str, Any], path: str) -> Iterator[str]:
    filters = found.get("filters") or []
    if not isinstance(filters, list) or len(filters) > _MOST_CODECS:
        raise _damaged(path, f"filters = {filters!r:.80}")
    for codec in (*filters, *([found["compressor"]] if found.get("compressor") else ())):
        if not isinstance(codec, dict) or not isinstance(codec.get("id"), str):
            raise _damaged(path, f"filters or compressor hold {codec!r:.80}")
        yield codec["id"]


def _checked(path: str, zarr_format: Literal[2, 3], found: Mapping[str, Any], codecs: Sequence[str]) -> ForeignMetadata:
    for name in codecs:
        if name.removeprefix("numcodecs.") not in _V3 | COMPRESSORS | FILTERS:
            known = ", ".join(sorted(COMPRESSORS | FILTERS))
            raise DataError(path, f"its codec {name!r:.80} is none of those that are read ({known})", _REWRITE)
    shape = _sizes(found.get("shape"), path, "shape", least=0)
    chunks = _sizes(_chunk_shape(found, zarr_format, path), path, "chunks", least=1)
    if len(chunks) == len(shape) and len(shape) > 4:
        raise DataError(path, f"an array of {len(shape)} axes, {shape}", "give images (N, H, W, C) or (N, H, W)")
    if len(chunks) != len(shape) or not shape:
        raise _damaged(path, f"shape {shape} with chunks {chunks}")
    dtype, itemsize = _dtype(found, zarr_format, codecs, path)
    chunk_bytes = prod(chunks) * itemsize
    if chunk_bytes > MAX_CHUNK_BYTES:
        reason = f"chunks of shape {chunks}, {chunk_bytes:,} bytes each, are larger than {MAX_CHUNK_BYTES:,}"
        raise DataError(path, reason, "write it anew in smaller chunks, or with daskcnn.prepare")
    outer = chunks if zarr_format == 2 else tuple(found["chunk_grid"]["configuration"]["chunk_shape"])
    if (shard := prod(outer) * itemsize) > _MOST_SHARD_BYTES:
        raise DataError(
            path, f"shards of {shard:,} bytes, more than {_MOST_SHARD_BYTES:,}", "write it anew in smaller ones"
        )
    about = json.dumps([shape, chunks, "text" if dtype is None else dtype.str])
    return ForeignMetadata(
        zarr_format, shape, chunks, dtype, _stored_bytes(outer, dtype, itemsize), sha256(about.encode())
    )


def _stored_bytes(chunks: tuple[int, ...], dtype: np.dtype[Any] | None, itemsize: int) -> int:
    """Bytes under one key. Of text only the least is known."""
    return max(prod(chunks) * itemsize, _TEXT_BYTES if dtype is None else 0)


def _chunk_shape(found: Mapping[str, Any], zarr_format: int, path: str) -> Any:
    if zarr_format == 2:
        return found.get("chunks")
    if found.get("storage_transformers"):
        raise _damaged(path, "storage transformers, which are not read")
    grid = found.get("chunk_grid")
    if not isinstance(grid, dict) or grid.get("name") != "regular" or not isinstance(grid.get("configuration"), dict):
        raise _damaged(path, f"chunk_grid = {grid!r:.80}: only regular grids are read")
    outer: Any = grid["configuration"].get("chunk_shape")
    for codec in found["codecs"]:
        if isinstance(codec, dict) and codec.get("name") == "sharding_indexed":
            inner = (codec.get("configuration") or {}).get("chunk_shape")
            whole = _sizes(outer, path, "chunk_shape", least=1)
            parts = _sizes(inner, path, "chunk_shape in shards", least=1)
            if len(whole) != len(parts) or any(a % b for a, b in zip(whole, parts, strict=True)):
                raise _damaged(path, f"shards of {whole} with chunks of {parts}")
            return inner
    return outer


def _sizes(found: Any, path: str, what: str, *, least: int) -> tuple[int, ...]:
    ok = isinstance(found, list) and len(found) <= 8 and all(type(n) is int and least <= n <= 1 << 40 for n in found)
    if not ok:
        raise _damaged(path, f"{what} = {found!r:.80}")
    return tuple(found)


def _dtype(
    found: Mapping[str, Any], zarr_format: int, codecs: Sequence[str], path: str
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
        raise _damaged(path, f"type {name!r:.80}: neither numbers nor text")
    if name in _TEXT:
        return None, _TEXT[name]
    try:
        dtype = np.dtype(name)
    except TypeError:
        raise _damaged(path, f"type {name!r:.80}: neither numbers nor text") from None
    if dtype.kind == "O" and "vlen-utf8" in codecs:
        return None, _TEXT["string"]
    if dtype.kind == "U" and dtype.itemsize <= 1 << 12:
        return None, dtype.itemsize
    if dtype.kind not in "biuf":
        reason = f"holds {'Python objects' if dtype.kind == 'O' else dtype.name}, and not numbers or text"
        raise DataError(path, reason, "write it anew with a number type (daskcnn.prepare does)")
    return dtype.newbyteorder("="), dtype.itemsize


def _damaged(path: str, reason: str) -> DataError:
    return DataError(path, f"its metadata describe no array that can be read ({reason})", _REWRITE)
