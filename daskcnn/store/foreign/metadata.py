"""The metadata of somebody else's zarr array, format 2 or 3, checked before zarr acts on them.

Only codecs that turn bytes into numbers or text are allowed: one that unpickles runs what a file says. A chunk is
compressed once, and the compressed bytes come first: so their head, or a bounded look at them, says how much they
unpack to before anything is unpacked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np

from daskcnn.errors import DataError, escaped
from daskcnn.store.files import Files
from daskcnn.store.foreign.conventions import Coding, coding_of
from daskcnn.store.foreign.sized_store import Packing
from daskcnn.store.manifest import MAX_CHUNK_BYTES, sha256

REWRITE = "write it anew with daskcnn.prepare, or with another codec"
_COMPRESSORS = frozenset({"blosc", "gzip", "lz4", "zlib", "zstd"})
_FILTERS = frozenset({"adler32", "bitround", "crc32", "crc32c", "delta", "fletcher32", "shuffle", "vlen-utf8"})
_V3 = frozenset({"bytes", "transpose", "sharding_indexed"})
_AT_THE_END = frozenset({"fletcher32", "numcodecs.fletcher32"})
"""Checksums that always stand behind what they are of. Others of numcodecs may stand before it."""
_INDEX_CODECS = (("bytes",), ("bytes", "crc32c"))
_MOST_CODECS = 16


@dataclass(frozen=True, slots=True)
class Codecs:
    """The names of the codecs that turn chunks into stored bytes, and the one that compresses, without its package.

    `index_first` is true if a shard begins with its index, None where there are no shards; `index_checksum` is the
    number of bytes of the index's checksum.
    """

    names: tuple[str, ...]
    compressor: str | None
    index_first: bool | None = None
    index_checksum: int = 0


def codecs_v2(found: Mapping[str, Any], path: str) -> Codecs:
    """Return the codecs of an array of format 2. Raises DataError for those that are not read."""
    filters = found.get("filters") or []
    if not isinstance(filters, list) or len(filters) > _MOST_CODECS:
        raise damaged(path, f"filters = {filters!r:.80}")
    names = list[str]()
    for codec in (*filters, *([found["compressor"]] if found.get("compressor") else ())):
        if not isinstance(codec, dict) or not isinstance(codec.get("id"), str):
            raise damaged(path, f"filters or compressor hold {codec!r:.80}")
        names.append(codec["id"])
    return Codecs(tuple(names), _compressor(names, path, at_the_end=_AT_THE_END))


def codecs_v3(found: Mapping[str, Any], path: str) -> Codecs:
    """Return the codecs of an array of format 3, or of chunks in its shards. Raises DataError as `codecs_v2`."""
    names = _names(found.get("codecs"), path, "codecs")
    if "sharding_indexed" not in names:
        return Codecs(names, _compressor(names, path, at_the_end=_AT_THE_END | {"crc32c"}))
    if len(names) > 1:
        raise damaged(path, f"codecs {', '.join(names):.80}: shards are read only without another codec around them")
    about = shards_of(found)
    inner = _names(about.get("codecs"), path, "codecs")
    index = _names(about.get("index_codecs"), path, "index_codecs")
    first = about.get("index_location", "end")
    if "sharding_indexed" in inner or index not in _INDEX_CODECS or first not in ("start", "end"):
        raise damaged(path, f"shards with codecs {', '.join(inner):.80}, their index {', '.join(index):.80} at {first}")
    compressor = _compressor(inner, path, at_the_end=_AT_THE_END | {"crc32c"})
    if compressor == "lz4":
        raise damaged(path, "lz4 in shards, which is not read")
    return Codecs(inner, compressor, first == "start", 4 * (len(index) - 1))


def shards_of(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of an array's shards; empty where it has none."""
    for codec in found["codecs"]:
        if isinstance(codec, dict) and codec.get("name") == "sharding_indexed":
            about = codec.get("configuration")
            return about if isinstance(about, dict) else {}
    return {}


def damaged(path: str, reason: str) -> DataError:
    """Return the error for metadata that describe nothing that can be read."""
    return DataError(path, f"its metadata describe no array that can be read ({reason})", REWRITE)


def _names(codecs: Any, path: str, where: str) -> tuple[str, ...]:
    if not isinstance(codecs, list) or len(codecs) > _MOST_CODECS:
        raise damaged(path, f"{where} = {codecs!r:.80}")
    names = list[str]()
    for codec in codecs:
        name = codec.get("name") if isinstance(codec, dict) else codec
        if not isinstance(name, str):
            raise damaged(path, f"{where} holds {codec!r:.80}")
        names.append(name)
    return tuple(names)


