"""What a run survives, decided without a cluster: laws that tests on processes showed once, for every rule."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from daskcnn.errors import ClusterError, Diverged, Interrupted
from daskcnn.events import SamplesAllocated, Warned, WorkerIgnored, WorkerJoined, WorkerLost
from daskcnn.partition.rounds import Round
from daskcnn.ps import RULES
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.coordinator import GO_BACK, Phase
from daskcnn.training.coordinator.departures import FAR
from daskcnn.training.coordinator.records import Kept
from tests.training.coordinator_shell import Shell
from tests.training.test_coordinator import PEERS, lost, training
from tests.training.test_coordinator_machine import EPOCHS, SAMPLES, STALL, settings_of

every_rule = pytest.mark.parametrize("which", [*((name, {}) for name in RULES), PEERS], ids=[*RULES, "asa"])
GROUPS = {"replica_size": 2}


def end_of(shell: Shell) -> orders.End:
    """The last order."""
    end = shell.orders[-1]
    assert isinstance(end, orders.End)
    return end


def sizes(shell: Shell) -> list[dict[str, int]]:
    """Who had how many samples, each time that was logged."""
    return [dict(event.sizes) for event in shell.of(SamplesAllocated)]


# --- workers are lost, and come ---


@every_rule
@pytest.mark.parametrize("partition", ["udpa", "idpa"])
def test_a_lost_worker_leaves_its_samples_and_every_sample_is_presented(which: Any, partition: str) -> None:
    """The log has the new parts also where all samples were handed out before; in the end each has an owner."""
    shell = Shell(settings_of(which, partition))
    shell.start("cpu-0", "cpu-1", "cpu-2")
    while shell.reported < SAMPLES // 3:
        shell.answer(0)
    told = len(sizes(shell))
    shell.tell(facts.WorkerGone(("cpu-1",), "gone", shell.now))
    assert shell.finish().status == "done"
    (gone,) = shell.of(WorkerLost)
    assert gone.worker == "cpu-1"
    assert gone.samples_moved > 0
    later = sizes(shell)[told:]
    assert later
    assert all(each.keys() <= {"cpu-0", "cpu-2"} for each in later)
    assert sum(later[-1].values()) == SAMPLES
    assert shell.coordinator.rounds is not None
    assert shell.coordinator.rounds.done == EPOCHS * SAMPLES


@every_rule
def test_a_worker_that_comes_takes_its_share_and_every_sample_is_presented(which: Any) -> None:
    shell = training(which, workers=2)
    shell.tell(facts.WorkerReady("cpu-2", "cpu", shell.now))
    assert shell.finish().status == "done"
    assert shell.coordinator.rounds is not None
    assert shell.coordinator.rounds.done == EPOCHS * SAMPLES
    if which[0] == "parallel-sgd":  # its replicas meet once, at the end: there is no round left to join
        return
    (joined,) = shell.of(WorkerJoined)
    assert (joined.worker, joined.samples > 0) == ("cpu-2", True)
    assert sizes(shell)[-1].keys() == {"cpu-0", "cpu-1", "cpu-2"}


def test_a_worker_that_the_job_does_not_want_is_mentioned_and_ignored() -> None:
    shell = Shell(settings_of(("sgwu", {}), "udpa", wanted={"cpu": 2}))
    shell.start("cpu-0", "cpu-1")
    for worker, kind, asked in (("cpu-2", "cpu", "cpu = 2, and the run has as many"), ("gpu-0", "gpu", "no gpu")):
        (log,) = shell.tell(facts.WorkerReady(worker, kind, 3.0))
        assert isinstance(log, orders.Log)
        assert isinstance(ignored := log.event, WorkerIgnored)
        assert (ignored.address, ignored.reason) == (worker, f"cluster.workers (--workers) asks for {asked}")
        assert "leave it out to use all" in ignored.remedy


def test_a_worker_that_comes_for_a_lost_one_is_wanted() -> None:
    shell = Shell(settings_of(("sgwu", {}), "udpa", wanted={"cpu": 2}))
    shell.start("cpu-0", "cpu-1")
    shell.tell(facts.WorkerGone(("cpu-1",), "gone", 3.0))
    assert shell.tell(facts.WorkerReady("cpu-2", "cpu", 4.0)) == [orders.Calibrate("cpu-2")]


# --- the server is lost ---


@every_rule
def test_a_run_whose_server_is_lost_twice_presents_every_sample(which: Any) -> None:
    if which == PEERS:
        pytest.skip("peers have no server that could be lost")
    shell = training(which)
    for _ in range(2):
        for _ in range(1 if which[0] == "parallel-sgd" else 4):  # which has but one round
            shell.answer(0)
        if shell.server is not None:
            life, shell.server = shell.server, None
            found = shell.tell(facts.ServerGone(life, shell.now))
            assert found[-1] == orders.StartServer(life + 1, moved=True)
    end = shell.finish()
    assert end.status == "done"
    assert shell.coordinator.kept.epoch == EPOCHS
    assert any("merges are done again" in event.text for event in shell.of(Warned))


def test_groups_are_formed_anew_with_a_new_server() -> None:
    shell = training("sgwu", workers=4, **GROUPS)
    shell.tell(facts.ServerGone(1, 9.0))
    found = shell.answer_to(orders.StartServer)
    assert [order.replica for order in found if isinstance(order, orders.Join)] == ["group-0", "group-1"]
    assert len(shell.of(orders.FormGroups)) == 2


# --- silence ---


@every_rule
def test_a_worker_that_does_not_join_is_given_up(which: Any) -> None:
    """The other joins again or goes on, with all samples."""
    shell = Shell(settings_of(which, "udpa"))
    shell.start("cpu-0", "cpu-1", "cpu-2")
    if not shell.settings.peers:
        shell.answer_to(orders.StartServer)
    begun = shell.now
    for worker in ("cpu-0", "cpu-2"):
        shell.answer_to(orders.Join, worker)
    assert shell.tell(facts.Tick(begun + STALL)) == []
    found = shell.tell(facts.Tick(begun + STALL + 1.0))
    assert lost("cpu-1", 20, f"no report for {STALL:.0f} s") in found
    shell.pending = [each for each in shell.pending if getattr(each[0], "replica", "") != "cpu-1"]
    assert shell.finish().status == "done"
    assert shell.coordinator.rounds is not None
    assert shell.coordinator.rounds.done == EPOCHS * SAMPLES


def test_a_peer_that_stands_still_is_given_up_and_the_round_begins_again() -> None:
    shell = training(PEERS, workers=3)
    shell.tell(facts.Tick(500.0))
    found = shell.tell(facts.Waits(frozenset({"cpu-0", "cpu-2"}), 500.0))
    assert [order.worker for order in found if isinstance(order, orders.Dismiss)] == ["cpu-1"]
    assert found[-2:] == [orders.CancelAll(), orders.Rescue()]
    assert shell.finish().status == "done"


def test_a_worker_whose_pushes_keep_coming_is_given_up_only_once_they_do_not() -> None:
    """Exchanges may take most of a round, and the worker may be sending as the server is asked."""
    shell, limit = training("bsp"), 33.0
    assert shell.tell(facts.Tick(500.0)) == [orders.AskWaiting(("cpu-0", "cpu-1"))]
    assert shell.tell(facts.Waits(frozenset(), 500.0, heard={"cpu-0": 1.0, "cpu-1": 2.0, "cpu-9": 0.0})) == []
    assert shell.tell(facts.Tick(498.0 + limit)) == [], "the clock of each begins anew"
    assert shell.tell(facts.Tick(498.5 + limit)) == [orders.AskWaiting(("cpu-1",))]
    found = shell.tell(facts.Waits(frozenset({"cpu-0"}), 498.5 + limit, heard={"cpu-0": 400.0, "cpu-1": limit + 0.5}))
    assert lost("cpu-1", 30, f"no report for {limit:.0f} s") in found
    assert shell.finish().status == "done"


def test_peers_that_all_wait_for_each_other_end_the_run() -> None:
    shell = training(PEERS)
    shell.tell(facts.Tick(500.0))
    shell.tell(facts.Waits(frozenset({"cpu-0", "cpu-1"}), 500.0))
    end = end_of(shell)
    assert end.status == "lost"
    assert "waiting for cpu-0, cpu-1" in str(end.error)


def test_a_group_that_stands_still_is_given_up_with_the_worker_that_it_waits_for() -> None:
    """The member that is not to blame goes on as the group."""
    shell = training("sgwu", workers=4, **GROUPS)
    shell.answer_to(orders.StartRound, "group-1")
    shell.tell(facts.Tick(500.0))
    found = shell.tell(facts.Waits(frozenset(), 500.0, {"group-0": ("cpu-3",)}))
    (gone,) = shell.of(WorkerLost)
    assert gone.worker == "cpu-3"
    assert "no report for" in gone.reason
    assert [order.worker for order in found if isinstance(order, orders.Dismiss)] == ["cpu-3"]
    assert [event.text for event in shell.of(Warned)] == [
        f"group-0 (cpu-3: {gone.reason}) is formed anew of cpu-0; its round begins again"
    ]
    assert shell.coordinator.roster.alive.keys() == {"cpu-0", "cpu-1", "cpu-2"}
    assert shell.finish().status == "done"


# --- tasks out of step ---


@pytest.mark.parametrize("which", [(PEERS, {}), (("sgwu", {}), GROUPS)], ids=["peers", "groups"])
def test_tasks_out_of_step_that_take_the_run_back_to_the_same_state_again_and_again_end_it(which: Any) -> None:
    """A blocked way between two workers does not go away: the words name it, and what was trained is kept."""
    rule, groups = which
    shell = training(rule, workers=4, **groups)
    blocked = "worker cpu-1 does not come to the meeting"
    for _ in range(GO_BACK):
        while shell.coordinator.phase is not Phase.TRAINING:
            shell.answer(0)
        shell.tell(facts.OutOfStep(shell.coordinator.life, blocked, shell.now))
    end = shell.finish()
    assert end.status == "lost"
    assert str(end.error).startswith(f"{blocked}, for the {GO_BACK}th time behind step 0: do all workers reach each")
    assert shell.coordinator.life == GO_BACK
    assert shell.of(orders.Save)


def test_peers_that_do_not_all_come_to_a_meeting_begin_the_round_again_from_the_last_center() -> None:
    """As often as it happens, if they have met in between."""
    shell = training(PEERS, epochs=2 * GO_BACK)
    for _ in range(GO_BACK + 1):
        shell.answer_to(orders.StartRound), shell.answer_to(orders.StartRound)
        found = shell.tell(facts.OutOfStep(shell.coordinator.life, "worker cpu-1 does not come", shell.now))
        assert found[-2:] == [orders.CancelAll(), orders.Rescue()]
        shell.answer_to(orders.Rescue)
        shell.answer_to(orders.Join), shell.answer_to(orders.Join)
    assert shell.finish().status == "done"
    assert shell.reported == 2 * GO_BACK * SAMPLES, "no round that has ended is made again"


# --- groups ---


@pytest.mark.parametrize("strategy", RULES)
def test_a_group_that_loses_a_member_is_formed_anew_and_its_round_begins_again(strategy: str) -> None:
    shell = training(strategy, workers=4, **GROUPS)
    (formed,) = shell.of(orders.FormGroups)
    group, members = next((name, members) for name, members in formed.groups.items() if "cpu-1" in members)
    if strategy != "parallel-sgd":
        shell.answer(0)
    found = shell.tell(facts.WorkerGone(("cpu-1",), "gone", shell.now))
    (left,) = {*members} - {"cpu-1"}
    of_group = [
        order for order in found if getattr(order, "replica", "") == group or isinstance(order, orders.FormGroups)
    ]
    assert [type(order) for order in of_group[:3]] == [orders.Cancel, orders.Leave, orders.FormGroups]
    (*_, anew) = shell.of(orders.FormGroups)
    assert (anew.changed, anew.groups[group]) == ((group,), (left,))
    assert shell.finish().status == "done"
    assert [event.worker for event in shell.of(WorkerLost)] == ["cpu-1"]
    assert shell.coordinator.rounds is not None
    assert shell.coordinator.rounds.done == EPOCHS * SAMPLES
    assert {order.round.worker for order in shell.of(orders.StartRound)} == {"group-0", "group-1"}


def test_a_group_that_is_formed_anew_while_others_join_does_not_wait_for_the_end_of_their_rounds() -> None:
    shell = Shell(settings_of(("agwu", {}), "udpa", **GROUPS))
    shell.start(*(f"cpu-{i}" for i in range(4)))
    shell.answer_to(orders.StartServer)
    shell.answer_to(orders.Join, "group-0")
    found = shell.tell(facts.WorkerGone(("cpu-2",), "gone", shell.now))
    assert [order.round.worker for order in found if isinstance(order, orders.StartRound)] == ["group-0"]
    assert orders.Join("group-1", 1, 2) in found
    assert shell.finish().status == "done"


@pytest.mark.parametrize("size", [1, 2])
def test_what_a_replica_has_pushed_counts_where_it_is_lost_and_its_report_was_put_off(size: int) -> None:
    """One worker of each group is lost: both are formed anew, and go on."""
    shell = Shell(settings_of(("agwu", {}), "udpa", replica_size=size))
    shell.start(*(f"cpu-{i}" for i in range(size)))
    shell.answer_to(orders.StartServer)
    shell.answer_to(orders.Join)
    for worker in ("cpu-2", "cpu-3"):
        shell.tell(facts.WorkerReady(worker, "cpu", shell.now))
        shell.answer_to(orders.Calibrate)
    shell.answer_to(orders.StartRound)
    shell.tell(facts.WorkerGone(("cpu-0", "cpu-2"), "gone", shell.now))
    assert shell.finish().status == "done"
    assert shell.reported == EPOCHS * SAMPLES
    assert shell.coordinator.rounds is not None
    assert shell.coordinator.rounds.done == EPOCHS * SAMPLES


def test_a_group_takes_a_worker_that_was_left_out_for_one_that_it_lost() -> None:
    """It is the only group: the run goes on with the server's center."""
    shell = training("sgwu", workers=3, **GROUPS)
    (formed,) = shell.of(orders.FormGroups)
    assert formed.left_out == ("cpu-2",)
    gone, left = formed.groups["group-0"]
    found = shell.tell(facts.WorkerGone((gone,), "gone", 9.0))
    assert orders.FormGroups({"group-0": (left, "cpu-2")}, (), True, ("group-0",)) in found
    assert shell.finish().status == "done"
    assert len(shell.of(orders.StartServer)) == 1


