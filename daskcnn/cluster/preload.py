"""Preload of a local cluster's workers, which ignore the signals that their process group receives."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

from daskcnn.cluster.link.own_process import quiet_refusals
from daskcnn.cluster.link.signals import HEEDED


def dask_setup(worker: Any) -> None:
    """Set a worker's process up. Dask calls it there; the nanny, in the driver, still ends the process."""
    for signum in HEEDED:
        signal.signal(signum, signal.SIG_IGN)
    # the limit of processor time is each process's own, and workers reach theirs first
    signal.signal(signal.SIGXCPU, lambda signum, _: os.kill(os.getppid(), signum))
    logging.getLogger("distributed.worker").addFilter(worth_a_line)
    logging.getLogger("distributed.core").setLevel(logging.WARNING)  # of each connection that is closed in good order
    quiet_refusals()


def worth_a_line(record: logging.LogRecord) -> bool:
    """Return True if a user should see a line of the worker's log.

    A heartbeat fails while the job closes its own cluster, and Dask logs that with a traceback. The scheduler of a
    local cluster is in the driver's process: once it is gone, the job has ended.
    """
    failed = record.exc_info[1] if record.exc_info else None
    return not (isinstance(failed, OSError) and "heartbeat" in record.getMessage())
