"""Tasks of a run take turns on a worker whose threads would run several at once.

The resource that a worker advertises is enough for one task, so Dask starts the next one behind it. A worker without
has no such limit, and the tasks of a replica share its weights and its scratch memory.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from distributed import get_worker

_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # by the worker's address


def in_turn(function: Callable[..., Any], *args: Any) -> Any:
    """Call the function once no other task of a run is at work on this worker."""
    with _locks[get_worker().address]:
        return function(*args)