def test_a_group_that_is_lost_as_a_whole_leaves_its_samples_to_the_others() -> None:
    shell = training("sgwu", workers=4, **GROUPS)
    (formed,) = shell.of(orders.FormGroups)
    shell.tell(facts.WorkerGone(formed.groups["group-0"], "gone", shell.now))
    assert shell.finish().status == "done"
    *_, group = shell.of(WorkerLost)
    assert (group.worker, group.samples_moved > 0) == ("group-0", True)
    assert sizes(shell)[-1].keys() == {"group-1"}
    assert shell.coordinator.rounds is not None
    assert shell.coordinator.rounds.done == EPOCHS * SAMPLES


@pytest.mark.parametrize("strategy", ["sgwu", "agwu", "bsp"])
def test_a_worker_that_comes_fills_up_a_group_and_others_make_one(strategy: str) -> None:
    shell = training(strategy, workers=4, **GROUPS)
    shell.tell(facts.WorkerGone(("cpu-3",), "gone", shell.now))
    for worker in ("cpu-4", "cpu-5", "cpu-6"):
        shell.tell(facts.WorkerReady(worker, "cpu", shell.now))
        shell.answer_to(orders.Calibrate)
    assert shell.finish().status == "done"
    (*_, last) = shell.of(orders.FormGroups)
    assert sorted(map(len, last.groups.values())) == [2, 2, 2]
    assert {worker for own in last.groups.values() for worker in own} == {f"cpu-{i}" for i in (0, 1, 2, 4, 5, 6)}
    (joined,) = shell.of(WorkerJoined)
    assert (joined.worker, joined.samples > 0) == ("group-2", True)
    assert shell.coordinator.rounds is not None
    assert shell.coordinator.rounds.done == EPOCHS * SAMPLES


