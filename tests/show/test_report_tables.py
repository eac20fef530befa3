"""The figures of a report against the formulas, on logs made up so that the answer is known."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskcnn.documents import jsonable
from daskcnn.errors import DataError
from daskcnn.events import parsed
from daskcnn.show.history import History
from daskcnn.show.renderers.run_text import format_report
from daskcnn.show.report_sections import sections
from daskcnn.show.report_tables import UNFINISHED, RunReport, StepParts
from tests.show.run_events import (
    Event,
    asynchronous,
    calibration,
    data_parallel,
    epoch,
    layer_sharded,
    round_of,
    start,
    tables,
    worker_totals,
)

VECTOR = 1000
Busy = list[list[float]]
"""Seconds by round and worker."""


def names(workers: int) -> list[str]:
    return [f"w{i}" for i in range(workers)]


def lap(worker: str, number: int, **changes: Any) -> Event:
    """A worker's round, numbered from 0 as a log does."""
    exchanged = {"bytes_up": VECTOR, "bytes_down": VECTOR, "pushes": 1}
    return round_of(worker, round=number, **exchanged | changes)


def run_of(busy: Busy, *, strategy: str = "sgwu", **changes: Any) -> list[Event]:
    """A run whose workers were busy for so long."""
    began = start(strategy=strategy, increments=2, vector_bytes=VECTOR, **changes)
    rounds = [lap(w, k, busy=t) for k, row in enumerate(busy) for w, t in zip(names(len(row)), row, strict=True)]
    return [began, calibration(*names(len(busy[0]))), *rounds]


def timed(*events: tuple[float, Event]) -> list[Event]:
    return [{**event, "at": at} for at, event in events]


SECONDS = st.floats(0, 1e4)
MATRIX = st.integers(1, 5).flatmap(
    lambda m: st.lists(st.lists(SECONDS, min_size=m, max_size=m), min_size=1, max_size=6)
)


# --- balance and waiting ---


@given(MATRIX)
def test_balance_and_waiting_follow_their_formulas(busy: Busy) -> None:
    report = tables(run_of(busy))
    waits = [sum(max(row) - t for t in row) for row in busy]  # Eq. 8
    assert [b.wait for b in report.by_round] == pytest.approx(waits)
    for balance, row in zip(report.by_round, busy, strict=True):
        mean = sum(row) / len(row)
        assert balance.balance == (pytest.approx(mean / max(row)) if max(row) else None)
    assert report.balance is not None
    assert report.balance.wait == pytest.approx(sum(waits))
    longest = sum(map(max, busy))
    whole = sum(map(sum, busy)) / len(busy[0]) / longest if longest else None
    assert report.balance.balance == (None if whole is None else pytest.approx(whole))


@given(st.floats(0.001, 1e4), st.integers(1, 6), st.integers(1, 6))
def test_equal_workers_never_wait_and_are_in_balance(seconds: float, workers: int, rounds: int) -> None:
    report = tables(run_of([[seconds] * workers] * rounds))
    assert report.balance is not None
    assert report.balance.wait == 0
    assert report.balance.balance == pytest.approx(1, abs=1e-12)


def test_rounds_are_summed_by_increment_and_the_later_ones_can_be_asked_for() -> None:
    report = tables(run_of([[1.0, 3.0], [2.0, 2.0], [4.0, 2.0]]))
    assert [(b.increment, b.first, b.last, b.rounds) for b in report.increments] == [(1, 1, 1, 1), (2, 2, 3, 2)]
    assert [b.balance for b in report.increments] == pytest.approx([2 / 3, 5 / 6])
    late = report.from_increment(2)
    assert late is not None
    assert late.balance == pytest.approx(5 / 6)
    assert report.from_increment(3) is None


def test_a_worker_that_has_no_samples_behind_a_barrier_is_idle_until_it_is_lost() -> None:
    began = [start(), calibration("w0", "w1"), lap("w0", 0, busy=4.0)]
    first, second = tables([*began, lost("w1"), lap("w0", 1, busy=4.0)]).by_round
    assert (first.workers, first.balance, first.wait) == (2, 0.5, 4.0)
    assert (second.workers, second.balance, second.wait) == (1, 1.0, 0.0)


