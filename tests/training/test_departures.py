"""Workers that leave in good order, and a parameter server that moves: the coordinator's decisions."""

from __future__ import annotations

from typing import Any

import pytest

from daskcnn.events import RoundEnded, Warned, WorkerJoined, WorkerLeft, WorkerLeftOut, WorkerLost
from daskcnn.ps import RULES
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.orders import EndRound, Leave, StartRound, StartServer
from daskcnn.training.coordinator.records import Kept
from tests.training.coordinator_shell import Shell, begun, name_of
from tests.training.test_coordinator_machine import EPOCHS, SAMPLES, settings_of

EXCHANGES: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in RULES]
REASON = "it is shut down"


def training(rule: tuple[str, dict[str, Any]], *workers: str, host: str = "ps", **settings: Any) -> Shell:
    """A run whose first rounds are under way."""
    shell = Shell(settings_of(rule, "udpa", **settings), host=host)
    shell.start(*workers)
    if not shell.settings.peers:
        shell.answer_to(StartServer)
    for _ in workers:
        shell.answer_to(orders.Join)
    assert {round_.worker for round_ in begun(shell.of(StartRound))} == {*workers}
    return shell


def leave(shell: Shell, worker: str) -> list[orders.Order]:
    return shell.tell(facts.WorkerLeaving((worker,), REASON, shell.now))


