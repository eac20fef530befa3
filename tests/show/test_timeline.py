"""Timelines: lanes hold what the rounds hold, divided or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskcnn.show.history import SPENT
from daskcnn.show.report_tables import RunReport
from daskcnn.show.timeline import Lane, divided, timeline
from tests.show.run_events import Event, calibration, epoch, round_of, start, tables

Parts = tuple[float, float, float, float, float, float]
"""Seconds of a round: load, compute, evaluation, communication, wait, and the gap before it."""
seconds = st.floats(0.0, 20.0).map(lambda s: round(s, 3))
rounds = st.lists(st.tuples(*[seconds] * 6), min_size=1, max_size=12)
workers = st.lists(rounds, min_size=1, max_size=4)


def logged(own: Sequence[Sequence[Parts]]) -> RunReport:
    """A run whose workers made these rounds, each as soon as the one before it and its gap were over."""
    log: list[Event] = []
    for i, each in enumerate(own):
        now = 0.0
        for number, (load, compute, evaluation, communication, wait, gap) in enumerate(each):
            now += gap + load + compute + evaluation + communication + wait
            spent = {"load": load, "busy": load + compute, "evaluation": evaluation}
            moved = {"communication": communication, "wait": wait}
            log.append(round_of(f"w{i}", round=number, at=now, **spent, **moved))
    names = [f"w{i}" for i in range(len(own))]
    return tables([start(at=0.0), {**calibration(*names), "at": 0.0}, *sorted(log, key=lambda event: event["at"])])


def of(lane: Lane) -> tuple[float, ...]:
    """Seconds of each part, added up over the stretches as they are."""
    return tuple(sum(each.spent[i] for each in lane.stretches) for i in range(len(SPENT)))


@given(workers)
def test_a_lane_has_the_seconds_of_the_worker_s_rounds(own: list[list[Parts]]) -> None:
    report = logged(own)
    found = timeline(report)
    assert [lane.worker for lane in found.lanes] == [worker.name for worker in report.workers]
    for lane in found.lanes:
        (row,) = (worker for worker in report.workers if worker.name == lane.worker)
        assert of(lane) == pytest.approx([getattr(row, part) or 0.0 for part in SPENT], abs=1e-6)
        assert lane.rounds == row.rounds


@given(workers)
def test_stretches_of_a_lane_are_in_order_and_do_not_overlap(own: list[list[Parts]]) -> None:
    for lane in timeline(logged(own)).lanes:
        ends = [0.0, *(each.end for each in lane.stretches)]
        assert all(begin >= end - 1e-9 for begin, end in zip([s.begin for s in lane.stretches], ends, strict=False))
        assert all(each.end >= each.begin for each in lane.stretches)


@given(workers, st.integers(1, 40))
def test_divided_lanes_have_the_same_sums_and_no_stretch_is_overfull(own: list[list[Parts]], most: int) -> None:
    report = logged(own)
    whole, cut = timeline(report), timeline(report, most=most)
    for one, other in zip(whole.lanes, cut.lanes, strict=True):
        assert of(other) == pytest.approx(of(one), abs=1e-6)
        assert other.spent == pytest.approx(one.spent)
        assert all(sum(each.spent) <= each.end - each.begin + 1e-6 for each in other.stretches)


@given(rounds, st.floats(1.0, 50.0))
def test_dividing_leaves_every_second_where_it_was(own: list[Parts], width: float) -> None:
    (lane,) = timeline(logged([own])).lanes
    cut = list(divided(lane.stretches, width))
    for each in cut:
        assert each.end - each.begin == pytest.approx(width)
        inside = [max(0.0, min(s.end, each.end) - max(s.begin, each.begin)) for s in lane.stretches]
        assert sum(each.spent) == pytest.approx(sum(inside), abs=1e-6)


def test_parts_stand_in_the_order_of_a_round_and_end_with_it() -> None:
    (lane,) = timeline(logged([[(1.0, 2.0, 0.5, 0.25, 4.0, 10.0)]])).lanes
    assert [each.begin for each in lane.stretches] == [10.0, 11.0, 13.0, 13.5, 13.75]
    assert lane.stretches[-1].end == 17.75
    assert [each.spent.index(max(each.spent)) for each in lane.stretches] == list(range(len(SPENT)))


def test_a_round_that_the_log_has_too_early_is_shortened() -> None:
    """The driver hears of a round late, so the next one seems to begin before that."""
    spent: dict[str, Any] = {"load": 0.0, "busy": 4.0, "wait": 0.0, "communication": 0.0, "evaluation": 0.0}
    log = [round_of("w0", round=0, at=5.0, **spent), round_of("w0", round=1, at=7.0, **spent)]
    (lane,) = timeline(tables([start(at=0.0), {**calibration("w0"), "at": 0.0}, *log])).lanes
    assert [(each.begin, each.end) for each in lane.stretches] == [(1.0, 5.0), (5.0, 7.0)]
    assert lane.spent[SPENT.index("compute")] == 6.0


def test_what_a_resumed_run_made_again_is_in_the_lane_once() -> None:
    begun = [start(at=0.0), {**calibration("w0"), "at": 0.0}]
    spent: dict[str, Any] = {"load": 0.0, "busy": 4.0, "wait": 0.0, "communication": 0.0, "evaluation": 0.0}
    first = [round_of("w0", round=0, at=5.0, **spent), {**epoch(step=1), "at": 5.0}]
    kept = {"event": "checkpoint", "path": "c", "step": 1, "at": 5.0}
    undone = round_of("w0", round=1, at=10.0, **spent)
    again = [start(at=100.0), {"event": "resume", "step": 1, "path": "c", "at": 100.0}]
    again += [{**calibration("w0"), "at": 101.0}, round_of("w0", round=1, at=106.0, **spent)]
    report = tables([*begun, *first, kept, undone, *again])
    (lane,) = timeline(report).lanes
    assert [row.at for row in report.rounds] == [5.0, 10.0, 10.0]
    assert [(each.begin, each.end) for each in lane.stretches] == [(1.0, 5.0), (6.0, 10.0)]


def test_of_many_workers_some_have_a_lane_the_first_and_the_last_among_them() -> None:
    report = logged([[(0.0, 1.0, 0.0, 0.0, 0.0, 0.0)] for _ in range(30)])
    found = timeline(report, lanes=7)
    assert (len(found.lanes), found.workers) == (7, 30)
    assert (found.lanes[0].worker, found.lanes[-1].worker) == ("w0", "w29")


def test_a_run_without_rounds_has_no_lanes() -> None:
    found = timeline(tables([start()]))
    assert (found.lanes, found.seconds) == ((), 0.0)
