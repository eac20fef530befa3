"""The coordinator under facts in any order, for every rule and partitioner."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import settings as examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from daskcnn.errors import Diverged
from daskcnn.events import WorkerLost
from daskcnn.partition import PARTITIONERS
from daskcnn.ps import RULES
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.coordinator import GO_BACK
from daskcnn.training.coordinator.evaluations import Guessing
from daskcnn.training.coordinator.settings import Settings
from tests.training.coordinator_shell import Shell

SAMPLES, VALIDATION, EPOCHS = 60, 20, 3
EXCHANGES: list[tuple[str, dict[str, Any]]] = [*((name, {}) for name in RULES), ("bsp", {"exchange": "asa"})]
STALL = 30.0


def settings_of(rule: tuple[str, dict[str, Any]], partition: str, **more: Any) -> Settings:
    """A small run."""
    name, options = rule
    increments = 1 if partition == "udpa" else 2
    strategy, partitioner = RULES[name].model_validate(options), PARTITIONERS[partition](increments)
    sizes = {"samples": SAMPLES, "validation": VALIDATION, "epochs": EPOCHS, "batch_size": 8}
    small: dict[str, Any] = {**sizes, "stall_timeout": STALL}
    return Settings(strategy=name, rule=strategy, partitioner=partitioner, **{**small, **more})


GUESS = Guessing(0.1, math.log(10))


class CoordinatorMachine(RuleBasedStateMachine):
    """Workers come, go, hang, report late and twice; the server is lost; a signal comes."""

    @initialize(
        which=st.sampled_from(EXCHANGES),
        partition=st.sampled_from(sorted(PARTITIONERS)),
        workers=st.integers(2, 4),
        size=st.sampled_from([1, 1, 2]),
        patience=st.sampled_from([None, None, 2]),
        every=st.sampled_from([math.inf, 3.0]),
        asks=st.sampled_from([0, 0, 5]),
    )
    def begin(
        self, which: Any, partition: str, workers: int, size: int, patience: int | None, every: float, asks: int
    ) -> None:
        groups = size if "exchange" not in which[1] and not asks else 1
        more = {
            "replica_size": groups,
            "patience": patience,
            "lowers": True,
            "guess": GUESS,
            "snapshot_every": every,
            "asks": asks,
        }
        chosen = settings_of(which, partition, **more)
        self.shell = Shell(chosen)
        self.coordinator = self.shell.coordinator
        for i in range(workers):
            self.shell.tell(facts.WorkerReady(f"cpu-{i}", "cpu", 0.0))
        self.came, self.interrupted, self.diverged, self.went_back = workers, False, 0, 0

    @property
    def now(self) -> float:
        self.shell.now += 0.5
        return self.shell.now

    @rule(data=st.data())
    @precondition(lambda self: self.shell.pending)
    def answer(self, data: st.DataObject) -> None:
        self.shell.answer(data.draw(st.integers(0, len(self.shell.pending) - 1)))

    @rule(data=st.data())
    @precondition(lambda self: self.shell.pending)
    def answer_again(self, data: st.DataObject) -> None:
        """The same twice, for it has no say in the number of answers that are drawn."""
        self.answer(data)

    @rule(data=st.data())
    @precondition(lambda self: self.shell.stale)
    def report_late_or_twice(self, data: st.DataObject) -> None:
        stale = data.draw(st.sampled_from(self.shell.stale))(self.now)
        assert self.shell.tell(stale) == []

    @rule()
    def come(self) -> None:
        self.came += 1
        self.shell.tell(facts.WorkerReady(f"cpu-{self.came}", "cpu", self.now))

    @rule(data=st.data())
    @precondition(lambda self: len(self.coordinator.roster.alive) + len(self.coordinator.roster.calibrating) > 1)
    def go(self, data: st.DataObject) -> None:
        roster = self.coordinator.roster
        worker = data.draw(st.sampled_from([*roster.alive, *roster.calibrating]))
        self.shell.tell(facts.WorkerGone((worker,), "connection lost", self.now))

    @rule(data=st.data(), part=st.sampled_from([0.0, 0.3, 1.0]))
    @precondition(lambda self: len(self.coordinator.roster.alive) + len(self.coordinator.roster.calibrating) > 1)
    def leave(self, data: st.DataObject, part: float) -> None:
        """A worker is asked to end, and has made a part of its round."""
        roster, self.shell.cut = self.coordinator.roster, part
        worker = data.draw(st.sampled_from([*roster.alive, *roster.calibrating]))
        self.shell.tell(facts.WorkerLeaving((worker,), "it is shut down", self.now))

    @rule(data=st.data(), part=st.sampled_from([0.0, 0.3, 1.0]))
    @precondition(lambda self: len(self.coordinator.roster.alive) + len(self.coordinator.roster.calibrating) > 1)
    def recall(self, data: st.DataObject, part: float) -> None:
        """Another run is to have some of the workers. One of them may hold the server."""
        known, self.shell.cut = [*self.coordinator.roster.alive, *self.coordinator.roster.calibrating], part
        self.shell.host = data.draw(st.sampled_from([*known, "ps"]))
        self.shell.tell(facts.WorkersRecalled(tuple(data.draw(st.sets(st.sampled_from(known)))), self.now))

    @rule(part=st.sampled_from([0.0, 0.3, 1.0]))
    @precondition(lambda self: self.shell.server is not None)
    def server_leaves(self, part: float) -> None:
        self.shell.cut = part
        self.shell.tell(facts.ServerLeaving(self.coordinator.life, "it is shut down", self.now))

    @rule(data=st.data())
    @precondition(lambda self: self.coordinator.roster.calibrating and self.coordinator.roster.alive)
    def fail_to_calibrate(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([*self.coordinator.roster.calibrating]))
        self.shell.tell(facts.CalibrationFailed(worker, "needs 3 GB, has 2", "give it more memory", self.now))

    @rule(data=st.data(), waiting=st.booleans())
    def hang(self, data: st.DataObject, waiting: bool) -> None:
        """Nothing was heard for a long time; some or all of those that are asked for wait for others."""
        self.shell.now += 10 * STALL
        self.shell.tell(facts.Tick(self.now))
        if asked := [order for order, _ in self.shell.pending if isinstance(order, orders.AskWaiting)]:
            self.shell.pending = [each for each in self.shell.pending if each[0] not in asked]
            overdue = asked[0].overdue
            most = len(overdue) if waiting else len(overdue) - 1
            names = data.draw(st.sets(st.sampled_from(overdue), max_size=most))
            self.shell.tell(facts.Waits(frozenset(names), self.now))

    @rule()
    @precondition(lambda self: self.shell.server is not None)
    def lose_server(self) -> None:
        life, self.shell.server = self.shell.server, None
        assert life is not None
        self.shell.tell(facts.ServerGone(life, self.now))

    @rule()
    @precondition(lambda self: self.shell.server is not None)
    def out_of_step(self) -> None:
        self.went_back += 1
        self.shell.tell(facts.OutOfStep(self.coordinator.life, "a task was run twice", self.now))

    @rule()
    def connection_is_cut(self) -> None:
        self.shell.cut_off()

    @rule(data=st.data())
    @precondition(lambda self: any(isinstance(order, orders.StartRound) for order, _ in self.shell.pending))
    def diverge(self, data: st.DataObject) -> None:
        """A replica's loss is not finite."""
        rounds = [each for each in self.shell.pending if isinstance(each[0], orders.StartRound)]
        order, _ = chosen = data.draw(st.sampled_from(rounds))
        self.shell.pending.remove(chosen)
        self.diverged += 1
        assert isinstance(order, orders.StartRound)
        error = Diverged("loss = nan", "training diverged", "lower train.lr")
        self.shell.tell(facts.RoundFailed(order.round.worker, order.life, error, self.now))

    @rule()
    def ruin(self) -> None:
        """The next center is worth less than the initial weights."""
        self.shell.ruins = True

    @rule(signum=st.sampled_from([2, 15]))
    @precondition(lambda self: not self.interrupted)
    def interrupt(self, signum: int) -> None:
        self.interrupted = not self.coordinator.ended  # behind the end it changes nothing any more
        self.shell.tell(facts.Interrupted(signum, self.now))

    @invariant()
    def nobody_is_forgotten(self) -> None:
        """Whatever happens, somebody owes an answer, until the end."""
        if hasattr(self, "shell") and not self.coordinator.ended:
            assert self.shell.pending

    def teardown(self) -> None:
        if not hasattr(self, "shell"):
            return
        end = self.shell.finish()
        if end.status == "lost" or end.status == "unusable":
            assert end.error is not None
            # peers that all wait for one another end the run, and none of them is to blame; so do those that go back
            stuck = self.coordinator.settings.peers and "no progress" in str(end.error)
            stuck = stuck or (self.went_back >= GO_BACK and "do all workers reach each other?" in str(end.error))
            assert end.status == "unusable" or stuck or not self.coordinator.roster.alive
            return
        if end.status == "diverged":
            assert self.diverged
            return
        assert end.status == ("interrupted" if self.interrupted else "done")
        rounds = self.coordinator.rounds
        if end.status == "done" and not self.coordinator.evaluations.stopping:
            assert rounds is not None
            assert rounds.done == SAMPLES * EPOCHS
            assert self.coordinator.kept.epoch == EPOCHS
            assert rounds.allocation.given == SAMPLES, "after the last increment every sample has an owner"