def lost(worker: str) -> Event:
    return {"event": "worker-lost", "worker": worker, "reason": "killed", "samples_moved": 5}


def test_asynchronous_workers_are_compared_as_far_as_all_of_them_came_with_whole_rounds() -> None:
    fast = [lap("w0", k, busy=1.0, samples=100) for k in range(6)]
    slow = [lap("w1", 0, busy=2.0, samples=100), lap("w1", 1, busy=2.0, samples=100), lap("w1", 2, busy=9.0, samples=7)]
    report = tables([start(strategy="agwu"), calibration("w0", "w1"), *fast, *slow])
    assert [b.first for b in report.by_round] == [1, 2]
    assert report.balance is not None
    assert report.balance.balance == pytest.approx(0.75)
    assert report.total.rounds == 9


def test_a_lost_asynchronous_worker_does_not_end_the_comparison_of_the_others() -> None:
    rounds = [lap(w, k) for k in range(3) for w in ("w0", "w1")]
    events = [start(strategy="agwu"), calibration("w0", "w1", "w2"), lap("w2", 0), *rounds, lost("w2")]
    report = tables(events)
    assert [(b.first, b.workers) for b in report.by_round] == [(1, 3), (2, 2), (3, 2)]
    assert [w.lost for w in report.workers] == [False, False, True]


def test_a_worker_that_left_in_good_order_was_not_lost() -> None:
    gone = {"event": "worker-left", "worker": "w1", "reason": "it is shut down", "samples_done": 3, "samples_moved": 5}
    report = tables([start(), calibration("w0", "w1"), lap("w0", 0), lap("w1", 0), gone])
    assert [(w.left, w.lost) for w in report.workers] == [(False, False), (True, False)]
    back = tables([start(), calibration("w0", "w1"), lap("w0", 0), lap("w1", 0), gone, calibration("w1")])
    assert not any(w.left for w in back.workers)


# --- exchanges ---


@given(st.integers(1, 5), st.integers(1, 7), st.integers(1, 4))
def test_a_push_and_a_pull_a_time_come_to_eq_11_exactly(workers: int, rounds: int, pushes: int) -> None:
    moved = {"pushes": pushes, "bytes_up": pushes * VECTOR, "bytes_down": pushes * VECTOR}
    laps = [lap(w, k, **moved) for k in range(rounds) for w in names(workers)]
    traffic = tables([start(vector_bytes=VECTOR), calibration(*names(workers)), *laps]).traffic
    assert traffic.foreseen == 2 * VECTOR * workers * rounds * pushes == traffic.up + traffic.down
    assert traffic.share == 1


def test_a_log_of_before_counts_a_push_a_round_and_a_float32_a_parameter() -> None:
    old = [{k: v for k, v in e.items() if k != "pushes"} for e in [start(parameters=250), *run_of([[1.0, 2.0]])[1:]]]
    report = tables(old)
    assert (report.total.pushes, report.traffic.foreseen, report.traffic.share) == (2, 4000, 1)
    assert [b.increment for b in report.increments] == [None]


def counts(server: int, merged: int, **refused: int) -> Event:
    return {"event": "server", "server": server, "merged": merged, "repeated": 1, "refused": refused}


def test_every_server_of_a_run_has_its_last_word_on_what_it_merged_and_refused() -> None:
    first = [counts(1, 5), counts(1, 8, finite=1)]
    moved = [counts(2, 3, finite=2, seq=1)]
    resumed = [start(), {"event": "resume", "step": 3, "path": "c"}, counts(2, 10)]
    laps = [lap("w0", 0)]
    report = tables([start(), *laps, *first, *moved, *resumed])
    assert report.server is not None
    assert (report.server.merged, report.server.repeated) == (21, 3)
    assert report.server.refused == {"finite": 3, "seq": 1}
    assert tables(data_parallel()).server is None


