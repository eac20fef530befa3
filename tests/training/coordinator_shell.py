"""A shell for a coordinator that carries nothing out: it notes what each order may be answered with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from daskcnn.events import CalibratedWorker
from daskcnn.nn.score import Score
from daskcnn.partition.rounds import Round
from daskcnn.sharded.balance import WorkerLink
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.facts import Fact
from daskcnn.training.coordinator.orders import End, Order, StartRound
from daskcnn.training.coordinator.records import Kept
from daskcnn.training.coordinator.replicas import Coordinator
from daskcnn.training.coordinator.settings import Settings
from daskcnn.training.round_report import RoundReport

T = TypeVar("T")


def report_of(round_: Round, *, version: int = 1, busy: float = 1.0, center: Score | None = None) -> RoundReport:
    """A round's report in which only what the coordinator looks at means anything."""
    score = Score(2.0 * round_.samples, round_.samples // 2, round_.samples)
    seconds: dict[str, Any] = {"busy": busy, "load": 0.0, "wait": 0.0, "communication": 0.0, "evaluation": 0.0}
    return RoundReport(
        round_, score, 0.1, **seconds, bytes_up=0, bytes_down=0, pushes=1, version=version, base_version=version - 1,
        gamma=1.0, q=0.5, staleness=0, q_samples=0, judged=center.samples if center else 0, center=center,
        optimizer=None,
    )  # fmt: skip


@dataclass
class Shell:
    """Drives a coordinator by hand.

    Attributes
    ----------
    pending : answers to come, each a function of the time.
    done : reports that were delivered: they may come once more.
    """

    settings: Settings
    kept: Kept | None = None
    coordinator: Coordinator = field(init=False)
    now: float = 0.0
    version: int = 0
    accuracy: float = 0.1
    pending: list[tuple[Order, Callable[[float], Fact]]] = field(default_factory=list)
    stale: list[Callable[[float], Fact]] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
    facts: list[Fact] = field(default_factory=list)
    server: int | None = None  # the life of the one that answers
    cut: float = 0.5  # the part of a round that a replica has made when it is to end early
    ruins: bool = False  # the next center that is judged has diverged
    reported: int = 0  # presentations
    links: dict[str, WorkerLink] = field(default_factory=dict)  # where workers are chosen
    nbytes: int = 1000
    probes_at_once: bool = True
    host: str = "ps"

    def __post_init__(self) -> None:
        self.coordinator = Coordinator(self.settings, self.kept)

    def tell(self, fact: Fact) -> list[Order]:
        """Hand a fact over and note what the orders may be answered with."""
        self.facts.append(fact)
        found = self.coordinator.handle(fact)
        self.coordinator.validate()
        self.orders += found
        for order in found:
            self._note(order)
        if self.probes_at_once and any(isinstance(order, orders.ProbeServer) for order in found):
            found += self.answer_to(orders.ProbeServer)
        return found

    def start(self, *workers: str) -> list[Order]:
        """The workers are there and are calibrated, each as fast as its place from the left says."""
        for worker in workers:
            self.tell(facts.WorkerReady(worker, worker.partition("-")[0], self.now))
        found = []
        for _ in workers:
            found = self.answer(0)
        return found

    def answer(self, index: int) -> list[Order]:
        """The answer to one of the orders that wait for one."""
        _, answer = self.pending.pop(index)
        self.now += 1.0
        fact = answer(self.now)
        if isinstance(fact, facts.RoundDone):
            self.stale.append(answer)
            self.reported += fact.report.samples
        return self.tell(fact)

    def answer_to(self, kind: type, replica: str | None = None) -> list[Order]:
        """The answer to the oldest order of a kind."""
        for i, (order, _) in enumerate(self.pending):
            if isinstance(order, kind) and replica in (None, name_of(order)):
                return self.answer(i)
        raise AssertionError(f"no {kind.__name__} of {replica} among {[order for order, _ in self.pending]}")

    def cut_off(self) -> list[Order]:
        """The scheduler drops the driver with all tasks, and a server. What the driver is at is begun anew."""
        self._forget(lambda order: isinstance(order, orders.Calibrate | orders.Join | orders.StartRound))
        life, self.server = self.server, None
        if life is not None:
            self.tell(facts.ServerGone(life, self.now))
        return self.tell(facts.ConnectionCut(self.now))

    def finish(self, most: int = 2000) -> End:
        """Answer all orders in turn until the end."""
        for _ in range(most):
            if self.coordinator.ended:
                break
            assert self.pending, f"nobody goes on; phase {self.coordinator.phase}, last orders {self.orders[-5:]}"
            self.answer(0)
        return self.end

    @property
    def end(self) -> End:
        """The last order so far, which is to be the run's end."""
        end = self.orders[-1]
        assert isinstance(end, End), f"no end after {len(self.facts)} facts"
        return end

    def of(self, kind: type[T]) -> list[T]:
        """All orders of a kind so far; of a kind of event, what was logged."""
        logged = [order.event for order in self.orders if isinstance(order, orders.Log)]
        every: list[object] = [*self.orders, *logged]
        return [each for each in every if isinstance(each, kind)]

    # --- what a cluster would do ---

    def _note(self, order: Order) -> None:  # noqa: C901 - a table of answers
        match order:
            case orders.Calibrate(worker):
                row = CalibratedWorker(name=worker, address=f"tcp://{worker}")
                seconds = 0.01 * (1 + int(worker.rpartition("-")[2]))
                self._expect(order, lambda at: facts.Calibrated(worker, seconds, row, at))
            case orders.ProbeServer(workers):
                self._expect(order, lambda at: facts.ServerProbed(workers, self.links, self.nbytes, at))
            case orders.StartServer(life):
                self._expect(order, lambda at: self._server_ready(life, at))
            case orders.Join(replica, life, session):
                self._expect(order, lambda at: facts.Joined(replica, life, session, at))
            case orders.StartRound():
                self._expect(order, lambda at: self._round_done(order, at))
            case orders.EndRound(replica):
                self.end_early(replica)
            case orders.AskWaiting():
                self._expect(order, lambda at: facts.Waits(frozenset(), at))
            case orders.Rescue():
                self._expect(order, lambda at: facts.Rescued(self.version, at))
            case orders.Judge(part):
                self._expect(order, lambda at: facts.Judged(Score(1.0, part.samples, part.samples), at))
            case orders.Save():
                self._expect(order, lambda at: facts.Saved(self.version, at))
            case orders.Cancel(replica):
                self._forget(
                    lambda other: isinstance(other, orders.StartRound | orders.Join) and name_of(other) == replica
                )
            case orders.Dismiss(worker):
                self._forget(lambda other: isinstance(other, orders.Calibrate) and other.worker == worker)
            case orders.CancelAll():
                self._forget(lambda other: not isinstance(other, orders.Calibrate | orders.Save))
                self.server = None

    def _expect(self, order: Order, answer: Callable[[float], Fact]) -> None:
        self.pending.append((order, answer))

    def _forget(self, gone: Callable[[Order], bool]) -> None:
        """What was given up may be heard of all the same."""
        self.stale += [answer for order, answer in self.pending if gone(order) and isinstance(order, orders.StartRound)]
        self.pending = [(order, answer) for order, answer in self.pending if not gone(order)]

    def _server_ready(self, life: int, at: float) -> Fact:
        self.server = life
        return facts.ServerReady(life, self.host, at)

    def end_early(self, replica: str) -> None:
        """Let the replica's round end early, and those of all peers, with a part of their samples that may be none."""
        for i, (order, _) in enumerate(self.pending):
            if isinstance(order, StartRound) and (order.round.worker == replica or self.settings.peers):
                self.pending[i] = order, partial(self._ended_early, order, int(self.cut * order.round.samples))

    def _ended_early(self, order: StartRound, samples: int, at: float) -> Fact:
        fact = self._round_done(order, at)
        assert isinstance(fact, facts.RoundDone)
        return replace(fact, report=fact.report._replace(cut=samples, center=None, judged=0))

    def _round_done(self, order: StartRound, at: float) -> Fact:
        self.version += 1
        center = None
        if order.score is not None:
            samples = order.score.samples
            center = Score(float(samples), round(self.accuracy * samples), samples)
        report = report_of(order.round, version=self.version, center=center)
        if center is not None and self.ruins:
            self.ruins = False
            trained = Score(1e9 * order.round.samples, 0, order.round.samples)
            report = report._replace(center=Score(1e3 * center.samples, 0, center.samples), score=trained)
        return facts.RoundDone(order.round.worker, order.life, order.session, report, at)


def begun(found: Sequence[Order]) -> list[Round]:
    """The rounds that these orders start, which are all of that kind."""
    rounds = []
    for order in found:
        assert isinstance(order, StartRound)
        rounds.append(order.round)
    return rounds


def name_of(order: Order) -> str | None:
    """The replica that an order is about."""
    return order.round.worker if isinstance(order, orders.StartRound) else getattr(order, "replica", None)
