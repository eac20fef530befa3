"""The batch script for SLURM queues a run again as long as that helps, and says how it ended."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from daskcnn.cluster.link.signals import HEEDED
from daskcnn.errors import ClusterError, Lost
from tests.deploy.manifests import DEPLOY

GOES_ON = {ClusterError.exit_code, Lost.exit_code, *(128 + signum for signum in HEEDED)}


def fake(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("code", sorted({0, 1, 2, 4, 6, 137} | GOES_ON))
def test_a_run_is_queued_again_if_it_can_be_resumed(tmp_path: Path, code: int) -> None:
    fake(tmp_path, "srun", f'echo "$@"; exit {code}')
    fake(tmp_path, "scontrol", 'echo "$@"')
    surroundings = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    script = ["bash", str(DEPLOY / "slurm" / "train.sbatch"), "job.toml", "--name", "first"]
    ended = subprocess.run(script, env=surroundings, capture_output=True, text=True, check=False)
    began = "--ntasks=1 python deploy/slurm/train.py job.toml --name first --resume auto"
    assert ended.stdout.splitlines() == [began, *(["requeue 7"] if code in GOES_ON else [])]
    assert ended.returncode == code
