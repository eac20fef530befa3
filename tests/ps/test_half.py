"""Casts between float32 and float16 give NumPy's own numbers, whatever the bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from daskcnn.ps.vectors import cast


def assert_as_numpy(vector: np.ndarray, dtype: str) -> None:
    with np.errstate(all="ignore"):
        expected = vector.astype(dtype)
    found = cast(vector, dtype)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))


@given(bits=arrays(np.uint32, st.integers(0, 300), elements=st.integers(0, 2**32 - 1)))
def test_any_float32_becomes_the_nearest_float16(bits: np.ndarray) -> None:
    assert_as_numpy(bits.view(np.float32), "float16")


@given(exponent=st.integers(-30, 18), seed=st.integers(0, 2**32 - 1))
def test_numbers_of_any_size_are_rounded_to_even(exponent: int, seed: int) -> None:
    """Also those half way between two float16: a few bits behind the last place that counts."""
    rng = np.random.default_rng(seed)
    whole = rng.integers(-(2**13), 2**13, 500) * 2.0 ** (exponent - 12)
    assert_as_numpy(whole.astype(np.float32), "float16")


def test_every_float16_becomes_its_float32() -> None:
    assert_as_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.float16), "float32")


@pytest.mark.parametrize("size", [0, 1, (1 << 15) - 1, 1 << 15, (1 << 15) + 1, 100_000])
def test_blocks_are_put_together(size: int) -> None:
    vector = np.linspace(-3, 3, size, dtype=np.float32)
    assert_as_numpy(vector, "float16")
    assert_as_numpy(cast(vector, "float16"), "float32")


def test_one_infinite_number_leaves_its_block_as_numpy_has_it() -> None:
    vector = np.full(1000, 1e-6, np.float32)
    vector[[3, 500, 999]] = np.inf, np.nan, -1e6
    assert_as_numpy(vector, "float16")


@pytest.mark.parametrize("dtypes", [("float64", "float16"), ("float16", "float64"), ("float32", "float64")], ids=str)
def test_other_casts_are_numpy_s(dtypes: tuple[str, str]) -> None:
    with np.errstate(over="ignore"):
        vector = np.linspace(-70_000, 70_000, 1001).astype(dtypes[0])
    assert_as_numpy(vector, dtypes[1])


def test_strided_views_are_cast_too() -> None:
    assert_as_numpy(np.linspace(0, 1, 100, dtype=np.float32)[::3], "float16")


def test_the_same_dtype_is_not_copied() -> None:
    vector = np.ones(3, np.float32)
    assert cast(vector, "float32") is vector
