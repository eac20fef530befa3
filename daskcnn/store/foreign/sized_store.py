"""A zarr store that refuses a compressed chunk which would unpack to more than its array says."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from zarr.abc.store import ByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.storage import WrapperStore

from daskcnn.errors import DataError

if TYPE_CHECKING:
    from zarr.core.buffer import Buffer, BufferPrototype

_ROOM = 1 << 20
"""Bytes that a chunk may have beside its numbers: checksums, lengths."""
_ENTRY = 16
"""Bytes of a chunk's entry in the index of a shard: offset and length."""
_NOT_THERE = 2**64 - 1
_WIDEST = 1100
"""Largest ratio of the content of gzip or zlib to its bytes."""
_GZIP_OR_ZLIB = 47
_PIECE, _MOST_STREAMS = 1 << 20, 1 << 12
_ZSTD, _SKIPPED = 0xFD2FB528, 0x184D2A5
_MOST_BLOCK, _MOST_BLOCKS = 128 << 10, 1 << 20
_AT_ONCE = 10
"""Ranges of a value that are read at once, as zarr does."""
_ENDLESS = 1 << 62
"""Stands for the size of what has more streams or blocks than any writer makes."""
_CHUNK = re.compile(r"(?:c[/.])?(\d+)(?:[/.]\d+)*")


def chunk_number(key: str) -> int | None:
    """Return the place along the first axis of the chunk or shard under a key; None for another key."""
    found = _CHUNK.fullmatch(key)
    return None if found is None else int(found[1])


@dataclass(frozen=True, slots=True)
class Packing:
    """The bytes of a decoded chunk of an array, and the codec that compresses chunks.

    A shard has `in_shard` chunks; 0: there are no shards. It begins or ends with its index, and a checksum of
    `index_checksum` bytes stands behind that.
    """

    chunk_bytes: int
    compressor: str | None = None
    in_shard: int = 0
    index_first: bool = False
    index_checksum: int = 0

    @property
    def most(self) -> int:
        """The most bytes that may be kept under one key."""
        return max(1, self.in_shard) * (self.chunk_bytes + _ENTRY) + _ROOM

    @property
    def index_bytes(self) -> int:
        """Bytes of the index of a shard with its checksum."""
        return self.in_shard * _ENTRY + self.index_checksum

    def chunks(self, stored: memoryview) -> Iterator[memoryview]:
        """Yield the packed chunks under a key: the one, or those of a shard by its index."""
        if not self.in_shard:
            yield stored
            return
        for offset, length in self._index(stored):
            if offset != _NOT_THERE:
                yield stored[offset : offset + length]

    def absent(self, stored: memoryview, part: ByteRequest | None) -> list[int]:
        """Return the chunks that a shard does not have, by their places in it, where these bytes hold its index."""
        if isinstance(part, RangeByteRequest):
            holds = self.index_first and part.start == 0
        else:
            holds = part is None or not self.index_first
        return [i for i, (offset, _) in enumerate(self._index(stored)) if offset == _NOT_THERE] if holds else []

    def _index(self, stored: memoryview) -> list[tuple[int, int]]:
        """Offset and length of each chunk, from a whole shard or from its index."""
        size = self.in_shard * _ENTRY
        begin = 0 if self.index_first else len(stored) - size - self.index_checksum
        if not 0 <= begin <= len(stored) - size:  # zarr refuses a shard without an index
            return []
        return list(map(tuple, np.frombuffer(stored[begin : begin + size], "<u8").reshape(-1, 2).tolist()))