def test_the_noise_that_was_known_last_is_told_with_what_a_step_gains_by_it() -> None:
    noise = {"noise_scale": 1200.4, "noise_error": 35.2}
    log = [start(step_samples=300), lap("w0", 0), epoch(**noise), epoch(epoch=4.0, step=1500)]
    (line,) = [line for part in sections(tables(log)) for line in part.facts if line[0] == "noise"]
    assert line[1] == (
        "gradient noise scale 1,200 ± 35 samples; steps of 300 gain up to 20.0 % of what steps without noise would"
    )
    assert [(look.noise_scale, look.noise_error) for look in tables(log).looks] == [(1200.4, 35.2), (None, None)]
    (grown,) = [
        line
        for part in sections(
            tables([*log[:2], epoch(**noise, step_samples=600), epoch(epoch=4.0, noise_within_error=True)])
        )
        for line in part.facts
        if line[0] == "noise"
    ]
    assert grown[1].startswith("gradient noise scale 1,200 ± 35 samples; steps of 600 gain up to 33.3 % of what")
    assert grown[1].endswith("on unknown (the gradient is within its error)")
    hidden = [start(), lap("w0", 0), epoch(noise_within_error=True)]
    assert "gradient noise scale unknown (the gradient is within its error)" in str(sections(tables(hidden)))
    silent = [start(), lap("w0", 0), epoch()]
    assert "noise" not in str(sections(tables(silent)))


# --- workers ---


def test_workers_add_up_to_all_of_them() -> None:
    rounds = [lap("w0", 0, load=1.0, busy=5.0, staleness=0, gamma=0.5, q=0.3), lap("w1", 0, load=0.5, busy=3.0)]
    later = lap("w0", 1, load=1.0, busy=5.0, staleness=3, gamma=1.0, q=0.6)
    report = tables([start(), calibration("w0", "w1", "w2"), *rounds, later])
    first, _, third = report.workers
    assert (first.rounds, first.busy, first.compute, first.load) == (2, 10.0, 8.0, 2.0)
    assert (first.staleness_mean, first.staleness_max, first.gamma, first.q) == (1.5, 3, 0.75, 0.6)
    assert (third.name, third.rounds, third.samples, third.gamma) == ("w2", 0, 0, None)
    for name in ("samples", "rounds", "pushes", "busy", "compute", "wait", "evaluation", "bytes_up", "bytes_down"):
        assert getattr(report.total, name) == pytest.approx(sum(getattr(w, name) or 0 for w in report.workers))


@pytest.mark.parametrize("events", [data_parallel(), asynchronous()], ids=["barrier", "asynchronous"])
def test_the_report_and_the_summary_agree(events: list[Event]) -> None:
    report = {worker.name: worker for worker in tables(events).workers}
    for total in worker_totals(events):
        for key, value in asdict(total).items():
            assert (getattr(report[total.name], key) or 0) == (value or 0)


def test_a_layer_sharded_run_has_epochs_for_rounds_and_no_sample_counts_twice() -> None:
    part = {"samples": 100, "bytes_up": 10, "bytes_down": 20}
    workers = [
        {"name": "w0", "busy": 4.0, "wait": 1.0, "conv_seconds": {"conv1": 3.0}, **part},
        {"name": "w1", "busy": 2.0, "wait": 3.0, "conv_seconds": {"conv1": 1.0}, **part},
    ]
    shards = {"event": "shards", "home": "w1", "kernels": {"w0": {"conv1": 20}, "w1": {"conv1": 12}}}
    looks = [epoch(epoch=float(k), step=10 * k, workers=workers) for k in (1, 2)]
    report = tables([*layer_sharded(), shards, *looks])
    assert report.breakdown == {"w0": StepParts(0.1, 0.3, 0.1), "w1": StepParts(0.3, 0.1, 0.1)}
    assert [b.balance for b in report.by_round] == [0.75, 0.75]
    assert (report.total.samples, report.total.busy, report.total.communication) == (200, 12.0, None)
    assert (report.traffic.up, report.traffic.foreseen) == (40, None)
    assert report.kernels["w1"] == {"conv1": 12}
    assert report.conv_seconds["w0"] == {"conv1": 6.0}
    assert [look.rounds for look in report.looks] == [1, 2]


def test_the_head_of_a_report_names_the_workers_without_kernels() -> None:
    kernels = {"w0": {"conv1": 20, "conv2": 8}, "w1": {"conv1": 0, "conv2": 0}, "w2": {"conv1": 0, "conv2": 4}}
    report = tables([*layer_sharded(), {"event": "shards", "home": "w0", "kernels": kernels}])
    told = "w1: a part of the work there would cost more than it saves"
    assert dict(fact for part in sections(report) for fact in part.facts)["no kernels"] == told


