"""The coordinator of a data-parallel run: exactly which orders follow from which fact."""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY

import pytest

from daskcnn.errors import ClusterError, Diverged, Interrupted, Lost
from daskcnn.events import (
    CalibratedWorker,
    EpochEnded,
    Judged,
    SamplesAllocated,
    Warned,
    WorkerJoined,
    WorkerLeftOut,
    WorkerLost,
    WorkersCalibrated,
)
from daskcnn.job.resolve import resolve
from daskcnn.nn.score import Score
from daskcnn.partition.allocation import Ranges
from daskcnn.partition.rounds import Round
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.orders import Log, Order
from daskcnn.training.coordinator.settings import Settings
from daskcnn.training.judging import JudgedPart
from tests.training.coordinator_shell import Shell, begun, report_of
from tests.training.test_coordinator_machine import STALL, settings_of

PEERS = ("bsp", {"exchange": "asa"})


def training(rule: str | tuple[str, dict[str, Any]], workers: int = 2, **more: Any) -> Shell:
    """A run whose first rounds have started. Workers are cpu-0, cpu-1, …, each slower than the one before."""
    which = (rule, {}) if isinstance(rule, str) else rule
    shell = Shell(settings_of(which, "udpa", **more))
    shell.start(*(f"cpu-{i}" for i in range(workers)))
    if not shell.settings.peers:
        shell.answer_to(orders.StartServer)
    while any(isinstance(order, orders.Join) for order, _ in shell.pending):
        shell.answer_to(orders.Join)
    return shell


def row(worker: str) -> CalibratedWorker:
    return CalibratedWorker(name=worker, address=f"tcp://{worker}")


def allocated(step: dict[str, int] | None = None, **sizes: int) -> Order:
    given = {name.replace("_", "-"): size for name, size in sizes.items()}
    return Log(SamplesAllocated(sizes=given, step=step or {}))


def lost(worker: str, samples: int, reason: str = "gone") -> Order:
    return Log(WorkerLost(worker=worker, reason=reason, samples_moved=samples))


def starts(round_: Round, *, score: tuple[int, int] | None, life: int = 1, scale: float = 1.0) -> Order:
    return orders.StartRound(life, 1, round_, score and JudgedPart(*score), JudgedPart(60, 80), scale)


def reported(round_: Round, epoch: float, **known: Any) -> Order:
    return Log(report_of(round_, **known).event(epoch))


def a_round(worker: str, number: int, ranges: Ranges, progress: tuple[float, float], steps: int | None = None) -> Round:
    return Round(worker, number, ranges, sum(hi - lo for lo, hi in ranges), progress, steps)


FIRST = [a_round("cpu-0", 0, ((0, 30),), (0.0, 1 / 3)), a_round("cpu-1", 0, ((30, 60),), (0.0, 1 / 3))]
SECOND = [a_round("cpu-0", 1, ((0, 30),), (1 / 3, 2 / 3)), a_round("cpu-1", 1, ((30, 60),), (1 / 3, 2 / 3))]
HALVES = [Score(13.0, 1, 13), Score(7.0, 1, 7)]  # what the center scores in the parts of both workers


def looked(epoch: float, step: int, seconds: float, samples: int = 60) -> Order:
    return Log(
        EpochEnded(
            epoch=epoch,
            epochs=3.0,
            step=step,
            loss=2.0,
            accuracy=0.5,
            validation=Judged(accuracy=0.1, loss=1.0, auc=None),
            samples_per_second=samples / seconds,
            lr=0.1,
            seconds=seconds,
        )
    )


# --- a run begins ---


def test_two_workers_begin() -> None:
    """Both join before the first round starts."""
    shell = Shell(settings_of(("sgwu", {}), "udpa"))
    assert shell.tell(facts.WorkerReady("cpu-0", "cpu", 0.0)) == [orders.Calibrate("cpu-0")]
    assert shell.tell(facts.WorkerReady("cpu-1", "cpu", 0.0)) == [orders.Calibrate("cpu-1")]
    assert shell.answer_to(orders.Calibrate) == []
    assert shell.answer_to(orders.Calibrate) == [
        Log(WorkersCalibrated(workers=[row("cpu-0"), row("cpu-1")])),
        orders.StartServer(1, moved=False),
    ]
    assert shell.answer_to(orders.StartServer) == [
        allocated(cpu_0=30, cpu_1=30),
        orders.Join("cpu-0", 1, 1),
        orders.Join("cpu-1", 1, 1),
    ]
    assert shell.answer_to(orders.Join, "cpu-1") == []
    assert shell.answer_to(orders.Join, "cpu-0") == [
        starts(FIRST[0], score=(60, 73)),
        starts(FIRST[1], score=(73, 80)),
    ]