def test_a_worker_that_no_group_lacks_is_told_when_it_is_used() -> None:
    shell = training("sgwu", workers=4, **GROUPS)
    shell.tell(facts.WorkerReady("cpu-4", "cpu", shell.now))
    assert shell.finish().status == "done"
    assert [event.text for event in shell.of(Warned)] == [
        "worker cpu-4 waits until a group lacks one, or 2 workers make another group"
    ]


def test_groups_that_a_new_server_finds_too_few_for_are_smaller() -> None:
    shell = training("sgwu", workers=2, **GROUPS)
    shell.tell(facts.ServerGone(1, shell.now))
    shell.tell(facts.WorkerGone(("cpu-0",), "gone", shell.now))
    assert shell.finish().status == "done"
    (*_, last) = shell.of(orders.FormGroups)
    assert last.groups == {"group-0": ("cpu-1",)}


# --- states that are kept by time ---


@every_rule
def test_a_state_is_kept_after_so_many_seconds(which: Any) -> None:
    """Behind a barrier between two rounds; after the loss of a server no more than that is done again."""
    shell = Shell(settings_of(which, "udpa", checkpoint_every=100.0, snapshot_every=6.0, epochs=8))
    shell.start("cpu-0", "cpu-1")
    assert shell.finish().status == "done"
    saved = [fact.at for fact in shell.facts if isinstance(fact, facts.Saved)]
    if which[0] != "parallel-sgd":  # its replicas meet once, at the end
        assert len(saved) > 1
        assert max(b - a for a, b in pairwise(saved)) <= 12.0


