"""The tasks that run on a worker: calibrate it, judge weights, join the server, train a round."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, wait
from contextlib import closing
from contextvars import copy_context
from functools import partial
from typing import Any

from daskcnn.arrays import Array, DeviceKind, cpu_count, device_profile, single_threaded_blas
from daskcnn.cluster.link.calls import returns_refusals
from daskcnn.cluster.link.leaving import LONGEST
from daskcnn.cluster.link.news import Teller
from daskcnn.cluster.messages import Calibration, RoundOrder
from daskcnn.cluster.server.actor import ServerLink
from daskcnn.cluster.server.stream import WorkerEnd
from daskcnn.cluster.worker.session import Session, check_dataset, open_session, session_of, stop_signal, stopped
from daskcnn.conv import ConvSpec
from daskcnn.errors import ClusterError
from daskcnn.job.tables import Job
from daskcnn.nn import OptimizerState, StepPace
from daskcnn.nn.score import Score
from daskcnn.partition.rounds import Round
from daskcnn.ps import Join, Local, Pull, Push, PushPart, Reply, Request
from daskcnn.ps.vectors import cast
from daskcnn.ps.wire import CODED, Differences, Feedback, Wire
from daskcnn.store.array_index import ArrayIndex
from daskcnn.training.cadence import Cadence, TrainSteps, steps_of_round
from daskcnn.training.exchange_orders import Answer, Await, JudgeCenter, JudgeLocal, Order, PullCenter, Report, Send
from daskcnn.training.gradient_parts import TellStep
from daskcnn.training.judging import JudgedPart
from daskcnn.training.replica import Replica, Stopped, Trained, workspace_batch
from daskcnn.training.replica_exchange import ReplicaExchange
from daskcnn.training.round_report import RoundReport
from daskcnn.training.worker_calibration import (
    conv_seconds,
    fixed_seconds,
    shares_steps,
    stage_seconds,
    step_seconds,
    tune_convolutions,
)

TURN = 0.2  # seconds between two looks if a worker that waits for a reply is to leave
SOON = 1.0  # seconds for which such a worker waits still


def join_server(order: RoundOrder, session: Session, stop: Callable[[], bool]) -> None:
    """Take part in the server's barrier and start from its center. Raises Stopped."""
    replica, job = session.replica, session.replica.job
    rule = order.rule or job.rule
    assert rule is not None, "strategy layer has tasks of its own"
    if session.exchange is None or session.exchange.rule != rule:
        # a group's home makes no steps by itself; where a reply comes between two steps is a matter of seconds
        overlap = job.cluster.overlap and job.train.replica_size == 1 and not job.train.reproducible
        cadence = Cadence(rule, job.train.batch_size, job.data.validation)
        local = Local(replica.weights, replica.weights, besides=replica.layout.besides)
        averaged = job.train.ema is not None
        way = Wire.of(job.cluster.wire, rule)
        feedback = Feedback(rule, replica.device.xp) if way.coded else None
        via = Differences(rule) if way.differences else feedback
        how: dict[str, Any] = {"overlap": overlap, "via": via, "frozen": replica.frozen, "averaged": averaged}
        session.exchange = ReplicaExchange(rule, local, cadence, **how)
        session.feedback = feedback
    link = _link(order, session, stop)
    reply = link.call(Join(order.life, order.worker, order.session))
    _, center = _on_device(replica, reply)
    session.exchange.joined(center, reply.version)
    session.parts = reply.parts
    if session.feedback is not None:
        session.feedback.begin(session.exchange.local, order.rest)
    replica.adopt_optimizer(order.optimizer)


