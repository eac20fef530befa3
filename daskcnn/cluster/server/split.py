"""The parameter server split over several Dask actors, by ranges of the vector: the same to workers and driver.

One actor decides (`SequencerActor`), one holds each range (`RangeActor`); `ps.split` says how that works. A worker
stages the pieces of its push in the ranges, tells the sequencer, and reads the pieces of its answer: only numbers and
names go through the sequencer. When the host of any of them is lost, the server is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from distributed import Actor, get_worker
from distributed.protocol import to_serialize

from daskcnn.cluster.server.actor import Callers, Cast, Link, use_memory_again
from daskcnn.errors import PushRefused
from daskcnn.ps import Event, Leave, Push, Reply, Snapshot, UpdateRule, Vector
from daskcnn.ps.half import cast
from daskcnn.ps.split import Objection, Order, Part, Range, Sequencer, joined_snapshot

TRIES = 3


@dataclass(frozen=True)
class Placed:
    """A reply without weights; they lie in the ranges after the order of this number."""

    reply: Reply
    number: int


class RangeActor:
    """Holds one range of the center, on any worker."""

    def __init__(self, rule: UpdateRule, part: Part, *, wire: str) -> None:
        use_memory_again(self)
        self._range = Range(rule, part.center, part.state)
        self._cast = Cast(wire)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parameter-server")
        self._readers: list[tuple[int, asyncio.Future[None]]] = []

    async def stage(self, worker: str, session: int, seq: int, piece: Vector) -> Objection | None:
        """Take the piece of a push that the sequencer is told of next. Returns why it does not fit, if so."""
        return await self._run(self._stage, worker, session, seq, piece)

    async def take(self, orders: Sequence[Order]) -> None:
        """Orders of the sequencer, in whatever order they come."""
        await self._run(self._range.take, orders)
        for number, reader in self._readers:
            if number < self._range.done and not reader.done():
                reader.set_result(None)
        self._readers = [(number, reader) for number, reader in self._readers if not reader.done()]

    async def read(self, worker: str, number: int) -> Vector:
        """The piece of the worker's answer after this order, once it was carried out, as it goes over the wire.

        Raises PushRefused where the worker has had a later one since.
        """
        await self._carried_out(number)
        try:
            return await self._run(lambda: self._cast(self._range.answer(worker, number)))
        except LookupError as error:
            raise PushRefused(str(error)) from error

    async def kept(self, number: int) -> Part:
        """This range's part of the snapshot of this number."""
        await self._carried_out(number)
        return self._range.kept(number)

    def _stage(self, worker: str, session: int, seq: int, piece: Vector) -> Objection | None:
        return self._range.stage(worker, session, seq, cast(piece, self._range.dtype))

    async def _carried_out(self, number: int) -> None:
        if number < self._range.done:
            return
        reader: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._readers.append((number, reader))
        await reader

    async def _run(self, call: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)


@dataclass(frozen=True)
class RangeAt:
    """Where a range lives, and which it is: numbers lo…hi of the vector."""

    address: str
    key: tuple[str, int]
    lo: int
    hi: int

    def actor(self) -> Any:
        """A handle of the actor. Raises OSError where Dask's scheduler does not answer."""
        return Actor(RangeActor, self.address, self.key)


class SequencerActor:
    """Decides for all ranges: the server without its vectors."""

    def __init__(self, rule: UpdateRule, snapshot: Snapshot, *, epoch: int, ranges: Sequence[RangeAt]) -> None:
        self._sequencer = Sequencer(rule, snapshot, epoch=epoch)
        self._ranges, self._rpc = ranges, get_worker().rpc
        self._callers = Callers()
        self._telling: set[asyncio.Task[None]] = set()
        self._broken: Exception | None = None

    async def handle(self, event: Event, objection: Objection | None = None) -> Placed:
        """Join, pull, or a push whose pieces are staged, with what a range says against it.

        Raises PushRefused, or OSError where a range is gone. A repeated event gets the reply of the first.
        """
        if self._broken:
            raise ConnectionError("a part of the parameter server is gone") from self._broken
        answer = self._callers.expect(event)
        self._run(event, objection)
        placed: Placed = await answer
        return placed

    async def leave(self, worker: str, session: int) -> None:
        """A worker is gone or sits out: it frees its place at the barrier."""
        self._run(Leave(worker=worker, session=session, at=time.monotonic()))

    async def snapshot(self) -> tuple[Snapshot, int]:
        """A snapshot without its vectors, and the number after which the ranges keep those."""
        snapshot, kept = self._sequencer.snapshot()
        self._tell([kept])
        return snapshot, kept.number

    async def waiting(self) -> list[str]:
        """Workers that wait for an answer now."""
        return self._callers.workers

    def _run(self, event: Event, objection: Objection | None = None) -> None:
        """On the event loop: the vectors that are merged here have one number."""
        decision = self._sequencer.handle(replace(event, at=time.monotonic()), objection)
        self._tell(decision.orders)
        for answer in decision.answers:
            told = answer.instruction
            self._callers.tell(told, Placed(told, answer.number) if isinstance(told, Reply) else None)

    def _tell(self, orders: Sequence[Order]) -> None:
        """Send orders to every range. Nobody waits for that here: who reads an answer waits at the range."""
        for each in self._ranges if orders else ():
            task = asyncio.create_task(self._send(each, orders))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _send(self, to: RangeAt, orders: Sequence[Order]) -> None:
        # as Dask's own handle of an actor does; that one would make a client of the worker's event loop
        call = {"function": "take", "actor": to.key, "args": [to_serialize(orders)], "kwargs": {}}
        for _ in range(TRIES):
            try:
                outcome = await self._rpc(to.address).actor_execute(**call)
            except OSError as error:
                failure: Exception = error
                continue
            if outcome["status"] == "OK":
                return
            failure = outcome["exception"]
            break
        self._broken = failure


