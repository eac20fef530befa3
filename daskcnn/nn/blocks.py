"""Passes over maps in blocks that stay in cache, on the device's threads, with scratch memory that stays there too."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Any, TypeVar

import numpy as np

from daskcnn.arrays import LINE, Array, Device

T = TypeVar("T")
R = TypeVar("R")

BLOCKS = 2
"""A block has this many times the backend's `block_bytes`. Longer steps make up for the slower cache: NumPy needs a
microsecond to start one, and between steps threads wait for their turn in the interpreter."""

ARENA_BLOCKS = 6
"""Blocks in a thread's scratch memory: enough for the backward pass through ReLU, LRN and max pooling."""


THREAD_ITEMS = 3
"""Fewest items for each thread. An item takes a few tenths of a millisecond, about as long as waking a thread."""


class Arena:
    """Scratch memory of one thread, taken piece by piece from a slab: every block uses the same cached lines.

    An array that does not fit the slab is newly allocated, so a slab may have any size.
    """

    def __init__(self, xp: Any, slab: Array) -> None:
        self._xp, self._slab, self._used = xp, slab, 0
        self._held: list[int] = []

    @classmethod
    def of(cls, device: Device, nbytes: int) -> Arena:
        """Return the calling thread's arena, with `nbytes` of the device's workspace."""
        return cls(device.xp, device.workspace.take(f"arena {device.pool.thread}", (nbytes,), np.uint8))

    def take(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an uninitialised array. Inside `with arena:` it is valid until the block ends."""
        start, stop = self._used, self._used + prod(shape) * np.dtype(dtype).itemsize
        if stop > len(self._slab):
            return self._xp.empty(shape, dtype)
        self._used = stop + -stop % LINE
        return self._slab[start:stop].view(dtype).reshape(shape)

    def __enter__(self) -> Arena:
        """Open a scope: memory taken in it is released at its end."""
        self._held.append(self._used)
        return self

    def __exit__(self, *exception: object) -> None:
        self._used = self._held.pop()


def block_bytes(device: Device, whole: int) -> int:
    """Return the bytes of a block of a map of `whole` bytes.

    They do not depend on the number of threads, so results do not.
    """
    return min(BLOCKS * device.backend.block_bytes, whole)


def arena(device: Device, whole: int) -> Arena:
    """Return the calling thread's arena for a map of `whole` bytes. It is empty if that is one block, as on GPUs."""
    block = block_bytes(device, whole)
    return Arena.of(device, ARENA_BLOCKS * block if block < whole else 0)


def cut(extent: int, size: int) -> list[slice]:
    """Cut range(extent) into nearly equal slices of at most `size` (at least 1) numbers."""
    parts = -(-extent // max(1, size))
    return [slice(a, b) for a, b in pairwise(extent * i // parts for i in range(parts + 1))]


def share(device: Device, work: Callable[[Iterator[T]], None], items: Iterable[T]) -> None:
    """Call `work` on threads with an iterator that they share: each thread takes the next item when it is free.

    This is cheaper than a task for every item, and a thread sets up only once what all of its items need.
    """
    items = list(items)
    queue = iter(items)

    def share_of_it(_: int) -> None:
        try:
            work(queue)
        except BaseException:
            deque(queue, maxlen=0)  # the others stop too
            raise

    device.pool.map(share_of_it, range(min(device.pool.threads, max(1, len(items) // THREAD_ITEMS))))


def each(device: Device, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return `function` of every item, in order, computed on the device's threads."""
    results: list[Any] = [None] * len(items)

    def work(queue: Iterator[int]) -> None:
        for i in queue:
            results[i] = function(items[i])

    share(device, work, range(len(items)))
    return results


def over_rows(device: Device, function: Callable[[slice], object], rows: int, row_bytes: int) -> None:
    """Call `function` on blocks of range(rows), on the device's threads; it must write to its own rows only."""
    each(device, function, row_blocks(device, rows, row_bytes))


def row_blocks(device: Device, rows: int, row_bytes: int) -> list[slice]:
    """Return the blocks of range(rows). They are the same for any number of threads."""
    return cut(rows, block_bytes(device, rows * row_bytes) // max(1, row_bytes))
