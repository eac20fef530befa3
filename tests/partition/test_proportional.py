"""Whole numbers in proportion."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskcnn.partition import kernel_shards, proportional
from daskcnn.partition.proportions import level

weights = st.lists(st.floats(0, 1e6), min_size=1, max_size=20).filter(lambda w: max(w) > 0)


def test_the_paper_s_speeds() -> None:
    assert kernel_shards(75, [10, 15, 20, 30]) == [30, 20, 15, 10]
    assert kernel_shards(500, [10, 15, 20, 30]) == [200, 133, 100, 67]
    assert kernel_shards(300, [10, 20]) == [200, 100]


def test_a_slow_worker_may_get_no_kernel() -> None:
    assert kernel_shards(4, [1, 100]) == [4, 0]


def test_ties_go_to_the_earlier() -> None:
    assert proportional(5, [1, 1, 1]) == [2, 2, 1]


@given(st.integers(0, 10**7), weights)
def test_proportional_adds_up_and_is_within_one(total: int, w: list[float]) -> None:
    parts = proportional(total, w)
    assert sum(parts) == total
    for part, each in zip(parts, w, strict=True):
        assert abs(part - total * (each / sum(w))) < 1 + 1e-6


@pytest.mark.parametrize("seconds", [[], [0.0], [-1.0, 2.0], [float("nan")], [float("inf"), 1.0]])
def test_times_that_are_none_are_refused(seconds: list[float]) -> None:
    with pytest.raises(ValueError, match="seconds="):
        kernel_shards(10, seconds)


@pytest.mark.parametrize("w", [[], [0.0, 0.0], [-1.0, 2.0], [float("nan")]])
def test_weights_that_are_none_are_refused(w: list[float]) -> None:
    with pytest.raises(ValueError, match="weights="):
        proportional(10, w)


def test_a_negative_total_is_refused() -> None:
    with pytest.raises(ValueError, match="total=-1"):
        proportional(-1, [1.0])


@st.composite
def bounded(draw: st.DrawFn) -> tuple[int, list[float], list[int], list[int]]:
    size = draw(st.integers(1, 12))
    numbers = st.lists(st.integers(0, 1000), min_size=size, max_size=size)
    low, extra = draw(numbers), draw(numbers)
    high = [a + b for a, b in zip(low, extra, strict=True)]
    total = draw(st.integers(sum(low), sum(high)))
    return total, draw(st.lists(st.floats(1e-6, 1), min_size=size, max_size=size)), low, high


@given(bounded())
def test_level_keeps_its_bounds_and_adds_up(case: tuple[int, list[float], list[int], list[int]]) -> None:
    total, w, low, high = case
    sizes = level(total, w, low, high)
    assert sum(sizes) == total
    assert all(a <= s <= b for a, s, b in zip(low, sizes, high, strict=True))


@given(bounded())
def test_level_is_proportional_between_the_bounds(case: tuple[int, list[float], list[int], list[int]]) -> None:
    """Nobody could pass a sample to somebody who has less for their weight, but for rounding."""
    total, w, low, high = case
    sizes = level(total, w, low, high)
    gives = [(s - 1) / each for s, each, a in zip(sizes, w, low, strict=True) if s > a]
    takes = [(s + 1) / each for s, each, b in zip(sizes, w, high, strict=True) if s < b]
    if gives and takes:
        assert max(gives) <= min(takes) * (1 + 1e-9) + 1e-9
