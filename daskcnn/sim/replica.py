"""A worker in simulated time: it trains its rounds, meets the server where the rule says so, and reports."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from daskcnn.events import RoundEnded
from daskcnn.nn.score import Score
from daskcnn.partition.rounds import Round
from daskcnn.ps import Action, Local, Reply, Vector
from daskcnn.sim.agenda import Agenda
from daskcnn.sim.cadence import Cadence, Stop
from daskcnn.sim.cluster import Worker
from daskcnn.sim.host import Host
from daskcnn.sim.learners import NOTHING, Learner, Learnt
from daskcnn.sim.speeds import Pace
from daskcnn.sim.workload import Workload

CERTAIN = 1.0
"""Q where nothing is learnt: any will do."""


@dataclass(slots=True)
class Report:
    """How a round went, as a worker of a cluster reports it (`cluster.protocol.RoundReport`)."""

    round: Round
    learnt: Learnt = NOTHING
    busy: float = 0.0
    wait: float = 0.0
    communication: float = 0.0
    evaluation: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    pushes: int = 0
    version: int = 0
    base_version: int = 0
    staleness: int = 0
    gamma: float = 1.0
    q: float = 0.0
    center: Score | None = None
    judged: int = 0

    def event(self, epoch: float) -> RoundEnded:
        """As it is logged, at this epoch of the run."""
        samples, score = self.round.samples, self.learnt.score
        return RoundEnded(
            round=self.round.number,
            epoch=epoch,
            samples_per_second=samples / self.busy if self.busy else 0.0,
            worker=self.round.worker,
            samples=samples,
            loss=score and score.loss,
            accuracy=score and score.accuracy,
            lr=self.learnt.lr,
            busy=self.busy,
            load=0.0,
            wait=self.wait,
            communication=max(0.0, self.communication - self.wait),
            evaluation=self.evaluation,
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            pushes=self.pushes,
            version=self.version,
            base_version=self.base_version,
            staleness=self.staleness,
            gamma=self.gamma,
            q=score and self.q,
        )


class Exchange:
    """Calls of the server that belong together, one after the other, and the weights that were sent.

    asked: when the replica began to wait; None: it trains on meanwhile.
    """

    __slots__ = ("asked", "pull", "push", "replies", "sent")

    def __init__(self, stop: Stop, asked: float | None, sent: Vector) -> None:
        self.push, self.pull, self.asked, self.sent = stop.push, stop.pull, asked, sent
        self.replies: list[tuple[Action, Reply]] = []


class SimulatedReplica:
    """One worker. Mirrors `cluster.worker`: where a task blocks there, here the next event is noted."""

    __slots__ = (
        "_agenda",
        "_asked",
        "_cadence",
        "_exchange",
        "_host",
        "_judged_pushes",
        "_judging",
        "_overlaps",
        "_pace",
        "_position",
        "_pushed",
        "_report",
        "_reported",
        "_rule",
        "_score",
        "_seconds",
        "_segment",
        "_stops",
        "_told",
        "_workload",
        "learner",
        "link",
        "local",
        "member",
        "name",
        "received",
        "sent",
        "seq",
        "session",
    )

    def __init__(
        self,
        member: Worker,
        pace: Pace,
        learner: Learner,
        workload: Workload,
        cadence: Cadence,
        host: Host,
        agenda: Agenda,
    ) -> None:
        self.member, self.name, self.link = member, member.name, member.link()
        self.learner, self.local = learner, Local(learner.weights, learner.weights)
        self.session = self.seq = self.sent = self.received = 0
        self._pace, self._workload, self._rule = pace, workload, workload.rule
        self._cadence, self._host, self._agenda = cadence, host, agenda
        self._seconds, self._judging = member.seconds, member.judging
        self._overlaps = workload.overlaps
        self._judged_pushes = workload.validation if workload.judges_pushes else 0
        self._exchange: Exchange | None = None
        self._told: Callable[[Reply], None]

    # --- joining ---

    def join(self, joined: Callable[[str], None]) -> None:
        """Begin a session; `joined` is told when the center is there."""
        self.session += 1
        self.seq = 0

        def told(reply: Reply) -> None:
            self._rule.begin(self.local, self._host.travelled(reply.weights), reply.version)
            joined(self.name)

        self._told = told
        self._host.join(self)

    def answered(self, reply: Reply) -> None:
        """The reply that it waits for is there."""
        self._told(reply)

    # --- a round ---

    def start(
        self, round_: Round, score: tuple[int, int] | None, replicas: int, reported: Callable[[Report], None]
    ) -> None:
        """Train this round from now on, and judge the center on these samples; `reported` is told how it went."""
        self._stops, self._position, self._pushed = self._cadence.stops(round_), 0, 0
        self._score, self._reported = score, reported
        base = self.local.base_version
        self._report = Report(round_, version=base, base_version=base)
        self.sent = self.received = 0
        self.learner.begin(round_, self.local, replicas)
        self._train()

    def _train(self) -> None:
        """The steps up to the next stop, and what is judged there before a push."""
        stop, report, begun = self._stops[self._position], self._report, self._agenda.now
        samples = stop.samples - (self._stops[self._position - 1].samples if self._position else 0)
        trained = self._pace.end(begun, samples * self._seconds)
        report.busy += trained - begun
        ready = trained
        if stop.push and self._judged_pushes:
            ready = self._pace.end(trained, self._judged_pushes * self._judging)
            report.evaluation += ready - trained
        self._segment = begun, trained
        self._agenda.at(ready, self._meet)

    def _meet(self) -> None:
        """A stop: wait for the exchange under way, if there is one, and make the next."""
        if self._exchange is not None:
            self._exchange.asked = self._agenda.now
            return
        stop, report = self._stops[self._position], self._report
        report.learnt = self.learner.train(stop.step)
        self._position += 1
        last = self._position == len(self._stops)
        if self._overlaps and not last:
            self._exchange = Exchange(stop, None, self.local.weights.copy())
            self._call()
            self._train()
        else:
            self._exchange = Exchange(stop, self._agenda.now, self.local.weights)
            self._call()

    def _call(self) -> None:
        """The exchange's next call."""
        exchange = self._exchange
        assert exchange is not None
        self._told = self._heard
        if not exchange.push or exchange.replies:
            self._host.pull(self)
            return
        report, local, stop = self._report, self.local, self._stops[self._position - 1]
        report.q, report.base_version = self._quality(), local.base_version
        self.seq += 1
        samples, self._pushed = stop.samples - self._pushed, stop.samples
        payload = self._rule.payload(local)
        if payload is local.weights and exchange.asked is None:  # they are trained on meanwhile
            payload = exchange.sent
        self._host.push(self, self.seq, local.base_version, payload, samples, report.q)

    def _quality(self) -> float:
        """Q, as the rule wants it measured."""
        score = self._report.learnt.score
        if self._judged_pushes:
            end = self._workload.samples + self._workload.validation
            score = self.learner.judge(self._workload.samples, end)
        return CERTAIN if score is None else score.accuracy

    def _heard(self, reply: Reply) -> None:
        """A call was answered; once all were, go on from what they bring."""
        exchange = self._exchange
        assert exchange is not None
        exchange.replies.append((Action.PULL if not reply.seq else Action.PUSH, reply))
        if len(exchange.replies) < exchange.push + exchange.pull:
            self._call()
            return
        self._exchange = None
        if exchange.asked is None:
            self._settle(exchange)
            return
        self._report.communication += self._agenda.now - exchange.asked
        if exchange.sent is self.local.weights:
            self._take_in(exchange.replies)
            self._go_on()
        else:
            self._settle(exchange)
            self._meet()

    def _settle(self, exchange: Exchange) -> None:
        """Go on from the replies, and from what was trained since, at the end of the step that is under way."""
        self.learner.train(self._step_now())
        gained = self.local.weights - exchange.sent
        self.local.weights[...] = exchange.sent
        self._take_in(exchange.replies)
        self.local.weights += gained

    def _step_now(self) -> int:
        """The step under way, all steps between two stops being taken for equally long."""
        begun, trained = self._segment
        before = self._stops[self._position - 1].step if self._position else 0
        part = min(1.0, (self._agenda.now - begun) / (trained - begun)) if trained > begun else 1.0
        return before + max(1, math.ceil(part * (self._stops[self._position].step - before)))

    def _take_in(self, replies: list[tuple[Action, Reply]]) -> None:
        report = self._report
        for action, reply in replies:
            report.version = reply.version
            brought = self._host.travelled(reply.weights)
            if action == Action.PULL:
                self._rule.pulled(self.local, brought, reply.version)
                continue
            self._rule.adopt(self.local, brought, reply.version)
            report.pushes += 1
            report.wait += reply.waited
            report.gamma, report.staleness = reply.gamma, max(report.staleness, reply.staleness)

    # --- the round's end ---

    def _go_on(self) -> None:
        if self._position < len(self._stops):
            self._train()
        elif self._score is None:
            self._finish()
        elif self._rule.answers == "difference":  # a replica that goes its own way has not seen it since it joined
            self._asked, self._told = self._agenda.now, self._pulled_center
            self._host.pull(self)
        else:
            self._judge(self.local.base)

    def _pulled_center(self, reply: Reply) -> None:
        self._report.communication += self._agenda.now - self._asked
        self._judge(self._host.travelled(reply.weights))

    def _judge(self, center: Vector) -> None:
        assert self._score is not None
        (lo, hi), now = self._score, self._agenda.now
        end = self._pace.end(now, (hi - lo) * self._judging)
        self._report.evaluation += end - now
        self._report.center, self._report.judged = self.learner.judge(lo, hi, center), hi - lo
        self._agenda.at(end, self._finish)

    def _finish(self) -> None:
        self._report.bytes_up, self._report.bytes_down = self.sent, self.received
        self._reported(self._report)
