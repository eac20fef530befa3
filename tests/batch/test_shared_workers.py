"""Two elastic jobs of a queue on four workers, as a user starts them: they share the workers in mid-run."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from distributed import Scheduler, SpecCluster, Worker

from daskcnn.batch.progress import progress_of
from daskcnn.batch.records import Count, QueuedJob
from daskcnn.batch.spool import Spool
from daskcnn.events import RoundEnded, WorkerJoined, WorkerLeft, WorkerLost
from daskcnn.runs.directory import RunDirectory
from tests.batch.queues import submission
from tests.tiny_runs import tiny_data, tiny_job

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

DESKS = [f"desk-{i}" for i in range(1, 5)]
SERVE = "import sys; from daskcnn.cli import main; main(['serve', *sys.argv[1:]])"
WIDE = {"cpu": Count(1, 4)}
FOR_EVER = 100_000  # epochs


@pytest.fixture(scope="module")
def scheduler() -> Iterator[str]:
    own: dict[str, Any] = {"nthreads": 1, "resources": {"CPU": 1}, "dashboard": False, "host": "127.0.0.1"}
    one = {"cls": Scheduler, "options": {"host": "127.0.0.1", "port": 0, "dashboard_address": ":0"}}
    desks = {name: {"cls": Worker, "options": own} for name in DESKS}
    with SpecCluster(workers=desks, scheduler=one, silence_logs=50) as cluster:
        yield cluster.scheduler_address


def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 200
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@contextmanager
def served(folder: Path, scheduler: str) -> Iterator[None]:
    """A service, which is killed in the end."""
    command = [sys.executable, "-c", SERVE, "--scheduler", scheduler, "--spool", str(folder / "spool")]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL) as started:
        try:
            yield
        finally:
            started.kill()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["sgwu", "bsp"])
def test_a_newcomer_has_its_part_of_the_workers_and_they_go_back_when_it_is_done(
    tmp_path: Path, scheduler: str, strategy: str
) -> None:
    data = tiny_data(tmp_path, train=2000)

    def submitted(epochs: int, user: str) -> QueuedJob:
        job = tiny_job(data, train={"epochs": epochs, "strategy": strategy, "batch_size": 16})
        (added,) = spool.add([submission(content=job, workers=WIDE, user=user)], tmp_path / "runs", time.time())
        return added

    def trained(job: QueuedJob, epochs: float) -> bool:
        return progress_of(Path(job.run)).epoch >= epochs

    with Spool(tmp_path / "spool") as spool:
        with served(tmp_path, scheduler):
            long = submitted(FOR_EVER, "ann")
            until(lambda: trained(long, 1.0))
            assert len(spool.job(long.id).has) == 4
            short = submitted(8, "bob")
            until(lambda: trained(short, 1.0))
        with served(tmp_path, scheduler):  # as after it was killed
            until(lambda: spool.job(short.id).state == "done")
            until(lambda: len(spool.job(long.id).has) == 4)
            until(lambda: {*workers_of(long, WorkerJoined)} >= {*workers_of(long, WorkerLeft)})
            spool.cancel(long.id, time.time())
            until(lambda: spool.job(long.id).state == "cancelled")
        assert [spool.job(each.id).attempts for each in (long, short)] == [1, 1]
    gave = {event.reason for event in RunDirectory.open(long.run).events() if isinstance(event, WorkerLeft)}
    assert gave == {"another job is to have it"}
    assert {*workers_of(short, RoundEnded)} <= {*workers_of(long, WorkerLeft)}
    assert workers_of(long, WorkerLost) == workers_of(short, WorkerLost) == []


def workers_of(job: QueuedJob, kind: type[Any]) -> list[str]:
    """Workers that events of a kind are about."""
    return [event.worker for event in RunDirectory.open(job.run).events() if isinstance(event, kind)]
