"""A function over many parts of work, on the cluster's workers or in this process: a few at a time on each worker.

A part goes to one worker. The function, with all that its calls share, is sent once to each worker. Workers that come
later help, and the parts of a worker that dies or falls silent are done by others: `part_queue` decides which.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future as Pending
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from uuid import uuid4

from dask.utils import funcname
from distributed import Client, Future

from daskcnn.cluster.link.calls import TURN, Check, ask_scheduler, begin, cancel, no_check
from daskcnn.cluster.link.client import Connection
from daskcnn.cluster.link.lease_table import named_by
from daskcnn.cluster.link.leases import in_words, leases_on
from daskcnn.cluster.link.members import Member, advertised
from daskcnn.cluster.spread.part_queue import PartQueue, QueuedPart
from daskcnn.errors import ClusterError, Lost
from daskcnn.job.tables import Cluster

LOOK = 2.0  # seconds between two checks of the workers

T = TypeVar("T")
Submit = Callable[..., Future]
"""Sends a part: to the client, with the function as the worker has it, the part, a new key, and the address."""


def spread(
    client: Client | None,
    function: Callable[..., Any],
    parts: Iterable[T],
    settings: Cluster | None = None,
    *,
    whole: bool = False,
    submit: Submit | None = None,
    check: Check = no_check,
    warn: Callable[[str], None] = lambda _: None,
    failed: Callable[[Any, Exception], None] = lambda part, error: None,
) -> Iterator[tuple[T, Any]]:
    """Yield each part with `function(part)`, in the order in which they are done.

    Parts are drawn as workers have room for them, so they may be made one by one.

    Raises ClusterError where no worker comes; Lost where none is left, the scheduler is gone, or several are lost over
    one part; and what the function or `check` raises. Parts in flight are cancelled then.

    Parameters
    ----------
    client : of the cluster; None to call the function in this process, one part after the other
    settings : which workers to use, how long to wait for some, and after what silence one counts as lost
    whole : let a part take a whole worker. The function is then given the worker's `kind` and `threads` too. A worker
        that advertises no resource may be given two parts at once.
    submit : sends a part to a worker; `submit_part` if not given
    check : called repeatedly while it waits; may raise
    warn : is told about lost workers, and about runs that train on them
    failed : is told the part over which the function, or what made the part, raised an error; may raise another one
    """
    if client is None:
        for part in parts:
            check()
            try:
                found = function(part)
            except Exception as error:
                failed(part, error)
                raise
            yield part, found
        return
    settings = settings or Cluster()
    queue = PartQueue(parts, settings.workers.given, whole=whole)
    connection, submit = Connection(client, check), submit or submit_part
    yield from _Spread(connection, settings, function, queue, whole, submit, warn, failed).over()


def submit_part(client: Client, function: Future, part: Any, key: str, worker: str, **options: Any) -> Future:
    """Send a part to a worker, which is given the function's value."""
    return client.submit(operator.call, function, part, key=key, workers=[worker], pure=False, **options)


@dataclass(eq=False)
class _SpreadWorker:
    """A worker: the function on its way there, then as it has it; and the futures of its parts, with their numbers."""

    member: Member
    sending: Pending[Any] | None = None
    function: Future | None = None
    futures: dict[str, tuple[int, Future]] = field(default_factory=dict)
    warned: bool = False


