"""The chunks of a sharded array that were never written, by the indices of its shards."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import zarr
from zarr.abc.store import ByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.buffer import default_buffer_prototype
from zarr.codecs import ShardingCodec
from zarr.core.sync import sync

from daskcnn.store.foreign.sized_store import Packing

_AT_ONCE = 64
_CHECKSUM = 4


def absent_in_shards(array: zarr.Array[Any]) -> int:
    """Return how many chunks of a sharded array are not stored. Only the index of each shard is read."""
    return sync(_absent(array))


async def _absent(array: zarr.Array[Any]) -> int:
    assert array.shards is not None, "asked of sharded arrays"
    # only metadata of Zarr's format 3 has shards, and so codecs
    codec = next(each for each in array.metadata.codecs if isinstance(each, ShardingCodec))  # type: ignore[union-attr]
    shape, chunks, shards = (np.array(each)[:, None] for each in (array.shape, array.chunks, array.shards))
    within = shards // chunks
    first = codec.index_location.value == "start"
    packing = Packing(0, None, int(within.prod()), first, _CHECKSUM * (len(codec.index_codecs) - 1))
    part: ByteRequest = RangeByteRequest(0, packing.index_bytes) if first else SuffixByteRequest(packing.index_bytes)

    async def absent(shard: tuple[int, ...]) -> int:
        place = array.store_path / array.metadata.encode_chunk_key(shard)
        found = await place.get(default_buffer_prototype(), part)
        gone = range(packing.in_shard) if found is None else packing.absent(memoryview(found.to_bytes()), part)
        inner = np.stack(np.unravel_index(np.array(gone, np.int64), within[:, 0])) + np.array(shard)[:, None] * within
        return int((inner * chunks < shape).all(axis=0).sum())  # the last shards reach beyond the array

    every, total = list(np.ndindex(*(-(-shape // shards))[:, 0])), 0
    for begin in range(0, len(every), _AT_ONCE):
        total += sum(await asyncio.gather(*map(absent, every[begin : begin + _AT_ONCE])))
    return total
