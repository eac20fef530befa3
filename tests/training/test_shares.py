"""When kernels move."""

from __future__ import annotations

from typing import Any

import pytest

from daskcnn.events import Spent
from daskcnn.nn import sequential_from_spec
from daskcnn.sharded.balance import ShareSearch
from daskcnn.sharded.cutting import stages_of
from daskcnn.training.coordinator.layer_records import added_up
from daskcnn.training.coordinator.shares import REPORTS, WORTH_ANYWAY, Shares, ShareWatch, Sharing

STAGES = stages_of(
    sequential_from_spec(
        [
            {"layer": "conv", "kernels": 40, "size": 3, "pad": 1},
            {"layer": "maxpool", "size": 2},
            {"layer": "dense", "units": 10},
        ]
    )
)


def watched(a: float = 1.0, b: float = 1.0) -> ShareWatch:
    """20 kernels each, as for equal workers unless told otherwise."""
    balance = ShareSearch(STAGES, (8, 8, 3), "a", {"a": {"conv1": a}, "b": {"conv1": b}})
    return ShareWatch(Shares.of(balance))


def spent(
    worker: str, busy: float, seconds: dict[str, float], samples: dict[str, float], up: int = 0, down: int = 0
) -> Spent:
    return Spent(name=worker, busy=busy, conv_seconds=seconds, conv_samples=samples, bytes_up=up, bytes_down=down)


def report(a: float, b: float, samples: float = 100.0) -> dict[str, Spent]:
    """Seconds a sample of each, in a stage."""
    return {
        w: spent(w, each * samples, {"conv1": each * samples}, {"conv1": samples}) for w, each in (("a", a), ("b", b))
    }


def test_kernels_move_when_a_worker_takes_three_times_as_long() -> None:
    found = watched()
    for _ in range(REPORTS):
        assert found.move() is None
        found.take(report(0.5, 1.5))
    move = found.move()
    assert move is not None
    assert move.balance.kernels() == [{"a": 30, "b": 10}]
    assert (move.now, move.then) == pytest.approx((1.5, 0.75))


def test_what_saves_less_than_a_tenth_moves_nothing() -> None:
    found = watched()
    for _ in range(REPORTS):
        found.take(report(0.5, 0.55))
    assert found.move() is None


def test_it_does_where_all_is_placed_anew_anyway() -> None:
    found = watched()
    for _ in range(REPORTS):
        found.take(report(0.5, 0.55))
    move = found.move(WORTH_ANYWAY)
    assert move is not None
    assert move.balance.kernels() == [{"a": 21, "b": 19}]


def test_one_slow_report_among_others_moves_nothing() -> None:
    found = watched()
    for b in (0.5, 5.0, 0.5):
        found.take(report(0.5, b))
    assert found.move() is None
    found.take(report(0.5, 5.0))
    assert found.move() is not None


def test_shares_that_measure_as_they_were_made_for_stay() -> None:
    found = watched(1.0, 3.0)
    for _ in range(REPORTS):
        found.take(report(0.75, 0.75))  # 30 of 40 kernels, 10 of 40
    assert found.move() is None


def test_reports_of_a_moment_without_steps_say_nothing() -> None:
    found = watched()
    for _ in range(REPORTS + 1):
        found.take(report(0.5, 1.5))
        found.take({"a": Spent(name="a"), "b": Spent(name="b")})
    assert found.move() is not None


def test_a_worker_that_has_become_slower_is_slower_where_it_has_no_kernels_too() -> None:
    spec: list[dict[str, Any]] = [
        {"layer": "conv", "kernels": 4, "size": 3},
        {"layer": "conv", "kernels": 4, "size": 3},
        {"layer": "flatten"},
    ]
    compute = {w: {"conv1": 1.0, "conv2": 2.0} for w in "ab"}
    balance = ShareSearch(stages_of(sequential_from_spec(spec)), (8, 8, 3), "a", compute)
    found = ShareWatch(Shares(balance, [{"a": 2, "b": 2}, {"a": 4}]))
    found.take(
        {
            "a": spent("a", 0.0, {"conv1": 0.5, "conv2": 2.0}, {"conv1": 1, "conv2": 1}),
            "b": spent("b", 0.0, {"conv1": 3.0}, {"conv1": 1}),
        }
    )
    assert found.measured().compute == {"a": {"conv1": 1.0, "conv2": 2.0}, "b": {"conv1": 6.0, "conv2": 12.0}}


@pytest.mark.parametrize(
    ("seconds", "home"),
    [
        ({"a": 1.0, "b": 0.95}, "a"),
        ({"a": 1.0, "b": 0.8}, "b"),
        ({"b": 1.0, "c": 0.95}, "c"),
    ],
)
def test_home_stays_where_another_worker_is_hardly_faster(seconds: dict[str, float], home: str) -> None:
    sharing = Sharing(between=1)
    assert sharing.home({"a": 1.0, "b": 1.1}) == "a"
    sharing.make(ShareSearch(STAGES, (8, 8, 3), "a", {"a": {"conv1": 1.0}, "b": {"conv1": 1.1}}), 0, 1)
    assert sharing.home(seconds) == home


def test_counters_of_two_times_add_up() -> None:
    some = spent("a", 1.0, {"conv1": 1.0}, {"conv1": 8}, 10, 20)
    more = spent("a", 2.0, {"conv2": 5.0}, {"conv2": 8}, 1, 2)
    assert added_up(None, some) == some
    assert added_up(some, more) == spent("a", 3.0, {"conv1": 1.0, "conv2": 5.0}, {"conv1": 8, "conv2": 8}, 11, 22)
