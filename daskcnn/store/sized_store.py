"""A zarr store that refuses a compressed chunk which would unpack to more than its array says."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from zarr.abc.store import ByteRequest, RangeByteRequest, Store
from zarr.storage import WrapperStore

from daskcnn.errors import DataError

if TYPE_CHECKING:
    from zarr.core.buffer import Buffer, BufferPrototype

_ROOM = 1 << 20
"""What a chunk may have beside its numbers: checksums, lengths, an index of a shard."""
_ZSTD, _GZIP, _ZLIB = b"\x28\xb5\x2f\xfd", b"\x1f\x8b", (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
_WIDEST = 1100
"""How many times larger than its bytes the content of gzip or zlib can be."""


class SizedStore(WrapperStore[Store]):
    """Another store, read only.

    Parameters
    ----------
    path : of the store, as messages name it
    limit : bytes of a decoded chunk
    """

    def __init__(self, store: Store, path: str, limit: int) -> None:
        super().__init__(store)
        self.path, self.limit = path, limit

    def _with_store(self, store: Store) -> SizedStore:
        return type(self)(store, self.path, self.limit)

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Return what is stored under a key. Raises DataError for what is, or would unpack to, more than a chunk."""
        most = self.limit + _ROOM
        found = await super().get(key, prototype, byte_range or RangeByteRequest(0, most + 1))
        if found is None or key.endswith((".json", ".zarray", ".zattrs", ".zgroup")):
            return found
        if (size := unpacked_size(memoryview(found.to_bytes()), most)) > most:
            reason = f"a chunk of more bytes than its array says ({size:,} and more)"
            raise DataError(f"{self.path}/{key}", reason, "the file is damaged, write the array anew")
        return found

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Return parts of values, each checked as `get` does."""
        return [await self.get(key, prototype, part) for key, part in key_ranges]


def unpacked_size(data: bytes | memoryview, limit: int) -> int:
    """Return how many bytes this unpacks to, as far as its head says; of gzip and zlib at most a little over `limit`.

    What has no such head counts as it is.
    """
    head = bytes(data[:32])
    if head.startswith(_ZSTD):
        return max(len(data), _zstd_size(head))
    if head.startswith((_GZIP, *_ZLIB)):
        return len(data) if len(data) * _WIDEST <= limit else _inflated(data, limit)
    if len(head) >= 16 and head[0] in (1, 2) and int.from_bytes(head[12:16], "little") == len(data):  # blosc
        return max(len(data), int.from_bytes(head[4:8], "little"))
    return len(data)


def _zstd_size(data: bytes) -> int:
    """The content's size in the frame's head; 0 where it has none."""
    if len(data) < 14:
        return 0
    head = data[4]
    single, flag = head >> 5 & 1, head >> 6
    at = 5 + (not single) + (0, 1, 2, 4)[head & 3]
    size = (1 if single else 0, 2, 4, 8)[flag]
    return int.from_bytes(data[at : at + size], "little") + (256 if flag == 1 else 0)


def _inflated(data: bytes | memoryview, limit: int) -> int:
    """Unpack in pieces, and stop beyond the limit."""
    inflate = zlib.decompressobj(47)  # gzip or zlib, as the head says
    size = 0
    rest: bytes | memoryview = data
    try:
        while rest and size <= limit and not inflate.eof:
            size += len(inflate.decompress(rest, 1 << 20))
            rest = inflate.unconsumed_tail
    except zlib.error:  # plain numbers that begin alike, or damage, which the codec will name
        return len(data)
    return size
