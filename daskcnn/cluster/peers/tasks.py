"""The tasks of a meeting without a server, as they run on a worker.

A replica's training stands still between two tasks of its worker: nothing here waits, so one thread is enough. Tasks
change the replica, so each of them may run once only; one that Dask runs again after a loss is refused.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import numpy as np

from daskcnn.arrays import Array, single_threaded_blas
from daskcnn.cluster.protocol import RoundReport
from daskcnn.cluster.session.tasks import Session, session_of, stopped
from daskcnn.errors import Diverged
from daskcnn.nn.score import Score
from daskcnn.partition.rounds import Round
from daskcnn.ps import Local
from daskcnn.ps.asa import ASA
from daskcnn.ps.bsp import BSP
from daskcnn.ps.half import cast
from daskcnn.ps.split import Span, spans
from daskcnn.ps.vectors import all_finite
from daskcnn.training.replica import Stopped, Trained


class OutOfTurn(Exception):
    """Dask ran a task again, because somebody was lost: nobody needs what it would make."""


@dataclass(frozen=True)
class Peers:
    """Who meets. life: counts what the driver begins; tasks of an earlier one are refused. size: the vector's length.

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
    """Driver to worker: the round that begins. score: the validation samples to judge its center on."""

    round: Round
    score: tuple[int, int] | None


@dataclass(frozen=True)
class Stepped:
    """What a worker did for a meeting: samples trained on, seconds of load and compute."""

    samples: int
    seconds: float


@dataclass(frozen=True)
class Rescued:
    """What a worker has when a meeting was given up."""

    version: int
    velocity: Array


@dataclass
class Counts:
    """What a worker moved in a round, and the seconds that it did not train while the round was under way."""

    bytes_up: int = 0
    bytes_down: int = 0
    meetings: int = 0
    apart: float = 0.0


NOTHING = Trained(Score(0.0, 0, 0), 0.0, 0.0, 0.0)


@dataclass
class Peer:
    """A replica between meetings, in its worker's session.

    said: the contribution to the meeting under way, on the host; it may be the weights themselves, which rest until all
    pieces of it were taken. merged: the last meeting's sums, where they are not kept in the local's base. ended: when
    the last steps were.
    """

    name: str
    life: int
    asa: ASA
    local: Local
    start: RoundStart | None = None
    training: Generator[Trained, None, None] | None = None
    trained: Trained = NOTHING
    said: Array | None = None
    merged: Sequence[Array] = ()
    ended: float = 0.0
    counts: Counts = field(default_factory=Counts)


def begin_life(peers: Peers, name: str, velocity: Array | None, version: int, center: Array) -> None:
    """Start as the worker of this name, from the center (size,), which stays untouched, and from this momentum."""
    session = session_of(peers.run)
    replica = session.replica
    rule = replica.job.rule
    assert isinstance(rule, BSP), "no other rule is serverless"
    wire = rule.wire(replica.job.cluster.wire)
    end_life(session)
    replica.adopt_velocity(velocity)
    local = Local(replica.weights, replica.weights)
    own = replica.device.backend.from_host(np.array(center, replica.layout.dtype))  # to be written to
    rule.begin(local, own, version)
    session.peer = Peer(name, peers.life, ASA(rule, np.dtype(wire)), local)


def end_life(session: Session) -> None:
    """Give up a round that was not ended, so that its loader ends."""
    if session.peer is not None and session.peer.training is not None:
        session.peer.training.close()
    session.peer = None


def train(peers: Peers, version: int, start: RoundStart | None, sums: Sequence[Array]) -> Stepped | None:
    """Go on from the last meeting's sums, if there are any, and train up to the next. None: the driver stopped it.

    version: of the center to train from. start: of the round, for its first meeting.
    """
    session, peer = _peer_of(peers)
    _adopt(peers, session, peer, version, sums)
    if start is not None:
        _begin_round(session, peer, start, replicas=len(peers.names))
    try:
        with single_threaded_blas():
            return _steps(session, peer)
    except Stopped:
        return None


def cut(peers: Peers, version: int, name: str, stepped: Stepped) -> Array:
    """The piece of this worker's contribution that the worker of this name is in charge of."""
    _, peer = _peer_of(peers)
    piece = _said(peer, version)[slice(*peers.span(name))]
    peer.counts.bytes_up += piece.nbytes
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
        raise Diverged("what the replicas' weights add up to holds NaN or infinity; lower train.lr")
    peer.counts.bytes_down += sum(piece.nbytes for piece in pieces)
    peer.counts.bytes_up += merged.nbytes * len(pieces)
    return merged


