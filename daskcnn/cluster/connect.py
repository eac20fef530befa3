"""Connect to the scheduler a job names, or start a local cluster of processes."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator

import dask
from distributed import Client, Nanny, Scheduler, SpecCluster

from daskcnn.arrays import cpu_count
from daskcnn.config import Cluster
from daskcnn.errors import ClusterError


@contextlib.contextmanager
def connect(settings: Cluster) -> Iterator[Client]:
    """A client of the job's cluster; closed (and a local cluster stopped) on leaving.

    Raises ClusterError where there is no scheduler at the address within `settings.wait` seconds.
    """
    if settings.scheduler or settings.scheduler_file:
        with _remote(settings) as client:
            yield client
    else:
        with _local(settings) as client:
            yield client


@contextlib.contextmanager
def _remote(settings: Cluster) -> Iterator[Client]:
    timeout = max(settings.wait, 1.0)
    where = settings.scheduler or settings.scheduler_file
    try:
        if settings.scheduler:
            client = Client(settings.scheduler, timeout=timeout)
        else:
            client = Client(scheduler_file=settings.scheduler_file, timeout=timeout)
    except (OSError, ValueError, TypeError) as error:
        raise ClusterError(
            f"scheduler {where}: no answer within {timeout:g} s ({_reason(error)}); "
            "start one with `dask scheduler`, or give no scheduler for a local cluster"
        ) from error
    with client:
        yield client


def _reason(error: BaseException) -> str:
    """The innermost cause in a few words: Dask wraps refused connections and bad certificates several times."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:200] or type(error).__name__


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
                    "silence_logs": logging.ERROR,
                    "memory_limit": "auto",
                },
            },
        )
