"""The exchange of pieces between workers that meet, over streams that they hold open to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import NoReturn, Protocol

from distributed import get_worker

from daskcnn.arrays import Array
from daskcnn.cluster.link.streams import PROTOCOLS, TURN
from daskcnn.cluster.peers.desk import SumDesk
from daskcnn.cluster.server.ranges import TRIES
from daskcnn.cluster.server.stream import Answer, CalledEnd, WorkerEnd, take_workers
from daskcnn.errors import Diverged, PushRefused
from daskcnn.ps import Code, Push, Reply
from daskcnn.ps.bsp import ASA
from daskcnn.ps.split import Span, spans
from daskcnn.training.replica import Stopped


class OutOfTurn(Exception):
    """A task of what is over, or a meeting that a worker does not come to; nothing came of it."""


@dataclass(frozen=True)
class Peers:
    """Workers that meet.

    Attributes
    ----------
    life : Counts what the driver begins; tasks of earlier lives are refused.
    names : In the order in which their pieces are added up. Each is in charge of one range.
    size : Of the vector.
    secret : Of this life: workers that know it may send pieces.
    addresses : Of the workers, in the order of their names.
    """

    run: str
    life: int
    names: tuple[str, ...]
    size: int
    secret: str = field(default="", repr=False)
    addresses: tuple[str, ...] = ()

    def spans(self) -> dict[str, Span]:
        """Return the range that each worker is in charge of."""
        return dict(zip(self.names, spans(self.size, len(self.names)), strict=True))

    def desk(self, name: str) -> str:
        """Return the secret of one worker's desk: a process may be several workers."""
        return f"{self.secret}/{name}"


class PieceEnd(Protocol):
    """The way to another worker's desk. See `WorkerEnd`."""

    def begin(self, request: Push, stopped: Callable[[], bool]) -> None:
        """Send a piece."""

    def finish(self, request: Push, stopped: Callable[[], bool]) -> Reply:
        """Wait for the sum."""

    def close(self) -> None:
        """Close it."""


def end_of(peers: Peers, name: str, other: str, length: int, wire: str) -> PieceEnd:
    """Return this worker's way to the desk of another, in charge of that many numbers."""
    address = peers.addresses[peers.names.index(other)]
    if not address.startswith(PROTOCOLS):
        return CalledEnd(get_worker(), address, peers.desk(other))
    return WorkerEnd(get_worker(), name, address, peers.desk(other), length, wire)


class PieceExchange:
    """One worker's side in one life of a run.

    peers: of this life. name: the worker's. The others reach it from now on.

    Attributes
    ----------
    waits : True while it is at a meeting.
    bytes_up, bytes_down : What it has sent and got.
    """

    def __init__(self, peers: Peers, name: str, asa: ASA) -> None:
        self.name, self._asa, self._peers = name, asa, replace(peers, names=())  # it knows nobody yet
        self._desk = SumDesk(asa, peers.life, peers.size)
        take_workers(peers.desk(name), self._desk)
        self._ends: Mapping[str, PieceEnd] = {}
        self.waits = False
        self.bytes_up = self.bytes_down = 0

    def know(self, peers: Peers) -> None:
        """Meet these workers from now on. Streams are held open as long as the same meet."""
        if self._peers.names != peers.names:
            self.close()
            others = {other: span for other, span in peers.spans().items() if other != self.name}
            wire = self._asa.wire.name
            self._ends = {other: end_of(peers, self.name, other, hi - lo, wire) for other, (lo, hi) in others.items()}
        self._peers = peers

    def close(self) -> None:
        """Close the ways to the others."""
        for end in self._ends.values():
            end.close()

    def exchange(
        self,
        said: Array,
        base: Array,
        samples: int,
        version: int,
        stopped: Callable[[], bool],
        *,
        last: bool = False,
    ) -> dict[str, Reply]:
        """Give all workers their pieces. Returns the sums of all ranges, by the workers that are in charge of them.

        said: the contribution (size,) after this version of the center, in the wire's dtype. base: the own range of
        that center. Neither changes meanwhile. samples: that the contribution stands for. last: the round of all is to
        end with this meeting. Raises Stopped, Diverged, PushRefused where a sum cannot be made, or OutOfTurn where a
        worker does not come.
        """
        self.waits = True
        names, ranges, life = self._peers.names, self._peers.spans(), self._peers.life
        pushes = {
            other: Push(life, self.name, life, version, version, said[lo:hi], samples, 1.0, last=last)
            for other, (lo, hi) in ranges.items()
        }
        summed: SimpleQueue[Answer] = SimpleQueue()
        self._desk.meet(pushes[self.name], names, base, summed.put)
        place = names.index(self.name)
        others = (*names[place + 1 :], *names[:place])  # not all begin with the same one
        for other in others:
            with suppress(OSError, EOFError):  # it is sent again
                self._ends[other].begin(pushes[other], stopped)
        replies = {other: self._answered(other, pushes[other], stopped) for other in others}
        replies[self.name] = _own(summed, stopped)
        own, sums = pushes[self.name].payload.nbytes, sum(replies[other].weights.nbytes for other in others)
        self.bytes_up += said.nbytes - own + own * len(others)
        self.bytes_down += sums + own * len(others)
        self.waits = False
        return replies

    def _answered(self, other: str, push: Push, stopped: Callable[[], bool]) -> Reply:
        """Wait for another worker's sum, and send it the piece again where the stream breaks."""
        end = self._ends[other]
        for left in reversed(range(TRIES)):
            try:
                return end.finish(push, stopped)
            except PushRefused as refused:
                _raise_refused(refused)
            except (OSError, EOFError) as error:
                if stopped():
                    raise Stopped from None
                if not left:
                    raise OutOfTurn(f"worker {other} does not come to the meeting of version {push.seq}") from error
                with suppress(OSError, EOFError):
                    end.begin(push, stopped)
        raise AssertionError("the last try returns or raises")


def _own(summed: SimpleQueue[Answer], stopped: Callable[[], bool]) -> Reply:
    """Wait for the own sum."""
    while True:
        try:
            answer = summed.get(timeout=TURN)
        except Empty:
            if stopped():
                raise Stopped from None
            continue
        if isinstance(answer, Reply):
            return answer
        assert not isinstance(answer, ConnectionError)
        _raise_refused(PushRefused(f"{answer.worker}: {answer.reason}", answer.code))


def _raise_refused(refused: PushRefused) -> NoReturn:
    if refused.code == Code.FINITE:
        reason = "NaN or infinity is in what the replicas' weights add up to"
        raise Diverged("center", reason, "lower train.lr") from None
    if refused.code in (Code.FAILED, Code.MEMORY):
        raise refused
    raise OutOfTurn(str(refused)) from None
