"""Scheduler, workers and job started as a user would, each a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import Client

from tests.cluster.cluster_jobs import run as run_here
from tests.cluster.cluster_jobs import small_job

pytestmark = pytest.mark.cluster

DASK = [sys.executable, "-m", "dask"]


@contextmanager
def process(*command: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as started:
        try:
            yield started
        finally:
            started.kill()


def scheduler(file: str) -> list[str]:
    options = ["--host", "127.0.0.1", "--port", "0", "--no-dashboard"]
    return [*DASK, "scheduler", "--scheduler-file", file, *options]


def worker(file: str, folder: Path, resource: str) -> list[str]:
    options = ["--host", "127.0.0.1", "--nthreads", "1", "--no-dashboard", "--local-directory", str(folder)]
    return [*DASK, "worker", "--scheduler-file", file, *options, *(["--resources", resource] if resource else [])]


@contextmanager
def hand_made_cluster(folder: Path, resources: list[str]) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`dask scheduler` and a `dask worker` for each of the resources. Yields the scheduler's file and process."""
    file = str(folder / "scheduler.json")
    with ExitStack() as stack:
        started = stack.enter_context(process(*scheduler(file)))
        for number, resource in enumerate(resources):
            stack.enter_context(process(*worker(file, folder / f"w{number}", resource)))
        yield file, started


def job_file(folder: Path, synthetic: str, **sections: Any) -> str:
    """A job file as TOML: JSON's arrays, strings and numbers are TOML's too, tables are written inline."""

    def toml(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k} = {toml(v)}" for k, v in value.items()) + "}"
        return "[" + ", ".join(map(toml, value)) + "]" if isinstance(value, list) else json.dumps(value)

    tables = small_job(synthetic, str(folder / "runs"), **sections)
    lines = [f"[{name}]\n" + "\n".join(f"{k} = {toml(v)}" for k, v in keys.items()) for name, keys in tables.items()]
    path = folder / "job.toml"
    path.write_text("\n".join(lines))
    return str(path)


def daskcnn_run(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "daskcnn.run", *arguments]


def finish(command: list[str], timeout: float = 150) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The scheduler's file of a cluster: two workers, one that says it has a GPU, one for the server, and one that says
    nothing.
    """
    resources = ["CPU=1", "CPU=1", "GPU=1", "PS=1", ""]
    with hand_made_cluster(tmp_path_factory.mktemp("by-hand"), resources) as (file, _):
        wait_for(Path(file))
        with Client(scheduler_file=file) as client:
            client.wait_for_workers(len(resources), timeout=100)
        yield file


def test_two_workers_by_hand_train_a_job(tmp_path: Path, synthetic: str, by_hand: str) -> None:
    job = job_file(tmp_path, synthetic)
    done = finish(daskcnn_run(job, "--scheduler-file", by_hand, "--workers", "cpu=2", "--json"))
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["status"] == "done"
    assert [w["name"] for w in summary["workers"]] == ["cpu-0", "cpu-1"]
    assert Path(summary["checkpoint"]).is_dir()


def test_missing_resource_is_named_with_its_remedy(tmp_path: Path, synthetic: str, by_hand: str) -> None:
    job = job_file(tmp_path, synthetic)
    refused = finish(daskcnn_run(job, "--scheduler-file", by_hand, "--workers", "cpu=1,gpu=2", "--wait", "1"))
    assert refused.returncode == 3
    assert "1 more with GPU=1" in refused.stderr
    assert "--resources GPU=1" in refused.stderr
    assert "1 worker" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "runs").exists()


def test_job_waits_for_a_scheduler_and_workers_that_come_late(tmp_path: Path, synthetic: str) -> None:
    job, file = job_file(tmp_path, synthetic), str(tmp_path / "late.json")
    command = daskcnn_run(job, "--scheduler-file", file, "--workers", "cpu=2", "--wait", "90", "--json")
    with ExitStack() as stack:
        run = stack.enter_context(process(*command))
        wait_for_line(run, f"waiting for scheduler file {file} (there is no such file)")
        stack.enter_context(process(*scheduler(file)))
        wait_for_line(run, "waiting for workers: 2 more with CPU=1 (found 0 cpu, 0 gpu, 0 ps)")
        stack.enter_context(process(*worker(file, tmp_path / "w0", "CPU=1")))
        wait_for_line(run, "waiting for workers: 1 more with CPU=1 (found 1 cpu, 0 gpu, 0 ps)")
        stack.enter_context(process(*worker(file, tmp_path / "w1", "CPU=1")))
        out, told = run.communicate(timeout=100)
    assert run.returncode == 0, told
    assert len(json.loads(out)["workers"]) == 2


def wait_for_line(run: subprocess.Popen[str], beginning: str) -> None:
    """Read what a job says until it says this. The test's own time limit ends it otherwise."""
    assert run.stderr is not None
    told = ""
    while not (line := run.stderr.readline()).startswith(beginning):
        told += line
        assert line, told


