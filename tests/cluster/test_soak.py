"""Three minutes of the soak: faults every 20 s, and the run ends by itself with nothing grown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_a_run_under_faults_ends_by_itself(synthetic: str) -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", "3", "--data", synthetic, "--model", "4:8"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
