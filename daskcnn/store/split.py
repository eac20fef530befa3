"""Which samples become the test part, and in which order the samples of a part are stored.

Both are drawn from the seed and the sample's number alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.arrays import derive

_SPLIT = 3
"""Tells the split's draws from those of the order, which has one for each part."""


def stratified(labels: npt.NDArray[Any], test: int, seed: int) -> npt.NDArray[np.bool_]:
    """Return a mask (N,) of `test` samples that hold every class in its proportion, within one sample.

    Every class keeps at least one sample outside, so a class of one sample is not in the mask. Where classes are too
    small for that, the mask has fewer than `test` samples.

    Parameters
    ----------
    labels : classes (N,), or rows (N, L) of several labels: samples with the same row count as one class
    test : samples of the mask
    seed : of the draw
    """
    _, which, counts = np.unique(labels, axis=0, return_inverse=True, return_counts=True)
    wanted = _shares(counts, test)
    keys = sample_keys(len(labels), seed, _SPLIT)
    by_class = np.lexsort((keys, which.reshape(-1)))
    place = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    mask = np.zeros(len(labels), bool)
    mask[by_class] = place < np.repeat(wanted, counts)
    return mask


def _shares(counts: npt.NDArray[np.int64], test: int) -> npt.NDArray[np.int64]:
    """Samples of each class: its quota by largest remainder, at most all but one."""
    quota = counts * (min(test, int(counts.sum())) / counts.sum())
    shares = np.minimum(np.floor(quota + 1e-9).astype(np.int64), counts - 1)
    by_remainder = np.argsort(-(quota - shares), kind="stable")
    for index in by_remainder[: max(0, test - int(shares.sum()))]:
        shares[index] = min(shares[index] + 1, counts[index] - 1)
    return shares


def shuffled_order(samples: int, seed: int, salt: int) -> npt.NDArray[np.int64]:
    """Return a permutation of the samples of a part; `salt` is the number of the part.

    It sorts keys of our own: the stream of NumPy's `permutation` may change between versions.
    """
    return np.argsort(sample_keys(samples, seed, salt), kind="stable")


def sample_keys(samples: int, seed: int, salt: int) -> npt.NDArray[np.uint64]:
    """Return a random number for each sample, (N,)."""
    keys: npt.NDArray[np.uint64] = derive(np, derive(np, np.arange(samples, dtype=np.uint64), seed), salt)
    return keys
