"""Decoded chunks of this process, shared by all splits; the least recently used are dropped first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import numpy.typing as npt

Block = npt.NDArray[Any]


class ChunkCache:
    """A bounded, thread-safe map from a chunk's identity to its array. An array larger than the bound is not kept."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self._lock = threading.Lock()
        self._blocks: OrderedDict[Hashable, Block] = OrderedDict()

    def get(self, key: Hashable, load: Callable[[], Block]) -> Block:
        """Return the array of this key, loading it if needed.

        Loads run unlocked: two threads may both load one chunk.
        """
        with self._lock:
            if (held := self._blocks.get(key)) is not None:
                self._blocks.move_to_end(key)
                return held
        block = load()
        block.flags.writeable = False
        with self._lock:
            self._keep(key, block)
        return block

    def _keep(self, key: Hashable, block: Block) -> None:
        if key in self._blocks:
            return
        self._blocks[key] = block
        self.nbytes += block.nbytes
        while self.nbytes > self.limit:
            self.nbytes -= self._blocks.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        """Drop all arrays."""
        with self._lock:
            self._blocks.clear()
            self.nbytes = 0


CACHE = ChunkCache(1 << 30)
"""The cache of this process: twice the loader's window, so a window read ahead does not push out the one in use."""
