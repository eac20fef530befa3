"""The limits of rounding are those of sums one by one, and what is more than rounding is beyond them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from daskcnn.conv import ConvSpec
from tests.conv.test_conv_laws import DIRECTIONS, arrays, in_double, once
from tests.rounding import Limits, assert_rounds, limits, of_direction, of_pass, of_sum

Numbers = npt.NDArray[np.floating]
SPEC = ConvSpec(N=4, H=12, W=12, C=3, K=16, R=3, S=3, pad=(1, 1))
ALGORITHMS = ("im2col", "direct", "spectral", "winograd-2x3", "winograd-4x3")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def one_by_one(products: Numbers) -> Numbers:
    """Sums along the last axis, from its first to its last number."""
    return np.add.accumulate(products, axis=-1)[..., -1]


@pytest.mark.parametrize("terms", [30, 1000, 4000])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_sums_one_by_one_round_little_less_than_their_limit(terms: int, dtype: str, rng: np.random.Generator) -> None:
    x, w = (rng.standard_normal((500, terms)).astype(dtype) for _ in range(2))
    exact = (x.astype("longdouble") * w).sum(axis=-1)
    allowed = limits(of_sum(terms), 500, dtype)
    found = one_by_one(x * w)
    assert_rounds(found, exact, allowed, dtype)
    error = np.linalg.norm((found - exact).astype("float64")) / np.linalg.norm(exact.astype("float64"))
    assert error > 0.5 * allowed.norm, "a limit that any sum would keep holds nothing"


def test_sums_of_parts_round_less(rng: np.random.Generator) -> None:
    x, w = (rng.standard_normal((500, 16, 640)).astype("float32") for _ in range(2))
    exact, allowed = (x.astype("float64") * w).sum(axis=(1, 2)), limits(of_sum(16 * 640, 640), 500, "float32")
    assert_rounds(one_by_one(one_by_one(x * w)), exact, allowed, "in parts")
    with pytest.raises(AssertionError, match="whole"):
        assert_rounds(one_by_one((x * w).reshape(500, -1)), exact, allowed, "whole")


def _a_tap_in_half(spec: ConvSpec, x: Numbers, w: Numbers, y: Numbers) -> None:
    """The products of one tap and channel go through float16."""
    products = x[:-2, :-2, :, 0, None] * w[0, 0, 0]
    y[1:-1, 1:-1] += products.astype(np.float16).astype(y.dtype) - products


def _one_product_in_half(spec: ConvSpec, x: Numbers, w: Numbers, y: Numbers) -> None:
    product = x[2, 2, 0, 1] * w[0, 0, 1, 3]
    y[3, 3, 0, 3] += y.dtype.type(np.float16(product)) - product


def _a_product_left_out(spec: ConvSpec, x: Numbers, w: Numbers, y: Numbers) -> None:
    y[3, 3, 0, 3] -= x[2, 2, 0, 1] * w[0, 0, 1, 3]


def _short_factors(spec: ConvSpec, x: Numbers, w: Numbers, y: Numbers) -> None:
    """Factors have ten bits after the first, as a GPU's TF32 has."""
    y[...] = once("im2col", spec, [_tf32(x), _tf32(w), y])["forward"]


def _tf32(a: Numbers) -> Numbers:
    return ((a.view(np.uint32) + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)).view(np.float32)


@pytest.mark.parametrize("fault", [_a_tap_in_half, _one_product_in_half, _a_product_left_out, _short_factors])
@pytest.mark.parametrize("algorithm", ["im2col", "spectral", "winograd-2x3"])
def test_what_is_more_than_rounding_is_beyond_the_limits(
    algorithm: str, fault: Callable[[ConvSpec, Numbers, Numbers, Numbers], None]
) -> None:
    x, w, dy = arrays(SPEC)
    found, exact = once(algorithm, SPEC, [x, w, dy])["forward"], in_double(SPEC)["forward"]
    allowed = of_direction(algorithm, SPEC, "forward", compiled=True)
    assert_rounds(found, exact, allowed, algorithm)
    fault(SPEC, x, w, found)
    with pytest.raises(AssertionError, match="is allowed"):
        assert_rounds(found, exact, allowed, algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_pixel_or_a_tap_left_out_is_beyond_the_limits(algorithm: str, direction: str) -> None:
    """A result has 27 to 4,608 products."""
    spec = replace(SPEC, N=32)
    results, exact = once(algorithm, spec, arrays(spec))[direction], in_double(spec)[direction]
    allowed = of_direction(algorithm, spec, direction, compiled=True)
    assert_rounds(results, exact, allowed, algorithm)
    results.flat[results.size // 2] += 1  # products of numbers around 0 have the mean square 1
    with pytest.raises(AssertionError, match="of the largest number"):
        assert_rounds(results, exact, replace(allowed, norm=np.inf), algorithm)


def test_fast_convolutions_are_allowed_what_their_matrices_say() -> None:
    """By hand for F(2×2, 3×3)."""
    assert of_pass("im2col", SPEC, "forward", compiled=True) == of_sum(27) == 15
    # rows of B have the squared norm 2, those of G 1, 3/4, 3/4 and 1; an output of 3 taps is of three points
    transforms = (of_sum(9) + 1) + (of_sum(4) + 1) + (of_sum(9) + 1)
    amplified = (2 * 1 + 2 * 0.75 + 2 * 0.75) / 3
    assert of_pass("winograd-2x3", SPEC, "forward", compiled=True) == pytest.approx(
        (of_sum(3) + transforms) * amplified**2
    )


def test_both_limits_say_by_how_much(rng: np.random.Generator) -> None:
    exact = rng.standard_normal(100)
    with pytest.raises(AssertionError, match=r"law: an error of 0.001 of the norm, 0.0001 is allowed"):
        assert_rounds(exact * 1.001, exact, Limits(1e-4, 1e-2), "law")
    with pytest.raises(AssertionError, match=r"law: 0.001 of the largest number, 0.0001 is allowed"):
        assert_rounds(exact * 1.001, exact, Limits(1e-2, 1e-4), "law")
