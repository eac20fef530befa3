"""Clusters measured by runs: a run simulated on the cluster that it was measured on takes as long again."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest

from daskcnn.errors import DataError
from daskcnn.events import (
    CalibratedWorker,
    EpochEnded,
    LinkSpeed,
    LinkSpeeds,
    PricedStep,
    RoundEnded,
    RunStarted,
    StepsEnded,
    StrategyChosen,
    WorkerJoined,
    WorkerLeftOut,
    WorkersCalibrated,
    parsed,
)
from daskcnn.ps import RULES
from daskcnn.sim.cluster import parse_cluster, patterns, to_toml
from daskcnn.sim.measured import measured_cluster, sharded_cluster, step_seconds, weighted_median
from tests.sim.sim_cases import WITHIN, cluster, run, workload

every = pytest.mark.parametrize("name", RULES)


@every
@pytest.mark.parametrize("latency", [0.0, 0.02])
@pytest.mark.parametrize("overlap", [True, False])
def test_what_was_measured_replays_as_it_was(name: str, latency: float, overlap: bool) -> None:
    """Exact where nothing is shared or random: workers, exchanges and the pauses between rounds are found again."""
    work = workload(name, rule=WITHIN.get(name), epochs=4, samples=600, validation=30, overlap=overlap)
    on = cluster(10, 25, latency=latency, costs={"dispatch": 0.3}, evaluations_per_second=70.0)
    first, events = run(work, on)
    found = measured_cluster(events, work)
    assert found.costs.dispatch + found.costs.start == pytest.approx(0.3, abs=0.05)
    for member, before in zip(found.worker, on.worker, strict=True):
        assert member.images_per_second == pytest.approx(before.images_per_second)
        assert member.latency == pytest.approx(latency, abs=0.004)
        if member.evaluations_per_second is not None:
            assert member.evaluations_per_second == pytest.approx(70.0)
    again, _ = run(work, found)
    assert again.now == pytest.approx(first.now, rel=0.02)


@pytest.mark.parametrize("name", ["sgwu", "bsp", "agwu", "easgd"])
def test_speeds_that_vary_come_back_as_their_middle(name: str) -> None:
    work = workload(name, rule=WITHIN.get(name), epochs=8, samples=600)
    walk = {"kind": "walk", "every": 5.0, "spread": 0.1, "lowest": 0.7, "highest": 1.4}
    first, events = run(work, cluster(10, 25, latency=0.01, speed=walk), seed=3)
    again, _ = run(work, measured_cluster(events, work))
    assert again.now == pytest.approx(first.now, rel=0.15)


def test_times_of_a_log_are_dates() -> None:
    work = workload("sgwu", epochs=3)
    events = run(work, cluster(10, 30, costs={"dispatch": 0.2}))[1]
    begun = datetime(2026, 11, 21, tzinfo=UTC)
    records = [(event.record(), timedelta(seconds=event.at or 0.0)) for event in events]
    dated = list(parsed({**record, "at": (begun + after).isoformat()} for record, after in records))
    exact, found = measured_cluster(events, work), measured_cluster(dated, work)
    assert found.costs.dispatch == pytest.approx(exact.costs.dispatch, abs=1e-5)
    assert found.worker == exact.worker


def test_a_measured_cluster_can_be_written_and_gone_on_with() -> None:
    import tomllib

    work = workload("agwu", epochs=3)
    found = measured_cluster(run(work, cluster(10, 30, latency=0.01))[1], work)
    assert parse_cluster(tomllib.loads(to_toml(found))) == found


@pytest.mark.parametrize("name", ["sgwu", "agwu"])
def test_a_worker_that_joined_is_one_among_the_others(name: str) -> None:
    """Its calibration comes by itself; the pause before its first round is not that of the run's start."""
    work = workload(name, epochs=6, samples=600)
    _, events = run(work, cluster(10, 25, 40, latency=0.02, costs={"dispatch": 0.3}))
    late = [event for event in events if getattr(event, "worker", "") != "w2" or (event.at or 0.0) > 30.0]
    i = next(i for i, event in enumerate(late) if getattr(event, "worker", "") == "w2")
    first = next(event for event in late if isinstance(event, WorkersCalibrated))
    rows, at = first.workers, late[i].at
    late[i:i] = [WorkersCalibrated(workers=rows[2:], at=at), WorkerJoined(worker="w2", at=at)]
    late[late.index(first)] = first.model_copy(update={"workers": rows[:2]})
    whole, found = measured_cluster(events, work), measured_cluster(late, work)
    assert [worker.name for worker in found.worker] == ["w0", "w1", "w2"]
    assert [worker.images_per_second for worker in found.worker] == pytest.approx([10, 25, 40], rel=0.02)
    assert found.costs.start == pytest.approx(whole.costs.start, abs=0.05)