def test_doctor_looks_at_a_cluster(tmp_path: Path, synthetic: str, by_hand: str) -> None:
    look = [*DASK, "cnn", "doctor", "--scheduler-file", by_hand, "--json", "--workers"]
    sound = finish([*look, "cpu=2", "--data", synthetic, "--wait", "60"])
    short = finish([*look, "cpu=2,gpu=2", "--data", str(tmp_path / "none.zarr"), "--wait", "1"])
    findings = json.loads(sound.stdout)
    assert sound.returncode == 0, [f for f in findings if not f["ok"]]
    found = {f["check"]: f for f in findings}
    assert found["workers"]["seen"].startswith("2 cpu, 1 gpu, ")
    assert sum(bool(f["facts"].get("fingerprint")) for f in findings if f["check"].startswith("worker ")) == 3
    ways = found["links"]["facts"]["ways"]
    assert len(ways) == 4 * 3, "every two of the workers, the server's too"
    assert all(way["bandwidth"] > 1e6 and not way["problem"] for way in ways)
    assert all(abs(offset) < 1 for offset in found["clocks"]["facts"].values())
    assert short.returncode == 3
    assert [f["check"] for f in json.loads(short.stdout) if not f["ok"]][:2] == ["workers", "data"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="the worker would have its GPU")
def test_worker_that_advertises_a_gpu_it_lacks_is_left_out(tmp_path: Path, synthetic: str, by_hand: str) -> None:
    job = job_file(tmp_path, synthetic)
    done = finish(daskcnn_run(job, "--scheduler-file", by_hand, "--workers", "cpu=1,gpu=1", "--json"))
    assert done.returncode == 0, done.stderr
    assert "worker gpu-0 is left out: device gpu: CuPy is not installed" in done.stderr
    assert [w["name"] for w in json.loads(done.stdout)["workers"]] == ["cpu-0"]
    look = finish([*DASK, "cnn", "doctor", "--scheduler-file", by_hand, "--workers", "cpu=1,gpu=1", "--json"])
    (workers,) = [f for f in json.loads(look.stdout) if f["check"] == "workers"]
    assert (look.returncode, workers["ok"]) == (0, True), look.stdout
    assert "1 gpu, of which none can be used" in workers["seen"]


@pytest.mark.slow
def test_worker_that_advertises_two_kinds_trains_as_the_first_with_a_warning(tmp_path: Path, synthetic: str) -> None:
    with hand_made_cluster(tmp_path, ["CPU=1 GPU=1"]) as (file, _):
        done = finish(daskcnn_run(job_file(tmp_path, synthetic), "--scheduler-file", file, "--json", "--wait", "60"))
        look = finish([*DASK, "cnn", "doctor", "--scheduler-file", file, "--json"])
        short = finish(
            daskcnn_run(job_file(tmp_path, synthetic), "--scheduler-file", file, "--workers", "gpu=1", "--wait", "1")
        )
    assert done.returncode == 0, done.stderr
    assert re.search(r"worker cpu-0 \(tcp://\S+\): advertises CPU and GPU, and trains as cpu; restart it", done.stderr)
    assert look.returncode == 0, look.stdout
    assert "advertises CPU and GPU: it counts as cpu" in look.stdout
    assert short.returncode == 3
    assert "advertises CPU and GPU, and counts as cpu: restart it" in short.stderr


