"""Signals to a job and its local workers, as a terminal or a batch system sends them."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import termios
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client

from tests.cluster.by_hand import daskcnn_run, finish, hand_made_cluster, job_file, process, wait_for_checkpoint
from tests.cluster.cluster_jobs import run as run_here
from tests.cluster.cluster_jobs import small_job

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(
    ("signum", "code"),
    [
        (signal.SIGTERM, 143),
        *(
            pytest.param(signum, 128 + signum, marks=pytest.mark.slow)
            for signum in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGXCPU)
        ),
    ],
)
def test_signal_to_the_whole_group_saves_and_ends(tmp_path: Path, synthetic: str, signum: int, code: int) -> None:
    """As Ctrl-C at a terminal does it: the local workers get the signal too."""
    workers = {"workers": {"cpu": 1}}
    job = job_file(tmp_path, synthetic, train={"epochs": 400}, run={"name": "it"}, cluster=workers)
    with process(*daskcnn_run(job), start_new_session=True) as run:
        wait_for_checkpoint(tmp_path / "runs/it", run)
        os.killpg(run.pid, signum)
        _, told = run.communicate(timeout=100)
    assert run.returncode == code, told
    assert "--resume" in told
    assert "Traceback" not in told


@pytest.mark.slow
@pytest.mark.parametrize("left_running", [False, True])
def test_a_terminal_that_is_closed_ends_a_run_and_not_one_that_was_left_running(
    tmp_path: Path, synthetic: str, left_running: bool
) -> None:
    """The display is that of a terminal. One that is left running, as `setsid` has it, ends with 0 without it."""
    workers, epochs = {"workers": {"cpu": 1}}, 40 if left_running else 4000
    job = job_file(tmp_path, synthetic, train={"epochs": epochs}, run={"name": "it"}, cluster=workers)
    own, terminal = os.openpty()

    def take_terminal() -> None:
        if not left_running:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    how: dict[str, Any] = {"start_new_session": True, "preexec_fn": take_terminal}
    with subprocess.Popen(daskcnn_run(job), stdin=terminal, stdout=terminal, stderr=terminal, **how) as run:
        os.close(terminal)
        deadline = time.monotonic() + 100
        while not list(tmp_path.glob("runs/it/checkpoints/step-*")):
            os.read(own, 65536)
            assert time.monotonic() < deadline
        os.close(own)
        assert run.wait(100) == (0 if left_running else 129)
    summary = json.loads((tmp_path / "runs/it/summary.json").read_text())
    assert summary["reason"] == (None if left_running else "interrupted by its terminal, which was closed (SIGHUP)")


@pytest.mark.slow
def test_a_run_is_kept_before_its_time_limit_is_over(tmp_path: Path, synthetic: str) -> None:
    job = job_file(tmp_path, synthetic, train={"epochs": 4000}, run={"name": "it"}, cluster={"workers": {"cpu": 1}})
    begun = time.monotonic()
    ended = finish(daskcnn_run(job, "--time-limit", "60s"))
    assert (ended.returncode, time.monotonic() - begun < 60) == (143, True), ended.stderr
    assert "interrupted by its time limit (run.time_limit = 60 s)" in ended.stderr
    assert "--resume" in ended.stderr
    assert list(tmp_path.glob("runs/it/checkpoints/step-*"))


@pytest.mark.slow
def test_a_scheduler_that_is_stopped_for_good_ends_the_run_resumably(tmp_path: Path, synthetic: str) -> None:
    with hand_made_cluster(tmp_path, ["CPU=1"]) as (file, scheduler):
        job = job_file(
            tmp_path, synthetic, train={"epochs": 4000}, cluster={"scheduler_file": file}, run={"name": "it"}
        )
        with process(*daskcnn_run(job)) as run:
            wait_for_checkpoint(tmp_path / "runs/it", run)
            os.kill(scheduler.pid, signal.SIGSTOP)
            _, told = run.communicate(timeout=100)
    assert run.returncode == 5, told
    assert "is its process stopped" in told
    assert "--resume" in told


@pytest.mark.slow
def test_signal_to_the_whole_group_while_the_workers_start(tmp_path: Path, synthetic: str) -> None:
    """A worker's process that is not set up yet has the signal too, and must not end by it."""
    job = job_file(tmp_path, synthetic, cluster={"workers": {"cpu": 1}})
    with process(*daskcnn_run(job), start_new_session=True) as run:
        deadline = time.monotonic() + 100
        while not any("spawn_main" in " ".join(child.cmdline()) for child in psutil.Process(run.pid).children()):
            assert run.poll() is None, run.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)  # a process that comes into being can only be looked for: it says nothing yet
        os.killpg(run.pid, signal.SIGINT)
        _, told = run.communicate(timeout=100)
    assert run.returncode == 130, told
    assert "before training began" in told
    assert "Traceback" not in told


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sgwu", "layer"])
def test_driver_killed_at_a_random_time_resumes_to_the_same_accuracy(
    three_workers: Client, tmp_path: Path, synthetic: str, strategy: str
) -> None:
    """Equal parts and float64 leave no room for chance: the runs differ by how kernels or sums were cut, if at all."""
    train: dict[str, Any] = {"strategy": strategy, "lr": 0.02}
    train |= {"partition": "udpa", "epochs": 30} if strategy != "layer" else {"epochs": 6}
    sections: dict[str, dict[str, Any]] = {"model": {"dtype": "float64"}, "cluster": {"workers": {"cpu": 2}}}
    undisturbed = run_here(three_workers, small_job(synthetic, str(tmp_path / "here"), train=train, **sections))
    job = job_file(tmp_path, synthetic, train=train, **sections, run={"name": "it"})
    with process(*daskcnn_run(job), start_new_session=True) as run:
        wait_for_checkpoint(tmp_path / "runs/it", run)
        time.sleep(random.Random(strategy).uniform(0, 1))  # the moment is the test's subject, not a wait for something
        os.killpg(run.pid, signal.SIGKILL)
    resumed = finish(daskcnn_run("--resume", str(tmp_path / "runs/it"), "--json"))
    assert resumed.returncode == 0, resumed.stderr
    assert "nothing to resume" not in resumed.stderr
    log = [json.loads(line) for line in (tmp_path / "runs/it/events.jsonl").read_text().splitlines()]
    ((at, again),) = [(i, event) for i, event in enumerate(log) if event["event"] == "resume"]
    first = next(event for event in log[at:] if event["event"] in ("epoch", "steps"))
    assert 0 < again["epoch"] < first["epoch"] < train["epochs"]
    before, after = undisturbed.summary, json.loads(resumed.stdout)
    assert after["epochs"] == before["epochs"] == train["epochs"]
    assert abs(after["test"]["accuracy"] - before["test"]["accuracy"]) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["bsp", "sgwu", "layer"])
def test_a_driver_that_was_stopped_for_longer_than_the_stall_timeout_goes_on(
    three_workers: Client, tmp_path: Path, synthetic: str, strategy: str
) -> None:
    """As Ctrl-Z and `fg` do it, and a laptop that sleeps."""
    scheduler = three_workers.scheduler_info()["address"]
    cluster = {"scheduler": scheduler, "workers": {"cpu": 2}, "stall_timeout": 8.0}
    train = {"strategy": strategy, "epochs": 3 if strategy == "layer" else 200}
    job = job_file(tmp_path, synthetic, train=train, cluster=cluster, run={"name": "it", "checkpoint_every": 0.5})
    with process(*daskcnn_run(job), start_new_session=True) as run:
        wait_for_checkpoint(tmp_path / "runs/it", run)
        os.killpg(run.pid, signal.SIGSTOP)
        time.sleep(20)  # the length of the stop is the test's subject
        os.killpg(run.pid, signal.SIGCONT)
        _, told = run.communicate(timeout=200)
    assert run.returncode == 0, told
    assert "lost" not in told
