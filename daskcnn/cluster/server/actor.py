"""The parameter server as a Dask actor, whole or split, its address, and a worker's connection to it.

The state machine of `ps` runs on one executor thread, request after request. The methods are coroutines on the host's
event loop: a push behind a barrier waits there for its reply without holding a thread, so any number can wait. A whole
server holds the center on that thread too. The ranges of a split one are actors of their own (`ranges`). When the host
of any of these actors is lost, the server is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import uuid4

import numpy as np
from distributed import Actor

from daskcnn import ps
from daskcnn.cluster.link.client import lent_client
from daskcnn.cluster.server.ranges import TRIES, Cast, RangeAt, RangeLines, load_merges, use_memory_again
from daskcnn.errors import PushRefused
from daskcnn.ps.split import SplitCenter, StagedPayload, StoredVector
from daskcnn.ps.vectors import cast
from daskcnn.training.replica import Stopped

TURN = 0.5  # seconds


class ServerLink:
    """Sends one request at a time to the server, and counts the bytes of both directions.

    Where the server is split, vectors do not travel through its sequencer: pieces of a push are staged in the ranges
    before the sequencer is told of it, and pieces of an answer are read from the ranges after the sequencer's reply.

    Parameters
    ----------
    ranges : The ranges of a split server, in the vector's order; none of a whole one.
    stopped : Returns True once the driver has given up the task that waits.
    """

    def __init__(
        self, actor: Callable[[], Any], ranges: Sequence[RangeAt] = (), *, wire: str, stopped: Callable[[], bool]
    ) -> None:
        self._actor, self._ranges, self._wire, self._stopped = actor, ranges, np.dtype(wire), stopped
        self.bytes_up = 0
        self.bytes_down = 0

    def call(self, request: ps.Request) -> ps.Reply:
        """Send the request and wait for the reply; repeat it after a broken connection. The server recognises repeats.

        Raises PushRefused, Stopped when the run was stopped meanwhile, or OSError where the server is gone.
        """
        if isinstance(request, ps.Push):
            request = replace(request, payload=cast(request.payload, self._wire))
            self.bytes_up += request.payload.nbytes
        reply: ps.Reply
        (reply,) = self._ask([lambda: self._actor().handle(self._staged(request))])
        weights: Any = reply.weights
        if isinstance(weights, StoredVector):
            to, number = reply.worker, weights.number
            pieces = self._ask([partial(lambda at: at.actor().read(to, number), at) for at in self._ranges])
            reply = replace(reply, weights=np.concatenate(pieces))
        self.bytes_down += reply.weights.nbytes
        return reply

    def _staged(self, request: ps.Request) -> ps.Request:
        """The request as the server's actor takes it: without the payload, where there are ranges that have it."""
        if not self._ranges or not isinstance(request, ps.Push):
            return request
        ticket, payload = uuid4().hex, request.payload
        pieces = [(at, replace(request, payload=payload[at.lo : at.hi])) for at in self._ranges]
        found = self._ask([partial(lambda at, piece: at.actor().stage(piece, ticket), *each) for each in pieces])
        instead: Any = StagedPayload(ticket, payload.shape, next(filter(None, found), None))
        return replace(request, payload=instead)

    def _ask(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Call actors, all at the same time. Returns their answers."""
        begun = [self._begun(call) for call in calls]
        return [self._answer(call, answer) for call, answer in zip(calls, begun, strict=True)]

    def _begun(self, call: Callable[[], Any]) -> Any:
        """Begin a call. Returns the pending answer, which is a ConnectionError where the call cannot be made."""
        try:
            return call()
        except (OSError, RuntimeError) as error:  # Dask raises the latter where it knows that the actor is gone
            answer, gone = Future[Any](), ConnectionError("the parameter server's worker is gone")
            gone.__cause__ = error
            answer.set_exception(gone)
            return answer

    def _answer(self, call: Callable[[], Any], begun: Any) -> Any:
        """Wait for an answer, and call again where that fails. Raises the last OSError where all tries fail."""
        for _ in range(TRIES - 1):
            with suppress(OSError):
                return self._wait(begun)
            begun = self._begun(call)
        return self._wait(begun)

    def _wait(self, answer: Any) -> Any:
        """Wait for the answer in short turns, until the driver says stop: the driver decides how long.

        Dask does not end a wait for an actor that is gone.
        """
        while True:
            try:
                return answer.result(timeout=TURN)
            except TimeoutError:
                if self._stopped():
                    raise Stopped from None


Key = tuple[str, int, int]


class Callers:
    """Workers that wait for the answer to a request, on the event loop. lost: why no answer will come any more."""

    def __init__(self) -> None:
        self.waiting: dict[Key, list[asyncio.Future[Any]]] = {}
        self.lost: Exception | None = None

    def expect(self, request: ps.Request) -> asyncio.Future[Any]:
        """The answer to come: a repeated request gets that of the first."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(_key(request), []).append(answer)
        return answer

    def tell(self, instruction: ps.Instruction, answer: Any) -> None:
        """Give everyone who waits for it the answer that the instruction stands for."""
        for waiting in self.waiting.pop(_key(instruction), []):
            if waiting.done():
                continue
            match instruction:
                case ps.Reply():
                    waiting.set_result(answer)
                case ps.Refuse(code=code, reason=reason):
                    waiting.set_exception(PushRefused(f"{instruction.worker}: {reason}", code))

    def lose(self, error: Exception) -> None:
        """Fail all answers: a part of the server is gone."""
        self.lost = self.lost or error
        for answers in self.waiting.values():
            for answer in answers:
                if not answer.done():
                    answer.set_exception(ConnectionError(str(error)))
        self.waiting.clear()


def _key(message: Any) -> Key:
    return message.worker, message.session, message.seq


class ServerActor:
    """The server: one a run, on a worker that does nothing else.

    Parameters
    ----------
    snapshot : What it goes on from. A split server looks at no vector of it but for the center's dtype.
    wire : The dtype that vectors travel in.
    ranges : The ranges of a split server, in the vector's order. None: it holds the center itself.
    limit : Seconds after which a range that has not answered counts as lost.
    kept : Places in the center that no merge changes, as far as it is held here.
    """

    def __init__(
        self,
        rule: ps.UpdateRule,
        snapshot: ps.Snapshot,
        *,
        life: int,
        wire: str,
        ranges: Sequence[RangeAt] = (),
        limit: float = 300.0,
        kept: Sequence[slice] = (),
    ) -> None:
        use_memory_again(self)
        self._callers = Callers()
        self._server: ps.Sequencer
        if ranges:
            lines = RangeLines(ranges, limit=limit, lost=self._callers.lose)
            vectors = SplitCenter(rule, snapshot.center, ranges[-1].hi, send=lines.send, ask=lines.ask)
            self._server = ps.Sequencer(rule, vectors, life=life, version=snapshot.version).resume(snapshot)
        else:
            self._server = ps.ParameterServer.restore(rule, snapshot, life=life, kept=kept)
        self._cast, self._dtype = Cast(wire), snapshot.center.dtype
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parameter-server")
        beside = ThreadPoolExecutor(1, thread_name_prefix="parameter-server-merges")
        self._loaded = beside.submit(load_merges, self._dtype.name)  # while workers join and train their first round
        beside.shutdown(wait=False)

    async def handle(self, request: ps.Request) -> ps.Reply:
        """Join, pull or push: the reply to it, with weights as they go over the wire.

        Raises PushRefused where the server refuses the request, or ConnectionError where a range of it is gone. A
        repeated request gets the reply of the first.
        """
        reply = self._callers.expect(request)
        with suppress(ConnectionError):  # every caller is told of it, this one too
            await self._run(request)
        answer: ps.Reply = await reply
        return answer

    async def leave(self, worker: str, session: int) -> None:
        """A worker is gone or sits out: it frees its place at the barrier."""
        await self._run(ps.Leave(worker=worker, session=session))

    async def snapshot(self) -> ps.Snapshot:
        """Everything a new server needs to go on; of a split one, its ranges have the vectors."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._server.snapshot)

    async def waiting(self) -> list[str]:
        """Workers that wait for an answer now, one entry a request."""
        return [worker for worker, _, _ in self._callers.waiting]

    async def _run(self, request: ps.Request) -> None:
        request = replace(request, at=time.monotonic())  # on the one clock that all requests share
        run = asyncio.get_running_loop().run_in_executor
        try:
            for instruction, answer in await run(self._thread, self._handle, request):
                self._callers.tell(instruction, answer)
        except ConnectionError as error:
            self._callers.lose(error)
            raise

    def _handle(self, request: ps.Request) -> list[tuple[ps.Instruction, ps.Reply | None]]:
        """The instructions that follow, and replies as they go over the wire."""
        if lost := self._callers.lost:  # what the sequencer was about when it was lost is not done
            raise ConnectionError(str(lost)) from lost
        if isinstance(request, ps.Push) or self._cast.wire != self._dtype:
            self._loaded.result()
        if isinstance(request, ps.Push) and not isinstance(request.payload, StagedPayload):
            request = replace(request, payload=cast(request.payload, self._dtype))
        return [(each, self._sent(each)) for each in self._server.handle(request)]

    def _sent(self, instruction: ps.Instruction) -> ps.Reply | None:
        if isinstance(instruction, ps.Refuse):
            return None
        stored = isinstance(instruction.weights, StoredVector)
        return instruction if stored else replace(instruction, weights=self._cast(instruction.weights))


@dataclass(frozen=True)
class ServerAt:
    """The address of a server: its worker's, the actor's key, and the ranges of a split one. Tasks are sent this.

    A task with an actor among its arguments depends on it. When the actor's host is lost, Dask's scheduler takes all
    such tasks for failed and forgets where they run: the workers are not told, not even when they are cancelled later.
    """

    address: str
    key: tuple[str, int]
    ranges: tuple[RangeAt, ...] = ()

    def actor(self) -> Any:
        """A handle of the actor. Raises OSError where Dask's scheduler does not answer."""
        with lent_client():
            return Actor(ServerActor, self.address, self.key)

    def link(self, *, wire: str, stopped: Callable[[], bool]) -> ServerLink:
        """A worker's connection to it."""
        return ServerLink(self.actor, self.ranges, wire=wire, stopped=stopped)