def test_killed_scheduler_ends_the_job_resumably(tmp_path: Path, synthetic: str) -> None:
    job = job_file(tmp_path, synthetic, train={"epochs": 400}, run={"name": "it"})
    with (
        hand_made_cluster(tmp_path, ["CPU=1"]) as (file, there),
        process(*daskcnn_run(job, "--scheduler-file", file)) as run,
    ):
        wait_for_checkpoint(tmp_path / "runs/it", run)
        there.kill()
        _, told = run.communicate(timeout=100)
    assert run.returncode == 5, told
    assert f"--resume {tmp_path}/runs/it" in told
    assert "last good checkpoint" in told
    assert "Traceback" not in told


def wait_for_checkpoint(run: Path, process: subprocess.Popen[str], timeout: float = 100) -> None:
    deadline = time.monotonic() + timeout
    while not list(run.glob("checkpoints/step-*")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_for(file: Path, timeout: float = 100) -> None:
    deadline = time.monotonic() + timeout
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sgwu", "layer"])
def test_driver_killed_at_a_random_time_resumes_to_the_same_accuracy(
    three_workers: Client, tmp_path: Path, synthetic: str, strategy: str
) -> None:
    """Equal parts and float64 leave no room for chance: the runs differ by how kernels or sums were cut, if at all."""
    train: dict[str, Any] = {"strategy": strategy, "lr": 0.02}
    train |= {"partition": "udpa", "epochs": 5} if strategy != "layer" else {"epochs": 2}
    sections: dict[str, dict[str, Any]] = {"model": {"dtype": "float64"}, "cluster": {"workers": {"cpu": 2}}}
    undisturbed = run_here(three_workers, small_job(synthetic, str(tmp_path / "here"), train=train, **sections))
    job = job_file(tmp_path, synthetic, train=train, **sections, run={"name": "it", "checkpoint_every": 0.5})
    with process(*daskcnn_run(job), start_new_session=True) as run:
        wait_for_checkpoint(tmp_path / "runs/it", run)
        time.sleep(random.uniform(0, 1))  # the moment is the test's subject, not a wait for something
        os.killpg(run.pid, signal.SIGKILL)
    resumed = finish(daskcnn_run("--resume", str(tmp_path / "runs/it"), "--json"))
    assert resumed.returncode == 0, resumed.stderr
    before, after = undisturbed.summary, json.loads(resumed.stdout)
    assert after["epochs"] == before["epochs"] == train["epochs"]
    assert abs(after["test"]["accuracy"] - before["test"]["accuracy"]) < 0.01


@pytest.mark.parametrize(
    ("signum", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)]
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


def test_signal_to_the_whole_group_while_the_workers_start(tmp_path: Path, synthetic: str) -> None:
    """A worker's process that is not set up yet has the signal too, and must not end by it."""
    job = job_file(tmp_path, synthetic, cluster={"workers": {"cpu": 2}})
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


# --- local workers ---


def test_local_workers_leave_the_processor_to_training(three_workers: Client) -> None:
    """Dask looks after them once a second, not fifty times, and keeps no samples of what they do."""

    def settings(dask_worker: Any) -> tuple[str | None, float, bool]:
        import os

        timers = dask_worker.periodic_callbacks
        return os.environ.get("MALLOC_ARENA_MAX"), timers["tick"].callback_time, "profile" in timers

    settings.__module__ = "__main__"  # the workers do not have this file
    assert set(three_workers.run(settings).values()) == {("1", 1000.0, False)}
