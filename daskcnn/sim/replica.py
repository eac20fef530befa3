"""A worker in simulated time: it carries out the orders of its `ReplicaExchange`, each at its cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from daskcnn.nn import OptimizerState
from daskcnn.ps import Local, Reply
from daskcnn.ps.wire import Differences, Feedback
from daskcnn.sim.cluster import Worker
from daskcnn.sim.host import Agenda, Host
from daskcnn.sim.learners import Learner
from daskcnn.sim.speeds import Pace
from daskcnn.sim.workload import Workload
from daskcnn.training import exchange_orders, replica_exchange
from daskcnn.training.cadence import Cadence, TrainSteps
from daskcnn.training.coordinator.facts import RoundDone
from daskcnn.training.coordinator.orders import EndRound, StartRound

Segment: TypeAlias = tuple[TrainSteps, float, float]
"""Steps under way, and the times at which they begin and end."""

# Read with every order to end early: a member's look-up in its class takes ten times as long as a name of the module.
_TRAINING, _SENDING = replica_exchange.ExchangePhase.TRAINING, replica_exchange.ExchangePhase.SENDING


def _ignored(reply: Reply) -> None:
    """Take a reply that nobody waits for any more."""


class SimulatedReplica:
    """A worker. Instead of working for a time, it enters the next event into the agenda."""

    # slots: a simulation reads these millions of times
    __slots__ = (
        "_agenda", "_answers", "_arrives", "_busy", "_cadence", "_early", "_exchange", "_feedback", "_fixed", "_host",
        "_judging", "_order", "_pace", "_reported", "_seconds", "_segment", "_sending", "_told",
        "learner", "link", "local", "member", "name", "received", "sent", "session",
    )  # fmt: skip

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
        self.learner, self.local = learner, Local(learner.weights, learner.weights, besides=learner.besides)
        self.session = self.sent = self.received = 0
        self._pace, self._host, self._agenda = pace, host, agenda
        self._fixed, self._seconds, self._judging = member.step_fixed, member.seconds, member.judging
        feedback = Feedback(workload.rule) if workload.coded and learner.weights.size == workload.numbers else None
        self._exchange = replica_exchange.ReplicaExchange(
            workload.rule,
            self.local,
            cadence,
            overlap=workload.overlap,
            frozen=learner.frozen,
            averaged=workload.ema is not None,
            via=Differences(workload.rule) if workload.way.differences else feedback,
        )
        self._feedback, self._cadence = feedback, cadence
        self._busy = self._arrives = 0.0  # the latter of the last push
        self._early: tuple[int, int] | None = None  # session and number of a round that is to end early
        self._segment: Segment | None = None
        self._sending: exchange_orders.Send | None = None
        self._answers: list[exchange_orders.Answer] = []
        self._told: Callable[[Reply], None] = self._heard
        self._order: StartRound | None = None
        self._reported: Callable[[RoundDone], None] | None = None

    # --- joining ---

    def join(self, joined: Callable[[str], None]) -> None:
        """Begin a session; `joined` is called when the center is there."""
        self.session += 1

        def told(reply: Reply) -> None:
            if self._feedback is not None:
                self._feedback.begin(self.local, self._feedback.rest())
            self._exchange.joined(self._host.travelled(reply.weights), reply.version)
            joined(self.name)

        self._told = told
        self._host.join(self)

    def answered(self, reply: Reply) -> None:
        """Take the awaited reply; one of a session before is late."""
        if reply.session == self.session:
            self._told(reply)

    # --- a round ---

    def start(
        self, order: StartRound, reported: Callable[[RoundDone], None], optimizer: OptimizerState | None = None
    ) -> None:
        """Train the ordered round from now on; `reported` is called with its report.

        optimizer: the state that it begins with; None: its own.
        """
        self._order, self._reported = order, reported
        if self._early is not None and self._early != (order.session, order.round.number):
            self._early = None
        self._busy, self.sent, self.received = 0.0, 0, 0
        first = self._exchange.begin(order.round, order.score, order.q)
        self.learner.begin(order.round, self.local, order.scale, self._exchange.sizes, optimizer)
        self._train(first)

    def end_early(self, order: EndRound) -> None:
        """End this round behind the step at hand, or while a reply is waited for; before it has begun, after a step."""
        if self._early == (order.session, order.number):  # another worker of its group leaves too
            return
        self._early, own = (order.session, order.number), self._order
        if own is None or self._early != (own.session, own.round.number):
            return
        if self._exchange.phase is _TRAINING:
            self._cut()
        elif self._exchange.phase is _SENDING and not self._host.together:
            self._part(max(self._arrives, self._agenda.now))

    def _carry_out(self, order: exchange_orders.Order) -> None:
        begun = self._agenda.now
        match order:
            case exchange_orders.JudgeCenter():
                end = self._pace.end(begun, order.part.samples * self._judging)
                self._agenda.at(end, self._judged_center, order, begun)
            case TrainSteps():
                self._train(order)
            case exchange_orders.Report():
                self._finish()
            case exchange_orders.Send():
                self._send(order)
            case exchange_orders.PullCenter():
                self._told = self._brought_center
                self._host.pull(self, averaged=order.averaged)
            case exchange_orders.JudgeLocal():
                end = self._pace.end(begun, order.part.samples * self._judging)
                self._agenda.at(end, self._judge_local, begun)
            case exchange_orders.Await():
                pass  # the replies come as they come

    def _finish(self) -> None:
        order = self._order
        assert order is not None
        assert self._reported is not None
        own = self.learner.optimizer if order.round.alone else None
        report = self._exchange.report(bytes_up=self.sent, bytes_down=self.received, optimizer=own)
        self._reported(RoundDone(self.name, order.life, order.session, report, self._agenda.now))

    # --- steps and evaluations ---

    def _train(self, order: TrainSteps) -> None:
        """Make the steps up to the next stop. An evaluation right after them needs no event of its own."""
        begun = self._agenda.now
        work = order.gained * self._seconds + (order.step - order.first + 1) * self._fixed
        trained = self._pace.end(begun, work)
        self._busy += trained - begun
        self._segment = segment = order, begun, trained
        if self._early is not None:
            self._cut()
            return
        q = self._order.q if order.judge and self._order is not None else None
        if q is None or self._sending is not None:
            self._agenda.at(trained, self._trained, segment)
        else:
            judged = self._pace.end(trained, q.samples * self._judging)
            self._agenda.at(judged, self._trained_and_judged, segment)

    def _cut(self) -> None:
        """Let the stretch under way end with the step at hand, if its last one has not ended."""
        assert self._segment is not None
        (stretch, begun, trained), now = self._segment, self._agenda.now
        if now >= trained > begun:
            return
        step, steps = self._step_now(), stretch.step - stretch.first + 1
        end = begun + (trained - begun) * (step - stretch.first + 1) / steps
        self._busy += end - trained
        self._segment = segment = replace(stretch, step=step), begun, end
        self._agenda.at(max(end, now), self._ended_early, segment)

    def _ended_early(self, segment: Segment) -> None:
        if segment is not self._segment:
            return
        assert self._order is not None
        (stretch, _, end), sizes = segment, self._exchange.sizes
        step = stretch.step
        samples = self._cadence.samples(self._order.round, step) if sizes is None else sizes.until(step)
        learnt = self.learner.train(step)
        how: dict[str, Any] = {"busy": self._busy, "load": 0.0, "at": end}
        self._carry_out(self._exchange.leave(step, samples, learnt.score, learnt.lr, **how))

    def _trained(self, segment: Segment) -> None:
        if segment is not self._segment:  # it was cut
            return
        stretch, _, end = segment
        learnt = self.learner.train(stretch.step)
        order = self._exchange.trained(learnt.score, learnt.lr, busy=self._busy, load=0.0, at=end)
        if isinstance(order, exchange_orders.Send):
            self._send(order)
        else:
            self._carry_out(order)

    def _trained_and_judged(self, segment: Segment) -> None:
        if segment is not self._segment:
            return
        stretch, _, end = segment
        learnt = self.learner.train(stretch.step)
        self._exchange.trained(learnt.score, learnt.lr, busy=self._busy, load=0.0, at=end)
        self._judge_local(end)

    def _judge_local(self, begun: float) -> None:
        """End the evaluation of the replica's own weights, begun at this time."""
        assert self._order is not None
        assert self._order.q is not None
        score = self.learner.judge(self._order.q)
        self._send(self._exchange.judged_local(score, begun=begun, at=self._agenda.now))

    def _judged_center(self, order: exchange_orders.JudgeCenter, begun: float) -> None:
        score = self.learner.judge(order.part, order.weights)
        self._exchange.judged_center(score, begun=begun, at=self._agenda.now)
        self._finish()

    def _send(self, order: exchange_orders.Send) -> None:
        self._sending, self._answers, self._told = order, [], self._heard
        if order.push is not None:
            self._arrives = self._host.push(self, order.push)
        if self._early is not None and order.meanwhile is None and not self._host.together:
            self._part(self._agenda.now if order.push is None else self._arrives)
            return
        if order.push is None:
            self._host.pull(self)
        if order.meanwhile is not None:
            self._train(order.meanwhile)

    def _part(self, at: float) -> None:
        """Leave the server behind the push that is under way, and wait for no answer."""
        self._told = _ignored
        self._agenda.at(at, self._parted)

    def _parted(self) -> None:
        sent, self._sending = self._sending, None
        assert sent is not None
        self._host.part(self, 0 if sent.push is None else sent.push.seq, pulls=sent.pull)
        self._carry_out(self._exchange.departed(self._agenda.now))

    def _heard(self, reply: Reply) -> None:
        """Take the answer to a call; after the last one, go on from the vectors that they bring."""
        sent = self._sending
        assert sent is not None
        self._answers.append((reply, self._host.travelled(reply.weights)))
        if sent.pull and sent.push is not None and len(self._answers) == 1:
            self._host.pull(self)
            return
        self._sending = None
        if sent.meanwhile is not None:
            self.learner.train(self._step_now())
        order = self._exchange.replied(self._answers, self._agenda.now)
        if self._early is not None and self._host.together and isinstance(order, TrainSteps):
            order = self._exchange.ends_here()
        if order is not None:
            self._carry_out(order)

    def _brought_center(self, reply: Reply) -> None:
        order = self._exchange.replied([(reply, self._host.travelled(reply.weights))], self._agenda.now)
        assert order is not None
        self._carry_out(order)

    def _step_now(self) -> int:
        """Return the step under way, if all steps between two stops take equally long."""
        assert self._segment is not None
        stretch, begun, trained = self._segment
        part = min(1.0, (self._agenda.now - begun) / (trained - begun)) if trained > begun else 1.0
        return stretch.first - 1 + max(1, math.ceil(part * (stretch.step - stretch.first + 1)))
