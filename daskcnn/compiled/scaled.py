"""Batch normalising of whole maps, with a map that is added to it and a ReLU: each number is read once.

`tiled` (5, run) is that of `batchnorm`, for a run of some pixels' samples and channels, a multiple of C.
"""

from __future__ import annotations

import numpy as np

from daskcnn.compiled.loop import Array, boolean, float64, inner, intp, loop
from daskcnn.compiled.runs import fold


@loop(lambda T: (T[::1], T[:, ::1], T[::1], boolean, T[::1], intp, intp))
def forward(x: Array, tiled: Array, other: Array, rectified: bool, y: Array, first: int, last: int) -> None:
    """Write the numbers first … last of y = (x - mean)·factor + shift + other; rectified: 0 where that is below 0.

    other : like x, or (0,) for none
    first : a multiple of run
    """
    run, least = tiled.shape[1], x.dtype.type(0 if rectified else -np.inf)
    mean, factor, shift = tiled[0], tiled[1], tiled[2]
    for start in range(first, last, run):
        n = min(run, last - start)
        own, out = x[start : start + n], y[start : start + n]
        if other.size > 0:
            more = other[start : start + n]
            for i in range(n):
                value = (own[i] - mean[i]) * factor[i] + shift[i] + more[i]
                out[i] = least if value < least else value
        else:
            for i in range(n):
                value = (own[i] - mean[i]) * factor[i] + shift[i]
                out[i] = least if value < least else value


@loop(
    lambda T: (
        *(T[::1], T[:, ::1], T[::1], T[::1], boolean, T[::1]),
        *(float64[:, :, ::1], intp, intp, intp, T[:, ::1]),
    )
)
def sums(
    x: Array,
    tiled: Array,
    y: Array,
    dy: Array,
    rectified: bool,
    change: Array,
    parts: Array,
    size: int,
    first: int,
    last: int,
    scratch: Array,
) -> None:
    """parts[part] = the sums (2, C) of d and of d·(x - mean) over `size` numbers each, first <= part < last.

    d is dy; rectified: 0 where the output is 0. size: a multiple of run.

    y : the output, where something was added to it; (0,) where it is computed anew
    change : where d is written to, (0,) for nowhere
    scratch : (2, run)
    """
    run = tiled.shape[1]
    for part in range(first, last):
        scratch[:] = 0
        end = min(len(x), (part + 1) * size)
        for start in range(part * size, end, run):
            at = slice(start, min(end, start + run))
            if not rectified:
                _add_all(x[at], dy[at], tiled, scratch)
            elif y.size > 0:
                _add_where(x[at], y[at], dy[at], tiled, change[at], scratch)
            else:
                _add_behind(x[at], dy[at], tiled, scratch)
        fold(scratch[0], parts[part, 0])
        fold(scratch[1], parts[part, 1])


@inner
def _add_all(x: Array, dy: Array, tiled: Array, sums: Array) -> None:
    mean, total, product = tiled[0], sums[0], sums[1]
    for i in range(len(x)):
        total[i] += dy[i]
        product[i] += dy[i] * (x[i] - mean[i])


@inner
def _add_where(x: Array, y: Array, dy: Array, tiled: Array, change: Array, sums: Array) -> None:
    zero, mean, total, product = x.dtype.type(0), tiled[0], sums[0], sums[1]
    for i in range(len(x)):
        d = dy[i] if y[i] > zero else zero
        change[i] = d
        total[i] += d
        product[i] += d * (x[i] - mean[i])


@inner
def _add_behind(x: Array, dy: Array, tiled: Array, sums: Array) -> None:
    zero, mean, factor, shift, total, product = x.dtype.type(0), tiled[0], tiled[1], tiled[2], sums[0], sums[1]
    for i in range(len(x)):
        apart = x[i] - mean[i]
        d = dy[i] if apart * factor[i] + shift[i] > zero else zero
        total[i] += d
        product[i] += d * apart


@loop(lambda T: (T[::1], T[:, ::1], T[::1], boolean, T[::1], intp, intp))
def backward(x: Array, tiled: Array, dy: Array, rectified: bool, dx: Array, first: int, last: int) -> None:
    """Write the numbers first … last of dx = d·factor + (x - mean)·by_x + by_all.

    d is dy; rectified: 0 where the output is 0, to which nothing was added. first: a multiple of run.
    """
    run, zero = tiled.shape[1], x.dtype.type(0)
    mean, factor, shift, by_x, by_all = tiled[0], tiled[1], tiled[2], tiled[3], tiled[4]
    for start in range(first, last, run):
        n = min(run, last - start)
        own, change, out = x[start : start + n], dy[start : start + n], dx[start : start + n]
        if rectified:
            for i in range(n):
                apart = own[i] - mean[i]
                d = change[i] if apart * factor[i] + shift[i] > zero else zero
                out[i] = d * factor[i] + apart * by_x[i] + by_all[i]
        else:
            for i in range(n):
                out[i] = change[i] * factor[i] + (own[i] - mean[i]) * by_x[i] + by_all[i]
