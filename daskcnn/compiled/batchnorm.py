"""Batch normalising: statistics by channel, and the operation at the head of a chain of local layers.

`tiled` (5, samples · channels) holds mean, factor and shift of each channel, and by_x and by_all of the way back. They
are repeated for every sample of a block.
"""

from __future__ import annotations

import numpy as np

from daskcnn.compiled.loop import Array, float64, inner, intp, loop
from daskcnn.compiled.runs import add_run, fold

PART = 1 << 16
"""Numbers of a map that are summed about a mean of their own."""
TENTH = 10
"""The part of them that this mean is taken of."""


@loop(lambda T: (T[::1], intp, intp, intp, intp, float64[:, :, ::1], T[:, ::1]))
def moments(x: Array, C: int, run: int, first: int, last: int, parts: Array, scratch: Array) -> None:
    """parts[part] = mean of each channel, and sum of squares about it, of PART numbers or so, first <= part < last.

    The mean of a tenth of the part is taken first, then sums about it, which is exact however far the mean lies from 0.
    If that tenth is unlike the rest, squares are rounded more, ten times at most.
    run: numbers that are added at once, a multiple of C. scratch: (3, run).
    """
    T = x.dtype.type
    size, total, squares, rough = _part_size(run), scratch[0], scratch[1], scratch[2]
    for part in range(first, last):
        own = x[part * size : min(len(x), (part + 1) * size)]
        count, out = len(own) // C, parts[part]
        total[:] = 0
        tenth = min(len(own), -(-len(own) // (TENTH * run)) * run)
        for start in range(0, tenth, run):
            add_run(own[start : start + run], total)
        fold(total, out[0])
        for c in range(C):
            rough[c] = T(out[0, c] / (tenth // C))
        for i in range(C, run):
            rough[i] = rough[i - C]
        total[:] = 0
        squares[:] = 0
        for start in range(0, len(own), run):
            _add_squares(own[start : start + run], rough, total, squares)
        fold(total, out[0])
        fold(squares, out[1])
        for c in range(C):
            left = out[0, c] / count
            out[1, c] -= out[0, c] * left
            out[0, c] = rough[c] + left


def part_count(size: int, run: int) -> int:
    """Return the number of parts of a map of `size` numbers."""
    return -(-size // part_size(run))


def part_size(run: int) -> int:
    """Return the numbers of a part: whole runs."""
    return max(1, PART // run) * run


_part_size = inner(part_size)


@inner
def _add_squares(x: Array, mean: Array, total: Array, squares: Array) -> None:
    for i in range(len(x)):
        d = x[i] - mean[i]
        total[i] += d
        squares[i] += d * d


@loop(lambda T: (float64[:, :, ::1], intp, intp, intp, float64[:, ::1]))
def joined(parts: Array, C: int, run: int, count: int, moments: Array) -> None:
    """Mean and variance of each channel from those of the parts (Chan, Golub and LeVeque 1983, eq. 2.1).

    count: pixels and samples in all.
    """
    size = _part_size(run) // C
    moments[:] = 0
    for part in range(len(parts)):
        weight = min(size, count - part * size) / count
        for c in range(C):
            moments[0, c] += parts[part, 0, c] * weight
    for part in range(len(parts)):
        weight = min(size, count - part * size) / count
        for c in range(C):
            apart = parts[part, 0, c] - moments[0, c]
            moments[1, c] += parts[part, 1, c] / count + apart * apart * weight


@inner
def forward(x: Array, y: Array, tiled: Array, run: int, rectified: bool) -> None:
    """y = (x - mean) · factor + shift; rectified: where that is below 0, y is 0."""
    least = x.dtype.type(0 if rectified else -np.inf)
    mean, factor, shift = tiled[0, :run], tiled[1, :run], tiled[2, :run]
    for start in range(0, len(x), run):
        own, out = x[start : start + run], y[start : start + run]
        for i in range(run):
            value = (own[i] - mean[i]) * factor[i] + shift[i]
            out[i] = least if value < least else value


@inner
def backward(x: Array, y: Array, dy: Array, tiled: Array, run: int, rectified: bool) -> None:
    """Replace dy by dx = dy · factor + (x - mean) · by_x + by_all; rectified: with 0 for dy where y is 0."""
    zero, all_of_it = x.dtype.type(0), not rectified
    mean, factor, by_x, by_all = tiled[0, :run], tiled[1, :run], tiled[3, :run], tiled[4, :run]
    for start in range(0, len(x), run):
        own, out, back = x[start : start + run], y[start : start + run], dy[start : start + run]
        for i in range(run):
            d = back[i]
            d = d if all_of_it | (out[i] > zero) else zero
            back[i] = d * factor[i] + (own[i] - mean[i]) * by_x[i] + by_all[i]


@inner
def add_sums(x: Array, y: Array, dy: Array, tiled: Array, run: int, rectified: bool) -> None:
    """Add a block's dy and dy · (x - mean) to the last two rows; rectified: with 0 for dy where y is 0."""
    zero, all_of_it = x.dtype.type(0), not rectified
    mean, total, product = tiled[0, :run], tiled[5, :run], tiled[6, :run]
    for start in range(0, len(x), run):
        own, out, back = x[start : start + run], y[start : start + run], dy[start : start + run]
        for i in range(run):
            d = back[i]
            d = d if all_of_it | (out[i] > zero) else zero
            total[i] += d
            product[i] += d * (own[i] - mean[i])
