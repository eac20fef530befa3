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
"""How many of the backend's `block_bytes` a block has here. Longer steps make up for the slower cache: NumPy needs a
microsecond to start one, and threads wait for each other's turn in the interpreter between them."""

ARENA_BLOCKS = 6
"""How many blocks a thread's scratch memory holds: what it takes to go back through ReLU, LRN and max pooling."""


THREAD_ITEMS = 3
"""Items for each thread at least, of a few tenths of a millisecond each: about what it takes to wake one."""


class Arena:
    """Scratch memory of one thread, one piece after the other off a slab: the same cached lines for every block.

    What does not fit is newly made, so that a slab of no size will do.
    """

    def __init__(self, xp: Any, slab: Array) -> None:
        self._xp, self._slab, self._used = xp, slab, 0
        self._held: list[int] = []

    @classmethod
    def of(cls, device: Device, nbytes: int) -> Arena:
        """The calling thread's, of so many bytes of the device's workspace."""
        return cls(device.xp, device.workspace.take(f"arena {device.pool.thread}", (nbytes,), np.uint8))

    def take(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An uninitialised array; inside of `with arena:` until its end."""
        start, stop = self._used, self._used + prod(shape) * np.dtype(dtype).itemsize
        if stop > len(self._slab):
            return self._xp.empty(shape, dtype)
        self._used = stop + -stop % LINE
        return self._slab[start:stop].view(dtype).reshape(shape)

    def __enter__(self) -> Arena:
        """A scope: what is taken in it is taken back at its end."""
        self._held.append(self._used)
        return self

    def __exit__(self, *exception: object) -> None:
        self._used = self._held.pop()


def block_bytes(device: Device, whole: int) -> int:
    """Bytes of a block of a map of `whole` bytes; they depend on no number of threads, so that results do not."""
    return min(BLOCKS * device.backend.block_bytes, whole)


def arena(device: Device, whole: int) -> Arena:
    """The calling thread's, for a map of so many bytes; of no size where that is one block: on GPUs."""
    block = block_bytes(device, whole)
    return Arena.of(device, ARENA_BLOCKS * block if block < whole else 0)


def cut(extent: int, size: int) -> list[slice]:
    """range(extent) in nearly equal slices of at most `size`, or of one."""
    parts = -(-extent // max(1, size))
    return [slice(a, b) for a, b in pairwise(extent * i // parts for i in range(parts + 1))]


def share(device: Device, work: Callable[[Iterator[T]], None], items: Iterable[T]) -> None:
    """Call `work` on threads with an iterator that they share: each takes the next item when it is free.

    Far cheaper than a task for every item, and what a thread needs for all of its items is made once.
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
    """`function` of every item, in order, shared by the device's threads."""
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
    """Blocks of range(rows), the same for any number of threads."""
    return cut(rows, block_bytes(device, rows * row_bytes) // max(1, row_bytes))