def test_a_worker_of_sharded_layers_has_the_mean_of_the_steps_that_it_took_part_in() -> None:
    def ended(number: int, *names: str) -> Event:
        workers = [
            {"name": name, "busy": 4.0, "wait": 2.0, "conv_seconds": {"conv1": 3.0}, "samples": 9} for name in names
        ]
        return epoch(epoch=number, step=10 * number, workers=workers)

    report = tables([*layer_sharded(), *(ended(k, "w0") for k in (1, 2, 3)), ended(4, "w0", "w1")])
    assert report.breakdown["w0"] == report.breakdown["w1"] == StepParts(0.2, 0.3, 0.1)


def test_work_that_is_lost_with_a_worker_is_that_since_its_last_report() -> None:
    part = {"busy": 4.0, "wait": 1.0, "samples": 9}
    sharded = epoch(workers=[{"name": "w0", **part}, {"name": "w1", **part}])
    events = timed((0.0, start(strategy="layer")), (0.0, calibration("w0", "w1")), (40.0, sharded), (45.0, lost("w1")))
    assert [change.lost for change in tables(events).changes] == [5.0]
    members = [{"name": "w1", "busy": 4.0, "conv_seconds": {}}]
    group = round_of("group-0", members=members)
    events = timed((0.0, start()), (0.0, calibration("w1")), (3600.0, group), (3605.0, lost("w1")))
    assert [change.lost for change in tables(events).changes] == [5.0]


def test_a_layer_divided_by_samples_is_shown_in_per_cent() -> None:
    kernels = {"w0": {"conv1": 100, "conv2": 700}, "w1": {"conv1": 50, "conv2": 100}}
    by = {"conv1": "samples", "conv2": "kernels"}
    cut = {"divided": {"w0": by, "w1": by}, "of": {"conv1": 150, "conv2": 800}}
    report = tables([*layer_sharded(), {"event": "shards", "home": "w0", "kernels": kernels, **cut}])
    assert report.shards == {"w0": {"conv1": "67 %", "conv2": "700"}, "w1": {"conv1": "33 %", "conv2": "100"}}
    text = format_report(report)
    assert "conv1 samples" in text
    assert "conv2 kernels" in text


# --- time, looks, lives ---


def scored(accuracy: float, **changes: Any) -> Event:
    return epoch(validation={"accuracy": accuracy, "loss": 1.0}, **changes)


def test_time_runs_from_the_calibration_and_targets_are_reached_at_the_first_good_look() -> None:
    laps = [(20.0, lap("w0", 0)), (30.0, scored(0.5, step=1)), (40.0, lap("w0", 1)), (50.0, scored(0.4, step=2))]
    events = timed((0.0, start()), (10.0, calibration("w0")), *laps, (70.0, {"event": "end", "status": "done"}))
    report = tables(events)
    assert [look.at for look in report.looks] == [20.0, 40.0]
    found = report.reached(0.45)
    assert found is not None
    assert (found.at, found.rounds) == (20.0, 1)
    assert report.reached(0.6) is None
    assert (report.seconds, report.status) == (40.0, "done")
    assert report.utilisation == pytest.approx(2 * 9.7 / 40.0)


def test_a_part_of_the_validation_samples_reaches_a_target_where_chance_is_not_enough() -> None:
    def part(step: int, accuracy: float, error: float) -> Event:
        return epoch(step=step, validation={"accuracy": accuracy, "loss": 1.0, "samples": 100, "error": error})

    parts = [part(1, 0.55, 0.05), part(2, 0.58, 0.03)]
    report = tables([start(), calibration("w0"), *parts, scored(0.53, step=3)])
    first, second = report.reached(0.5), report.reached(0.53)
    assert first is report.looks[1]
    assert second is report.looks[2], "0.58 may be chance"


def test_a_clock_that_is_set_back_costs_the_run_one_interval() -> None:
    laps = [(10.0 * k, scored(0.1, step=k)) for k in range(1, 6)]
    later = [(at - 3600.0, event) for at, event in ((10.0 * k, scored(0.1, step=k)) for k in range(6, 11))]
    report = tables(timed((0.0, start()), (0.0, calibration("w0")), *laps, *later))
    assert [look.at for look in report.looks] == [10, 20, 30, 40, 50, 50, 60, 70, 80, 90]


