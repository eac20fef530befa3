"""Numbers of workers that change in mid-run: a job with a range of them pauses, and goes on with those that come."""

from __future__ import annotations

from typing import Any

import pytest

from daskcnn.errors import ClusterError, Lost
from daskcnn.events import RunContinued, RunPaused, WorkerIgnored, WorkerJoined, WorkerLeft
from daskcnn.ps import RULES
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.bench import FIRST, FORGIVEN, Bench
from daskcnn.training.coordinator.coordinator import IN_VAIN
from daskcnn.training.coordinator.departures import FAR
from tests.training.coordinator_shell import Shell
from tests.training.test_coordinator import PEERS
from tests.training.test_coordinator_faults import every_rule
from tests.training.test_coordinator_machine import EPOCHS, SAMPLES, settings_of

RANGE: dict[str, Any] = {"wanted": {"cpu": 3}, "least": {"cpu": 2}, "wait": 10.0}


def begun(which: Any, workers: int = 2, **more: Any) -> Shell:
    """A run of a range of workers, in the middle of its first rounds."""
    shell = Shell(settings_of(which, "udpa", **{**RANGE, **more}))
    shell.start(*(f"cpu-{i}" for i in range(workers)))
    if not shell.settings.peers:
        shell.answer_to(orders.StartServer)
    for _ in range(workers):
        shell.answer_to(orders.Join)
    return shell


def drain(shell: Shell) -> None:
    """Answer all that is under way."""
    for _ in range(100):
        if not shell.pending:
            return
        shell.answer(0)
    raise AssertionError("it goes on and on")


@every_rule
def test_a_run_with_too_few_workers_pauses_and_goes_on_with_those_that_come(which: Any) -> None:
    shell = begun(which)
    shell.tell(facts.WorkerGone(("cpu-1",), "gone", shell.now))
    drain(shell)
    (paused,) = shell.of(RunPaused)
    assert (paused.workers, paused.missing, paused.wait) == (1, {"cpu": 1}, 10.0)
    assert not shell.coordinator.ended
    assert shell.tell(facts.Tick(shell.now)) == []
    shell.tell(facts.WorkerReady("cpu-2", "cpu", shell.now))
    assert shell.finish().status == "done"
    (continued,) = shell.of(RunContinued)
    assert continued.workers == 2
    assert continued.seconds > 0
    assert shell.coordinator.rounds is not None
    assert shell.coordinator.rounds.done == EPOCHS * SAMPLES


@every_rule
@pytest.mark.parametrize("comes", [True, False])
def test_a_run_with_too_few_workers_pauses_too_where_one_has_left_in_good_order(which: Any, comes: bool) -> None:
    shell = begun(which)
    shell.tell(facts.WorkerLeaving(("cpu-1",), "it is shut down", shell.now))
    drain(shell)
    left_at = shell.now
    assert [event.worker for event in shell.of(WorkerLeft)] == ["cpu-1"]
    assert [paused.missing for paused in shell.of(RunPaused)] == [{"cpu": 1}]
    assert shell.tell(facts.Tick(shell.now)) == []
    if comes:
        shell.tell(facts.WorkerReady("cpu-2", "cpu", shell.now))
        assert shell.finish().status == "done"
        assert shell.reported == EPOCHS * SAMPLES
    else:
        shell.tell(facts.Tick(left_at + 11.0))
        drain(shell)
        assert shell.end.status == "lost"
        assert "1 left, and no other came within 10 s" in str(shell.end.error)


@every_rule
def test_a_run_whose_last_worker_is_lost_pauses_too(which: Any) -> None:
    """What the server has by then is kept, and a new server begins from it."""
    shell = begun(which)
    while shell.reported < SAMPLES:
        shell.answer(0)
    for worker in ("cpu-0", "cpu-1"):
        shell.tell(facts.WorkerGone((worker,), "gone", shell.now))
    drain(shell)
    assert not shell.coordinator.ended
    if not shell.settings.peers:
        assert shell.coordinator.kept.epoch > 0
    for worker in ("cpu-0", "cpu-5"):
        shell.tell(facts.WorkerReady(worker, "cpu", shell.now))
    assert shell.finish().status == "done"
    assert len(shell.of(RunPaused)) == len(shell.of(RunContinued)) == 1


