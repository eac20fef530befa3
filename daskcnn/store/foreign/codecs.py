"""Which codecs a zarr array of somebody else may have, and how they pack its chunks.

Only codecs that turn bytes into numbers or text are allowed: one that unpickles runs what a file says. A chunk is
compressed once, and what is stored of it begins with the compressed bytes: so their head, or a bounded look at them,
says how much they unpack to before anything is unpacked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from daskcnn.errors import DataError

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
    """What turns the chunks of an array into what is stored.

    Attributes
    ----------
    names : of all codecs of a chunk
    compressor : the one that compresses, without the prefix of its package; None where none does
    index_first : of a sharded array whether the index stands at the beginning of a shard; None: there are no shards
    index_checksum : bytes of the index's checksum
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
    """Return the codecs of an array of format 3; of a sharded one those of the chunks in a shard.

    Raises DataError for those that are not read.
    """
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
    """Say that metadata describe nothing that can be read."""
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
