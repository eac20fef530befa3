"""What Dask's client logs where its connections are gone, and a user should not see: the driver says it in words."""

from __future__ import annotations

import logging
from asyncio import CancelledError

from distributed.comm import CommClosedError


def quiet_lost_connections() -> None:
    """From now on, Dask's log of this process has no traceback of connections that are lost or closed.

    Some come after a client is closed.
    """
    for handler in logging.getLogger("distributed").handlers:  # of all of Dask's loggers, and of no others
        handler.addFilter(_is_no_loss)  # a filter is there once at most
    logging.getLogger("tornado.application").addFilter(_is_not_closed)  # others log there too


def _is_no_loss(record: logging.LogRecord) -> bool:
    return _is_not_closed(record) and not isinstance(_error(record), OSError | CancelledError)


def _is_not_closed(record: logging.LogRecord) -> bool:
    error = _error(record)
    pool = isinstance(error, RuntimeError) and "ConnectionPool is closed" in str(error)
    return not (pool or isinstance(error, CommClosedError))


def _error(record: logging.LogRecord) -> BaseException | None:
    return record.exc_info[1] if record.exc_info else None
