"""A scheduler that closes when it is idle stays open while a job waits for workers, or computes in its own process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from distributed import Client
from distributed.diagnostics.plugin import SchedulerPlugin
from tornado.ioloop import PeriodicCallback

from daskcnn.cluster.link.calls import ask_scheduler

NAME = "daskcnn-kept-open"  # the scheduler's plugin
TURNS = 4  # of its idle timeout, after each of which the scheduler begins to count anew
FREED = 5.0  # seconds at most that a job's end waits for the scheduler


class KeptOpen(SchedulerPlugin):  # type: ignore[misc] # Dask has no types
    """Keeps an idle scheduler open for the clients that ask for it, as long as they are connected."""

    name = NAME

    def __init__(self, scheduler: Any) -> None:
        self.clients = set[str]()
        self._turns = PeriodicCallback(partial(self._begin_anew, scheduler), 1000 * scheduler.idle_timeout / TURNS)
        self._turns.start()

    def _begin_anew(self, scheduler: Any) -> None:
        if self.clients:
            scheduler.idle_since = None

    def remove_client(self, scheduler: Any, client: str) -> None:
        """Forget a client that is gone."""
        self.clients.discard(client)

    async def close(self) -> None:
        """End with the scheduler."""
        self._turns.stop()


def _keep(client: str, dask_scheduler: Any) -> None:
    if dask_scheduler.idle_timeout:
        if NAME not in dask_scheduler.plugins:
            dask_scheduler.add_plugin(KeptOpen(dask_scheduler), name=NAME)
        dask_scheduler.plugins[NAME].clients.add(client)


def _let_go(client: str, dask_scheduler: Any) -> None:
    if (plugin := dask_scheduler.plugins.get(NAME)) is not None:
        plugin.clients.discard(client)


@contextmanager
def kept_open(client: Client) -> Iterator[Client]:
    """Give the client; its scheduler does not close for being idle meanwhile."""
    with suppress(Exception):  # what needs the scheduler tells that it is gone, or lacks this package
        ask_scheduler(client, partial(_keep, client.id))
    try:
        yield client
    finally:
        with suppress(Exception):
            ask_scheduler(client, partial(_let_go, client.id), within=FREED)
