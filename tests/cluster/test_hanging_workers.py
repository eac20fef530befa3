"""A worker's process is stopped before the run: neither job nor doctor waits for it, and signals are heeded."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from distributed import Client

from daskcnn.cluster.link.calls import WorkersLost
from daskcnn.cluster.link.members import advertised, chosen, present
from daskcnn.cluster.messages import Calibration
from daskcnn.cluster.run.context import RunContext
from daskcnn.job.tables import Cluster, Job, Workers
from daskcnn.training.judging import JudgedPart
from tests.cluster.by_hand import (
    DASK,
    daskcnn_run,
    finish,
    hand_made_cluster,
    job_file,
    process,
    wait_for,
    wait_for_line,
)

pytestmark = pytest.mark.cluster


class Stopped(NamedTuple):
    """The scheduler's file of a cluster, and the address of the worker that is stopped."""

    file: str
    worker: str


@contextmanager
def stopped_among(workers: int, folder: Path) -> Iterator[Stopped]:
    """A cluster of that many workers, one of which is stopped."""
    with hand_made_cluster(folder, ["CPU=1"] * workers) as (file, _):
        wait_for(Path(file))
        with Client(scheduler_file=file) as client:
            client.wait_for_workers(workers, timeout=100)
            address = advertised(present(client))[0].address  # a job that does not need all takes this one first
            pid = client.run(os.getpid, workers=[address])[address]
        os.kill(pid, signal.SIGSTOP)
        yield Stopped(file, address)
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def one_stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stopped]:
    """One of three workers is stopped."""
    with stopped_among(3, tmp_path_factory.mktemp("stopped")) as stopped:
        yield stopped


@pytest.mark.slow
def test_a_run_goes_on_with_the_workers_that_answer(tmp_path: Path, synthetic: str, one_stopped: Stopped) -> None:
    job = job_file(tmp_path, synthetic)
    done = finish(daskcnn_run(job, "--scheduler-file", one_stopped.file, "--workers", "cpu=2", "--json"), timeout=100)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["workers"]) == 2
    assert f"warning: worker {one_stopped.worker}: no answer within 20 s" in done.stderr


@pytest.mark.slow
def test_what_a_stopped_worker_does_not_take_keeps_nothing_back_from_others(one_stopped: Stopped) -> None:
    """Weights to be judged. Dask's broadcast would lock the scheduler until all workers have them."""
    none: Any = None
    with Client(scheduler_file=one_stopped.file) as client:
        found = chosen(advertised(present(client)), Workers())
        job = Job(cluster=Cluster(stall_timeout=2.0))
        context = RunContext.of(client, "a run", job, none, found, emit=none, save=none)
        alive, weights = context.workers.alive, np.zeros(4, np.float32)
        context.calibrations.update(dict.fromkeys(alive, Calibration(1.0, {}, {}, 1, "here", 0)))
        (stopped,) = [name for name, member in alive.items() if member.address == one_stopped.worker]
        for _ in range(2):  # a broadcast would begin with another worker each time
            with pytest.raises(WorkersLost, match=stopped):
                context.scoring.submit(weights, "validation", JudgedPart(0, 90))
        del alive[stopped]
        assert context.scoring.submit(weights, "validation", JudgedPart(0, 90)).keys() == alive.keys()


@pytest.mark.slow
def test_too_few_that_answer_are_exit_3_and_a_finding(tmp_path: Path, synthetic: str, one_stopped: Stopped) -> None:
    """Job and doctor at the same time: both only wait."""
    job = job_file(tmp_path, synthetic)
    look = [*DASK, "cnn", "doctor", "--scheduler-file", one_stopped.file, "--workers", "cpu=2", "--wait", "1", "--json"]
    with process(*look) as doctor:
        refused = finish(daskcnn_run(job, "--scheduler-file", one_stopped.file, "--workers", "cpu=3", "--wait", "1"))
        out, told = doctor.communicate(timeout=100)
    assert refused.returncode == 3, refused.stderr
    assert f"worker {one_stopped.worker}: no answer within 20 s" in refused.stderr
    assert doctor.returncode == 0, told
    workers = [f for f in json.loads(out) if f["check"].startswith("worker ")]
    (silent,) = [f for f in workers if "does not answer" in f["seen"]]
    assert one_stopped.worker in silent["seen"]
    assert len([f for f in workers if f["ok"] and f["facts"]]) == 2, "the others are looked at"


def test_a_signal_is_heeded_while_a_worker_is_waited_for(tmp_path: Path, synthetic: str) -> None:
    job = job_file(tmp_path, synthetic)
    with (
        stopped_among(1, tmp_path) as stopped,
        process(*daskcnn_run(job, "--scheduler-file", stopped.file, "--workers", "cpu=1")) as run,
    ):
        wait_for_line(run, "waiting for workers to answer")
        run.send_signal(signal.SIGTERM)
        _, told = run.communicate(timeout=100)
    assert run.returncode == 143, told
    assert "no answer within" not in told, "the wait had ended by itself"
    assert "Traceback" not in told
