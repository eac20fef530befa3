"""The tasks of a meeting without a server, as they run on a worker.

A replica's training stands still between two tasks of its worker: nothing here waits, so one thread is enough. Tasks
change the replica, so each of them may run once only; one that Dask runs again after a loss is refused.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from daskcnn.arrays import Array, single_threaded_blas
from daskcnn.cluster.worker.session import Session, session_of, stopped
from daskcnn.errors import Diverged
from daskcnn.nn import OptimizerState
from daskcnn.partition.rounds import Round
from daskcnn.ps import Local, Reply, Vector
from daskcnn.ps.bsp import ASA
from daskcnn.ps.split import Span, spans
from daskcnn.ps.vectors import all_finite, cast
from daskcnn.training.cadence import Cadence, TrainSteps, steps_of_round
from daskcnn.training.replica import Stopped, Trained
from daskcnn.training.replica_exchange import JudgeCenter, Order, ReplicaExchange, Report, Send
from daskcnn.training.round_report import RoundReport


class OutOfTurn(Exception):
    """Dask ran a task again because a worker was lost; its result is not needed."""


@dataclass(frozen=True)
class Peers:
    """Workers that meet. life: counts what the driver begins; tasks of earlier ones are refused. size: of the vector.

    names: in the order in which their pieces are added up, each in charge of one range.
    """

    run: str
    life: int
    names: tuple[str, ...]
    size: int

    def span(self, name: str) -> Span:
        """The range that the worker is in charge of."""
        return spans(self.size, len(self.names))[self.names.index(name)]


@dataclass(frozen=True)
class RoundStart:
    """Driver to worker: the round that begins. score: the validation samples to judge its center on.

    scale: of the learning rate.
    """

    round: Round
    score: tuple[int, int] | None
    scale: float


@dataclass(frozen=True)
class Stepped:
    """A worker's training for a meeting: samples trained on, seconds of load and compute."""

    samples: int
    seconds: float


@dataclass(frozen=True)
class Rescued:
    """The state of a worker when a meeting was given up."""

    version: int
    optimizer: OptimizerState


@dataclass(frozen=True)
class Pieces:
    """The arithmetic of a meeting for `ReplicaExchange`: it gives a contribution, and adopts each sum as it came."""

    asa: ASA

    def payload(self, local: Local) -> Vector:
        """The vector that is cut into pieces."""
        return self.asa.contribution(local)

    def adopt(self, local: Local, answer: Vector, version: int) -> None:
        """All ranges are adopted."""
        local.base_version = version


@dataclass
class RoundUnderWay:
    """A round of a peer.

    Attributes
    ----------
    order:
        What its machine wants done next.
    training:
        The round's steps.
    samples, seconds:
        What it came to up to the last meeting: samples, seconds of load and compute.
    bytes_up, bytes_down:
        What this worker moved.
    """

    order: Order
    training: Generator[Trained, None, None]
    samples: int = 0
    seconds: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0


@dataclass
class Peer:
    """A replica between meetings, in its worker's session.

    said: the contribution to the meeting under way, on the host; it may be the weights themselves, which rest until all
    pieces of it were taken. merged: the last meeting's sums, where they are not kept in the local's base.
    """

    name: str
    life: int
    asa: ASA
    exchange: ReplicaExchange
    round: RoundUnderWay | None = None
    said: Array | None = None
    merged: Sequence[Array] = ()

    @property
    def local(self) -> Local:
        """The replica's side."""
        return self.exchange.local

    @property
    def now(self) -> RoundUnderWay:
        """The round under way."""
        assert self.round is not None, "begun with the round's first task"
        return self.round


def begin_life(peers: Peers, name: str, optimizer: OptimizerState | None, version: int, center: Array) -> None:
    """Start as the worker of this name, from the center (size,), which stays untouched, and this optimizer's state."""
    session = session_of(peers.run)
    replica = session.replica
    asa = ASA.of(replica.job.rule, replica.job.cluster.wire)
    end_life(session)
    local = Local(replica.weights, replica.weights)
    cadence = Cadence(asa.rule, replica.job.train.batch_size)
    exchange = ReplicaExchange(asa.rule, local, cadence, overlap=False, via=Pieces(asa))
    own = replica.device.backend.from_host(np.array(center, replica.layout.dtype))  # to be written to
    exchange.joined(own, version)
    replica.adopt_optimizer(optimizer)
    session.kept.put(Peer(name, peers.life, asa, exchange))


def end_life(session: Session) -> None:
    """Give up a round that was not ended, so that its loader ends."""
    peer = session.kept.find(Peer)
    if peer is not None and peer.round is not None:
        peer.round.training.close()
    session.kept.drop(Peer)


def train(peers: Peers, version: int, start: RoundStart | None, sums: Sequence[Array]) -> Stepped | None:
    """Go on from the last meeting's sums, if there are any, and train up to the next. None: the driver stopped it.

    version: of the center to train from. start: of the round, for its first meeting.
    """
    session, peer = _peer_of(peers)
    _adopt(peers, session, peer, version, sums)
    if start is not None:
        _begin_round(session, peer, start)
    if not isinstance(peer.now.order, TrainSteps):
        raise OutOfTurn(f"a task of version {version} whose steps are made already; it is dropped")
    try:
        with single_threaded_blas():
            return _steps(session, peer, peer.now.order)
    except Stopped:
        return None


def cut(peers: Peers, version: int, name: str, stepped: Stepped) -> Array:
    """The piece of this worker's contribution that the worker of this name is in charge of."""
    _, peer = _peer_of(peers)
    piece = _said(peer, version)[slice(*peers.span(name))]
    peer.now.bytes_up += piece.nbytes
    return piece


