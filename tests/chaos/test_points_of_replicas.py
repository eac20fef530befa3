"""Each fault at each point of a data-parallel run, by each rule, on the coordinator's machine: it ends as it should.

A point is an order that is under way, or the moment after it. Every invariant is checked after every fact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from daskcnn.errors import DataError, Diverged
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.coordinator import Phase
from daskcnn.training.coordinator.departures import FAR
from daskcnn.training.coordinator.settings import Settings
from tests.training.coordinator_shell import Shell, name_of
from tests.training.test_coordinator_machine import EPOCHS, EXCHANGES, SAMPLES, STALL, settings_of

WORKERS = ("cpu-0", "cpu-1", "cpu-2", "cpu-3")
RULES: Mapping[str, tuple[str, dict[str, Any]]] = {
    f"{name} {options}" if options else name: (name, options) for name, options in EXCHANGES
}
GROUPED: Mapping[str, tuple[str, dict[str, Any]]] = {
    f"{name} in groups": (name, {}) for name in ("bsp", "sgwu", "agwu")
}


# --- points: the run goes on until there, and the worker that the fault meets is named ---


def under_way(kind: type[orders.Order]) -> Callable[[Shell], str | None]:
    """Return the point at which an order of this kind is under way. None where a run has none of these."""

    def reach(shell: Shell) -> str | None:
        for _ in range(200):
            if order := next((order for order, _ in shell.pending if isinstance(order, kind)), None):
                return name_of(order) or getattr(order, "worker", WORKERS[1])
            if not shell.pending:
                return None
            shell.answer(0)
        return None

    return reach


def calibrating(shell: Shell) -> str:
    """All but the last have measured themselves."""
    while len(shell.pending) > 1:
        shell.answer(0)
    return WORKERS[-1]


def one_push_is_in(shell: Shell) -> str | None:
    """One replica's push has arrived and is answered; behind a barrier the others are waited for."""
    if under_way(orders.StartRound)(shell) is None:
        return None
    return name_of(answered_of(shell, orders.StartRound))


def answered_of(shell: Shell, kind: type[orders.Order]) -> orders.Order:
    order = next(order for order, _ in shell.pending if isinstance(order, kind))
    shell.answer_to(kind)
    return order


def closing(shell: Shell) -> str | None:
    """All is trained, and the last checkpoint is being written."""
    while shell.pending and shell.coordinator.phase is not Phase.CLOSING:
        shell.answer(0)
    return None if shell.coordinator.ended else WORKERS[1]


def one_leaves(shell: Shell) -> str | None:
    """A worker was asked to end in its round, and has not handed in yet what it has made."""
    worker = under_way(orders.StartRound)(shell)
    if worker is not None:
        leaves(shell, member(shell, worker))
    return worker


def one_has_left(shell: Shell) -> str | None:
    """A worker has handed in what it had made of its round; its group is formed anew."""
    replica = one_leaves(shell)
    if replica is None:
        return None
    shell.answer_to(orders.StartRound, replica)
    while any(isinstance(order, orders.Calibrate) for order, _ in shell.pending):  # of those left out until now
        shell.answer_to(orders.Calibrate)
    return next(name for order, _ in shell.pending if (name := name_of(order)))


def rounds_end_early(shell: Shell) -> str | None:
    """Workers have come that waited for the end of rounds behind a barrier, which ends them."""
    replica = under_way(orders.StartRound)(shell)
    if replica is None:
        return None
    for worker in ("cpu-7", "cpu-8"):
        shell.tell(facts.WorkerReady(worker, "cpu", shell.now))
        shell.answer_to(orders.Calibrate)
    shell.now += FAR + 1.0
    ended = {order.replica for order in shell.tell(facts.Tick(shell.now)) if isinstance(order, orders.EndRound)}
    rule = shell.settings.rule
    assert bool(ended) == (rule.barrier and not rule.swaps) or rule.chooses_workers, "it may leave them out"
    return replica


def one_comes(shell: Shell) -> str | None:
    """A worker has come in mid-run, and measures itself."""
    if under_way(orders.StartRound)(shell) is None:
        return None
    shell.tell(facts.WorkerReady("cpu-7", "cpu", shell.now))
    return "cpu-7"


POINTS: Mapping[str, Callable[[Shell], str | None]] = {
    "in a calibration": calibrating,
    "while the server starts": under_way(orders.StartServer),
    "in a join": under_way(orders.Join),
    "before a push leaves": under_way(orders.StartRound),
    "after a push has left": one_push_is_in,
    "while a checkpoint is written": under_way(orders.Save),
    "while the last state is kept": closing,
    "in a leave": one_leaves,
    "behind a leave": one_has_left,
    "while rounds end early for others": rounds_end_early,
    "while a worker joins in mid-run": one_comes,
}


# --- faults ---


def member(shell: Shell, replica: str) -> str:
    """Return the replica's worker; of a group that judges for it."""
    groups = [order.groups for order in shell.of(orders.FormGroups)]
    return groups[-1][replica][0] if groups and replica in groups[-1] else replica


def lost(shell: Shell, worker: str) -> None:
    shell.tell(facts.WorkerGone((worker,), "connection lost", shell.now))


def leaves(shell: Shell, worker: str) -> None:
    shell.tell(facts.WorkerLeaving((worker,), "it is shut down", shell.now))


