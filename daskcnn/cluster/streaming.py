"""A function over many items, on the cluster's workers or in this process, with a bounded number in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from distributed import Client, Future, wait
from distributed.client import FutureCancelledError
from distributed.scheduler import KilledWorker

from daskcnn.cluster.calls import Check, no_check
from daskcnn.cluster.members import RESOURCES, present
from daskcnn.errors import ClusterError

T = TypeVar("T")
R = TypeVar("R")

AHEAD = 2
"""Items in flight for each thread of a worker: one that it works on, one that waits."""
TRIES = 3
"""Workers that may be lost while they work on an item, before it counts as what kills them."""
TURN = 0.5  # seconds between two looks at whether a signal came


def stream(
    client: Client | None,
    function: Callable[[T], R],
    items: Iterable[T],
    *,
    check: Check = no_check,
    submit: Callable[[Client, Callable[[T], R], T, list[str]], Future] | None = None,
    ahead: int = AHEAD,
) -> Iterator[tuple[T, R]]:
    """Yield each item with `function(item)`, in the order in which they are done.

    Items are drawn as workers become free, so they may be made one by one. An item whose worker is lost is given to
    another one. What the function raises is raised here, and what is in flight then is cancelled.

    Parameters
    ----------
    client : of the cluster; None to call the function in this process, one item after the other
    check : called now and then while it waits; may raise
    submit : sends an item to the cluster, best to a worker with one of these addresses; `Client.submit` if not given
    ahead : items in flight for each thread

    Raises
    ------
    ClusterError : where there is no worker, or where several workers are lost over one item
    """
    if client is None:
        for item in items:
            check()
            yield item, function(item)
        return
    yield from _Stream(client, function, submit or _submit, check, ahead).over(iter(items))


def _submit(client: Client, function: Callable[[T], R], item: T, workers: list[str]) -> Future:
    return client.submit(function, item, pure=False, workers=workers)


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """An item that was sent: how often by now, and the workers that it may go to."""

    item: Any
    tries: int
    workers: frozenset[str]


class _Stream:
    """The items in flight, and how often each was given to a worker."""

    def __init__(
        self,
        client: Client,
        function: Callable[..., Any],
        submit: Callable[..., Future],
        check: Check,
        ahead: int,
    ) -> None:
        self._client, self._function, self._submit, self._check, self._ahead = client, function, submit, check, ahead
        self._flying: dict[Future, _Flight] = {}

    def over(self, items: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
        try:
            while True:
                self._check()
                workers, slots = _workers(self._client, self._check)
                self._redirect(workers)
                for item in islice(items, max(0, slots * self._ahead - len(self._flying))):
                    self._send(item, 1, workers)
                if not self._flying:
                    return
                yield from self._landed(workers)
        finally:
            self._client.cancel(list(self._flying), force=True)

    def _send(self, item: Any, tries: int, workers: list[str]) -> None:
        future = self._submit(self._client, self._function, item, workers)
        self._flying[future] = _Flight(item, tries, frozenset(workers))

    def _redirect(self, workers: list[str]) -> None:
        """Send anew what may go only to workers that are all gone: it would wait for them for ever."""
        for future, flight in list(self._flying.items()):
            if flight.workers.isdisjoint(workers) and not future.done():
                del self._flying[future]
                self._client.cancel([future], force=True)
                self._send(flight.item, flight.tries, workers)

    def _landed(self, workers: list[str]) -> Iterator[tuple[Any, Any]]:
        try:
            with self._client.as_current():  # `wait` asks the current client, which may be another one
                done = wait(list(self._flying), timeout=TURN, return_when="FIRST_COMPLETED").done
        except TimeoutError:
            return
        for future in done:
            flight = self._flying.pop(future)
            item, tries = flight.item, flight.tries
            try:
                found = future.result()
            except (KilledWorker, FutureCancelledError) as error:
                if tries == TRIES:
                    raise ClusterError(
                        f"{tries} workers were lost", f"over the same piece of work ({error})", "give them more memory"
                    ) from error
                self._send(item, tries + 1, workers)
                continue
            future.release()
            yield item, found


def _workers(client: Client, check: Check) -> tuple[list[str], int]:
    """Addresses of the workers that compute, and their threads: all, where none says that it is for that."""
    there = present(client, check)
    kinds = {RESOURCES["cpu"], RESOURCES["gpu"]}
    computing = {a: info for a, info in there.items() if kinds & (info.get("resources") or {}).keys()} or there
    if not computing:
        raise ClusterError(f"scheduler {client.scheduler.address}", "has no worker", "start one with `dask worker`")
    return list(computing), sum(int(info["nthreads"]) for info in computing.values())
