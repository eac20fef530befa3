"""When kernels move, and what a link's transfers say of it: without any process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from daskcnn.cluster.layers.balance import REPORTS, WORTH_ANYWAY, ShareDrift, added_up, balance_of
from daskcnn.cluster.link_speeds import LARGEST, _way
from daskcnn.cluster.protocol import Calibration
from daskcnn.cluster.session.tasks import Counters
from daskcnn.job.tables import Job
from daskcnn.nn import sequential_from_spec
from daskcnn.sharded import ShareSearch, stages_of

STAGES = stages_of(
    sequential_from_spec(
        [
            {"layer": "conv", "kernels": 40, "size": 3, "pad": 1},
            {"layer": "maxpool", "size": 2},
            {"layer": "dense", "units": 10},
        ]
    )
)


def drift(a: float = 1.0, b: float = 1.0) -> ShareDrift:
    """20 kernels each, as for equal workers unless told otherwise."""
    balance = ShareSearch(STAGES, (8, 8, 3), "a", {"a": {"conv1": a}, "b": {"conv1": b}})
    return ShareDrift(balance, balance.kernels())


def report(a: float, b: float, samples: float = 100.0) -> dict[str, Counters]:
    """Seconds a sample of each, in a stage."""
    return {
        w: Counters(each * samples, {"conv1": each * samples}, {"conv1": samples}) for w, each in (("a", a), ("b", b))
    }


def test_kernels_move_when_a_worker_takes_three_times_as_long() -> None:
    found = drift()
    for _ in range(REPORTS):
        assert found.move() is None
        found.take(report(0.5, 1.5))
    move = found.move()
    assert move is not None
    assert move.balance.kernels() == [{"a": 30, "b": 10}]
    assert (move.now, move.then) == (pytest.approx(1.5), pytest.approx(0.75))


def test_what_saves_less_than_a_tenth_moves_nothing() -> None:
    found = drift()
    for _ in range(REPORTS):
        found.take(report(0.5, 0.55))
    assert found.move() is None


def test_it_does_where_all_is_placed_anew_anyway() -> None:
    found = drift()
    for _ in range(REPORTS):
        found.take(report(0.5, 0.55))
    move = found.move(WORTH_ANYWAY)
    assert move is not None
    assert move.balance.kernels() == [{"a": 21, "b": 19}]


def test_one_slow_report_among_others_moves_nothing() -> None:
    found = drift()
    for b in (0.5, 5.0, 0.5):
        found.take(report(0.5, b))
    assert found.move() is None
    found.take(report(0.5, 5.0))
    assert found.move() is not None


def test_shares_that_measure_as_they_were_made_for_stay() -> None:
    found = drift(1.0, 3.0)
    for _ in range(REPORTS):
        found.take(report(0.75, 0.75))  # 30 of 40 kernels, 10 of 40
    assert found.move() is None


def test_reports_of_a_moment_without_steps_say_nothing() -> None:
    found = drift()
    for _ in range(REPORTS + 1):
        found.take(report(0.5, 1.5))
        found.take({"a": Counters(), "b": Counters()})
    assert found.move() is not None


def test_a_worker_that_has_become_slower_is_slower_where_it_has_no_kernels_too() -> None:
    spec = [
        {"layer": "conv", "kernels": 4, "size": 3},
        {"layer": "conv", "kernels": 4, "size": 3},
        {"layer": "flatten"},
    ]
    compute = {w: {"conv1": 1.0, "conv2": 2.0} for w in "ab"}
    found = ShareDrift(
        ShareSearch(stages_of(sequential_from_spec(spec)), (8, 8, 3), "a", compute), [{"a": 2, "b": 2}, {"a": 4}]
    )
    found.take(
        {
            "a": Counters(0.0, {"conv1": 0.5, "conv2": 2.0}, {"conv1": 1, "conv2": 1}),
            "b": Counters(0.0, {"conv1": 3.0}, {"conv1": 1}),
        }
    )
    assert found.measured().compute == {"a": {"conv1": 1.0, "conv2": 2.0}, "b": {"conv1": 6.0, "conv2": 12.0}}


def test_counters_of_two_times_add_up() -> None:
    some, more = Counters(1.0, {"conv1": 1.0}, {"conv1": 8}, 10, 20), Counters(2.0, {"conv2": 5.0}, {"conv2": 8}, 1, 2)
    assert added_up(some, more) == Counters(3.0, {"conv1": 1.0, "conv2": 5.0}, {"conv1": 8, "conv2": 8}, 11, 22)


@pytest.mark.parametrize("bandwidth", [1e5, 5e6, 1.25e8, 1e10])
def test_a_link_is_measured_by_results_that_take_their_time_and_no_longer(bandwidth: float) -> None:
    sent: list[int] = []

    def seconds(nbytes: int) -> float:
        sent.append(nbytes)
        return 0.002 + nbytes / bandwidth

    link = _way(seconds)
    assert link.bandwidth == pytest.approx(min(bandwidth, 10 * LARGEST / (0.002 + LARGEST / bandwidth)))
    assert link.latency == pytest.approx(0.002)
    assert max(sent) <= LARGEST
    assert sum(sent) / bandwidth < 2.5


def test_one_transfer_that_was_held_up_does_not_count() -> None:
    held_up = iter([0, 0, 0, 0, 0, 0, 0, 1.0, 0, 0, 0])
    assert _way(lambda nbytes: nbytes / 1e9 + 0.001 + next(held_up)).bandwidth == pytest.approx(1e9)


def calibrated(rest: float | None) -> Calibration:
    """A whole step takes more than its stages and what stays at home add up to, as measured minutes apart."""
    return Calibration(2.0, {"conv1": 1.0}, {}, 1, "cpu", 1 << 30, rest)


@pytest.mark.parametrize("rest", [0.01, 0.0])
def test_what_stays_at_home_is_what_was_measured_there_and_not_what_is_left_of_a_step(rest: float) -> None:
    job = Job.model_validate({"train": {"strategy": "layer", "batch_size": 10}})
    context: Any = SimpleNamespace(
        job=job,
        calibrations={"a": calibrated(rest), "b": calibrated(1.0)},
        alive=dict.fromkeys("ab"),
        links=None,
        samples=100,
        dataset=SimpleNamespace(shape=(8, 8, 3)),
    )
    found = balance_of(context, STAGES, "a")
    assert found.rest == rest
    assert found.step_seconds([{"a": 20, "b": 20}]) == pytest.approx(10 * (rest + 0.5))
