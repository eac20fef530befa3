"""A worker's exchanges with the server: what its `ReplicaExchange` orders is carried out over a link, and timed.

The tasks that run on a worker: calibrating, judging, joining the server, rounds of training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from functools import partial

from daskcnn.arrays import Array, DeviceKind, backend, device_profile, single_threaded_blas
from daskcnn.cluster.link.calls import returns_refusals
from daskcnn.cluster.link.news import Teller
from daskcnn.cluster.messages import Calibration, RoundOrder
from daskcnn.cluster.server.actor import ServerLink
from daskcnn.cluster.worker.session import Session, check_dataset, open_session, session_of, stop_signal, stopped
from daskcnn.conv import ConvSpec
from daskcnn.errors import ClusterError
from daskcnn.job.tables import LAYER, Job
from daskcnn.nn.score import Score
from daskcnn.ps import Join, Local, Pull, Push, Reply
from daskcnn.ps.vectors import cast
from daskcnn.store.array_index import ArrayIndex
from daskcnn.training.cadence import Cadence, JudgeLocal, TrainSteps, steps_of_round
from daskcnn.training.replica import Replica, Stopped, Trained
from daskcnn.training.replica_exchange import Answer, Await, JudgeCenter, Order, PullCenter, ReplicaExchange, Send
from daskcnn.training.round_report import RoundReport
from daskcnn.training.worker_calibration import stage_seconds, step_seconds, tune_convolutions


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


def device_problem(kind: str) -> str | None:
    """None if this worker has the device that it advertises, else what is wrong."""
    try:
        if kind == "gpu":
            backend("gpu")
    except ClusterError as error:
        return str(error)
    return None


@returns_refusals
def calibrate(run: str, job: Job, kind: DeviceKind, fingerprint: str, index: ArrayIndex | None = None) -> Calibration:
    """Measure this worker with the real shapes, through the code of training. `index`: of arrays in place.

    Raises ClusterError where it has not the device that it advertises, or does not see the very data set; ArrayChanged
    where arrays in place are not what the index says.
    """
    if problem := check_dataset(job, fingerprint, index):
        remedy = "give data on storage that every worker reaches, or copy it there"
        raise ClusterError(f"it does not see the data set: {problem}; {remedy}")
    teller = Teller(run)
    compiling = partial(teller.tell, "compiling loops for this machine")
    session = open_session(run, job, kind, index, compiling=compiling)
    profile = device_profile(kind, session.replica.device.pool.threads)
    with single_threaded_blas():
        tune_convolutions(session.replica, begun=lambda done, of, spec: teller.tell(_in_words(spec), done, of))
        teller.tell("a step of training")
        seconds, convs = step_seconds(session.replica)
        fixed, rest = dict[str, float](), None
        if job.train.strategy == LAYER or job.train.replica_size > 1:  # a shard's share goes by all that it does
            teller.tell("the layers that are sharded")
            stages = stage_seconds(session.replica)
            convs, fixed, rest = dict(stages.whole), dict(stages.fixed), stages.rest
    return Calibration(seconds, convs, fixed, profile.threads, profile.name, profile.memory, rest)


def _in_words(spec: ConvSpec) -> str:
    return f"a convolution {spec.R}x{spec.S} of {spec.C} to {spec.K} channels, maps {spec.H}x{spec.W}"


@returns_refusals
def score_weights(run: str, weights: Array, split: str, lo: int, hi: int) -> Score:
    """Judge these weights on samples lo…hi of a split ("train" or "test"); of test samples by the views of the job."""
    replica = session_of(run).replica
    with single_threaded_blas():
        theirs = replica.device.backend.from_host(weights)
        part = getattr(replica.dataset, split)
        data = replica.job.data
        whole, views = (len(part), data.views) if split == "test" else (data.validation, "none")
        return replica.evaluate(part, lo, hi, stopped, weights=theirs, whole=whole, views=views)


@returns_refusals
def join_run(order: RoundOrder) -> bool:
    """Take part in the server's barrier, as `joined` does."""
    return joined(order)


def joined(order: RoundOrder) -> bool:
    """Begin a session: take part in the server's barrier and start from its center. False: stopped meanwhile."""
    try:
        join_server(order, session_of(order.run), stop_signal())
    except Stopped:
        return False
    return True


@returns_refusals
def train_round(order: RoundOrder) -> RoundReport | None:
    """One round: train, judge, push, adopt what comes back. None: the driver stopped it."""
    served = ServedRound(order, session_of(order.run), stop_signal())
    try:
        with single_threaded_blas():
            return served.train()
    except Stopped:
        return None