class ReplicaRound:
    """A round of a replica on its worker, from the beginning to the report. `order` is to be carried out next."""

    def __init__(
        self,
        replica: Replica,
        exchange: ReplicaExchange,
        round_: Round,
        score: JudgedPart | None,
        q: JudgedPart | None,
        scale: float,
    ) -> None:
        self.replica, self.exchange = replica, exchange
        self._round, self._scale = round_, scale
        self.order: Order = exchange.begin(round_, score, q)
        self._tell: TellStep | None = None
        self._optimizer: OptimizerState | None = None

    def steps(self) -> Generator[Trained, None, None]:
        """Train the round a step at a time; see `steps_of_round`."""
        rule, local = self.exchange.rule, self.exchange.local
        how: dict[str, Any] = {"scale": self._scale, "stop": stopped, "sizes": self.exchange.sizes, "tell": self._tell}
        return steps_of_round(self.replica, rule, self._round, local, optimizer=self._optimizer, **how)

    def stretch_trained(self, so_far: Trained) -> None:
        """Tell the state machine that the steps it ordered are made."""
        busy, now = so_far.load + so_far.compute, time.perf_counter()
        self.order = self.exchange.trained(so_far.score, so_far.lr, busy=busy, load=so_far.load, at=now)

    def end_behind(self, step: int, so_far: Trained) -> None:
        """Tell the state machine that the round ends behind this step."""
        busy, score, now = so_far.load + so_far.compute, so_far.score, time.perf_counter()
        spent = {"busy": busy, "load": so_far.load, "at": now}
        self.order = self.exchange.leave(step, score.samples, score, so_far.lr, **spent)

    def evaluate(self, part: JudgedPart, weights: Array | None, whole: int | None = None) -> Score:
        """Judge weights on these samples; None: the replica's own. See `Replica.evaluate`."""
        (lo, hi, draw), train = part, self.replica.dataset.train
        return self.replica.evaluate(train, lo, hi, stopped, draw=draw, weights=weights, whole=whole)

    def report(self, bytes_up: int, bytes_down: int, *, at_center: bool = False) -> RoundReport:
        """Judge the center if that is ordered, and report the round. at_center: its own weights are the center's."""
        if isinstance(self.order, JudgeCenter):
            begun, (part, center) = time.perf_counter(), self.order
            score = self.evaluate(part, None if at_center else center, self.replica.job.data.validation)
            self.order = self.exchange.judged_center(score, begun=begun, at=time.perf_counter())
        optimizer = self.replica.host_optimizer() if self.exchange.local.gradients is None else None
        return self.exchange.report(bytes_up=bytes_up, bytes_down=bytes_down, optimizer=optimizer)


