"""What runs on a worker: the tasks of both strategies, and what a worker keeps between them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from distributed import get_worker

from daskcnn.arrays import (
    Array,
    Device,
    DeviceKind,
    backend,
    device_profile,
    keep_freed_memory,
    release_freed_memory,
    single_threaded_blas,
)
from daskcnn.cluster.protocol import Calibration, RoundOrder, RoundReport
from daskcnn.cluster.server.actor import Link
from daskcnn.errors import ClusterError, DataError
from daskcnn.job.tables import Job
from daskcnn.nn.score import Score
from daskcnn.partition.rounds import Round
from daskcnn.ps import RULES, AccuracyWeighted, Action, Join, Local, Pull, Push, Reply, UpdateRule
from daskcnn.ps.half import cast
from daskcnn.store import BatchPlan, Dataset, open_dataset
from daskcnn.training.replica import Replica, Stopped, Trained
from daskcnn.training.stage_calibration import stage_seconds

THROTTLE = "DASKCNN_THROTTLE"
"""Environment variable of a worker: a factor ≥ 1 by which it computes slower, to play an unequal machine."""


@dataclass
class Counters:
    """What a worker spent and moved in a layer-sharded run since it was last asked: seconds, bytes.

    conv_seconds of each stage, for conv_samples that went there and back.
    """

    busy: float = 0.0
    conv_seconds: dict[str, float] = field(default_factory=dict)
    conv_samples: dict[str, float] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0


@dataclass
class Session:
    """A worker's life in a run: its replica, where it stands with the server, and its part in sharded steps."""

    replica: Replica
    counters: Counters = field(default_factory=Counters)
    order: tuple[BatchPlan, Array] | None = None
    shelf: Any = None  # what stays here between the tasks of sharded steps
    seq: int = 0
    local: Local | None = None
    peer: Any = None  # where it meets others without a server
    at_home: Any = None  # a round of the group of workers that this one speaks for
    sender: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "daskcnn-exchange"))


_sessions: dict[str, Session] = {}
_lock = threading.Lock()


def dataset_of(job: Job) -> Dataset:
    """The job's data set as this worker sees it."""
    assert job.data.path is not None, "resolved before anything is sent"
    return open_dataset(job.data.path, limit=job.data.limit)


def check_dataset(job: Job, fingerprint: str) -> str | None:
    """None if this worker sees the very data set, else what is wrong."""
    try:
        found = dataset_of(job).fingerprint
    except DataError as error:
        return str(error)
    return None if found == fingerprint else f"{job.data.path} holds another data set (fingerprint {found[:12]})"


def device_problem(kind: str) -> str | None:
    """None if this worker has the device that it advertises, else what is wrong."""
    try:
        if kind == "gpu":
            backend("gpu")
    except ClusterError as error:
        return str(error)
    return None


def open_session(run: str, job: Job, kind: DeviceKind) -> Session:
    """Begin the run on this worker; whatever another run kept here goes. Raises ClusterError without the device."""
    with _lock:
        for other in list(_sessions):
            forget_run(other)
        threads = job.train.threads or get_worker().state.nthreads
        keep_freed_memory()
        device = Device.of(kind, threads=threads, workspace_limit=job.train.workspace_mib << 20)
        throttle = float(os.environ.get(THROTTLE, "1"))
        clock = time.perf_counter
        replica = Replica(job, dataset_of(job), device, clock=clock, throttle=throttle, pause=time.sleep)
        _sessions[run] = session = Session(replica)
        return session


def session_of(run: str) -> Session:
    """This worker's session of the run. Raises ClusterError where another run has taken the worker over."""
    session = _sessions.get(run)
    if session is None:
        raise ClusterError(
            f"worker {get_worker().address} was taken over by another run; give each run workers of its own"
        )
    return session


def forget_run(run: str) -> None:
    """Free what the run keeps on this worker."""
    session = _sessions.pop(run, None)
    if session is not None:
        session.replica.device.pool.close()
        session.sender.shutdown(wait=False)
        del session
        release_freed_memory()


def stopped() -> bool:
    """Whether the task in this thread was cancelled, by the driver or because the driver is gone.

    Not to be relied on in a task that depends on an actor: see `ServerAt`.
    """
    return stop_signal()()


def stop_signal() -> Callable[[], bool]:
    """The same for this thread's task, to be asked on any thread."""
    worker = get_worker()
    key = worker.get_current_task()

    def stopped() -> bool:
        task = worker.state.tasks.get(key)
        return task is None or task.state != "executing"

    return stopped


