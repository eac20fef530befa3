"""A driver's client, lent to those workers of its cluster that are in the driver's process.

A task that handles an actor needs a client. Dask would start one, and make it the default of the whole process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from weakref import WeakSet

from distributed import Client, get_worker

_LENT: WeakSet[Client] = WeakSet()
_one_at_a_time = threading.Lock()  # `as_current` sets Dask's settings too: two that overlap would leave them set


def lend_client(client: Client) -> None:
    """Let tasks of this process use this client, as long as it lives."""
    _LENT.add(client)


@contextmanager
def lent_client() -> Iterator[None]:
    """Inside, a handle of an actor is bound to the client that the task's worker was lent, if it was lent one."""
    client = _of_this_worker()
    with nullcontext() if client is None else bound_to(client):
        yield


@contextmanager
def bound_to(client: Client) -> Iterator[None]:
    """Inside, a handle of an actor is bound to this client."""
    with _one_at_a_time, client.as_current():
        yield


def _of_this_worker() -> Client | None:
    try:
        scheduler = get_worker().scheduler.address
    except ValueError:  # no task of a worker
        return None
    running = (client for client in list(_LENT) if client.status == "running")
    return next((client for client in running if client.scheduler.address == scheduler), None)