def test_nobody_trains_between_the_end_of_a_run_and_its_resume() -> None:
    first = [(0.0, start()), (0.0, calibration("w0")), (5.0, scored(0.3, step=1))]
    first += [(6.0, {"event": "end", "status": "interrupted", "seconds": 6.0})]
    again = [(86_400.0, {"event": "warning", "message": "checkpoint passed over"}), (86_401.0, start())]
    again += [(86_402.0, {"event": "resume", "step": 1, "path": "c"})]
    report = tables(timed(*first, *again))
    assert [worker.present for worker in report.workers] == [6.0]
    assert all(note.at <= 6.0 for note in report.notes)


@pytest.mark.parametrize("origin", [0.0, 1.7e9])
def test_dates_and_seconds_of_any_clock_are_the_same_times(origin: float) -> None:
    events = timed((1.0, calibration("w0")), (2.5, lap("w0", 0)), (3.25, scored(0.5)))
    shifted = [{**event, "at": origin + event["at"]} for event in events]
    begun = datetime(2026, 11, 20, tzinfo=UTC)
    dated = [{**event, "at": (begun + timedelta(seconds=event["at"])).isoformat()} for event in events]
    assert tables(shifted).looks[0].at == pytest.approx(2.25)
    assert tables(dated).looks[0].at == pytest.approx(2.25)


def test_without_times_the_epochs_seconds_are_added_up() -> None:
    report = tables([start(), calibration("w0"), epoch(seconds=20.0), epoch(epoch=4.4, step=1650, seconds=5.0)])
    assert [look.at for look in report.looks] == [20.0, 25.0]


def test_a_resume_goes_back_to_its_checkpoint_but_forgets_no_work() -> None:
    first = [(0.0, start()), (1.0, calibration("w0")), (5.0, lap("w0", 0)), (5.0, scored(0.3, step=1))]
    first += [(6.0, {"event": "checkpoint", "step": 1, "path": "c"}), (9.0, lap("w0", 1)), (9.0, scored(0.9, step=2))]
    again = [(100.0, start()), (101.0, {"event": "resume", "step": 1, "path": "c"}), (103.0, calibration("w0"))]
    again += [(107.0, lap("w0", 1)), (108.0, scored(0.5, step=2))]
    report = tables(timed(*first, *again))
    assert [(look.at, look.validation_accuracy) for look in report.looks] == [(4.0, 0.3), (10.0, 0.5)]
    assert [(row.life, row.number) for row in report.rounds] == [(1, 1), (1, 2), (2, 2)]
    assert report.total.rounds == 3
    assert len(report.by_round) == 3
    assert [(note.at, "resumed" in note.text) for note in report.notes] == [(5.0, True)]


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_clock_that_is_set_changes_no_figure(jump: float) -> None:
    begin = [(0.0, start()), (1.0, calibration("w0")), (5.0, lap("w0", 0)), (5.0, scored(0.3, step=1))]
    rest = [(9.0, lap("w0", 1)), (9.0, scored(0.9, step=2)), (10.0, {"event": "end", "status": "done", "seconds": 9.0})]
    set_forward = (6.0 + jump, {"event": "clock", "seconds": jump})
    later = timed(*begin, set_forward, *((at + jump, event) for at, event in rest))
    steady, moved = (tables(log).to_dict() for log in (timed(*begin, *rest), later))
    (told,) = moved.pop("notes")
    assert moved == {name: value for name, value in steady.items() if name != "notes"}
    way = "forward" if jump > 0 else "back"
    assert told["text"] == f"the driver's clock was set {way} by 1 h 00 min, or its computer slept"


def test_an_evaluation_is_added_without_looking_at_those_before() -> None:
    """Thousands of them made a report take seconds."""
    history = History()
    for event in parsed([epoch(epoch=k / 10, step=k) for k in (1, 2)]):
        history.take(event)
    looks = history.looks
    for event in parsed([epoch(epoch=k / 10, step=k) for k in (3, 4, 2, 3)]):
        history.take(event)
    assert history.looks is looks
    assert [look.step for look in looks] == [1, 2, 3], "it went back to the second"


