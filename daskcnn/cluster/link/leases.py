"""A run's leases on workers: the table in the scheduler's process, and the driver's side.

The scheduler ends a run's leases when it loses the driver's connection, as after SIGKILL. Its process does not import
Numba or Zarr for it.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from uuid import uuid4

from distributed import Client
from distributed.diagnostics.plugin import SchedulerPlugin

from daskcnn.cluster.link.calls import Check, ask_scheduler, no_check
from daskcnn.cluster.link.lease_table import Holder, Lease, LeaseTable, clock_text, others_of
from daskcnn.cluster.link.leaving import NOT_RETIRED, RETIRING

NAME = "daskcnn-leases"  # the scheduler's plugin
FREED = 10.0  # seconds at most that the end of a run waits for the scheduler; it ends the leases with the connection
_IN_ORDER = ("retire-workers", "worker-close-gracefully")  # Dask's words for it
_REMEMBERED = 1000
LET_GO = 30.0  # seconds at most that a run has to let a worker go which is to be retired
_PAUSE = 0.02  # seconds between two looks

# --- in the scheduler's process ---


class SchedulerLeases(SchedulerPlugin):  # type: ignore[misc] # Dask has no types
    """Keeps the table as workers and drivers come and go.

    Dask gives a worker no task from the moment on at which it retires it. A run is asked to let the worker go before.
    """

    name = NAME

    def __init__(self, scheduler: Any = None) -> None:
        self.table, self._scheduler = LeaseTable(), scheduler
        self.retired: dict[str, None] = {}  # addresses of the last workers that left in good order
        if scheduler is not None:
            self._retire = scheduler.handlers["retire_workers"]
            scheduler.handlers["retire_workers"] = self.retire_workers

    async def retire_workers(
        self, workers: Collection[str] | None = None, names: Collection[Any] | None = None, **options: Any
    ) -> Any:
        """Have the scheduler retire workers, as soon as their runs have let them go, or some time has passed."""
        called = {*map(str, names or ())}
        there = self._scheduler.workers.items()
        going = {address for address, worker in there if address in (workers or ()) or str(worker.name) in called}
        if held := going & self._trained_on():
            self._scheduler.log_event(RETIRING, {"workers": sorted(held)})
        deadline = time.monotonic() + LET_GO
        while going & self._trained_on() and time.monotonic() < deadline:
            await asyncio.sleep(_PAUSE)
        named = {"workers": workers, "names": names}
        return await self._retire(**{key: value for key, value in named.items() if value is not None}, **options)

    def _trained_on(self) -> set[str]:
        return {lease.worker for lease in self.table.leases() if not lease.serves}

    def add_worker(self, scheduler: Any, worker: str) -> None:
        """Take note of a worker that came."""
        self.table.worker_came(worker, str(scheduler.workers[worker].name), time.time())

    def remove_worker(self, scheduler: Any, worker: str, *, stimulus_id: str = "", **_: Any) -> None:
        """Take note of a worker that is gone."""
        if stimulus_id.startswith(_IN_ORDER):
            self.retired[worker] = None
            while len(self.retired) > _REMEMBERED:
                del self.retired[next(iter(self.retired))]
        self.table.worker_gone(worker, time.time())

    def valid_workers_downscaling(self, scheduler: Any, workers: list[Any]) -> list[Any]:
        """Keep a cluster that adapts from closing workers that a run has, or that hold a server."""
        held = {lease.worker for lease in self.table.leases()}
        return [worker for worker in workers if worker.address not in held]

    def remove_client(self, scheduler: Any, client: str) -> None:
        """End the leases of a driver that is gone."""
        self.table.client_gone(client)

    def log_event(self, topic: str, msg: Any) -> None:
        """Tell drivers which workers could not be retired: one may hold a driver's server, which it can move."""
        kept = msg.get("could-not-retire") if topic == "all" and isinstance(msg, dict) else None
        if kept:
            self._scheduler.log_event(NOT_RETIRED, {"workers": [*kept]})


def leases_on(dask_scheduler: Any) -> tuple[Lease, ...]:
    """Return all leases of this scheduler, in its process."""
    found = dask_scheduler.plugins.get(NAME)
    return () if found is None else found.table.leases()


def _retired_on(workers: Collection[str], dask_scheduler: Any) -> set[str]:
    found = dask_scheduler.plugins.get(NAME)
    return set() if found is None else {worker for worker in workers if worker in found.retired}


def workers_on(scheduler: Any) -> list[tuple[str, str, str]]:
    """Return each worker of this scheduler: its name, the runs that have it, and since when, in words."""
    leases, rows = leases_on(scheduler), []
    for address, worker in scheduler.workers.items():
        own = [lease for lease in leases if lease.worker == address]
        runs = ", ".join(f"{_run(lease.holder)}{': server' if lease.serves else ''}" for lease in own)
        rows.append((str(worker.name), runs or "free", since(own) if own else ""))
    return sorted(rows)


def _table(scheduler: Any) -> LeaseTable:
    if NAME not in scheduler.plugins:
        scheduler.add_plugin(SchedulerLeases(scheduler), name=NAME)
    found: LeaseTable = scheduler.plugins[NAME].table
    return found


def _names(scheduler: Any, workers: Iterable[str]) -> dict[str, str]:
    """Return the names of workers that are there, by address."""
    return {worker: str(scheduler.workers[worker].name) for worker in workers if worker in scheduler.workers}


