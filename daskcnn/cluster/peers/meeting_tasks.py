"""The tasks of replicas that meet without a server, as they run on a worker.

A round is one task of each worker. In it replicas train and meet, over streams that they hold open to each other. Each
worker is in charge of one range: it adds up the pieces of all (`desk`). Each is given the sums of all ranges before it
adopts any, so that a worker that is lost leaves the others with a whole center.

A round that is to end early ends with a meeting, the same for all: a worker that was asked says so with its pieces,
and the sums tell all. It comes to that meeting behind the step at hand.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from daskcnn.arrays import Array, single_threaded_blas
from daskcnn.cluster.link.calls import returns_refusals
from daskcnn.cluster.peers.pieces import OutOfTurn, Peers, PieceExchange
from daskcnn.cluster.server.ranges import load_merges
from daskcnn.cluster.worker.session import Session, session_of, stop_signal
from daskcnn.cluster.worker.tasks import ReplicaRound
from daskcnn.nn import OptimizerState
from daskcnn.partition.rounds import Round
from daskcnn.ps import Local, Vector
from daskcnn.ps.bsp import ASA
from daskcnn.ps.vectors import cast
from daskcnn.training.cadence import Cadence, TrainSteps
from daskcnn.training.exchange_orders import Order, Send
from daskcnn.training.judging import JudgedPart
from daskcnn.training.replica import Stopped, Trained
from daskcnn.training.replica_exchange import ReplicaExchange
from daskcnn.training.round_report import RoundReport


@dataclass(frozen=True)
class RoundStart:
    """The driver's order to begin a round. score: the validation samples to judge its center on; scale: of the rate."""

    round: Round
    session: int
    score: JudgedPart | None
    scale: float


@dataclass(frozen=True)
class Pieces:
    """The arithmetic of a meeting for `ReplicaExchange`: sums are adopted as they come, before it is told of them."""

    asa: ASA

    def pushed(self, local: Local) -> Vector:
        """Return the vector that is cut into pieces."""
        return self.asa.contribution(local)

    def adopt(self, local: Local, answer: Vector, version: int) -> None:
        """Note the version: all ranges are adopted already."""
        local.base_version = version


@dataclass
class Peer:
    """A replica in one life of a run, in its worker's session.

    Attributes
    ----------
    pieces : The exchange of pieces with the others.
    merged : The last meeting's sums, where they are not kept in the local's base.
    """

    life: int
    asa: ASA
    exchange: ReplicaExchange
    pieces: PieceExchange
    merged: Sequence[Array] = ()

    @property
    def local(self) -> Local:
        """The replica's side."""
        return self.exchange.local