def calibrate(run: str, job: Job, kind: DeviceKind) -> Calibration:
    """Measure this worker with the real shapes, through the code of training."""
    session = open_session(run, job, kind)
    profile = device_profile(kind, session.replica.device.pool.threads)
    with single_threaded_blas():
        session.replica.tune()
        seconds, convs = session.replica.calibrate()
        fixed, rest = dict[str, float](), None
        if job.train.strategy == "layer" or job.train.replica_size > 1:  # a shard's share goes by all that it does
            stages = stage_seconds(session.replica)
            convs, fixed, rest = dict(stages.whole), dict(stages.fixed), stages.rest
    return Calibration(seconds, convs, fixed, profile.threads, profile.name, profile.memory, rest)


def score_weights(run: str, weights: Array, split: str, lo: int, hi: int) -> Score:
    """Judge these weights on samples lo…hi of a split ("train" or "test")."""
    replica = session_of(run).replica
    with single_threaded_blas():
        theirs = replica.device.backend.from_host(weights)
        return replica.evaluate(getattr(replica.dataset, split), lo, hi, stopped, weights=theirs)


def join_run(order: RoundOrder) -> bool:
    """Begin a session: take part in the server's barrier and start from its center. False: stopped meanwhile."""
    session = session_of(order.run)
    session.seq = 0
    try:
        reply = _link(order, session).call(Join(order.epoch, order.worker, order.session))
    except Stopped:
        return False
    replica = session.replica
    replica.adopt_velocity(order.velocity)
    session.local = Local(replica.weights, replica.weights)
    _rule(replica.job).begin(session.local, _center(session, reply), reply.version)
    return True


def train_round(order: RoundOrder) -> RoundReport | None:
    """One round: train, judge, push, adopt what comes back. None: the driver stopped it."""
    session = session_of(order.run)
    try:
        with single_threaded_blas():
            return _round(order, session, _link(order, session))
    except Stopped:
        return None


def _link(order: RoundOrder, session: Session) -> Link:
    cluster = session.replica.job.cluster
    return order.server.link(wire=cluster.wire, stopped=stop_signal())


def _rule(job: Job) -> UpdateRule:
    return RULES[job.train.strategy].model_validate(job.rule)


def _center(session: Session, reply: Reply) -> Array:
    """What a reply brings, in the replica's dtype and memory."""
    replica = session.replica
    return replica.device.backend.from_host(cast(reply.weights, replica.layout.dtype))


@dataclass
class Exchange:
    """One exchange with the server under way: the replies to come, and the weights that were sent."""

    replies: Future[list[tuple[Action, Reply]]]
    sent: Array


