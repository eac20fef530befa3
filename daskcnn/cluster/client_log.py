"""What Dask's client logs where its connections are gone, and a user should not see: the driver says it in words."""

from __future__ import annotations

import logging
from asyncio import CancelledError

_LOGGERS = ("distributed.client", "distributed.core", "distributed.utils", "asyncio", "tornado.application")


def quiet_lost_connections() -> None:
    """From now on, the log of this process has no traceback of connections that are lost or closed.

    Some come after a client is closed.
    """
    handlers = [*logging.getLogger("distributed").handlers, logging.lastResort]  # Dask names a logger by the file
    for place in (*map(logging.getLogger, _LOGGERS), *filter(None, handlers)):
        place.addFilter(_is_no_loss)  # a filter is there once at most


def _is_no_loss(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    closed = isinstance(error, RuntimeError) and "closed" in str(error)
    return not (closed or isinstance(error, OSError | CancelledError))
