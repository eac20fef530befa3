"""Filling and sharing the cache of compiled loops, in processes of its own; two loops stand for all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import numpy as np
import daskcnn.compiled.warm as warm
warm._modules = lambda: ["updates"]
warm._import_all()
warm.LOOPS[:] = [loop for loop in warm.LOOPS if loop.name in {"updates.sgd", "updates.add_scaled"}]
new = warm.warm("float32")
from daskcnn.arrays import Device
from daskcnn.nn import SGD
params = np.ones(5, "f")
sgd = SGD()
sgd.step(params, np.ones(5, "f"), sgd.init(params), 0.5, Device())
assert (params == 0.5).all(), params
print(new, warm.is_ready("float32"), warm.UNCACHED)
"""

IN_PROCESSES = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
import daskcnn.compiled.warm as warm
warm._import_all()
warm.LOOPS[:] = [loop for loop in warm.LOOPS if loop.name in {"updates.sgd", "updates.add_scaled"}]
new = warm.warm_in_processes("float32", lambda done, of: None, 2)
print(new, warm.is_ready("float32"), warm.UNCACHED)
"""
"""Needs them on a disk that has room for short files only."""

NEW = 2
"""Loops of the script, none of them compiled yet."""


def start(cache: Path, script: str = SCRIPT, **variables: str) -> subprocess.Popen[str]:
    """A process that needs the loops, with its cache there."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA")}
    env |= {"DASKCNN_CACHE_DIR": str(cache), **variables}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", script], env=env, stdout=pipe, stderr=pipe, text=True)


def printed(process: subprocess.Popen[str]) -> list[str]:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return out.split()


@pytest.mark.slow
def test_processes_that_start_at_once_compile_each_loop_once(tmp_path: Path) -> None:
    both = [start(tmp_path) for _ in range(2)]
    new = sorted(int(printed(process)[0]) for process in both)
    assert new == [0, NEW]
    assert printed(start(tmp_path)) == ["0", "True", "False"]


@pytest.mark.slow
def test_a_cache_is_shared_with_a_processor_without_avx2(tmp_path: Path) -> None:
    old = {"NUMBA_CPU_NAME": "nehalem", "NUMBA_CPU_FEATURES": "+sse4.2"}
    assert printed(start(tmp_path)) == [str(NEW), "True", "False"]
    assert printed(start(tmp_path, **old)) == [str(NEW), "True", "False"]
    assert printed(start(tmp_path)) == ["0", "True", "False"]
    assert printed(start(tmp_path, **old)) == ["0", "True", "False"]


@pytest.mark.slow
def test_without_a_folder_to_write_every_process_compiles(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert printed(start(tmp_path / "file" / "cache")) == [str(NEW), "False", "True"]


@pytest.mark.slow
def test_processes_that_compile_together_tell_once_that_nothing_is_kept(tmp_path: Path) -> None:
    process = start(tmp_path, IN_PROCESSES)
    out, err = process.communicate(timeout=240)
    assert out.split() == [str(NEW), "False", "False"], err
    assert err.count("compiled loops cannot be kept") == 1


def test_what_does_not_compute_loads_neither_numba_nor_arrays_of_dask() -> None:
    """The command line, the driver and the server: Numba costs half a second and 140 MB.

    Arrays of Dask, with xarray and pandas where these are installed, cost the driver a third of its start.
    """
    code = """
import sys
from importlib import import_module
for module in "daskcnn", "daskcnn.ps.server", "daskcnn.cluster", "daskcnn.launch.training", "daskcnn.cli.run":
    import_module(module)
    assert not {"numba", "llvmlite", "dask.array", "xarray", "pandas"} & set(sys.modules), module
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
