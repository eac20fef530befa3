"""What a layer-sharded run does next: orders for facts, without a cluster."""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from daskcnn.errors import ClusterError, Diverged, Interrupted, Lost
from daskcnn.events import (
    EpochEnded,
    KernelsSharded,
    RunContinued,
    RunPaused,
    StepsEnded,
    Warned,
    WorkerIgnored,
    WorkerJoined,
    WorkerLeft,
    WorkerLeftOut,
    WorkerLost,
    WorkersCalibrated,
)
from daskcnn.nn.score import Score
from daskcnn.sharded.balance import WorkerLink, WorkerLinks
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.coordinator import GO_BACK, Phase
from daskcnn.training.coordinator.departures import FAR, LONGEST
from daskcnn.training.coordinator.layer_records import LayerSnapshot
from daskcnn.training.coordinator.orders import Order
from daskcnn.training.coordinator.shares import REPORTS
from daskcnn.training.judging import JudgedPart
from tests.training.layer_shell import Shell, balancing, row_of, settings_of, spent_by

BOOK = {"best": 0.0, "worse": 0, "epochs": 2, "told": False, "by_heart": False, "rate_scale": 1.0}


def kinds(out: list[Order]) -> list[type]:
    """The orders' types; of those that log, the events'."""
    return [type(order.event) if isinstance(order, orders.Log) else type(order) for order in out]


def end_of(out: list[Order]) -> orders.End:
    end = out[-1]
    assert isinstance(end, orders.End)
    return end


def begun(**changed: Any) -> Shell:
    """Two equal workers in their first segment."""
    shell = Shell(settings_of(**changed))
    shell.start(a=1.0, b=1.0)
    shell.links()
    return shell


# --- the way of a run ---


def test_a_run_begins_with_links_and_shares() -> None:
    shell = Shell()
    assert shell.start(a=1.0, b=3.0) == [
        orders.Log(WorkersCalibrated(workers=[row_of("a", 1.0), row_of("b", 3.0)])),
        orders.MeasureLinks(1, "a", ("a", "b")),
    ]
    log, place, run = shell.links()
    assert log == orders.Log(
        KernelsSharded(
            home="a",
            kernels={"a": {"conv1": 30}, "b": {"conv1": 10}},
            divided={"a": {"conv1": "kernels"}, "b": {"conv1": "kernels"}},
            of={"conv1": 40},
            eq2=7,
        )
    )
    assert isinstance(place, orders.Place)
    assert (place.life, place.step, place.shares.kernels) == (2, 0, ({"a": 30, "b": 10},))
    assert run == orders.RunSegment(2, 0, 10)


def test_a_worker_alone_has_no_links_to_measure() -> None:
    assert kinds(Shell().start(a=1.0)) == [WorkersCalibrated, KernelsSharded, orders.Place, orders.RunSegment]


def test_shares_by_speeds_alone_order_no_links() -> None:
    out = Shell(settings_of(measures_links=False)).start(a=1.0, b=3.0)
    assert kinds(out) == [WorkersCalibrated, KernelsSharded, orders.Place, orders.RunSegment]


def test_a_snapshot_that_is_judged_on_a_part_has_no_score_and_the_last_one_is_judged_on_all() -> None:
    shell = Shell(settings_of(sized=True, validation=400))
    shell.start(a=1.0, b=3.0)
    shell.links()
    shell.steps(10)
    assert shell.pieces()[-1] == orders.Judge(JudgedPart(80, 180, 1))
    keep, _ = shell.judged(99)
    assert isinstance(keep, orders.Keep)
    assert (keep.validation, keep.book["best"]) == (None, 0.0)
    assert keep.book["judging"]["layer"]["judged"] > 0
    epoch, save, *_ = shell.counted()
    assert isinstance(epoch, orders.Log)
    assert isinstance(epoch.event, EpochEnded)
    assert epoch.event.validation is not None
    assert epoch.event.validation.samples == 100
    assert save == orders.Save(1.0, keep.book, ("layer",), None)
    shell.steps(10)
    assert shell.pieces()[-1] == orders.Judge(JudgedPart(80, 480))
    assert shell.judged(99)[0] == orders.Keep(20, 2.0, ANY, Score(10.0, 99, 400))


def test_an_epoch_ends_with_a_judged_snapshot() -> None:
    shell = begun()
    assert shell.steps(9) == []
    assert shell.step() == [orders.Collect(2, 10)]
    to_judge = BOOK | {"to_judge": True}
    assert shell.pieces() == [orders.Keep(10, 1.0, to_judge, None), orders.Judge(JudgedPart(80, 100))]
    book, score = BOOK | {"best": 0.05}, Score(10.0, 1, 20)
    assert shell.judged() == [orders.Keep(10, 1.0, book, score), orders.AskCounters(1)]
    epoch, save, place, run = shell.counted()
    assert save == orders.Save(1.0, book, ("layer",), score)
    assert isinstance(place, orders.Place)
    assert place.step == 10
    assert run == orders.RunSegment(3, 10, 20)
    assert isinstance(epoch, orders.Log)
    assert epoch.event.record() == {
        "event": "epoch",
        "epoch": 1.0,
        "epochs": 2,
        "step": 10,
        "loss": 1.0,
        "accuracy": 0.5,
        "validation": {"accuracy": 0.05, "loss": 0.5, "auc": None},
        "samples_per_second": 80 / 13,
        "lr": 0.1,
        "seconds": 13.0,  # ten steps, the pieces and the score took a second each, the links one
        "workers": [
            {**spent_by(worker, 0.5).model_dump(), "samples": 80, "wait": 0.0, "communication": 0.0} for worker in "ab"
        ],
    }


def test_a_run_ends_saved_and_judged() -> None:
    shell = begun()
    shell.epoch()
    out = shell.epoch()
    assert kinds(out) == [EpochEnded, orders.Save, orders.CancelAll, orders.End]
    assert end_of(out) == orders.End("done")
    assert (shell.kept, shell.saved) == (20, 20)
    assert shell.coordinator.ended
    assert shell.lose("a") == []


def test_snapshots_within_an_epoch_are_saved_where_a_checkpoint_is_due() -> None:
    shell = begun(checkpoint_every=0.4)
    assert shell.steps(4) == [orders.Collect(2, 4)]
    keep, save, place, run = shell.pieces()
    assert keep == orders.Keep(4, 0.4, BOOK, None)
    assert save == orders.Save(0.4, BOOK, ("layer",), None)
    assert isinstance(place, orders.Place)
    assert run == orders.RunSegment(3, 4, 8)


