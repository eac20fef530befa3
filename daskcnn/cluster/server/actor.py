"""The parameter server as a Dask actor, whole or split, its address, and a worker's connection to it.

The state machine of `ps` takes one request after the other, on whichever thread brings it. The pushes and pulls of a
whole server come over streams (`stream`), on a thread for each worker. All else are calls of the actor, whose methods
are coroutines on the host's event loop: a push behind a barrier waits there without holding a thread. The ranges of a
split server are actors of their own (`ranges`). When the host of any of these actors is lost, the server is.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from random import uniform
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
from distributed import Actor, get_worker

from daskcnn import ps
from daskcnn.cluster.link.client import lent_client
from daskcnn.cluster.link.leaving import HeldActor, hold_end_up
from daskcnn.cluster.link.streams import Refused
from daskcnn.cluster.server.callers import Callers
from daskcnn.cluster.server.ranges import TRIES, Cast, RangeAt, RangeLines, merges_loading, use_memory_again
from daskcnn.cluster.server.stream import Answer, Give, Tell, WorkerEnd, take_workers
from daskcnn.errors import PushRefused
from daskcnn.partition.step_shares import StepShares
from daskcnn.ps.messages import MergeFailed, Objection
from daskcnn.ps.server import Steps
from daskcnn.ps.split import SplitCenter, StagedPayload, StoredVector
from daskcnn.ps.vectors import cast
from daskcnn.ps.wire import CODED, Wire, coded_bytes
from daskcnn.training.replica import Stopped

T = TypeVar("T")
TURN = 0.5  # seconds
AGAIN = 0.02  # seconds between two questions if the last push of a worker that leaves is there
STREAMS = 6  # tries of a request, each over a stream of its own
PAUSE = 0.1  # seconds at most until the second of them; then twice as long, and so on
SENT_AGAIN = 0.5  # seconds after which it is sent again; then twice as long, and so on


class ServerLink:
    """Sends one request at a time to the server, and counts the bytes of both directions.

    Where the server is split, vectors do not travel through its sequencer: pieces of a push are staged in the ranges
    before the sequencer is told of it, and pieces of an answer are read from the ranges after the sequencer's reply.

    Parameters
    ----------
    ranges : The ranges of a split server, in the vector's order; none of a whole one.
    stream : The stream to a whole server, for pushes and pulls; None: they are calls of the actor too.
    stopped : Returns True once the driver has given up the task that waits.
    """

    def __init__(
        self,
        actor: Callable[[], Any],
        ranges: Sequence[RangeAt] = (),
        stream: WorkerEnd | None = None,
        *,
        wire: str,
        stopped: Callable[[], bool],
    ) -> None:
        self._actor, self._ranges, self._wire, self._stopped = actor, ranges, np.dtype(wire), stopped
        self._stream = stream
        self.bytes_up = 0
        self.bytes_down = 0

    def call(self, request: ps.Request) -> ps.Reply:
        """Send the request and wait for the reply; repeat it after a broken connection. The server recognises repeats.

        Raises PushRefused, Stopped when the run was stopped meanwhile, or OSError where the server is gone.
        """
        if isinstance(request, ps.Push):
            request = self._as_sent(request)
            self.bytes_up += request.payload.nbytes
        reply = (
            self._streamed(request)
            if self._stream and isinstance(request, ps.Push | ps.Pull)
            else self._called(request)
        )
        self.bytes_down += reply.weights.nbytes
        return reply

    def leave(self, last: ps.Push, *, sent: bool, until: float) -> bool:
        """Leave with this last push, which the server merges although no answer is waited for.

        sent: it was sent already, or begun to be. If the server does not have it in a while it is sent again: repeats
        are recognised. until: time to give up at. Returns True once the server has it.
        """
        if not sent:
            self.bytes_up += self._as_sent(last).payload.nbytes
        last, patience = self._as_sent(last), SENT_AGAIN
        again = time.monotonic() + patience
        try:
            while (now := time.monotonic()) < until:
                if not sent or now > again:
                    sent, patience = self._sent_off(last), 2 * patience
                    again = time.monotonic() + patience
                if self._ask([lambda: self._actor().leave(last.worker, last.session, last.seq)]) == [True]:
                    return True
                time.sleep(AGAIN)
            return False
        finally:
            if self._stream is not None:  # the answer, if one comes, is for no later request
                self._stream.close()

    def leave_as_it_is(self, worker: str, session: int) -> None:
        """Leave without a push: all were answered. Raises Stopped, or OSError where the server is gone."""
        self._ask([lambda: self._actor().leave(worker, session)])

    def _as_sent(self, push: ps.Push) -> ps.Push:
        return push if push.payload.dtype == CODED else replace(push, payload=cast(push.payload, self._wire))

    def _sent_off(self, push: ps.Push) -> bool:
        """Send a push whose answer is not waited for. Returns False where the stream breaks."""
        if self._stream is None:
            self._begun(lambda: self._actor().handle(self._staged(push)))
            return True
        with suppress(OSError, EOFError):
            self._stream.begin(push, self._stopped)
            return True
        return False

    @property
    def takes_parts(self) -> bool:
        """True if parts of a push may be sent ahead of it."""
        return self._stream is not None

    def send_part(self, part: ps.PushPart) -> None:
        """Send a part of a push, ahead of `call` with all of it."""
        assert self._stream is not None
        self._stream.send_part(replace(part, push=self._as_sent(part.push)), self._stopped)

    def _streamed(self, request: ps.Request) -> ps.Reply:
        """Send a push or a pull over the stream, and again over another where it breaks.

        Raises Refused where the server's worker is there without it.
        """
        assert self._stream is not None
        assert isinstance(request, ps.Push | ps.Pull)
        for number in range(STREAMS):
            try:
                return self._stream.call(request, self._stopped)
            except (OSError, EOFError) as error:
                if self._stopped():
                    raise Stopped from None
                if isinstance(error, Refused):  # the way is free, but the actor has gone
                    raise
                if number == STREAMS - 1:
                    raise ConnectionError("the parameter server's worker is gone") from error
            time.sleep(PAUSE * 2**number * uniform(0.5, 1.0))  # not all workers at the same time
        raise AssertionError("the last try returns or raises")

    def _called(self, request: ps.Request) -> ps.Reply:
        """Send a request by a call of the actor."""
        reply: ps.Reply
        (reply,) = self._ask([lambda: self._actor().handle(self._staged(request))])
        weights: Any = reply.weights
        if isinstance(weights, StoredVector):
            to, number = reply.worker, weights.number
            pieces = self._ask([partial(lambda at: at.actor().read(to, number), at) for at in self._ranges])
            reply = replace(reply, weights=np.concatenate(pieces))
        return reply

    def _staged(self, request: ps.Request) -> ps.Request:
        """The request as the server's actor takes it: without the payload, where there are ranges that have it."""
        if not self._ranges or not isinstance(request, ps.Push):
            return request
        ticket, payload = uuid4().hex, request.payload
        cuts = [(at.lo, at.hi) for at in self._ranges]
        if payload.dtype == CODED:
            cuts = [(coded_bytes(lo), coded_bytes(hi)) for lo, hi in cuts]
        each_its_own = zip(self._ranges, cuts, strict=True)
        pieces = [(at, replace(request, payload=payload[lo:hi])) for at, (lo, hi) in each_its_own]
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


