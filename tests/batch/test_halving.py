"""Laws of successive halving."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskcnn.batch.halving import EarlyEnd, EpochScore, Halving, early_ends

LENGTH = 9.0


def test_rungs_divide_the_full_length() -> None:
    assert Halving().rungs(27) == (1.0, 3.0, 9.0)
    assert Halving(factor=2, first=2).rungs(10) == (2.5, 5.0)
    assert Halving().rungs(2) == ()


def course(scores: list[float], begun: float) -> list[EpochScore]:
    return [EpochScore(float(i), begun + i, score) for i, score in enumerate(scores, 1)]


courses = st.lists(
    st.tuples(st.lists(st.floats(0, 1), min_size=0, max_size=9), st.floats(0, 30)), min_size=1, max_size=12
)


def ends(drawn: list[tuple[list[float], float]], until: float = 1e9) -> dict[int, EarlyEnd]:
    runs = {i: [look for look in course(*own) if look.at <= until] for i, own in enumerate(drawn)}
    return early_ends(runs, dict.fromkeys(runs, LENGTH))


def test_of_runs_that_reach_a_rung_one_after_the_other_the_best_third_go_on() -> None:
    best_first = ends([(([(9 - i) / 9] * 9), i / 100) for i in range(9)])
    assert {*range(9)} - best_first.keys() == {0, 1}  # the second came when there were too few to compare
    best_last = ends([([i / 9] * 9, i / 100) for i in range(9)])
    assert not best_last  # each was the best so far
    assert str(best_first[8]) == "ended at epoch 1 by --stop asha: place 9 of 9"


@settings(max_examples=60)
@given(courses)
def test_the_best_at_its_arrival_is_never_ended(drawn: list[tuple[list[float], float]]) -> None:
    found = ends(drawn)
    assert all(end.rung in Halving().rungs(LENGTH) for end in found.values())
    assert all(end.place > 1 and end.of >= 3 for end in found.values())


@settings(max_examples=60)
@given(courses, st.floats(0, 40))
def test_what_comes_later_changes_nothing(drawn: list[tuple[list[float], float]], now: float) -> None:
    assert ends(drawn, now).items() <= ends(drawn).items()


@pytest.mark.parametrize("runs", [1, 2])
def test_too_few_to_compare_go_on(runs: int) -> None:
    assert not ends([([0.1 * i] * 9, 0.0) for i in range(runs)])


def test_runs_of_other_lengths_are_compared_among_themselves() -> None:
    runs = {i: course([0.1 * i] * 9, 0.1 * i) for i in range(4)}
    assert not early_ends(runs, {0: 9.0, 1: 9.0, 2: 18.0, 3: 18.0})
