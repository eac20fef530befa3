"""What a worker says of itself to `daskcnn doctor`; runs there."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from dask.system import cpu_count
from distributed.system import memory_limit
from threadpoolctl import threadpool_info

from daskcnn.arrays import backend, single_threaded_blas
from daskcnn.errors import ClusterError, DataError, told
from daskcnn.pool import Pool
from daskcnn.store import open_dataset
from daskcnn.store.foreign.array import array_at

COMPUTE = 0.2  # seconds of it, to see how many cores take part
SIDE = 192  # of the matrices that are multiplied: a core's work for less than a millisecond


@dataclass(frozen=True)
class Gpu:
    """A worker's GPU: its place on the bus tells whether two workers have the same one. memory, free: bytes."""

    name: str
    bus: str
    memory: int
    free: int
    driver: str
    problem: str = ""


@dataclass(frozen=True)
class Seen:
    """What a worker has: cores and memory (bytes) that its process may use, control groups considered.

    blas_threads: of each of its matrix products while we compute. got_cores: how many its threads were given when
    all computed. fingerprint: of the data set, None where none was asked for or `data_problem` says why not.
    """

    cores: int
    memory: int
    blas: str
    blas_threads: int
    got_cores: float
    gpu: Gpu | None = None
    device_problem: str = ""
    fingerprint: str | None = None
    data_problem: str = ""


def look(kind: str, threads: int, data: str | None) -> Seen:
    """Look at this worker. kind: cpu, gpu or ps; threads: of it; data: the path of a data set to look at, if any."""
    gpu, device_problem = (None, "") if kind != "gpu" else _gpu()
    fingerprint, data_problem = (None, "") if data is None or kind == "ps" else _dataset(data)
    with single_threaded_blas():
        libraries = [i for i in threadpool_info() if i["user_api"] == "blas"]
        got = _got_cores(threads if kind == "cpu" else 1)
    return Seen(
        cpu_count(),
        int(memory_limit()),
        blas_names(libraries),
        max((i["num_threads"] for i in libraries), default=1),
        got,
        gpu,
        device_problem,
        fingerprint,
        data_problem,
    )


def blas_names(libraries: list[dict[str, Any]]) -> str:
    """Names, versions and kernels of what threadpoolctl has found."""
    names = [f"{i['internal_api']} {i.get('version') or ''} {i.get('architecture') or ''}".strip() for i in libraries]
    return ", ".join(names)


def _got_cores(threads: int) -> float:
    """Seconds of processor time a second, while so many threads multiply matrices as a training step does."""
    a = np.ones((SIDE, SIDE), np.float32)
    begun, spent = time.perf_counter(), time.process_time()
    end = begun + COMPUTE

    def multiply(_: int) -> None:
        while time.perf_counter() < end:
            a @ a

    Pool(threads).map(multiply, range(threads))
    return (time.process_time() - spent) / (time.perf_counter() - begun)


def _gpu() -> tuple[Gpu | None, str]:
    try:
        xp = backend("gpu").xp
    except ClusterError as error:
        return None, str(error)
    runtime, device = xp.cuda.runtime, xp.cuda.Device()
    free, memory = runtime.memGetInfo()
    name = runtime.getDeviceProperties(device.id)["name"].decode()
    version = runtime.driverGetVersion()
    driver = f"driver {_kernel_driver()}, up to CUDA {version // 1000}.{version % 1000 // 10}"
    return Gpu(name, f"{os.uname().nodename} {device.pci_bus_id}", memory, free, driver, _gpu_problem(xp)), ""


def _kernel_driver(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    try:
        found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", file.read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found.group() if found else "of unknown version"


def _gpu_problem(xp: Any) -> str:
    """Whether it multiplies, and compiles a kernel: the two things that a wrong driver or read-only folder prevents."""
    try:
        a = xp.ones((SIDE, SIDE), xp.float32)
        product = float((a @ a)[0, 0])
        squares = float((xp.arange(8, dtype=xp.float32) ** 2 + 1).sum())
    except Exception as error:  # whatever CUDA, its compiler or the cache's folder say
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return "" if (product, squares) == (SIDE, 148.0) else f"it computes {product} for {SIDE}, {squares} for 148"


def _dataset(path: str) -> tuple[str | None, str]:
    try:
        if (array := array_at(path)) is not None:
            array.read(0)
            return array.digest, ""
        return open_dataset(path).fingerprint, ""
    except DataError as error:
        return None, told(error.value, error.reason, "")
