"""What runs on a worker: the tasks of both strategies, and what a worker keeps between them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
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
from daskcnn.cluster.actor import Link
from daskcnn.cluster.protocol import Calibration, RoundOrder, RoundReport
from daskcnn.config import Job
from daskcnn.errors import ClusterError, DataError
from daskcnn.ps import RULES, AccuracyWeighted, Join, Local, Push, Reply, UpdateRule
from daskcnn.replica import Replica, Score, Stopped, Trained
from daskcnn.store import BatchPlan, Dataset, open_dataset

THROTTLE = "DASKCNN_THROTTLE"
"""Environment variable of a worker: a factor ≥ 1 by which it computes slower, to play an unequal machine."""


@dataclass
class Counters:
    """What a worker spent and moved in a layer-sharded run since it was last asked: seconds, bytes."""

    busy: float = 0.0
    conv_seconds: dict[str, float] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0


@dataclass
class Session:
    """A worker's life in a run: its replica, where it stands with the server, and its part in sharded steps."""

    replica: Replica
    counters: Counters = field(default_factory=Counters)
    order: tuple[BatchPlan, Array] | None = None
    seq: int = 0
    local: Local | None = None


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
        del session
        release_freed_memory()


def stopped() -> bool:
    """Whether the task in this thread was cancelled, by the driver or because the driver is gone.

    Not to be relied on in a task that depends on an actor: see `ServerAt`.
    """
    worker = get_worker()
    task = worker.state.tasks.get(worker.get_current_task())
    return task is None or task.state != "executing"


def calibrate(run: str, job: Job, kind: DeviceKind) -> Calibration:
    """Measure this worker with the real shapes, through the code of training."""
    session = open_session(run, job, kind)
    profile = device_profile(kind, session.replica.device.pool.threads)
    with single_threaded_blas():
        session.replica.tune()
        seconds, convs = session.replica.calibrate()
    return Calibration(seconds, convs, profile.threads, profile.name, profile.memory)


def score_weights(run: str, weights: Array, split: str, lo: int, hi: int) -> Score:
    """Judge these weights on samples lo…hi of a split ("train" or "test"). They stay in the replica."""
    session = session_of(run)
    with single_threaded_blas():
        session.replica.adopt(weights)
        return session.replica.evaluate(_split(session, split), lo, hi, stopped)


def _split(session: Session, name: str) -> Any:
    return getattr(session.replica.dataset, name)


def join_run(order: RoundOrder) -> bool:
    """Begin a session: take part in the server's barrier and start from its center. False: stopped meanwhile."""
    session = session_of(order.run)
    session.seq = 0
    try:
        reply = _link(order, session).call(Join(order.epoch, order.worker, order.session))
    except Stopped:
        return False
    weights = reply.weights.astype(session.replica.layout.dtype, copy=False)
    session.local = Local(session.replica.host_weights(), weights)
    session.replica.adopt_velocity(order.velocity)
    _adopt(order, session, reply)
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
    return Link(order.server.actor, wire=cluster.wire, stopped=stopped)


def _rule(job: Job) -> UpdateRule:
    return RULES[job.train.strategy].model_validate(job.rule)


def _adopt(order: RoundOrder, session: Session, reply: Reply) -> None:
    assert session.local is not None, "joined before its first round"
    weights = reply.weights.astype(session.replica.layout.dtype, copy=False)
    _rule(session.replica.job).adopt(session.local, weights, reply.version)
    session.replica.adopt(session.local.weights)


def _round(order: RoundOrder, session: Session, link: Link) -> RoundReport:
    replica, round_ = session.replica, order.round
    assert round_ is not None, "an order to join only"
    assert session.local is not None, "joined before its first round"
    seconds: dict[str, float] = {}
    trained = replica.train(
        round_.ranges,
        round_.samples,
        presentation=round_.number,
        progress=round_.progress,
        stop=stopped,
    )
    with _timing(seconds, "evaluation"):
        quality = _quality(order, session, trained)
    base_version = session.local.base_version
    with _timing(seconds, "communication"):
        reply = _push(order, session, link, quality, round_.samples)
    with _timing(seconds, "evaluation"):
        center = _judge_center(order, session)
    return RoundReport(
        worker=round_.worker,
        number=round_.number,
        samples=round_.samples,
        loss=trained.score.loss,
        accuracy=trained.score.accuracy,
        lr=trained.lr,
        busy=trained.load + trained.compute,
        load=trained.load,
        wait=reply.waited,
        communication=max(0.0, seconds["communication"] - reply.waited),
        evaluation=seconds["evaluation"],
        bytes_up=link.bytes_up,
        bytes_down=link.bytes_down,
        version=reply.version,
        base_version=base_version,
        staleness=reply.staleness,
        gamma=reply.gamma,
        q=quality,
        center=center,
        velocity=replica.host_velocity(),
    )


def _quality(order: RoundOrder, session: Session, trained: Trained) -> float:
    """Q: the accuracy the rule weighs by, on the validation slice or that of the round's training."""
    rule = _rule(session.replica.job)
    if not isinstance(rule, AccuracyWeighted) or rule.accuracy_on == "train":
        return trained.score.accuracy
    split = session.replica.dataset.train
    begin = len(split) - session.replica.job.data.validation
    return session.replica.evaluate(split, begin, len(split), stopped).accuracy


def _push(order: RoundOrder, session: Session, link: Link, quality: float, samples: int) -> Reply:
    local = session.local
    assert local is not None
    local.weights = session.replica.host_weights()
    session.seq += 1
    push = Push(
        order.epoch,
        order.worker,
        order.session,
        session.seq,
        local.base_version,
        _rule(session.replica.job).payload(local),
        samples,
        quality,
    )
    reply = link.call(push)
    _adopt(order, session, reply)
    return reply


def _judge_center(order: RoundOrder, session: Session) -> Score | None:
    if order.score is None:
        return None
    replica = session.replica
    return replica.evaluate(replica.dataset.train, *order.score, stopped)


@contextmanager
def _timing(seconds: dict[str, float], name: str) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - begun
