"""The chunks that samples come from, read and checked as a whole, and the cache that keeps them in this process."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import zarr

from daskcnn.errors import DataError
from daskcnn.store.files import Files
from daskcnn.store.manifest import PartManifest, sha256

Block = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]


class ChunkCache:
    """A bounded, thread-safe map from a chunk's identity to its array. The least recently used are dropped first.

    An array larger than the bound is not kept. Chunks that pass through do not push out those that are spared. `limit`
    and `spared` are in bytes.
    """

    def __init__(self, limit: int, spared: int | None = None) -> None:
        self.limit = limit
        self.spared = limit // 4 if spared is None else spared
        self.nbytes = 0
        self._spared_bytes = 0
        self._lock = threading.Lock()
        self._blocks: OrderedDict[Hashable, Block] = OrderedDict()
        self._spared_blocks: OrderedDict[Hashable, Block] = OrderedDict()
        self._loading: dict[Hashable, Future[Block]] = {}

    def get(self, key: Hashable, load: Callable[[], Block], *, spare: bool = False) -> Block:
        """Return the array of this key, loading it if needed; `spare` puts it among those that are spared.

        Loads run unlocked. A thread that asks for what another one loads waits for it, and gets its error too.
        """
        with self._lock:
            if (held := self._find(key)) is not None:
                return held
            others = self._loading.get(key)
            if others is None:
                mine = self._loading[key] = Future[Block]()
        return others.result() if others is not None else self._loaded(key, load, mine, spare)

    def _find(self, key: Hashable) -> Block | None:
        for blocks in (self._blocks, self._spared_blocks):
            if (held := blocks.get(key)) is not None:
                blocks.move_to_end(key)
                return held
        return None

    def _loaded(self, key: Hashable, load: Callable[[], Block], mine: Future[Block], spare: bool) -> Block:
        try:
            block = load()
            block.flags.writeable = False
        except BaseException as error:
            with self._lock:
                del self._loading[key]
            mine.set_exception(error)
            raise
        with self._lock:
            del self._loading[key]
            self._keep(key, block, spare)
        mine.set_result(block)
        return block

    def _keep(self, key: Hashable, block: Block, spare: bool) -> None:
        (self._spared_blocks if spare else self._blocks)[key] = block
        self.nbytes += block.nbytes
        self._spared_bytes += block.nbytes * spare
        while self._spared_bytes > self.spared:
            self._spared_bytes -= self._drop(self._spared_blocks)
        while self.nbytes > self.limit:
            if self._blocks:
                self._drop(self._blocks)
            else:
                self._spared_bytes -= self._drop(self._spared_blocks)

    def _drop(self, blocks: OrderedDict[Hashable, Block]) -> int:
        dropped = blocks.popitem(last=False)[1].nbytes
        self.nbytes -= dropped
        return dropped

    def clear(self) -> None:
        """Drop all arrays."""
        with self._lock:
            self._blocks.clear()
            self._spared_blocks.clear()
            self.nbytes = self._spared_bytes = 0


CACHE = ChunkCache(1 << 30)
"""The cache of this process: twice the loader's window, so a window read ahead does not push out the one in use."""


class ChunkSource(Protocol):
    """The chunks of a part, and where in them its samples lie."""

    @property
    def fingerprint(self) -> str:
        """Equal on every worker that sees the same data."""

    @property
    def cuts(self) -> int | Indices:
        """Samples of each chunk; or the samples with which another chunk begins, where chunks differ."""

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the images of a chunk."""

    @property
    def arrays(self) -> Sequence[str]:
        """Names of the arrays that there are: "images", "labels" and, where samples have weights, "weights"."""

    def like(self, array: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return shape and number type of one sample of this array."""

    def places(self, indices: Indices) -> tuple[Indices, Indices]:
        """Return the chunk of each of these samples, and its place in that chunk."""

    def held(self, array: str, index: int) -> Block:
        """Return a chunk of an array, from the cache if it is there. Raises DataError if it is damaged."""