def test_a_chain_of_steps_is_cut_without_a_checkpoint() -> None:
    shell = begun(chain=3)
    assert shell.steps(3) == [orders.Collect(2, 3)]
    assert kinds(shell.pieces()) == [orders.Keep, orders.Place, orders.RunSegment]
    assert shell.end == 6


def test_steps_are_reported_with_their_seconds() -> None:
    shell = begun(report_every=4)
    log, ask = shell.steps(4)
    assert isinstance(log, orders.Log)
    assert log.event.record() == {
        "event": "steps",
        "step": 4,
        "epoch": 0.4,
        "loss": 1.0,
        "lr": 0.1,
        "seconds_per_step": 1.0,
        "workers": [{"name": worker, "kernels": {"conv1": 20}} for worker in "ab"],
    }
    assert ask == orders.AskCounters(1)
    assert kinds(shell.steps(4)) == [StepsEnded], "the answer is not there yet, and nobody is asked twice"


def test_counters_that_are_awaited_at_an_epochs_end_are_asked_for_once_more() -> None:
    shell = begun(report_every=4)
    shell.steps(10)
    shell.pieces()
    assert kinds(shell.judged()) == [orders.Keep]
    assert shell.counted() == [orders.AskCounters(2)]
    shell.counted()
    (epoch,) = shell.events(EpochEnded)
    assert [row.busy for row in epoch.workers] == [100.0, 100.0], "both answers count"


def test_a_worker_waits_only_while_it_has_kernels() -> None:
    shell = begun()
    shell.seconds = dict.fromkeys("abc", 0.01)
    shell.steps(3)
    shell.come("c", 1.0)
    shell.stopped()
    shell.steps(shell.end - shell.trained)
    shell.pieces()
    shell.links()
    came = shell.now
    shell.steps(shell.end - shell.trained)
    shell.pieces()
    shell.judged()
    judged = shell.now
    shell.now += 30.0  # until the counters are there
    while orders.AskCounters in shell.open:
        shell.counted()
    (epoch,) = shell.events(EpochEnded)
    there = {row.name: row.wait + row.busy for row in epoch.workers}
    assert there["a"] == there["b"] == epoch.seconds - 1, "the links took a second before anything was shared"
    assert there["c"] == judged - came


def test_a_worker_that_is_gone_does_not_wait_for_others() -> None:
    shell = begun(report_every=3, checkpoint_every=0.5, least={"cpu": 2}, wait=1000.0)
    shell.seconds = dict.fromkeys("abc", 0.001)
    shell.steps(3)
    shell.counted()
    shell.steps(2)
    shell.pieces()
    shell.lose("b")
    lost = shell.now
    shell.then(facts.Tick, after=100.0)
    shell.come("c", 1.0)
    shell.links()
    shell.epoch()
    (epoch,) = shell.events(EpochEnded)
    there = {row.name: row.wait + row.busy for row in epoch.workers}
    assert there["b"] < lost < there["a"]


@pytest.mark.parametrize(("right", "epochs"), [([5, 4, 4], 3), ([5, 4, 6, 6, 6], 5), ([1, 2, 3, 4, 5, 6], 6)])
def test_a_run_stops_early_without_a_better_accuracy(right: list[int], epochs: int) -> None:
    shell = begun(epochs=6, patience=2)
    for correct in right:
        assert not shell.coordinator.ended
        shell.epoch(correct)
    assert end_of(shell.orders) == orders.End("done")
    assert shell.saved == 10 * epochs


def test_a_resumed_run_goes_on_from_its_snapshot() -> None:
    shell = Shell(settings_of(checkpoint_every=0.5), LayerSnapshot(12, 1.2, {"best": 0.4, "worse": 1}))
    shell.start(a=1.0)
    assert (shell.trained, shell.end) == (12, 17)
    shell.go_on()
    assert shell.saved == 20
    assert shell.coordinator.snapshot.book == BOOK | {"best": 0.4, "worse": 2}


@pytest.mark.parametrize("snapshot", [LayerSnapshot(20, 2.0), LayerSnapshot(10, 1.0, {"best": 0.4, "worse": 2})])
def test_a_run_that_was_over_ends_at_once(snapshot: LayerSnapshot) -> None:
    out = Shell(settings_of(patience=2), snapshot).start(a=1.0)
    assert kinds(out) == [WorkersCalibrated, orders.CancelAll, orders.End]
    assert end_of(out) == orders.End("done")


# --- before it begins ---


def test_a_worker_that_cannot_calibrate_is_left_out_and_the_run_starts() -> None:
    shell = Shell()
    for worker in "ab":
        assert shell.then(facts.WorkerReady, worker, "cpu") == [orders.Calibrate(worker)]
    assert shell.then(facts.Calibrated, "a", 1.0, row_of("a", 1.0)) == []
    out = shell.then(facts.CalibrationFailed, "b", "needs 3 GB of memory, has 2 GB", "lower train.batch_size")
    left_out = WorkerLeftOut(worker="b", reason="needs 3 GB of memory, has 2 GB", remedy="lower train.batch_size")
    assert out[:2] == [orders.Log(left_out), orders.Dismiss("b", for_good=True)]
    assert kinds(out)[2:] == [WorkersCalibrated, KernelsSharded, orders.Place, orders.RunSegment]


@pytest.mark.parametrize("calibrated", [False, True])
def test_a_worker_that_dies_while_others_calibrate_is_left_out(calibrated: bool) -> None:
    shell = Shell()
    for worker in "ab":
        shell.then(facts.WorkerReady, worker, "cpu")
    if calibrated:
        shell.then(facts.Calibrated, "b", 1.0, row_of("b", 1.0))
    assert kinds(shell.lose("b")) == [WorkerLeftOut, orders.Dismiss]
    out = shell.then(facts.Calibrated, "a", 1.0, row_of("a", 1.0))
    assert kinds(out) == [WorkersCalibrated, KernelsSharded, orders.Place, orders.RunSegment]


def test_a_worker_that_hangs_while_it_calibrates_is_left_out() -> None:
    shell = Shell()
    for worker in "ab":
        shell.then(facts.WorkerReady, worker, "cpu")
    shell.then(facts.Calibrated, "a", 1.0, row_of("a", 1.0))
    assert shell.then(facts.Tick, after=290.0) == []
    out = shell.then(facts.Tick, after=20.0)
    assert kinds(out)[:3] == [WorkerLeftOut, orders.Dismiss, WorkersCalibrated]
    remedy = "is it busy with other tasks, such as predictions? Let them end, or raise cluster.stall_timeout"
    assert shell.events(WorkerLeftOut)[0].remedy == remedy
    assert shell.then(facts.Calibrated, "b", 1.0, row_of("b", 1.0)) == [], "too late"