def test_who_has_measured_itself_first_does_not_matter() -> None:
    """Samples go to workers in the order in which these came, so that the same job trains the same every time."""
    shells = [Shell(settings_of(("sgwu", {}), "udpa")) for _ in range(2)]
    for shell in shells:
        for worker in ("cpu-0", "cpu-1", "cpu-2"):
            shell.tell(facts.WorkerReady(worker, "cpu", 0.0))
    first, second = shells
    for _ in range(3):
        first.answer(0)
    for index in (2, 0, 0):
        second.answer(index)
    assert first.answer_to(orders.StartServer) == second.answer_to(orders.StartServer)
    assert [*second.coordinator.roster.alive] == ["cpu-0", "cpu-1", "cpu-2"]


def test_a_calibration_fails() -> None:
    """The run begins with the other."""
    shell = Shell(settings_of(("sgwu", {}), "udpa"))
    for worker in ("cpu-0", "cpu-1"):
        shell.tell(facts.WorkerReady(worker, "cpu", 0.0))
    shell.answer_to(orders.Calibrate)
    assert shell.tell(facts.CalibrationFailed("cpu-1", "needs 3 GB, has 2", "give it more memory", 2.0)) == [
        Log(WorkerLeftOut(worker="cpu-1", reason="needs 3 GB, has 2", remedy="give it more memory")),
        orders.Dismiss("cpu-1", for_good=True),
        Log(WorkersCalibrated(workers=[row("cpu-0")])),
        orders.StartServer(1, moved=False),
    ]


def test_a_calibrated_worker_goes_while_the_other_is_measured() -> None:
    """It is not taken for the last of the run: the other may begin."""
    shell = Shell(settings_of(("sgwu", {}), "udpa"))
    for worker in ("cpu-0", "cpu-1"):
        shell.tell(facts.WorkerReady(worker, "cpu", 0.0))
    shell.answer_to(orders.Calibrate)
    found = shell.tell(facts.WorkerGone(("cpu-0",), "connection lost", 2.0))
    assert [type(order) for order in found] == [Log, orders.Dismiss]
    assert shell.answer_to(orders.Calibrate) == [
        Log(WorkersCalibrated(workers=[row("cpu-1")])),
        orders.StartServer(1, moved=False),
    ]


def test_no_calibration_succeeds() -> None:
    shell = Shell(settings_of(("sgwu", {}), "udpa"))
    shell.tell(facts.WorkerReady("cpu-0", "cpu", 0.0))
    *_, cancelled, end = shell.tell(facts.CalibrationFailed("cpu-0", "no device", "plug it in", 2.0))
    assert cancelled == orders.CancelAll()
    assert isinstance(end, orders.End)
    assert end.status == "unusable"
    assert isinstance(end.error, ClusterError)


# --- rounds ---


def test_a_synchronous_round() -> None:
    """Nothing follows before the last report; then the center's score is known, kept, and all go on."""
    shell = training("sgwu")
    assert shell.answer_to(orders.StartRound, "cpu-0") == [reported(FIRST[0], 0.5, center=HALVES[0])]
    assert shell.answer_to(orders.StartRound, "cpu-1") == [
        reported(FIRST[1], 1.0, version=2, center=HALVES[1]),
        looked(1.0, step=2, seconds=5.0),
        orders.Save(1.0, ANY, ("cpu-0", "cpu-1"), HALVES[0] + HALVES[1]),
        starts(SECOND[0], score=(60, 73)),
        starts(SECOND[1], score=(73, 80)),
    ]


