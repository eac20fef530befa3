"""Products of matrices that are parts of larger arrays, by the BLAS that `numpy.dot` calls in loops.

`numpy.dot` takes contiguous matrices only. Here a matrix is a place in a row of numbers, and the distance of its rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from daskcnn.compiled.loop import blas_gemm, inner, overload

SMALL = 1_000_000
"""Multiplications of a product that OpenBLAS does without copying its factors: faster, as long as they are in cache."""
ROWS, STEP = 128, 16
"""Rows of such a product, and what its columns are a multiple of."""


class Matrix(NamedTuple):
    """A matrix in an array of one axis: where it begins, the distance of its rows, and whether it is transposed."""

    numbers: Any
    start: int
    apart: int
    transposed: bool


@inner
def multiply(a: Matrix, b: Matrix, c: Matrix, rows: int, columns: int, depth: int, factors: Any) -> None:
    """Write c = a·b (rows × columns), each number a sum over `depth`; factors (2,) are 1 and 0.

    Large products are cut into small ones.
    """
    across = min(rows, ROWS)
    step = SMALL // (across * depth) // STEP * STEP
    if step == 0:
        across, step = rows, columns
    for i in range(0, rows, across):
        for j in range(0, columns, step):
            at = a.start + (i if a.transposed else i * a.apart)
            bt = b.start + (j * b.apart if b.transposed else j)
            ct = c.start + i * c.apart + j
            m, n = min(across, rows - i), min(step, columns - j)
            # BLAS goes by columns: what it sees is the transposed product, of the factors in reverse
            _gemm(
                b.transposed,
                a.transposed,
                n,
                m,
                depth,
                b.numbers[bt:],
                b.apart,
                a.numbers[at:],
                a.apart,
                c.numbers[ct:],
                c.apart,
                factors,
            )


def _gemm(
    ta: Any, tb: Any, m: Any, n: Any, k: Any, a: Any, lda: Any, b: Any, ldb: Any, c: Any, ldc: Any, factors: Any
) -> None:
    raise NotImplementedError("only compiled functions call it")


@overload(_gemm)  # type: ignore[untyped-decorator] # of Numba
def _gemm_of_blas(
    ta: Any, tb: Any, m: Any, n: Any, k: Any, a: Any, lda: Any, b: Any, ldb: Any, c: Any, ldc: Any, factors: Any
) -> Any:
    kind, gemm = blas_gemm(a.dtype)

    def call(
        ta: Any, tb: Any, m: Any, n: Any, k: Any, a: Any, lda: Any, b: Any, ldb: Any, c: Any, ldc: Any, factors: Any
    ) -> None:
        first, second = 84 if ta else 78, 84 if tb else 78  # T, N
        one, zero = factors[:1].ctypes, factors[1:].ctypes
        gemm(kind, first, second, m, n, k, one, a.ctypes, lda, b.ctypes, ldb, zero, c.ctypes, ldc)

    return call
