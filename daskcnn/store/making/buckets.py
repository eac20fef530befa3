"""An exact shuffle of more samples than memory holds, in two passes through files.

Pass 1 takes blocks of samples as they come. Each is sorted by where its samples will be stored, and written as one
file. Pass 2 takes the places bucket by bucket: it reads each block's samples of the bucket, which lie side by side in
the block's file, and gives them in the order of their places. So every sample is written twice and read twice, and
neither pass holds more than a block or a bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Places lo…hi, and where their samples lie after pass 1.

    Attributes
    ----------
    segments : (block, first row, rows) of each block that has some
    places : of these rows, one after the other
    """

    lo: int
    hi: int
    segments: tuple[tuple[int, int, int], ...]
    places: Places


def buckets(places: Sequence[Places], edges: Sequence[tuple[int, int]]) -> Iterator[Bucket]:
    """Yield the buckets of these ranges of places, by the places of each block's samples."""
    ordered = [np.sort(block) for block in places]
    for lo, hi in edges:
        segments, found = list[tuple[int, int, int]](), list[Places]()
        for number, block in enumerate(ordered):
            first, end = np.searchsorted(block, (lo, hi)).tolist()
            if first < end:
                segments.append((number, first, end - first))
                found.append(block[first:end])
        yield Bucket(lo, hi, tuple(segments), np.concatenate([np.empty(0, np.int64), *found]))


def write_block(folder: str, block: int, samples: npt.NDArray[Any], places: Places) -> None:
    """Write a block's samples (n, …) in the order of their places (n,)."""
    rows = np.ascontiguousarray(samples[np.argsort(places, kind="stable")])
    with fsspec.open(_file(folder, block), "wb", auto_mkdir=True) as file:
        file.write(rows.reshape(-1).view(np.uint8).data)


def read_bucket(folder: str, bucket: Bucket, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the bucket's samples (hi - lo, *shape) in the order of their places."""
    samples = np.empty((bucket.hi - bucket.lo, *shape), dtype)
    row, begun = int(np.prod(shape)) * dtype.itemsize, 0
    for block, first, rows in bucket.segments:
        with fsspec.open(_file(folder, block), "rb", block_size=1 << 20) as file:
            file.seek(first * row)
            found = np.frombuffer(file.read(rows * row), dtype).reshape(rows, *shape)
        samples[bucket.places[begun : begun + rows] - bucket.lo] = found
        begun += rows
    return samples


def remove_blocks(folder: str) -> None:
    """Remove what pass 1 has written."""
    system, path = fsspec.core.url_to_fs(folder)
    if system.exists(path):
        system.rm(path, recursive=True)


def _file(folder: str, block: int) -> str:
    return f"{folder}/{block:08d}.rows"
