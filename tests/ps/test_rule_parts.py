"""What the rules are made of: sums of long vectors, and what the server counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskcnn.ps.vectors import adagrad, add_scaled, all_finite, elastic, weighted_sum
from daskcnn.ps.versions import Bases, Clocks


def test_sums_of_vectors_longer_than_a_block() -> None:
    a, b = np.random.default_rng(0).standard_normal((2, 100_003)).astype("float32")
    exact = 0.3 * a.astype("float64") + 0.7 * b.astype("float64")
    found, finite = weighted_sum([a, b], [0.3, 0.7])
    np.testing.assert_array_equal(found, exact.astype("float32"))
    assert finite
    found, finite = add_scaled(a, 0.7, b)
    np.testing.assert_array_equal(found, a + np.float32(0.7) * b)
    assert finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_value_is_found(bad: float) -> None:
    vector = np.zeros(70_000, "float32")
    assert all_finite(vector)
    vector[-1] = bad
    assert not all_finite(vector)


def test_large_values_are_finite_though_their_sum_is_not() -> None:
    assert all_finite(np.full(4, np.finfo("float32").max, "float32"))


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 9) | st.none()), max_size=40))
def test_bases_are_a_dictionary_whose_values_are_counted(changes: list[tuple[str, int | None]]) -> None:
    bases, expected = Bases(), dict[str, int]()
    for worker, version in changes:
        if version is not None:
            bases.set(worker, version)
            expected[worker] = version
        elif worker in expected:
            bases.remove(worker)
            del expected[worker]
        assert bases.as_dict() == expected
        assert len(bases) == len(expected)
        for each in expected:
            versions, counts = bases.others(each)
            others = sorted(v for w, v in expected.items() if w != each)
            assert sorted(np.repeat(versions, counts.astype(int))) == others
            assert len(versions) == len(set(expected.values()))


def test_bases_hold_thousands() -> None:
    bases = Bases()
    for i in range(1000):
        bases.set(f"w{i}", i // 2)
    versions, counts = bases.others("w7")
    assert len(versions) == 500
    assert versions @ counts == sum(i // 2 for i in range(1000)) - 3


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.booleans()), max_size=60))
def test_clocks_are_counts_whose_least_is_known(changes: list[tuple[str, bool]]) -> None:
    clocks, expected = Clocks(), dict[str, int]()
    for worker, stays in changes:
        if worker not in expected:
            clocks.join(worker)
            expected[worker] = min(expected.values(), default=0)
        elif stays:
            clocks.tick(worker)
            expected[worker] += 1
        else:
            clocks.remove(worker)
            del expected[worker]
        assert clocks.as_dict() == expected
        assert clocks.lowest == min(expected.values(), default=0)
        assert all(clocks.of(each) == count for each, count in expected.items())


@pytest.mark.parametrize("other", [np.ones(3, "float32"), np.ones(4, "float64")])
def test_vectors_that_differ_never_reach_a_loop(other: np.ndarray) -> None:
    """A loop looks at no bounds: it would read what lies behind the shorter one."""
    center = np.ones(4, "float32")
    for merge in (
        lambda: weighted_sum([center, other], [0.5, 0.5]),
        lambda: weighted_sum([center], [0.5, 0.5]),
        lambda: add_scaled(center, 1.0, other),
        lambda: elastic(center, other, 0.5),
        lambda: adagrad(center, center, other, 0.1, least=1e-6),
    ):
        with pytest.raises(AssertionError):
            merge()
