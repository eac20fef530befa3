"""Connect to the scheduler a job names, or start a local cluster of processes."""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import dask
from distributed import Client, Nanny, Scheduler, SpecCluster

from daskcnn.arrays import cpu_count
from daskcnn.cluster.members import POLL
from daskcnn.config import Cluster
from daskcnn.errors import ClusterError

TRY = 2.0  # seconds of one attempt to connect


@contextlib.contextmanager
def connect(settings: Cluster, check: Callable[[], None] = lambda: None) -> Iterator[Client]:
    """A client of the job's cluster; closed (and a local cluster stopped) on leaving.

    `check` is called now and then while it waits, and may raise.
    Raises ClusterError where there is no scheduler at the address within `settings.wait` seconds.
    """
    if settings.scheduler or settings.scheduler_file:
        with _remote(settings, check) as client:
            yield client
    else:
        with _local(settings) as client:
            yield client


@contextlib.contextmanager
def _remote(settings: Cluster, check: Callable[[], None]) -> Iterator[Client]:
    deadline = time.monotonic() + settings.wait
    where = settings.scheduler or _address_in(str(settings.scheduler_file), deadline, check)
    while True:
        check()
        try:
            client = Client(where, timeout=TRY)
            break
        except OSError as error:
            if time.monotonic() < deadline:
                continue
            raise _unreachable(where, f"{_reason(error)}, {settings.wait:g} s long") from error
        except (ValueError, TypeError) as error:
            raise _unreachable(where, _reason(error)) from error
    with client:
        yield client


def _unreachable(where: str, reason: str) -> ClusterError:
    return ClusterError(
        f"scheduler {where}: cannot be reached ({reason}); correct the address, start one with `dask scheduler`, "
        "or give none for a local cluster"
    )


def _address_in(path: str, deadline: float, check: Callable[[], None]) -> str:
    """The address that a scheduler wrote to its file, waited for. Raises ClusterError where none comes."""
    while True:
        check()
        try:
            return str(json.loads(Path(path).read_text())["address"])
        except FileNotFoundError:
            reason = "there is no such file"
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"it is not a scheduler's file ({type(error).__name__})"
        if time.monotonic() > deadline:
            raise ClusterError(
                f"scheduler file {path}: {reason}; start `dask scheduler --scheduler-file {path}` on a path "
                "that both can see"
            )
        time.sleep(POLL)


def _reason(error: BaseException) -> str:
    """The innermost cause in a few words: Dask wraps refused connections and bad certificates several times."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:200] or "no answer in time"


MEMORY = {"MALLOC_ARENA_MAX": "1"}
"""Environment of a worker: one pool of memory for all of its threads. glibc gives each thread pools of 64 MiB, which go
back to the system whenever they are empty, whatever `keep_freed_memory` says: a step's maps would be fresh memory.
"""


@contextlib.contextmanager
def _local(settings: Cluster) -> Iterator[Client]:
    wanted = settings.workers.given or {"cpu": cpu_count()}
    # a worker that dies is replaced by the nanny; the job itself must never be sent a second time for it
    config = {"distributed.scheduler.allowed-failures": 0, "distributed.admin.tick.limit": "30s"}
    with tempfile.TemporaryDirectory(prefix="daskcnn-") as scratch, dask.config.set(config):
        cluster = SpecCluster(
            workers=dict(_local_workers(wanted, scratch)),
            scheduler={"cls": Scheduler, "options": {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}},
            name="daskcnn",
            silence_logs="ERROR",
        )
        with cluster, Client(cluster) as client:
            yield client


def _local_workers(wanted: dict[str, int], scratch: str) -> Iterator[tuple[str, dict[str, object]]]:
    """One single-threaded process a worker, and one more for the parameter server."""
    names = [(f"{kind}-{i}", kind) for kind, count in wanted.items() for i in range(count)]
    for name, kind in [*names, ("ps", "ps")]:
        yield (
            name,
            {
                "cls": Nanny,
                "options": {
                    "nthreads": 1,
                    "resources": {kind.upper(): 1},
                    "local_directory": scratch,
                    "host": "127.0.0.1",
                    "dashboard": False,
                    "preload": ["daskcnn.cluster.preload"],
                    "silence_logs": logging.ERROR,
                    "memory_limit": "auto",
                    "env": MEMORY,
                },
            },
        )
