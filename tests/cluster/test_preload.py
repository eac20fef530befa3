"""What a local worker's process is set up with before Dask uses it."""

from __future__ import annotations

import logging
import os
import signal
import sys

import pytest
from distributed.comm import CommClosedError

from daskcnn.cluster import preload
from daskcnn.cluster.link.signals import HEEDED
from daskcnn.cluster.preload import worth_a_line


def test_signals_to_the_group_leave_a_worker_alone_and_the_driver_is_told_of_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *to: sent.append(to))
    monkeypatch.setattr(preload, "quiet_refusals", lambda: None)
    before = {signum: signal.getsignal(signum) for signum in HEEDED}
    try:
        preload.dask_setup(None)
        for signum in HEEDED:
            signal.raise_signal(signum)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    assert sent == [(os.getppid(), signal.SIGXCPU)]


@pytest.mark.parametrize(
    ("error", "message", "shown"),
    [
        (
            CommClosedError("in <TCP>: Stream is closed"),
            "Failed to communicate with scheduler during heartbeat.",
            False,
        ),
        (RuntimeError("of its own"), "Unexpected exception during heartbeat. Closing worker.", True),
        (CommClosedError("in <TCP>: Stream is closed"), "Worker stream died during communication: %s", True),
        (None, "Could not find data", True),
    ],
)
def test_a_heartbeat_that_the_cluster_s_end_cut_off_is_not_logged(
    error: Exception | None, message: str, shown: bool
) -> None:
    logged: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())

    logger = logging.getLogger("worker-of-a-local-cluster")
    logger.propagate = False
    logger.addHandler(Kept())
    logger.addFilter(worth_a_line)
    try:
        if error is not None:
            raise error
        logger.error(message)
    except Exception:
        assert sys.exc_info()[1] is error
        logger.exception(message)
    finally:
        logger.removeFilter(worth_a_line)
        logger.handlers.clear()
    assert bool(logged) is shown
