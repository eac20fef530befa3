"""Lost connections are told in the driver's own words, not by tracebacks of Dask."""

from __future__ import annotations

import logging
from asyncio import CancelledError

import pytest
from distributed.comm import CommClosedError

from daskcnn.cluster.client_log import quiet_lost_connections


@pytest.mark.parametrize("name", ["distributed.client", "tornado.application"])
def test_lost_connections_leave_no_traceback(name: str) -> None:
    def logged(error: BaseException | None) -> bool:
        about = None if error is None else (type(error), error, None)
        record = logging.LogRecord(name, logging.ERROR, "", 0, "said", (), about)
        return bool(logging.getLogger(name).filter(record))

    quiet_lost_connections()
    lost = CommClosedError("in <TCP>"), TimeoutError(), CancelledError(), RuntimeError("ConnectionPool is closed")
    assert not any(map(logged, lost))
    assert all(map(logged, (ValueError("a bug"), RuntimeError("another bug"), None)))