def test_an_asynchronous_round() -> None:
    """Who reports goes on at once."""
    shell = training("agwu")
    assert shell.answer_to(orders.StartRound, "cpu-0") == [
        reported(FIRST[0], 0.5),
        starts(a_round("cpu-0", 1, ((0, 30),), (1 / 6, 0.5)), score=None),
    ]


def test_a_worker_comes_to_an_asynchronous_run() -> None:
    """It takes its share at once; rounds under way go on."""
    shell = training("agwu")
    assert shell.tell(facts.WorkerReady("cpu-2", "cpu", 9.0)) == [orders.Calibrate("cpu-2")]
    assert shell.answer_to(orders.Calibrate) == [
        Log(WorkersCalibrated(workers=[row("cpu-2")])),
        Log(WorkerJoined(worker="cpu-2", samples=20)),
        allocated(cpu_0=20, cpu_1=20, cpu_2=20),
        orders.Join("cpu-2", 1, 1),
    ]
    (started,) = shell.answer_to(orders.Join)
    assert isinstance(started, orders.StartRound)
    assert (started.round.worker, started.round.samples, started.scale) == ("cpu-2", 20, 1.0)


def test_a_worker_comes_to_a_synchronous_run() -> None:
    """It takes its share between two rounds, and joins before the second."""
    shell = training("sgwu")
    shell.tell(facts.WorkerReady("cpu-2", "cpu", 9.0))
    assert shell.answer_to(orders.Calibrate) == [Log(WorkersCalibrated(workers=[row("cpu-2")]))]
    assert len(shell.answer_to(orders.StartRound)) == 1
    assert shell.answer_to(orders.StartRound) == [
        reported(FIRST[1], 1.0, version=2, center=HALVES[1]),
        looked(1.0, step=2, seconds=6.0),
        orders.Save(1.0, ANY, ("cpu-0", "cpu-1"), HALVES[0] + HALVES[1]),
        Log(WorkerJoined(worker="cpu-2", samples=20)),
        allocated(cpu_0=20, cpu_1=20, cpu_2=20),
        orders.Join("cpu-2", 1, 1),
    ]
    started = shell.answer_to(orders.Join)
    assert [each.worker for each in begun(started)] == ["cpu-0", "cpu-1", "cpu-2"]


def test_early_stopping() -> None:
    """The second look finds nothing better: no round starts, the center judged last is kept, the run is done."""
    shell = training("sgwu", patience=1)
    for _ in range(2):
        shell.answer_to(orders.StartRound)
    shell.answer_to(orders.Save)
    shell.answer_to(orders.StartRound)
    assert shell.answer_to(orders.StartRound) == [
        reported(SECOND[1], 2.0, version=4, center=HALVES[1]),
        looked(2.0, step=4, seconds=3.0),
        orders.Save(2.0, ANY, ("cpu-0", "cpu-1"), HALVES[0] + HALVES[1]),
    ]
    assert shell.answer_to(orders.Save) == [orders.CancelAll(), orders.End("done")]


def test_a_center_that_was_not_judged_at_the_end() -> None:
    """The last round to judge it was not the last to end: it is judged and kept before the run ends."""
    shell = training("agwu")
    while not shell.of(orders.Judge):
        found = shell.answer(len(shell.pending) - 1)
    assert found[-1] == orders.Judge(JudgedPart(60, 80))
    assert shell.answer_to(orders.Judge) == [orders.Save(3.0, ANY, ("cpu-0", "cpu-1"), Score(1.0, 20, 20))]
    assert shell.answer_to(orders.Save) == [orders.CancelAll(), orders.End("done")]


# --- losses ---


def test_a_worker_is_lost_in_mid_round() -> None:
    """The others have its samples from their next round on."""
    shell = training("sgwu", workers=3)
    assert shell.tell(facts.WorkerGone(("cpu-0",), "gone", 9.0)) == [
        lost("cpu-0", 20),
        orders.Dismiss("cpu-0"),
        orders.Cancel("cpu-0"),
        orders.Leave("cpu-0", 1, 1),
        allocated(cpu_1=30, cpu_2=30),
    ]
    assert len(shell.answer_to(orders.StartRound)) == 1
    first, second = begun(shell.answer_to(orders.StartRound)[-2:])
    assert first == a_round("cpu-1", 1, ((0, 10), (20, 40)), (40 / 180, 100 / 180))
    assert second == a_round("cpu-2", 1, ((10, 20), (40, 60)), (40 / 180, 100 / 180))


