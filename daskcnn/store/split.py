"""The samples of the test part, and the order of each part, drawn from the seed and the sample's number alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.arrays import derive
from daskcnn.errors import DataError

MOST_HELD_OUT = 2000
_SPLIT = 3
"""Tells the split's draws from those of the order, which has one for each part."""


def check_seed(seed: Any) -> None:
    """Raise DataError for what is no seed."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise DataError(f"seed={seed!r:.60}", "a whole number of 0 or more is needed", "give one")


def held_out(samples: int) -> int:
    """Return the validation samples of a training part where a job gives no number: a tenth, at most 2,000."""
    return min(MOST_HELD_OUT, max(1, round(samples / 10)))


def stratified(
    labels: npt.NDArray[Any], test: int, seed: int, *, keys: npt.NDArray[np.uint64] | None = None
) -> npt.NDArray[np.bool_]:
    """Return a mask (N,) of `test` samples that hold every class in its proportion, within one sample.

    Every class keeps at least one sample outside, so a class of one sample is not in the mask. Where classes are too
    small for that, the mask has fewer than `test` samples. Samples with the same row of labels (N, L) count as one
    class, and so do those whose row no other sample has; each label keeps a sample outside. The draw follows from the
    seed and from `keys` (N,), a number of each sample's own; its index if not given.
    """
    which, counts = _groups(labels)
    wanted = _shares(counts, test)
    by_class = np.lexsort((sample_keys(len(labels) if keys is None else keys, seed, _SPLIT), which))
    place = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    mask = np.zeros(len(labels), bool)
    mask[by_class] = place < np.repeat(wanted, counts)
    if labels.ndim == 2:
        for label in np.flatnonzero(labels.any(axis=0) & ~labels[~mask].any(axis=0)):
            mask[np.flatnonzero(labels[:, label])[0]] = False
    return mask


def representative(labels: npt.NDArray[Any], samples: int, seed: int) -> npt.NDArray[np.bool_]:
    """Return a mask (N,) of `samples` samples, at most N, with the classes in their proportions.

    Every class is in it, and each of several labels, where there is room for one sample of each. The draw follows from
    the seed. Rows of labels (N, L) are classes as for `stratified`.
    """
    which, counts = _groups(labels)
    keys = sample_keys(len(labels), seed, _SPLIT)
    by_class = np.lexsort((keys, which))
    place = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    passed = np.empty(len(labels))
    passed[by_class] = place / np.repeat(counts, counts)  # 0 for the first of each class
    if labels.ndim == 2:
        passed[labels.argmax(axis=0)[labels.any(axis=0)]] = -1
    mask = np.zeros(len(labels), bool)
    mask[np.lexsort((keys, passed))[:samples]] = True
    return mask


def _groups(labels: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The group of each sample, (N,), and the samples of each group."""
    _, which, counts = np.unique(labels, axis=0, return_inverse=True, return_counts=True)
    which = which.reshape(-1)
    if labels.ndim == 1:
        return which, counts
    _, which, counts = np.unique(np.where(counts[which] == 1, -1, which), return_inverse=True, return_counts=True)
    return which.reshape(-1), counts


def _shares(counts: npt.NDArray[np.int64], test: int) -> npt.NDArray[np.int64]:
    """Samples of each class: its quota by largest remainder, at most all but one."""
    quota = counts * (min(test, int(counts.sum())) / counts.sum())
    shares = np.minimum(np.floor(quota + 1e-9).astype(np.int64), counts - 1)
    by_remainder = np.argsort(-(quota - shares), kind="stable")
    for index in by_remainder[: max(0, test - int(shares.sum()))]:
        shares[index] = min(shares[index] + 1, counts[index] - 1)
    return shares


def shuffled_order(samples: int | npt.NDArray[np.uint64], seed: int, salt: int) -> npt.NDArray[np.int64]:
    """Return a permutation of the samples of part `salt`, given by their count or by a number of each one's own.

    It sorts keys of our own: the stream of NumPy's `permutation` may change between versions.
    """
    return np.argsort(sample_keys(samples, seed, salt), kind="stable")


def sample_keys(samples: int | npt.NDArray[np.uint64], seed: int, salt: int) -> npt.NDArray[np.uint64]:
    """Return a random number for each sample, (N,), which follows from its index or from a number of its own."""
    own = np.arange(samples, dtype=np.uint64) if isinstance(samples, int) else samples
    keys: npt.NDArray[np.uint64] = derive(np, derive(np, own, seed), salt)
    return keys