def test_a_resumed_run_has_the_workers_that_are_there() -> None:
    work = workload("agwu", epochs=3)
    earlier, later = (run(work, cluster(*speeds))[1] for speeds in ((10, 30), (10,)))
    assert [worker.name for worker in measured_cluster([*earlier, *later], work).worker] == ["w0"]
    stopped = [*earlier, RunStarted()]  # while the workers measured themselves
    assert [worker.name for worker in measured_cluster(stopped, work).worker] == ["w0", "w1"]


def test_the_absence_before_a_resume_and_rounds_of_other_machines_say_nothing() -> None:
    work = workload("agwu", epochs=3)
    earlier, later = (run(work, cluster(*speeds))[1] for speeds in ((1, 3), (10, 30)))
    late = [event.model_copy(update={"at": (event.at or 0.0) + 36_000}) for event in later]
    assert measured_cluster([*earlier, *late], work) == measured_cluster(late, work)


def test_a_worker_that_ended_no_round_is_a_pattern_for_others() -> None:
    work = workload("agwu", epochs=3)
    events = run(work, cluster(10, 30, latency=0.01))[1]
    only = [event for event in events if getattr(event, "worker", "") != "w0"]
    rows = next(event for event in only if isinstance(event, WorkersCalibrated))
    twice = [row.model_copy(update={"images_per_second": 2 * (row.images_per_second or 0.0)}) for row in rows.workers]
    only[only.index(rows)] = rows.model_copy(
        update={"workers": twice}
    )  # all trained half as fast as they were measured
    found = measured_cluster(only, work)
    assert [worker.name for worker in found.members()] == ["w1"]
    whole = found.with_one_more(patterns(found)["w0"])
    one, other = whole.members()
    assert (one.name, other.name) == ("w1", "w0+1")
    assert other.images_per_second == pytest.approx(10, rel=0.02)
    assert other.latency == one.latency


def test_links_of_workers_that_met_nobody_are_those_that_were_probed() -> None:
    work = workload("bsp", epochs=3)
    alone = [each for each in run(work, cluster(10, 30))[1] if getattr(each, "worker", "") != "w0"]
    rows = [LinkSpeed(name="w0", bandwidth=5e6, latency=0.02), LinkSpeed(name="w1", bandwidth=1e9, latency=0.01)]
    found = measured_cluster([*alone, LinkSpeeds(home="w1", workers=rows)], work)
    assert {own.name: (own.bandwidth, own.latency) for own in found.worker} == {"w0": (5e6, 0.02), "w1": (1e9, 0.01)}
    assert found.costs.exchange > 0


def test_a_run_that_chose_rare_meetings_has_the_links_that_made_it_choose_them() -> None:
    sizes = {"samples": 12_800, "batch_size": 64, "validation": 64, "numbers": 90_000}
    work, on = workload("auto", partition="idpa", epochs=4, **sizes), cluster(1000, 1000, bandwidth=5e6, latency=0.01)
    first, events = run(work, on)
    chosen = [event.candidates[0].strategy for event in events if isinstance(event, StrategyChosen)]
    found = measured_cluster(events, work)
    again, replayed = run(work, found)
    assert chosen == ["local-sgd"]
    assert [event.candidates[0].strategy for event in replayed if isinstance(event, StrategyChosen)] == chosen
    assert again.now == pytest.approx(first.now, rel=0.1)
    exchange = 2 * (0.01 + work.nbytes / 5e6)
    assert [member.latency for member in found.worker] == pytest.approx([exchange / 2] * 2, rel=0.3)


def test_of_a_run_that_changed_its_strategy_the_rounds_of_the_last_one_count() -> None:
    work = workload("bsp", epochs=4, samples=600)
    slow, fast = (run(work, cluster(10, 10, latency=each))[1] for each in (1.0, 0.01))
    rounds = [event for event in fast if isinstance(event, RoundEnded)]
    late = [each.model_copy(update={"at": (each.at or 0.0) + 1000, "round": each.round + 4}) for each in rounds]
    priced = {"samples": {"w0": 5, "w1": 5}, "compute": 0.5, "exchange": 0.5, "seconds": 0.1}
    ways = [PricedStep(strategy=name, **priced) for name in ("alone", "bsp")]
    before, after = (StrategyChosen(candidates=(way,), at=0.0) for way in ways)
    measured = measured_cluster([slow[0], before, *slow[1:], after, *late], work)
    assert [member.latency for member in measured.worker] == pytest.approx([0.01] * 2, rel=0.1)


def test_a_worker_that_a_sharded_run_left_out_is_a_pattern_for_others() -> None:
    rows = [CalibratedWorker(name=n, device="cpu", threads=1, images_per_second=10.0) for n in "abc"]
    out = [WorkerLeftOut(worker=name, reason="it is slow") for name in "bc"]
    found = sharded_cluster([WorkersCalibrated(workers=rows), *out, WorkerJoined(worker="c")])
    assert [(worker.name, worker.count) for worker in found.worker] == [("a", 1), ("b", 0), ("c", 1)]


