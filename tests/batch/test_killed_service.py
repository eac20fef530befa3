"""A service as a user starts it, killed again and again: every job is done once, in an order that the policy allows."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from distributed import LocalCluster

from daskcnn.batch.records import ACTIVE, ENDED
from daskcnn.batch.spool import Spool
from tests.batch.queues import submission
from tests.tiny_runs import tiny_data, tiny_job

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

JOBS, KILLS = 200, 10
REAL = "import sys; from daskcnn.cli import main; main(['serve', *sys.argv[1:]])"
FAKE = """
import sys
from daskcnn.batch import serving
from daskcnn.batch.drivers import Drivers
serving.Drivers = lambda folder: Drivers(folder, ("/bin/sh", "-c", sys.argv[1], "driver"))
from daskcnn.cli import main
main(["serve", *sys.argv[2:]])
"""
"""A service whose drivers are this shell script. The real ones take seconds of both cores each."""
DRIVER = """
folder=${1%/submitted/*}
number=${folder##*/}
worker=$(sed -n 's/^ *"\\(cpu-[01]\\)",$/\\1/p' "$1")
mkdir "has-$worker" || echo "$number $worker" >>twice
echo "$number" >>begun
sleep 0.2
rmdir "has-$worker"
[ $((number % 20)) != 0 ] || [ $(grep -cx "$number" begun) -gt 1 ]
"""
"""Every twentieth job fails once. A worker that two jobs have at once, or a job with two drivers, is noted."""


@pytest.fixture(scope="module")
def scheduler() -> Iterator[str]:
    how: dict[str, Any] = {"processes": False, "protocol": "tcp", "dashboard_address": ":0", "resources": {"CPU": 1}}
    with LocalCluster(n_workers=2, threads_per_worker=1, silence_logs=50, **how) as cluster:
        yield cluster.scheduler_address


@contextmanager
def served(folder: Path, scheduler: str, *front: str) -> Iterator[subprocess.Popen[bytes]]:
    """A service; it is killed in the end. front: what runs it."""
    command = [*front, "--scheduler", scheduler, "--spool", str(folder / "spool")]
    with open(folder / "said", "ab") as said, subprocess.Popen(command, cwd=folder, stderr=said) as started:
        try:
            yield started
        finally:
            started.kill()


@pytest.mark.timeout(900)
def test_two_hundred_jobs_are_done_once_though_the_service_is_killed_ten_times(tmp_path: Path, scheduler: str) -> None:
    chance = random.Random(43)
    with Spool(tmp_path / "spool") as spool:
        spool.add([submission() for _ in range(JOBS)], tmp_path / "runs", time.time())
        for _ in range(KILLS):
            with served(tmp_path, scheduler, sys.executable, "-c", FAKE, DRIVER):
                time.sleep(chance.uniform(1.0, 8.0))
        with served(tmp_path, scheduler, sys.executable, "-c", FAKE, DRIVER):
            while spool.jobs(ACTIVE):
                time.sleep(0.5)
        jobs = spool.jobs(ENDED)
    assert [job.state for job in jobs] == ["done"] * JOBS
    assert [job.attempts for job in jobs] == [1 + (job.id % 20 == 0) for job in jobs]
    assert not (tmp_path / "twice").exists()
    begun = [int(number) for number in (tmp_path / "begun").read_text().split()]
    assert len(begun) == JOBS + JOBS // 20
    first = list(dict.fromkeys(begun))
    assert all(abs(place - number) <= 2 for place, number in enumerate(first, 1)), "one user's jobs go by age"


@pytest.mark.timeout(300)
def test_jobs_train_on_though_the_service_is_killed(tmp_path: Path, scheduler: str) -> None:
    data = tiny_data(tmp_path)
    tables = tiny_job(data, train={"epochs": 2})
    content = {section: table for section, table in tables.items() if section != "run"}
    with Spool(tmp_path / "spool") as spool:
        spool.add([submission(content=content) for _ in range(3)], tmp_path / "runs", time.time())
        for begun in (1, 3):
            with served(tmp_path, scheduler, sys.executable, "-c", REAL):
                while sum(job.attempts for job in spool.jobs((*ACTIVE, *ENDED))) < begun:
                    time.sleep(0.1)
        with served(tmp_path, scheduler, sys.executable, "-c", REAL):
            while spool.jobs(ACTIVE):
                time.sleep(0.5)
        jobs = spool.jobs(ENDED)
    assert [(job.state, job.attempts, job.epoch) for job in jobs] == [("done", 1, 2.0)] * 3
    assert all((Path(job.run) / "summary.json").exists() for job in jobs)