def test_no_usable_worker_ends_the_run() -> None:
    shell = Shell()
    for worker in "abc":
        shell.then(facts.WorkerReady, worker, "cpu")
    shell.then(facts.CalibrationFailed, "a", "no GPU", "start it elsewhere")
    shell.then(facts.CalibrationFailed, "b", "needs 3 GB", "")
    end = end_of(shell.then(facts.CalibrationFailed, "c", "no GPU", "start it elsewhere"))
    assert end.status == "unusable"
    assert isinstance(end.error, ClusterError)
    assert str(end.error) == "no worker is usable:\n  a, c: no GPU; start it elsewhere\n  b: needs 3 GB"


# --- workers that come ---


def test_a_worker_that_comes_takes_its_kernels_at_a_boundary_and_no_step_is_trained_twice() -> None:
    shell = begun()
    shell.steps(2)
    assert shell.then(facts.WorkerReady, "c", "cpu") == [orders.Calibrate("c")]
    assert shell.then(facts.WorkerReady, "a", "cpu") == []
    log, stop = shell.then(facts.Calibrated, "c", 0.5, row_of("c", 0.5))
    assert log == orders.Log(WorkersCalibrated(workers=[row_of("c", 0.5)]))
    assert stop == orders.StopSegment(2)
    shell.stopped()
    shell.steps(4)
    keep, measure = shell.pieces()
    assert keep == orders.Keep(6, 0.6, BOOK, None)
    assert measure == orders.MeasureLinks(3, "a", ("c",)), "the others' links are known"
    joined, shards, place, run = shell.links()
    assert joined == orders.Log(WorkerJoined(worker="c"))
    assert isinstance(shards, orders.Log)
    assert isinstance(shards.event, KernelsSharded)
    assert shards.event.kernels == {"a": {"conv1": 10}, "b": {"conv1": 10}, "c": {"conv1": 20}}
    assert isinstance(place, orders.Place)
    assert (place.life, place.step) == (4, 6)
    assert run == orders.RunSegment(4, 6, 10)
    shell.go_on()
    assert shell.saved == 20
    assert sum(isinstance(fact, facts.StepDone) for fact in shell.told) == 20


def test_a_worker_that_comes_back_under_its_name_is_measured_anew() -> None:
    shell = begun()
    shell.lose("b")
    shell.steps(1)
    shell.come("b", 1.0)
    shell.stopped()
    shell.steps(shell.end - shell.trained)
    assert orders.MeasureLinks(4, "a", ("a", "b")) not in shell.orders
    assert shell.pieces()[-1] == orders.MeasureLinks(4, "a", ("b",))


def test_links_of_workers_that_come_while_links_are_measured_are_measured_next() -> None:
    shell = Shell()
    shell.start(a=1.0, b=1.0)
    shell.come("c", 1.0)
    assert shell.links() == [orders.MeasureLinks(2, "a", ("c",))]
    assert kinds(shell.links()) == [WorkerJoined, KernelsSharded, orders.Place, orders.RunSegment]


def test_a_newcomer_that_cannot_be_calibrated_or_is_lost_changes_nothing() -> None:
    shell = begun()
    shell.then(facts.WorkerReady, "c", "cpu")
    assert kinds(shell.then(facts.CalibrationFailed, "c", "other versions", "")) == [WorkerLeftOut, orders.Dismiss]
    shell.then(facts.WorkerReady, "d", "cpu")
    assert kinds(shell.lose("d")) == [WorkerLeftOut, orders.Dismiss]
    shell.then(facts.WorkerReady, "e", "cpu")
    assert kinds(shell.then(facts.Tick, after=1000.0)) == [WorkerLeftOut, orders.Dismiss]
    shell.go_on()
    assert len(shell.events(KernelsSharded)) == 1


def test_a_newcomer_that_is_lost_before_it_has_kernels_costs_no_step() -> None:
    shell = begun()
    shell.steps(2)
    shell.come("c", 1.0)
    assert kinds(shell.lose("c")) == [WorkerLost, orders.Dismiss]
    shell.go_on()
    assert sum(isinstance(fact, facts.StepDone) for fact in shell.told) == 20
    assert shell.warnings() == []


def test_a_worker_that_comes_to_the_end_is_mentioned() -> None:
    shell = begun(epochs=1)
    shell.steps(10)
    (log,) = shell.then(facts.WorkerReady, "c", "cpu")
    assert isinstance(log, orders.Log)
    assert log.event == WorkerIgnored(address="c", reason="the run is about to end")


@pytest.mark.parametrize("usable", [True, False])
def test_a_run_that_loses_its_last_worker_goes_on_with_one_that_measures_itself(usable: bool) -> None:
    shell = begun(chain=3)
    shell.steps(3)
    shell.pieces()
    shell.steps(1)
    shell.then(facts.WorkerReady, "c", "cpu")
    assert kinds(shell.lose("a", "b"))[-1] is not orders.End
    if usable:
        *_, place, run = shell.then(facts.Calibrated, "c", 1.0, row_of("c", 1.0))
        assert isinstance(place, orders.Place)
        assert (place.step, run) == (3, orders.RunSegment(place.life, 3, 6))
    else:
        end = end_of(shell.then(facts.CalibrationFailed, "c", "out of memory", ""))
        assert (end.status, shell.saved) == ("lost", 3)


@pytest.mark.parametrize("left", [1, 0])
def test_a_run_with_too_few_workers_pauses_behind_its_snapshot(left: int) -> None:
    shell = begun(chain=3, least={"cpu": 2}, wait=10.0)
    shell.steps(3)
    shell.pieces()
    shell.steps(1)
    out = shell.lose(*("a", "b")[left:])
    assert (kinds(out)[-1], orders.CancelAll in map(type, out)) == (RunPaused, True)
    assert shell.then(facts.Tick, after=9.0) == []
    for worker in ("c", "d")[left:]:
        out = shell.come(worker, 1.0)
    assert kinds(out)[:2] == [RunContinued, WorkersCalibrated]
    shell.go_on()
    assert shell.saved == 20