@dataclass(frozen=True)
class Renumbered:
    """Another source with other labels: `numbers` has the new number of each class, or the columns in another order."""

    source: ChunkSource
    numbers: npt.NDArray[np.uint16]

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the other source."""
        return self.source.fingerprint

    @property
    def cuts(self) -> int | Indices:
        """The cuts of the other source."""
        return self.source.cuts

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the images of a chunk."""
        return self.source.chunk_bytes

    @property
    def arrays(self) -> Sequence[str]:
        """Names of the arrays that there are."""
        return self.source.arrays

    def like(self, array: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return shape and number type of one sample of this array."""
        shape, dtype = self.source.like(array)
        return shape, self.numbers.dtype if array == "labels" and not shape else dtype

    def places(self, indices: Indices) -> tuple[Indices, Indices]:
        """Return the chunk of each of these samples, and its place in that chunk."""
        return self.source.places(indices)

    def held(self, array: str, index: int) -> Block:
        """Return a chunk of an array. Raises DataError if it is damaged."""
        block = self.source.held(array, index)
        if array != "labels":
            return block
        return self.numbers[block] if block.ndim == 1 else block[:, self.numbers]


@dataclass(frozen=True)
class StoredChunks:
    """The chunks of a part of a prepared data set: its samples lie in them in order."""

    name: str
    chunk: int
    files: Files
    part: PartManifest
    fingerprint: str
    stored: dict[str, zarr.Array[Any]]

    @property
    def cuts(self) -> int:
        """Samples of each chunk."""
        return self.chunk

    @property
    def chunks(self) -> int:
        """Chunks of the part."""
        return -(-self.part.samples // self.chunk)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the images of a chunk."""
        return _whole_bytes(self.stored["images"])

    @property
    def arrays(self) -> Sequence[str]:
        """Names of the arrays that there are."""
        return tuple(self.stored)

    def like(self, array: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return shape and number type of one sample of this array."""
        stored = self.stored[array]
        return stored.shape[1:], np.dtype(stored.dtype)

    def places(self, indices: Indices) -> tuple[Indices, Indices]:
        """Return the chunk of each of these samples, and its place in that chunk."""
        return indices // self.chunk, indices % self.chunk

    def held(self, array: str, index: int) -> Block:
        """Return a chunk of an array, from the cache if it is there. Raises DataError if it is damaged."""
        key = (self.files.path, self.fingerprint, self.name, array, index)
        return CACHE.get(key, lambda: self.load(array, index))

    def load(self, array: str, index: int) -> Block:
        """Return a chunk of an array, not from the cache. Raises DataError naming a missing or damaged chunk.

        A chunk is one file of plain numbers, so it is read without zarr: one request, and no copy.
        """
        lo = index * self.chunk
        hi = min(lo + self.chunk, self.part.samples)
        where = f"{self.files.path}: {self.name}/{array}, chunk {index} (samples {lo} to {hi - 1})"
        stored = self.stored[array]
        key = f"{stored.path}/{stored.metadata.encode_chunk_key((index,) + (0,) * (stored.ndim - 1))}"
        expected, remedy = _whole_bytes(stored), "make the data set again"
        content = self.files.content(key, expected)
        if content is None:
            raise DataError(reason=f"{where} is missing", remedy=remedy)
        if len(content) != expected:
            raise DataError(reason=f"{where} has {self.files.size(key)} bytes instead of {expected}", remedy=remedy)
        data = np.frombuffer(content, np.dtype(stored.dtype)).reshape(stored.chunks)[: hi - lo]
        if sha256(data) != getattr(self.part, array)[index]:
            raise DataError(f"{where} does not match its checksum", "the file is damaged", remedy)
        return data


def _whole_bytes(stored: zarr.Array[Any]) -> int:
    return int(np.prod(stored.chunks)) * np.dtype(stored.dtype).itemsize
