"""Ranges of the center as Dask actors, and the sequencer's way to them. `ps.split` says how they work together."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from distributed import Actor, get_worker
from distributed.protocol import to_serialize

from daskcnn import compiled
from daskcnn.arrays import keep_freed_memory, release_freed_memory
from daskcnn.cluster.link.client import lent_client
from daskcnn.cluster.link.leaving import HeldActor, hold_end_up
from daskcnn.errors import PushRefused
from daskcnn.ps import Code, Push, RuleState, Snapshot, UpdateRule, Vector
from daskcnn.ps.messages import Objection, failure
from daskcnn.ps.server import Steps
from daskcnn.ps.split import MergeOrder, OrderedRange, RangeOrder, Vote
from daskcnn.ps.vectors import cast
from daskcnn.ps.wire import CODED, Wire

TRIES = 3


class Cast:
    """Vectors as they go over the wire. All workers behind a barrier are sent the same one: it is cast once.

    A coded one goes as it is.
    """

    def __init__(self, wire: str) -> None:
        self.wire = np.dtype(wire)
        self._last: tuple[Any, Any] = (None, None)

    def __call__(self, vector: Vector) -> Vector:
        if vector.dtype == CODED:
            return vector
        if self._last[0] is not vector:
            self._last = vector, cast(vector, self.wire)
        sent: Vector = self._last[1]
        return sent


def use_memory_again(server: object) -> None:
    """While the server is there its process keeps what it frees: a push takes as much as the one before."""
    keep_freed_memory()
    weakref.finalize(server, release_freed_memory)


def load_merges(dtype: str) -> None:
    """Load the compiled merges, or compile them. No merge may be made before it is done.

    Importing Numba takes half a second. Compiling takes a few seconds, on a machine that has never trained.
    """
    compiled.warm.warm_module("updates", dtype)


@cache
def merges_loading(dtype: str) -> Future[None]:
    """Begin to load the merges on a thread beside, unless that has begun in this process. Returns the end to come."""
    beside = ThreadPoolExecutor(1, thread_name_prefix="parameter-server-merges")
    loaded = beside.submit(load_merges, dtype)
    beside.shutdown(wait=False)
    return loaded


def begin_to_load(dtype: str) -> None:
    """Begin to load the merges, on a worker that will hold a server. Its task."""
    merges_loading(dtype)


class RangeActor:
    """Holds one range of the center, on any worker. kept, ema, steps, besides: as for `ps.server.CenterRange`.

    wire, run: as for `actor.ServerActor`.
    """

    def __init__(
        self,
        rule: UpdateRule,
        snapshot: Snapshot,
        *,
        wire: str,
        kept: Sequence[slice] = (),
        ema: float | None = None,
        steps: Steps | None = None,
        besides: Sequence[slice] = (),
        run: str = "",
    ) -> None:
        use_memory_again(self)
        if run:
            hold_end_up(run, f"range-{id(self)}", HeldActor(self))
        way, of_range = Wire.of(wire, rule), (snapshot.center, snapshot.state, kept, ema, steps, besides)
        self._range = OrderedRange(rule, *of_range, wire=wire)
        self._cast = Cast(way.whole)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parameter-server")
        self._thread.submit(load_merges, snapshot.center.dtype.name)
        self._readers: list[tuple[int, asyncio.Future[None]]] = []

    async def stage(self, push: Push, ticket: str) -> Objection | None:
        """Take the piece of a push that the sequencer is told of next. Returns why it does not fit, if so."""
        dtype = self._range.dtype
        try:
            return await self._run(lambda: self._range.stage(replace(push, payload=cast(push.payload, dtype)), ticket))
        except MemoryError as error:  # the sender would take it for its own
            return failure(error)

    async def take(self, orders: Sequence[RangeOrder]) -> None:
        """Orders of the sequencer, in whatever order they come."""
        await self._run(lambda: self._range.take(orders))
        for number, reader in self._readers:
            if number < self._range.done and not reader.done():
                reader.set_result(None)
        self._readers = [(number, reader) for number, reader in self._readers if not reader.done()]

    async def propose(self, order: MergeOrder) -> Vote:
        """Work a merge out, once its turn has come. Returns the vote on it."""
        await self.take([order])
        await self._carried_out(order.number)
        return self._range.vote(order.number)

    async def read(self, worker: str, number: int) -> Vector:
        """The piece of the worker's answer after this order, once it was carried out, as it goes over the wire.

        Raises PushRefused where the worker has had a later one since.
        """
        await self._carried_out(number)
        try:
            return await self._run(lambda: self._cast(self._range.answer(worker, number)))
        except LookupError as error:
            raise PushRefused(str(error), Code.SEQ) from error

    async def kept(self, number: int) -> Snapshot:
        """This range's part of the snapshot of this number."""
        await self._carried_out(number)
        return self._range.kept(number)

    async def go_on_with(self, state: RuleState) -> None:
        """Take over these vectors of this range's state, behind a snapshot: all orders before it are carried out."""
        await self._run(lambda: self._range.go_on_with(state))

    async def _carried_out(self, number: int) -> None:
        if number < self._range.done:
            return
        reader: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._readers.append((number, reader))
        await reader

    async def _run(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


@dataclass(frozen=True)
class RangeAt:
    """The address of a range: its worker's, the actor's key, and the numbers lo…hi of the vector that it holds."""

    address: str
    key: tuple[str, int]
    lo: int
    hi: int

    def actor(self) -> Any:
        """A handle of the actor. Raises OSError where Dask's scheduler does not answer."""
        with lent_client():
            return Actor(RangeActor, self.address, self.key)


class RangeLines:
    """Carries a sequencer's orders to its ranges. `send` and `ask` are for the sequencer's own thread.

    Parameters
    ----------
    limit : Seconds after which a range that has not answered counts as lost.
    lost : Called on the event loop with the error when an order has not reached a range.
    """

    def __init__(self, ranges: Sequence[RangeAt], *, limit: float, lost: Callable[[Exception], None]) -> None:
        self._ranges, self._limit, self._lost = ranges, limit, lost
        self._rpc, self._loop = get_worker().rpc, get_worker().loop.asyncio_loop
        self._telling: set[asyncio.Task[None]] = set()

    def send(self, order: RangeOrder) -> None:
        """Send the order to every range. A worker that reads an answer waits at the range until it is there."""
        self._loop.call_soon_threadsafe(self._tell, order)

    def ask(self, order: MergeOrder) -> Sequence[Vote]:
        """Send the order to every range, and wait for their votes. Raises ConnectionError if one does not vote."""
        return asyncio.run_coroutine_threadsafe(self._votes(order), self._loop).result()

    def _tell(self, order: RangeOrder) -> None:
        for each in self._ranges:
            task = asyncio.create_task(self._told(each, order))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _told(self, to: RangeAt, order: RangeOrder) -> None:
        try:
            await self._call(to, "take", [order])
        except ConnectionError as error:
            self._lost(error)

    async def _votes(self, order: MergeOrder) -> list[Vote]:
        return await asyncio.gather(*(self._call(each, "propose", order) for each in self._ranges))

    async def _call(self, to: RangeAt, function: str, argument: Any) -> Any:
        # as Dask's own handle of an actor does; that one would make a client of the worker's event loop
        call = {"function": function, "actor": to.key, "args": [to_serialize(argument)], "kwargs": {}}
        failure: Exception = TimeoutError(f"no answer within {self._limit:g} s")
        for _ in range(TRIES):
            try:
                outcome = await asyncio.wait_for(self._rpc(to.address).actor_execute(**call), self._limit)
            except TimeoutError:
                break
            except OSError as error:
                failure = error
            else:
                if outcome["status"] == "OK":
                    return outcome["result"]
                failure = outcome["exception"]
                break
        raise ConnectionError(f"a part of the parameter server, on {to.address}, is gone: {failure}") from failure
