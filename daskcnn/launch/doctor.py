"""`daskcnn doctor`: what a job needs of this machine and of a cluster, with a remedy for whatever is missing."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from distributed import Client
from threadpoolctl import threadpool_info

from daskcnn.arrays import backend, cpu_count, device_profile
from daskcnn.cluster.connect import connect
from daskcnn.cluster.members import Member, advertised, present
from daskcnn.cluster.start import PACKAGES, check_versions, versions
from daskcnn.cluster.worker import device_problem
from daskcnn.config import Cluster
from daskcnn.errors import ClusterError

GIB = 1 << 30
AVX2_KERNELS = frozenset({"haswell", "zen"})
"""OpenBLAS's names for them: they compute half as much at a time as AVX-512 allows."""


@dataclass(frozen=True)
class Finding:
    """One thing looked at: whether it will do, what was seen, and what to do where it will not."""

    check: str
    ok: bool
    seen: str
    remedy: str = ""


def examine(scheduler: str | None, scheduler_file: str | None, wait: float) -> list[Finding]:
    """Look at this machine, and at a cluster where one is named."""
    findings = list(_this_machine())
    if scheduler or scheduler_file:
        settings = Cluster(scheduler=scheduler, scheduler_file=scheduler_file, wait=wait)
        try:
            with connect(settings) as client:
                findings += _cluster(client)
        except ClusterError as error:
            findings.append(Finding("scheduler", False, str(error), "start it, or correct the address"))
    return findings


def _this_machine() -> Iterator[Finding]:
    found = versions()
    missing = [name for name in PACKAGES if found[name] == "missing"]
    remedy = f"pip install {' '.join(missing)}" if missing else ""
    yield Finding("packages", not missing, ", ".join(f"{n} {v}" for n, v in found.items()), remedy)
    cpu = device_profile("cpu", cpu_count())
    yield Finding("processor", True, f"{cpu.name}, {cpu.threads} cores for this process")
    yield _blas()
    memory = psutil.virtual_memory()
    enough = memory.available > 2 * GIB
    seen = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    yield Finding("memory", enough, seen, "" if enough else "close other programs: a worker wants 2 GiB")
    yield _gpu()
    yield _disk()


def _blas() -> Finding:
    libraries = [i for i in threadpool_info() if i["user_api"] == "blas"]
    names = [f"{i['internal_api']} {i.get('version') or ''} {i.get('architecture') or ''}".strip() for i in libraries]
    seen = ", ".join(names) or "none that threads can be set for"
    if _has_avx512() and any(str(i.get("architecture")).lower() in AVX2_KERNELS for i in libraries):
        remedy = (
            "unset OPENBLAS_CORETYPE, or use a newer NumPy: AVX-512 lies idle, matrix products could be twice as fast"
        )
        return Finding("BLAS", True, seen, remedy)
    remedy = "" if libraries else "install a NumPy with OpenBLAS or MKL (pip's has OpenBLAS)"
    return Finding("BLAS", bool(libraries), seen, remedy)


def _has_avx512(cpu: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor has what OpenBLAS's kernels for it need; false where nobody can tell."""
    try:
        flags = next(line for line in cpu.read_text(encoding="utf-8").splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        return False
    return {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"} <= set(flags.split())


def _gpu() -> Finding:
    """A machine without a GPU is as good: it is said, not held against it."""
    try:
        backend("gpu")
    except ClusterError as error:
        return Finding("GPU", True, str(error))
    gpu = device_profile("gpu", 1)
    return Finding("GPU", True, f"{gpu.name}, {gpu.memory / GIB:.0f} GiB")


def _disk() -> Finding:
    free = shutil.disk_usage(".").free
    writable = os.access(".", os.W_OK)
    remedy = "" if writable and free > GIB else "run where you may write and 1 GiB is free, or set run.dir"
    return Finding("disk", writable and free > GIB, f"{free / GIB:.0f} GiB free here", remedy)


def _cluster(client: Client) -> Iterator[Finding]:
    address = client.scheduler.address
    workers = present(client)
    yield Finding("scheduler", True, f"{address}, {len(workers)} workers")
    found = advertised(workers)
    usable = [m for m in found if m.kind != "ps"]
    command = f"dask worker {address} --nthreads 1 --resources"
    remedy = "" if usable else f"on each machine: {command} CPU=1"
    yield Finding("workers", bool(usable), _counts(found), remedy)
    ps = any(m.kind == "ps" for m in found)
    seen = "one is set apart" if ps else f"none is set apart: one that trains will hold it ({command} PS=1 starts one)"
    yield Finding("parameter server", True, seen)
    for member in found:
        yield _worker(client, member)


def _counts(found: list[Member]) -> str:
    return ", ".join(f"{sum(m.kind == kind for m in found)} {kind}" for kind in ("cpu", "gpu", "ps"))


def _worker(client: Client, member: Member) -> Finding:
    seen = f"{member.kind} at {member.address}, {member.threads} threads, {member.memory_limit / GIB:.1f} GiB"
    try:
        check_versions(client, [member])
        if problem := client.run(device_problem, member.kind, workers=[member.address])[member.address]:
            return Finding(f"worker {member.name}", False, problem, "a job would leave it out")
    except ClusterError as error:
        return Finding(
            f"worker {member.name}",
            False,
            str(error),
            f"install Python {sys.version_info[0]}.{sys.version_info[1]} and the same packages there",
        )
    return Finding(f"worker {member.name}", True, seen)


def readable_findings(findings: list[Finding]) -> str:
    """A line a finding, the remedy under it."""
    width = max(len(f.check) for f in findings)
    lines: list[str] = []
    for f in findings:
        lines.append(f"{'ok ' if f.ok else 'NO '} {f.check:<{width}}  {f.seen}")
        lines += [f"    {'':<{width}}  → {f.remedy}"] if f.remedy else []
    return "\n".join(lines)
