"""The server's compiled merges and casts against NumPy's expressions: the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskcnn.compiled import updates
from daskcnn.compiled.given import addresses, readable
from daskcnn.compiled.loop import LOOPS
from daskcnn.compiled.warm import warm_module
from daskcnn.ps.vectors import adagrad, add_scaled, cast, elastic, weighted_sum

SIZES = [0, 1, updates.BLOCK, 2 * updates.BLOCK + 7]
both = pytest.mark.parametrize("dtype", ["float32", "float64"])
sizes = pytest.mark.parametrize("size", SIZES)


def vectors(rng: np.random.Generator, count: int, size: int, dtype: str) -> list[Any]:
    """Read-only, as they come from other processes; the loops are given views that hide it."""
    made = [rng.standard_normal(size).astype(dtype) for _ in range(count)]
    for vector in made:
        vector.flags.writeable = False
    return made


@both
@sizes
def test_add_scaled_is_the_expression(rng: np.random.Generator, size: int, dtype: str) -> None:
    center, delta = vectors(rng, 2, size, dtype)
    result, factor = np.empty_like(center), center.dtype.type(0.3)
    assert updates.add_scaled(readable(center), factor, readable(delta), result)
    np.testing.assert_array_equal(result, delta * factor + center)


@both
@sizes
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_weighted_sum_is_added_up_in_float64(rng: np.random.Generator, size: int, dtype: str, count: int) -> None:
    given, weights = vectors(rng, count, size, dtype), rng.random(count)
    expected = given[0].astype("float64") * weights[0]
    for vector, weight in zip(given[1:], weights[1:], strict=True):
        expected += vector.astype("float64") * weight
    result = np.empty(size, dtype)
    assert updates.weighted_sum(addresses(given), weights, np.empty(updates.BLOCK), result)
    np.testing.assert_array_equal(result, expected.astype(dtype))


@both
@sizes
def test_the_elastic_force_is_the_expression(rng: np.random.Generator, size: int, dtype: str) -> None:
    center, other = vectors(rng, 2, size, dtype)
    difference, result, alpha = np.empty_like(center), np.empty_like(center), center.dtype.type(0.3)
    assert updates.elastic(readable(center), readable(other), alpha, difference, result)
    np.testing.assert_array_equal(difference, (other - center) * alpha)
    np.testing.assert_array_equal(result, center + difference)


@both
@sizes
def test_adagrad_is_the_expression(rng: np.random.Generator, size: int, dtype: str) -> None:
    center, root, delta = vectors(rng, 3, size, dtype)
    squares, lr, least = np.square(root), center.dtype.type(0.1), center.dtype.type(1e-8)
    new, result = np.empty_like(center), np.empty_like(center)
    assert updates.adagrad(readable(center), squares, readable(delta), lr, least, new, result)
    np.testing.assert_array_equal(new, delta * delta + squares)
    np.testing.assert_array_equal(result, delta / (np.sqrt(new) + least) * lr + center)


@both
@pytest.mark.parametrize("at", [0, 1000, updates.BLOCK + 3])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_result_that_is_not_finite_is_told(dtype: str, at: int, bad: float) -> None:
    center, zero, result, other = np.zeros((4, 2 * updates.BLOCK), dtype)
    center[at], one = bad, center.dtype.type(1)
    assert not updates.add_scaled(center, one, zero, result)
    assert not updates.weighted_sum(addresses([zero, center]), np.ones(2), np.empty(updates.BLOCK), result)
    assert not updates.elastic(center, zero, one, other, result)
    assert not updates.adagrad(center, zero, zero, one, one, other, result)


def test_squares_that_overflow_are_told_though_the_center_is_finite() -> None:
    zero, result, squares = np.zeros((3, 10), np.float32)
    one: Any = np.float32(1)
    assert not updates.adagrad(zero, zero, np.full(10, 1e30, np.float32), one, one, squares, result)
    assert np.isfinite(result).all()


def test_every_float16_is_the_float32_that_numpy_has() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    found = np.empty(len(halves), np.uint32)
    updates.from_half(halves, found)
    np.testing.assert_array_equal(found, halves.view(np.float16).astype(np.float32).view(np.uint32))


def test_a_float32_near_every_float16_is_rounded_as_numpy_does() -> None:
    """Each float16, half way to the next one, and their neighbours."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    exact = halves[np.isfinite(halves)].astype(np.float32)
    between = (exact.view(np.uint32) + np.uint32(1 << 12)).view(np.float32)
    near = np.concatenate([np.nextafter(v, np.float32(to)) for v in (exact, between) for to in (-1e9, 1e9)])
    values = np.concatenate([exact, between, near, np.array([65519.9, 65520, 1e30, np.inf, -np.inf], np.float32)])
    found = np.empty(len(values), np.uint16)
    updates.to_half(values.view(np.uint32), found)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found, values.astype(np.float16).view(np.uint16))


def test_nan_stays_nan() -> None:
    found = np.empty(2, np.uint16)
    updates.to_half(np.array([np.nan, -np.nan], np.float32).view(np.uint32), found)
    assert np.isnan(found.view(np.float16)).all()


def test_arrays_in_any_state_can_be_read() -> None:
    read_only = np.frombuffer(b"\0" * 17, np.float32, 4)
    shifted = np.frombuffer(b"\0" * 17, np.float32, 4, offset=1)
    for given in (read_only, shifted, np.zeros(9, np.float32)[::2]):
        found = readable(given)
        assert (found.flags.c_contiguous, found.flags.aligned, found.flags.writeable) == (True, True, True)
        np.testing.assert_array_equal(found, given)
    assert readable(read_only).__array_interface__["data"][0] == read_only.__array_interface__["data"][0]


@both
def test_what_the_server_loads_ahead_is_what_it_calls(rng: np.random.Generator, dtype: str) -> None:
    """With vectors as they come from other processes: nothing is compiled when the first push comes."""
    warm_module("updates", dtype)
    loops = [loop.function for loop in LOOPS if loop.name.startswith("updates.")]
    known = [len(function.signatures) for function in loops]
    a, b, c = vectors(rng, 3, 10, dtype)
    add_scaled(a, 0.5, b)
    weighted_sum([a, b, c], [0.5, 0.3, 0.2])
    elastic(a, b, 0.5)
    adagrad(a, abs(b), c, 0.1, least=1e-8)
    cast(cast(a.astype("float32"), "float16"), "float32")
    assert [len(function.signatures) for function in loops] == known