def test_a_run_that_has_paused_for_too_long_ends_with_its_snapshot_saved() -> None:
    shell = begun(chain=3, least={"cpu": 2}, wait=10.0)
    shell.steps(3)
    shell.pieces()
    shell.lose("b")
    end = end_of(shell.then(facts.Tick, after=11.0))
    assert (end.status, shell.saved) == ("lost", 3)
    assert "at least 2 cpu (cluster.workers): 1 left, and no other came within 10 s" in str(end.error)


# --- workers that leave ---


def test_a_worker_that_leaves_hands_its_kernels_over_at_a_boundary_and_no_step_is_trained_twice() -> None:
    shell = begun()
    shell.steps(2)
    assert shell.leave("a") == [orders.StopSegment(2)]
    assert shell.leave("a") == [], "told twice"
    shell.stopped()
    shell.steps(4)
    keep, left, dismiss, shards, place, run = shell.pieces()
    assert keep == orders.Keep(6, 0.6, BOOK, None)
    assert left == orders.Log(WorkerLeft(worker="a", reason="it is shut down"))
    assert dismiss == orders.Dismiss("a", for_good=True)
    assert isinstance(shards, orders.Log)
    assert isinstance(shards.event, KernelsSharded)
    assert (shards.event.home, shards.event.kernels) == ("b", {"b": {"conv1": 40}})
    assert isinstance(place, orders.Place)
    assert (place.step, run) == (6, orders.RunSegment(place.life, 6, 10))
    shell.go_on()
    assert sum(isinstance(fact, facts.StepDone) for fact in shell.told) == 20
    assert shell.warnings() == []


def test_a_worker_that_is_gone_before_it_has_handed_over_is_lost() -> None:
    shell = begun()
    shell.steps(2)
    shell.leave("b")
    assert kinds(shell.lose("b"))[:3] == [WorkerLost, orders.Dismiss, Warned]
    assert shell.warnings() == ["back to the snapshot of step 0, on 1 workers"]


def test_workers_that_leave_are_left_out_where_the_run_goes_back_meanwhile() -> None:
    shell = Shell()
    shell.start(a=1.0, b=1.0, c=1.0)
    shell.links()
    shell.steps(1)
    shell.leave("b")
    out = shell.lose("c")
    assert kinds(out) == [
        *(WorkerLost, orders.Dismiss, Warned, orders.CancelAll),
        *(WorkerLeft, orders.Dismiss, KernelsSharded, orders.Place, orders.RunSegment),
    ]


def test_the_last_workers_leave_a_snapshot_that_is_saved() -> None:
    shell = begun()
    shell.steps(2)
    shell.leave("a", "b")
    shell.stopped()
    shell.steps(4)
    end = end_of(shell.pieces())
    assert (end.status, shell.saved) == ("lost", 6)
    assert "it was the last of the run" in str(end.error)


def test_a_worker_that_leaves_while_links_are_measured_is_left_out_of_them() -> None:
    shell = Shell()
    shell.start(a=1.0, b=1.0, c=1.0)
    assert kinds(shell.leave("c")) == [orders.CancelAll, WorkerLeft, orders.Dismiss, orders.MeasureLinks]
    assert shell.orders[-1] == orders.MeasureLinks(2, "a", ("a", "b"))


def test_a_worker_that_leaves_before_it_has_kernels_goes_at_once() -> None:
    shell = Shell()
    shell.then(facts.WorkerReady, "a", "cpu")
    shell.then(facts.WorkerReady, "b", "cpu")
    assert kinds(shell.leave("b")) == [WorkerLeftOut, orders.Dismiss]
    shell.then(facts.Calibrated, "a", 1.0, row_of("a", 1.0))
    shell.steps(1)
    shell.come("c", 1.0)
    assert kinds(shell.leave("c")) == [WorkerLeft, orders.Dismiss]


# --- snapshots by time ---


def test_a_snapshot_is_made_after_so_many_seconds_and_the_run_goes_on_as_it_was() -> None:
    shell = begun(snapshot_every=60.0)
    shell.steps(2)
    assert shell.then(facts.Tick, after=50.0) == []
    assert shell.then(facts.Tick, after=10.0) == [orders.StopSegment(2)]
    shell.stopped()
    assert shell.then(facts.Tick) == [], "it ends already"
    shell.steps(4)
    assert kinds(shell.pieces()) == [orders.Keep, orders.Place, orders.RunSegment]
    shell.lose("b")
    assert shell.warnings() == ["back to the snapshot of step 6, on 1 workers"]
    shell.go_on()
    assert shell.saved == 20


# --- going back ---


def test_a_lost_worker_takes_the_run_back_to_the_snapshot() -> None:
    shell = begun(checkpoint_every=0.4)
    shell.steps(4)
    shell.pieces()
    shell.steps(2)
    lost, dismiss, warned, cancel, shards, place, run = shell.lose("b")
    assert lost == orders.Log(WorkerLost(worker="b", reason="connection lost", samples_moved=0))
    assert dismiss == orders.Dismiss("b")
    assert warned == orders.Log(Warned(message="back to the snapshot of step 4, on 1 workers"))
    assert cancel == orders.CancelAll()
    assert isinstance(shards, orders.Log)
    assert isinstance(shards.event, KernelsSharded)
    assert shards.event.kernels == {"a": {"conv1": 40}}
    assert isinstance(place, orders.Place)
    assert (place.life, place.step) == (4, 4)
    assert run == orders.RunSegment(4, 4, 8)
    shell.go_on()
    assert shell.saved == 20


def test_an_epoch_counts_all_of_its_steps_where_a_loss_takes_the_run_back_to_a_snapshot_within_it() -> None:
    shell = begun(checkpoint_every=0.4)
    shell.steps(4)
    shell.pieces()
    shell.steps(2)
    shell.lose("b")
    shell.go_on()
    first, second = shell.events(EpochEnded)
    assert [epoch.workers[0].samples for epoch in (first, second)] == [80, 80]
    assert first.seconds > second.seconds, "two steps were made twice"


def test_samples_that_are_trained_again_count_once() -> None:
    shell = begun()
    shell.steps(6)
    shell.lose("b")
    shell.epoch()
    (epoch,) = shell.events(EpochEnded)
    assert epoch.workers[0].samples == 80