def test_the_slowest_are_in_no_group_and_named() -> None:
    shell = training("sgwu", workers=3, **GROUPS)
    (warning,) = shell.of(Warned)
    assert warning.text.startswith("cpu-2: left out, the slowest")


def test_more_workers_to_a_group_than_there_are() -> None:
    shell = Shell(settings_of(("sgwu", {}), "udpa", replica_size=5))
    shell.start("cpu-0", "cpu-1", "cpu-2", "cpu-3")
    end = end_of(shell)
    assert end.status == "unusable"
    assert isinstance(end.error, ClusterError)
    assert "train.replica_size = 5: there are 4 workers" in str(end.error)


# --- ends, and going on from them ---


@pytest.mark.parametrize("phase", [Phase.CLOSING, Phase.STOPPING])
def test_peers_look_for_the_center_where_the_one_that_was_asked_for_it_is_lost(phase: Phase) -> None:
    shell = training(PEERS, workers=3)
    if phase is Phase.STOPPING:
        shell.tell(facts.Interrupted(15, shell.now))
    while shell.coordinator.phase is not phase:
        shell.answer(0)
    shell.pending = [each for each in shell.pending if not isinstance(each[0], orders.Save)]
    shell.tell(facts.WorkerGone(("cpu-0",), "connection lost", shell.now))
    assert orders.Rescue() in shell.tell(facts.NotKept(shell.now))
    assert shell.finish().status == ("interrupted" if phase is Phase.STOPPING else "done")
    assert shell.coordinator.kept.step == shell.version


