"""Every finding of the doctor that is bad says what to do."""

from __future__ import annotations

import shutil
from collections import namedtuple
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from daskcnn.errors import ClusterError
from daskcnn.launch import doctor
from daskcnn.launch.doctor import Finding, examine, readable_findings

HAS_AVX512 = doctor._has_avx512

Memory = namedtuple("Memory", "available total")
Usage = namedtuple("Usage", "free")


@pytest.fixture(autouse=True)
def healthy(monkeypatch: pytest.MonkeyPatch):
    """A machine with room, whatever the tests run on."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(8 << 30, 16 << 30))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(50 << 30))
    monkeypatch.setattr(doctor, "_has_avx512", lambda: False)


def finding(check: str, *args: Any) -> Finding:
    (found,) = [f for f in examine(*(args or (None, None, 1.0))) if f.check == check]
    return found


def test_a_healthy_machine():
    findings = examine(None, None, 1.0)
    assert [f.check for f in findings] == ["packages", "processor", "BLAS", "memory", "GPU", "disk"]
    assert [f for f in findings if not f.ok or f.remedy] == []


@pytest.mark.parametrize(
    ("check", "patch", "remedy"),
    [
        ("memory", lambda m: m.setattr(psutil, "virtual_memory", lambda: Memory(1 << 30, 16 << 30)), "2 GiB"),
        ("disk", lambda m: m.setattr(shutil, "disk_usage", lambda _: Usage(1 << 20)), "run.dir"),
        ("disk", lambda m: m.setattr("os.access", lambda *_: False), "run.dir"),
        ("BLAS", lambda m: m.setattr(doctor, "threadpool_info", list), "OpenBLAS"),
        ("packages", lambda m: m.setattr(doctor, "versions", lambda: dict.fromkeys(doctor.PACKAGES, "missing")), "pip"),
    ],
)
def test_what_a_machine_lacks_comes_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, check: str, patch: Callable[[Any], None], remedy: str
):
    patch(monkeypatch)
    found = finding(check)
    assert not found.ok
    assert remedy in found.remedy
    assert f"NO  {check}" in readable_findings([found])


def test_idle_vector_units_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(doctor, "_has_avx512", lambda: True)
    blas = {"user_api": "blas", "internal_api": "openblas", "version": "0.3", "architecture": "Haswell"}
    monkeypatch.setattr(doctor, "threadpool_info", lambda: [blas])
    assert "OPENBLAS_CORETYPE" in finding("BLAS").remedy
    monkeypatch.setattr(doctor, "threadpool_info", lambda: [blas | {"architecture": "SkylakeX"}])
    assert finding("BLAS").remedy == ""
    cpu = tmp_path / "cpuinfo"
    assert not HAS_AVX512(cpu)
    for flags, has in (("avx2 avx512f", False), ("avx512f avx512cd avx512bw avx512dq avx512vl", True)):
        cpu.write_text(f"processor : 0\nflags\t\t: fpu {flags}\n")
        assert HAS_AVX512(cpu) == has


class StandInClient:
    """A scheduler whose workers report versions that `change` makes of ours."""

    def __init__(self, change: Callable[[dict[str, str]], Any]) -> None:
        self.scheduler = namedtuple("Scheduler", "address")("tcp://10.0.0.1:8786")
        self._change = change

    def run(self, function: Callable[..., Any], *devices: str, workers: list[str]) -> dict[str, Any]:
        """Versions, or, where a device is asked for, that it is fine."""
        return {address: None if devices else self._change(function()) for address in workers}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def is_there(workers: dict[str, dict[str, float]], change: Callable[[dict[str, str]], Any] = lambda v: v) -> None:
        @contextmanager
        def connect(settings: Any):
            assert settings.scheduler == "tcp://10.0.0.1:8786"
            yield StandInClient(change)

        common = {"host": "10.0.0.2", "nthreads": 1, "memory_limit": 4 << 30}
        found = {
            f"tcp://10.0.0.2:{4000 + i}": {"name": name, "resources": resources, **common}
            for i, (name, resources) in enumerate(workers.items())
        }
        monkeypatch.setattr(doctor, "present", lambda client: found)
        monkeypatch.setattr(doctor, "connect", connect)

    return is_there


SCHEDULER = ("tcp://10.0.0.1:8786", None, 1.0)


def test_a_healthy_cluster(cluster: Callable[..., None]):
    cluster({"a": {"CPU": 1}, "b": {"GPU": 1}, "s": {"PS": 1}})
    findings = examine(*SCHEDULER)[6:]
    assert [f for f in findings if not f.ok] == []
    assert [f.check for f in findings] == [
        *("scheduler", "workers", "parameter server"),
        *("worker a", "worker b", "worker s"),
    ]
    assert findings[1].seen == "1 cpu, 1 gpu, 1 ps"


def test_a_cluster_without_usable_workers(cluster: Callable[..., None]):
    cluster({"a": {}, "s": {"PS": 1}})
    found = finding("workers", *SCHEDULER)
    assert not found.ok
    assert "dask worker tcp://10.0.0.1:8786 --nthreads 1 --resources CPU=1" in found.remedy


def test_a_worker_of_other_versions(cluster: Callable[..., None]):
    cluster({"a": {"CPU": 1}}, lambda versions: versions | {"numpy": "1.0"})
    found = finding("worker a", *SCHEDULER)
    assert not found.ok
    assert "numpy 1.0" in found.seen
    assert "same packages" in found.remedy


def test_a_worker_without_the_package(cluster: Callable[..., None]):
    cluster({"a": {"CPU": 1}}, lambda versions: versions | {"daskcnn": "missing"})
    assert "does not have daskcnn" in finding("worker a", *SCHEDULER).seen


def test_no_scheduler(monkeypatch: pytest.MonkeyPatch):
    def connect(settings: Any):
        raise ClusterError("scheduler tcp://10.0.0.1:8786: no answer")

    monkeypatch.setattr(doctor, "connect", connect)
    found = finding("scheduler", *SCHEDULER)
    assert (found.ok, found.seen) == (False, "scheduler tcp://10.0.0.1:8786: no answer")
    assert found.remedy