def _take(
    holder: Holder, workers: Collection[str], host: str, nbytes: int, room: int, dask_scheduler: Any
) -> tuple[Lease, ...]:
    """Take workers, and a place for the server where `room` bytes are for servers of all runs; all of it or nothing."""
    if holder.client not in dask_scheduler.clients:
        raise ConnectionError("the connection to the scheduler is closed")
    table, now = _table(dask_scheduler), time.time()
    there = table.served(host, holder.key)
    if there and sum(lease.nbytes for lease in there) + nbytes > room:
        return there
    found = table.take(holder, _names(dask_scheduler, workers), now)
    if host and not found:
        table.serve(holder, _names(dask_scheduler, [host]), now, nbytes)
    return found


def _serve(holder: Holder, workers: Collection[str], nbytes: int, dask_scheduler: Any) -> None:
    if holder.client in dask_scheduler.clients:
        _table(dask_scheduler).serve(holder, _names(dask_scheduler, workers), time.time(), nbytes)


def _release(key: str, workers: Collection[str] | None, dask_scheduler: Any) -> None:
    _table(dask_scheduler).release(key, workers)


def _rename(key: str, run: str, dask_scheduler: Any) -> None:
    _table(dask_scheduler).rename(key, run)


# --- in the driver's process ---


class Hold:
    """The leases of one run. Calls raise OSError where the scheduler is gone.

    Attributes
    ----------
    mine : addresses of workers that it has.
    others : leases of other runs, by address, when they were asked for last.
    served : bytes of other runs' servers, by the address of the worker that holds them, as of then.
    server : bytes that the run's server takes by itself, and for each worker.
    """

    def __init__(self, client: Client, run: str) -> None:
        self._client, self._holder = client, Holder(uuid4().hex, client.id, run, _whose())
        self.mine: set[str] = set()
        self.others: dict[str, Lease] = {}
        self.served = Counter[str]()
        self.server = (0, 0)

    def look(self, check: Check = no_check) -> tuple[Lease, ...]:
        """Return the scheduler's leases, and remember those of others."""
        found: tuple[Lease, ...] = ask_scheduler(self._client, leases_on, check=check)
        self.others = others_of(self._holder.key, found)
        self.served = Counter[str]()
        for lease in found:
            self.served[lease.worker] += lease.nbytes if lease.holder.key != self._holder.key else 0
        return found

    def server_bytes(self, workers: int) -> int:
        """Return the bytes that the run's server takes with this number of workers."""
        own, each = self.server
        return own + each * workers

    def take(
        self, workers: Collection[str], check: Check = no_check, *, host: str = "", nbytes: int = 0, room: int = 0
    ) -> bool:
        """Take these workers by address. Returns False, and takes none, where another run has one of them.

        host : of the run's server, which takes `nbytes` of the `room` there is for servers; none is taken where other
        runs leave too little of it. Empty: no place is taken for it.
        """
        if not host and self.mine.issuperset(workers):
            return True
        if ask_scheduler(self._client, partial(_take, self._holder, tuple(workers), host, nbytes, room), check=check):
            return False
        self.mine.update(workers)
        return True

    def take_again(self, check: Check = no_check) -> set[str]:
        """Take the run's workers after the scheduler has dropped its client. Returns those that another run has now."""
        before, self.mine = self.mine, set()
        return {worker for worker in before if not self.take([worker], check)}

    def serve(self, workers: Collection[str], nbytes: int, check: Check = no_check) -> None:
        """Let others see that these workers, and no others, hold the run's server.

        nbytes : what it takes of the room that they have for servers
        """
        each = nbytes // max(1, len(workers))
        ask_scheduler(self._client, partial(_serve, self._holder, tuple(workers), each), check=check)

    def release(self, workers: Collection[str], check: Check = no_check) -> None:
        """Free these workers."""
        self.mine.difference_update(workers)
        ask_scheduler(self._client, partial(_release, self._holder.key, tuple(workers)), check=check)

    def retired(self, workers: Collection[str], check: Check = no_check) -> set[str]:
        """Return those of these workers that are gone since the scheduler has retired them."""
        found: set[str] = ask_scheduler(self._client, partial(_retired_on, tuple(workers)), check=check)
        return found

    def rename(self, run: str, check: Check = no_check) -> None:
        """Give the run another name for people. A scheduler that is gone is found by what needs it."""
        with suppress(OSError):
            ask_scheduler(self._client, partial(_rename, self._holder.key, run), check=check)

    def close(self) -> None:
        """Free all workers. Where the scheduler does not answer it is gone, or frees them with the connection."""
        self.mine.clear()
        with suppress(Exception):
            ask_scheduler(self._client, partial(_release, self._holder.key, None), within=FREED)


@contextmanager
def holding(client: Client, run: str) -> Iterator[Hold]:
    """Give a run its hold on workers, and free them in the end."""
    hold = Hold(client, run)
    try:
        yield hold
    finally:
        hold.close()


def _whose() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in containers
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}, process {os.getpid()}"


def in_words(leases: Iterable[Lease], names: Mapping[str, str]) -> list[str]:
    """Return a line a run: its name, its workers, and since when. names: of workers by address."""
    runs: dict[str, list[Lease]] = {}
    for lease in leases:
        runs.setdefault(lease.holder.key, []).append(lease)
    return [f"run {_run(own[0].holder)} has {_workers(own, names)} since {since(own)}" for own in runs.values()]


def _run(holder: Holder) -> str:
    return f"{holder.run} ({holder.by})" if holder.by else holder.run


def _workers(own: Iterable[Lease], names: Mapping[str, str]) -> str:
    shown = ((names.get(lease.worker, lease.name), lease.serves) for lease in own)
    return ", ".join(f"{name} for its server" if serves else name for name, serves in shown)


def since(leases: Iterable[Lease]) -> str:
    """Return the time of the oldest of these leases, with the day if it is more than a day ago."""
    return clock_text(min(lease.since for lease in leases), time.time())