def test_peers_that_pause_go_on_from_the_state_before_where_the_last_that_had_the_center_is_lost() -> None:
    shell = Shell(settings_of(PEERS, "idpa", least={"cpu": 2}, wanted={"cpu": 8}, wait=60.0))
    shell.start("cpu-0", "cpu-1")
    for _ in range(2):
        shell.answer_to(orders.Join)
    shell.tell(facts.WorkerGone(("cpu-1",), "connection lost", shell.now))
    shell.answer_to(orders.Rescue)
    shell.pending = [each for each in shell.pending if not isinstance(each[0], orders.Save)]
    shell.tell(facts.WorkerGone(("cpu-0",), "connection lost", shell.now))
    shell.tell(facts.NotKept(shell.now))
    for worker in ("cpu-4", "cpu-5"):
        shell.tell(facts.WorkerReady(worker, "cpu", shell.now))
    assert shell.finish().status == "done"
    assert shell.coordinator.rounds is not None
    assert shell.coordinator.rounds.done == EPOCHS * SAMPLES


@pytest.mark.parametrize("pauses", [False, True])
def test_peers_that_lose_a_rescued_center_go_back_to_the_state_saved_last_and_say_so(pauses: bool) -> None:
    """The rounds go back with the weights, before the next life has made a round or while what it has is kept."""
    least: dict[str, Any] = {"least": {"cpu": 2}, "wanted": {"cpu": 8}, "wait": 60.0} if pauses else {}
    shell = Shell(settings_of(PEERS, "udpa", checkpoint_every=100.0, **least))
    shell.accuracy = 0.0
    shell.start("cpu-0", "cpu-1")
    shell.answer_to(orders.Join), shell.answer_to(orders.Join)
    shell.answer_to(orders.StartRound), shell.answer_to(orders.StartRound)
    if not pauses:
        shell.tell(facts.WorkerReady("cpu-2", "cpu", shell.now))
        shell.answer_to(orders.Calibrate)
    shell.tell(facts.WorkerGone(("cpu-0",), "connection lost", shell.now))
    shell.answer_to(orders.Rescue)
    assert not shell.of(orders.Restore)
    shell.pending = [each for each in shell.pending if not isinstance(each[0], orders.Save)]
    shell.tell(facts.WorkerGone(("cpu-1",), "connection lost", shell.now))
    if pauses:
        shell.tell(facts.NotKept(shell.now))
        for worker in ("cpu-4", "cpu-5"):
            shell.tell(facts.WorkerReady(worker, "cpu", shell.now))
    else:
        shell.pending = [each for each in shell.pending if not isinstance(each[0], orders.Rescue)]
        shell.tell(facts.Rescued(None, shell.now))
    assert shell.of(orders.Restore)
    told = "no worker is left that has the last weights: back to the state of epoch 0.00"
    assert told in [warning.message for warning in shell.of(Warned)]
    before = shell.reported
    assert shell.finish().status == "done"
    assert shell.reported - before == EPOCHS * SAMPLES