class ServedRound(ReplicaRound):
    """A round of a worker that has joined the server.

    A worker by itself calls `train`. A group's home calls `trained` after each stretch of the group's steps, or `leave`
    where the round ends early, and `end` after the last.
    """

    def __init__(self, order: RoundOrder, session: Session, stop: Callable[[], bool]) -> None:
        assert session.exchange is not None, "joined before its first round"
        assert order.round is not None, "an order to join only"
        session.exchange.give_up()  # a round before may have been stopped
        super().__init__(session.replica, session.exchange, order.round, order.score, order.q, order.scale)
        self.asked, self._session, self._optimizer = order, session, order.optimizer
        self._farewell, self._stopped, self._waits = session.farewell, stop, False
        self._link = _link(order, session, lambda: stop() or (self._waits and self._farewell.asked))
        self._calls: Future[list[Reply]] | None = None  # under way while steps are made
        self._sent: Push | None = None  # what they push
        self._ahead = 0, 0  # the ticket of parts that were sent, and the seq of the push that they are of
        if self._link.takes_parts and self.replica.gradient_parts and session.feedback is None:
            self._tell = self._send_part

    def train(self) -> RoundReport:
        """Train the round to its end. Raises Stopped, PushRefused, Diverged, or OSError where the server is gone."""
        with closing(self.steps()) as steps:
            while isinstance(self.order, TrainSteps):
                self._stretch(steps, self.order)
        return self.end()

    def trained(self, so_far: Trained) -> None:
        """Exchange what the rule wants exchanged after the stretch that was ordered."""
        self.stretch_trained(so_far)
        self._exchange()

    def leave(self, step: int, so_far: Trained) -> None:
        """End the round behind this step, and leave the server with what was gained since the last push."""
        self.end_behind(step, so_far)
        all_pushed = isinstance(self.order, Report)
        self._exchange()
        if all_pushed:
            self._link.leave_as_it_is(self.asked.worker, self.asked.session)

    @property
    def goes_on(self) -> bool:
        """True while steps are to be made: the round has not ended, early or not."""
        return isinstance(self.order, TrainSteps)

    def _exchange(self) -> None:
        while isinstance(self.order, JudgeLocal | Send | Await):
            self.order = self._next(self.order)

    def end(self) -> RoundReport:
        """Judge the center, if that is ordered, and report."""
        if isinstance(self.order, PullCenter):
            pull = Pull(self.asked.life, self.asked.worker, self.asked.session, averaged=self.order.averaged)
            self.order = self._taken_in([self._link.call(pull)])
        report, feedback = self.report(self._link.bytes_up, self._link.bytes_down), self._session.feedback
        if feedback is None or (rest := feedback.rest()) is None:
            return report
        return report._replace(rest=self.replica.device.backend.to_host(rest))

    # --- orders ---

    def _stretch(self, steps: Iterator[Trained], order: TrainSteps) -> None:
        """Make these steps, or fewer if the worker leaves, and exchange; hand in replies that come meanwhile."""
        for step, so_far in enumerate(steps, order.first):
            if self._farewell.asked:
                return self.leave(step, so_far)
            if step == order.step:
                return self.trained(so_far)
            if self._calls is not None and self._calls.done():
                self._replied(self._calls.result())
                self._calls = None
        raise AssertionError(f"the round's steps end before {order}")

    def _next(self, order: JudgeLocal | Send | Await) -> Order:
        """Carry the order out. Returns the order that follows."""
        match order:
            case JudgeLocal(part):
                begun, score = time.perf_counter(), self.evaluate(part, None)
                return self.exchange.judged_local(score, begun=begun, at=time.perf_counter())
            case Send():
                return self._send(order)
            case Await():
                return self._awaited()

    def _send(self, order: Send) -> Order:
        push, asked = None, self.asked
        if (gain := order.push) is not None:
            payload, count = self.replica.device.backend.to_host(gain.payload), gain.samples
            sender = asked.life, asked.worker, asked.session
            ticket, of = self._ahead
            of_step: dict[str, Any] = {"pace": gain.pace, "step": gain.step, "ticket": ticket if of == gain.seq else 0}
            push = Push(*sender, gain.seq, gain.base_version, payload, count, gain.accuracy, **of_step)
        if order.meanwhile is None:
            return self._waited(push, order.pull)
        # the task's context has its worker, through which the server is called
        self._calls, self._sent = self._session.sender.submit(copy_context().run, self._call, push, order.pull), push
        return order.meanwhile

    def _waited(self, push: Push | None, pull: bool) -> Order:
        """Push and pull, and wait for the replies; or push and leave."""
        sent = False
        if not self._farewell.asked:
            self._waits = sent = True
            try:
                return self._taken_in(self._call(push, pull))
            except Stopped:
                if self._stopped():
                    raise
            finally:
                self._waits = False
        return self._departed(push, sent=sent)

    def _awaited(self) -> Order:
        """Wait for the replies to what was sent a while ago; or leave with it, and without the steps since."""
        calls, self._calls = self._calls, None
        assert calls is not None
        asked = None  # since when the worker is to leave
        try:
            while not calls.done():
                wait([calls], TURN)
                asked = asked or (time.monotonic() if self._farewell.asked else None)
                self._waits = asked is not None and time.monotonic() - asked > SOON
            return self._taken_in(calls.result())
        except Stopped:
            if self._stopped():
                raise
        finally:
            self._waits = False
        return self._departed(self._sent, sent=True)

    def _departed(self, push: Push | None, *, sent: bool) -> Order:
        """Leave the server with this push. Raises Stopped where it does not get there in time."""
        if push is not None and not self._link.leave(push, sent=sent, until=time.monotonic() + LONGEST):
            raise Stopped
        return self.exchange.departed(time.perf_counter())

    def _send_part(self, samples: int, pace: StepPace, lo: int, hi: int) -> None:
        """Send a part of the gradients of the step at hand, while the rest is computed, where that is to be."""
        if not self._session.parts or (coming := self.exchange.coming(samples)) is None:
            return
        seq, base, step = coming
        if hi == len(self.replica.gradients):
            self._ahead = next(self._session.tickets), seq
        sender, ticket = (self.asked.life, self.asked.worker, self.asked.session), self._ahead[0]
        how: dict[str, Any] = {"pace": (pace.lr, pace.progress), "step": step, "ticket": ticket}
        push = Push(*sender, seq, base, self.replica.gradients[lo:hi], samples, 1.0, **how)
        self._link.send_part(PushPart(push, lo, hi))

    def _call(self, push: Push | None, pull: bool) -> list[Reply]:
        """Push and pull as ordered. Runs on the session's own thread while the replica trains on."""
        requests: list[Request] = [push] if push else []
        requests += [Pull(self.asked.life, self.asked.worker, self.asked.session)] if pull else []
        return [self._link.call(request) for request in requests]

    def _taken_in(self, replies: list[Reply]) -> Order:
        """Hand in replies that were waited for. Returns the order that follows."""
        order = self._replied(replies)
        assert order is not None
        return order

    def _replied(self, replies: list[Reply]) -> Order | None:
        self._session.parts = replies[-1].parts
        answers = [_on_device(self.replica, reply) for reply in replies]
        return self.exchange.replied(answers, time.perf_counter())


def _link(order: RoundOrder, session: Session, stop: Callable[[], bool]) -> ServerLink:
    """Return this worker's connection to the server, whose stream is held open from task to task."""
    rule = order.rule or session.replica.job.rule
    assert rule is not None
    at, stream = order.server, session.kept.find(WorkerEnd)
    wire = Wire.of(session.replica.job.cluster.wire, rule).whole
    if (stream is None or not stream.leads_to(at.secret)) and (stream := at.stream(order.worker, wire)) is not None:
        session.kept.put(stream)
    return at.link(stream, wire=wire, stopped=stop)