def test_a_worker_lost_while_links_are_measured_has_them_measured_anew() -> None:
    shell = Shell()
    shell.start(a=1.0, b=1.0, c=1.0)
    late = facts.LinksMeasured(1, WorkerLinks(), 5.0)
    out = shell.lose("a")
    assert kinds(out) == [WorkerLost, orders.Dismiss, Warned, orders.CancelAll, orders.MeasureLinks]
    assert out[-1] == orders.MeasureLinks(2, "b", ("b", "c"))
    assert shell.tell(late) == [], "of workers that are no longer there"
    assert kinds(shell.links()) == [KernelsSharded, orders.Place, orders.RunSegment]


def test_links_of_a_worker_that_is_lost_while_the_run_pauses_are_measured_anew() -> None:
    """It may come back to another place."""
    shell = Shell(settings_of(wanted={"cpu": 4}, least={"cpu": 2}, measures_links=True))
    shell.start(a=1.0, b=1.0)
    shell.links()
    shell.steps(2)
    shell.lose("b")
    shell.lose("a")
    shell.come("a", 1.0)
    (asked,) = [order for order in shell.come("b", 1.0) if isinstance(order, orders.MeasureLinks)]
    assert {*asked.workers} == {"a", "b"}


def test_the_last_worker_takes_the_run_with_it_and_the_snapshot_is_saved() -> None:
    shell = begun(chain=3)
    shell.steps(3)
    shell.pieces()
    out = shell.lose("a", "b")
    assert kinds(out) == [
        *(WorkerLost, orders.Dismiss, WorkerLost, orders.Dismiss),
        *(orders.Save, orders.CancelAll, orders.End),
    ]
    end = end_of(out)
    assert end.status == "lost"
    assert isinstance(end.error, Lost)
    assert str(end.error) == "worker b (tcp://b): connection lost, and it was the last of the run"
    assert shell.saved == 3


def test_a_worker_lost_while_a_snapshot_is_judged_costs_no_step() -> None:
    shell = begun()
    shell.steps(10)
    shell.pieces()
    assert kinds(shell.lose("b")) == [WorkerLost, orders.Dismiss, orders.CancelAll, orders.Judge]
    out = shell.judged()
    assert kinds(out) == [
        *(orders.Keep, EpochEnded, orders.Save, KernelsSharded),
        *(orders.Place, orders.RunSegment),
    ]
    assert (shell.trained, shell.end) == (10, 20)


def test_a_worker_lost_while_the_counters_are_awaited_costs_no_step() -> None:
    shell = begun()
    shell.steps(10)
    shell.pieces()
    shell.judged()
    out = shell.lose("b")
    assert kinds(out) == [
        *(WorkerLost, orders.Dismiss, orders.CancelAll, EpochEnded, orders.Save),
        *(KernelsSharded, orders.Place, orders.RunSegment),
    ]


def test_tasks_out_of_step_take_the_run_back() -> None:
    shell = begun()
    shell.steps(3)
    out = shell.then(facts.OutOfStep, 2, "somebody took it")
    assert out[0] == orders.Log(Warned(message="somebody took it: back to step 0"))
    assert kinds(out)[1:] == [orders.CancelAll, KernelsSharded, orders.Place, orders.RunSegment]
    assert shell.then(facts.OutOfStep, 2, "somebody took it") == [], "that life is over"


def test_tasks_that_are_never_in_step_end_the_run() -> None:
    shell = begun()
    for _ in range(GO_BACK - 1):
        shell.then(facts.OutOfStep, shell.life, "somebody took it")
        assert not shell.coordinator.ended
    end = end_of(shell.then(facts.OutOfStep, shell.life, "somebody took it"))
    assert isinstance(end.error, Lost)
    message = "somebody took it, for the 5th time behind step 0: do all workers reach each other"
    assert message in str(end.error)


def test_tasks_out_of_step_now_and_then_do_not() -> None:
    shell = begun(chain=1)
    for _ in range(GO_BACK):
        shell.then(facts.OutOfStep, shell.life, "somebody took it")
        shell.step()
        shell.pieces()
    for _ in range(GO_BACK - 1):
        shell.then(facts.OutOfStep, shell.life, "somebody took it")
    assert not shell.coordinator.ended


def test_facts_of_an_earlier_life_change_nothing() -> None:
    shell = begun(checkpoint_every=0.4)
    shell.steps(4)
    shell.pieces()
    shell.steps(4)
    shell.lose("b")
    old = [fact for fact in shell.told if not isinstance(fact, facts.WorkerReady | facts.Calibrated)]
    before = shell.coordinator.done, shell.coordinator.snapshot
    for fact in old:
        assert shell.tell(fact) == []
    assert (shell.coordinator.done, shell.coordinator.snapshot) == before


def test_a_step_that_is_told_twice_counts_once() -> None:
    shell = begun()
    shell.steps(3)
    for fact in shell.told[-3:]:
        assert shell.tell(fact) == []
    assert shell.coordinator.done == 3
    shell.epoch()
    assert shell.events(EpochEnded)[0].workers[0].samples == 80


# --- silence ---


def silent(shell: Shell, *stuck: str) -> list[Order]:
    """The stall timeout goes by, and the answer to who is waited for."""
    shell.then(facts.Tick)
    assert shell.then(facts.Tick, after=301.0) == [orders.AskWaiting(("layer",))]
    assert shell.then(facts.Tick) == [], "it is asked once"
    return shell.tell(facts.Waits(frozenset(), shell.now, {"layer": stuck} if stuck else {}))


@pytest.mark.parametrize("stuck", [("b",), ("a", "b"), ()])
def test_a_stalled_run_ends_and_names_whom_it_waits_for(stuck: tuple[str, ...]) -> None:
    shell = begun(chain=3)
    shell.steps(3)
    shell.pieces()
    shell.step()
    out = silent(shell, *stuck)
    assert kinds(out) == [orders.Save, orders.CancelAll, orders.End]
    end = end_of(out)
    assert end.status == "lost"
    names = ", ".join(stuck) or "the scheduler"
    assert str(end.error) == f"step 4: no progress for 300 s, waiting for {names}"


def test_a_worker_that_is_not_heard_of_is_lost_and_the_others_go_on() -> None:
    shell = begun(chain=3)
    shell.steps(3)
    shell.pieces()
    shell.step()
    shell.then(facts.Tick)
    shell.then(facts.Tick, after=301.0)
    out = shell.tell(facts.Waits(frozenset(), shell.now, {"layer": ("b",)}, silent=("b",)))
    assert orders.Dismiss("b") in out
    assert orders.End not in kinds(out)
    assert shell.events(WorkerLost)[0].reason == "no sign of life for 300 s"
    assert (shell.coordinator.done, [*shell.coordinator.roster.alive]) == (3, ["a"])


