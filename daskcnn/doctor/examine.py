"""`daskcnn doctor`: check what a job needs of this machine and of a cluster, with a remedy for whatever is missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from distributed.system import memory_limit
from threadpoolctl import threadpool_info

from daskcnn import compiled
from daskcnn.arrays import backend, cpu_count, device_profile
from daskcnn.cluster.link.connect import connect
from daskcnn.cluster.link.members import wait_for_members
from daskcnn.cluster.run.admission import MISSING, PACKAGES, version_of, versions
from daskcnn.doctor.cluster import Wanted, data_here, examine_cluster
from daskcnn.doctor.findings import GIB, Finding, failed
from daskcnn.doctor.worker import blas_names
from daskcnn.errors import ClusterError, installing
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import Cluster


def compiled_loops() -> Finding:
    """Check that the compiled loops are in the cache. A worker without them compiles them before it is calibrated."""
    if compiled.loop.UNCACHED:
        remedy = "set DASKCNN_CACHE_DIR to a folder that can be written, or every worker spends a minute on them"
        return Finding("compiled loops", True, f"they cannot be kept in {compiled.loop.cache_path()}", remedy)
    if not compiled.warm.is_ready("float32"):
        remedy = "the first worker here takes a minute for it; to do it now: daskcnn doctor --warm"
        return Finding("compiled loops", True, "not compiled on this machine yet", remedy)
    return Finding("compiled loops", True, f"ready, in {compiled.loop.cache_path()}")


def compile_loops(say: Callable[[str], None]) -> None:
    """Compile the loops for float32, which most networks have; `say` is told before, and of the progress."""
    if compiled.loop.UNCACHED:
        say(f"nothing is compiled: {compiled.loop.cache_path()} cannot be written, so no loop would be kept")
        return
    if not compiled.warm.is_ready("float32"):
        say(f"compiling loops on {cpu_count()} cores: the longest come first, and take half a minute or more")
    new = compiled.warm.warm_in_processes("float32", lambda done, of: say(f"compiled loop {done} of {of}"), cpu_count())
    say(f"compiled {new} loops anew" if new else "all loops were compiled before")


# packages that Dask's pages need, and the pages
DASHBOARD = {"bokeh": "dashboard (/status)", "prometheus-client": "figures for Prometheus (/metrics)"}
WORKER, DRIVER = 2 * GIB, GIB  # memory that each wants
AVX2_KERNELS = frozenset({"haswell", "zen"})  # OpenBLAS's: they compute half as much at a time as AVX-512 allows


def asked_for(workers: str | None, data: str | None, run_dir: str | None = None) -> Wanted:
    """Return the needs of a job with these flags. Raises JobError."""
    given = {"cluster": {"workers": workers}, "data": {"path": data}, "run": {"dir": run_dir}}
    tables: dict[str, Any] = {table: keys for table, keys in given.items() if all(keys.values())}
    job = resolve(tables)
    return Wanted(job.cluster.workers, job.data.path if data else None, job.run.dir)


def examine(scheduler: str | None, scheduler_file: str | None, wait: float, wanted: Wanted) -> list[Finding]:
    """Examine this machine, and a cluster where one is named; without one, the data set from here."""
    findings = list(_this_machine(wanted, DRIVER if scheduler or scheduler_file else WORKER))
    if scheduler or scheduler_file:
        settings = Cluster(scheduler=scheduler, scheduler_file=scheduler_file, wait=wait)
        try:
            with connect(settings) as client:
                with suppress(ClusterError):  # missing workers will be among the findings
                    wait_for_members(client, wanted.workers, wait)
                findings += examine_cluster(client, wanted)
        except (ClusterError, OSError) as error:  # the latter where it goes, or hangs, meanwhile
            findings.append(failed("scheduler", error))
    elif wanted.data:
        findings.append(data_here(wanted.data))
    return findings


def _this_machine(wanted: Wanted, memory: int) -> Iterator[Finding]:
    found = versions()
    missing = [name for name in PACKAGES if found[name] == MISSING]
    remedy = f"pip install {' '.join(missing)}" if missing else ""
    yield Finding("packages", not missing, ", ".join(f"{n} {v}" for n, v in found.items()), remedy)
    cpu = device_profile("cpu", cpu_count())
    yield Finding("processor", True, f"{cpu.name}, {cpu.threads} cores for this process")
    yield _blas()
    yield compiled_loops()
    yield _memory(memory)
    yield _gpu()
    yield _disk(Path(wanted.runs).absolute())
    yield _dashboard()


def _memory(least: int) -> Finding:
    """Check the free memory, of the control group where one sets a limit. Little of it stops no job."""
    machine = psutil.virtual_memory()
    most, free = machine.total, machine.available
    if (limit := memory_limit()) < most:
        most, free = limit, max(0, min(free, limit - memory_of_group()))
    who = "a worker" if least == WORKER else "a job beside its workers"
    remedy = f"close other programs, or raise the limit: {who} wants {least / GIB:g} GiB" if free < least else ""
    return Finding("memory", True, f"{free / GIB:.1f} of {most / GIB:.1f} GiB free", remedy)


def memory_of_group(folder: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this control group uses, without files that it can do without; 0 where it is not told."""
    for used, stat, idle in (
        ("memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        with suppress(OSError, ValueError):
            counts = dict(line.split() for line in (folder / stat).read_text(encoding="ascii").splitlines())
            return int((folder / used).read_text(encoding="ascii")) - int(counts.get(idle, 0))
    return 0


def _disk(runs: Path) -> Finding:
    """Check the folder of runs, or the nearest one above it: a run makes those that are missing."""
    there = next(folder for folder in (runs, *runs.parents) if os.path.exists(folder))
    free, writable = shutil.disk_usage(there).free, there.is_dir() and os.access(there, os.W_OK)
    enough = writable and free > GIB
    words = "" if writable else ", which cannot be written"
    remedy = "" if enough else "give runs a folder that may be written, with 1 GiB free: run.dir (--run-dir)"
    return Finding("disk", enough, f"{free / GIB:.0f} GiB free in {there}{words}", remedy)


def _blas() -> Finding:
    libraries = [i for i in threadpool_info() if i["user_api"] == "blas"]
    seen = blas_names(libraries) or "none that threads can be set for"
    if _has_avx512() and any(str(i.get("architecture")).lower() in AVX2_KERNELS for i in libraries):
        idle = "AVX-512 lies idle, matrix products could be twice as fast"
        return Finding("BLAS", True, seen, f"unset OPENBLAS_CORETYPE, or use a newer NumPy: {idle}")
    remedy = "" if libraries else "install a NumPy with OpenBLAS or MKL (pip's has OpenBLAS)"
    return Finding("BLAS", bool(libraries), seen, remedy)


def _has_avx512(cpu: Path = Path("/proc/cpuinfo")) -> bool:
    """Return True if the processor has what OpenBLAS's kernels for it need; False where that is unknown."""
    try:
        flags = next(line for line in cpu.read_text(encoding="utf-8").splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        return False
    return {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"} <= set(flags.split())


def _gpu() -> Finding:
    """Check the GPU. A machine without one is as good."""
    try:
        backend("gpu")
    except ClusterError as error:
        reason = error.reason.replace(" on this worker", "")
        to_use = f" (to use one: {error.remedy.removesuffix(' there')})" if "CuPy" in reason else ""
        return Finding("GPU", True, f"none is used here: {reason}{to_use}")
    gpu = device_profile("gpu", 1)
    return Finding("GPU", True, f"{gpu.name}, {gpu.memory / GIB:.0f} GiB")


def _dashboard() -> Finding:
    """Check the packages of Dask's dashboard. Jobs run without it."""
    missing = [package for package in DASHBOARD if version_of(package) == MISSING]
    if not missing:
        return Finding(
            "dashboard", True, "a scheduler started here has it (/status, /metrics), by default on port 8787"
        )
    pages = ", ".join(DASHBOARD[package] for package in missing)
    return Finding("dashboard", True, f"a scheduler started here has no {pages}", installing("dashboard"))