@every_rule
@pytest.mark.parametrize("left", [1, 0])
def test_a_run_that_has_paused_for_too_long_keeps_its_state_and_ends_resumably(which: Any, left: int) -> None:
    shell = begun(which)
    while shell.reported < SAMPLES:
        shell.answer(0)
    lost_at = shell.now
    shell.tell(facts.WorkerGone(("cpu-0", "cpu-1")[left:], "gone", lost_at))
    drain(shell)
    shell.tell(facts.Tick(lost_at + 10.0))
    assert not shell.coordinator.ended
    shell.tell(facts.Tick(shell.now + 11.0))
    drain(shell)
    assert shell.end.status == "lost"
    assert isinstance(shell.end.error, Lost)
    assert f"{left} left, and no other came within 10 s" in str(shell.end.error)
    if which != PEERS:
        assert shell.coordinator.kept.epoch > 0


def test_a_worker_that_measures_itself_is_waited_for() -> None:
    shell = begun(("sgwu", {}))
    shell.tell(facts.WorkerGone(("cpu-1",), "gone", shell.now))
    drain(shell)
    shell.tell(facts.WorkerReady("cpu-2", "cpu", shell.now))
    shell.tell(facts.Tick(shell.now + 20.0))
    assert shell.finish().status == "done"


def test_a_range_grows_to_its_most() -> None:
    shell = begun(("agwu", {}))
    for worker in ("cpu-2", "cpu-3"):
        shell.tell(facts.WorkerReady(worker, "cpu", shell.now))
    shell.answer_to(orders.Calibrate)
    assert [event.worker for event in shell.of(WorkerJoined)] == ["cpu-2"]
    assert shell.of(WorkerIgnored) == [], "it is a reserve"
    assert shell.tell(facts.Tick(shell.now)) == []
    shell.tell(facts.WorkerGone(("cpu-0",), "gone", shell.now))
    assert orders.Calibrate("cpu-3") in shell.tell(facts.Tick(shell.now))


def test_a_reserve_that_is_gone_is_not_called_up() -> None:
    shell = begun(("agwu", {}), wanted={"cpu": 2})
    shell.tell(facts.WorkerReady("cpu-2", "cpu", shell.now))
    shell.tell(facts.WorkerGone(("cpu-2",), "gone", shell.now))
    shell.tell(facts.WorkerGone(("cpu-0",), "gone", shell.now))
    assert shell.tell(facts.Tick(shell.now)) == []


# --- workers that come back ---


@every_rule
def test_a_worker_that_is_back_has_its_name_a_new_session_and_a_share(which: Any) -> None:
    """It is measured again: another process may be on other cores."""
    shell = begun(which, least={})
    before = max(order.session for order in shell.of(orders.Join) if order.replica == "cpu-1")
    life = shell.coordinator.life
    shell.tell(facts.WorkerGone(("cpu-1",), "gone", shell.now))
    assert orders.Calibrate("cpu-1") in shell.tell(facts.WorkerReady("cpu-1", "cpu", shell.now))
    assert shell.finish().status == "done"
    sessions = [order.session for order in shell.of(orders.Join) if (order.replica, order.life) == ("cpu-1", life)]
    if which[0] != "parallel-sgd" and which != PEERS:  # of one round, and of a new life
        assert sessions == [before, before + 1]
    assert shell.coordinator.rounds is not None
    assert shell.coordinator.rounds.done == EPOCHS * SAMPLES


# --- workers that come behind a barrier ---

BARRIERS: list[Any] = [
    PEERS,
    ("bsp", {}),
    ("bsp", {"every": 4}),
    ("local-sgd", {}),
    ("auto", {}),
    ("sgwu", {}),
    ("admm", {}),
]
PACE = 0.01  # seconds a sample of cpu-0; cpu-1 takes twice as long


def long_rounds(which: Any, seconds: float, **more: Any) -> Shell:
    """A run of two workers whose rounds take that many seconds."""
    samples = round(seconds / PACE * 1.5)
    return begun(which, least={}, wanted={}, epochs=4, samples=samples, **more)


def ends_of_rounds(found: list[Any]) -> list[str]:
    return [order.replica for order in found if isinstance(order, orders.EndRound)]


