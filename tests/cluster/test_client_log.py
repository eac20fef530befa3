"""Lost connections are told in the driver's own words, not by tracebacks of Dask."""

from __future__ import annotations

import logging
from asyncio import CancelledError

from distributed.comm import CommClosedError

from daskcnn.cluster.link.client import quiet_lost_connections

CLOSED = [CommClosedError("in <TCP>"), RuntimeError("ConnectionPool is closed")]
LOST = [TimeoutError(), ConnectionRefusedError(), CancelledError()]
OTHERS = [ValueError("a bug"), RuntimeError("another bug"), None]


def passes(place: logging.Filterer, error: BaseException | None) -> bool:
    """Whether a record of this error gets through the filters of a logger or a handler."""
    about = None if error is None else (type(error), error, None)
    return bool(place.filter(logging.LogRecord("name", logging.ERROR, "", 0, "said", (), about)))


def test_lost_connections_leave_no_traceback_of_dask() -> None:
    quiet_lost_connections()
    handlers = logging.getLogger("distributed").handlers
    assert handlers
    for handler in handlers:
        assert not any(passes(handler, error) for error in CLOSED + LOST)
        assert all(passes(handler, error) for error in OTHERS)


def test_what_others_log_of_connections_stays() -> None:
    quiet_lost_connections()
    shared = logging.getLogger("tornado.application")
    assert not any(passes(shared, error) for error in CLOSED)
    assert all(passes(shared, error) for error in LOST + OTHERS)
    assert all(passes(logging.getLogger(name), error) for name in ("asyncio", "user") for error in CLOSED + LOST)