@dataclass(frozen=True)
class SplitServerAt:
    """Where a split server lives: its sequencer's worker and key, and the ranges."""

    address: str
    key: tuple[str, int]
    ranges: tuple[RangeAt, ...]

    def actor(self) -> Any:
        """A handle of the sequencer. Raises OSError where Dask's scheduler does not answer."""
        return Actor(SequencerActor, self.address, self.key)

    def link(self, *, wire: str, stopped: Callable[[], bool]) -> Link:
        """A worker's connection to it."""
        return SplitLink(self.actor, self.ranges, wire=wire, stopped=stopped)


class SplitLink(Link):
    """A worker's connection to a split server. ranges: lo, hi and a handle of each, in the vector's order."""

    def __init__(self, actor: Callable[[], Any], ranges: Sequence[RangeAt], **options: Any) -> None:
        super().__init__(actor, **options)
        self._ranges = ranges

    def _send(self, event: Event) -> Reply:
        objection = None
        if isinstance(event, Push):
            objection = self._stage(event)
            event = replace(event, payload=event.payload[:0])
        placed: Placed
        (placed,) = self._ask([lambda: self._actor().handle(event, objection)])
        reply = placed.reply
        if not reply.weights.size:  # the rule's answer is nothing
            return reply
        return replace(reply, weights=self._read(reply.worker, placed.number))

    def _stage(self, push: Push) -> Objection | None:
        """Each range its piece. Returns what the first of them that objects says."""
        cuts = [(each, push.payload[each.lo : each.hi]) for each in self._ranges[:-1]]
        cuts.append((self._ranges[-1], push.payload[self._ranges[-1].lo :]))  # all the rest, so that too much is seen
        key = push.worker, push.session, push.seq
        answers = self._ask([partial(_staged, each, *key, piece) for each, piece in cuts])
        return next((objection for objection in answers if objection is not None), None)

    def _read(self, worker: str, number: int) -> Vector:
        return np.concatenate(self._ask([partial(_read, each, worker, number) for each in self._ranges]))


def _staged(at: RangeAt, worker: str, session: int, seq: int, piece: Vector) -> Any:
    return at.actor().stage(worker, session, seq, piece)


def _read(at: RangeAt, worker: str, number: int) -> Any:
    return at.actor().read(worker, number)


class SplitServer:
    """The driver's handle of a split server, with the methods of a whole one's."""

    def __init__(self, sequencer: Any, ranges: Iterable[Any]) -> None:
        self._sequencer, self._ranges = sequencer, tuple(ranges)

    def leave(self, worker: str, session: int) -> Any:
        return self._sequencer.leave(worker, session)

    def waiting(self) -> Any:
        return self._sequencer.waiting()

    def snapshot(self) -> SplitSnapshot:
        return SplitSnapshot(self._sequencer.snapshot(), self._ranges)


@dataclass
class SplitSnapshot:
    """A snapshot to come, as an actor's answer is. asked: the ranges' answers to come, once the sequencer's is here."""

    of_sequencer: Any
    ranges: Sequence[Any]
    asked: tuple[Any, ...] = ()

    def result(self, timeout: float) -> Snapshot:
        """The whole of it. Raises OSError where a part of the server does not answer within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        snapshot, number = self.of_sequencer.result(timeout=timeout)
        self.asked = self.asked or tuple(each.kept(number) for each in self.ranges)
        parts = [part.result(timeout=max(0.001, deadline - time.monotonic())) for part in self.asked]
        return joined_snapshot(snapshot, parts)
