"""A cluster of one worker in this process, for fits that are not worth processes of their own."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from distributed import Client, Scheduler, SpecCluster, Worker, get_worker
from distributed.utils import LoopRunner

from daskcnn.arrays import cpu_count
from daskcnn.cluster.link.client import made_with
from daskcnn.cluster.link.members import RESOURCES
from daskcnn.errors import UserError


def quiet_refusals() -> None:
    """Keep tasks that refuse a user's data or cluster out of Dask's log of this process."""
    logging.getLogger("distributed.worker").addFilter(_is_no_refusal)  # a filter that is there is not added again


def _is_no_refusal(record: logging.LogRecord) -> bool:
    """Return False for the traceback of a task's error that the driver raises too."""
    if not str(record.msg).startswith("Compute Failed") or not isinstance(record.args, tuple):
        return True
    raised = [text.partition("(")[0] for text in record.args if isinstance(text, str)]
    kinds = [UserError]
    for kind in kinds:  # grows meanwhile
        kinds += kind.__subclasses__()
    return not any(kind.__name__ in raised for kind in kinds)


_QUIET: set[int] = set()  # the threads of the event loops of clusters whose log is of no use


def _is_of_others(record: logging.LogRecord) -> bool:
    """Return False for what a quiet cluster logs below an error."""
    return record.levelno >= logging.ERROR or record.thread not in _QUIET


async def _thread() -> int:
    return threading.get_ident()


R = TypeVar("R")


def apart_from_tasks(function: Callable[[], R]) -> R:
    """Call the function, on a thread of its own where this one runs a task of Dask's.

    In a task, a client takes the task's worker for one of its own cluster and sends data there.
    """
    try:
        get_worker()
    except ValueError:
        return function()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@dataclass
class SharedCluster:
    """A cluster that is started when it is first needed, and serves one caller at a time."""

    turn: threading.RLock = field(default_factory=threading.RLock)  # its worker can be in one run only
    _cluster: SpecCluster | None = None
    _client: Client | None = None
    _loop: LoopRunner | None = None

    @contextmanager
    def client(self) -> Iterator[Client]:
        """Give a client of the cluster to one caller at a time."""
        with self.turn:
            yield self._started()

    def _started(self) -> Client:
        if self._client is None or self._client.status != "running":
            quiet_refusals()
            settings = {"distributed.worker.profile.enabled": False, "distributed.scheduler.allowed-failures": 0}
            self._loop = LoopRunner(asynchronous=False)
            self._loop.start()
            _QUIET.add(self._loop.run_sync(_thread))
            for handler in logging.getLogger("distributed").handlers:  # `silence_logs` would quieten all clusters
                handler.addFilter(_is_of_others)
            nowhere = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}
            # no limit of memory: the process is not the worker's alone
            worker = {"nthreads": cpu_count(), "resources": {RESOURCES["cpu"]: 1}, "memory_limit": 0, **nowhere}
            with made_with(settings):
                self._cluster = SpecCluster(
                    workers={"cpu-0": {"cls": Worker, "options": worker}},
                    scheduler={"cls": Scheduler, "options": {"protocol": "inproc://", **nowhere}},
                    name="daskcnn",
                    loop=self._loop.loop,
                )
            self._client = Client(self._cluster, set_as_default=False)
        return self._client

    def close(self) -> None:
        """Stop the cluster. The next use starts another one."""
        with self.turn:
            client, cluster, loop = self._client, self._cluster, self._loop
            self._client = self._cluster = self._loop = None
            if client is not None and cluster is not None and loop is not None:
                client.close()
                cluster.close()
                _QUIET.discard(loop.run_sync(_thread))
                loop.stop()

    def forget(self) -> None:
        """Take no notice of the cluster: this process was forked, and has none of the cluster's threads."""
        self.turn, self._client, self._cluster, self._loop = threading.RLock(), None, None, None
        _QUIET.clear()


SHARED = SharedCluster()  # the cluster of this process
atexit.register(SHARED.close)
os.register_at_fork(after_in_child=SHARED.forget)
