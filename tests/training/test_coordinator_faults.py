"""What a run survives, decided without a cluster: laws that tests on processes showed once, for every rule."""

from __future__ import annotations

from typing import Any

import pytest

from daskcnn.errors import ClusterError, Diverged, Interrupted, Lost
from daskcnn.events import SamplesAllocated, Warned, WorkerIgnored, WorkerJoined, WorkerLost
from daskcnn.partition.rounds import Round
from daskcnn.ps import RULES
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.records import Kept
from tests.training.coordinator_shell import Shell
from tests.training.test_coordinator import PEERS, allocated, lost, training
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


def test_peers_that_all_wait_for_each_other_end_the_run() -> None:
    shell = training(PEERS)
    shell.tell(facts.Tick(500.0))
    shell.tell(facts.Waits(frozenset({"cpu-0", "cpu-1"}), 500.0))
    end = end_of(shell)
    assert end.status == "lost"
    assert "waiting for cpu-0, cpu-1" in str(end.error)


def test_a_group_that_stands_still_is_given_up_with_the_worker_that_it_waits_for() -> None:
    """The member that is not to blame is no longer in a group, but of the run."""
    shell = training("sgwu", workers=4, **GROUPS)
    shell.answer_to(orders.StartRound, "group-1")
    shell.tell(facts.Tick(500.0))
    found = shell.tell(facts.Waits(frozenset(), 500.0, {"group-0": ("cpu-3",)}))
    reasons = {order.event.worker: order.event.reason for order in found if isinstance(order, orders.Log)
               and isinstance(order.event, WorkerLost)}  # fmt: skip
    assert reasons.keys() == {"cpu-3", "group-0"}
    assert all("no report for" in reason and "waiting for cpu-3" in reason for reason in reasons.values())
    assert [order.worker for order in found if isinstance(order, orders.Dismiss)] == ["cpu-3"]
    assert allocated(group_1=60) in found
    assert shell.coordinator.roster.alive.keys() == {"cpu-0", "cpu-1", "cpu-2"}
    assert shell.finish().status == "done"


# --- groups ---


@pytest.mark.parametrize("strategy", [name for name in RULES if name != "parallel-sgd"])
def test_a_lost_member_leaves_its_group_s_samples_to_the_others(strategy: str) -> None:
    shell = training(strategy, workers=4, **GROUPS)
    (formed,) = shell.of(orders.FormGroups)
    group = next(name for name, members in formed.groups.items() if "cpu-1" in members)
    shell.answer(0)
    told = len(sizes(shell))
    shell.tell(facts.WorkerGone(("cpu-1",), "gone", shell.now))
    assert shell.finish().status == "done"
    worker, its_group = shell.of(WorkerLost)
    assert (worker.worker, its_group.worker) == ("cpu-1", group)
    assert its_group.samples_moved > 0
    assert all(each.keys() == {"group-0", "group-1"} - {group} for each in sizes(shell)[told:])
    assert shell.coordinator.rounds is not None
    assert shell.coordinator.rounds.done == EPOCHS * SAMPLES


def test_the_last_group_is_lost() -> None:
    """There are workers left, but no group of them."""
    shell = training("sgwu", workers=3, **GROUPS)
    (formed,) = shell.of(orders.FormGroups)
    assert formed.left_out == ("cpu-2",)
    shell.tell(facts.WorkerGone((formed.groups["group-0"][0],), "gone", 9.0))
    end = end_of(shell)
    assert end.status == "lost"
    assert isinstance(end.error, Lost)
    assert "it was the last group of the run" in str(end.error)


def test_a_worker_that_comes_when_groups_are_formed_is_told_when_it_is_used() -> None:
    shell = training("sgwu", workers=4, **GROUPS)
    shell.tell(facts.WorkerReady("cpu-4", "cpu", shell.now))
    assert shell.finish().status == "done"
    assert [event.text for event in shell.of(Warned)] == [
        "worker cpu-4 waits: groups are formed at a run's start; stop it and resume it"
    ]


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


def test_interrupted_peers_keep_the_last_center_that_one_of_them_has() -> None:
    shell = training(PEERS)
    assert shell.tell(facts.Interrupted(15, 9.0)) == [orders.CancelAll(), orders.Rescue()]
    (save,) = shell.tell(facts.Rescued(4, 10.0))
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
    """No report and no tick comes any more: the state is kept, and the run ends."""
    shell = training("sgwu", workers=4, **groups)
    (save,) = shell.tell(facts.Interrupted(2, 9.0))
    assert isinstance(save, orders.Save)
    shell.answer_to(orders.Save)
    assert end_of(shell).status == "interrupted"


@every_rule
@pytest.mark.parametrize("partition", ["udpa", "idpa"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_resumed_run_gives_out_what_is_left(which: Any, partition: str, size: int) -> None:
    """Interrupted at any moment, it presents the rest, in lives of higher numbers."""
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
