"""For workers of a local cluster: signals meant for the driver reach their process group too, and are not for them."""

from __future__ import annotations

import signal
from typing import Any


def dask_setup(worker: Any) -> None:
    """Called by Dask in the worker's process. The nanny, in the driver, still ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
