"""Dropout's mask: the numbers of `arrays.derive` and `arrays.uniform`, from a sample's key, pixel and channel."""

from __future__ import annotations

import numpy as np

from daskcnn.compiled.loop import Array, inner

_ONE, _TWO, _GOLDEN = np.uint64(1), np.uint64(2), np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _40 = (np.uint64(bits) for bits in (30, 27, 31, 40))


@inner
def _derived(key: np.uint64, number: np.uint64) -> np.uint64:
    """SplitMix64's next key, for a number: `arrays.derive`."""
    x = key + (_TWO * number + _ONE) * _GOLDEN
    x = (x ^ (x >> _30)) * _FIRST
    x = (x ^ (x >> _27)) * _SECOND
    return x ^ (x >> _31)


@inner
def draw(
    mask: Array,
    keys: Array,
    salt: int,
    corner: tuple[int, int, int],
    columns: int,
    C: int,
    threshold: int,
    scale: float,
    bits: Array,
    vectors: int,
) -> None:
    """Fill the mask (rows, columns, samples · C): `scale` where a number is kept, else 0.

    corner: the block's first row, column and channel. keys: of its samples. bits: scratch for two runs of keys.
    Vectors have no pixels, so their keys are derived of none.
    """
    row, column, channel = corner
    run = len(keys) * C
    own, here = bits[:run], bits[run : 2 * run]
    for n in range(len(keys)):
        key = _derived(keys[n], np.uint64(salt))
        for c in range(C):
            own[n * C + c] = _derived(key, np.uint64(channel + c))
    if vectors:
        _threshold(own, mask, threshold, scale)
        return
    for j in range(columns):
        for i in range(run):
            here[i] = _derived(own[i], np.uint64(column + j))
        for k in range(len(mask) // (columns * run)):
            at = (k * columns + j) * run
            _pixel(here, np.uint64(row + k), mask[at : at + run], threshold, scale)


@inner
def _pixel(keys: Array, number: np.uint64, mask: Array, threshold: int, scale: float) -> None:
    zero, least = mask.dtype.type(0), np.uint64(threshold)
    for i in range(len(mask)):
        mask[i] = scale if (_derived(keys[i], number) >> _40) >= least else zero


@inner
def _threshold(keys: Array, mask: Array, threshold: int, scale: float) -> None:
    zero, least = mask.dtype.type(0), np.uint64(threshold)
    for i in range(len(mask)):
        mask[i] = scale if (keys[i] >> _40) >= least else zero


@inner
def masked(x: Array, mask: Array) -> None:
    """Replace x by x · mask; backward is the same on gradients."""
    for i in range(len(x)):
        x[i] *= mask[i]