def comes(shell: Shell, worker: str = "cpu-2") -> list[Any]:
    shell.tell(facts.WorkerReady(worker, "cpu", shell.now))
    return shell.answer_to(orders.Calibrate)


@pytest.mark.parametrize("which", BARRIERS, ids=str)
@pytest.mark.parametrize("part", [0.0, 0.3])
def test_behind_a_barrier_a_long_round_ends_early_for_a_worker_that_comes(which: Any, part: float) -> None:
    shell = long_rounds(which, 3 * FAR)
    shell.cut, samples = part, shell.settings.samples
    assert ends_of_rounds(comes(shell)) == ["cpu-0", "cpu-1"]
    for replica in ("cpu-0", "cpu-1"):
        found = shell.answer_to(orders.StartRound, replica)
    assert orders.Leave not in map(type, shell.orders), "their last pushes may wait for one another"
    assert [event.worker for event in shell.of(WorkerJoined)] == ["cpu-2"]
    joins = sorted((order.replica, order.session) for order in found if isinstance(order, orders.Join))
    anew = [("cpu-0", 2), ("cpu-1", 2)] if which != PEERS else []  # peers have the center
    assert joins == [*anew, ("cpu-2", 1)]
    assert shell.finish().status == "done"
    assert shell.reported == 4 * samples
    assert shell.of(WorkerLeft) == []


@pytest.mark.parametrize("which", [*BARRIERS, ("agwu", {}), ("parallel-sgd", {})], ids=str)
def test_a_round_that_is_about_to_end_ends_as_planned(which: Any) -> None:
    """As does one that is the whole run, or that no other waits for."""
    shell = long_rounds(which, 5.0 if which in BARRIERS else 3 * FAR)
    assert ends_of_rounds(comes(shell)) == []
    assert shell.finish().status == "done"
    assert shell.of(orders.EndRound) == []


def test_a_worker_that_came_waits_no_longer_for_a_round_that_takes_longer_than_it_should() -> None:
    shell = long_rounds(("bsp", {}), 5.0)
    comes(shell)
    assert ends_of_rounds(shell.tell(facts.Tick(shell.now + FAR - 0.1))) == []
    assert ends_of_rounds(shell.tell(facts.Tick(shell.now + FAR + 0.1))) == ["cpu-0", "cpu-1"]
    assert ends_of_rounds(shell.tell(facts.Tick(shell.now + FAR + 0.2))) == [], "they were told"
    assert shell.finish().status == "done"


def test_rounds_end_once_for_workers_that_come_together() -> None:
    shell = long_rounds(("bsp", {}), 5 * FAR)
    shell.tell(facts.WorkerReady("cpu-3", "cpu", shell.now))
    shell.tell(facts.WorkerReady("cpu-2", "cpu", shell.now))
    assert ends_of_rounds(shell.answer_to(orders.Calibrate)) == [], "the other measures itself"
    assert ends_of_rounds(shell.answer_to(orders.Calibrate)) == ["cpu-0", "cpu-1"]
    assert shell.finish().status == "done"
    assert sorted(event.worker for event in shell.of(WorkerJoined)) == ["cpu-2", "cpu-3"]


def test_a_worker_that_leaves_while_rounds_end_for_one_that_came() -> None:
    shell = long_rounds(("local-sgd", {}), 3 * FAR)
    comes(shell)
    assert ends_of_rounds(shell.tell(facts.WorkerLeaving(("cpu-1",), "it is shut down", shell.now))) == ["cpu-1"]
    assert shell.finish().status == "done"
    assert [event.worker for event in shell.of(WorkerLeft)] == ["cpu-1"]
    assert shell.reported == 4 * shell.settings.samples


def test_a_worker_that_is_gone_before_it_is_let_in_leaves_rounds_that_end_early() -> None:
    shell = long_rounds(("bsp", {}), 3 * FAR)
    comes(shell)
    shell.tell(facts.WorkerGone(("cpu-2",), "gone", shell.now))
    assert shell.finish().status == "done"
    assert shell.of(WorkerJoined) == []
    assert shell.reported == 4 * shell.settings.samples


# --- groups ---


