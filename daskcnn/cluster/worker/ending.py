"""A worker's process that ends in time: Dask may wait without a limit for what it could not cancel."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any
from weakref import WeakSet

from distributed.core import Status

LONGEST = 10.0  # seconds from when a worker begins to close until its process has ended
LOOK = 0.5  # seconds between two looks at a worker that is needed

_WATCHED: WeakSet[Any] = WeakSet()


def end_in_time(dask_worker: Any = None) -> None:
    """See to it that this worker's process has ended `LONGEST` seconds after the worker begins to close.

    This is for a process that `dask worker` has started without a nanny, which would end it. Others are left alone: the
    process of a cluster's user may hold the worker.
    """
    if dask_worker is None or dask_worker.nanny or not _is_command() or dask_worker in _WATCHED:
        return
    _WATCHED.add(dask_worker)
    threading.Thread(target=_watch, args=(dask_worker,), name="daskcnn-end", daemon=True).start()


def _is_command() -> bool:
    """Return True if this process is the command `dask worker`."""
    begun = Path(sys.argv[0])
    return begun.stem in ("dask", "dask_worker") or (begun.name, begun.parent.name) == ("__main__.py", "dask")


def _watch(worker: Any) -> None:
    while worker.status not in (Status.closing, Status.closed, Status.failed):
        time.sleep(LOOK)
    time.sleep(LONGEST)  # this thread ends with its process
    os._exit(1)
