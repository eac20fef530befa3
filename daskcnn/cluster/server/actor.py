"""The parameter server as a Dask Actor, and the worker's side of talking to it.

The state machine of `ps` runs on one executor thread, event after event. The methods are coroutines on the host's
event loop: a push behind a barrier waits there for its reply without holding a thread, so any number can wait.
`ranges` has the server that is split over several actors.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from distributed import Actor

from daskcnn.arrays import keep_freed_memory, release_freed_memory
from daskcnn.errors import PushRefused
from daskcnn.ps import (
    Event,
    Evict,
    Instruction,
    Leave,
    ParameterServer,
    Push,
    Refuse,
    Reply,
    Snapshot,
    UpdateRule,
    Vector,
)
from daskcnn.ps.half import cast
from daskcnn.training.replica import Stopped

Key = tuple[str, int, int]
TURN = 0.5  # seconds


class Callers:
    """Who waits for the answer to an event, on the event loop."""

    def __init__(self) -> None:
        self._waiting: dict[Key, list[asyncio.Future[Any]]] = {}

    @property
    def workers(self) -> list[str]:
        return [worker for worker, _, _ in self._waiting]

    def expect(self, event: Event) -> asyncio.Future[Any]:
        """The answer to come: a repeated event gets that of the first."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(_key(event), []).append(answer)
        return answer

    def tell(self, instruction: Instruction, answer: Any) -> None:
        """Give whoever waits for it the answer that the instruction stands for."""
        if isinstance(instruction, Evict):  # no Tick is sent: the driver sees who is gone and says Leave
            return
        for waiting in self._waiting.pop(_key(instruction), []):
            if waiting.done():
                continue
            match instruction:
                case Reply():
                    waiting.set_result(answer)
                case Refuse(code=code, reason=reason):
                    waiting.set_exception(PushRefused(f"{instruction.worker}: {reason}", code))


def _key(message: Any) -> Key:
    return message.worker, message.session, message.seq


class Cast:
    """Vectors as they go over the wire. All workers behind a barrier are sent the same one: it is cast once."""

    def __init__(self, wire: str) -> None:
        self._wire = np.dtype(wire)
        self._last: tuple[Any, Any] = (None, None)

    def __call__(self, vector: Vector) -> Vector:
        if self._last[0] is not vector:
            self._last = vector, cast(vector, self._wire)
        sent: Vector = self._last[1]
        return sent


def use_memory_again(server: object) -> None:
    """While the server is there its process keeps what it frees: a push takes as much as the one before."""
    keep_freed_memory()
    weakref.finalize(server, release_freed_memory)


class ServerActor:
    """Holds the center. One a run, on a worker that does nothing else."""

    def __init__(self, rule: UpdateRule, snapshot: Snapshot, *, epoch: int, wire: str) -> None:
        use_memory_again(self)
        self._server = ParameterServer.restore(rule, snapshot, epoch=epoch)
        self._cast = Cast(wire)
        self._dtype = snapshot.center.dtype
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parameter-server")
        self._callers = Callers()

    async def handle(self, event: Event) -> Reply:
        """Join, pull or push: the reply to it, with weights as they go over the wire.

        Raises PushRefused where the server refuses the event. A repeated event gets the reply of the first.
        """
        reply = self._callers.expect(event)
        await self._run(event)
        answer: Reply = await reply
        return answer

    async def leave(self, worker: str, session: int) -> None:
        """A worker is gone or sits out: it frees its place at the barrier."""
        await self._run(Leave(worker=worker, session=session, at=time.monotonic()))

    async def snapshot(self) -> Snapshot:
        """A copy of the center and everything a new server needs to go on."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._server.snapshot)

    async def waiting(self) -> list[str]:
        """Workers that wait for an answer now."""
        return self._callers.workers

    async def _run(self, event: Event) -> None:
        event = replace(event, at=time.monotonic())  # on the one clock that all events share
        run = asyncio.get_running_loop().run_in_executor
        for instruction, answer in await run(self._thread, self._handle, event):
            self._callers.tell(instruction, answer)

    def _handle(self, event: Event) -> list[tuple[Instruction, Reply | None]]:
        """What follows, and replies as they go over the wire."""
        if isinstance(event, Push):
            event = replace(event, payload=cast(event.payload, self._dtype))
        return [(each, self._sent(each)) for each in self._server.handle(event)]

    def _sent(self, instruction: Instruction) -> Reply | None:
        return replace(instruction, weights=self._cast(instruction.weights)) if isinstance(instruction, Reply) else None


@dataclass(frozen=True)
class ServerAt:
    """Where the server lives: its worker's address and the actor's key. Tasks are sent this in place of the actor.

    A task with an actor among its arguments depends on it. When the actor's host is lost, Dask's scheduler takes all
    such tasks for failed and forgets where they run: the workers are not told, not even when they are cancelled later.
    """

    address: str
    key: tuple[str, int]

    def actor(self) -> Any:
        """A handle of the actor. Raises OSError where Dask's scheduler does not answer."""
        return Actor(ServerActor, self.address, self.key)

    def link(self, *, wire: str, stopped: Callable[[], bool]) -> Link:
        """A worker's connection to it."""
        return Link(self.actor, wire=wire, stopped=stopped)


@dataclass(frozen=True)
class NoAnswer:
    """The answer to a call that could not be made."""

    cause: Exception

    def result(self, timeout: float) -> Any:
        raise ConnectionError("the parameter server's worker is gone") from self.cause


class Link:
    """A worker's connection to the server: sends one event at a time and counts the bytes of both directions.

    actor: gives a handle of the server. stopped: whether the driver has given up the task that waits.
    """

    def __init__(self, actor: Callable[[], Any], *, wire: str, stopped: Callable[[], bool], tries: int = 3) -> None:
        self._actor, self._wire, self._stopped, self._tries = actor, np.dtype(wire), stopped, tries
        self.bytes_up = 0
        self.bytes_down = 0

    def call(self, event: Event) -> Reply:
        """Send the event, wait for the reply. After a broken connection again: the server knows repeats.

        Raises PushRefused, Stopped when the run was stopped meanwhile, or OSError where the server is gone.
        """
        if isinstance(event, Push):
            event = replace(event, payload=cast(event.payload, self._wire))
            self.bytes_up += event.payload.nbytes
        reply = self._send(event)
        self.bytes_down += reply.weights.nbytes
        return reply

    def _send(self, event: Event) -> Reply:
        (reply,) = self._ask([lambda: self._actor().handle(event)])
        return reply

    def _ask(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """The answers to calls of actors, which are all under way at the same time."""
        begun = [self._begun(call) for call in calls]
        return [self._answer(call, answer) for call, answer in zip(calls, begun, strict=True)]

    def _begun(self, call: Callable[[], Any]) -> Any:
        """The answer to come."""
        try:
            return call()
        except (OSError, RuntimeError) as error:  # Dask raises the latter where it knows that the actor is gone
            return NoAnswer(error)

    def _answer(self, call: Callable[[], Any], begun: Any) -> Any:
        """Raises the last try's OSError where all have failed."""
        for _ in range(self._tries - 1):
            with suppress(OSError):
                return self._wait(begun)
            begun = self._begun(call)
        return self._wait(begun)

    def _wait(self, answer: Any) -> Any:
        """The answer, waited for in short turns until the driver says stop: it judges how long that takes.

        Dask does not wake who waits on an actor that is gone.
        """
        while True:
            try:
                return answer.result(timeout=TURN)
            except TimeoutError:
                if self._stopped():
                    raise Stopped from None