def add_up(peers: Peers, version: int, stepped: Sequence[Stepped], pieces: Sequence[Array]) -> Array:
    """The merge of the range that this worker is in charge of. pieces: the others', in order.

    Raises Diverged where it is not finite.
    """
    session, peer = _peer_of(peers)
    mine = slice(*peers.span(peer.name))
    contributions = list(pieces)
    contributions.insert(peers.names.index(peer.name), _said(peer, version)[mine])
    base = session.replica.device.backend.to_host(peer.local.base[mine])
    merged = peer.asa.add_up(base, contributions, [each.samples for each in stepped])
    if not all_finite(merged):
        reason = "NaN or infinity is in what the replicas' weights add up to"
        raise Diverged("center", reason, "lower train.lr")
    peer.now.bytes_down += sum(piece.nbytes for piece in pieces)
    peer.now.bytes_up += merged.nbytes * len(pieces)
    return merged


def adopt(peers: Peers, version: int, sums: Sequence[Array]) -> None:
    """Go on from the sums of all workers, each of its range."""
    session, peer = _peer_of(peers)
    _adopt(peers, session, peer, version, sums)


def end_round(peers: Peers, version: int, sums: Sequence[Array]) -> RoundReport:
    """Adopt the round's last sums, judge the center, and report. The wait for others is part of communication."""
    session, peer = _peer_of(peers)
    _adopt(peers, session, peer, version, sums)
    now = peer.now
    now.training.close()
    with single_threaded_blas():
        _judge(session, peer)
    optimizer = session.replica.host_optimizer()
    report = peer.exchange.report(bytes_up=now.bytes_up, bytes_down=now.bytes_down, optimizer=optimizer)
    peer.round = None
    return report


def center_of(peers: Peers) -> Array:
    """The last meeting's center, a copy on the host."""
    session, peer = _peer_of(peers)
    if peer.merged:
        center = np.concatenate([cast(part, session.replica.layout.dtype) for part in peer.merged])
        for place in session.replica.frozen:
            center[place] = session.replica.device.backend.to_host(session.replica.weights[place])
        return center
    return np.array(session.replica.device.backend.to_host(peer.local.base))


def rescue(peers: Peers) -> Rescued:
    """Which center this worker has, and its optimizer's state."""
    session, peer = _peer_of(peers)
    return Rescued(peer.local.base_version, session.replica.host_optimizer())


def _peer_of(peers: Peers) -> tuple[Session, Peer]:
    session = session_of(peers.run)
    peer = session.kept.find(Peer)
    if peer is None or peer.life != peers.life:
        raise OutOfTurn(f"a task of life {peers.life} of the run, where another has begun; it is dropped")
    return session, peer


def _said(peer: Peer, version: int) -> Array:
    _check_turn(peer, version)
    if peer.said is None:
        raise OutOfTurn(f"a task of version {version} that comes before the training; it is dropped")
    return peer.said


def _check_turn(peer: Peer, version: int) -> None:
    if peer.local.base_version != version:
        known = peer.local.base_version
        raise OutOfTurn(f"a task of version {version} where {known} is trained from; it is dropped")


def _adopt(peers: Peers, session: Session, peer: Peer, version: int, sums: Sequence[Array]) -> None:
    """Go on from the sums, if there are any, to the center of this version."""
    backend, local = session.replica.device.backend, peer.local
    if sums:
        _said(peer, version - 1)
        now = peer.now
        now.bytes_down += sum(each.nbytes for i, each in enumerate(sums) if peers.names[i] != peer.name)
        frozen = [(place, local.weights[place].copy()) for place in session.replica.frozen]
        for name, merged in zip(peers.names, sums, strict=True):
            peer.asa.adopt(local, peers.span(name), backend.from_host(merged))
        for place, own in frozen:  # a sum of what has not changed may differ in the last bit, or in the wire's dtype
            local.base[place] = local.weights[place] = own
        peer.merged = () if peer.asa.looks_back else tuple(sums)
        reply = Reply(0, peer.name, peer.life, 0, local.weights, version, version - 1)
        order = peer.exchange.replied([(reply, local.weights)], time.perf_counter())
        assert order is not None
        now.order, peer.said = order, None
    _check_turn(peer, version)


def _begin_round(session: Session, peer: Peer, start: RoundStart) -> None:
    exchange = peer.exchange
    if peer.round is not None:
        raise OutOfTurn(f"round {start.round.number} has begun already; a task was run twice")
    steps = steps_of_round(session.replica, exchange.rule, start.round, exchange.local, scale=start.scale, stop=stopped)
    peer.round = RoundUnderWay(exchange.begin(start.round, start.score), steps)


def _steps(session: Session, peer: Peer, order: TrainSteps) -> Stepped:
    now = peer.now
    so_far = next(each for each in now.training if each.score.samples == order.samples)
    busy = so_far.load + so_far.compute
    meet = peer.exchange.trained(so_far.score, so_far.lr, busy=busy, load=so_far.load, at=time.perf_counter())
    assert isinstance(meet, Send)
    assert meet.push is not None
    peer.said = session.replica.device.backend.to_host(meet.push.payload)
    made = Stepped(so_far.score.samples - now.samples, busy - now.seconds)
    now.order, now.samples, now.seconds = meet, so_far.score.samples, busy
    return made


def _judge(session: Session, peer: Peer) -> None:
    """Judge the center if that is ordered: the replica's weights are the center's now."""
    now, replica = peer.now, session.replica
    if isinstance(now.order, JudgeCenter):
        begun, whole = time.perf_counter(), replica.job.data.validation
        score = replica.evaluate(replica.dataset.train, now.order.lo, now.order.hi, stopped, whole=whole)
        now.order = peer.exchange.judged_center(score, begun=begun, at=time.perf_counter())
    assert isinstance(now.order, Report)