def adopt(peers: Peers, version: int, sums: Sequence[Array]) -> None:
    """Go on from the sums of all workers, each of its range."""
    session, peer = _peer_of(peers)
    _adopt(peers, session, peer, version, sums)


def end_round(peers: Peers, version: int, sums: Sequence[Array]) -> RoundReport:
    """Adopt the round's last sums, judge the center, and report. The wait for others is part of communication."""
    session, peer = _peer_of(peers)
    _adopt(peers, session, peer, version, sums)
    peer.counts.apart += time.perf_counter() - peer.ended
    assert peer.start is not None
    assert peer.training is not None
    peer.training.close()
    begun = time.perf_counter()
    score = _judge(session, peer, peer.start)
    return _report(session, peer, score, evaluation=time.perf_counter() - begun)


def center_of(peers: Peers) -> Array:
    """The last meeting's center, a copy on the host."""
    session, peer = _peer_of(peers)
    if peer.merged:
        return np.concatenate([cast(part, session.replica.layout.dtype) for part in peer.merged])
    return np.array(session.replica.device.backend.to_host(peer.local.base))


def rescue(peers: Peers) -> Rescued:
    """Which center this worker has, and its momentum."""
    session, peer = _peer_of(peers)
    return Rescued(peer.local.base_version, session.replica.host_velocity())


def _peer_of(peers: Peers) -> tuple[Session, Peer]:
    session = session_of(peers.run)
    peer = session.peer
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
        peer.counts.bytes_down += sum(each.nbytes for i, each in enumerate(sums) if peers.names[i] != peer.name)
        for name, merged in zip(peers.names, sums, strict=True):
            peer.asa.adopt(local, peers.span(name), backend.from_host(merged))
        peer.merged = () if peer.asa.looks_back else tuple(sums)
        local.base_version, peer.said = version, None
    _check_turn(peer, version)


def _begin_round(session: Session, peer: Peer, start: RoundStart, *, replicas: int) -> None:
    replica, round_, rule = session.replica, start.round, peer.asa.rule
    peer.start, peer.counts, peer.trained, peer.ended = start, Counts(), NOTHING, time.perf_counter()
    peer.training = replica.training(
        round_.ranges,
        round_.samples,
        presentation=round_.number * rule.passes(replica.job.train.epochs),
        progress=round_.progress,
        steps=round_.steps,
        stop=stopped,
        scale=rule.rate(replicas),
    )


def _steps(session: Session, peer: Peer) -> Stepped:
    assert peer.training is not None
    assert peer.start is not None
    apart = time.perf_counter() - peer.ended
    before, every = peer.trained, peer.asa.rule.period
    now = before
    for made, now in enumerate(peer.training, 1):
        if made == every or now.score.samples == peer.start.round.samples:
            break
    peer.trained = now
    peer.said = session.replica.device.backend.to_host(peer.asa.contribution(peer.local))
    peer.ended = time.perf_counter()
    peer.counts.meetings += 1
    peer.counts.apart += apart
    busy = now.load + now.compute - before.load - before.compute
    return Stepped(now.score.samples - before.score.samples, busy)


def _judge(session: Session, peer: Peer, start: RoundStart) -> Score | None:
    if start.score is None:
        return None
    replica = session.replica
    with single_threaded_blas():
        return replica.evaluate(replica.dataset.train, *start.score, stopped)  # its weights are the center's now


def _report(session: Session, peer: Peer, center: Score | None, *, evaluation: float) -> RoundReport:
    assert peer.start is not None
    trained, round_, counts, version = peer.trained, peer.start.round, peer.counts, peer.local.base_version
    return RoundReport(
        worker=peer.name,
        number=round_.number,
        samples=round_.samples,
        loss=trained.score.loss,
        accuracy=trained.score.accuracy,
        lr=trained.lr,
        busy=trained.load + trained.compute,
        load=trained.load,
        wait=0.0,
        communication=counts.apart,
        evaluation=evaluation,
        bytes_up=counts.bytes_up,
        bytes_down=counts.bytes_down,
        pushes=counts.meetings,
        version=version,
        base_version=version - 1,
        staleness=0,
        gamma=1.0,
        q=trained.score.accuracy,
        center=center,
        velocity=session.replica.host_velocity(),
    )