def test_the_last_worker_is_lost() -> None:
    shell = training("sgwu", workers=1)
    assert shell.tell(facts.WorkerGone(("cpu-0",), "gone", 9.0)) == [
        lost("cpu-0", 60),
        orders.Dismiss("cpu-0"),
        orders.Save(0.0, ANY, ("cpu-0",), None),  # of a round that has not ended the server may have steps
        orders.CancelAll(),
        orders.End("lost", ANY),
    ]
    error = shell.end.error
    assert isinstance(error, Lost)
    assert "cpu-0 (tcp://cpu-0): gone, and it was the last" in str(error)


def test_an_overdue_worker_is_asked_for_and_given_up() -> None:
    """A round of 30 samples at 0.02 s should take 0.6 s: the worker has five times that and the stall timeout."""
    shell = training("sgwu")
    start = shell.now
    shell.answer_to(orders.StartRound, "cpu-0")
    limit = STALL + 5 * 0.6
    assert shell.tell(facts.Tick(start + limit)) == []
    now = start + limit + 0.1
    assert shell.tell(facts.Tick(now)) == [orders.AskWaiting(("cpu-1",))]
    assert shell.tell(facts.Tick(now)) == [], "asked once"
    assert shell.tell(facts.Waits(frozenset(), now)) == [
        lost("cpu-1", 30, "no report for 33 s"),
        orders.Dismiss("cpu-1"),
        orders.Cancel("cpu-1"),
        orders.Leave("cpu-1", 1, 1),
        allocated(cpu_0=60),
        starts(a_round("cpu-0", 1, ((0, 60),), (1 / 6, 0.5)), score=(60, 80)),
    ]


def test_an_overdue_worker_that_waits_for_others_is_not_to_blame() -> None:
    shell = training("sgwu")
    shell.tell(facts.Tick(500.0))
    found = shell.tell(facts.Waits(frozenset({"cpu-0"}), 500.0))
    assert lost("cpu-1", 30, "no report for 33 s") in found
    assert [order.worker for order in found if isinstance(order, orders.Dismiss)] == ["cpu-1"]
    assert shell.tell(facts.Tick(501.0)) == [], "the clock of the other begins anew"


def test_a_sign_of_life_renews_the_clock() -> None:
    shell = training("sgwu")
    for worker in ("cpu-0", "cpu-1"):
        shell.tell(facts.Progress(worker, 1, 1, 499.0))
    assert shell.tell(facts.Tick(500.0)) == []


@pytest.mark.parametrize(("kernel_shares", "measured"), [("measured", True), ("speeds", False)])
def test_members_links_are_measured_where_shares_go_by_them(kernel_shares: str, measured: bool) -> None:
    train = {"strategy": "sgwu", "replica_size": 2, "kernel_shares": kernel_shares}
    asked = Settings.of(resolve({"train": train}), 60).measures_links
    shell = training("sgwu", workers=4, replica_size=2, measures_links=asked)
    assert [order.measure_links for order in shell.of(orders.FormGroups)] == [measured]


def test_a_group_loses_a_member() -> None:
    """The rest of the group goes on, with the group's samples; behind a barrier from the next round on."""
    shell = training("sgwu", workers=4, replica_size=2)
    groups = {"group-0": ("cpu-0", "cpu-3"), "group-1": ("cpu-1", "cpu-2")}
    assert shell.of(orders.FormGroups) == [orders.FormGroups(groups, (), True, ("group-0", "group-1"))]
    assert shell.tell(facts.WorkerGone(("cpu-3",), "gone", 9.0)) == [
        lost("cpu-3", 0, "gone"),
        orders.Dismiss("cpu-3"),
        orders.Cancel("group-0"),
        orders.Leave("group-0", 1, 1),
        orders.FormGroups(groups | {"group-0": ("cpu-0",)}, (), True, ("group-0",)),
        Log(Warned(message="group-0 (cpu-3: gone) is formed anew of cpu-0; its round begins again")),
    ]