@pytest.mark.parametrize("which", BARRIERS, ids=str)
@pytest.mark.parametrize("how", [facts.WorkerLeaving, facts.WorkerGone])
def test_a_last_push_that_counts_waits_at_the_barrier_whatever_becomes_of_its_worker(which: Any, how: Any) -> None:
    """Its samples are counted. Were it to leave again its push would be dropped, and they be trained by nobody."""
    shell = long_rounds(which, 5 * FAR)
    comes(shell)
    shell.cut = 0.5
    shell.answer_to(orders.StartRound, "cpu-0")
    found = shell.tell(how(("cpu-0",), "it is gone", shell.now))
    assert not [order for order in found if isinstance(order, orders.Leave) and order.replica == "cpu-0"]
    assert shell.finish().status == "done"
    assert shell.reported >= 4 * shell.settings.samples


def long_rounds_of_groups(rule: str, seconds: float, workers: int = 4) -> Shell:
    """Groups of two whose first rounds take about that many seconds."""
    each = 1 / (1 / 0.01 + 1 / 0.02 + 1 / 0.03 + 1 / 0.04)
    more: dict[str, Any] = {"epochs": 4, "samples": round(seconds / each), "replica_size": 2}
    shell = Shell(settings_of((rule, {}), "udpa", **more))
    shell.start(*(f"cpu-{i}" for i in range(workers)))
    shell.answer_to(orders.StartServer)
    for _ in range(workers // 2):
        shell.answer_to(orders.Join)
    return shell


GROUP_BARRIERS = pytest.mark.parametrize("rule", ["sgwu", "bsp", "local-sgd", "admm"])


@GROUP_BARRIERS
def test_behind_a_barrier_long_rounds_of_groups_end_early_for_another_group(rule: str) -> None:
    shell = long_rounds_of_groups(rule, 3 * FAR)
    assert ends_of_rounds(comes(shell, "cpu-4")) == [], "one worker makes no group"
    assert ends_of_rounds(comes(shell, "cpu-5")) == ["group-0", "group-1"]
    assert ends_of_rounds(shell.tell(facts.Tick(shell.now + 2 * FAR))) == [], "they were told"
    assert shell.finish().status == "done"
    assert [event.worker for event in shell.of(WorkerJoined)] == ["group-2"]
    assert shell.reported == 4 * shell.settings.samples


@GROUP_BARRIERS
def test_behind_a_barrier_a_group_that_lost_a_worker_does_not_wait_for_the_end_of_a_long_round(rule: str) -> None:
    shell = long_rounds_of_groups(rule, 3 * FAR)
    assert ends_of_rounds(shell.tell(facts.WorkerGone(("cpu-3",), "gone", shell.now))) == ["group-1"]
    assert shell.finish().status == "done"
    assert shell.reported == 4 * shell.settings.samples
    assert {order.session for order in shell.of(orders.Join)} == {1, 2}


@GROUP_BARRIERS
def test_as_does_one_of_which_a_worker_has_left(rule: str) -> None:
    shell = long_rounds_of_groups(rule, 3 * FAR)
    assert ends_of_rounds(shell.tell(facts.WorkerLeaving(("cpu-3",), "it is shut down", shell.now))) == ["group-0"]
    assert ends_of_rounds(shell.answer_to(orders.StartRound, "group-0")) == ["group-1"]
    assert shell.finish().status == "done"
    assert shell.reported == 4 * shell.settings.samples


@pytest.mark.parametrize("rule", ["sgwu", "agwu", "parallel-sgd"])
def test_rounds_of_groups_that_are_about_to_end_or_that_none_waits_for_end_as_planned(rule: str) -> None:
    shell = long_rounds_of_groups(rule, 5.0 if rule == "sgwu" else 3 * FAR)
    for worker in ("cpu-4", "cpu-5"):
        assert ends_of_rounds(comes(shell, worker)) == []
    assert shell.finish().status == "done"
    assert shell.of(orders.EndRound) == []


def test_without_a_barrier_only_the_group_that_lacks_a_worker_ends_its_round_for_one_that_comes() -> None:
    shell = long_rounds_of_groups("agwu", 3 * FAR)
    shell.tell(facts.WorkerGone(("cpu-3",), "gone", shell.now))
    shell.answer_to(orders.Join)
    assert ends_of_rounds(comes(shell, "cpu-4")) == ["group-0"]
    shell.answer_to(orders.StartRound, "group-0")
    assert shell.of(orders.FormGroups)[-1].groups["group-0"] == ("cpu-0", "cpu-4")
    assert shell.finish().status == "done"
    assert shell.reported == 4 * shell.settings.samples


@pytest.mark.parametrize("goes", [facts.WorkerGone, facts.WorkerLeaving])
@pytest.mark.parametrize("which", [("sgwu", {}), ("bsp", {}), PEERS], ids=str)
def test_workers_that_wait_for_the_end_of_a_round_take_over_where_the_last_that_train_go(which: Any, goes: Any) -> None:
    """Peers that leave have their center kept first."""
    shell = long_rounds(which, 3 * FAR)
    comes(shell)
    for worker in ("cpu-0", "cpu-1"):
        shell.tell(goes((worker,), "gone", shell.now))
    assert shell.finish().status == "done"
    assert shell.reported == 4 * shell.settings.samples
    last = max(order.life for order in shell.of(orders.Join))
    assert {order.replica for order in shell.of(orders.Join) if order.life == last} == {"cpu-2"}


@pytest.mark.parametrize(("which", "goes"), [(("sgwu", {}), facts.WorkerGone), (PEERS, facts.WorkerLeaving)], ids=str)
def test_they_take_over_from_the_state_before_where_the_last_is_lost_with_what_it_had(which: Any, goes: Any) -> None:
    """It held the server as well; or it was the last peer, which is gone before its center is kept."""
    shell = long_rounds(which, 3 * FAR)
    comes(shell)
    shell.tell(goes(("cpu-0",), "gone", shell.now))
    shell.tell(goes(("cpu-1",), "gone", shell.now))
    while not shell.of(orders.Save):
        shell.answer_to(orders.StartRound)
    shell.pending = [each for each in shell.pending if not isinstance(each[0], orders.Save)]
    peers, now = shell.settings.peers, shell.now
    shell.tell(facts.WorkerGone(("cpu-1",), "connection lost", now) if peers else facts.ServerGone(1, now))
    made = shell.reported
    assert shell.finish().status == "done"
    assert shell.reported - made == 4 * shell.settings.samples
    last = max(order.life for order in shell.of(orders.Join))
    assert {order.replica for order in shell.of(orders.Join) if order.life == last} == {"cpu-2"}


def test_no_life_begins_before_the_state_is_kept_that_it_is_to_begin_from() -> None:
    shell = long_rounds(("sgwu", {}), 3 * FAR)
    for worker in ("cpu-2", "cpu-3"):
        comes(shell, worker)
    shell.tell(facts.WorkerGone(("cpu-0", "cpu-1"), "gone", shell.now))
    shell.tell(facts.WorkerLeaving(("cpu-3",), "it is shut down", shell.now))
    assert len(shell.of(orders.StartServer)) == 1
    shell.answer_to(orders.Save)
    assert len(shell.of(orders.StartServer)) == 2
    assert shell.finish().status == "done"
    assert shell.reported == 4 * shell.settings.samples


def test_a_worker_that_came_takes_over_where_the_only_one_is_lost_while_the_server_starts() -> None:
    shell = Shell(settings_of(("sgwu", {}), "udpa"))
    shell.start("cpu-0")
    shell.tell(facts.WorkerReady("cpu-1", "cpu", shell.now))
    shell.answer_to(orders.Calibrate)
    shell.tell(facts.WorkerGone(("cpu-0",), "gone", shell.now))
    assert shell.finish().status == "done"
    assert shell.reported == SAMPLES * EPOCHS


def test_a_worker_that_hangs_may_be_heard_of_again_and_one_that_does_not_fit_may_not() -> None:
    shell = begun(("sgwu", {}), least={})
    shell.tell(facts.Tick(shell.now + 1000.0))
    found = shell.tell(facts.Waits(frozenset({"cpu-0"}), shell.now + 1000.0))
    assert orders.Dismiss("cpu-1") in found
    shell.tell(facts.WorkerReady("cpu-2", "cpu", shell.now))
    found = shell.tell(facts.CalibrationFailed("cpu-2", "needs 3 GB, has 2", "", shell.now))
    assert orders.Dismiss("cpu-2", for_good=True) in found


def test_a_worker_that_is_lost_again_and_again_is_left_out_for_a_growing_while() -> None:
    shell = begun(("agwu", {}), least={})
    waits = []
    for _ in range(4):
        shell.tell(facts.WorkerGone(("cpu-1",), "gone", shell.now))
        found, begun_at = shell.tell(facts.WorkerReady("cpu-1", "cpu", shell.now)), shell.now
        while orders.Calibrate("cpu-1") not in found:
            shell.now += 1.0
            found = shell.tell(facts.Tick(shell.now))
        waits.append(shell.now - begun_at)
        shell.answer_to(orders.Calibrate)
    assert waits == [0.0, FIRST, 2 * FIRST, 4 * FIRST]
    told = [event.reason for event in shell.of(WorkerIgnored)]
    assert told[0] == "it was lost 2 times in a short time, and is left out for 15 s"
    assert len(told) == 3


def _often_lost(shell: Shell, worker: str) -> None:
    """The worker is lost twice and back, so that it is left out."""
    for _ in range(2):
        shell.tell(facts.WorkerGone((worker,), "gone", shell.now))
        if orders.Calibrate(worker) in shell.tell(facts.WorkerReady(worker, "cpu", shell.now)):
            shell.answer_to(orders.Calibrate)
    assert shell.coordinator.bench.waiting


@every_rule
def test_a_run_that_pauses_leaves_nobody_out_for_its_losses(which: Any) -> None:
    shell = begun(which, 3)
    _often_lost(shell, "cpu-2")
    shell.tell(facts.WorkerGone(("cpu-1",), "gone", shell.now))
    drain(shell)
    assert [paused.workers for paused in shell.of(RunPaused)] == [1]
    assert orders.Calibrate("cpu-2") in shell.tell(facts.Tick(shell.now))
    assert shell.finish().status == "done"


@every_rule
def test_a_worker_that_is_lost_wherever_it_begins_ends_the_run(which: Any) -> None:
    """A run that has come no farther for several pauses leaves workers out for their losses."""
    shell = Shell(settings_of(which, "udpa", wanted={"cpu": 1}, least={"cpu": 1}, wait=10.0))
    shell.start("cpu-0")
    for _ in range(20):
        shell.tell(facts.WorkerGone(("cpu-0",), "out of memory", shell.now))
        drain(shell)
        if shell.coordinator.ended:
            break
        shell.tell(facts.WorkerReady("cpu-0", "cpu", shell.now))
        for _ in range(30):
            if any(isinstance(order, orders.Calibrate) for order, _ in shell.pending):
                shell.answer_to(orders.Calibrate)
            shell.now += 1.0
            shell.tell(facts.Tick(shell.now))
    assert shell.end.status in ("lost", "unusable")  # the latter before anything was trained


def lose_both_for_a_while(shell: Shell) -> None:
    """Both workers are lost, come back, and are taken again."""
    shell.tell(facts.WorkerGone(("cpu-0", "cpu-1"), "gone", shell.now))
    drain(shell)
    for worker in ("cpu-0", "cpu-1"):
        assert orders.Calibrate(worker) in shell.tell(facts.WorkerReady(worker, "cpu", shell.now))
    while any(isinstance(order, orders.Calibrate) for order, _ in shell.pending):
        shell.answer_to(orders.Calibrate)


@every_rule
def test_a_run_that_is_disturbed_between_two_snapshots_takes_workers_again(which: Any) -> None:
    """Faults that come faster than it keeps its state end no run beside workers that are there."""
    shell = begun(which)
    for _ in range(IN_VAIN):
        lose_both_for_a_while(shell)
    assert shell.finish().status == "done"


@pytest.mark.parametrize("rule", ["bsp", "sgwu", "agwu"])
def test_a_run_that_comes_farther_takes_workers_again_however_often_all_are_lost(rule: str) -> None:
    shell = begun((rule, {}), epochs=40)
    for _ in range(3 * IN_VAIN):
        while any(isinstance(order, orders.StartServer | orders.Join) for order, _ in shell.pending):
            shell.answer(0)
        for _ in range(2):
            shell.answer_to(orders.StartRound)
        lose_both_for_a_while(shell)
    assert shell.finish().status == "done"


@every_rule
def test_the_last_worker_that_is_there_is_not_left_out_for_its_losses(which: Any) -> None:
    shell = begun(which, least={})
    _often_lost(shell, "cpu-1")
    assert orders.Calibrate("cpu-1") in shell.tell(facts.WorkerGone(("cpu-0",), "gone", shell.now))
    assert shell.finish().status == "done"


def test_losses_of_long_ago_are_forgotten() -> None:
    bench = Bench()
    for at in (0.0, 10.0):
        bench.came("a", at)
        bench.lost("a", at + 1.0)
    assert bench.barred("a", 12.0)
    bench.came("a", 100.0)
    bench.lost("a", 100.0 + 2 * FORGIVEN)
    assert bench.barred("a", 100.0 + 2 * FORGIVEN) is None


def test_too_few_that_can_be_used_are_told_of_before_anything_starts() -> None:
    shell = Shell(settings_of(("sgwu", {}), "udpa", **RANGE))
    for worker in ("cpu-0", "cpu-1"):
        shell.tell(facts.WorkerReady(worker, "cpu", 0.0))
    shell.answer_to(orders.Calibrate)
    shell.tell(facts.CalibrationFailed("cpu-1", "needs 3 GB, has 2", "give it more memory", 1.0))
    shell.tell(facts.Tick(20.0))
    assert shell.end.status == "unusable"
    assert isinstance(shell.end.error, ClusterError)
    assert "1 usable" in str(shell.end.error)


def test_a_server_that_leaves_while_the_run_pauses_is_kept_at_once() -> None:
    shell = begun(("sgwu", {}))
    shell.tell(facts.WorkerGone(("cpu-1",), "gone", shell.now))
    drain(shell)
    assert orders.Save in map(type, shell.tell(facts.ServerLeaving(1, "it is shut down", shell.now)))
    drain(shell)
    shell.tell(facts.WorkerReady("cpu-2", "cpu", shell.now))
    assert shell.finish().status == "done"
    assert [order.life for order in shell.of(orders.StartServer)] == [1, 2]


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_run_of_which_no_worker_answers_as_a_server_is_to_start_pauses(rule: str) -> None:
    shell = begun((rule, {}))
    shell.tell(facts.ServerGone(1, shell.now))
    shell.pending.clear()  # the order to start another led to what follows
    shell.tell(facts.WorkerGone(("cpu-0", "cpu-1"), "connection lost", shell.now))
    shell.tell(facts.ServerGone(2, shell.now))
    drain(shell)
    assert len(shell.of(RunPaused)) == 1
    for worker in ("cpu-0", "cpu-1"):
        shell.tell(facts.WorkerReady(worker, "cpu", shell.now))
    assert shell.finish().status == "done"
    assert shell.coordinator.rounds is not None
    assert shell.coordinator.rounds.done == EPOCHS * SAMPLES


@every_rule
def test_a_run_that_is_to_end_does_not_pause_for_workers_that_leave_too(which: Any) -> None:
    shell = begun(which)
    shell.tell(facts.Interrupted(15, shell.now))
    shell.tell(facts.WorkerLeaving(("cpu-1",), "it is shut down", shell.now))
    drain(shell)
    assert shell.end.status == "interrupted"
    assert shell.of(RunPaused) == []


def test_a_signal_ends_a_pause() -> None:
    shell = begun(("bsp", {}))
    shell.tell(facts.WorkerGone(("cpu-1",), "gone", shell.now))
    drain(shell)
    shell.tell(facts.Interrupted(15, shell.now))
    drain(shell)
    assert shell.end.status == "interrupted"


@pytest.mark.parametrize("least", [{}, {"cpu": 1}])
def test_reserves_are_called_up_where_all_others_fail_to_measure_themselves(least: dict[str, int]) -> None:
    shell = Shell(settings_of(("bsp", {}), "udpa", wanted={"cpu": 2}, least=least))
    for worker in ("cpu-0", "cpu-1", "cpu-2"):
        shell.tell(facts.WorkerReady(worker, "cpu", shell.now))
    for worker in ("cpu-0", "cpu-1"):
        shell.tell(facts.CalibrationFailed(worker, "it is out of memory", "close programs", shell.now))
    shell.pending = [each for each in shell.pending if getattr(each[0], "worker", "") == "cpu-2"]
    assert shell.finish().status == "done"
    assert shell.coordinator.rounds is not None
    assert shell.coordinator.rounds.workers == ("cpu-2",)