def _compressor(names: Sequence[str], path: str, *, at_the_end: frozenset[str]) -> str | None:
    """The codec that compresses. Raises DataError for an unknown codec, and where its bytes do not stand in front."""
    plain = [name.removeprefix("numcodecs.") for name in names]
    for name, short in zip(names, plain, strict=True):
        if short not in _V3 | _COMPRESSORS | _FILTERS:
            known = ", ".join(sorted(_COMPRESSORS | _FILTERS))
            raise DataError(path, f"its codec {name!r:.80} is none of those that are read ({known})", REWRITE)
    first = next((i for i, name in enumerate(plain) if name in _COMPRESSORS), None)
    if first is None:
        return None
    if others := [name for name in names[first + 1 :] if name not in at_the_end]:
        reason = f"its codec {plain[first]} is followed by {', '.join(others):.80}, so what it unpacks to is not known"
        raise DataError(path, reason, REWRITE)
    return plain[first]


_TEXT = {"string": 4, "variable_length_utf8": 4}
_MOST_NAMED = 20
_TEXT_BYTES = 64 << 20
_MOST_SHARD_BYTES = 1 << 30
_MOST_IN_A_SHARD = 1 << 18


@dataclass(frozen=True)
class ForeignMetadata:
    """A zarr array as its metadata describe it; `dtype` is None for text.

    `chunks` is the shape of what is decoded as a whole: of a sharded array, of a chunk inside a shard; `stored` is that
    of what lies under one key. `coding` is None for text. `digest` is the SHA-256 of shape, chunks, type and coding.
    """

    zarr_format: Literal[2, 3]
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    stored: tuple[int, ...]
    dtype: np.dtype[Any] | None
    coding: Coding | None
    packing: Packing
    digest: str


def foreign_metadata(files: Files) -> ForeignMetadata:
    """Read the metadata of the array at this place.

    Raises DataError for what is no array, or none that can be used: text as objects, unknown codecs, wrong chunks.
    """
    found = files.json("zarr.json")
    if found is not None and found.get("node_type") == "array":
        return _checked(files.path, 3, found, codecs_v3(found, files.path))
    old = None if found is not None else files.json(".zarray")
    if old is not None:
        old = {**old, "attributes": files.json(".zattrs")}
        return _checked(files.path, 2, old, codecs_v2(old, files.path))
    raise not_an_array(files, found is not None)


def not_an_array(files: Files, group: bool) -> DataError:
    """Return the error for a group, a folder or nothing in place of an array. It names the arrays that are inside."""
    group = group or files.size(".zgroup") is not None
    try:
        names = array_names(files)
    except (FileNotFoundError, NotADirectoryError):
        names = []
    if not group and not names:
        return DataError(
            files.path, "no zarr array here", "give the path or URL of an array, such as PATH/tiles.zarr/x"
        )
    named = ", ".join(map(escaped, names)) or "none was found"
    kind = "zarr group" if group else "folder"
    reason = f"a {kind}, not an array (arrays in it: {named})"
    return DataError(files.path, reason, "give the path of one of its arrays")


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
    coding = None if dtype is None else _coding(found, zarr_format, dtype, path)
    about: list[Any] = [shape, chunks, "text" if dtype is None else dtype.str]
    if coding is not None and coding != Coding(coding.dtype):
        about.append([coding.scale, coding.offset, coding.marks])
    packing = Packing(max(chunk_bytes, _TEXT_BYTES if dtype is None else 0), codecs.compressor)
    if codecs.index_first is not None:
        several = prod(outer) // prod(chunks)
        if (shard := several * chunk_bytes) > _MOST_SHARD_BYTES or several > _MOST_IN_A_SHARD:
            most = f"{_MOST_SHARD_BYTES:,} or {_MOST_IN_A_SHARD:,}"
            reason = f"shards of {shard:,} bytes in {several:,} chunks, more than {most}"
            raise DataError(path, reason, "write it anew in smaller ones")
        shards = several, codecs.index_first, codecs.index_checksum
        packing = Packing(packing.chunk_bytes, codecs.compressor, *shards)
    return ForeignMetadata(
        zarr_format, shape, chunks, outer, dtype, coding, packing, sha256(json.dumps(about).encode())
    )


def _coding(found: Mapping[str, Any], zarr_format: int, dtype: np.dtype[Any], path: str) -> Coding:
    """The coding by the attributes. In format 2 xarray keeps `_FillValue` as the array's own fill value."""
    attributes = found.get("attributes")
    known = attributes if isinstance(attributes, dict) else {}
    fill = found.get("fill_value") if zarr_format == 2 and "_ARRAY_DIMENSIONS" in known else None
    return coding_of(known, dtype, path, fill)


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
        fixed = name.get("name") in ("fixed_length_utf32", "fixed_length_ascii")
        if fixed and type(size) is int and 0 < size <= 1 << 12:
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
