"""Crops and mirror images, drawn from the samples' keys: independent of the worker and the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.arrays import derive, uniform

Array = npt.NDArray[Any]
Keys = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]
"""(N, 3): the row and the column of each image that come first, and 1, or -1 where columns go from right to left."""

PAD = 4
_SALTS = np.array([[1], [2], [3]], np.uint64) + np.uint64(1 << 32)  # layers draw with salts of 32 bits


def crop_mirror(keys: Keys, width: int) -> Places:
    """Shift every image by up to 4 pixels each way, zeros moving in, and mirror half of them.

    This is the usual augmentation for CIFAR-10: pad by 4, random crop, random mirror (He et al. 2016, §4.2).
    Theano-MPI, Alg. 1, crops sub-images out of larger images instead. Zero is the mean after `normalise`.
    """
    drawn = uniform(np, derive(np, keys, _SALTS))
    row, column = (drawn[:2] * (2 * PAD + 1)).astype(np.int64) - PAD
    plain = drawn[2] < 0.5
    return np.stack([row, column + np.where(plain, 0, width - 1), np.where(plain, 1, -1)], axis=1)


def moved(x: Array, places: Places) -> Array:
    """Return x (H, W, N, C) with every image moved to its place, at most 4 pixels away, zeros moving in."""
    h, w, n, c = x.shape
    padded = np.zeros((h + 2 * PAD, w + 2 * PAD, n, c), x.dtype)
    padded[PAD : PAD + h, PAD : PAD + w] = x
    rows = PAD + places[:, 0] + np.arange(h)[:, None]
    columns = PAD + places[:, 1] + places[:, 2] * np.arange(w)[:, None]
    pixels = rows[:, None, :] * ((w + 2 * PAD) * n) + (columns * n + np.arange(n))
    return padded.reshape(-1, c).take(pixels, axis=0)


def still(count: int) -> Places:
    """Leave every image where it is."""
    return np.repeat(np.array([[0, 0, 1]]), count, axis=0)


AUGMENTATIONS: dict[str, Callable[[Keys, int], Places]] = {
    "none": lambda keys, width: still(len(keys)),
    "crop-mirror": crop_mirror,
}