def test_a_run_of_which_no_worker_is_heard_of_ends() -> None:
    shell = begun()
    shell.then(facts.Tick)
    shell.then(facts.Tick, after=301.0)
    out = shell.tell(facts.Waits(frozenset(), shell.now, {"layer": ("a", "b")}, silent=("a", "b")))
    assert str(end_of(out).error) == "step 0: no progress for 300 s, waiting for a, b"


def test_pieces_and_counters_that_do_not_come_end_the_run_too() -> None:
    shell = begun()
    shell.steps(10)
    assert str(end_of(silent(shell, "b")).error).startswith("weights after step 10: no progress")
    shell = begun()
    shell.steps(10)
    shell.pieces()
    shell.judged()
    out = silent(shell, "b")
    assert str(end_of(out).error).startswith("counters: no progress")
    assert shell.saved == 10


def test_a_score_may_take_what_its_samples_take_besides() -> None:
    shell = begun(validation=2000, stall_timeout=10.0)
    shell.steps(10)
    shell.pieces()
    shell.then(facts.Tick)
    assert shell.then(facts.Tick, after=5000.0) == [], "2,000 samples, two workers, a second each, five times as long"
    assert kinds(shell.then(facts.Tick, after=11.0)) == [orders.AskWaiting]
    end = end_of(shell.tell(facts.Waits(frozenset(), shell.now, {"layer": ("b",)})))
    assert str(end.error) == "score of step 10: no progress for 5010 s, waiting for b"


def test_a_step_that_ends_meanwhile_is_progress() -> None:
    shell = begun()
    shell.then(facts.Tick)
    assert kinds(shell.then(facts.Tick, after=301.0)) == [orders.AskWaiting]
    shell.step()
    assert shell.tell(facts.Waits(frozenset(), shell.now, {"layer": ("b",)})) == []
    assert shell.then(facts.Tick, after=299.0) == []
    assert kinds(shell.then(facts.Tick, after=2.0)) == [orders.AskWaiting]


def test_the_time_that_orders_take_is_no_silence() -> None:
    shell = begun()
    assert shell.then(facts.Tick, after=1000.0) == [], "the pieces have been sent until now"


# --- the end ---


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_run_without_another_checkpoint(loss: float) -> None:
    shell = begun(chain=3)
    shell.steps(3)
    shell.pieces()
    out = shell.step(loss)
    assert kinds(out) == [orders.CancelAll, orders.End]
    end = end_of(out)
    assert end.status == "diverged"
    assert isinstance(end.error, Diverged)
    assert str(end.error) == f"loss = {loss} at step 3: training diverged; lower train.lr"


def test_weights_that_are_not_finite_are_not_kept() -> None:
    shell = begun()
    shell.steps(10)
    out = shell.pieces(finite=False)
    assert kinds(out) == [orders.CancelAll, orders.End]
    assert "weights after step 10 are not finite: training diverged; lower train.lr" in str(end_of(out).error)


def test_a_signal_keeps_the_steps_under_way() -> None:
    shell = begun()
    shell.steps(3)
    assert shell.interrupt() == [orders.StopSegment(2)]
    assert shell.interrupt() == []
    assert shell.stopped() == []
    assert shell.steps(4) == [orders.Collect(2, 7)]
    out = shell.pieces()
    assert kinds(out) == [orders.Keep, orders.Save, orders.CancelAll, orders.End]
    end = end_of(out)
    assert end.status == "interrupted"
    assert isinstance(end.error, Interrupted)
    assert (end.error.signum, shell.saved) == (15, 7)


def test_a_signal_before_the_first_step_keeps_what_the_run_began_with() -> None:
    shell = begun()
    shell.interrupt()
    shell.end = 0
    assert shell.stopped() == [orders.Collect(2, 0)]
    assert kinds(shell.pieces()) == [orders.Keep, orders.Save, orders.CancelAll, orders.End]


@pytest.mark.parametrize("trouble", ["lost", "out of step", "scheduler"])
def test_a_signal_keeps_the_last_snapshot_where_the_steps_cannot_end(trouble: str) -> None:
    shell = begun(chain=3)
    shell.steps(3)
    shell.pieces()
    shell.step()
    shell.interrupt()
    out = {
        "lost": lambda: shell.lose("b"),
        "out of step": lambda: shell.then(facts.OutOfStep, shell.life, "somebody took it"),
        "scheduler": lambda: shell.then(facts.SchedulerGone, Lost("scheduler: connection lost")),
    }[trouble]()
    assert kinds(out)[-3:] == [orders.Save, orders.CancelAll, orders.End]
    assert end_of(out).status == "interrupted"
    assert shell.saved == 3


@pytest.mark.parametrize(("seconds", "within"), [(1.0, 4.0 + FAR), (20.0, LONGEST)])
@pytest.mark.parametrize("collecting", [False, True])
def test_a_signal_does_not_wait_for_a_worker_that_hangs(seconds: float, within: float, collecting: bool) -> None:
    shell = begun(chain=3)
    shell.steps(3)
    shell.pieces()
    for _ in range(2):
        shell.then(facts.Tick, after=seconds)
        shell.now -= 1.0
        shell.step()
    shell.interrupt()
    by = shell.now + within
    shell.stopped()
    if collecting:
        shell.steps(shell.end - shell.trained)
    shell.now = by
    assert shell.then(facts.Tick, after=-0.1) == []
    out = shell.then(facts.Tick, after=0.1)
    assert kinds(out) == [orders.Save, orders.CancelAll, orders.End]
    assert end_of(out).status == "interrupted"
    assert shell.saved == 3


@pytest.mark.parametrize("judged", [False, True])
def test_a_signal_at_an_epochs_end_waits_for_nobody(judged: bool) -> None:
    shell = begun()
    shell.steps(10)
    shell.pieces()
    if judged:
        shell.judged()
    told = [EpochEnded] if judged else []
    assert kinds(shell.interrupt()) == [*told, orders.Save, orders.CancelAll, orders.End]
    assert shell.saved == 10