CoordinatorMachine.TestCase.settings = examples(max_examples=100, stateful_step_count=40, deadline=None)
TestCoordinator = CoordinatorMachine.TestCase


def test_a_push_that_is_not_finite_ends_the_run() -> None:
    shell = Shell(settings_of(("sgwu", {}), "idpa"))
    shell.start("cpu-0", "cpu-1")
    shell.answer_to(orders.StartServer)
    for _ in range(2):
        shell.answer_to(orders.Join)
    found = shell.tell(facts.RoundFailed("cpu-0", 1, Diverged("push of cpu-0: NaN"), 9.0))
    assert [type(order) for order in found] == [orders.CountServer, orders.CancelAll, orders.End]
    assert shell.end.status == "diverged"


def test_peers_that_all_wait_for_one_another_end_the_run() -> None:
    shell = Shell(settings_of(("bsp", {"exchange": "asa"}), "idpa"))
    shell.start("cpu-0", "cpu-1")
    for _ in range(2):
        shell.answer_to(orders.Join)
    shell.tell(facts.Tick(1e4))
    (asked,) = [order for order, _ in shell.pending if isinstance(order, orders.AskWaiting)]
    shell.tell(facts.Waits(frozenset(asked.overdue), 1e4))
    assert shell.end.status == "lost"
    assert str(shell.end.error).startswith("no progress for ")
    assert not shell.of(WorkerLost)
