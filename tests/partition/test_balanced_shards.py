"""Shares by what work and transfers take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskcnn.partition import kernel_shards
from daskcnn.partition.proportions import balanced_shards, longest_share

Case = tuple[int, list[float], list[float]]


@st.composite
def cases(draw: st.DrawFn, kernels: int = 300, workers: int = 8) -> Case:
    """Kernels, seconds of each worker for all of them, fixed seconds; equal ones and none at all are common."""
    size = draw(st.integers(1, workers))
    seconds = st.one_of(st.sampled_from([1.0, 2.0, 3.0]), st.floats(1e-4, 1e3))
    fixed = st.one_of(st.just(0.0), st.sampled_from([0.5, 1.0]), st.floats(0, 1e3))
    return (
        draw(st.integers(1, kernels)),
        draw(st.lists(seconds, min_size=size, max_size=size)),
        draw(st.lists(fixed, min_size=size, max_size=size)),
    )


def every_cut(num_kernels: int, workers: int) -> Iterator[list[int]]:
    """All ways of giving so many kernels to so many workers."""
    if workers == 1:
        yield [num_kernels]
        return
    for first in range(num_kernels + 1):
        for rest in every_cut(num_kernels - first, workers - 1):
            yield [first, *rest]


def without(values: Sequence[float], i: int) -> list[float]:
    return [*values[:i], *values[i + 1 :]]


@given(cases())
def test_shares_add_up_and_nobody_gets_less_than_nothing(case: Case) -> None:
    num_kernels, seconds, fixed = case
    shares = balanced_shards(num_kernels, seconds, fixed)
    assert len(shares) == len(seconds)
    assert sum(shares) == num_kernels
    assert min(shares) >= 0


@given(cases(kernels=9, workers=4))
def test_no_cut_is_done_earlier(case: Case) -> None:
    num_kernels, seconds, fixed = case
    taken = longest_share(balanced_shards(num_kernels, seconds, fixed), seconds, fixed)
    assert taken == min(longest_share(cut, seconds, fixed) for cut in every_cut(num_kernels, len(seconds)))


@given(cases())
def test_never_later_than_the_paper_s_shares(case: Case) -> None:
    num_kernels, seconds, fixed = case
    taken = longest_share(balanced_shards(num_kernels, seconds, fixed), seconds, fixed)
    assert taken <= longest_share(kernel_shards(num_kernels, seconds), seconds, fixed)


@given(cases(workers=5))
def test_never_later_than_without_any_one_of_the_workers(case: Case) -> None:
    num_kernels, seconds, fixed = case
    taken = longest_share(balanced_shards(num_kernels, seconds, fixed), seconds, fixed)
    for i in range(len(seconds) if len(seconds) > 1 else 0):
        others, theirs = without(seconds, i), without(fixed, i)
        assert taken <= longest_share(balanced_shards(num_kernels, others, theirs), others, theirs)


@given(cases())
def test_where_nothing_is_fixed_only_whole_kernels_keep_from_the_paper_s_shares(case: Case) -> None:
    """Eq. 1 exactly, or a cut that rounds its quotas in such a way that the slowest is done earlier."""
    num_kernels, seconds, _ = case
    fixed = [0.0] * len(seconds)
    shares, paper = balanced_shards(num_kernels, seconds, fixed), kernel_shards(num_kernels, seconds)
    assert shares == paper or longest_share(shares, seconds, fixed) < longest_share(paper, seconds, fixed)
    ideal = 1 / sum(1 / each for each in seconds)
    assert ideal * (1 - 1e-9) <= longest_share(shares, seconds, fixed) <= ideal + max(seconds) / num_kernels


def test_the_paper_s_speeds_without_transfers() -> None:
    assert balanced_shards(75, [10, 15, 20, 30], [0, 0, 0, 0]) == [30, 20, 15, 10]
    assert balanced_shards(500, [10, 15, 20, 30], [0, 0, 0, 0]) == [200, 133, 100, 67]
    assert balanced_shards(40, [1, 3], [0, 0]) == [30, 10]


def test_a_share_that_is_not_worth_its_fixed_seconds_is_none() -> None:
    assert balanced_shards(100, [1.0, 1.0], [0.0, 0.98]) == [99, 1]
    assert balanced_shards(100, [1.0, 1.0], [0.0, 1.0]) == [100, 0]


def test_fixed_seconds_are_made_up_for_by_fewer_kernels() -> None:
    assert balanced_shards(100, [1.0, 1.0], [0.0, 0.2]) == [60, 40]


@pytest.mark.parametrize("fixed", [[], [0.0], [0.0, -1.0], [0.0, float("nan")], [float("inf"), 0.0]])
def test_fixed_seconds_that_are_none_are_refused(fixed: list[float]) -> None:
    with pytest.raises(ValueError, match="fixed="):
        balanced_shards(10, [1.0, 1.0], fixed)
