"""Crops and mirror images, drawn from the samples' keys: independent of the worker and the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.arrays import derive, uniform

Array = npt.NDArray[Any]
Keys = npt.NDArray[np.uint64]

PAD = 4
_ROWS, _COLUMNS, _MIRROR = (1 << 32) + 1, (1 << 32) + 2, (1 << 32) + 3  # layers draw with salts of 32 bits


def crop_mirror(x: Array, keys: Keys) -> Array:
    """Shift every image of x (H, W, N, C) by up to 4 pixels each way, zeros moving in, and mirror half of them.

    This is the usual augmentation for CIFAR-10: pad by 4, random crop, random mirror (He et al. 2016, §4.2).
    Theano-MPI, Alg. 1, crops sub-images out of larger images instead. Zero is the mean after `normalise`.
    """
    h, w, n, c = x.shape
    padded = np.zeros((h + 2 * PAD, w + 2 * PAD, n, c), x.dtype)
    padded[PAD : PAD + h, PAD : PAD + w] = x
    rows = _shift(keys, _ROWS) + np.arange(h)[:, None]
    columns = np.arange(w)[:, None]
    columns = _shift(keys, _COLUMNS) + np.where(uniform(np, derive(np, keys, _MIRROR)) < 0.5, columns, w - 1 - columns)
    pixels = rows[:, None, :] * ((w + 2 * PAD) * n) + (columns * n + np.arange(n))
    return padded.reshape(-1, c).take(pixels, axis=0)


def _shift(keys: Keys, salt: int) -> npt.NDArray[np.int64]:
    """Return where each crop begins in the padded image, 0 to 8."""
    return (uniform(np, derive(np, keys, salt)) * (2 * PAD + 1)).astype(np.int64)


AUGMENTATIONS = {"none": lambda x, keys: x, "crop-mirror": crop_mirror}