@pytest.mark.parametrize("step", [10, 20])
@pytest.mark.parametrize("early", [False, True])
def test_an_epoch_that_a_signal_has_left_unjudged_is_judged_by_the_run_that_goes_on(step: int, early: bool) -> None:
    shell = begun()
    if step == 20:
        shell.epoch()
    shell.steps(10)
    if early:  # while the pieces are collected
        shell.interrupt()
    shell.pieces()
    if not early:
        shell.interrupt()
    assert shell.coordinator.ended
    again = Shell(snapshot=shell.coordinator.snapshot)
    judge = again.start(a=1.0, b=1.0)[-1]
    assert isinstance(judge, orders.Judge)
    again.judged(7)
    again.go_on()
    epochs = again.events(EpochEnded)
    assert [event.step for event in epochs] == ([10, 20] if step == 10 else [20])
    assert (epochs[0].validation.accuracy, again.saved) == (0.35, 20)
    assert "to_judge" not in again.coordinator.snapshot.book


def test_an_epoch_is_judged_that_was_not_when_the_last_worker_was_lost() -> None:
    shell = begun(least={"cpu": 1}, wait=10.0)
    shell.steps(10)
    shell.pieces()
    shell.lose("a", "b")
    out = shell.come("c", 1.0)
    assert isinstance(out[-1], orders.Judge)
    shell.go_on()
    assert [event.step for event in shell.events(EpochEnded)] == [10, 20]


def test_a_signal_before_training_leaves_no_checkpoint() -> None:
    shell = Shell()
    shell.start(a=1.0, b=1.0)
    assert kinds(shell.interrupt()) == [orders.CancelAll, orders.End]


def test_a_lost_scheduler_ends_the_run_and_the_snapshot_is_saved() -> None:
    shell = begun(chain=3)
    shell.steps(3)
    shell.pieces()
    error = Lost("scheduler tcp://s: connection lost")
    out = shell.then(facts.SchedulerGone, error)
    assert kinds(out) == [orders.Save, orders.CancelAll, orders.End]
    assert end_of(out) == orders.End("lost", error)


# --- shares ---


OFTEN = {"report_every": 2, "between_moves": 6}
"""A report every two steps, and kernels that may move after six."""


def reports(shell: Shell, count: int = REPORTS) -> list[Order]:
    for _ in range(count):
        shell.steps(2)
        out = shell.counted()
    return out


def test_kernels_move_away_from_a_worker_that_has_become_slower() -> None:
    shell = begun(samples=800, **OFTEN)
    shell.seconds = {"b": 1.5}
    warned, stop = reports(shell)
    assert isinstance(warned, orders.Log)
    assert isinstance(warned.event, Warned)
    assert warned.event.message.startswith("after step 6: shares no longer fit the workers' speeds: a step takes about")
    assert stop == orders.StopSegment(2)
    shell.stopped()
    shell.steps(shell.end - shell.trained)
    shell.counted()
    keep, shards, place, run = shell.pieces()
    assert keep == orders.Keep(10, 0.1, BOOK, None)
    assert isinstance(shards, orders.Log)
    assert isinstance(shards.event, KernelsSharded)
    assert shards.event.kernels == {"a": {"conv1": 30}, "b": {"conv1": 10}}
    assert isinstance(place, orders.Place)
    assert place.step == 10
    assert run == orders.RunSegment(3, 10, 100)
    shell.go_on()
    assert shell.saved == 200


@pytest.mark.parametrize(("b", "moved"), [(0.55, True), (0.505, False)])
def test_behind_a_snapshot_less_is_enough_and_nobody_is_told(b: float, moved: bool) -> None:
    shell = begun(**OFTEN)
    shell.seconds = {"b": b}
    reports(shell, 5)
    shell.pieces()
    shell.judged()
    out = shell.counted()
    assert (KernelsSharded in kinds(out)) == moved
    assert shell.warnings() == []
    assert shell.trained == 10


def test_kernels_do_not_move_where_no_step_is_left() -> None:
    shell = begun(epochs=1, **OFTEN)
    shell.seconds = {"b": 1.5}
    shell.steps(10)
    for _ in range(REPORTS + 2):
        shell.tell(facts.Tick(shell.now))
    shell.go_on()
    assert shell.warnings() == []
    assert len(shell.events(KernelsSharded)) == 1


def test_an_answer_from_before_a_move_says_nothing_of_the_new_shares() -> None:
    shell = begun(samples=800, **OFTEN)
    shell.seconds = {"b": 1.5}
    reports(shell)
    shell.stopped()
    shell.steps(shell.end - shell.trained)  # asked again, not answered
    shell.pieces()
    shell.counted()
    watch, shares = shell.coordinator.sharing.watch, shell.coordinator.sharing.shares
    assert watch is not None
    assert shares is not None
    assert watch.measured() == shares.balance


def test_who_gets_no_kernels_is_said_once() -> None:
    def slow_link(home: str, measured: Any, links: WorkerLinks) -> Any:
        return balancing(home, measured, WorkerLinks({"b": WorkerLink(1.0, 10.0)}))

    shell = Shell(settings_of(balancing=slow_link))
    shell.start(a=1.0, b=1.0, c=1.0)
    shell.links()
    (told,) = shell.warnings()
    assert told.startswith("worker b gets no kernels of conv1: its share is not worth what it takes to send")
    shell.lose("c")
    assert [each for each in shell.warnings() if "no kernels" in each] == [told]


# --- facts in any order ---

WORKERS = ("a", "b", "c", "d", "e")