def test_the_server_is_lost() -> None:
    """A new life begins from the state kept last; merges since then are done again."""
    shell = training("agwu")
    shell.answer_to(orders.StartRound)
    assert shell.tell(facts.ServerGone(1, 9.0)) == [orders.CancelAll(), orders.StartServer(2, moved=True)]
    assert shell.tell(facts.ServerGone(1, 9.0)) == [], "it is known"
    message = (
        "the parameter server's worker is lost; a new server starts on ps from the checkpoint at epoch 0.00, "
        "1 merges are done again"
    )
    assert shell.answer_to(orders.StartServer) == [
        Log(Warned(message=message)),
        allocated(cpu_0=30, cpu_1=30),
        orders.Join("cpu-0", 2, 1),
        orders.Join("cpu-1", 2, 1),
    ]


def test_tasks_out_of_step() -> None:
    shell = training("sgwu")
    assert shell.tell(facts.OutOfStep(1, "a task ran twice", 9.0)) == [
        Log(Warned(message="a task ran twice: back to the checkpoint at epoch 0.00")),
        orders.CancelAll(),
        orders.StartServer(2, moved=False),
    ]


def test_peers_are_rescued() -> None:
    """The round under way is given up. A new life begins from the last center that a worker has, without a server."""
    shell = training(PEERS, workers=3)
    assert not shell.of(orders.StartServer)
    assert shell.tell(facts.WorkerGone(("cpu-0",), "gone", 9.0)) == [
        lost("cpu-0", 20),
        orders.Dismiss("cpu-0"),
        orders.Cancel("cpu-0"),
        orders.CancelAll(),
        orders.Rescue(),
    ]
    assert shell.tell(facts.Rescued(4, 10.0)) == [
        Log(Warned(message="the round is begun again from version 4, by 2 workers")),
        allocated({"cpu-1": 4, "cpu-2": 4}, cpu_1=30, cpu_2=30),
        orders.Join("cpu-1", 2, 1),
        orders.Join("cpu-2", 2, 1),
    ]


def test_a_join_during_a_rescue_starts_nothing() -> None:
    """What was under way when the peer was lost is given up."""
    shell = Shell(settings_of(PEERS, "udpa"))
    shell.start("cpu-0", "cpu-1", "cpu-2")
    shell.tell(facts.WorkerGone(("cpu-0",), "gone", 9.0))
    for worker in ("cpu-1", "cpu-2"):
        assert shell.tell(facts.Joined(worker, 1, 1, 9.0)) == []


# --- ends ---


def test_interrupted() -> None:
    """Rounds under way end behind the step at hand; then the state is kept."""
    shell = training("sgwu")
    assert shell.tell(facts.Interrupted(15, 9.0)) == [
        orders.EndRound("cpu-0", 1, 1, 0),
        orders.EndRound("cpu-1", 1, 1, 0),
    ]
    shell.answer_to(orders.StartRound)
    found = shell.answer_to(orders.StartRound)
    (save,) = [order for order in found if not isinstance(order, Log)]
    assert save == orders.Save(30 / 60, ANY, ("cpu-0", "cpu-1"), None)
    assert shell.answer_to(orders.Save) == [orders.CancelAll(), orders.End("interrupted", ANY)]
    error = shell.end.error
    assert isinstance(error, Interrupted)
    assert str(error) == "interrupted by a request to end (SIGTERM)"


def test_interrupted_while_workers_join() -> None:
    """No round starts any more."""
    shell = Shell(settings_of(("sgwu", {}), "udpa"))
    shell.start("cpu-0", "cpu-1")
    shell.answer_to(orders.StartServer)
    shell.answer_to(orders.Join)
    shell.tell(facts.Interrupted(15, 9.0))
    assert shell.answer_to(orders.Join) == []


def test_diverged() -> None:
    """What the server refused is counted first."""
    shell = training("sgwu")
    error = Diverged("push of cpu-0: NaN")
    assert shell.tell(facts.RoundFailed("cpu-0", 1, error, 9.0)) == [
        orders.CountServer(),
        orders.CancelAll(),
        orders.End("diverged", error),
    ]
    assert shell.tell(facts.Tick(500.0)) == [], "no order follows the end"
