"""The example for SLURM: what SLURM would run is run, and its workers are ours to use."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from distributed import Client
from distributed.cli import dask_worker

from daskcnn.cluster.link.members import advertised, present, wait_for_members
from daskcnn.job.tables import Workers
from tests.deploy.manifests import DEPLOY

pytest.importorskip("dask_jobqueue")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("slurm_train", DEPLOY / "slurm" / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def worker_options(script: str) -> dict[str, Any]:
    """What Dask makes of the last line of a SLURM job's script."""
    python, module, name, *arguments = shlex.split(script.strip().splitlines()[-1])
    assert (Path(python).name.startswith("python"), module, name) == (True, "-m", "distributed.cli.dask_worker")
    return dict(dask_worker.main.make_context("dask worker", arguments).params)


def test_a_gpu_worker_is_a_job_of_its_own(example: ModuleType) -> None:
    script = example.gpu_script("tcp://10.1.0.7:8786", "gpu", memory="16GiB", walltime="04:00:00")
    options = worker_options(script)
    assert (options["scheduler"], options["nthreads"], options["resources"]) == ("tcp://10.1.0.7:8786", 1, "GPU=1")
    assert "#SBATCH --gres=gpu:1" in script
    page = (DEPLOY / "hpc.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"(?s)```\n(#SBATCH.*?)```", page)
    for line in script.replace(sys.executable, "python").splitlines()[2:]:
        assert line in ("", "#SBATCH -J dask-worker") or line in shown, "the page shows another script"


@pytest.fixture
def cluster(example: ModuleType, tmp_path: Path) -> Iterator[Any]:
    made = example.cpu_cluster(
        "compute",
        cores=1,
        memory="2GiB",
        walltime="00:10:00",
        local_directory=str(tmp_path),
        log_directory=str(tmp_path / "logs"),
        scheduler_options={"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0", "dashboard": False},
    )
    with made:
        yield made


@pytest.mark.cluster
@pytest.mark.slow
def test_the_script_starts_a_worker_that_a_job_can_use(cluster: Any, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(cluster.job_script(), encoding="utf-8")
    assert worker_options(script.read_text())["resources"] == "CPU=1"
    with (
        Client(cluster.scheduler_address) as client,
        subprocess.Popen(["bash", str(script)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as worker,
    ):
        try:
            members = wait_for_members(client, Workers(cpu=1), 60)
            assert [(m.kind, m.threads, m.memory_limit) for m in members.workers] == [("cpu", 1, 2 << 30)]
            assert len(advertised(present(client))) == 1
        finally:
            worker.terminate()
            worker.wait(30)


SBATCH = """#!/bin/sh
cp "$1" "$0.$$"
setsid sh "$0.$$" >"$0.$$.log" 2>&1 &
echo "Submitted batch job $!"
"""
SCANCEL = """#!/bin/sh
for job in "$@"; do kill -- "-$job" 2>/dev/null; done
exit 0
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine with SLURM: what is submitted runs here."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, script in {"sbatch": SBATCH, "scancel": SCANCEL}.items():
        (folder / name).write_text(script, encoding="utf-8")
        (folder / name).chmod(0o755)
    quiet = {"DASK_DISTRIBUTED__SCHEDULER__DASHBOARD__ENABLED": "0", "DASKCNN_TUNE": "0"}
    return os.environ | quiet | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.cluster
@pytest.mark.slow
def test_the_example_trains_and_its_command_can_be_given_again(tmp_path: Path, slurm: dict[str, str]) -> None:
    job = tmp_path / "job.toml"
    job.write_text("[data]\nlimit = 600\nvalidation = 100\n[train]\nepochs = 1\n", encoding="utf-8")
    size = ["--partition", "compute", "--workers", "1", "--cores", "1", "--memory", "2GiB"]
    command = [sys.executable, str(DEPLOY / "slurm" / "train.py"), str(job), *size, "--name", "first"]

    def run(*flags: str) -> subprocess.CompletedProcess[str]:
        found = subprocess.run([*command, *flags], cwd=tmp_path, env=slurm, capture_output=True, text=True, timeout=120)
        assert "Traceback" not in found.stderr, found.stderr
        return found

    assert (first := run("--resume", "auto")).returncode == 0, first.stderr
    assert (tmp_path / "runs" / "first" / "summary.json").exists()
    assert "nothing to resume" in run("--resume", "auto").stderr
    again = run()
    assert (again.returncode, "exists already" in again.stderr) == (2, True), again.stderr
