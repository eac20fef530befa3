"""Clients of a scheduler: a run's own, one that the user gives, one lent to the workers of the driver's process."""

from __future__ import annotations

import logging
import os
import threading
import time
from asyncio import CancelledError
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from weakref import WeakSet

import dask
from distributed import Client, default_client, get_worker, utils
from distributed.client import _current_client
from distributed.comm import CommClosedError

from daskcnn.cluster.link.calls import (
    SCHEDULER,
    TURN,
    Check,
    Unanswered,
    answer_to,
    ask_scheduler,
    ask_workers,
    give_up,
    no_check,
    scheduler_of,
    silent_among,
)
from daskcnn.cluster.link.members import present
from daskcnn.errors import ClusterError, Interrupted, Lost


def heed_signals(interrupted: Callable[[], int | None]) -> Check:
    """Return a check that raises Interrupted after a signal. interrupted: returns its number, None before it came."""

    def heed() -> None:
        if (signum := interrupted()) is not None:
            raise Interrupted.by(signum)

    return heed


class Connection:
    """Asks the scheduler about its workers and their tasks.

    Parameters
    ----------
    heed : called repeatedly while it waits; may raise, as after a signal

    Attributes
    ----------
    cuts : times that the run has gone on after the scheduler had dropped the client, and all of its tasks.
    """

    def __init__(self, client: Client, heed: Check) -> None:
        self.client, self.heed, self.cuts = client, heed, 0
        self._scheduler = "the scheduler"  # its name, once it is known
        self._way = client.scheduler_comm

    def ignore_signals(self) -> None:
        """Let nothing interrupt from now on, so that the run can end and be saved."""
        self.heed = no_check

    @contextmanager
    def reached(self) -> Iterator[None]:
        """Raise Lost inside where the scheduler is gone."""
        try:
            yield
        except Unanswered as error:
            give_up(self.client)
            raise Lost(str(error)) from error
        except OSError as error:
            raise self._lost() from error
        except AttributeError as error:
            if self.client.scheduler is not None:
                raise
            raise self._lost() from error  # Dask has closed the client meanwhile, and asks its scheduler all the same

    def workers(self) -> dict[str, dict[str, Any]]:
        """Return the scheduler's entry for each of its workers, by address. Raises Lost where the scheduler is gone."""
        with self.reached():
            found = present(self.client, self.heed)
        deadline = time.monotonic() + SCHEDULER
        while self.client.status == "connecting" and time.monotonic() < deadline:  # again: the scheduler is there
            self.heed()
            time.sleep(TURN)  # Dask tells nobody when a client is connected again
        if self.client.status != "running":
            raise self._lost()
        self._scheduler = scheduler_of(self.client)
        return found

    @property
    def was_cut(self) -> bool:
        """True if Dask has connected the client again: the scheduler had dropped all that it had."""
        return self.client.scheduler_comm is not self._way

    def go_on(self) -> None:
        """Take the present connection for the one that all has been begun with."""
        self._way = self.client.scheduler_comm
        self.cuts += 1

    def processing(self) -> Mapping[str, Any]:
        """Return the scheduler's tasks of each worker, by address; none where it does not answer."""
        with suppress(OSError):
            if (scheduler := self.client.scheduler) is not None:
                return dict(answer_to(self.client, scheduler.processing(workers=None), check=self.heed))
        return {}

    def scheduler_seconds(self) -> float:
        """Return the seconds of processor time that the scheduler has used. Raises Lost where the scheduler is gone."""
        with self.reached():
            return float(ask_scheduler(self.client, time.process_time, check=self.heed))

    def silent(self, addresses: Iterable[str]) -> set[str]:
        """Return those of the workers that do not answer now. Raises Lost where the scheduler is gone."""
        with self.reached():
            return silent_among(self.client, dict.fromkeys(addresses), check=self.heed)

    def first_to_answer(self, addresses: Iterable[str]) -> str | None:
        """Return the worker that answers first; None where none does. Raises Lost where the scheduler is gone."""
        with self.reached():
            found = ask_workers(self.client, time.time, dict.fromkeys(addresses), check=self.heed, one=True)
        return next(iter(found.given), None)

    def _lost(self) -> Lost:
        give_up(self.client)
        named = self._scheduler if self.client.scheduler is None else scheduler_of(self.client)
        return Lost(named, "connection lost", "if it has ended, start it and its workers again, then go on")