def another_lost(shell: Shell, worker: str) -> None:
    lost(shell, next(name for name in WORKERS if name != worker))


def server_lost(shell: Shell, worker: str) -> None:
    if (life := shell.server) is not None:
        shell.server = None
        shell.tell(facts.ServerGone(life, shell.now))


def hangs(shell: Shell, worker: str) -> None:
    """It says nothing any more, and whoever waits for it says so."""
    groups = [order.groups for order in shell.of(orders.FormGroups)]
    replica = next((name for name, own in (groups[-1] if groups else {}).items() if worker in own), worker)
    for order, _ in [each for each in shell.pending if isinstance(each[0], orders.Join)]:
        if (other := name_of(order)) != replica:
            shell.answer_to(orders.Join, other)
    shell.now += 10 * STALL
    shell.tell(facts.Tick(shell.now))
    asked = [order for order, _ in shell.pending if isinstance(order, orders.AskWaiting)]
    shell.pending = [each for each in shell.pending if each[0] not in asked]
    for order in asked:
        silent = replica if replica in order.overdue else order.overdue[0]
        shell.tell(facts.Waits(frozenset(order.overdue) - {silent}, shell.now))


def comes(shell: Shell, worker: str) -> None:
    shell.tell(facts.WorkerReady("cpu-9", "cpu", shell.now))


def server_leaves(shell: Shell, worker: str) -> None:
    shell.tell(facts.ServerLeaving(shell.coordinator.life, "it is shut down", shell.now))


def diverges(shell: Shell, worker: str) -> None:
    """A loss is not finite, in one of the rounds under way."""
    if under := [order for order, _ in shell.pending if isinstance(order, orders.StartRound)]:
        error = Diverged("loss = nan", "training diverged", "lower train.lr")
        shell.tell(facts.RoundFailed(under[-1].round.worker, under[-1].life, error, shell.now))


def runs_twice(shell: Shell, worker: str) -> None:
    shell.tell(facts.OutOfStep(shell.coordinator.life, "a task was run twice", shell.now))


def cut_off(shell: Shell, worker: str) -> None:
    shell.cut_off()


def interrupted(shell: Shell, worker: str) -> None:
    shell.tell(facts.Interrupted(15, shell.now))


FAULTS = {
    fault.__name__: fault
    for fault in (
        *(lost, leaves, another_lost, server_lost, server_leaves),
        *(hangs, comes, runs_twice, cut_off, diverges, interrupted),
    )
}


def settings(rule: str) -> Settings:
    return settings_of({**RULES, **GROUPED}[rule], "idpa", replica_size=2 if rule in GROUPED else 1, lowers=True)


@pytest.mark.parametrize("rule", [*RULES, *GROUPED])
@pytest.mark.parametrize("point", POINTS)
def test_a_fault_at_this_point_leaves_a_run_that_ends(point: str, rule: str) -> None:
    """Done runs have made every presentation, and none twice; no late report of what was given up changes anything."""
    reached = 0
    for name, fault in FAULTS.items():
        shell = Shell(settings(rule))
        for worker in WORKERS:
            shell.tell(facts.WorkerReady(worker, "cpu", 0.0))
        if (worker_met := POINTS[point](shell)) is None:
            continue
        reached += 1
        facts_before, orders_before = len(shell.facts), len(shell.orders)
        fault(shell, member(shell, worker_met))
        felt = len(shell.orders) > orders_before if fault is hangs else len(shell.facts) > facts_before
        serverless = fault is server_lost and shell.settings.peers
        assert felt != (serverless or point in MEETS_NOTHING.get(name, ())), name
        for late in shell.stale:
            assert shell.tell(late(shell.now)) == []
        end = shell.end if shell.coordinator.ended else shell.finish()
        assert end.status == ("interrupted" if name == "interrupted" else "done"), (name, end)
        if end.status == "done":
            rounds = shell.coordinator.rounds
            assert rounds is not None
            assert (rounds.done, shell.coordinator.kept.epoch) == (SAMPLES * EPOCHS, EPOCHS), name
    assert reached == len(FAULTS) or SERVERLESS_HAVE_NO.get(point) == rule


MEETS_NOTHING = {
    # no round is under way that could fail
    "diverges": ("in a calibration", "while the server starts", "in a join", "while the last state is kept"),
    "server_lost": ("in a calibration", "while the server starts"),  # there is none yet
    "hangs": ("while the server starts", "while the last state is kept"),  # silence of replicas counts in training
}
"""The points at which a fault finds nothing to meet: the run goes on as if there were none."""
SERVERLESS_HAVE_NO = {"while the server starts": "bsp {'exchange': 'asa'}"}
"""The points that a run without a server has not."""


@pytest.mark.parametrize("rule", RULES)
def test_a_poison_batch_ends_the_run_at_once_whichever_worker_has_it(rule: str) -> None:
    """It would raise on every worker: its samples are given to no other, and the error names them."""
    shell = Shell(settings(rule))
    for worker in WORKERS:
        shell.tell(facts.WorkerReady(worker, "cpu", 0.0))
    replica = under_way(orders.StartRound)(shell)
    assert replica is not None
    error = DataError("chunk 5 (samples 500 to 600)", "its checksum differs", "prepare the data set again")
    shell.tell(facts.RoundFailed(replica, shell.coordinator.life, error, shell.now))
    assert (shell.end.status, shell.end.error) == ("failed", error)
