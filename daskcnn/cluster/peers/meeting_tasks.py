"""The tasks of a meeting without a server, as they run on a worker.

A replica's training rests between two tasks of its worker. No task waits for others, so one thread is enough. Tasks
change the replica, so each may run only once: one that Dask runs again after a loss is refused.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from daskcnn.arrays import Array, single_threaded_blas
from daskcnn.cluster.worker.session import Session, session_of
from daskcnn.cluster.worker.tasks import ReplicaRound
from daskcnn.errors import Diverged
from daskcnn.nn import OptimizerState
from daskcnn.partition.rounds import Round
from daskcnn.ps import Local, Reply, Vector
from daskcnn.ps.bsp import ASA
from daskcnn.ps.split import Span, spans
from daskcnn.ps.vectors import all_finite, cast
from daskcnn.training.cadence import Cadence, TrainSteps
from daskcnn.training.judging import JudgedPart
from daskcnn.training.replica import Replica, Stopped
from daskcnn.training.replica_exchange import ReplicaExchange, Send
from daskcnn.training.round_report import RoundReport


class OutOfTurn(Exception):
    """Dask ran a task again because a worker was lost; its result is not needed."""


@dataclass(frozen=True)
class Peers:
    """Workers that meet.

    Attributes
    ----------
    life : Counts what the driver begins; tasks of earlier lives are refused.
    names : In the order in which their pieces are added up. Each is in charge of one range.
    size : Of the vector.
    """

    run: str
    life: int
    names: tuple[str, ...]
    size: int

    def span(self, name: str) -> Span:
        """Return the range that the worker is in charge of."""
        return spans(self.size, len(self.names))[self.names.index(name)]


@dataclass(frozen=True)
class RoundStart:
    """The driver's order to begin a round. score: the validation samples to judge its center on; scale: of the rate."""

    round: Round
    score: JudgedPart | None
    scale: float


@dataclass(frozen=True)
class Stepped:
    """A worker's training for a meeting: samples trained on, seconds of load and compute."""

    samples: int
    seconds: float


@dataclass(frozen=True)
class Pieces:
    """The arithmetic of a meeting for `ReplicaExchange`: sums are adopted as they come, before it is told of them."""

    asa: ASA

    def payload(self, local: Local) -> Vector:
        """Return the vector that is cut into pieces."""
        return self.asa.contribution(local)

    def adopt(self, local: Local, answer: Vector, version: int) -> None:
        """Note the version: all ranges are adopted already."""
        local.base_version = version


class MeetingRound(ReplicaRound):
    """A round of a peer.

    Attributes
    ----------
    samples, seconds : Up to the last meeting: samples trained on, seconds of load and compute.
    """

    def __init__(self, replica: Replica, exchange: ReplicaExchange, start: RoundStart) -> None:
        super().__init__(replica, exchange, start.round, start.score, None, start.scale)
        self.training = self.steps()
        self.samples, self.seconds = 0, 0.0
        self.bytes_up = self.bytes_down = 0


@dataclass
class Peer:
    """A replica between meetings, in its worker's session.

    Attributes
    ----------
    said
        The contribution to the meeting under way, on the host. It may be the weights themselves, which do not change
        until all of its pieces are taken.
    merged : The last meeting's sums, where they are not kept in the local's base.
    """

    name: str
    life: int
    asa: ASA
    exchange: ReplicaExchange
    round: MeetingRound | None = None
    said: Array | None = None
    merged: Sequence[Array] = ()

    @property
    def local(self) -> Local:
        """The replica's side."""
        return self.exchange.local

    @property
    def now(self) -> MeetingRound:
        """The round under way."""
        assert self.round is not None, "begun with the round's first task"
        return self.round

    def check_turn(self, version: int) -> None:
        """Raise OutOfTurn unless the replica trains from this version."""
        if (known := self.local.base_version) != version:
            raise OutOfTurn(f"a task of version {version} where {known} is trained from; it is dropped")

    def contribution(self, version: int) -> Array:
        """Return what the replica contributes to the meeting of this version. Raises OutOfTurn."""
        self.check_turn(version)
        if self.said is None:
            raise OutOfTurn(f"a task of version {version} that comes before the training; it is dropped")
        return self.said


def begin_life(peers: Peers, name: str, optimizer: OptimizerState | None, version: int, center: Array) -> None:
    """Begin as the worker of this name with this center (size,) and optimizer's state. The center is not changed."""
    session = session_of(peers.run)
    replica = session.replica
    asa = ASA.of(replica.job.rule, replica.job.cluster.wire)
    before = session.kept.find(Peer)
    if before is not None and before.round is not None:
        before.round.training.close()  # stops the loader of a round that was not ended
    session.kept.drop(Peer)
    local = Local(replica.weights, replica.weights)
    cadence = Cadence(asa.rule, replica.job.train.batch_size)
    exchange = ReplicaExchange(asa.rule, local, cadence, overlap=False, via=Pieces(asa))
    own = replica.device.backend.from_host(np.array(center, replica.layout.dtype))  # to be written to
    exchange.joined(own, version)
    replica.adopt_optimizer(optimizer)
    session.kept.put(Peer(name, peers.life, asa, exchange))