def joined(worker: str) -> list[Event]:
    """A worker is calibrated in mid-run, and takes part."""
    return [calibration(worker), {"event": "worker-joined", "worker": worker, "samples": 10}]


def test_a_worker_that_joins_begins_nothing_anew() -> None:
    first = [(0.0, start(strategy="agwu")), (10.0, calibration("w0")), (30.0, lap("w0", 0, busy=20.0))]
    then = [(31.0, scored(0.5, step=1)), *((40.0, event) for event in joined("w1"))]
    last = [(50.0, lap("w0", 1, busy=20.0)), (60.0, lap("w1", 1, busy=20.0)), (60.0, scored(0.6, step=3))]
    report = tables(timed(*first, *then, *last))
    assert [look.at for look in report.looks] == [21.0, 50.0]
    assert [(worker.name, worker.lost, worker.present) for worker in report.workers] == [
        ("w0", False, 50.0),
        ("w1", False, 20.0),
    ]
    assert report.utilisation == pytest.approx(60 / 70)
    gone = tables(timed(*first, *then, *last, (61.0, lost("w0")), *((70.0, event) for event in joined("w0"))))
    assert [worker.lost for worker in gone.workers] == [False, False]
    assert gone.seconds == 60.0


def test_a_worker_that_a_resumed_run_lacks_was_not_lost() -> None:
    again = [start(), {"event": "resume", "step": 1, "path": "c"}, calibration("w0")]
    report = tables([start(), calibration("w0", "w1"), lap("w0", 0), lap("w1", 0), *again])
    assert [worker.lost for worker in report.workers] == [False, False]


def test_evaluations_that_a_new_server_makes_again_take_the_place_of_those_before() -> None:
    looks = [scored(0.1 * step, step=step, epoch=step) for step in (1, 2, 3, 2, 3)]
    report = tables([start(), calibration("w0"), *looks])
    assert [look.epoch for look in report.looks] == [1, 2, 3]


def test_epochs_of_sharded_layers_that_are_made_again_count_again() -> None:
    def ended(number: int) -> Event:
        return epoch(epoch=number, step=10 * number, workers=[{"name": "w0", "busy": 1.0, "wait": 1.0, "samples": 9}])

    report = tables([start(strategy="layer"), calibration("w0"), *map(ended, (1, 2, 1, 2))])
    assert [(row.life, row.number) for row in report.rounds] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert report.breakdown["w0"].comm == pytest.approx(4.0 / 40)


def test_a_run_that_starts_again_from_nothing_has_no_past_looks_nor_time() -> None:
    first = [(0.0, start()), (1.0, calibration("w0")), (5.0, lap("w0", 0)), (5.0, scored(0.9, step=1))]
    resumed = [(20.0, start()), (21.0, {"event": "resume", "step": 1, "path": "c"}), (22.0, calibration("w0"))]
    again = [(50.0, start()), (51.0, calibration("w0")), (53.0, lap("w0", 0)), (53.0, scored(0.1, step=1))]
    report = tables(timed(*first, *resumed, *again))
    assert [(look.at, look.validation_accuracy) for look in report.looks] == [(2.0, 0.1)]
    assert tables(timed(*first[:2])).seconds == 0


def test_rounds_that_a_new_server_has_made_again_are_another_life() -> None:
    rounds = [lap("w0", 0), lap("w1", 0), lap("w0", 1), lap("w0", 1), lap("w1", 1)]
    report = tables([start(), calibration("w0", "w1"), *rounds])
    assert [(row.life, row.number) for row in report.rounds] == [(1, 1), (1, 1), (1, 2), (2, 2), (2, 2)]


def test_troubles_come_with_their_time_in_the_words_of_the_terminal() -> None:
    warning = {"event": "warning", "message": "it is\nlate"}
    report = tables(timed((0.0, start()), (1.0, calibration("w0")), (3.0, warning), (4.0, lost("w0"))))
    assert [note.at for note in report.notes] == [2.0, 3.0]
    assert report.notes[0].text == "warning: it is late"
    assert "w0 lost: killed; 5 samples moved" in report.notes[1].text


# --- logs that are not whole ---


