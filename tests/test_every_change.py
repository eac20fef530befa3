"""The cases of tests that are run at every change."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

from tests.conftest import SHARE, but_a_share


def cases(**sizes: int) -> list[Any]:
    """Cases of a function, with parameters of these numbers of values."""
    each = product(*(range(size) for size in sizes.values()))
    named = [dict(zip(sizes, values, strict=True)) for values in each]
    return [SimpleNamespace(nodeid=f"a.py::test[{i}]", callspec=SimpleNamespace(indices=i)) for i in named]


def test_most_cases_are_left_out_and_the_same_at_each_change() -> None:
    of = cases(device=2, seed=200)
    left_out = [*but_a_share(of)]
    assert 0.6 < len(left_out) / len(of) < 1 - 0.5 / SHARE
    assert [*but_a_share(of)] == left_out


def test_each_value_that_several_cases_have_has_one_that_stays() -> None:
    of = cases(rule=9, device=5, dtype=2)
    left_out = [id(case) for case in but_a_share(of)]
    stay = [case.callspec.indices for case in of if id(case) not in left_out]
    assert len(stay) < len(of) / 2
    assert {each["rule"] for each in stay} == set(range(9))
    assert ({each["device"] for each in stay}, {each["dtype"] for each in stay}) == (set(range(5)), {0, 1})