@pytest.mark.parametrize("rule", EXCHANGES, ids=lambda rule: rule[0])
@pytest.mark.parametrize("part", [0.0, 0.4, 1.0])
def test_a_worker_that_leaves_ends_its_round_and_each_presentation_is_made_once(rule: Any, part: float) -> None:
    shell = training(rule, "cpu-0", "cpu-1", "cpu-2")
    shell.cut = part
    assert leave(shell, "cpu-1") == [EndRound("cpu-1", 1, 1, 0)]
    assert leave(shell, "cpu-1") == [], "it was told"
    shell.answer_to(StartRound, "cpu-1")
    (left,) = shell.of(WorkerLeft)
    done = int(part * begun(shell.of(StartRound))[1].samples)
    assert (left.worker, left.reason, left.samples_done, left.samples_moved) == ("cpu-1", REASON, done, SAMPLES // 3)
    assert [each.samples for each in shell.of(RoundEnded)] == [done] * (done > 0)
    assert shell.finish().status == "done"
    assert shell.reported == SAMPLES * EPOCHS
    assert not shell.of(WorkerLost)
    assert orders.Dismiss("cpu-1", for_good=True) in shell.orders
    told = Leave("cpu-1", 1, 1) in shell.orders
    assert told != shell.settings.rule.barrier, "its push may wait at the barrier"
    assert all(round_.worker != "cpu-1" for round_ in begun(shell.of(StartRound))[3:])


@pytest.mark.parametrize("rule", ["sgwu", "bsp"])
def test_nobody_waits_for_a_worker_that_has_left_behind_a_barrier(rule: str) -> None:
    shell = training((rule, {}), "cpu-0", "cpu-1", "cpu-2")
    shell.answer_to(StartRound, "cpu-0")
    leave(shell, "cpu-1")
    shell.answer_to(StartRound, "cpu-1")
    found = shell.answer_to(StartRound, "cpu-2")
    assert {round_.worker for round_ in begun([o for o in found if isinstance(o, StartRound)])} == {"cpu-0", "cpu-2"}


def test_a_report_that_comes_before_the_news_says_that_its_worker_leaves() -> None:
    shell = training(("agwu", {}), "cpu-0", "cpu-1")
    shell.end_early("cpu-1")
    shell.answer_to(StartRound, "cpu-1")
    assert [each.worker for each in shell.of(WorkerLeft)] == ["cpu-1"]
    assert leave(shell, "cpu-1") == []


@pytest.mark.parametrize("size", [1, 2])
def test_a_worker_whose_report_is_put_off_while_another_joins_leaves_at_once(size: int) -> None:
    shell = groups(("agwu", {})) if size == 2 else training(("agwu", {}), "cpu-0", "cpu-1")
    replica, leaver = ("group-1", "cpu-2") if size == 2 else ("cpu-1", "cpu-1")
    for i in range(7, 7 + size):
        shell.tell(facts.WorkerReady(f"cpu-{i}", "cpu", shell.now))
    for _ in range(size):
        shell.answer_to(orders.Calibrate)
    assert shell.answer_to(StartRound, replica) == [], "a join is under way"
    leave(shell, leaver)
    assert [each.worker for each in shell.of(WorkerLeft)] == [leaver]
    assert not shell.of(EndRound)
    assert shell.finish().status == "done"
    assert shell.reported == SAMPLES * EPOCHS


def test_a_worker_whose_round_has_not_begun_leaves_with_nothing_done() -> None:
    shell = training(("sgwu", {}), "cpu-0", "cpu-1")
    leave(shell, "cpu-1")
    shell.pending = [each for each in shell.pending if name_of(each[0]) != "cpu-1"]
    shell.tell(facts.RoundDropped("cpu-0", 1, 0, shell.now))
    shell.tell(facts.RoundDropped("cpu-1", 1, 1, shell.now))
    assert [(each.worker, each.samples_done) for each in shell.of(WorkerLeft)] == [("cpu-1", 0)]
    assert shell.finish().status == "done"
    assert shell.reported == SAMPLES * EPOCHS


def test_a_round_that_is_dropped_before_the_news_says_that_its_worker_leaves() -> None:
    shell = training(("bsp", {}), "cpu-0", "cpu-1")
    shell.pending = [each for each in shell.pending if name_of(each[0]) != "cpu-1"]
    shell.tell(facts.RoundDropped("cpu-1", 1, 1, shell.now))
    assert [each.worker for each in shell.of(WorkerLeft)] == ["cpu-1"]
    assert leave(shell, "cpu-1") == []
    assert shell.finish().status == "done"


def test_no_life_begins_with_a_worker_that_leaves() -> None:
    shell = training(("sgwu", {}), "cpu-0", "cpu-1")
    leave(shell, "cpu-1")
    shell.tell(facts.ServerGone(1, shell.now))
    assert [each.worker for each in shell.of(WorkerLeft)] == ["cpu-1"]
    assert shell.finish().status == "done"
    assert {order.replica for order in shell.of(orders.Join) if order.life == 2} == {"cpu-0"}


def test_a_worker_without_a_round_under_way_goes_at_once() -> None:
    shell = training(("sgwu", {}), "cpu-0", "cpu-1")
    shell.answer_to(StartRound, "cpu-1")
    leave(shell, "cpu-1")
    assert [each.samples_done for each in shell.of(WorkerLeft)] == [0]
    assert shell.finish().status == "done"
    assert shell.reported == SAMPLES * EPOCHS


PEERS: tuple[str, dict[str, Any]] = ("bsp", {"exchange": "asa"})


@pytest.mark.parametrize("part", [0.4, 1.0])
def test_peers_end_their_rounds_together_where_one_leaves_and_none_joins_anew(part: float) -> None:
    shell = training(PEERS, "cpu-0", "cpu-1", "cpu-2")
    shell.cut = part
    assert leave(shell, "cpu-1") == [EndRound(f"cpu-{i}", 1, 1, 0) for i in range(3)]
    for worker in ("cpu-0", "cpu-1", "cpu-2"):
        found = shell.answer_to(StartRound, worker)
    assert {round_.worker for round_ in begun([o for o in found if isinstance(o, StartRound)])} == {"cpu-0", "cpu-2"}
    assert len(shell.of(orders.Join)) == 3
    (left,) = shell.of(WorkerLeft)
    assert (left.worker, left.reason) == ("cpu-1", REASON)
    assert left.samples_done == int(part * SAMPLES // 3)
    assert shell.finish().status == "done"
    assert shell.reported == SAMPLES * EPOCHS
    assert not shell.of(orders.Rescue)


def test_peers_without_a_round_let_one_go_that_leaves() -> None:
    shell = Shell(settings_of(PEERS, "udpa"))
    shell.start("cpu-0", "cpu-1", "cpu-2")
    shell.answer_to(orders.Join)
    leave(shell, "cpu-1")
    assert [each.samples_done for each in shell.of(WorkerLeft)] == [0]
    assert shell.finish().status == "done"
    assert shell.reported == SAMPLES * EPOCHS


def test_a_peer_that_leaves_and_is_gone_before_the_meeting_is_lost() -> None:
    shell = training(PEERS, "cpu-0", "cpu-1", "cpu-2")
    leave(shell, "cpu-1")
    shell.tell(facts.WorkerGone(("cpu-1",), "connection lost", shell.now))
    assert [each.worker for each in shell.of(WorkerLost)] == ["cpu-1"]
    assert shell.of(orders.Rescue)
    assert shell.finish().status == "done"


def test_peers_go_on_when_a_worker_is_gone_that_does_not_meet_them() -> None:
    shell = training(PEERS, "cpu-0", "cpu-1", "cpu-2")
    leave(shell, "cpu-1")
    for worker in ("cpu-0", "cpu-1", "cpu-2"):
        shell.answer_to(StartRound, worker)
    gone = ("cpu-1", "desk-9")  # one that has left in good order, and one that the run never had
    assert shell.tell(facts.WorkerGone(gone, "connection lost", shell.now)) == []
    assert shell.finish().status == "done"
    assert not shell.of(orders.Rescue)


@pytest.mark.parametrize("asked", ["before", "meanwhile"])
def test_a_peer_that_leaves_while_the_center_is_looked_for_goes_behind_the_joins_of_the_next_life(asked: str) -> None:
    """It may alone have the center, which the first join takes."""
    shell = training(PEERS, "cpu-0", "cpu-1", "cpu-2")
    if asked == "before":
        leave(shell, "cpu-1")
    shell.tell(facts.WorkerGone(("cpu-0",), "connection lost", shell.now))
    if asked == "meanwhile":
        leave(shell, "cpu-1")
    assert not shell.of(WorkerLeft)
    found = shell.answer_to(orders.Rescue)
    assert found.index(orders.Join("cpu-2", 2, 1)) < found.index(orders.Dismiss("cpu-1", for_good=True))
    assert [each.worker for each in shell.of(WorkerLeft)] == ["cpu-1"]
    assert shell.finish().status == "done"
    assert shell.reported == SAMPLES * EPOCHS


def test_what_the_last_peer_has_is_kept_before_it_is_let_go() -> None:
    shell = training(PEERS, "cpu-0")
    leave(shell, "cpu-0")
    found = [type(order) for order in shell.answer_to(StartRound)]
    assert found.index(orders.Save) < found.index(orders.Dismiss) < found.index(orders.End)
    assert shell.of(orders.Save)[-1].epoch == shell.reported / SAMPLES > 0
    assert shell.end.status == "lost"


def test_a_worker_that_measures_itself_is_left_out() -> None:
    shell = Shell(settings_of(("sgwu", {}), "udpa"))
    for i in range(3):
        shell.tell(facts.WorkerReady(f"cpu-{i}", "cpu", 0.0))
    leave(shell, "cpu-2")
    assert [each.worker for each in shell.of(WorkerLeftOut)] == ["cpu-2"]


def test_a_worker_that_is_gone_before_it_has_reported_is_lost() -> None:
    shell = training(("sgwu", {}), "cpu-0", "cpu-1")
    leave(shell, "cpu-1")
    shell.tell(facts.WorkerGone(("cpu-1",), "connection lost", shell.now))
    assert [each.worker for each in shell.of(WorkerLost)] == ["cpu-1"]
    assert not shell.of(WorkerLeft)
    assert shell.finish().status == "done"


@pytest.mark.parametrize("rule", ["sgwu", "agwu", "bsp", "local-sgd"])
@pytest.mark.parametrize("leaves", [True, False])
def test_what_the_last_worker_has_pushed_is_kept_before_the_run_ends(rule: str, leaves: bool) -> None:
    shell = training((rule, {}), "cpu-0")
    if leaves:
        assert leave(shell, "cpu-0") == [EndRound("cpu-0", 1, 1, 0)]
        found = shell.answer_to(StartRound)
    else:
        shell.answer_to(StartRound)
        found = shell.tell(facts.WorkerGone(("cpu-0",), "connection lost", shell.now))
    kept, cancelled, end = found[-3:]
    assert isinstance(kept, orders.Save)
    assert kept.epoch == shell.reported / SAMPLES > 0
    assert isinstance(cancelled, orders.CancelAll)
    assert isinstance(end, orders.End)
    assert end.status == "lost"
    assert f"{REASON if leaves else 'connection lost'}, and it was the last of the run" in str(end.error)
    resumed = Shell(shell.settings, Kept(1, kept.epoch, kept.book))
    resumed.start("cpu-0")
    assert resumed.finish().status == "done"
    assert shell.reported + resumed.reported == SAMPLES * EPOCHS


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_server_moves_in_good_order_and_nothing_is_done_again(rule: str) -> None:
    shell = training((rule, {}), "cpu-0", "cpu-1")
    found = shell.tell(facts.ServerLeaving(1, REASON, shell.now))
    assert found == [EndRound("cpu-0", 1, 1, 0), EndRound("cpu-1", 1, 1, 0)]
    assert shell.tell(facts.ServerLeaving(1, REASON, shell.now)) == []
    shell.answer_to(StartRound, "cpu-0")
    shell.answer_to(StartRound, "cpu-1")
    made = shell.reported
    shell.answer_to(orders.Save)
    assert [(order.life, order.moved) for order in shell.of(StartServer)] == [(1, False), (2, True)]
    shell.answer_to(StartServer)
    assert [each.message for each in shell.of(Warned)] == [f"the parameter server moves to ps, as {REASON}"]
    assert shell.coordinator.rounds is not None
    assert shell.coordinator.rounds.done == made > 0
    assert shell.finish().status == "done"
    assert shell.reported == SAMPLES * EPOCHS


def test_a_server_leaves_while_replicas_join() -> None:
    shell = Shell(settings_of(("agwu", {}), "udpa"))
    shell.start("cpu-0", "cpu-1")
    shell.answer_to(StartServer)
    shell.answer_to(orders.Join)
    assert shell.tell(facts.ServerLeaving(1, REASON, shell.now)) == []
    shell.answer_to(orders.Join)
    assert not shell.of(StartRound)
    assert shell.finish().status == "done"
    assert shell.reported == SAMPLES * EPOCHS


# --- workers that another run is to have ---


def recall(shell: Shell, *workers: str) -> list[orders.Order]:
    return shell.tell(facts.WorkersRecalled(workers, shell.now))


def elastic(rule: tuple[str, dict[str, Any]], *workers: str, least: int = 1, host: str = "ps") -> Shell:
    return training(rule, *workers, host=host, wanted={"cpu": 4}, least={"cpu": least})


@pytest.mark.parametrize("rule", [*EXCHANGES, ("bsp", {"exchange": "asa"})], ids=str)
def test_a_worker_that_is_recalled_goes_and_comes_again(rule: Any) -> None:
    shell = elastic(rule, "cpu-0", "cpu-1", "cpu-2")
    recall(shell, "cpu-1")
    assert recall(shell, "cpu-1") == [], "it was told"
    while orders.Dismiss("cpu-1", for_good=True) not in shell.orders:
        shell.answer(0)
    (left,) = shell.of(WorkerLeft)
    assert (left.worker, left.reason) == ("cpu-1", "another job is to have it")
    shell.tell(facts.WorkerReady("cpu-1", "cpu", shell.now))
    assert shell.finish().status == "done"
    assert shell.reported == SAMPLES * EPOCHS
    assert not shell.of(WorkerLost)
    assert [each.worker for each in shell.of(WorkerJoined)] == ["cpu-1"]


def test_a_run_keeps_its_least_whatever_is_recalled() -> None:
    shell = elastic(("sgwu", {}), "cpu-0", "cpu-1", "cpu-2", least=2)
    assert [name_of(order) for order in recall(shell, "cpu-0", "cpu-1", "cpu-2")] == ["cpu-0"]
    assert recall(shell, "cpu-0", "cpu-1", "cpu-2") == []
    shell.tell(facts.WorkerReady("cpu-3", "cpu", shell.now))
    shell.answer_to(orders.Calibrate)
    assert [name_of(order) for order in recall(shell, "cpu-1", "cpu-2") if isinstance(order, EndRound)] == ["cpu-1"]


def test_a_run_of_a_fixed_number_gives_none_up_and_one_of_any_number_keeps_one() -> None:
    assert recall(training(("sgwu", {}), "cpu-0", "cpu-1", wanted={"cpu": 2}), "cpu-0", "cpu-1") == []
    assert len(recall(training(("sgwu", {}), "cpu-0", "cpu-1"), "cpu-0", "cpu-1")) == 1


def test_a_newcomer_that_is_recalled_as_it_measures_itself_is_left_out_and_a_run_begins_with_its_least() -> None:
    shell = elastic(("sgwu", {}), "cpu-0", "cpu-1", least=2)
    shell.tell(facts.WorkerReady("cpu-2", "cpu", shell.now))
    recall(shell, "cpu-2")
    assert [each.worker for each in shell.of(WorkerLeftOut)] == ["cpu-2"]
    begins = Shell(shell.settings)
    for i in range(3):
        begins.tell(facts.WorkerReady(f"cpu-{i}", "cpu", 0.0))
    recall(begins, "cpu-0", "cpu-1")
    assert [each.worker for each in begins.of(WorkerLeftOut)] == ["cpu-0"]


def test_a_server_moves_off_a_worker_that_is_recalled() -> None:
    shell = elastic(("sgwu", {}), "cpu-0", "cpu-1", host="cpu-1")
    found, shell.host = recall(shell, "cpu-1"), "cpu-0"
    assert {name_of(order) for order in found if isinstance(order, EndRound)} == {"cpu-0", "cpu-1"}
    assert shell.finish().status == "done"
    assert shell.reported == SAMPLES * EPOCHS
    assert [order.moved for order in shell.of(StartServer)] == [False, True]
    assert recall(training(("sgwu", {}), "cpu-0"), "cpu-0") == []


def test_a_run_whose_last_worker_leaves_as_its_server_goes_waits_for_one_that_measures_itself() -> None:
    shell = training(("bsp", {}), "cpu-0")
    shell.tell(facts.WorkerReady("cpu-1", "cpu", shell.now))
    shell.tell(facts.WorkerLeaving(("cpu-0",), "it is shut down", shell.now))
    shell.tell(facts.ServerGone(shell.coordinator.life, shell.now))
    assert shell.finish().status == "done"
    assert shell.coordinator.rounds is not None
    assert shell.coordinator.rounds.done == EPOCHS * SAMPLES


# --- groups ---


def groups(rule: tuple[str, dict[str, Any]], workers: int = 4, **settings: Any) -> Shell:
    """Groups of two whose first rounds are under way: group-0 is cpu-0 and cpu-3, group-1 is cpu-1 and cpu-2."""
    shell = Shell(settings_of(rule, "udpa", replica_size=2, **settings))
    shell.start(*(f"cpu-{i}" for i in range(workers)))
    shell.answer_to(StartServer)
    for _ in range(workers // 2):
        shell.answer_to(orders.Join)
    return shell


def members(shell: Shell) -> dict[str, tuple[str, ...]]:
    return dict(shell.of(orders.FormGroups)[-1].groups)


@pytest.mark.parametrize("rule", EXCHANGES, ids=lambda rule: rule[0])
@pytest.mark.parametrize("part", [0.0, 0.4, 1.0])
def test_a_group_of_which_a_worker_leaves_ends_its_round_and_is_formed_anew(rule: Any, part: float) -> None:
    shell = groups(rule)
    assert members(shell) == {"group-0": ("cpu-0", "cpu-3"), "group-1": ("cpu-1", "cpu-2")}
    shell.cut = part
    assert leave(shell, "cpu-2") == [EndRound("group-1", 1, 1, 0)]
    assert leave(shell, "cpu-2") == [], "it was told"
    found = shell.answer_to(StartRound, "group-1")
    (left,) = shell.of(WorkerLeft)
    done = int(part * begun(shell.of(StartRound))[1].samples)
    assert (left.worker, left.reason, left.samples_done, left.samples_moved) == ("cpu-2", REASON, done, 0)
    assert [each.samples for each in shell.of(RoundEnded)] == [done] * (done > 0)
    assert shell.of(orders.FormGroups)[-1].changed == ("group-1",)
    assert members(shell)["group-1"] == ("cpu-1",)
    assert [each.message for each in shell.of(Warned)] == [f"group-1 (cpu-2: {REASON}) is formed anew of cpu-1"]
    joins_at_once = "group-1" in [order.replica for order in found if isinstance(order, orders.Join)]
    assert joins_at_once != shell.settings.rule.barrier
    assert (Leave("group-1", 1, 1) in found) != shell.settings.rule.barrier, "its push may wait at the barrier"
    assert shell.finish().status == "done"
    assert shell.reported == SAMPLES * EPOCHS
    assert not shell.of(WorkerLost)
    assert not shell.of(orders.Cancel)
    if rule[0] != "parallel-sgd":  # of one round
        assert "group-1" in {round_.worker for round_ in begun(shell.of(StartRound))[2:]}


def test_a_group_that_is_lost_at_once_while_one_of_it_leaves_is_lost_once() -> None:
    shell = groups(("sgwu", {}))
    leave(shell, "cpu-2")
    shell.tell(facts.WorkerGone(("cpu-1", "cpu-2"), "power cut", shell.now))
    assert shell.finish().status == "done"
    assert [each.worker for each in shell.of(WorkerLost)] == ["cpu-1", "group-1"]
    assert [each.worker for each in shell.of(WorkerLeft)] == ["cpu-2"]
    assert shell.coordinator.rounds is not None
    assert shell.coordinator.rounds.done == EPOCHS * SAMPLES


def test_a_worker_in_no_group_takes_the_place_of_one_that_leaves() -> None:
    shell = groups(("sgwu", {}), workers=5)
    leave(shell, "cpu-0")
    shell.answer_to(StartRound, "group-0")
    assert members(shell)["group-0"] == ("cpu-3", "cpu-4")
    leave(shell, "cpu-4")
    assert shell.finish().status == "done"
    assert shell.reported == SAMPLES * EPOCHS
    assert [each.worker for each in shell.of(WorkerLeft)] == ["cpu-0", "cpu-4"]


@pytest.mark.parametrize("rule", ["sgwu", "agwu", "bsp"])
def test_a_group_of_which_all_workers_leave_gives_its_samples_to_the_others(rule: str) -> None:
    shell = groups((rule, {}))
    leave(shell, "cpu-1")
    leave(shell, "cpu-2")
    shell.answer_to(StartRound, "group-1")
    left = [(each.worker, each.samples_done, each.samples_moved) for each in shell.of(WorkerLeft)]
    assert left == [("cpu-1", 15, 0), ("cpu-2", 15, 0), ("group-1", 15, SAMPLES // 2)]
    assert (Leave("group-1", 1, 1) in shell.orders) != shell.settings.rule.barrier
    assert shell.finish().status == "done"
    assert shell.reported == SAMPLES * EPOCHS
    assert len(shell.of(orders.FormGroups)) == 1


def test_no_group_is_formed_of_a_worker_that_leaves_where_another_is_lost_meanwhile() -> None:
    """A machine with both of them may be on its way down."""
    shell = groups(("sgwu", {}))
    leave(shell, "cpu-1")
    leave(shell, "cpu-2")
    shell.tell(facts.WorkerGone(("cpu-1",), "connection lost", shell.now))
    assert [each.worker for each in shell.of(WorkerLost)] == ["cpu-1", "group-1"]
    assert [(each.worker, each.samples_done) for each in shell.of(WorkerLeft)] == [("cpu-2", 0)]
    assert shell.finish().status == "done"
    assert shell.reported == SAMPLES * EPOCHS


def test_a_worker_of_a_group_without_a_round_leaves_at_once() -> None:
    shell = groups(("sgwu", {}))
    shell.answer_to(StartRound, "group-1")
    leave(shell, "cpu-2")
    assert [(each.worker, each.samples_done) for each in shell.of(WorkerLeft)] == [("cpu-2", 0)]
    assert [each.message for each in shell.of(Warned)] == [f"group-1 (cpu-2: {REASON}) is formed anew of cpu-1"]
    assert shell.finish().status == "done"
    assert shell.reported == SAMPLES * EPOCHS


def test_groups_are_formed_without_a_worker_that_leaves_while_their_server_starts() -> None:
    shell = Shell(settings_of(("sgwu", {}), "udpa", replica_size=2))
    shell.start(*(f"cpu-{i}" for i in range(5)))
    leave(shell, "cpu-0")
    assert {worker for own in members(shell).values() for worker in own} == {f"cpu-{i}" for i in (1, 2, 3, 4)}
    assert shell.finish().status == "done"
    assert shell.reported == SAMPLES * EPOCHS


@pytest.mark.parametrize("goes", [facts.WorkerGone, facts.WorkerLeaving])
def test_the_last_group_may_lose_a_worker_while_the_server_moves_or_the_end_is_kept(goes: Any) -> None:
    shell = groups(("sgwu", {}), workers=2)
    shell.tell(facts.ServerLeaving(1, REASON, shell.now))
    shell.answer_to(StartRound)
    shell.tell(goes(("cpu-0",), "gone", shell.now))
    shell.tell(facts.WorkerReady("cpu-2", "cpu", shell.now))
    shell.answer_to(orders.Calibrate)
    while not (shell.pending and isinstance(shell.pending[0][0], orders.Save) and shell.reported == EPOCHS * SAMPLES):
        shell.answer(0)
    shell.tell(goes(("cpu-2",), "gone", shell.now))
    assert shell.finish().status == "done"


def test_what_the_last_group_has_pushed_is_kept_before_the_run_ends() -> None:
    shell = groups(("sgwu", {}), workers=2)
    leave(shell, "cpu-0")
    leave(shell, "cpu-1")
    found = [type(order) for order in shell.answer_to(StartRound)]
    assert found.index(orders.Save) < found.index(orders.End)
    assert shell.end.status == "lost"
    assert shell.of(orders.Save)[-1].epoch == shell.reported / SAMPLES > 0


@pytest.mark.parametrize("rule", ["sgwu", "agwu"])
def test_groups_end_their_rounds_early_where_the_server_moves(rule: str) -> None:
    shell = groups((rule, {}))
    found = shell.tell(facts.ServerLeaving(1, REASON, shell.now))
    assert found == [EndRound("group-0", 1, 1, 0), EndRound("group-1", 1, 1, 0)]
    leave(shell, "cpu-2")
    assert shell.finish().status == "done"
    assert shell.reported == SAMPLES * EPOCHS
    assert [order.moved for order in shell.of(StartServer)] == [False, True]
    assert members(shell).keys() == {"group-0"}
    assert len(members(shell)["group-0"]) == 2


def test_a_worker_of_a_group_is_recalled_and_its_group_is_formed_anew() -> None:
    shell = Shell(settings_of(("sgwu", {}), "udpa", replica_size=2))
    shell.start("cpu-0", "cpu-1", "cpu-2", "cpu-3")
    assert recall(shell, "cpu-0") == [], "the server starts"
    shell.answer_to(StartServer)
    for _ in range(2):
        shell.answer_to(orders.Join)
    assert recall(shell, "cpu-0") == [EndRound("group-0", 1, 1, 0)]
    shell.answer_to(StartRound, "group-0")
    assert [each.worker for each in shell.of(WorkerLeft)] == ["cpu-0"]
    assert shell.finish().status == "done"
    assert shell.reported == SAMPLES * EPOCHS
