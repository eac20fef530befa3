"""Workers without a nanny end in time, and no other process is ended."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from distributed import Client
from distributed.core import Status

from daskcnn.cluster.worker import ending
from daskcnn.cluster.worker.ending import end_in_time
from tests.cluster.by_hand import hand_made_cluster


@dataclass(eq=False)
class Worker:
    """What is looked at of Dask's worker."""

    status: Status
    nanny: str | None


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Event:
    """Set when the process would be ended."""
    event = Event()
    monkeypatch.setattr(os, "_exit", lambda code: event.set())
    monkeypatch.setattr(ending, "LONGEST", 0.01)
    monkeypatch.setattr(ending, "LOOK", 0.01)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/dask", "worker"])
    return event


@pytest.mark.parametrize("program", ["/usr/bin/dask", "/lib/dask/__main__.py", "/lib/distributed/cli/dask_worker.py"])
def test_a_command_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch, ended: Event, program: str) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    worker: Any = Worker(status=Status.running, nanny=None)
    end_in_time(worker)
    end_in_time(worker)
    assert not ended.is_set()
    worker.status = Status.closing
    assert ended.wait(10)


@pytest.mark.parametrize(("program", "nanny"), [("/usr/bin/jupyter-lab", None), ("/usr/bin/dask", "tcp://nanny:1")])
def test_a_process_that_is_not_the_worker_s_alone_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, ended: Event, program: str, nanny: str | None
) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    end_in_time(Worker(status=Status.closed, nanny=nanny))
    assert not ended.wait(0.1)


@pytest.mark.cluster
@pytest.mark.slow
def test_a_worker_that_hangs_in_its_end_is_ended(tmp_path: Path) -> None:
    """It gets SIGTERM as its scheduler ends, and has a task that cannot be cancelled."""

    async def never_ends() -> None:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)

    def hang(dask_worker: Any) -> int:
        dask_worker.stuck = asyncio.ensure_future(never_ends())
        return os.getpid()

    with hand_made_cluster(tmp_path, ["PS=1"]) as (file, scheduler):
        with Client(scheduler_file=file, set_as_default=False) as client:
            client.wait_for_workers(1)
            client.run(end_in_time)
            (worker,) = client.run(hang).values()
        handle = os.pidfd_open(worker)
        scheduler.send_signal(signal.SIGTERM)
        os.kill(worker, signal.SIGTERM)
        with os.fdopen(handle):
            assert select.select([handle], [], [], 30)[0], "it has ended"
