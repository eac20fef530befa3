"""A small problem for real arithmetic: clusters of points in a square of pixels, as a data set in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from daskcnn.store import Dataset, Scattered
from daskcnn.store.manifest import Labelling

LAYERS: list[dict[str, Any]] = [{"layer": "dense", "units": 24}, {"layer": "relu"}, {"layer": "dense", "units": 10}]
"""A network that learns it."""
CLASSES = 10
_SIDE = 4
_CENTERS = 3  # clusters a class
_SPREAD = 46.0  # of a cluster, in values of 0 … 255


@dataclass(frozen=True)
class _Part:
    """Samples in memory, as `store.Split` has them on disk."""

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]
    cuts: int = 1 << 30
    source: None = None

    def __len__(self) -> int:
        return len(self.labels)

    def scattered(self, indices: npt.NDArray[np.int64], near: object) -> tuple[Scattered, npt.NDArray[np.int64]]:
        return Scattered.of(self.images[indices]), self.labels[indices]

    def weights(self, indices: npt.NDArray[np.int64]) -> None:
        return None


@dataclass(frozen=True)
class Points:
    """The part of a `store.Dataset` that a replica uses."""

    train: _Part
    test: _Part
    mean: npt.NDArray[np.float64]
    deviation: npt.NDArray[np.float64]
    classes: tuple[str, ...] = tuple(map(str, range(CLASSES)))
    shape: tuple[int, int, int] = (_SIDE, _SIDE, 1)
    sample_bytes: int = _SIDE * _SIDE
    labels: Labelling = "classes"
    nodata: None = None
    fit: None = None


def clusters_of_points(train: int, test: int = 1000, *, seed: int = 0) -> Dataset:
    """Ten classes of 3 clusters each, which overlap: about nine points in ten can be told. Labels go round in turn."""
    rng = np.random.default_rng(seed)
    centers = rng.uniform(40, 215, (CLASSES, _CENTERS, _SIDE * _SIDE))
    learnt, unseen = (_drawn(rng, centers, count) for count in (train, test))
    pixels = learnt.images.astype(np.float64)
    return cast(Dataset, Points(learnt, unseen, pixels.mean(axis=(0, 1, 2)), pixels.std(axis=(0, 1, 2))))


def _drawn(rng: np.random.Generator, centers: npt.NDArray[np.float64], count: int) -> _Part:
    labels = np.arange(count) % CLASSES
    chosen = centers[labels, rng.integers(0, _CENTERS, count)]
    values = np.clip(np.rint(chosen + rng.normal(0, _SPREAD, chosen.shape)), 0, 255)
    return _Part(values.astype(np.uint8).reshape(count, _SIDE, _SIDE, 1), labels.astype(np.int64))