@pytest.mark.parametrize(
    ("kinds", "problem"),
    [(("round",), "no worker has ended a round"), (("round", "calibration"), "has no calibration; give a run that")],
)
def test_a_log_without_measurements_is_refused(kinds: tuple[str, ...], problem: str) -> None:
    work = workload("sgwu")
    events = [event for event in run(work, cluster(10))[1] if event.kind not in kinds]
    with pytest.raises(DataError, match=problem):
        measured_cluster(events, work)


def test_who_never_judged_is_known_to_have_judged_nothing() -> None:
    """The look at the center follows the report of who has judged it; clocks read twice are no judging."""
    work = workload("easgd", epochs=2, samples=200)
    written = run(work, cluster(10, 30, evaluations_per_second=50))[1]
    events = [event.model_copy(update=dict.fromkeys(("judged", "q_samples"))) for event in written]  # an older version
    unseen = [e for e in events if not isinstance(e, EpochEnded)]
    assert {worker.evaluations_per_second for worker in measured_cluster(unseen, work).worker} == {None}
    judges = {a.worker for a, b in pairwise(events) if isinstance(a, RoundEnded) and isinstance(b, EpochEnded)}
    for worker in measured_cluster(events, work).worker:
        assert worker.evaluations_per_second == (pytest.approx(50) if worker.name in judges else None)


@pytest.mark.parametrize("name", ["sgwu", "agwu", "bsp"])
def test_judging_is_measured_by_the_samples_that_were_judged(name: str) -> None:
    """They are a part of the validation samples in some rounds, and all in others."""
    work = workload(name, epochs=6, samples=6000, validation=1000, sized=True)
    events = run(work, cluster(100, 300, evaluations_per_second=500))[1]
    judged = {event.judged for event in events if isinstance(event, RoundEnded) and event.judged}
    assert len(judged) > 2
    for worker in measured_cluster(events, work).worker:
        assert worker.evaluations_per_second in (None, pytest.approx(500))
    spent, busy = (sum(getattr(e, of) for e in events if isinstance(e, RoundEnded)) for of in ("evaluation", "busy"))
    assert spent < 0.05 * busy


def test_the_weighted_median_is_that_of_the_weight() -> None:
    assert weighted_median([(3.0, 1), (1.0, 10), (2.0, 5)]) == 1.0
    assert weighted_median([(5.0, 1), (4.0, 1), (3.0, 1)]) == 4.0
    with pytest.raises(ValueError, match="no values"):
        weighted_median([])


def test_a_sharded_run_s_workers_have_the_links_it_measured_last() -> None:
    rows = [CalibratedWorker(name=n, device="cpu", threads=1, images_per_second=10.0) for n in "ab"]
    links = [
        LinkSpeeds(
            task=speed / 1000,
            workers=[
                LinkSpeed(name="a", bandwidth=speed, latency=0.01),
                LinkSpeed(name="c", bandwidth=1.0, latency=1.0),
            ],
        )
        for speed in (9.0, 5.0)
    ]
    found = sharded_cluster([WorkersCalibrated(workers=rows), *links])
    a, b = found.worker
    assert found.costs.task == 0.005
    assert (a.bandwidth, a.latency) == (5.0, 0.01)
    assert (b.bandwidth, b.latency) == (None, 0.0)
    assert sharded_cluster([WorkersCalibrated(workers=rows)]).costs.task == 0.0


def test_what_stays_at_home_is_read_from_the_calibration_where_it_was_measured() -> None:
    old = {"name": "a", "device": "cpu", "threads": 1, "images_per_second": 10.0, "conv_seconds": {"conv1": 0.05}}
    rows = [old, {**old, "name": "b", "rest_seconds": 0.001}]
    found = sharded_cluster([WorkersCalibrated.model_validate({"workers": rows})])
    assert [worker.rest_seconds for worker in found.worker] == [None, 0.001]


def test_a_step_s_seconds_leave_the_first_out() -> None:
    def steps(seconds: float) -> StepsEnded:
        return StepsEnded(step=1, epoch=1.0, seconds_per_step=seconds)

    assert step_seconds([steps(9.0), EpochEnded(epoch=1.0, step=1), steps(1.0), steps(2.0), steps(3.0)]) == 2.0
    assert step_seconds([steps(9.0)]) == 9.0
    assert step_seconds([]) is None
    assert step_seconds([RunStarted(), steps(9.0), steps(9.0), RunStarted(), steps(2.0), RunStarted()]) == 2.0


@pytest.mark.parametrize("name", ["sgwu", "agwu"])
def test_where_q_is_not_measured_for_every_push_it_is_counted_as_often_as_it_was(name: str) -> None:
    work = workload(name, rule={"every": 1}, epochs=3, samples=200)
    events = run(work, cluster(10, 30, evaluations_per_second=50))[1]
    rounds = [event for event in events if isinstance(event, RoundEnded)]
    assert all(0 < (event.q_measured or 0) < event.pushes for event in rounds)
    assert [w.evaluations_per_second for w in measured_cluster(events, work).worker] == pytest.approx([50, 50])