class ServerActor:
    """The server: one a run, on a worker that does nothing else.

    Parameters
    ----------
    snapshot : What it goes on from. A split server looks at no vector of it but for the center's dtype.
    wire : `cluster.wire`, the dtype that vectors travel in.
    ranges : The ranges of a split server, in the vector's order. None: it holds the center itself.
    limit : Seconds after which a range that has not answered counts as lost.
    kept : Places in the center that no merge changes, as far as it is held here.
    secret : Workers that know it may open streams; without one there are none.
    ema : Part of itself that an average of the center keeps at a merge, as far as it is held here. None: no average.
    steps : The optimizer's steps by merged gradients, as far as the center is held here. None: replicas make them.
    besides : Places of what layers keep besides parameters, as far as the center is held here.
    step_fixed : Fixed time of each worker's steps, in samples, where minibatches follow speeds within rounds; or None.
    run : Its run, which is told if its worker is to end; empty: none is.
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
        secret: str = "",
        ema: float | None = None,
        steps: Steps | None = None,
        besides: Sequence[slice] = (),
        step_fixed: Mapping[str, float] | None = None,
        run: str = "",
    ) -> None:
        use_memory_again(self)
        if run:
            hold_end_up(run, f"server-{life}", HeldActor(self))
        self._callers, self._turn = Callers(), threading.Lock()
        way = Wire.of(wire, rule)
        self._server: ps.Sequencer
        sharing = None if step_fixed is None else StepShares(step_fixed)
        if ranges:
            lines = RangeLines(ranges, limit=limit, lost=self._callers.lose)
            length = way.pushed_length(ranges[-1].hi)
            vectors = SplitCenter(rule, snapshot.center, length, send=lines.send, ask=lines.ask)
            of_run: dict[str, Any] = {"life": life, "version": snapshot.version, "sharing": sharing}
            self._server = ps.Sequencer(rule, vectors, **of_run).resume(snapshot)
        else:
            of_center: dict[str, Any] = {"kept": kept, "ema": ema, "steps": steps, "besides": besides, "wire": wire}
            self._server = ps.ParameterServer.restore(rule, snapshot, life=life, sharing=sharing, **of_center)
        self._gives: dict[str, tuple[int, int, Give]] = {}  # to workers of whose pushes parts are there
        self._trial = ps.PartsTrial()  # whether they are to go ahead
        self._cast, self._dtype = Cast(way.whole), snapshot.center.dtype
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parameter-server")
        self._loaded = merges_loading(self._dtype.name)  # while workers join and train their first round
        size = way.pushed_length(len(snapshot.center))
        self.lengths, self.wire = range(size, size + 1), way.pushed
        if secret:
            take_workers(secret, self)

    async def handle(self, request: ps.Request) -> ps.Reply:
        """Join, pull or push: the reply to it, with weights as they go over the wire.

        Raises PushRefused where the server refuses the request or cannot merge, or ConnectionError where a range of it
        is gone. A repeated request gets the reply of the first.
        """
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[ps.Reply] = loop.create_future()

        def tell(answer: Answer) -> None:
            loop.call_soon_threadsafe(_settle, reply, answer)

        with suppress(ConnectionError):  # every caller is told of it, this one too
            await loop.run_in_executor(self._thread, self.serve, request, tell)
        return await reply

    async def leave(self, worker: str, session: int, last: int = 0) -> bool:
        """A worker is gone or sits out: it frees its place at the barrier. last: as in `Leave`.

        Returns True if that push was merged, or will be.
        """
        await asyncio.get_running_loop().run_in_executor(self._thread, self.serve, ps.Leave(worker, session, last=last))
        return await self._in_turn(partial(self._server.counts, worker, session, last))

    async def snapshot(self) -> ps.Snapshot:
        """Everything a new server needs to go on; of a split one, its ranges have the vectors."""
        return await self._in_turn(self._server.snapshot)

    async def go_on_with(self, state: ps.RuleState) -> None:
        """Take over these vectors of the rule's state, between two rounds. A split server's ranges are each told."""
        assert isinstance(self._server, ps.ParameterServer)
        await self._in_turn(partial(self._server.go_on_with, state))

    async def _in_turn(self, call: Callable[[], T]) -> T:
        def called() -> T:
            with self._turn:
                return call()

        return await asyncio.get_running_loop().run_in_executor(self._thread, called)

    async def waiting(self) -> tuple[list[str], dict[str, float]]:
        """Workers that wait for an answer now, one entry a request; seconds since each last asked or was answered."""
        now, heard = time.monotonic(), self._callers.heard.copy()
        return [worker for worker, _, _ in [*self._callers.waiting]], {each: now - at for each, at in heard.items()}

    def serve(self, request: ps.Request, tell: Tell | None = None) -> None:
        """Carry out a request, on any thread, in its turn. All whose answers are there now are told them.

        Raises ConnectionError where a range of the server is gone; who waits for an answer is told that. So is who
        waits for a merge that a rule cannot make, or for which there is no memory.
        """
        request = replace(request, at=time.monotonic())  # on the one clock that all requests share
        with self._turn:
            if tell is not None:
                self._callers.expect(request, tell)
            try:
                told = [(self._callers.taken(each, request.at), answer) for each, answer in self._handle(request)]
            except ConnectionError as error:
                self._callers.lose(error)
                raise
            except Exception as error:  # a user's rule may raise any
                self._callers.lose(error)
                told = []
        for later in [each(answer) for those, answer in told for each in those]:
            if later is not None:
                later()

    def serve_part(self, part: ps.PushPart, give: Give) -> None:
        """Take a part of a push, on any thread. All workers are given what follows from it."""
        if not self._loaded.done():  # not before the first push
            return
        push = replace(part.push, payload=cast(part.push.payload, self._dtype))
        with self._turn:
            self._gives[push.worker] = push.session, push.seq, give
            try:
                given = self._server.handle_part(replace(part, push=push))
            except Exception as error:  # as in `serve`
                self._callers.lose(error)
                return
            for each in given:
                session, seq, their = self._gives[each.worker]
                if (session, seq) == (each.session, each.seq):
                    their(each, self._cast(each.values))

    def _handle(self, request: ps.Request) -> list[tuple[ps.Instruction, Answer]]:
        """Return the instructions that follow, each with its answer."""
        if lost := self._callers.lost:  # what the sequencer was about when it was lost is not done
            raise MergeFailed(lost) if isinstance(lost, Objection) else ConnectionError(str(lost))
        if isinstance(request, ps.Push) or self._cast.wire != self._dtype:
            self._loaded.result()
        if isinstance(request, ps.Push) and not isinstance(request.payload, StagedPayload) and self.wire != CODED:
            request = replace(request, payload=cast(request.payload, self._dtype))
        return [(each, self._sent(each, request.at)) for each in self._server.handle(request)]

    def _sent(self, instruction: ps.Instruction, at: float) -> Answer:
        if isinstance(instruction, ps.Refuse) or isinstance(instruction.weights, StoredVector):
            return instruction
        self._trial.reached(instruction.version, at)
        parts = self._trial.sends(instruction.version)
        return replace(instruction, weights=self._cast(instruction.weights), parts=parts)


def _settle(reply: asyncio.Future[ps.Reply], answer: Answer) -> None:
    """Give a caller its answer, on the event loop."""
    if reply.done():
        return
    if isinstance(answer, ps.Refuse):
        reply.set_exception(PushRefused(f"{answer.worker}: {answer.reason}", answer.code))
    elif isinstance(answer, ps.Reply):
        reply.set_result(answer)
    else:
        reply.set_exception(ConnectionError(str(answer)))


@dataclass(frozen=True)
class ServerAt:
    """The address of a server: its worker's, the actor's key, and the ranges of a split one. Tasks are sent this.

    A task with an actor among its arguments depends on it. When the actor's host is lost, Dask's scheduler takes all
    such tasks for failed and forgets where they run: the workers are not told, not even when they are cancelled later.
    """

    address: str
    key: tuple[str, int]
    ranges: tuple[RangeAt, ...] = ()
    secret: str = field(default="", repr=False)
    length: int = 0

    def actor(self) -> Any:
        """A handle of the actor. Raises OSError where Dask's scheduler does not answer."""
        with lent_client():
            return Actor(ServerActor, self.address, self.key)

    def stream(self, worker: str, wire: str) -> WorkerEnd | None:
        """Return the stream to it from this worker, in a task of it; None where requests go by calls alone."""
        return WorkerEnd(get_worker(), worker, self.address, self.secret, self.length, wire) if self.secret else None

    def link(self, stream: WorkerEnd | None = None, *, wire: str, stopped: Callable[[], bool]) -> ServerLink:
        """Return a worker's connection to it."""
        return ServerLink(self.actor, self.ranges, stream, wire=wire, stopped=stopped)
