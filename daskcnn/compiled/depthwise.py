"""Depthwise convolution as sums of products of numbers that lie side by side.

A run is all channels of some samples at one pixel. A thread takes rows of runs: the same samples along a row of the
map, row after row, so that what neighbouring outputs have in common is in cache.
"""

from __future__ import annotations

from typing import Any

from daskcnn.compiled.im2col import TAPS
from daskcnn.compiled.loop import boolean, float64, inner, intp, loop, uintp
from daskcnn.compiled.runs import copy_at


@loop(lambda T: (T[:, :, :, ::1], T[:, ::1], T[:, :, :, ::1], TAPS, boolean, intp, intp, T[:, :, ::1], intp[::1]))
def correlate(
    x: Any, kernels: Any, y: Any, step: Any, back: bool, first: int, last: int, held: Any, which: Any
) -> None:
    """Write the rows of runs first … last of y (out_H, out_W, N, C) = x ⋆ w + bias; x (H, W, N, C).

    kernels : (R·S + 1, run), repeated for every sample of a run; the bias comes last
    back : write dx, from dy in the place of x
    held, which : as in `_row_of`
    """
    (rows, columns), (H, W), size, run = y.shape[:2], x.shape[:2], y.shape[2] * y.shape[3], kernels.shape[1]
    source, target, factors, numbers = (
        x.reshape(x.size),
        y.reshape(y.size),
        kernels.reshape(kernels.size),
        held.reshape(held.size),
    )
    which[:] = -1
    for unit in range(first, last):
        row, start = unit % rows, unit // rows * run
        n = min(run, size - start)
        if row == 0:
            which[:] = -1
        for column in range(columns):
            copy_at(factors, factors.size - run, target, (row * columns + column) * size + start, n)
        for r in range(step.height):
            i = _met(row, r, step.down, step.top, step.rows_apart, H, back)
            if i < 0:
                continue
            above = _row_of(source, i, W, size, start, n, held, which)
            for column in range(columns):
                to = (row * columns + column) * size + start
                _add_row(numbers, above, W, factors, r * step.width * run, run, column, step, back, target, to, n)


@inner
def _row_of(source: Any, row: int, columns: int, size: int, start: int, n: int, held: Any, which: Any) -> int:
    """Return the place of the runs of a row of a map in memory of their own, where they lie side by side.

    In the map they lie a power of two apart, so that few sets of a cache have room for all of them.

    held : (rows, columns, run), the rows that kernels reach at once
    which : the row that each of them is, -1 for none
    """
    slot, numbers = row % len(which), held.reshape(held.size)
    run = held.shape[2]
    begin = slot * held.shape[1] * run
    if which[slot] != row:
        which[slot] = row
        for column in range(columns):
            copy_at(source, (row * columns + column) * size + start, numbers, begin + column * run, n)
    return begin


@inner
def _add_row(
    source: Any,
    above: int,
    W: int,
    factors: Any,
    by: int,
    run: int,
    column: int,
    step: Any,
    back: bool,
    target: Any,
    to: int,
    n: int,
) -> None:
    """Add the products of a row of taps under a column, three taps at a time where all three meet a pixel."""
    s = 0
    while s < step.width:
        j = _met(column, s, step.right, step.left, step.columns_apart, W, back)
        three = step.width - s >= 3
        k = _met(column, s + 1, step.right, step.left, step.columns_apart, W, back) if three else -1
        m = _met(column, s + 2, step.right, step.left, step.columns_apart, W, back) if three else -1
        if j >= 0 and k >= 0 and m >= 0:
            places = above + j * run, above + k * run, above + m * run
            _add_three_products(source, places, factors, by + s * run, run, target, to, n)
            s += 3
            continue
        if j >= 0:
            _add_products(source, above + j * run, factors, by + s * run, target, to, n)
        s += 1


