"""How long work takes a worker whose speed varies, and bytes on links that are shared."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from daskcnn.sim.host import Agenda
from daskcnn.sim.speeds import Line, Link, Pace, Speed

SPEEDS: list[dict[str, Any]] = [
    {"kind": "constant"},
    {"kind": "drift", "to": 0.5, "seconds": 20.0},
    {"kind": "drift", "to": 3.0, "seconds": 20.0},
    {"kind": "drift", "to": 1.0, "seconds": 20.0},
    {"kind": "drift", "to": 0.5, "seconds": 5.0, "after": 10.0},
    {"kind": "walk", "every": 3.0, "spread": 0.5, "lowest": 0.2, "highest": 2.0},
    {"kind": "stall", "seconds": 2.0, "at": [0.0, 7.0, 8.0, 30.0]},
    {"kind": "stall", "seconds": 2.0, "every": 5.0},
]
# sums of these are exact, so that what ends when a pause begins does so in parts too
works = st.lists(st.integers(0, 640).map(lambda n: n / 64), min_size=1, max_size=8)
kinds = pytest.mark.parametrize("speed", SPEEDS, ids=str)


def pace(speed: dict[str, Any], seed: int = 0) -> Pace:
    made: Any = TypeAdapter(Speed).validate_python(speed)
    result: Pace = made.pace(np.random.default_rng(seed))
    return result


@kinds
@given(works=works)
def test_work_in_parts_takes_as_long_as_in_one(speed: dict[str, Any], works: list[float]) -> None:
    parts, whole, now = pace(speed), pace(speed), 0.0
    for work in works:
        then = parts.end(now, work)
        assert then >= now
        now = then
    assert now == pytest.approx(whole.end(0.0, sum(works)), rel=1e-9, abs=1e-9)


@kinds
@given(idle=st.floats(0, 50), work=st.floats(0.1, 10))
def test_time_passes_for_who_is_idle_too(speed: dict[str, Any], idle: float, work: float) -> None:
    assert idle < pace(speed).end(idle, work) < math.inf


def test_a_pause_stops_work_at_its_moment() -> None:
    stalling = pace({"kind": "stall", "seconds": 2.0, "at": [5.0, 6.0, 20.0]})
    assert stalling.end(0.0, 4.0) == 4.0
    assert stalling.end(4.0, 2.0) == 10.0  # pauses of 2 s from 5 to 7 and, put off, from 7 to 9
    assert stalling.end(10.0, 10.0) == 20.0
    assert stalling.end(20.0, 1.0) == 23.0


def test_random_pauses_take_their_part_of_the_time() -> None:
    stalling = pace({"kind": "stall", "seconds": 1.0, "every": 3.0})
    assert stalling.end(0.0, 30_000.0) == pytest.approx(30_000 * (1 + 1 / 3), rel=0.02)


def test_a_drift_ends_at_its_speed() -> None:
    slowing = pace({"kind": "drift", "to": 0.5, "seconds": 10.0})
    assert slowing.end(0.0, 7.5) == pytest.approx(10.0)  # at 0.75 on average
    assert slowing.end(10.0, 1.0) == pytest.approx(12.0)


def test_a_drift_begins_after_its_time() -> None:
    slowing = pace({"kind": "drift", "to": 0.5, "seconds": 10.0, "after": 4.0})
    assert slowing.end(1.0, 3.0) == 4.0
    assert slowing.end(1.0, 3.0 + 7.5) == pytest.approx(14.0)
    assert slowing.end(14.0, 1.0) == pytest.approx(16.0)


def test_a_walk_stays_within_its_bounds_and_differs_by_seed() -> None:
    walk = {"kind": "walk", "every": 1.0, "spread": 1.0, "lowest": 0.5, "highest": 2.0}
    ends = [pace(walk, seed).end(0.0, 100.0) for seed in range(5)]
    assert len(set(ends)) == 5
    assert all(50 <= end <= 200 for end in ends)


def test_actions_come_in_the_order_of_their_times_and_equal_ones_as_noted() -> None:
    agenda, done = Agenda(), list[tuple[str, float]]()

    def note(name: str) -> None:
        done.append((name, agenda.now))
        if name == "a":
            agenda.at(agenda.now, note, "at once")

    for name, at in (("c", 2.0), ("a", 1.0), ("b", 1.0)):
        agenda.at(at, note, name)
    agenda.run()
    assert done == [("a", 1.0), ("b", 1.0), ("at once", 1.0), ("c", 2.0)]
    with pytest.raises(AssertionError, match="is before now"):
        agenda.at(1.5, note, "late")


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 10_000)), min_size=1, max_size=10))
def test_a_shared_line_carries_no_more_than_its_bandwidth(messages: list[tuple[float, int]]) -> None:
    line, ends, begin = Line(100.0), list[float](), 0.0
    for pause, nbytes in messages:
        begin += pause
        ends.append(line.carry(begin, nbytes))
        assert ends[-1] >= (begin + nbytes / 100) * (1 - 1e-12)
    assert ends == sorted(ends)
    first = messages[0][0]
    assert ends[-1] >= (first + sum(nbytes for _, nbytes in messages) / 100) * (1 - 1e-12)


def test_the_slower_of_two_links_decides() -> None:
    assert Link(100.0, 1.0).arrival(0.0, 200, Line(1000.0)) == 3.0
    assert Link(1000.0, 1.0).arrival(0.0, 200, Line(100.0)) == 3.0
    assert Link().arrival(5.0, 10**12, Line()) == 5.0
