"""For workers of a local cluster: signals meant for the driver reach their process group too, and are not for them."""

from __future__ import annotations

import logging
import signal
from typing import Any

from daskcnn.cluster.link.own_process import quiet_refusals


def dask_setup(worker: Any) -> None:
    """Called by Dask in the worker's process. The nanny, in the driver, still ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.getLogger("distributed.worker").addFilter(worth_a_line)
    quiet_refusals()


def worth_a_line(record: logging.LogRecord) -> bool:
    """Whether a user should see a line of the worker's log.

    A heartbeat that is under way while the job closes its own cluster fails, and Dask logs that with a traceback. The
    scheduler of a local cluster is in the driver's process: where it is gone, the job has ended.
    """
    failed = record.exc_info[1] if record.exc_info else None
    return not (isinstance(failed, OSError) and "heartbeat" in record.getMessage())