@loop(
    lambda T: (
        *(T[:, :, :, ::1], T[:, :, :, ::1], float64[:, :, ::1], TAPS, intp, intp, T[:, ::1]),
        *(T[:, :, ::1], intp[::1], T[:, :, ::1], intp[::1]),
    )
)
def correlate_filter(
    x: Any,
    dy: Any,
    sums: Any,
    step: Any,
    first: int,
    last: int,
    scratch: Any,
    held: Any,
    which: Any,
    changed: Any,
    whose: Any,
) -> None:
    """Write the sums first … last (R·S, C) of x · dy, each over an equal share of the rows of runs.

    scratch : (R·S, run), the sums of a row
    held, which : rows of x, as in `_row_of`; changed, whose : one row of dy
    """
    (rows, columns), (H, W), size, run = dy.shape[:2], x.shape[:2], dy.shape[2] * dy.shape[3], scratch.shape[1]
    source, changes, totals = x.reshape(x.size), dy.reshape(dy.size), scratch.reshape(scratch.size)
    numbers, change = held.reshape(held.size), changed.reshape(changed.size)
    units, parts = -(-size // run) * rows, len(sums)
    sums[first:last] = 0
    which[:] = -1
    for part in range(first, last):
        for unit in range(units * part // parts, units * (part + 1) // parts):
            row, start = unit % rows, unit // rows * run
            n = min(run, size - start)
            if row == 0:
                which[:] = -1
            whose[0] = -1
            _row_of(changes, row, columns, size, start, n, changed, whose)
            totals[:] = 0
            for r in range(step.height):
                i = _met(row, r, step.down, step.top, step.rows_apart, H, False)
                if i >= 0:
                    above = _row_of(source, i, W, size, start, n, held, which)
                    _add_up_row(numbers, above, W, change, columns, step, totals, r * step.width * run, run, n)
            _fold(scratch, sums[part])


@inner
def _add_up_row(
    source: Any, above: int, W: int, change: Any, columns: int, step: Any, totals: Any, to: int, run: int, n: int
) -> None:
    """Add the products of a row of dy and a row of x for every tap, four columns at a time where all meet a pixel."""
    column = 0
    while column < columns:
        several = 4 if columns - column >= 4 else 1
        for s in range(step.width):
            j = _met(column, s, step.right, step.left, step.columns_apart, W, False)
            end = _met(column + 3, s, step.right, step.left, step.columns_apart, W, False)
            there = to + s * run
            if several == 4 and j >= 0 and end >= 0:
                at, apart = above + j * run, step.right * run
                _add_four_products(source, at, apart, change, column * run, run, totals, there, n)
                continue
            for c in range(column, column + several):
                j = _met(c, s, step.right, step.left, step.columns_apart, W, False)
                if j >= 0:
                    _add_products(source, above + j * run, change, c * run, totals, there, n)
        column += several


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
    """Add n products a·b, number by number, from these places on. Unsigned places make vectors, as in `runs`."""
    one, other, there = uintp(at), uintp(by), uintp(to)
    for i in range(uintp(n)):
        total[there + i] += a[one + i] * b[other + i]


@inner
def _add_three_products(a: Any, places: Any, b: Any, by: int, apart: int, total: Any, to: int, n: int) -> None:
    """Add n sums of three products: a number of `total` is read and written once, not three times."""
    a0, a1, a2, there = uintp(places[0]), uintp(places[1]), uintp(places[2]), uintp(to)
    b0, b1, b2 = uintp(by), uintp(by + apart), uintp(by + 2 * apart)
    for i in range(uintp(n)):
        total[there + i] += a[a0 + i] * b[b0 + i] + a[a1 + i] * b[b1 + i] + a[a2 + i] * b[b2 + i]


@inner
def _add_four_products(a: Any, at: int, apart: int, b: Any, by: int, beside: int, total: Any, to: int, n: int) -> None:
    """Add n sums of four products, of runs that lie `apart` and `beside` each other."""
    a0, a1, a2, a3 = uintp(at), uintp(at + apart), uintp(at + 2 * apart), uintp(at + 3 * apart)
    b0, b1, b2, b3 = uintp(by), uintp(by + beside), uintp(by + 2 * beside), uintp(by + 3 * beside)
    there = uintp(to)
    for i in range(uintp(n)):
        first = a[a0 + i] * b[b0 + i] + a[a1 + i] * b[b1 + i]
        total[there + i] += first + (a[a2 + i] * b[b2 + i] + a[a3 + i] * b[b3 + i])


@inner
def _fold(runs: Any, sums: Any) -> None:
    """sums[tap, c] += the numbers of channel c in the run of this tap."""
    C = sums.shape[1]
    for tap in range(len(sums)):
        for start in range(0, runs.shape[1], C):
            for c in range(C):
                sums[tap, c] += runs[tap, start + c]