def test_interrupted_peers_keep_the_last_center_that_one_of_them_has() -> None:
    shell = training(PEERS)
    assert {type(order) for order in shell.tell(facts.Interrupted(15, 9.0))} == {orders.EndRound}
    assert shell.tell(facts.Tick(9.0 + FAR)) == [orders.CancelAll(), orders.Rescue()]
    (save,) = shell.tell(facts.Rescued(4, 20.0))
    assert isinstance(save, orders.Save)
    shell.answer_to(orders.Save)
    assert isinstance(end_of(shell).error, Interrupted)


def test_a_sum_of_peers_that_is_not_finite_ends_the_run() -> None:
    """There is no server whose refusals are to be counted."""
    shell = training(PEERS)
    error = Diverged("what the replicas' weights add up to holds NaN")
    found = shell.tell(facts.RoundFailed("cpu-0", 1, error, 9.0))
    assert found == [orders.CancelAll(), orders.End("diverged", error)]


@pytest.mark.parametrize("groups", [{}, GROUPS], ids=["workers", "groups"])
def test_a_signal_does_not_wait_for_a_worker_that_stands_still(groups: dict[str, int]) -> None:
    """Reports are waited for as long as a few steps take: then the state is kept, and the run ends."""
    shell = training("sgwu", workers=4, **groups)
    assert {type(order) for order in shell.tell(facts.Interrupted(2, 9.0))} == {orders.EndRound}
    assert shell.tell(facts.Tick(8.0 + FAR)) == []
    (save,) = shell.tell(facts.Tick(9.0 + FAR))
    assert isinstance(save, orders.Save)
    shell.answer_to(orders.Save)
    assert end_of(shell).status == "interrupted"


