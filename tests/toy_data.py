"""A small data set of random images, as a store on disk, for tests of what trains on one."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from daskcnn.store import Dataset, open_dataset
from daskcnn.store.making.writer import write
from daskcnn.store.manifest import Source, describe

CLASSES = tuple("abcdefghij")


def toy_dataset(
    folder: Path, *, train: int = 230, test: int = 40, size: int = 16, several: bool = False, weighted: bool = False
) -> Dataset:
    """Images (size, size, 3) of ten classes, in chunks of 50: the last training chunk may be a partial one.

    several: each sample has any number of the ten. weighted: samples have weights, some of them 0.
    """
    rng = np.random.default_rng(0)

    def part(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = rng.permutation(np.arange(count) % len(CLASSES)).astype(np.uint8)
        if several:
            labels = (rng.random((count, len(CLASSES))) < 0.3).astype(np.uint8)
        return rng.integers(0, 256, (count, size, size, 3), dtype=np.uint8), labels

    weights = np.random.default_rng(2).integers(0, 4, train).astype(np.float32) if weighted else None
    source = Source("toy", CLASSES, part(train), part(test), {"toy.bin": "0" * 64}, weights)
    path = str(folder / "toy.zarr")
    write(source, describe(source, chunk=50, order="stored", seed=0), path, lambda name: None)
    return open_dataset(path)