def test_a_run_that_was_killed_or_goes_on_is_told_as_far_as_it_came() -> None:
    report = tables(data_parallel())
    assert (report.status, report.epoch, report.test) == (UNFINISHED, 3.4, None)
    assert tables([]).rounds == ()
    assert tables([start()]).balance is None


def test_what_an_event_says_besides_and_other_events_change_nothing() -> None:
    events = data_parallel()
    more = [{"event": "sunshine", "busy": "very"}, *({**event, "mood": []} for event in events)]
    assert tables(more) == tables(events)


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ({}, "line 2: says of no event what it is (event = None)"),
        ({"event": 3}, "(event = 3)"),
        (lap("w0", 0, busy="long"), "line 2 (round): busy = 'long': input should be a valid number"),
        (lap("w0", 0, wait=-1.0), "wait = -1.0"),
        (lap("w0", -1), "round = -1"),
        ({"event": "round", "worker": "w0"}, "field required"),
        ({**epoch(), "workers": {"w0": {}}}, "workers = {'w0': {}}: input should be a valid tuple"),
        ({**epoch(), "at": "yesterday"}, "at = 'yesterday': invalid isoformat string"),
        (counts(1, 1) | {"refused": {"finite": "many"}}, "refused.finite = 'many'"),
    ],
)
def test_a_damaged_event_is_named_with_its_line_its_value_and_a_remedy(event: Event, words: str) -> None:
    with pytest.raises(DataError) as told:
        tables([start(), event])
    assert words in str(told.value)
    assert "remove that line to read the rest" in str(told.value)


def test_a_report_is_json_with_the_names_of_its_fields() -> None:
    for events in (data_parallel(), asynchronous(), layer_sharded(), []):
        report: RunReport = tables(events)
        plain = jsonable(report.to_dict())
        assert json.loads(json.dumps(plain, allow_nan=False)) == plain
        assert plain.keys() == {"utilisation", *report.__dataclass_fields__}


def test_the_report_of_a_simulation_says_so() -> None:
    told = format_report(tables([start(simulated=True), calibration("w0"), round_of("w0")]))
    assert any(line.startswith("status ") and line.endswith(", a simulation") for line in told.splitlines())
    assert "simulation" not in format_report(tables([start(), calibration("w0"), round_of("w0")]))


@pytest.mark.parametrize(
    ("began", "heading"),
    [
        ({"strategy": "sgwu"}, "merges"),
        ({"strategy": "bsp", "batch_size": 64, "step_samples": 64}, "merges"),
        ({"strategy": "layer"}, "step"),
    ],
)
def test_merges_are_not_called_steps(began: Event, heading: str) -> None:
    shown = format_report(tables([start(**began), epoch()]))
    assert re.search(rf"\n +epoch +time +{heading} +training loss", shown)


# --- against the fastest worker by itself ---


def look(at: float, number: int, accuracy: float | None) -> Event:
    return {**epoch(epoch=float(number), step=number, validation={"loss": 1.0, "accuracy": accuracy}), "at": at}


def test_a_run_says_what_it_brought_against_its_fastest_worker_alone() -> None:
    began = {"batch_size": 64, "step_samples": 64}
    assert tables(_log(began)).alone is None  # not judged yet
    looks = [look(8.0, 1, 0.4), look(15.0, 2, 0.6), look(22.0, 3, 0.6)]
    found = tables([*_log(began), *looks]).alone
    assert found is not None
    assert (found.worker, found.accuracy, found.seconds, found.at_most) == ("w1", 0.6, 15.0, False)
    assert found.alone == pytest.approx((2 * 1000 + 2 * 300 / 3) / 100)
    shown = format_report(tables([*_log(began), *looks]))
    line = "brought     this cluster reached 60.0 % in 15.0 s; w1 alone would have taken about 22.0 s (estimated)"
    assert line in shown


def test_a_lucky_part_is_not_what_a_run_brought() -> None:
    lucky = {**look(8.0, 1, 0.9), "validation": {"loss": 1.0, "accuracy": 0.9, "samples": 100, "error": 0.2}}
    found = tables([*_log({"batch_size": 64}), lucky, look(15.0, 2, 0.6)]).alone
    assert found is not None
    assert (found.accuracy, found.seconds) == (0.6, 15.0)
    assert getattr(tables([*_log({"batch_size": 64}), lucky]).alone, "accuracy", None) == 0.9, "there is nothing else"


