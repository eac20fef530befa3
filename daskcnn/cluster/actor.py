"""The parameter server as a Dask Actor, and the worker's side of talking to it.

The state machine of `ps` runs on one executor thread, event after event. The methods are coroutines on the host's
event loop: a push behind a barrier waits there for its reply without holding a thread, so any number can wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from distributed import Actor

from daskcnn.errors import PushRefused
from daskcnn.ps import Event, Evict, Instruction, Leave, ParameterServer, Push, Refuse, Reply, Snapshot, UpdateRule
from daskcnn.replica import Stopped

Key = tuple[str, int, int]
TURN = 0.5  # seconds


class ServerActor:
    """Holds the center. One a run, on a worker that does nothing else."""

    def __init__(self, rule: UpdateRule, snapshot: Snapshot, *, epoch: int, wire: str) -> None:
        self._server = ParameterServer.restore(rule, snapshot, epoch=epoch)
        self._wire = np.dtype(wire)
        self._dtype = snapshot.center.dtype
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parameter-server")
        self._waiting: dict[Key, list[asyncio.Future[Reply]]] = {}

    async def handle(self, event: Event) -> Reply:
        """Join, pull or push: the reply to it, with weights as they go over the wire.

        Raises PushRefused where the server refuses the event. A repeated event gets the reply of the first.
        """
        if isinstance(event, Push):
            event = replace(event, payload=event.payload.astype(self._dtype, copy=False))
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(_key(event), []).append(reply)
        await self._run(event)
        return await reply

    async def leave(self, worker: str, session: int) -> None:
        """A worker is gone or sits out: it frees its place at the barrier."""
        await self._run(Leave(worker=worker, session=session, at=time.monotonic()))

    async def snapshot(self) -> Snapshot:
        """A copy of the center and everything a new server needs to go on."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._server.snapshot)

    async def waiting(self) -> list[str]:
        """Workers that wait for an answer now."""
        return [worker for worker, _, _ in self._waiting]

    async def _run(self, event: Event) -> None:
        event = replace(event, at=time.monotonic())  # on the one clock that all events share
        run = asyncio.get_running_loop().run_in_executor
        for instruction in await run(self._thread, self._server.handle, event):
            self._carry_out(instruction)

    def _carry_out(self, instruction: Instruction) -> None:
        if isinstance(instruction, Evict):  # no Tick is sent: the driver sees who is gone and says Leave
            return
        for waiting in self._waiting.pop(_key(instruction), []):
            if waiting.done():
                continue
            match instruction:
                case Reply():
                    waiting.set_result(replace(instruction, weights=instruction.weights.astype(self._wire, copy=False)))
                case Refuse(reason=reason):
                    waiting.set_exception(PushRefused(f"{instruction.worker}: {reason}"))


def _key(message: Any) -> Key:
    return message.worker, message.session, message.seq


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
            event = replace(event, payload=event.payload.astype(self._wire, copy=False))
            self.bytes_up += event.payload.nbytes
        for attempt in range(self._tries):
            try:
                reply = self._wait(event)
                break
            except OSError:
                if attempt + 1 == self._tries:
                    raise
        self.bytes_down += reply.weights.nbytes
        return reply

    def _wait(self, event: Event) -> Reply:
        """The answer, waited for in short turns until the driver says stop: it judges how long that takes.

        Dask does not wake who waits on an actor that is gone.
        """
        try:
            answer = self._actor().handle(event)
        except RuntimeError as error:  # Dask's, where it knows already
            raise ConnectionError("the parameter server's worker is gone") from error
        while True:
            try:
                reply: Reply = answer.result(timeout=TURN)
                return reply
            except TimeoutError:
                if self._stopped():
                    raise Stopped from None
