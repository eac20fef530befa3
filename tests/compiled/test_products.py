"""Products of parts of arrays: right for every cut, and for BLAS of one thread."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import njit
from threadpoolctl import threadpool_info, threadpool_limits

from daskcnn.arrays import single_threaded_blas
from daskcnn.compiled import products
from daskcnn.compiled.products import PANEL, SMALL, Matrix, multiply
from daskcnn.pool import Pool
from tests.rounding import assert_rounds, limits, of_sum

START, GAP = 5, 3
"""Where a matrix begins in its array, and the numbers between its rows."""


def _product(
    a: Any, ta: bool, b: Any, tb: bool, c: Any, rows: int, columns: int, depth: int, add: bool, small: int
) -> None:
    left = Matrix(a, START, (rows if ta else depth) + GAP, ta)
    right = Matrix(b, START, (depth if tb else columns) + GAP, tb)
    multiply(left, right, Matrix(c, START, columns + GAP, False), rows, columns, depth, add, small)


product = njit(_product)


def within(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An array with the matrix inside, and the view of it there."""
    rows, columns = matrix.shape
    numbers = np.full(START + rows * (columns + GAP), np.nan, matrix.dtype)
    view = numbers[START:].reshape(rows, -1)[:, :columns]
    view[...] = matrix
    return numbers, view


SHAPES = [(1, 1, 1), (3, 5, 2), (64, 500, 50), (512, 32, 801), (40, 70, 2 * PANEL), (17, 33, SMALL // 100)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("small", [SMALL, 0])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_of_parts_is_that_of_numpy(shape: Any, small: int, transposed: tuple[bool, bool], dtype: str) -> None:
    rows, columns, depth = shape
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(s).astype(dtype) for s in ((rows, depth), (depth, columns), (rows, columns)))
    left, _ = within(a.T if transposed[0] else a)
    right, _ = within(b.T if transposed[1] else b)
    numbers, found = within(c)
    # four times the variance: in float64 NumPy's product rounds as well
    exact, allowed = a.astype("float64") @ b, limits(4 * of_sum(depth), rows * columns, dtype)
    product(left, transposed[0], right, transposed[1], numbers, rows, columns, depth, True, small)
    assert_rounds(found, c + exact, allowed, "added")
    product(left, transposed[0], right, transposed[1], numbers, rows, columns, depth, False, small)
    assert_rounds(found, exact, allowed, "alone")
    found[...] = 0
    assert np.count_nonzero(np.isnan(numbers)) == START + rows * GAP, "nothing but the product was written"


def test_blas_of_scipy_has_one_thread_where_that_of_numpy_has() -> None:
    with threadpool_limits(2, "blas"), single_threaded_blas():
        found = {Path(i["filepath"]).name: i["num_threads"] for i in threadpool_info() if i["user_api"] == "blas"}
    assert any("scipy" in name for name in found), "loops multiply with SciPy's BLAS"
    assert set(found.values()) == {1}


def test_buffers_are_written_once_for_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []
    monkeypatch.setattr(products, "_touched", 0)
    monkeypatch.setattr("scipy.linalg.blas.sgemm", lambda alpha, a, b: made.append((*a.shape, b.shape[1])))
    touched = []
    for threads in (1, 1, 3, 2):
        with closing(Pool(threads)) as pool:
            products.touch_buffers(threads, pool.map)
        touched.append(len(made))
    assert touched == [2, 2, 8, 8]
    assert set(made) == {products.WARM_UP}
