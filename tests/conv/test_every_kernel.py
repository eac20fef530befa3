"""The laws of rounding under each kernel of OpenBLAS that the processor has, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from platform import machine
from signal import SIGILL

import pytest

from tests.conv.one_kernel import OTHER, THREADS

X86 = ("Prescott", "Nehalem", "Sandybridge", "Haswell", "Zen", "SkylakeX", "Cooperlake", "SapphireRapids")
ARM = ("ARMV8", "NEOVERSEN1", "NEOVERSEV1", "NEOVERSEN2", "VORTEX")
ROOT = Path(__file__).parents[2]
KERNELS = ARM if machine() in ("aarch64", "arm64") else X86
AT_TIMES = ("Nehalem", "Sandybridge", "SkylakeX", "Cooperlake", "SapphireRapids")
"""Processors between the oldest kernel and those of 2013, and those whose own kernel all other tests use: `make
test-all` tries them."""
CASES = [
    pytest.param(kernel, which, marks=pytest.mark.slow if which == "all" or kernel in AT_TIMES else ())
    for kernel in KERNELS
    for which in ("few", "all")
]


@pytest.mark.parametrize(("kernel", "which"), CASES)
def test_rounding_stays_within_its_limits_under_every_kernel(kernel: str, which: str) -> None:
    environment = os.environ | {"OPENBLAS_CORETYPE": kernel, "OPENBLAS_NUM_THREADS": str(max(THREADS))}
    environment["OPENBLAS_THREAD_TIMEOUT"] = "4"  # threads sleep at once, where cores are fewer than they
    command = [sys.executable, "-m", "tests.conv.one_kernel", kernel, which]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=290, check=False)
    if done.returncode == OTHER:
        pytest.skip(done.stdout.strip())
    if done.returncode == -SIGILL:
        pytest.skip(f"the processor has no {kernel}")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 9, "problems that were held to the laws"
