"""Scheduler, workers and jobs as a user starts them, each a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.cluster.cluster_jobs import small_job
from tests.command_lines import toml

DASK = [sys.executable, "-m", "dask"]


@contextmanager
def process(*command: str, log: Path | None = None, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a command. log: the file for what it says, where no test reads it: a pipe would fill up."""
    with ExitStack() as stack:
        said = subprocess.PIPE if log is None else stack.enter_context(log.open("ab"))
        started = stack.enter_context(subprocess.Popen(command, text=True, stdout=said, stderr=said, **options))
        try:
            yield started
        finally:
            started.kill()


def scheduler(file: str) -> list[str]:
    options = ["--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--dashboard-address", "127.0.0.1:0"]
    return [*DASK, "scheduler", "--scheduler-file", file, *options]


def worker(file: str, folder: Path, resource: str) -> list[str]:
    options = ["--host", "127.0.0.1", "--nthreads", "1", "--no-dashboard", "--local-directory", str(folder)]
    return [*DASK, "worker", "--scheduler-file", file, *options, *(["--resources", resource] if resource else [])]


@contextmanager
def hand_made_cluster(folder: Path, resources: list[str]) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`dask scheduler` and a `dask worker` for each of the resources. Yields the scheduler's file and process.

    Workers have no nanny: it would start each of them again, in a process more, and a killed one is to stay away.
    """
    file, log = str(folder / "scheduler.json"), folder / "cluster.log"
    with ExitStack() as stack:
        started = stack.enter_context(process(*scheduler(file), log=log))
        for number, resource in enumerate(resources):
            stack.enter_context(process(*worker(file, folder / f"w{number}", resource), "--no-nanny", log=log))
        yield file, started


def job_file(folder: Path, synthetic: str, **sections: Any) -> str:
    """A job file as TOML."""
    tables = small_job(synthetic, str(folder / "runs"), **sections)
    lines = [f"[{name}]\n" + "\n".join(f"{k} = {toml(v)}" for k, v in keys.items()) for name, keys in tables.items()]
    path = folder / "job.toml"
    path.write_text("\n".join(lines))
    return str(path)


def daskcnn_run(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "daskcnn.run", *arguments]


def finish(command: list[str], timeout: float = 150) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def wait_for_line(run: subprocess.Popen[str], beginning: str) -> None:
    """Read what a job says until it says this. The test's own time limit ends it otherwise."""
    assert run.stderr is not None
    told = ""
    while not (line := run.stderr.readline()).startswith(beginning):
        told += line
        assert line, told


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