def train(peers: Peers, version: int, start: RoundStart | None, sums: Sequence[Array]) -> Stepped | None:
    """Adopt the last meeting's sums, if there are any, and train up to the next meeting.

    version: of the center to train from. start: of the round, for its first meeting. Returns None if the driver stopped
    the training.
    """
    session, peer = _adopted(peers, version, sums)
    if start is not None:
        if peer.round is not None:
            raise OutOfTurn(f"round {start.round.number} has begun already; a task was run twice")
        peer.round = MeetingRound(session.replica, peer.exchange, start)
    now = peer.now
    if not isinstance(now.order, TrainSteps):
        raise OutOfTurn(f"a task of version {version} whose steps are made already; it is dropped")
    wanted = now.order.samples
    try:
        with single_threaded_blas():
            so_far = next(each for each in now.training if each.score.samples == wanted)
    except Stopped:
        return None
    now.stretch_trained(so_far)
    assert isinstance(now.order, Send)
    assert now.order.push is not None
    peer.said = session.replica.device.backend.to_host(now.order.push.payload)
    samples, seconds = so_far.score.samples, so_far.load + so_far.compute
    made = Stepped(samples - now.samples, seconds - now.seconds)
    now.samples, now.seconds = samples, seconds
    return made


def cut(peers: Peers, version: int, name: str, stepped: Stepped) -> Array:
    """Cut the piece of this worker's contribution that the worker of this name is in charge of."""
    _, peer = _peer_of(peers)
    piece = peer.contribution(version)[slice(*peers.span(name))]
    peer.now.bytes_up += piece.nbytes
    return piece


def add_up(peers: Peers, version: int, stepped: Sequence[Stepped], pieces: Sequence[Array]) -> Array:
    """Merge the range that this worker is in charge of. Raises Diverged where the result is not finite.

    pieces: those of the other workers, in the order of their names.
    """
    session, peer = _peer_of(peers)
    mine = slice(*peers.span(peer.name))
    contributions = list(pieces)
    contributions.insert(peers.names.index(peer.name), peer.contribution(version)[mine])
    base = session.replica.device.backend.to_host(peer.local.base[mine])
    merged = peer.asa.add_up(base, contributions, [each.samples for each in stepped])
    if not all_finite(merged):
        raise Diverged("center", "NaN or infinity is in what the replicas' weights add up to", "lower train.lr")
    peer.now.bytes_down += sum(piece.nbytes for piece in pieces)
    peer.now.bytes_up += merged.nbytes * len(pieces)
    return merged


def adopt(peers: Peers, version: int, sums: Sequence[Array]) -> None:
    """Adopt the sums of all workers, each of its range."""
    _adopted(peers, version, sums)


def end_round(peers: Peers, version: int, sums: Sequence[Array]) -> RoundReport:
    """Adopt the round's last sums, judge the center, and report. The wait for others is part of communication."""
    _, peer = _adopted(peers, version, sums)
    now = peer.now
    now.training.close()
    with single_threaded_blas():
        report = now.report(now.bytes_up, now.bytes_down, at_center=True)
    peer.round = None
    return report


def center_of(peers: Peers) -> Array:
    """Return a copy of the last meeting's center on the host."""
    session, peer = _peer_of(peers)
    replica, to_host = session.replica, session.replica.device.backend.to_host
    if not peer.merged:
        return np.array(to_host(peer.local.base))
    center = np.concatenate([cast(part, replica.layout.dtype) for part in peer.merged])
    for place in replica.frozen:
        center[place] = to_host(replica.weights[place])
    return center


def rescue(peers: Peers) -> tuple[int, OptimizerState]:
    """Return the version of this worker's center, and its optimizer's state."""
    session, peer = _peer_of(peers)
    return peer.local.base_version, session.replica.host_optimizer()


def _peer_of(peers: Peers) -> tuple[Session, Peer]:
    session = session_of(peers.run)
    peer = session.kept.find(Peer)
    if peer is None or peer.life != peers.life:
        raise OutOfTurn(f"a task of life {peers.life} of the run, where another has begun; it is dropped")
    return session, peer


def _adopted(peers: Peers, version: int, sums: Sequence[Array]) -> tuple[Session, Peer]:
    """Adopt the sums, if there are any, of the meeting before the center of this version. Raises OutOfTurn."""
    session, peer = _peer_of(peers)
    backend, local = session.replica.device.backend, peer.local
    if sums:
        peer.contribution(version - 1)
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
    peer.check_turn(version)
    return session, peer