class Machine(RuleBasedStateMachine):
    """Workers come and go, hang, answer late or twice; tasks get out of step; a signal comes, or none does."""

    def __init__(self) -> None:
        super().__init__()
        self.shell = Shell(
            settings_of(
                samples=240,
                validation=20,
                stall_timeout=50.0,
                checkpoint_every=0.3,
                patience=2,
                report_every=2,
                between_moves=4,
                chain=4,
                snapshot_every=20.0,
            )
        )
        self.coordinator = self.shell.coordinator
        for worker in WORKERS:
            self.shell.tell(facts.WorkerReady(worker, "cpu", 0.0))

    def calibrates(self) -> bool:
        return self.coordinator.phase is Phase.CALIBRATING

    def trains(self) -> bool:
        return self.shell.trained < self.shell.end

    @precondition(calibrates)
    @rule(first=st.permutations(WORKERS), seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def calibrated(self, first: list[str], seconds: float) -> None:
        for worker in first[:3]:
            self.shell.then(facts.Calibrated, worker, seconds, row_of(worker, seconds))

    @precondition(calibrates)
    @rule(worker=st.sampled_from(WORKERS[:2]))
    def not_calibrated(self, worker: str) -> None:
        self.shell.then(facts.CalibrationFailed, worker, "out of memory", "give it more")

    @precondition(trains)
    @rule(count=st.integers(1, 12))
    def steps_end(self, count: int) -> None:
        for _ in range(count):
            if self.trains():
                self.shell.step()

    @precondition(lambda self: self.trains() and len(self.shell.told) > 80)
    @rule()
    def loss_is_not_finite(self) -> None:
        self.shell.step(float("nan"))

    @precondition(lambda self: orders.MeasureLinks in self.shell.open)
    @rule()
    def links(self) -> None:
        self.shell.links()

    @precondition(lambda self: orders.StopSegment in self.shell.open)
    @rule()
    def segment_stops(self) -> None:
        self.shell.stopped()

    @precondition(lambda self: orders.Collect in self.shell.open)
    @rule()
    def pieces(self) -> None:
        self.shell.pieces()

    @precondition(lambda self: orders.Judge in self.shell.open)
    @rule(correct=st.integers(0, 20))
    def judged(self, correct: int) -> None:
        self.shell.judged(correct)

    @precondition(lambda self: orders.AskCounters in self.shell.open)
    @rule()
    def counted(self) -> None:
        self.shell.counted()

    @rule(worker=st.sampled_from(WORKERS), seconds=st.sampled_from([0.1, 0.5, 2.5]))
    def worker_changes_its_speed(self, worker: str, seconds: float) -> None:
        self.shell.seconds[worker] = seconds

    @precondition(lambda self: orders.AskWaiting in self.shell.open)
    @rule(stuck=st.lists(st.sampled_from(WORKERS), max_size=2), silent=st.booleans())
    def waits(self, stuck: list[str], silent: bool) -> None:
        del self.shell.open[orders.AskWaiting]
        unheard = tuple(dict.fromkeys(stuck)) if silent else ()
        self.shell.tell(facts.Waits(frozenset(), self.shell.now, {"layer": tuple(stuck)}, unheard))

    @precondition(lambda self: len(self.shell.alive) > 2 or len(self.shell.told) > 120)
    @rule(workers=st.lists(st.sampled_from(WORKERS), min_size=1, max_size=2, unique=True))
    def workers_go(self, workers: list[str]) -> None:
        self.shell.lose(*workers)

    @precondition(lambda self: len(self.shell.alive) > 2 or len(self.shell.told) > 120)
    @rule(worker=st.sampled_from(WORKERS))
    def worker_leaves(self, worker: str) -> None:
        self.shell.leave(worker)

    @rule(worker=st.sampled_from((*WORKERS, "late")))
    def worker_comes(self, worker: str) -> None:
        self.shell.then(facts.WorkerReady, worker, "cpu")

    @precondition(lambda self: self.coordinator.roster.calibrating)
    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def newcomer_is_calibrated(self, seconds: float) -> None:
        worker = next(iter(self.coordinator.roster.calibrating))
        self.shell.then(facts.Calibrated, worker, seconds, row_of(worker, seconds))

    @rule()
    def out_of_step(self) -> None:
        self.shell.then(facts.OutOfStep, self.shell.life, "a task was run twice")

    @rule()
    def connection_is_cut(self) -> None:
        self.shell.cut_off()

    @rule(after=st.sampled_from([0.1, 1.0, 30.0]))
    def time_passes(self, after: float) -> None:
        self.shell.then(facts.Tick, after=after)

    @precondition(lambda self: self.coordinator.phase is not Phase.CALIBRATING)
    @rule(after=st.sampled_from([30.0, 60.0]))
    def nothing_happens(self, after: float) -> None:
        self.shell.then(facts.Tick)
        self.shell.then(facts.Tick, after=after)

    @precondition(lambda self: len(self.shell.told) > 50)
    @rule()
    def signal(self) -> None:
        self.shell.interrupt()

    @rule(back=st.integers(1, 30))
    def a_fact_again(self, back: int) -> None:
        """What is told twice, or late, changes nothing."""
        fact = self.shell.told[-min(back, len(self.shell.told))]
        if isinstance(fact, facts.StepDone | facts.PiecesCollected | facts.LinksMeasured | facts.Counted):
            done, snapshot = self.coordinator.done, self.coordinator.snapshot
            assert self.shell.tell(fact) == []
            assert (self.coordinator.done, self.coordinator.snapshot) == (done, snapshot)

    @invariant()
    def steps_add_up(self) -> None:
        shell, coordinator = self.shell, self.coordinator
        assert coordinator.snapshot.step == shell.kept
        assert coordinator.records.saved == shell.saved <= shell.kept
        assert coordinator.snapshot.epoch == shell.kept / 30
        if coordinator.phase is Phase.STEPPING:
            assert coordinator.done == shell.trained
            assert set(coordinator.roster.alive) == shell.alive

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        """Whatever the coordinator waits for, the shell has still to answer."""
        awaited = {
            Phase.CALIBRATING: bool(self.coordinator.roster.calibrating),
            Phase.MEASURING: orders.MeasureLinks in self.shell.open,
            Phase.STEPPING: self.shell.trained < self.shell.end,
            Phase.COLLECTING: orders.Collect in self.shell.open,
            Phase.JUDGING: orders.Judge in self.shell.open,
            Phase.COUNTING: orders.AskCounters in self.shell.open,
            Phase.ENDED: True,
        }
        assert awaited[self.coordinator.phase], f"{self.coordinator.phase} waits for nothing"

    @invariant()
    def the_end_is_whole(self) -> None:
        if not self.coordinator.ended:
            return
        end, shell = end_of(self.shell.orders), self.shell
        assert sum(isinstance(order, orders.End) for order in shell.orders) == 1
        assert (end.error is None) == (end.status == "done")
        if end.status == "done":
            assert shell.kept == 60 or self.coordinator.records.evaluations.stopping
        if end.status in ("done", "lost", "interrupted"):
            assert shell.saved == shell.kept, "a snapshot is lost"

    def teardown(self) -> None:
        """Where nothing more happens, the end comes."""
        for worker in list(self.coordinator.roster.calibrating):
            self.shell.then(facts.Calibrated, worker, 1.0, row_of(worker, 1.0))
        self.shell.go_on()
        self.the_end_is_whole()


@pytest.mark.parametrize("examples", [40, pytest.param(300, marks=pytest.mark.slow)])
def test_any_order_of_facts_keeps_the_run_whole(examples: int) -> None:
    run_state_machine_as_test(Machine, settings=settings(max_examples=examples, stateful_step_count=60, deadline=None))
