"""Reads the chunks that come next into the cache, several at a time, while those before them are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import numpy as np

from daskcnn.store.cache import CACHE
from daskcnn.store.chunk_source import ChunkSource, Indices

THREADS = 4
"""Chunks that are read at a time: a request to a remote storage mostly waits."""


@contextmanager
def reading_ahead(source: ChunkSource | None, order: Indices, ahead: int) -> Iterator[Callable[[int], None]]:
    """Read the chunks of samples in this order ahead, on threads that end with the context.

    Parameters
    ----------
    source : None for samples that are in memory
    ahead : bytes of images that are read before they are asked for; at most half of what the cache holds

    Yields
    ------
    A function to be called with how many samples of the order are asked for, before they are taken.
    """
    if source is None or not len(order):
        yield lambda samples: None
        return
    chunks, _ = source.places(order)
    different, first = np.unique(chunks, return_index=True)
    by_first_use = np.argsort(first, kind="stable")
    coming, first = different[by_first_use].tolist(), first[by_first_use]
    further, begun = max(1, min(ahead, CACHE.limit // 2) // max(1, source.chunk_bytes)), 0
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="daskcnn-loader-ahead")

    def reached(samples: int) -> None:
        nonlocal begun
        until = min(len(coming), int(np.searchsorted(first, samples)) + further)
        for index in coming[begun:until]:
            pool.submit(_read, source, index)
        begun = max(begun, until)

    try:
        yield reached
    finally:
        pool.shutdown(cancel_futures=True)


def _read(source: ChunkSource, index: int) -> None:
    with suppress(Exception):  # who needs the chunk asks again, and is told
        for array in source.arrays:
            source.held(array, index)
