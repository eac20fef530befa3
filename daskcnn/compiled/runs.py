"""Runs of numbers: copies and sums from one array of one axis to another, and sums of channels over a map.

The sums of a map are made in parts that do not depend on the number of threads.
"""

from __future__ import annotations

from typing import Any

from daskcnn.compiled.loop import Array, float64, inner, intp, loop, uintp


@inner
def copy_at(source: Any, at: int, target: Any, to: int, n: int) -> None:
    """Copy n numbers. Numba tests signed places for less than zero at each use, and compiles no vectors."""
    here, there = uintp(at), uintp(to)
    for i in range(uintp(n)):
        target[there + i] = source[here + i]


@inner
def add_at(source: Any, at: int, target: Any, to: int, n: int) -> None:
    """Add n numbers."""
    here, there = uintp(at), uintp(to)
    for i in range(uintp(n)):
        target[there + i] += source[here + i]


RUNS = 64
"""Runs added up in the network's dtype; their sums are added in float64."""


@loop(lambda T: (T[::1], intp, intp, intp, intp, float64[:, ::1], T[::1]))
def channel_sums(x: Array, C: int, run: int, first: int, last: int, parts: Array, scratch: Array) -> None:
    """parts[part] = the sum of each channel over RUNS runs, first <= part < last.

    run: numbers that are added at once, a multiple of C. scratch: (run,).
    """
    for part in range(first, last):
        scratch[:] = 0
        for start in range(part * RUNS * run, min(len(x), (part + 1) * RUNS * run), run):
            add_run(x[start : start + run], scratch)
        fold(scratch, parts[part])


@inner
def copy(x: Array, y: Array) -> None:
    """y = x. An assignment of slices would also compile its message for unequal lengths, which takes two seconds."""
    for i in range(len(y)):
        y[i] = x[i]


@inner
def add_run(x: Array, total: Array) -> None:
    """Add numbers to as many sums, or fewer at the end of a map."""
    for i in range(min(len(x), len(total))):
        total[i] += x[i]


@inner
def fold(total: Array, sums: Array) -> None:
    """sums[c] = total[c] + total[c + C] + … for C channels: `total` is added up by halves until one row is left."""
    C = len(sums)
    rows = len(total) // C
    while rows > 1:
        half = rows // 2
        add_run(total[(rows - half) * C : rows * C], total[: half * C])
        rows -= half
    copy(total, sums)