@dataclass(eq=False)
class _Spread:
    """Turns what the queue decides into tasks of Dask, and their futures into results."""

    connection: Connection
    settings: Cluster
    function: Callable[..., Any]
    queue: PartQueue[Any]
    whole: bool
    submit: Submit
    warn: Callable[[str], None]
    failed: Callable[[Any, Exception], None]
    name: str = field(default_factory=lambda: uuid4().hex)
    workers: dict[str, _SpreadWorker] = field(default_factory=dict)
    ended: SimpleQueue[tuple[str, str, Pending[Any] | Future]] = field(default_factory=SimpleQueue)
    begun: bool = False
    alone: bool = False

    def over(self) -> Iterator[tuple[Any, Any]]:
        """Yield the parts with their results."""
        due = 0.0
        try:
            while not self.queue.over:
                if time.monotonic() >= due:
                    self._look()
                    if not due:
                        self._tell_of_runs()
                    due = time.monotonic() + LOOK
                for address, queued in self.queue.hand_out(time.monotonic()):
                    self._send_part(address, queued)
                yield from self._next()
        finally:
            for worker in self.workers.values():
                self._cancel(worker)

    def _tell_of_runs(self) -> None:
        """Say which runs train on the workers: a part waits there for the end of a round."""
        client, names = self.connection.client, {address: each.member.name for address, each in self.workers.items()}
        with self.connection.reached():
            leases = ask_scheduler(client, leases_on, check=self.connection.heed)
        theirs = [each for each in leases if each.worker in names and each.holder.client != client.id]
        for words in in_words(theirs, names):
            self.warn(f"{words}: parts wait there for the end of a round, and rounds for parts")

    def _look(self) -> None:
        """Give up workers that are gone or silent, and invite new ones."""
        there = self.connection.workers()
        for address in [a for a in self.workers if a not in there]:
            self._lose(address, "connection lost")
        for address in self.connection.silent(self.queue.quiet(time.monotonic(), self.settings.stall_timeout)):
            self._lose(address, f"no answer, and no result for {self.settings.stall_timeout:g} s")
        able = [m for m in advertised(there) if named_by(self.settings.only or (), m.name)]
        for member in self.queue.invite(able, time.monotonic()):
            self.workers[member.address] = _SpreadWorker(member)
        if not self.workers and not self.alone:
            self.warn(f"no worker that computes is there; waiting {self.settings.wait:g} s for one")
        self.alone = not self.workers
        for address, worker in self.workers.items():
            if worker.function is None and worker.sending is None:
                self._send_function(address, worker)
        if self.queue.deserted(time.monotonic(), self.settings.wait):
            named = " whose name is in cluster.only (--only)" if self.settings.only else ""
            waited, scheduler = f"for {self.settings.wait:g} s", self.connection.client.scheduler.address
            if self.begun:
                raise Lost("workers", f"none is left, {waited}", "start some")
            raise ClusterError(f"scheduler {scheduler}", f"has no worker that computes{named}, {waited}", "start one")

    def _send_function(self, address: str, worker: _SpreadWorker) -> None:
        """Send what all parts share. Nothing waits for it: a worker that hangs does not hold up the others."""
        member, function = worker.member, self.function
        bound = partial(function, kind=member.kind, threads=member.threads) if self.whole else function
        client = self.connection.client
        worker.sending = begin(client, client.scatter([bound], workers=[address], hash=False, asynchronous=True))
        self._await(address, "", worker.sending)

    def _send_part(self, address: str, queued: QueuedPart[Any]) -> None:
        worker = self.workers[address]
        submit = partial(self.submit, resources=worker.member.resource) if self.whole else self.submit
        key = f"{funcname(self.function).strip('_')}-{self.name}-{queued.number}-{queued.losses}"
        future = submit(self.connection.client, worker.function, queued.part, key, address)
        worker.futures[future.key] = queued.number, future
        self._await(address, future.key, future)

    def _next(self) -> Iterator[tuple[Any, Any]]:
        """Wait a moment for what ends next, and yield it if it is a part's result."""
        self.connection.heed()
        try:
            address, key, ended = self.ended.get(timeout=TURN)
        except Empty:
            return
        worker = self.workers.get(address)
        if worker is None or (ended is not worker.sending and key not in worker.futures):
            return  # of before the worker was lost, or came again
        if ended is worker.sending:
            self._sent(address, worker)
        elif isinstance(ended, Future):
            self._fetch(address, ended)
        elif (error := ended.exception()) is not None:
            self._lose(address, f"its result is gone ({type(error).__name__})")
        else:
            number, future = worker.futures.pop(key)
            future.release()
            yield self.queue.done(address, number, time.monotonic()), ended.result()

    def _sent(self, address: str, worker: _SpreadWorker) -> None:
        """Note that the worker has the function and is ready; after a failure the next check tries again."""
        sending, worker.sending = worker.sending, None
        assert sending is not None, "it has ended"
        if (error := sending.exception()) is None:
            (worker.function,) = sending.result()
            self.queue.ready(address)
            self.begun = True
        elif not worker.warned:
            self.warn(f"worker {address} cannot be used now ({type(error).__name__}: {error})")
            worker.warned = True

    def _fetch(self, address: str, future: Future) -> None:
        """Fetch the result of a task that has ended. Raises what the task raised."""
        if future.status == "error":
            error = future.exception()
            if type(error).__module__.partition(".")[0] != "distributed":
                number, _ = self.workers[address].futures[future.key]
                self.failed(self.queue.done(address, number, time.monotonic()), error)
                raise error
            self._lose(address, type(error).__name__)  # one of Dask's own means that the worker is gone
        elif future.status != "finished":
            self._lose(address, f"its task is {future.status}")
        else:
            client = self.connection.client
            self._await(address, future.key, begin(client, client.gather(future, asynchronous=True)))

    def _await(self, address: str, key: str, call: Pending[Any] | Future) -> None:
        call.add_done_callback(lambda ended: self.ended.put((address, key, ended)))

    def _lose(self, address: str, why: str) -> None:
        """Give up a worker. Its parts are done by others."""
        worker = self.workers.pop(address)
        self.warn(f"worker {worker.member.name} ({address}) is lost: {why}; others do its part")
        self._cancel(worker)
        self.queue.lose(address)

    def _cancel(self, worker: _SpreadWorker) -> None:
        if worker.sending is not None:
            worker.sending.cancel()
        cancel(future for _, future in worker.futures.values())
        if worker.function is not None:
            worker.function.release()
