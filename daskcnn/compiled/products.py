"""Products of matrices that are parts of larger arrays, by the BLAS that `numpy.dot` calls in loops.

`numpy.dot` takes contiguous matrices only. Here a matrix is a place in a row of numbers, and the distance of its rows.
OpenBLAS's kernels for AVX-512 make small products without copying their factors, so large ones are cut into such. Its
other kernels copy the factors of every product: there, cut products take two to three times as long as whole ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from threadpoolctl import threadpool_info

from daskcnn.compiled.loop import blas_gemm, inner, overload

SMALL = 1_000_000
"""Multiplications of the largest product that OpenBLAS makes without copying its factors, where it can."""
DIRECT = {"skylakex", "cooperlake", "sapphirerapids"}
"""OpenBLAS's names for the kernels that can."""
DEEPEST = 1_024
"""Longest sum in such a product. The rows of the right factor that it meets lie too far apart for a cache beyond."""
PANEL, STEP, MOST = 6_000, 16, 64
"""Numbers of the left factor in such a product, to stay in the first-level cache; what its rows and columns are a
multiple of; and its most columns."""
WARM_UP = 2_048, 512, 64
"""Rows, depth and columns of a product that writes what small ones prefetch. With fewer rows than OpenBLAS copies at
once, it copies a few columns at a time to the same place."""

_touched = 0
"""The number of buffers that were written to."""
_ONE = Lock()


class Matrix(NamedTuple):
    """A matrix in an array of one axis: where it begins, the distance of its rows, and whether it is transposed."""

    numbers: Any
    start: int
    apart: int
    transposed: bool


@cache
def small() -> int:
    """Return the multiplications above which `multiply` cuts a product; 0 where BLAS gains nothing by that."""
    kernels = {str(info.get("architecture")).lower() for info in threadpool_info() if info["user_api"] == "blas"}
    return SMALL if kernels & DIRECT else 0


def touch_buffers(threads: int, together: Callable[[Callable[[int], None], Iterable[int]], object]) -> None:
    """Write the buffers into which BLAS copies factors, one for each of the threads, once in a process.

    `together` calls a function for every item, on all threads at once.

    OpenBLAS's kernels for AVX2 prefetch beyond what they have copied. As long as no page was ever written there, each
    such prefetch looks for one: products of 75 × 256 by 256 × 32 take 2.7 times as long, until a larger one comes.
    """
    global _touched
    from scipy.linalg.blas import sgemm

    rows, depth, columns = WARM_UP
    with _ONE:
        if threads <= _touched:
            return
        left, right = np.ones((rows, depth), np.float32, "F"), np.ones((depth, columns), np.float32, "F")

        def touch(_: int) -> None:
            for _ in range(2):  # long enough for all threads to multiply at once: they take any buffer that is free
                sgemm(1.0, left, right)

        together(touch, range(threads))
        _touched = threads


@inner
def multiply(a: Matrix, b: Matrix, c: Matrix, rows: int, columns: int, depth: int, add: bool, small: int) -> None:
    """Write or add c = a·b (rows × columns), each number a sum over `depth`.

    Products of more than `small` multiplications are cut into such, if sums are short enough; none is with 0.
    """
    across, step = rows, columns
    if rows * columns * depth > small >= STEP * STEP * depth and depth <= DEEPEST:
        across = max(STEP, PANEL // depth // STEP * STEP)
        step = min(MOST, small // (across * depth) // STEP * STEP)
    for i in range(0, rows, across):
        for j in range(0, columns, step):
            at = a.numbers[a.start + (i if a.transposed else i * a.apart) :]
            bt = b.numbers[b.start + (j * b.apart if b.transposed else j) :]
            ct = c.numbers[c.start + i * c.apart + j :]
            m, n = min(across, rows - i), min(step, columns - j)
            # BLAS goes by columns: what it sees is the transposed product, of the factors in reverse
            _gemm(b.transposed, a.transposed, n, m, depth, bt, b.apart, at, a.apart, add, ct, c.apart)


def _gemm(
    ta: Any, tb: Any, m: Any, n: Any, k: Any, a: Any, lda: Any, b: Any, ldb: Any, add: Any, c: Any, ldc: Any
) -> None:
    raise NotImplementedError("only compiled functions call it")


def _gemm_of_blas(
    ta: Any, tb: Any, m: Any, n: Any, k: Any, a: Any, lda: Any, b: Any, ldb: Any, add: Any, c: Any, ldc: Any
) -> Any:
    kind, gemm = blas_gemm(a.dtype)
    one, zero = np.ones(1, a.dtype.name), np.zeros(1, a.dtype.name)

    def call(
        ta: Any, tb: Any, m: Any, n: Any, k: Any, a: Any, lda: Any, b: Any, ldb: Any, add: Any, c: Any, ldc: Any
    ) -> None:
        first, second = 84 if ta else 78, 84 if tb else 78  # T, N
        factor = one if add else zero
        gemm(kind, first, second, m, n, k, one.ctypes, a.ctypes, lda, b.ctypes, ldb, factor.ctypes, c.ctypes, ldc)

    return call


overload(_gemm)(_gemm_of_blas)
