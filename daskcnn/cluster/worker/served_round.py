"""A worker's exchanges with the server: what its `ReplicaExchange` orders is carried out over a link, and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing

from daskcnn.arrays import Array
from daskcnn.cluster.messages import RoundOrder
from daskcnn.cluster.server.link import ServerLink
from daskcnn.cluster.worker.session import Session
from daskcnn.cluster.worker.stopping import stopped
from daskcnn.nn.score import Score
from daskcnn.ps import Join, Local, Pull, Push, Reply
from daskcnn.ps.half import cast
from daskcnn.training.cadence import Cadence, JudgeLocal, TrainSteps
from daskcnn.training.exchange import Answer, Await, JudgeCenter, Order, PullCenter, ReplicaExchange, Send
from daskcnn.training.replica import Replica, Trained
from daskcnn.training.reports import RoundReport
from daskcnn.training.round_steps import steps_of_round


def join_server(order: RoundOrder, session: Session, stop: Callable[[], bool]) -> None:
    """Take part in the server's barrier and start from its center. Raises Stopped."""
    session.exchange = exchange = session.exchange or exchange_of(session.replica)
    reply = _link(order, session, stop).call(Join(order.epoch, order.worker, order.session))
    _, center = _on_device(session.replica, reply)
    exchange.joined(center, reply.version)
    session.replica.adopt_optimizer(order.optimizer)


def exchange_of(replica: Replica) -> ReplicaExchange:
    """The machine of a worker that exchanges with the server."""
    job = replica.job
    overlap = job.cluster.overlap and job.train.replica_size == 1  # a group's home makes no steps by itself
    assert job.rule is not None, "strategy layer has tasks of its own"
    end = len(replica.dataset.train)
    cadence = Cadence(job.rule, job.train.batch_size, (end - job.data.validation, end))
    local = Local(replica.weights, replica.weights)
    return ReplicaExchange(job.rule, local, cadence, overlap=overlap, frozen=replica.frozen)


class ServedRound:
    """One round of a worker that has joined the server. `order` is what its machine wants done next.

    A worker by itself calls `train`. A group's home calls `trained` where a stretch of the group's steps has ended,
    and `end` after the last.
    """

    def __init__(self, order: RoundOrder, session: Session, stop: Callable[[], bool]) -> None:
        assert session.exchange is not None, "joined before its first round"
        assert order.round is not None, "an order to join only"
        self.asked = order
        self._session, self._replica, self._exchange = session, session.replica, session.exchange
        self._link = _link(order, session, stop)
        self._calls: Future[list[Reply]] | None = None  # under way while steps are made
        self._exchange.give_up()  # a round before may have been stopped
        self.order: Order = self._exchange.begin(order.round, order.score)

    def train(self) -> RoundReport:
        """Train the round to its end. Raises Stopped, PushRefused, Diverged, or OSError where the server is gone."""
        asked, exchange = self.asked, self._exchange
        assert asked.round is not None
        steps = steps_of_round(
            self._replica, exchange.rule, asked.round, exchange.local, scale=asked.scale, stop=stopped
        )
        with closing(steps):
            while isinstance(self.order, TrainSteps):
                self.trained(self._stretch(steps, self.order))
        return self.end()

    def trained(self, so_far: Trained) -> None:
        """The stretch that was ordered has come to this: exchange what the rule wants exchanged now."""
        busy = so_far.load + so_far.compute
        self.order = self._exchange.trained(
            so_far.score, so_far.lr, busy=busy, load=so_far.load, at=time.perf_counter()
        )
        while isinstance(self.order, JudgeLocal | Send | Await):
            self.order = self._next(self.order)

    def end(self) -> RoundReport:
        """Judge the center, if that is ordered, and report."""
        if isinstance(self.order, PullCenter):
            self.order = self._taken_in(self._made(None, pull=True))
        if isinstance(self.order, JudgeCenter):
            begun, score = time.perf_counter(), self._score(*self.order, whole=self._replica.job.data.validation)
            self.order = self._exchange.judged_center(score, begun=begun, at=time.perf_counter())
        return self._exchange.report(
            bytes_up=self._link.bytes_up,
            bytes_down=self._link.bytes_down,
            optimizer=self._replica.host_optimizer(),
        )

    # --- orders ---

    def _stretch(self, steps: Iterator[Trained], order: TrainSteps) -> Trained:
        """Make these steps; hand in replies that come meanwhile."""
        for so_far in steps:
            if so_far.score.samples == order.samples:
                return so_far
            if self._calls is not None and self._calls.done():
                self._replied(self._calls.result())
                self._calls = None
        raise AssertionError(f"the round's steps end before {order}")

    def _next(self, order: JudgeLocal | Send | Await) -> Order:
        """Carry the order out."""
        match order:
            case JudgeLocal(lo, hi):
                begun, score = time.perf_counter(), self._score(lo, hi, None)
                return self._exchange.judged_local(score, begun=begun, at=time.perf_counter())
            case Send():
                return self._send(order)
            case Await():
                assert self._calls is not None
                calls, self._calls = self._calls, None
                return self._taken_in(calls.result())

    def _send(self, order: Send) -> Order:
        push, asked = None, self.asked
        if (gain := order.push) is not None:
            payload, count = self._replica.device.backend.to_host(gain.payload), gain.samples
            sender = asked.epoch, asked.worker, asked.session
            push = Push(*sender, gain.seq, gain.base_version, payload, count, gain.accuracy)
        if order.meanwhile is None:
            return self._taken_in(self._made(push, order.pull))
        self._calls = self._session.sender.submit(self._made, push, order.pull)
        return order.meanwhile

    def _score(self, lo: int, hi: int, weights: Array | None, whole: int | None = None) -> Score:
        """whole: samples that the center is judged on in all; its AUC is wanted too."""
        replica = self._replica
        return replica.evaluate(replica.dataset.train, lo, hi, stopped, weights=weights, whole=whole)

    # --- calls ---

    def _made(self, push: Push | None, pull: bool) -> list[Reply]:
        """Make the calls; on the session's own thread where the replica trains on meanwhile."""
        pushed = [self._link.call(push)] if push else []
        return [*pushed, *([self._link.call(self._pull())] if pull else [])]

    def _pull(self) -> Pull:
        return Pull(self.asked.epoch, self.asked.worker, self.asked.session)

    def _taken_in(self, replies: list[Reply]) -> Order:
        """Take in replies that were waited for; returns the order that follows."""
        order = self._replied(replies)
        assert order is not None
        return order

    def _replied(self, replies: list[Reply]) -> Order | None:
        answers = [_on_device(self._replica, reply) for reply in replies]
        return self._exchange.replied(answers, time.perf_counter())


def _link(order: RoundOrder, session: Session, stop: Callable[[], bool]) -> ServerLink:
    return order.server.link(wire=session.replica.job.cluster.wire, stopped=stop)


def _on_device(replica: Replica, reply: Reply) -> Answer:
    """A reply and what it brings, in the replica's dtype and memory."""
    return reply, replica.device.backend.from_host(cast(reply.weights, replica.layout.dtype))
