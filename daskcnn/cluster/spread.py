"""Many small tasks over the workers of a cluster: a few at a time on each, and again where a worker is lost.

Each worker has a seat: its copy of what all tasks share, and the items that it works on. An item goes to the first
worker that has room, so fast workers get more of them. Workers that come later get a seat too.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from distributed import Future

from daskcnn.cluster.calls import TURN, answer_to
from daskcnn.cluster.connection import Connection
from daskcnn.cluster.members import Member, advertised, chosen, missing_members
from daskcnn.errors import Lost, UserError
from daskcnn.job.tables import Cluster

DEPTH = 2
"""Items that a worker has: one that it works on, and one so that it need not wait for the driver."""
LOOK = 2.0  # seconds between two looks at which workers there are
ARRIVE = 60.0  # seconds within which what is sent to a worker, or fetched from it, arrives
ATTEMPTS = 3
"""Workers that may be lost with an item, until the item is held to be the cause."""

T = TypeVar("T", bound=Hashable)


@dataclass(eq=False)
class _Seat(Generic[T]):
    """A worker: what all tasks share, as it has it, and what it works on, by key."""

    member: Member
    shared: Future
    under_way: dict[Any, tuple[T, Future]] = field(default_factory=dict)
    heard: float = field(default_factory=time.monotonic)


class Spread(Generic[T]):
    """Calls `function(shared, item, kind, threads)` for every item, on workers of this kind with these threads.

    Parameters
    ----------
    connection : to the cluster
    settings : which workers to use, how long to wait for some, and after what silence one counts as lost
    name : of the tasks, as the dashboard shows them
    shared : what every task is given
    say : is told about lost workers
    """

    def __init__(
        self,
        connection: Connection,
        settings: Cluster,
        name: str,
        function: Callable[[Any, T, Any, int], Any],
        shared: Any,
        say: Callable[[str], None],
    ) -> None:
        self._connection, self._settings, self._name = connection, settings, name
        self._function, self._shared, self._say = function, shared, say
        self._done: SimpleQueue[Future] = SimpleQueue()
        self._seats: dict[str, _Seat[T]] = {}
        self._again: deque[T] = deque()
        self._losses: Counter[T] = Counter()
        self._serial = count()
        self._alone_since: float | None = None

    def over(self, items: Iterable[T]) -> Iterator[tuple[T, Any]]:
        """Yield each item with its result, in the order in which they come.

        Items are taken from the iterable as workers have room for them. Raises what a task raises, Lost where no
        worker is left, and what the connection raises on a signal.
        """
        source, looked = iter(items), -LOOK
        try:
            while True:
                if time.monotonic() >= looked + LOOK:
                    self._look()
                    looked = time.monotonic()
                if self._fill(source) and not any(seat.under_way for seat in self._seats.values()):
                    return
                yield from self._next()
        finally:
            self._give_up()

    def _look(self) -> None:
        """Take away the seats of workers that are gone or silent, and give seats to new ones."""
        there = self._connection.workers()
        for address in [a for a in self._seats if a not in there]:
            self._lose(address, "connection lost")
        self._drop_silent()
        for member in self._candidates(there):
            self._seat(member)
        if self._seats:
            self._alone_since = None
            return
        self._alone_since = time.monotonic() if self._alone_since is None else self._alone_since
        if time.monotonic() > self._alone_since + self._settings.wait:
            raise Lost("workers", f"none is left, for {self._settings.wait:g} s", "start some")

    def _candidates(self, there: Mapping[str, Mapping[str, Any]]) -> list[Member]:
        found, wanted = advertised(there), self._settings.workers
        if not any(m.kind != "ps" for m in found):
            return []
        usable = [m for m in found if m.kind != "ps"]
        if not missing_members(found, wanted):
            usable = list(chosen(found, wanted).workers)
        have = Counter(seat.member.kind for seat in self._seats.values())
        more = []
        for member in usable:
            limit = wanted.given.get(member.kind, 0) if wanted.given else len(usable)
            if member.address not in self._seats and have[member.kind] < limit:
                have[member.kind] += 1
                more.append(member)
        return more

    def _seat(self, member: Member) -> None:
        """Send a worker what the tasks share. One that cannot be reached is tried again at the next look."""
        client = self._connection.client
        options = {"workers": [member.address], "hash": False, "asynchronous": True}
        try:
            call = client.scatter([self._shared], **options)
            (shared,) = answer_to(client, call, within=ARRIVE, check=self._connection.heed)
        except (UserError, KeyboardInterrupt):
            raise
        except Exception as error:  # Dask has a different one for every moment at which a worker may go
            self._say(f"warning: worker {member.address} cannot be used now ({type(error).__name__}: {error})")
            return
        self._seats[member.address] = _Seat(member, shared)

    def _fill(self, source: Iterator[T]) -> bool:
        """Give each seat what it has room for, in turns. Returns whether there is nothing left to give."""
        for _ in range(DEPTH):
            for seat in self._seats.values():
                if len(seat.under_way) >= DEPTH:
                    continue
                try:
                    item = self._again.popleft() if self._again else next(source)
                except StopIteration:
                    return True
                self._submit(seat, item)
        return False

    def _submit(self, seat: _Seat[T], item: T) -> None:
        member, key = seat.member, f"{self._name}-{next(self._serial)}"
        if not seat.under_way:
            seat.heard = time.monotonic()
        future = self._connection.client.submit(
            self._function,
            seat.shared,
            item,
            member.kind,
            member.threads,
            key=key,
            workers=[member.address],
            resources=member.resource,
            allow_other_workers=False,
            pure=False,
        )
        seat.under_way[key] = item, future
        future.add_done_callback(self._done.put)

    def _next(self) -> Iterator[tuple[T, Any]]:
        """Yield what has come, at most one; a signal is heeded meanwhile."""
        self._connection.heed()
        try:
            future = self._done.get(timeout=TURN)
        except Empty:
            return
        seat = next((seat for seat in self._seats.values() if future.key in seat.under_way), None)
        if seat is None:
            return  # of a worker that counts as lost
        if future.status == "error":
            self._raise_or_lose(seat, future)
            return
        if future.status != "finished":
            self._lose(seat.member.address, f"its task is {future.status}")
            return
        try:
            result = answer_to(
                self._connection.client,
                self._connection.client.gather(future, asynchronous=True),
                within=ARRIVE,
                check=self._connection.heed,
            )
        except UserError:
            raise
        except Exception as error:  # cancelled, or gone before its result was fetched
            self._lose(seat.member.address, f"its result is gone ({type(error).__name__})")
            return
        item, _ = seat.under_way.pop(future.key)
        seat.heard = time.monotonic()
        yield item, result

    def _raise_or_lose(self, seat: _Seat[T], future: Future) -> None:
        """A task that failed: an error of its own is raised; one of Dask's means that the worker is gone."""
        error = future.exception(timeout=ARRIVE)
        if type(error).__module__.partition(".")[0] != "distributed":
            raise error
        self._lose(seat.member.address, type(error).__name__)

    def _drop_silent(self) -> None:
        """Lose the workers that have been silent for too long and do not answer."""
        limit = time.monotonic() - self._settings.stall_timeout
        quiet = [a for a, seat in self._seats.items() if seat.under_way and seat.heard < limit]
        for address in self._connection.silent(quiet) if quiet else ():
            self._lose(address, f"no answer, and no result for {self._settings.stall_timeout:g} s")

    def _lose(self, address: str, why: str) -> None:
        """Take away a worker's seat. What it worked on is done again by others."""
        seat = self._seats.pop(address)
        self._say(f"warning: worker {seat.member.name} ({address}) is lost: {why}; others do its part")
        for item, future in seat.under_way.values():
            future.cancel()
            self._losses[item] += 1
            self._again.append(item)
            if self._losses[item] >= ATTEMPTS:
                raise Lost(
                    f"{item}",
                    f"{ATTEMPTS} workers were lost that had this part",
                    "look at their logs; do they have enough memory?",
                )

    def _give_up(self) -> None:
        for seat in self._seats.values():
            for _, future in seat.under_way.values():
                future.cancel()
            seat.shared.release()