class SizedStore(WrapperStore[Store]):
    """Another store, read only, with an array that is packed like this; messages name its path.

    `absent` has what was asked for and is not there, as far as is known, by the place of a chunk or shard along the
    first axis: None for all of it, or the places of chunks in a shard that is there. Zarr reads its fill value there.
    """

    def __init__(self, store: Store, path: str, packing: Packing) -> None:
        super().__init__(store)
        self.path, self.packing = path, packing
        self.absent = defaultdict[int, set[int | None]](set)

    def _with_store(self, store: Store) -> SizedStore:
        return type(self)(store, self.path, self.packing)

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Return what is stored under a key. Raises DataError for what is, or would unpack to, more than a chunk."""
        most = self.packing.most
        found = await super().get(key, prototype, byte_range or RangeByteRequest(0, most + 1))
        number = chunk_number(key)
        if found is None and number is not None:
            self.absent[number].add(None)
        if found is None or key.endswith((".json", ".zarray", ".zattrs", ".zgroup")):
            return found
        stored = memoryview(found.to_bytes())
        if len(stored) > most:
            raise self._refusal(key, len(stored))
        if self.packing.in_shard and number is not None:
            self.absent[number].update(self.packing.absent(stored, byte_range))
        if not isinstance(byte_range, SuffixByteRequest):  # the index of a shard
            most = self.packing.chunk_bytes + _ROOM
            for chunk in self.packing.chunks(stored) if byte_range is None else (stored,):
                if (size := unpacked_size(chunk, self.packing.compressor, most)) > most:
                    raise self._refusal(key, size)
        return found

    async def get_ranges(
        self, key: str, byte_ranges: Sequence[ByteRequest | None], *, prototype: BufferPrototype, **how: int
    ) -> AsyncIterator[Sequence[tuple[int, Buffer | None]]]:
        """Yield ranges of a value, which zarr 3.4 reads the chunks of a shard by. None is merged: `get` checks each."""
        at_once = how.get("max_concurrency", _AT_ONCE)
        for start in range(0, len(byte_ranges), at_once):
            parts = byte_ranges[start : start + at_once]
            found = await asyncio.gather(*(self.get(key, prototype, part) for part in parts))
            if None in found:
                raise FileNotFoundError(key)
            yield list(enumerate(found, start))

    async def _get_many(
        self, requests: Iterable[tuple[str, BufferPrototype, ByteRequest | None]]
    ) -> AsyncGenerator[tuple[str, Buffer | None], None]:
        for key, prototype, part in requests:
            yield key, await self.get(key, prototype, part)

    @property
    def _supports_sync_io(self) -> bool:
        """No: zarr 3.4 would read with `get_sync` of the other store, past `get`."""
        return False

    def _refusal(self, key: str, size: int) -> DataError:
        reason = f"a chunk of more bytes than its array says ({size:,} and more)"
        return DataError(f"{self.path}/{key}", reason, "the file is damaged, write the array anew")

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Return parts of values, each checked as `get` does."""
        return [await self.get(key, prototype, part) for key, part in key_ranges]


def unpacked_size(data: memoryview, compressor: str | None, limit: int) -> int:
    """Return the most bytes that this unpacks to, or any number beyond `limit`. What its codec refuses counts as is."""
    if compressor in ("gzip", "zlib"):
        return len(data) if len(data) * _WIDEST <= limit else _inflated(data, limit)
    if compressor == "zstd":
        return max(len(data), _zstd_size(data, limit))
    if compressor == "lz4":
        return max(len(data), int.from_bytes(data[:4], "little"))
    if compressor == "blosc":
        return max(len(data), int.from_bytes(data[4:8], "little"))
    return len(data)


def _zstd_size(data: memoryview, limit: int) -> int:
    """The content of all frames: as their heads declare it, or by their blocks where they do not (RFC 8878)."""
    size = at = 0
    while at + 8 <= len(data) and size <= limit:
        magic = int.from_bytes(data[at : at + 4], "little")
        if magic >> 4 == _SKIPPED:
            at += 8 + int.from_bytes(data[at + 4 : at + 8], "little")
        elif magic == _ZSTD:
            found, at = _frame(data, at + 4)
            size += found
        else:
            break
    return size


def _frame(data: memoryview, at: int) -> tuple[int, int]:
    """The content of a frame whose descriptor is at this place, and where the frame ends."""
    descriptor = data[at]
    single, flag, checksum = descriptor >> 5 & 1, descriptor >> 6, descriptor >> 2 & 1
    at += 1
    base = 1 << 10 + (data[at] >> 3)
    most = _MOST_BLOCK if single else min(_MOST_BLOCK, base + (base >> 3) * (data[at] & 7))  # the window
    at += (not single) + (0, 1, 2, 4)[descriptor & 3]
    field = (single, 2, 4, 8)[flag]
    declared = int.from_bytes(data[at : at + field], "little") + (256 if flag == 1 else 0)
    by_blocks, at = _blocks(data, at + field, most)
    return declared if field else by_blocks, at + 4 * checksum


def _blocks(data: memoryview, at: int, most: int) -> tuple[int, int]:
    """The most content that a frame's blocks can have, and where they end."""
    size = 0
    for _ in range(_MOST_BLOCKS):
        head = int.from_bytes(data[at : at + 3], "little")
        kind, length = head >> 1 & 3, head >> 3
        size += length if kind < 2 else most  # as it is, one byte repeated; or compressed
        at += 3 + (1 if kind == 1 else length)
        if head & 1 or at + 3 > len(data):
            return size, at
    return _ENDLESS, at


def _inflated(data: memoryview, limit: int) -> int:
    """Unpack in pieces, all streams that follow one another, and stop beyond the limit."""
    inflate, streams, size, at, rest = zlib.decompressobj(_GZIP_OR_ZLIB), 1, 0, 0, b""
    try:
        while size <= limit:
            if not rest:
                rest = bytes(data[at : at + _PIECE])
                at += len(rest)
            if inflate.eof:
                rest = rest.lstrip(b"\0")  # padding, which gzip allows
                inflate, streams = zlib.decompressobj(_GZIP_OR_ZLIB), streams + 1
            if not rest and at >= len(data):
                break
            if streams > _MOST_STREAMS:
                return _ENDLESS
            size += len(inflate.decompress(rest, _PIECE))
            rest = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
    except zlib.error:  # damage, which the codec will name
        pass
    return max(size, len(data))
