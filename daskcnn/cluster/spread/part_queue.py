"""The queue of parts: assigns parts of work to workers, and reassigns those of a lost worker. No Dask and no clock.

A worker is invited when it is seen, gets parts once it is ready, and is lost when it leaves or falls silent. A part
goes to the worker with the most room, so fast workers get more parts. Parts are drawn only when a worker has room.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Generic, TypeVar

from daskcnn.errors import Lost

if TYPE_CHECKING:
    from daskcnn.cluster.link.members import Member

AHEAD = 2  # parts in flight for each slot of a worker: one in work, and one so that it need not wait for the driver
ATTEMPTS = 3  # workers that may be lost with a part before the part counts as the cause
ARRIVE = 60.0  # seconds within which an invited worker gets ready; then it is expected no more

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class QueuedPart(Generic[T]):
    """A part, its number in the order in which parts are drawn, and how many workers were lost with it."""

    number: int
    part: T
    losses: int = 0


@dataclass(slots=True, eq=False)
class _WorkerParts(Generic[T]):
    """A worker: its slots, when it was invited and last heard of (seconds), and its parts in flight by number."""

    kind: str
    slots: int
    invited: float
    heard: float = 0.0
    ready: bool = False
    parts: dict[int, QueuedPart[T]] = field(default_factory=dict)

    def expected(self, now: float) -> bool:
        """Return True while it may still get ready in time."""
        return not self.ready and now < self.invited + ARRIVE


class PartQueue(Generic[T]):
    """Hands parts out to workers, which are known by their addresses. `now` is in seconds, on any clock.

    Uses `limits` workers of each kind, all if it is empty. A part takes a whole worker, or a slot: one for each thread.
    """

    def __init__(self, parts: Iterable[T], limits: Mapping[str, int], *, whole: bool = False) -> None:
        self._source, self._limits, self._whole = enumerate(parts), limits, whole
        self._again: deque[QueuedPart[T]] = deque()
        self._drained = False
        self._workers: dict[str, _WorkerParts[T]] = {}
        self._lost: Counter[str] = Counter()
        self._alone_since: float | None = None

    @property
    def over(self) -> bool:
        """True once all parts are done."""
        return self._drained and not self._again and not any(worker.parts for worker in self._workers.values())

    def invite(self, members: Iterable[Member], now: float) -> list[Member]:
        """Return the members that are to join, those first that were lost least often.

        An invited worker that is not ready in time keeps no other from being invited in its place.
        """
        have = Counter(w.kind for w in self._workers.values() if w.ready or w.expected(now))
        joining = []
        for member in sorted(members, key=lambda member: self._lost[member.address]):
            limit = self._limits.get(member.kind, 0) if self._limits else inf
            if member.kind != "ps" and member.address not in self._workers and have[member.kind] < limit:
                slots = 1 if self._whole else member.threads
                self._workers[member.address] = _WorkerParts(member.kind, slots, now)
                have[member.kind] += 1
                joining.append(member)
        return joining

    def ready(self, worker: str) -> None:
        """An invited worker can work from now on."""
        self._workers[worker].ready = True

    def hand_out(self, now: float) -> Iterator[tuple[str, QueuedPart[T]]]:
        """Yield workers with their next parts, until all workers have enough or no part is left.

        While another worker is about to get ready, none gets more than it can work on: there may be few parts.
        """
        ahead = 1 if any(worker.expected(now) for worker in self._workers.values()) else AHEAD
        while free := {a: w for a, w in self._workers.items() if w.ready and len(w.parts) < ahead * w.slots}:
            if (queued := self._next()) is None:
                return
            address, worker = min(free.items(), key=lambda item: len(item[1].parts) / item[1].slots)
            if not worker.parts:
                worker.heard = now
            worker.parts[queued.number] = queued
            yield address, queued

    def _next(self) -> QueuedPart[T] | None:
        if self._again:
            return self._again.popleft()
        for number, part in self._source:
            return QueuedPart(number, part)
        self._drained = True
        return None

    def done(self, worker: str, number: int, now: float) -> T:
        """Return the part, which this worker has done."""
        known = self._workers[worker]
        known.heard = now
        return known.parts.pop(number).part

    def lose(self, worker: str) -> None:
        """Take a worker away. Its parts are handed out anew. Raises Lost where one has had too many lost workers."""
        self._lost[worker] += 1
        again = [replace(queued, losses=queued.losses + 1) for queued in self._workers.pop(worker).parts.values()]
        self._again.extend(again)
        for queued in again:
            if queued.losses >= ATTEMPTS:
                reason = f"{ATTEMPTS} workers were lost that had this part"
                raise Lost(f"{queued.part}", reason, "look at their logs; do they have enough memory?")

    def quiet(self, now: float, limit: float) -> list[str]:
        """Return the workers that have parts and were silent for more than `limit` seconds."""
        return [address for address, w in self._workers.items() if w.parts and w.heard + limit < now]

    def deserted(self, now: float, wait: float) -> bool:
        """Return True if no worker has been ready for `wait` seconds, and none is expected any more."""
        if any(worker.ready for worker in self._workers.values()):
            self._alone_since = None
            return False
        self._alone_since = now if self._alone_since is None else self._alone_since
        return now >= self._alone_since + wait and not any(w.expected(now) for w in self._workers.values())
