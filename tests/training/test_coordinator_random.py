"""The coordinator under facts drawn at random, from many seeds: more of them in a second than hypothesis can draw."""

from __future__ import annotations

import random

import pytest

from daskcnn.partition import PARTITIONERS
from daskcnn.sharded.balance import WorkerLink
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.coordinator import Phase
from tests.training.coordinator_shell import Shell
from tests.training.test_coordinator_machine import EPOCHS, EXCHANGES, SAMPLES, STALL, settings_of

SEEDS = [*range(300), 852]
"""In 852 all are to train in another way from the moment on at which the run goes on after a pause."""
WAIT = 100 * STALL
STEPS = 60


class Course:
    """One run. Every invariant is checked after every fact."""

    def __init__(self, seed: int) -> None:
        self.random = draw = random.Random(seed)
        which, partition = draw.choice(EXCHANGES), draw.choice(sorted(PARTITIONERS))
        which, partition = (("auto", {}), "idpa") if draw.random() < 0.2 else (which, partition)
        size = 1 if which[1] or which[0] == "auto" else draw.choice([1, 1, 2, 3])
        more = {
            "patience": draw.choice([None, None, 2]),
            "least": draw.choice([{}, {"cpu": 2}]),
            "wait": WAIT,
            "asks": draw.choice([0, 0, 4]) if size == 1 else 0,
            "snapshot_every": draw.choice([float("inf"), 3.0]),
            "lowers": draw.choice([False, True]),
        }
        self.shell = Shell(settings_of(which, partition, replica_size=size, **more))
        self.shell.probes_at_once = draw.choice([True, False])
        slow = {f"cpu-{i}": WorkerLink(draw.choice([1e3, 1e9])) for i in range(20)}
        self.shell.links = draw.choice([{}, slow])
        self.coordinator, self.came, self.interrupted = self.shell.coordinator, 0, False
        for _ in range(draw.randint(2, 4)):
            self.come()

    def run(self) -> orders.End:
        """So many facts of all kinds, then only answers until the end."""
        happenings = {
            self.answer: 60,
            self.report_again: 10,
            self.come: 6,
            self.come_back: 4,
            self.pass_time: 2,
            self.go: 8,
            self.lose_server: 4,
            self.lose_what_is_kept: 4,
            self.lose_the_center: 4,
            self.get_out_of_step: 2,
            self.leave: 6,
            self.recall: 2,
            self.leave_the_server: 2,
            self.hang: 6,
            self.interrupt: 0.5,
        }
        for _ in range(STEPS):
            if self.coordinator.ended:
                break
            self.shell.now += 0.5
            (happening,) = self.random.choices([*happenings], [*happenings.values()])
            happening()
        while not self.coordinator.ended:
            self.answer_first_or_come()
        return self.shell.end

    def answer_first_or_come(self) -> None:
        """Nobody goes on while the run pauses."""
        if self.shell.pending:
            self.shell.answer(0)
        else:
            assert self.coordinator.settings.least, f"nobody goes on; phase {self.coordinator.phase}"
            self.come()

    def answer(self) -> None:
        if not self.shell.pending:
            self.answer_first_or_come()
            return
        self.shell.answer(self.random.randrange(len(self.shell.pending)))

    def report_again(self) -> None:
        """A report that comes twice, or of a round that was given up: nothing follows."""
        if self.shell.stale:
            assert self.shell.tell(self.random.choice(self.shell.stale)(self.shell.now)) == []

    def come(self) -> None:
        self.shell.tell(facts.WorkerReady(f"cpu-{self.came}", "cpu", self.shell.now))
        self.came += 1

    def come_back(self) -> None:
        """A worker that was there before is back under its name."""
        back = self.random.randrange(self.came)
        self.shell.tell(facts.WorkerReady(f"cpu-{back}", "cpu", self.shell.now))

    def pass_time(self) -> None:
        self.shell.now += 20.0
        self.shell.tell(facts.Tick(self.shell.now))

    def go(self) -> None:
        if gone := self.some():
            self.shell.tell(facts.WorkerGone(gone, "gone", self.shell.now))

    def leave(self) -> None:
        """Workers are asked to end, and have made a part of their rounds."""
        self.shell.cut = self.random.choice([0.0, 0.3, 1.0])
        if leavers := self.some():
            self.shell.tell(facts.WorkerLeaving(leavers, "it is shut down", self.shell.now))

    def some(self) -> tuple[str, ...]:
        """One worker, or several at once. One is left, unless the run waits for others."""
        workers = [*self.coordinator.roster.alive, *self.coordinator.roster.calibrating]
        most = len(workers) - (not self.coordinator.settings.least)
        number = self.random.choice([1, 1, 1, self.random.randint(1, max(1, most))])
        return tuple(self.random.sample(workers, number)) if most > 0 else ()

    def recall(self) -> None:
        """Another run is to have some of the workers."""
        if workers := [*self.coordinator.roster.alive, *self.coordinator.roster.calibrating]:
            some = tuple(self.random.sample(workers, self.random.randint(1, len(workers))))
            self.shell.tell(facts.WorkersRecalled(some, self.shell.now))

    def leave_the_server(self) -> None:
        if self.shell.server is not None:
            self.shell.tell(facts.ServerLeaving(self.coordinator.life, "it is shut down", self.shell.now))

    def lose_server(self) -> None:
        if (life := self.shell.server) is not None:
            self.shell.server = None
            self.shell.tell(facts.ServerGone(life, self.shell.now))

    def lose_what_is_kept(self) -> None:
        """The last of those that trained is gone, and the center with it, before the next life begins from it."""
        kept = [each for each in self.shell.pending if isinstance(each[0], orders.Save)]
        if not kept or self.coordinator.phase is not Phase.CALIBRATING:
            return
        self.shell.pending = [each for each in self.shell.pending if each not in kept]
        now, gone = self.shell.now, "a worker that was let go"
        peers = self.coordinator.settings.peers
        self.shell.tell(
            facts.WorkerGone((gone,), "gone", now) if peers else facts.ServerGone(self.coordinator.life, now)
        )

    def lose_the_center(self) -> None:
        """Without a server: the worker that was asked for the center, to keep it or to judge it, is gone."""
        asked = [each for each in self.shell.pending if isinstance(each[0], orders.Save | orders.Judge)]
        if asked and self.coordinator.settings.peers:
            self.shell.pending = [each for each in self.shell.pending if each not in asked]
            self.go()
            self.shell.tell(facts.NotKept(self.shell.now))

    def get_out_of_step(self) -> None:
        if self.shell.server is not None:
            self.shell.tell(facts.OutOfStep(self.coordinator.life, "a task ran twice", self.shell.now))

    def hang(self) -> None:
        """Nothing was heard for a long time. Of those that are asked for, at least one waits for nobody."""
        self.shell.now += 10 * STALL
        self.shell.tell(facts.Tick(self.shell.now))
        if asked := [order for order, _ in self.shell.pending if isinstance(order, orders.AskWaiting)]:
            self.shell.pending = [each for each in self.shell.pending if each[0] not in asked]
            overdue = asked[0].overdue
            waiting = self.random.sample(overdue, self.random.randrange(len(overdue)))
            self.shell.tell(facts.Waits(frozenset(waiting), self.shell.now))

    def interrupt(self) -> None:
        self.interrupted = True
        self.shell.tell(facts.Interrupted(15, self.shell.now))


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_the_run_ends_as_it_should(seed: int) -> None:
    course = Course(seed)
    end = course.run()
    if end.status in ("lost", "unusable"):
        assert end.error is not None
        assert end.status == "unusable" or not course.coordinator.roster.alive, "it gave up, and had workers"
        return
    assert end.status == ("interrupted" if course.interrupted else "done")
    coordinator = course.coordinator
    if end.status == "done" and not coordinator.evaluations.stopping:
        assert coordinator.rounds is not None
        assert coordinator.rounds.done == SAMPLES * EPOCHS
        assert coordinator.kept.epoch == EPOCHS
