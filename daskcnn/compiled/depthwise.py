"""Depthwise convolution as sums of products of numbers that lie side by side.

A run is all channels of some samples at one pixel. A thread takes rows of runs: the same samples along a row of the
map, row after row, so that what neighbouring outputs have in common is in cache.
"""

from __future__ import annotations

from typing import Any

from daskcnn.compiled.copies import copy
from daskcnn.compiled.im2col import TAPS
from daskcnn.compiled.loop import boolean, float64, inner, intp, loop, uintp


@loop(lambda T: (T[:, :, :, ::1], T[:, ::1], T[:, :, :, ::1], TAPS, boolean, intp, intp))
def correlate(x: Any, kernels: Any, y: Any, step: Any, back: bool, first: int, last: int) -> None:
    """Write the rows of runs first … last of y (out_H, out_W, N, C) = x ⋆ w + bias; x (H, W, N, C).

    kernels : (R·S + 1, run), repeated for every sample of a run; the bias comes last
    back : write dx, from dy in the place of x
    """
    (rows, columns), (H, W), size, run = y.shape[:2], x.shape[:2], y.shape[2] * y.shape[3], kernels.shape[1]
    source, target, factors = x.reshape(x.size), y.reshape(y.size), kernels.reshape(kernels.size)
    for unit in range(first, last):
        row, start = unit % rows, unit // rows * run
        n = min(run, size - start)
        for column in range(columns):
            to = (row * columns + column) * size + start
            copy(factors, factors.size - run, target, to, n)
            for r in range(step.height):
                i = _met(row, r, step.down, step.top, step.rows_apart, H, back)
                if i < 0:
                    continue
                for s in range(step.width):
                    j = _met(column, s, step.right, step.left, step.columns_apart, W, back)
                    if j >= 0:
                        at = (i * W + j) * size + start
                        _add_products(source, at, factors, (r * step.width + s) * run, target, to, n)


@loop(lambda T: (T[:, :, :, ::1], T[:, :, :, ::1], float64[:, :, ::1], TAPS, intp, intp, T[:, ::1]))
def correlate_filter(x: Any, dy: Any, sums: Any, step: Any, first: int, last: int, scratch: Any) -> None:
    """Write the sums first … last (R·S, C) of x · dy, each over an equal share of the rows of runs.

    scratch : (R·S, run), the sums of a row
    """
    (rows, columns), (H, W), size, run = dy.shape[:2], x.shape[:2], dy.shape[2] * dy.shape[3], scratch.shape[1]
    source, changes, totals = x.reshape(x.size), dy.reshape(dy.size), scratch.reshape(scratch.size)
    units, parts = -(-size // run) * rows, len(sums)
    sums[first:last] = 0
    for part in range(first, last):
        for unit in range(units * part // parts, units * (part + 1) // parts):
            row, start = unit % rows, unit // rows * run
            n = min(run, size - start)
            totals[:] = 0
            for r in range(step.height):
                i = _met(row, r, step.down, step.top, step.rows_apart, H, False)
                if i < 0:
                    continue
                for column in range(columns):
                    change = (row * columns + column) * size + start
                    for s in range(step.width):
                        j = _met(column, s, step.right, step.left, step.columns_apart, W, False)
                        if j >= 0:
                            at = (i * W + j) * size + start
                            _add_products(source, at, changes, change, totals, (r * step.width + s) * run, n)
            _fold(scratch, sums[part])


@inner
def _met(at: int, tap: int, step: int, begin: int, apart: int, size: int, back: bool) -> int:
    """Return the row that this tap meets under row `at` of the output, or if `back` above row `at` of the map.

    −1 if there is none.
    """
    if not back:
        found = at * step + begin + tap * apart
    else:
        found = at - begin - tap * apart
        if found % step != 0:
            return -1
        found //= step
    return found if 0 <= found < size else -1


@inner
def _add_products(a: Any, at: int, b: Any, by: int, total: Any, to: int, n: int) -> None:
    """Add n products a·b, number by number, from these places on. Unsigned places make it vectors, as in `copies`."""
    one, other, there = uintp(at), uintp(by), uintp(to)
    for i in range(uintp(n)):
        total[there + i] += a[one + i] * b[other + i]


@inner
def _fold(runs: Any, sums: Any) -> None:
    """sums[tap, c] += the numbers of channel c in the run of this tap."""
    C = sums.shape[1]
    for tap in range(len(sums)):
        for start in range(0, runs.shape[1], C):
            for c in range(C):
                sums[tap, c] += runs[tap, start + c]