def test_a_part_that_shows_more_than_all_did_before_is_what_a_run_reached() -> None:
    part = {**look(15.0, 2, 0.9), "validation": {"loss": 1.0, "accuracy": 0.9, "samples": 100, "error": 0.03}}
    found = tables([*_log({"batch_size": 64}), look(8.0, 1, 0.3), part]).alone
    assert found is not None
    assert (found.accuracy, found.seconds) == (0.9, 15.0)


def test_replicas_that_are_merged_may_need_more_samples_than_one_machine() -> None:
    shown = format_report(tables([*_log({"batch_size": 64}), look(8.0, 1, None)]))
    assert "this cluster made 1 epoch in 8.0 s; w1 alone would have taken about 11.0 s at most (estimated" in shown


def test_a_worker_that_was_slower_in_its_rounds_than_it_had_measured_alone_would_take_as_long() -> None:
    slow = [{**event, "busy": 20.0, "samples": 1000} if event["event"] == "round" else event for event in _log({})]
    found = tables([*slow, look(8.0, 1, 0.4)]).alone
    assert found is not None
    assert found.alone == pytest.approx((1000 + 300 / 3) / 50)


@pytest.mark.parametrize(("busy", "slower"), [(4.0, 1.0), (10.0, 1.0), (20.0, 2.0)])
def test_a_worker_of_shared_steps_is_judged_by_what_its_parts_of_them_would_take(busy: float, slower: float) -> None:
    """Steps of 64 samples take it 0.64 s, half of it fixed: 20 parts of 9 samples each at least 7.3 s."""
    began, calibrated, *_ = _log({"batch_size": 64, "step_samples": 64})
    calibrated["workers"][1] |= {"step_fixed": 0.32}
    expected = 20 * 0.32 + 180 * 0.005
    parts = [lap("w0", 0, samples=1100, busy=22.0), lap("w1", 0, samples=180, pushes=20, busy=expected * busy / 10)]
    found = tables([began, calibrated, *({**part, "at": 1.0} for part in parts), look(8.0, 1, 0.4)]).alone
    assert found is not None
    assert found.alone == pytest.approx((1000 + 300 / 3) / (100 / slower))


def test_the_fastest_worker_is_the_one_that_was_in_the_run() -> None:
    slow = [{**event, "busy": 40.0, "samples": 1000} if event.get("worker") == "w1" else event for event in _log({})]
    found = tables([*slow, look(8.0, 1, 0.4)]).alone
    assert found is not None
    assert found.worker == "w0"
    assert found.alone == pytest.approx((1000 + 300 / 3) / 50)


@pytest.mark.parametrize(("needed", "at_most"), [(1.0, False), (1.7, True)])
def test_a_run_that_has_chosen_local_steps_may_need_more_samples_than_one_machine(needed: float, at_most: bool) -> None:
    step = {"strategy": "local-sgd", "samples": {"w0": 64, "w1": 64}, "compute": 1.0, "exchange": 0.1, "seconds": 0.1}
    chosen = {"event": "strategy", "candidates": [{**step, "needed": needed}]}
    found = tables([*_log({"batch_size": 64, "step_samples": 64}), chosen, look(8.0, 1, 0.4)]).alone
    assert found is not None
    assert found.at_most is at_most


def test_a_worker_that_was_alone_is_not_compared_with_itself() -> None:
    log = [event for event in _log({"batch_size": 64}) if event.get("worker") != "w0"]
    assert tables([*log, look(8.0, 1, 0.5)]).alone is None


def _log(changes: Event) -> list[Event]:
    """The events of two workers of 50 and 100 images/s, with 1,000 samples an epoch and 300 to judge by."""
    began = start(strategy="bsp", samples=1000, validation_samples=300, **changes)
    speeds = [{"name": "w0", "images_per_second": 50.0}, {"name": "w1", "images_per_second": 100.0}]
    calibrated = {"event": "calibration", "workers": speeds}
    return timed((0.0, began), (0.0, calibrated), (1.0, lap("w0", 0)), (1.0, lap("w1", 0)))
