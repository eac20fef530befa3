"""Groups of workers of about the same speed: laws, and an oracle that looks at all ways."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskcnn.partition import proportions
from daskcnn.partition.proportions import Formed, form_groups, speeds, unevenness

times = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=24)


def named(seconds: Sequence[float]) -> dict[str, float]:
    return {f"cpu-{i}": each for i, each in enumerate(seconds)}


def totals(formed: Formed | Sequence[Sequence[str]], seconds: Mapping[str, float]) -> list[float]:
    """Speeds of the groups."""
    found = formed.groups if isinstance(formed, Formed) else formed
    return [sum(1 / seconds[name] for name in group) for group in found]


def every_way(names: Sequence[str], size: int) -> Iterator[list[tuple[str, ...]]]:
    """All of them, and most of them many times."""
    for order in permutations(names):
        yield [order[i : i + size] for i in range(0, len(order), size)]


def plain_greedy(seconds: Mapping[str, float], size: int) -> list[list[str]]:
    """The fastest first, each to the slowest group that has room."""
    speed = dict(zip(seconds, speeds(list(seconds.values())), strict=True))
    chosen = sorted(speed, key=lambda name: -speed[name])[: len(seconds) // size * size]
    found: list[list[str]] = [[] for _ in range(len(seconds) // size)]
    for name in chosen:
        room = [group for group in found if len(group) < size]
        min(room, key=lambda group: math.fsum(speed[member] for member in group)).append(name)
    return found


def test_fast_workers_go_with_slow_ones() -> None:
    formed = form_groups({"a": 1.0, "b": 1.0, "c": 3.0, "d": 3.0}, 2)
    assert formed == Formed((("a", "c"), ("b", "d")), ())


def test_the_slowest_are_left_out_where_they_are_too_many() -> None:
    formed = form_groups({"a": 5.0, "b": 1.0, "c": 2.0, "d": 9.0, "e": 2.0}, 3)
    assert formed == Formed((("b", "c", "e"),), ("a", "d"))


def test_of_equally_slow_ones_the_later_are_left_out() -> None:
    assert form_groups(dict.fromkeys("abcde", 1.0), 2).left_out == ("e",)


def test_six_workers_are_grouped_better_than_greedily() -> None:
    speed = {"a": 8.0, "b": 7.0, "c": 6.0, "d": 5.0, "e": 4.0, "f": 2.0}
    seconds = {name: 1 / each for name, each in speed.items()}
    assert sorted(totals(form_groups(seconds, 3), seconds)) == pytest.approx([16, 16])
    assert sorted(totals(plain_greedy(seconds, 3), seconds)) != pytest.approx([16, 16])


@given(times, st.integers(1, 6))
def test_groups_are_of_that_size_and_nobody_is_in_two(seconds: list[float], size: int) -> None:
    size = min(size, len(seconds))
    formed = form_groups(named(seconds), size)
    assert len(formed.groups) == len(seconds) // size
    assert all(len(group) == size for group in formed.groups)
    counted = Counter([*(name for group in formed.groups for name in group), *formed.left_out])
    assert counted == Counter(list(named(seconds)))
    inside = [named(seconds)[name] for group in formed.groups for name in group]
    assert all(named(seconds)[name] >= max(inside) for name in formed.left_out)


@given(times, st.integers(1, 6), st.floats(0.01, 100))
def test_groups_depend_on_nothing_but_relative_speeds(seconds: list[float], size: int, factor: float) -> None:
    size = min(size, len(seconds))
    formed = form_groups(named(seconds), size)
    assert formed == form_groups(named(seconds), size)
    again = named([each * factor for each in seconds])
    assert unevenness(totals(form_groups(again, size), again)) == pytest.approx(
        unevenness(totals(formed, named(seconds))) / factor**2, rel=1e-6
    )


@pytest.mark.parametrize("looked_at", [0, proportions.MOST_LOOKED_AT])
@given(data=st.data())
def test_groups_are_never_less_even_than_greedy_ones(looked_at: int, data: st.DataObject) -> None:
    seconds = data.draw(times)
    size = data.draw(st.integers(1, min(6, len(seconds))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proportions, "MOST_LOOKED_AT", looked_at)
        found = totals(form_groups(named(seconds), size), named(seconds))
    greedy = totals(plain_greedy(named(seconds), size), named(seconds))
    assert unevenness(found) <= unevenness(greedy) * (1 + 1e-9)


@settings(max_examples=30)
@given(st.sampled_from([(4, 2), (6, 2), (6, 3)]), st.data())
def test_no_other_groups_of_few_workers_are_more_even(shape: tuple[int, int], data: st.DataObject) -> None:
    workers, size = shape
    seconds = named(data.draw(st.lists(st.floats(0.1, 10), min_size=workers, max_size=workers)))
    found = unevenness(totals(form_groups(seconds, size), seconds))
    best = min(unevenness(totals(way, seconds)) for way in every_way(list(seconds), size))
    assert found == pytest.approx(best, rel=1e-9)


@given(st.lists(st.floats(0.1, 10), min_size=30, max_size=30))
def test_no_swap_of_two_workers_helps_where_many_are_grouped(seconds: list[float]) -> None:
    own = named(seconds)
    formed = form_groups(own, 5)
    sums = totals(formed, own)
    for a, one in enumerate(formed.groups):
        for b, other in enumerate(formed.groups[:a]):
            for x in one:
                for y in other:
                    moved = 1 / own[x] - 1 / own[y]
                    before, after = sums[a] ** 2 + sums[b] ** 2, (sums[a] - moved) ** 2 + (sums[b] + moved) ** 2
                    assert after >= before * (1 - 1e-9)


@pytest.mark.parametrize("size", [0, -1, 4])
def test_a_size_that_is_none_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"size={size}"):
        form_groups(named([1.0, 2.0, 3.0]), size)


def test_times_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="seconds="):
        form_groups(named([1.0, 0.0]), 2)