def given_or_default(client: Any) -> Client | None:
    """Return the given client, else the default one, else None. Raises ClusterError as `checked_client`."""
    if client is not None:
        return checked_client(client)
    try:
        found = default_client()
    except ValueError:
        return None
    gone = found in _OF_PARENT or found.status in ("closing", "closed")
    return None if gone else checked_client(found, "the default client")


def checked_client(client: Any, called: str = "client") -> Client:
    """Return the client. Raises ClusterError unless it is a client, synchronous, and connected."""
    if not isinstance(client, Client):
        raise ClusterError(f"client={client!r:.60}", "not a client of Dask", "give a distributed.Client, or none")
    if client.asynchronous:
        remedy = "give one that is not, such as client=Client(address)"
        raise ClusterError(called, "it is asynchronous, and cannot be waited with", remedy)
    if client.status in ("closed", "closing"):
        raise ClusterError(called, "it is closed", "give one that is connected, such as Client(cluster)")
    if client in _OF_PARENT:
        reason = "it belongs to the process that this one was forked from"
        raise ClusterError(called, reason, "connect one here: Client(address)")
    return client


_OF_PARENT: WeakSet[Client] = WeakSet()


def _after_fork() -> None:
    """Let this forked process use Dask: it has the objects of its parent, and none of the threads that serve them."""
    _OF_PARENT.update(Client._instances)
    utils._offload_executor = ThreadPoolExecutor(1, thread_name_prefix="Dask-Offload")


os.register_at_fork(after_in_child=_after_fork)

_LENT: WeakSet[Client] = WeakSet()
_one_at_a_time = threading.Lock()  # two that set Dask's settings, and overlap, would leave them set


def lend_client(client: Client) -> None:
    """Let tasks of this process use this client, as long as it lives."""
    _LENT.add(client)


@contextmanager
def lent_client() -> Iterator[None]:
    """Bind handles of actors that are made inside to the client that the task's worker was lent, if it was lent one."""
    client = None
    with suppress(ValueError):  # no task of a worker
        scheduler = get_worker().scheduler.address
        running = (lent for lent in list(_LENT) if lent.status == "running")
        client = next((lent for lent in running if lent.scheduler.address == scheduler), None)
    with nullcontext() if client is None else bound_to(client):
        yield


@contextmanager
def bound_to(client: Client) -> Iterator[None]:
    """Let Dask take this client on this thread: for handles of actors that are made inside, and for computations.

    `Client.as_current` sets Dask's settings besides, which are those of all threads.
    """
    before = _current_client.get()
    _current_client.set(client)
    try:
        yield
    finally:
        if _current_client.get() is client:  # else another began meanwhile, and has not ended
            _current_client.set(None if before is None or before.status == "closed" else before)


@contextmanager
def made_with(settings: Mapping[str, Any]) -> Iterator[None]:
    """Let Dask's servers that are made inside have these settings."""
    with _one_at_a_time, dask.config.set(settings):
        yield


def quiet_lost_connections() -> None:
    """Keep tracebacks of lost or closed connections out of Dask's log of this process, even after closing."""
    for handler in logging.getLogger("distributed").handlers:  # of all of Dask's loggers, and of no others
        handler.addFilter(_is_no_loss)  # a filter that is there is not added again
    logging.getLogger("tornado.application").addFilter(_is_not_closed)  # others log there too


def _is_no_loss(record: logging.LogRecord) -> bool:
    lost = record.exc_info and isinstance(record.exc_info[1], OSError | CancelledError)
    return not lost and _is_not_closed(record)


def _is_not_closed(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    pool = isinstance(error, RuntimeError) and "ConnectionPool is closed" in str(error)
    return not (pool or isinstance(error, CommClosedError))
