"""Decoded chunks of this process, shared by all splits; the least recently used are dropped first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any

import numpy.typing as npt

Block = npt.NDArray[Any]


class ChunkCache:
    """A bounded, thread-safe map from a chunk's identity to its array. An array larger than the bound is not kept.

    Parameters
    ----------
    limit : bytes of all arrays
    spared : bytes of those that are spared: chunks that pass through do not push them out
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
