"""Leases of runs on the workers of one scheduler. No Dask and no clock: times are arguments.

A worker trains for one run at a time. It may hold parameter servers of any number of runs besides. A run's leases end
with the run, and with its driver's connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

DAY = 86_400.0
BACK = 30.0  # seconds for which a worker that went is its run's still, if it comes back under its name


@dataclass(frozen=True, slots=True)
class Holder:
    """A run that may hold leases.

    Attributes
    ----------
    key : tells it from all others.
    client : the connection that its leases end with.
    run, by : its name, and whose process it is, for people.
    """

    key: str
    client: str
    run: str
    by: str = ""


@dataclass(frozen=True, slots=True)
class Lease:
    """A worker that a run has since a time. serves: it holds the run's server, and other runs may have it too.

    worker : its address; name : by which it is known when it comes back. nbytes : memory of the server there.
    """

    worker: str
    name: str
    holder: Holder
    since: float
    serves: bool = False
    nbytes: int = 0


class LeaseTable:
    """Has all leases of a scheduler."""

    def __init__(self) -> None:
        self._trains: dict[str, Lease] = {}  # by address
        self._serves: dict[tuple[str, str], Lease] = {}  # by address, and the holder's key
        self._away: dict[str, tuple[Lease, float]] = {}  # by name: of workers that went, and when

    def leases(self) -> tuple[Lease, ...]:
        """Return all leases, the oldest first."""
        return tuple(sorted((*self._trains.values(), *self._serves.values()), key=lambda lease: lease.since))

    def take(self, holder: Holder, workers: Mapping[str, str], now: float) -> tuple[Lease, ...]:
        """Take these workers, whose names are given by address, unless another run has one of them.

        Returns the leases of others that are in the way. Nothing is taken if there are any.
        """
        held = [self._trains[worker] for worker in workers if worker in self._trains]
        if others := tuple(lease for lease in held if lease.holder.key != holder.key):
            return others
        new = {worker: Lease(worker, name, holder, now) for worker, name in workers.items()}
        self._trains = new | self._trains
        return ()

    def served(self, worker: str, besides: str) -> tuple[Lease, ...]:
        """Return the leases of other runs whose servers a worker holds."""
        return tuple(lease for (at, key), lease in self._serves.items() if at == worker and key != besides)

    def serve(self, holder: Holder, workers: Mapping[str, str], now: float, nbytes: int = 0) -> None:
        """Note that these workers, and no others, hold the run's server, each with this part of its memory."""
        before = {worker: lease.since for (worker, key), lease in self._serves.items() if key == holder.key}
        self._serves = {place: lease for place, lease in self._serves.items() if place[1] != holder.key}
        for worker, name in workers.items():
            since = before.get(worker, now)
            self._serves[worker, holder.key] = Lease(worker, name, holder, since, serves=True, nbytes=nbytes)

    def release(self, key: str, workers: Collection[str] | None = None) -> None:
        """Free these workers of a run; None: all that it has, those that hold its server and those to come back too."""
        if workers is None:
            self._end(lambda holder: holder.key == key)
            return
        for worker in workers:
            if worker in self._trains and self._trains[worker].holder.key == key:
                del self._trains[worker]

    def rename(self, key: str, run: str) -> None:
        """Give a run another name for people."""

        def named(lease: Lease) -> Lease:
            return replace(lease, holder=replace(lease.holder, run=run)) if lease.holder.key == key else lease

        self._trains = {worker: named(lease) for worker, lease in self._trains.items()}
        self._serves = {place: named(lease) for place, lease in self._serves.items()}
        self._away = {name: (named(lease), at) for name, (lease, at) in self._away.items()}

    def client_gone(self, client: str) -> None:
        """End the leases of all runs of a connection that is closed."""
        self._end(lambda holder: holder.client == client)

    def worker_gone(self, worker: str, now: float) -> None:
        """End the leases on a worker. The run that it trains for gets it back if it comes again in time."""
        if (lease := self._trains.pop(worker, None)) is not None:
            self._away = {name: (own, at) for name, (own, at) in self._away.items() if now - at <= BACK}
            self._away[lease.name] = lease, now
        self._serves = {place: lease for place, lease in self._serves.items() if place[0] != worker}

    def worker_came(self, worker: str, name: str, now: float) -> None:
        """Give a worker to the run that it trained for before it went, if that is not long ago."""
        lease, at = self._away.pop(name, (None, 0.0))
        if lease is not None and now - at <= BACK:
            self._trains[worker] = replace(lease, worker=worker)

    def _end(self, ends: Callable[[Holder], bool]) -> None:
        self._trains = {worker: lease for worker, lease in self._trains.items() if not ends(lease.holder)}
        self._serves = {place: lease for place, lease in self._serves.items() if not ends(lease.holder)}
        self._away = {name: (lease, at) for name, (lease, at) in self._away.items() if not ends(lease.holder)}


def others_of(key: str, leases: Iterable[Lease]) -> dict[str, Lease]:
    """Return the leases of other runs, by the address of the worker that trains for them."""
    return {lease.worker: lease for lease in leases if not lease.serves and lease.holder.key != key}


def named_by(patterns: Collection[str], name: str) -> bool:
    """Return True if one of the patterns (`desk-1`, `desk-*`) is a worker's name, or if there are none."""
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def clock_text(at: float, now: float) -> str:
    """Return the time of day, with the day if it is more than a day away."""
    return time.strftime("%H:%M:%S" if abs(now - at) < DAY else "%Y-%m-%d %H:%M", time.localtime(at))