class Exchanges:
    """What a worker pushes and pulls in one round, as the rule has it, and what that took.

    Under an asynchronous rule an exchange within the round goes on while the next steps are made; what they have
    added by then is added to what the reply brings.
    """

    def __init__(self, order: RoundOrder, session: Session, link: Link) -> None:
        assert session.local is not None, "joined before its first round"
        self.order, self.session, self.link, self.local = order, session, link, session.local
        self.rule = _rule(session.replica.job)
        self.overlap = session.replica.job.cluster.overlap and self.rule.overlaps
        self.seconds: dict[str, float] = {}
        self.steps = self.pushes = self.pushed = self.staleness = 0
        self.wait = self.quality = 0.0
        self.gamma, self.base_version, self.version = 1.0, self.local.base_version, self.local.base_version
        self._under_way: Exchange | None = None

    def after_step(self, so_far: Trained, last: bool) -> None:
        """What the rule wants done now."""
        self.steps += 1
        due = self.rule.due(self.steps, round_end=last)
        if self._under_way and (due or last or self._under_way.replies.done()):
            self._settle(self._under_way)
        if due and self.overlap and not last:
            push = self._prepared(so_far, keep=True) if Action.PUSH in due else None
            replies = self.session.sender.submit(self._exchange, push, Action.PULL in due)
            self._under_way = Exchange(replies, self.local.weights.copy())
        elif due:
            self.meet(due, so_far)

    def meet(self, due: frozenset[Action], so_far: Trained) -> None:
        """Push and pull as is due, and go on from what comes back."""
        push = self._prepared(so_far, keep=False) if Action.PUSH in due else None
        with _timing(self.seconds, "communication"):
            self._take_in(self._exchange(push, Action.PULL in due))

    def judge_center(self) -> Score | None:
        """The score of the center on the order's part of the validation samples, if it has one."""
        if self.order.score is None:
            return None
        center = self.local.base
        if self.rule.answers == "difference":  # a replica that goes its own way has not seen it since it joined
            with _timing(self.seconds, "communication"):
                center = _center(self.session, self.link.call(self._pull()))
        replica = self.session.replica
        with _timing(self.seconds, "evaluation"):
            return replica.evaluate(replica.dataset.train, *self.order.score, stopped, weights=center)

    def _prepared(self, so_far: Trained, *, keep: bool) -> Push:
        """The next push; `keep`: its payload stays what it is while the weights are trained on."""
        with _timing(self.seconds, "evaluation"):
            self.quality = _quality(self.rule, self.session, so_far)
        order, session = self.order, self.session
        session.seq += 1
        self.base_version = self.local.base_version
        payload = session.replica.device.backend.to_host(self.rule.payload(self.local))
        samples, self.pushed = so_far.score.samples - self.pushed, so_far.score.samples
        return Push(
            order.epoch,
            order.worker,
            order.session,
            session.seq,
            self.base_version,
            payload.copy() if keep else payload,
            samples,
            self.quality,
        )

    def _pull(self) -> Pull:
        return Pull(self.order.epoch, self.order.worker, self.order.session)

    def _exchange(self, push: Push | None, pull: bool) -> list[tuple[Action, Reply]]:
        """Make the calls; on the session's own thread where the replica trains on meanwhile."""
        pushed = [(Action.PUSH, self.link.call(push))] if push else []
        return [*pushed, *([(Action.PULL, self.link.call(self._pull()))] if pull else [])]

    def _settle(self, exchange: Exchange) -> None:
        """Wait for the replies; go on from them and from what was trained since."""
        self._under_way = None
        with _timing(self.seconds, "communication"):
            replies = exchange.replies.result()
            gained = self.local.weights - exchange.sent
            self.local.weights[...] = exchange.sent
            self._take_in(replies)
            self.local.weights += gained

    def _take_in(self, replies: list[tuple[Action, Reply]]) -> None:
        for action, reply in replies:
            self.version = reply.version
            brought = _center(self.session, reply)
            if action == Action.PULL:
                self.rule.pulled(self.local, brought, reply.version)
                continue
            self.rule.adopt(self.local, brought, reply.version)
            self.pushes += 1
            self.wait += reply.waited
            self.gamma, self.staleness = reply.gamma, max(self.staleness, reply.staleness)

    def report(self, round_: Round, trained: Trained, center: Score | None) -> RoundReport:
        """How the round went; `center` is the score of the center, if it was judged."""
        return RoundReport(
            worker=round_.worker,
            number=round_.number,
            samples=round_.samples,
            loss=trained.score.loss,
            accuracy=trained.score.accuracy,
            lr=trained.lr,
            busy=trained.load + trained.compute,
            load=trained.load,
            wait=self.wait,
            communication=max(0.0, self.seconds.get("communication", 0.0) - self.wait),
            evaluation=self.seconds.get("evaluation", 0.0),
            bytes_up=self.link.bytes_up,
            bytes_down=self.link.bytes_down,
            pushes=self.pushes,
            version=self.version,
            base_version=self.base_version,
            staleness=self.staleness,
            gamma=self.gamma,
            q=self.quality,
            center=center,
            velocity=self.session.replica.host_velocity(),
        )


def _round(order: RoundOrder, session: Session, link: Link) -> RoundReport:
    replica, round_ = session.replica, order.round
    assert round_ is not None, "an order to join only"
    exchanges = Exchanges(order, session, link)
    rule, local = exchanges.rule, exchanges.local
    trained = replica.train(
        round_.ranges,
        round_.samples,
        presentation=round_.number * rule.passes(replica.job.train.epochs),
        progress=round_.progress,
        steps=round_.steps,
        stop=stopped,
        adjust=lambda grads: rule.local_step(grads, local),
        after=exchanges.after_step,
        scale=rule.rate(order.replicas),
    )
    return exchanges.report(round_, trained, exchanges.judge_center())


def _quality(rule: UpdateRule, session: Session, so_far: Trained) -> float:
    """Q: the accuracy the rule weighs by, on the validation slice or that of the round's training."""
    if not isinstance(rule, AccuracyWeighted) or rule.accuracy_on == "train":
        return so_far.score.accuracy
    split = session.replica.dataset.train
    begin = len(split) - session.replica.job.data.validation
    return session.replica.evaluate(split, begin, len(split), stopped).accuracy


@contextmanager
def _timing(seconds: dict[str, float], name: str) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begun