def _on_device(replica: Replica, reply: Reply) -> Answer:
    """Return a reply and its vector in the replica's memory, in its dtype unless it is coded."""
    weights = reply.weights if reply.weights.dtype == CODED else cast(reply.weights, replica.layout.dtype)
    return reply, replica.device.backend.from_host(weights)


@returns_refusals
def calibrate(
    run: str, job: Job, kind: DeviceKind, fingerprint: str, index: ArrayIndex | None = None, number: int = 0
) -> Calibration:
    """Measure this worker with the real shapes, through the code of training. index: of arrays in place.

    number: of the run's session here. Later ones have higher numbers.

    Raises ClusterError where it lacks the device that it advertises, has too little memory or sees another data set,
    and ArrayChanged where arrays in place are not what the index says.
    """
    try:
        return _calibrate(run, job, kind, fingerprint, index, number)
    except MemoryError as error:  # of a GPU too
        reason, remedy = f"out of memory while it was calibrated ({error})", "lower train.batch_size"
        raise ClusterError("", reason, f"{remedy} or train.workspace_mib, or use a device with more memory") from error


def _calibrate(
    run: str, job: Job, kind: DeviceKind, fingerprint: str, index: ArrayIndex | None, number: int
) -> Calibration:
    if problem := check_dataset(job, fingerprint, index):
        remedy = "give data on storage that every worker reaches, or copy it there"
        raise ClusterError(f"it does not see the data set: {problem}; {remedy}")
    teller = Teller(run)
    compiling = partial(teller.tell, "compiling loops for this machine")
    session = open_session(run, job, kind, index, number=number, compiling=compiling)
    profile = device_profile(kind, session.replica.device.pool.threads)
    with single_threaded_blas():

        def tell_spec(done: int, of: int, spec: ConvSpec) -> None:
            maps = f"a convolution {spec.R}x{spec.S} of {spec.C} to {spec.K} channels, maps {spec.H}x{spec.W}"
            teller.tell(maps, done, of)

        tune_convolutions(session.replica, begun=tell_spec)
        fixed, rest = dict[str, float](), None
        if job.train.shards_kernels:  # shares go by whole stages
            teller.tell("the layers that are sharded")
            stages = stage_seconds(session.replica)
            convs, fixed, rest = dict(stages.whole), dict(stages.fixed), stages.rest
            seconds = sum(convs.values()) + rest
        else:
            teller.tell("a step of training")
            seconds, convs = step_seconds(session.replica), conv_seconds(session.replica)
        step_fixed = fixed_seconds(session.replica, seconds) if shares_steps(job) else None
        planned = None if job.train.largest_batch is None else _planned_step(session.replica)
    of_device = profile.threads, profile.name, profile.memory
    return Calibration(seconds, convs, fixed, *of_device, rest, step_fixed, planned, cpu_count())


def _planned_step(replica: Replica) -> int:
    """Return the samples of a step, far more than there will be or fewer, whose convolutions the workspace holds."""
    return workspace_batch(replica.model, replica.dataset.shape, replica.job.model.dtype, replica.device, _MANY)


_MANY = 1 << 17


@returns_refusals
def score_weights(run: str, weights: Array, split: str, part: JudgedPart) -> Score:
    """Judge these weights on this part of a split ("train" or "test"), of test samples by the job's views."""
    replica = session_of(run).replica
    with single_threaded_blas():
        theirs = replica.device.backend.from_host(weights)
        samples, data, (lo, hi, draw) = getattr(replica.dataset, split), replica.job.data, part
        whole, views = (len(samples), data.views) if split == "test" else (data.validation, "none")
        return replica.evaluate(samples, lo, hi, stopped, draw=draw, weights=theirs, whole=whole, views=views)


@returns_refusals
def join_run(order: RoundOrder) -> bool:
    """Join the server as `join_server` does. Returns False if the driver stopped it meanwhile."""
    try:
        join_server(order, session_of(order.run), stop_signal())
    except Stopped:
        return False
    return True


@returns_refusals
def train_round(order: RoundOrder) -> RoundReport | None:
    """Train a round, and exchange weights in it. Returns None if the driver stopped it."""
    assert order.round is not None, "an order to join only"
    session, report = session_of(order.run), None
    session.farewell.begin((order.life, order.session, order.round.number))
    try:
        with single_threaded_blas():
            report = ServedRound(order, session, stop_signal()).train()
    except Stopped:
        return None
    finally:
        session.farewell.end(report)
    return report