class MeetingRound(ReplicaRound):
    """A round of a peer."""

    def __init__(self, session: Session, peer: Peer, peers: Peers, start: RoundStart) -> None:
        super().__init__(session.replica, peer.exchange, start.round, start.score, None, start.scale)
        self._peer, self._peers, self._spans, self._stop = peer, peers, peers.spans(), stop_signal()
        self._farewell = session.farewell

    def train(self) -> RoundReport:
        """Train the round to its end. Raises Stopped, Diverged, or OutOfTurn where another worker does not answer."""
        pieces = self._peer.pieces
        before = pieces.bytes_up, pieces.bytes_down
        with closing(self.steps()) as steps:
            while isinstance(self.order, TrainSteps):
                self._stretch(steps, self.order)
                assert isinstance(self.order, Send)
                self.order = self._met(self.order)
        return self.report(pieces.bytes_up - before[0], pieces.bytes_down - before[1], at_center=True)

    def _stretch(self, steps: Iterator[Trained], order: TrainSteps) -> None:
        """Make these steps, or fewer if the round is to end early."""
        for step, so_far in enumerate(steps, order.first):
            if self._farewell.asked_by_run:
                return self.end_behind(step, so_far)
            if step == order.step:
                return self.stretch_trained(so_far)
        raise AssertionError(f"the round's steps end before {order}")

    def _met(self, order: Send) -> Order:
        """Meet the others, and adopt the sums. Returns the order that follows."""
        assert order.push is not None
        peer, to_host = self._peer, self.replica.device.backend.to_host
        said, version = to_host(order.push.payload), peer.local.base_version
        base = to_host(peer.local.base[slice(*self._spans[peer.pieces.name])])
        last = self._farewell.asked_by_run
        replies = peer.pieces.exchange(said, base, order.push.samples, version, self._stop, last=last)
        self._adopt([replies[name].weights for name in self._peers.names])
        reply = replace(replies[peer.pieces.name], waited=max(each.waited for each in replies.values()))
        following = self.exchange.replied([(reply, peer.local.weights)], time.perf_counter())
        assert following is not None
        return self.exchange.ends_here() if reply.last and isinstance(following, TrainSteps) else following

    def _adopt(self, sums: Sequence[Array]) -> None:
        """Go on from the sums of all workers, each of its range."""
        peer, local, backend = self._peer, self._peer.local, self.replica.device.backend
        frozen = [(place, local.weights[place].copy()) for place in self.replica.frozen]
        besides = self.replica.layout.besides if peer.asa.rule.overshoots else ()
        followed = [(place, local.base[place].copy()) for place in besides]
        for span, merged in zip(self._spans.values(), sums, strict=True):
            peer.asa.adopt(local, span, backend.from_host(merged))
        for place, before in followed:  # the sum is of all workers' changes
            local.base[place] = local.weights[place] = before + (local.weights[place] - before) / peer.asa.rule.times(
                len(sums)
            )
        for place, own in frozen:  # a sum of what has not changed may differ in the last bit, or in the wire's dtype
            local.base[place] = local.weights[place] = own
        peer.merged = () if peer.asa.looks_back else tuple(sums)


def begin_life(
    peers: Peers, name: str, optimizer: OptimizerState | None, version: int, center: Array, asa: ASA
) -> None:
    """Begin as the worker of this name with this center (size,) and optimizer's state. The center is not changed."""
    session = session_of(peers.run)
    replica = session.replica
    if (before := session.kept.find(Peer)) is not None:
        before.pieces.close()
    session.kept.drop(Peer)
    local = Local(replica.weights, replica.weights)
    cadence = Cadence(asa.rule, replica.job.train.batch_size)
    exchange = ReplicaExchange(asa.rule, local, cadence, overlap=False, via=Pieces(asa))
    own = replica.device.backend.from_host(np.array(center, replica.layout.dtype))  # to be written to
    exchange.joined(own, version)
    replica.adopt_optimizer(optimizer)
    load_merges(replica.job.model.dtype)
    session.kept.put(Peer(peers.life, asa, exchange, PieceExchange(peers, name, asa)))


@returns_refusals
def train_round(peers: Peers, version: int, start: RoundStart) -> RoundReport | None:
    """Train a round from the center of this version, and meet the others in it. None: the driver stopped it.

    Raises OutOfTurn where it was done already, or another worker does not come.
    """
    (session, peer), report = _peer_of(peers), None
    if (known := peer.local.base_version) != version:
        raise OutOfTurn(f"a round of version {version} where {known} is trained from; it is dropped")
    peer.pieces.know(peers)
    session.farewell.begin((peers.life, start.session, start.round.number))
    try:
        with single_threaded_blas():
            report = MeetingRound(session, peer, peers, start).train()
    except Stopped:
        return None
    finally:
        session.farewell.end(report)
    return report


def at_meeting(run: str, dask_worker: Any) -> tuple[bool, int]:
    """Return True if this worker waits for others, and the version of its center. It is asked while a task runs."""
    peer = session_of(run, dask_worker.address).kept.find(Peer)
    return (False, 0) if peer is None else (peer.pieces.waits, peer.local.base_version)


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