@pytest.mark.parametrize("happens", ["the server goes", "a task ran twice", "all go", "a worker comes", "it diverges"])
def test_a_run_that_is_to_end_begins_no_life(happens: str) -> None:
    shell = training("sgwu")
    shell.tell(facts.Interrupted(15, 9.0))
    if happens == "the server goes":
        shell.tell(facts.ServerGone(1, 10.0))
    elif happens == "a task ran twice":
        shell.tell(facts.OutOfStep(1, "a task ran twice", 10.0))
    elif happens == "all go":
        shell.tell(facts.WorkerGone(("cpu-0", "cpu-1"), "gone", 10.0))
    elif happens == "a worker comes":
        (ignored,) = shell.tell(facts.WorkerReady("cpu-2", "cpu", 10.0))
        assert isinstance(ignored, orders.Log)
        shell.finish()
    else:
        shell.tell(facts.RoundFailed("cpu-0", 1, Diverged("loss = nan"), 10.0))
    assert shell.end.status == ("diverged" if happens == "it diverges" else "interrupted")
    assert len(shell.of(orders.StartServer)) == 1


@every_rule
@pytest.mark.parametrize("partition", ["udpa", "idpa"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_resumed_run_gives_out_what_is_left(which: Any, partition: str, size: int) -> None:
    """Interrupted at any moment, it presents the rest, in lives of higher numbers, and nothing twice."""
    if size == 2 and which == PEERS:
        pytest.skip("peers are a worker each: rule.exchange = 'asa' has no groups")
    chosen = settings_of(which, partition, replica_size=size)
    names = [f"cpu-{i}" for i in range(2 * size)]
    for answers in range(1, 40):
        shell = Shell(chosen)
        shell.start(*names)
        for _ in range(answers):
            if shell.pending:
                shell.answer(0)
        if shell.coordinator.ended:
            return
        shell.tell(facts.Interrupted(15, shell.now))
        assert shell.finish().status == "interrupted"
        kept = shell.coordinator.kept
        again = Shell(chosen, kept)
        again.version = kept.step
        again.start(*names)
        assert again.finish().status == "done"
        assert again.coordinator.kept.epoch == EPOCHS
        assert again.coordinator.life > shell.coordinator.kept.life
        assert again.reported == EPOCHS * SAMPLES - round(kept.epoch * SAMPLES)
        assert shell.reported + again.reported == EPOCHS * SAMPLES


@pytest.mark.parametrize("which", [("sgwu", {}), ("bsp", {"every": 2}), ("admm", {}), PEERS], ids=str)
def test_a_resumed_run_gives_out_the_rounds_of_the_undisturbed_one(which: Any) -> None:
    """Behind a barrier: the same samples in the same order at the same progress."""
    undisturbed = training(which)
    undisturbed.finish()
    first = training(which)
    while not first.coordinator.kept.epoch:
        first.answer(0)
    kept: Kept = first.coordinator.kept
    assert 0 < kept.epoch < EPOCHS
    again = Shell(first.settings, kept)
    again.version = kept.step
    again.start("cpu-0", "cpu-1")
    again.finish()
    left = rounds_of(again)
    assert left == rounds_of(undisturbed)[-len(left) :]
    assert sum(round_.samples for round_ in left) == round((EPOCHS - kept.epoch) * SAMPLES)


def rounds_of(shell: Shell) -> list[Round]:
    """All that were started, in order."""
    return [order.round for order in shell.of(orders.StartRound)]
