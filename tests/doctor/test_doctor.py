"""Every finding of the doctor that is bad says what to do."""

from __future__ import annotations

import re
import shutil
from collections import namedtuple
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from daskcnn.cli import main
from daskcnn.cluster.link.calls import ask_scheduler, ask_workers
from daskcnn.cluster.link.leases import Hold
from daskcnn.cluster.link.members import Member
from daskcnn.cluster.run import admission
from daskcnn.cluster.run.admission import PACKAGES
from daskcnn.compiled import loop, warm
from daskcnn.doctor import cluster as doctor_cluster
from daskcnn.doctor import examine as doctor
from daskcnn.doctor.cluster import Wanted, clocks, links, sharing, worker_findings
from daskcnn.doctor.examine import asked_for, compile_loops, examine, memory_of_group
from daskcnn.doctor.findings import GIB, Finding, readable_findings, would_start
from daskcnn.doctor.worker import Gpu, Seen, Way, look, rounds
from daskcnn.errors import ClusterError, JobError, installing
from daskcnn.job.tables import Workers
from tests.fake_client import fake_client

HAS_AVX512 = doctor._has_avx512

Memory = namedtuple("Memory", "available total")
Usage = namedtuple("Usage", "free")


@pytest.fixture(autouse=True)
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with room, whatever the tests run on."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(8 << 30, 16 << 30))
    monkeypatch.setattr(doctor, "memory_limit", lambda: 16 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(50 << 30))
    monkeypatch.setattr(doctor, "_has_avx512", lambda: False)
    monkeypatch.setattr(warm, "is_ready", lambda _: True)


def finding(check: str, scheduler: str | None = None) -> Finding:
    (found,) = [f for f in examine(scheduler, None, 1.0, Wanted()) if f.check == check]
    return found


def test_a_healthy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda _: "3.9")
    findings = examine(None, None, 1.0, Wanted())
    checks = ["packages", "processor", "BLAS", "compiled loops", "memory", "GPU", "disk", "dashboard"]
    assert [f.check for f in findings] == checks
    assert [f for f in findings if not f.ok or f.remedy] == []


@pytest.mark.parametrize(
    ("check", "patch", "remedy"),
    [
        ("disk", lambda m: m.setattr(shutil, "disk_usage", lambda _: Usage(1 << 20)), "--run-dir"),
        ("disk", lambda m: m.setattr("os.access", lambda *_: False), "--run-dir"),
        ("BLAS", lambda m: m.setattr(doctor, "threadpool_info", list), "OpenBLAS"),
        ("packages", lambda m: m.setattr(doctor, "versions", lambda: dict.fromkeys(PACKAGES, "missing")), "pip"),
    ],
)
def test_what_a_machine_lacks_comes_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, check: str, patch: Callable[[Any], None], remedy: str
) -> None:
    patch(monkeypatch)
    found = finding(check)
    assert not found.ok
    assert remedy in found.remedy
    assert f"NO  {check}" in readable_findings([found])


def test_the_folder_of_runs_is_looked_at_where_it_is_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, _: path == tmp_path)
    monkeypatch.chdir("/")

    def disk(*options: str) -> str:
        told = CliRunner().invoke(main, ["doctor", *options])
        return next(line for line in told.stdout.splitlines() if re.match(r"\S+ +disk ", line))

    assert disk().startswith("NO")
    assert disk().endswith("50 GiB free in /, which cannot be written")
    good = disk("--run-dir", str(tmp_path / "not" / "made-yet"))
    assert (good.startswith("ok"), good.endswith(f"50 GiB free in {tmp_path}")) == (True, True)


@pytest.mark.parametrize(
    ("free", "limit", "used", "scheduler", "remedy"),
    [
        (8, 16, 0, False, ""),
        (1, 16, 0, False, "a worker wants 2 GiB"),
        (1.5, 16, 0, True, ""),
        (0.5, 16, 0, True, "a job beside its workers wants 1 GiB"),
        (8, 4, 3, False, "a worker wants 2 GiB"),
        (8, 4, 1, False, ""),
    ],
)
def test_little_memory_is_told_and_stops_no_job(
    monkeypatch: pytest.MonkeyPatch, free: float, limit: float, used: float, scheduler: bool, remedy: str
) -> None:
    def unreachable(_: object) -> None:
        raise ClusterError("scheduler", "no answer", "start one")

    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(int(free * GIB), 16 * GIB))
    monkeypatch.setattr(doctor, "memory_limit", lambda: int(limit * GIB))
    monkeypatch.setattr(doctor, "memory_of_group", lambda: int(used * GIB))
    monkeypatch.setattr(doctor, "connect", unreachable)
    found = finding("memory", "tcp://10.0.0.1:8786" if scheduler else None)
    assert (found.ok, remedy in found.remedy, bool(found.remedy)) == (True, True, bool(remedy))
    assert found.seen.endswith(f"of {limit:.1f} GiB free")


@pytest.mark.parametrize(
    ("used", "stat", "idle"),
    [
        ("memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ],
)
def test_files_that_a_control_group_can_do_without_are_free(tmp_path: Path, used: str, stat: str, idle: str) -> None:
    assert memory_of_group(tmp_path) == 0
    (tmp_path / "memory").mkdir()
    (tmp_path / used).write_text("5000\n", encoding="ascii")
    (tmp_path / stat).write_text(f"anon 1000\n{idle} 3000\n", encoding="ascii")
    assert memory_of_group(tmp_path) == 2000


def test_compiling_says_so_before_the_first_loop_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[str]()

    def in_processes(dtype: str, say: Any, processes: int) -> int:
        assert "the longest come first" in told[0]
        say(1, 2)
        return 1

    monkeypatch.setattr(warm, "is_ready", lambda _: False)
    monkeypatch.setattr(warm, "warm_in_processes", in_processes)
    compile_loops(told.append)
    assert told[1:] == ["compiled loop 1 of 2", "compiled 1 loops anew"]


def test_nothing_is_compiled_ahead_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[str]()
    monkeypatch.setattr(loop, "UNCACHED", True)
    compile_loops(told.append)
    assert len(told) == 1
    assert f"{loop.cache_path()} cannot be written" in told[0]


def test_loops_to_compile_are_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "is_ready", lambda _: False)
    assert finding("compiled loops").ok
    assert "doctor --warm" in finding("compiled loops").remedy
    monkeypatch.setattr(loop, "UNCACHED", True)
    assert finding("compiled loops").ok
    assert "DASKCNN_CACHE_DIR" in finding("compiled loops").remedy


@pytest.mark.parametrize(("missing", "page"), [("bokeh", "/status"), ("prometheus-client", "/metrics")])
def test_a_dashboard_that_is_missing_stops_no_job(monkeypatch: pytest.MonkeyPatch, missing: str, page: str) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda package: "missing" if package == missing else "3.9")
    found = finding("dashboard")
    assert found.ok
    assert page in found.seen
    assert found.remedy == installing("dashboard")


def test_idle_vector_units_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def member(name: str, kind: Any = "cpu", **other: Any) -> Member:
    facts: dict[str, Any] = {
        "address": f"tcp://10.0.0.2:{name}",
        "host": "10.0.0.2",
        "threads": 4,
        "memory_limit": 8 * GIB,
    }
    return Member(name, **(facts | {"kind": kind} | other))


GPU = Gpu("H200", "desk 0000:3B:00.0", 139 * GIB, 130 * GIB, "driver 580.1, up to CUDA 13.0")
SEEN = Seen(cores=4, memory=16 * GIB, blas="openblas 0.3", blas_threads=1, got_cores=3.9)


def judged(m: Member, seen: Seen | None = SEEN, info: dict[str, Any] | None = None, **data: Any) -> list[Finding]:
    return list(worker_findings(m, info or {"status": "running"}, seen, data.get("data"), data.get("expected")))


@pytest.mark.parametrize(
    ("m", "seen"),
    [
        (member("a"), SEEN),
        (member("g", "gpu", threads=1), replace(SEEN, gpu=GPU, got_cores=0.9)),
        (member("s", "ps", threads=1, memory_limit=GIB), replace(SEEN, got_cores=0.9)),
    ],
)
def test_a_fit_worker_is_one_line(m: Member, seen: Seen) -> None:
    (found,) = judged(m, seen)
    assert (found.ok, found.remedy, found.mark) == (True, "", "ok")
    assert f"{m.kind} at {m.address}" in found.seen
    assert ("H200" in found.seen) == (m.kind == "gpu")
    assert f"(got {seen.got_cores})" in found.seen


def test_a_worker_that_answers_is_fit_though_it_was_starting_when_it_was_listed() -> None:
    (found,) = judged(member("a"), info={"status": "init"})
    assert (found.ok, found.remedy) == (True, "")


@pytest.mark.parametrize(
    ("m", "seen", "info", "ok", "said", "remedy"),
    [
        (member("a"), None, {}, False, "does not answer", "start it again"),
        (member("a"), SEEN, {"status": "paused"}, False, "is paused", "--memory-limit"),
        (member("a", threads=8), SEEN, {}, True, "8 threads, but 4 cores", "--nthreads 4"),
        (
            member("a"),
            replace(SEEN, got_cores=1.9),
            {},
            True,
            "its 4 threads got 1.9 cores",
            "other programs or workers of its machine, raise a limit on its processor time, or lower --nthreads",
        ),
        (member("a", threads=1), replace(SEEN, got_cores=0.6), {}, True, "its 1 thread got 0.6 cores", "stop other"),
        (member("a"), replace(SEEN, blas_threads=4), {}, True, "BLAS takes 4 threads", "OPENBLAS_NUM_THREADS=1"),
        (member("a", memory_limit=0), SEEN, {}, True, "no memory limit", "--memory-limit 4GiB"),
        (member("a", memory_limit=32 * GIB), SEEN, {}, True, "32.0 GiB, but 16.0 GiB", "--memory-limit 15.2GiB"),
        (member("a", memory_limit=GIB), SEEN, {}, True, "a memory limit of 1.0 GiB", "2GiB or more"),
        (member("a"), replace(SEEN, device_problem="no CuPy"), {}, True, "no CuPy", "leaves it out"),
        (
            member("g", "gpu", threads=1),
            replace(SEEN, gpu=replace(GPU, problem="CompileException: read-only")),
            {},
            False,
            "CompileException: read-only",
            "CUPY_CACHE_DIR",
        ),
        (member("a"), replace(SEEN, data_problem="/d: no data set here"), {}, False, "no data set", "every worker"),
        (member("a"), replace(SEEN, fingerprint="feed" * 8), {}, False, "another data set (feedfeedfeed)", "copy"),
    ],
)
def test_what_a_worker_lacks_comes_with_a_remedy(
    m: Member, seen: Seen | None, info: dict[str, Any], ok: bool, said: str, remedy: str
) -> None:
    (found,) = [f for f in judged(m, seen, info, data="/d", expected="beef" * 8) if f.remedy]
    assert (found.check, found.ok) == (f"worker {m.name}", ok)
    assert said in found.seen
    assert remedy in found.remedy
    assert found.mark == ("!" if ok else "NO")


def test_workers_of_one_machine_that_want_more_than_it_has() -> None:
    assert list(sharing([member("a", threads=3), member("g", "gpu", threads=1)], {"a": SEEN, "g": SEEN})) == []
    found = {f.check: f for f in sharing([member("a"), member("b", memory_limit=9 * GIB)], {"a": SEEN, "b": SEEN})}
    assert list(found) == ["host 10.0.0.2"]
    many = list(sharing([member("a"), member("b", memory_limit=9 * GIB)], {"a": SEEN, "b": SEEN}))
    assert "8 threads" in many[0].seen
    assert many[1].seen == "its workers' memory limits add up to 17.0 GiB, and it has 16.0 GiB of memory"
    apart = [member("a"), member("b", host="10.0.0.3")]
    assert list(sharing(apart, {"a": SEEN, "b": SEEN})) == []
    two = [member("g", "gpu", threads=1), member("h", "gpu", threads=1, host="10.0.0.2b")]
    with_gpu = replace(SEEN, gpu=GPU)
    (found_gpu,) = sharing(two, {"g": with_gpu, "h": with_gpu})
    assert "g, h compute on one GPU" in found_gpu.seen
    assert "CUDA_VISIBLE_DEVICES" in found_gpu.remedy


def test_clocks() -> None:
    (fine,) = clocks({"a": (0.01, 0.002), "b": (-3.0, 5.0)})  # b's may be the measurement's own error
    assert fine.mark == "ok"
    (off,) = clocks({"a": (0.01, 0.002), "b": (-3.0, 0.01)})
    assert (off.mark, off.ok) == ("!", True)
    assert "b -3.0 s" in off.seen
    assert "chrony" in off.remedy
    assert list(clocks({})) == []


def test_links() -> None:
    fast, slow = Way("a", "b", 1e9, 1e-4), Way("b", "a", 5e6, 3e-3)
    assert links([fast, fast]).mark == "ok"
    found = links([fast, slow])
    assert (found.mark, "slowest b → a 5 MB/s" in found.seen, "at most 3.0 ms" in found.seen) == ("!", True, True)
    assert found.facts["ways"][1]["bandwidth"] == 5e6
    some = links([fast, fast], unmeasured=2)
    assert (some.mark, some.seen.endswith("a message; 2 workers that runs have: not measured")) == ("ok", True)
    none = links([], unmeasured=1)
    assert (none.mark, none.seen) == ("ok", "1 worker that runs have: not measured")
    broken = links([fast, Way("b", "a", problem="timed out")])
    assert (broken.mark, "b → a: timed out" in broken.seen, "--worker-port" in broken.remedy) == ("NO", True, True)
    assert links([fast, Way("b", "a", problem="timed out")], spare={"b"}).mark == "!"
    busy = links([fast, Way("c", "", problem="did not begin a task within 15 s; is it busy?")])
    assert (busy.mark, "c: did not begin" in busy.seen, "--worker-port" in busy.remedy) == ("NO", True, False)


@pytest.mark.parametrize("count", range(2, 8))
def test_every_pair_is_measured_and_nobody_twice_at_a_time(count: int) -> None:
    members = [member(f"w{i}") for i in range(count)]
    seen = []
    for pairs in rounds(members):
        names = [m.name for pair in pairs for m in pair]
        assert len(names) == len(set(names))
        seen += [frozenset((a.name, b.name)) for a, b in pairs]
    assert len(seen) == len(set(seen)) == count * (count - 1) // 2


def test_a_worker_looks_at_itself(path: str) -> None:
    seen = look("cpu", 1, path)
    assert seen.cores >= 1
    assert seen.memory > 0
    assert seen.blas_threads == 1
    assert 0 < seen.got_cores < 2
    assert seen.fingerprint
    assert not seen.data_problem
    assert "no data set here" in look("cpu", 1, path + "x").data_problem
    assert look("ps", 1, path).fingerprint is None


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Finding]]:
    """What is found in a cluster of workers that advertise this; `seen` speaks of all, or of each by name."""

    def of(
        workers: dict[str, dict[str, float]],
        wanted: Wanted | None = None,
        seen: Seen | dict[str, Seen] = SEEN,
        change: Callable[[dict[str, str]], Any] = lambda v: v,
        hang: Collection[str] = (),
        begin: Callable[[Any], None] = lambda client: None,
    ) -> list[Finding]:
        def by_name(m: Member) -> Seen:
            return seen[m.name] if isinstance(seen, dict) else seen

        common = {"host": "10.0.0.2", "nthreads": 1, "memory_limit": 4 << 30}
        found = {
            f"tcp://10.0.0.2:{4000 + i}": {"name": name, "resources": resources, **common}
            for i, (name, resources) in enumerate(workers.items())
        }
        monkeypatch.setattr(doctor_cluster, "present", lambda client: found)
        monkeypatch.setattr(
            doctor_cluster, "_look", lambda client, members, data: {m.name: by_name(m) for m in members}
        )
        monkeypatch.setattr(doctor_cluster, "clock_offsets", lambda client, members: {})
        monkeypatch.setattr(doctor_cluster, "measure_ways", lambda client, members: [Way("a", "b", 1e9, 1e-4)])
        silent = {a for a, info in found.items() if info["name"] in hang} | ({"scheduler"} & set(hang))
        with fake_client(found, hang=silent, change=change) as client:
            begin(client)
            return list(doctor_cluster.examine_cluster(client, wanted or Wanted()))

    return of


def of(findings: list[Finding], check: str) -> Finding:
    (found,) = [f for f in findings if f.check == check]
    return found


def test_a_healthy_cluster(cluster: Callable[..., list[Finding]]) -> None:
    findings = cluster({"a": {"CPU": 1}, "b": {"GPU": 1}, "s": {"PS": 1}})
    assert would_start(findings)
    assert [f.check for f in findings] == [
        *("scheduler", "workers", "parameter server"),
        *("worker a", "worker b", "worker s"),
        "links",
    ]
    assert findings[1].seen == "1 cpu, 1 gpu, 1 ps"


def test_workers_of_runs_are_named_and_a_job_would_wait_for_them(cluster: Callable[..., list[Finding]]) -> None:
    def begin(client: Any) -> None:
        hold = Hold(client, "2026-bsp")
        hold.take(["tcp://10.0.0.2:4000"])
        hold.serve(["tcp://10.0.0.2:4002"], 0)

    workers: dict[str, dict[str, float]] = {"a": {"CPU": 1}, "b": {"CPU": 1}, "s": {"PS": 1}}
    findings = cluster(workers, Wanted(Workers(cpu=2)), begin=begin)
    assert would_start(findings)
    found = of(findings, "in use")
    assert re.fullmatch(r"run 2026-bsp \(.+\) has a, s for its server since \d\d:\d\d:\d\d", found.seen)
    assert found.facts["workers"]["tcp://10.0.0.2:4000"] == {"name": "a", "serves": False}
    assert of(findings, "workers").seen == "2 cpu, 0 gpu, 1 ps; 1 cpu too few are free"
    assert "cluster.wait" in of(findings, "workers").remedy
    assert readable_findings(findings).endswith("a job would wait for workers (see the remedy of workers)")
    assert of(cluster(workers, Wanted(Workers(cpu=1)), begin=begin), "workers").remedy == ""


def test_a_worker_that_a_run_has_is_not_measured_and_stops_no_job(cluster: Callable[..., list[Finding]]) -> None:
    blind = replace(SEEN, data_problem="/d: no data set here")
    workers: dict[str, dict[str, float]] = {"a": {"CPU": 1}, "b": {"CPU": 1}, "c": {"CPU": 1}, "s": {"PS": 1}}
    seen = {"a": blind, "b": SEEN, "c": SEEN, "s": SEEN}

    def held(client: Any) -> None:
        Hold(client, "2026-bsp").take(["tcp://10.0.0.2:4000"])

    findings = cluster(workers, Wanted(Workers(cpu=2)), seen, begin=held)
    assert would_start(findings)
    found = of(findings, "worker a")
    assert (found.mark, found.seen) == ("!", "/d: no data set here; a job would not take it now")
    assert of(findings, "links").seen.endswith("1 worker that runs have: not measured")
    assert not would_start(cluster(workers, Wanted(Workers(cpu=3)), seen, begin=held)), "it would wait for that one"
    surplus = cluster(workers, Wanted(Workers(cpu=2)), {**seen, "a": SEEN, "c": blind})
    assert of(surplus, "worker c").mark == "!"
    assert not would_start(cluster(workers, Wanted(Workers(cpu=2)), seen)), "a job would take it"


def test_a_cluster_without_usable_workers(cluster: Callable[..., list[Finding]]) -> None:
    findings = cluster({"s": {"PS": 1}})
    assert not would_start(findings)
    assert "dask worker tcp://10.0.0.1:8786 --nthreads 1 --resources CPU=1" in of(findings, "workers").remedy


def test_workers_that_advertise_nothing(cluster: Callable[..., list[Finding]]) -> None:
    findings = cluster({"a": {}, "b": {"MEMORY": 1}})
    assert would_start(findings)
    assert of(findings, "workers").seen == "2 cpu, 0 gpu, 0 ps"
    found = of(findings, "resources")
    assert found.seen == "no worker advertises CPU or GPU: 2 workers are taken as CPU workers"
    assert "--resources CPU=1" in found.remedy
    left_alone = cluster({"a": {}, "b": {"CPU": 1}})
    assert of(left_alone, "workers").seen == "1 cpu, 0 gpu, 0 ps"
    assert of(left_alone, "worker a").mark == "!"


def test_what_a_job_asks_for_is_missing(cluster: Callable[..., list[Finding]]) -> None:
    assert would_start(cluster({"a": {"CPU": 1}, "b": {"CPU": 1}}, Wanted(Workers(cpu=2))))
    found = of(cluster({"a": {"CPU": 1}}, Wanted(Workers(cpu=2, gpu=1))), "workers")
    assert not found.ok
    assert "a job needs 1 more cpu, 1 more gpu" in found.seen
    assert "--resources GPU=1" in found.remedy


def test_a_gpu_that_does_not_work_does_not_count(cluster: Callable[..., list[Finding]]) -> None:
    useless = replace(SEEN, device_problem="device gpu: CuPy is not installed")
    findings = cluster({"g": {"GPU": 1}}, Wanted(Workers(gpu=1)), useless)
    assert not would_start(findings)
    found = of(findings, "workers")
    assert found.seen == "0 cpu, 1 gpu, 0 ps; 1 gpu, of which none can be used: see worker g"
    assert "no worker would be left" in found.remedy


def test_a_job_starts_without_the_gpu_that_does_not_work(cluster: Callable[..., list[Finding]]) -> None:
    useless = replace(SEEN, device_problem="device gpu: CuPy is not installed")
    workers = {"a": {"CPU": 1}, "g": {"GPU": 1}, "s": {"PS": 1}}
    findings = cluster(workers, Wanted(Workers(cpu=1, gpu=1)), {"a": SEEN, "g": useless, "s": SEEN})
    assert would_start(findings)
    found = of(findings, "workers")
    assert (found.mark, found.seen) == ("!", "1 cpu, 1 gpu, 1 ps; 1 gpu, of which none can be used: see worker g")
    assert "leaves out" in found.remedy
    assert "dask worker" not in found.remedy, "another one is not what is missing"
    two = workers | {"h": {"GPU": 1}}
    found = of(cluster(two, None, {"a": SEEN, "g": SEEN, "h": useless, "s": SEEN}), "workers")
    assert found.seen.endswith("2 gpu, of which 1 can be used: see worker h")
    not_asked_for = cluster(workers, Wanted(Workers(cpu=1)), {"a": SEEN, "g": useless, "s": SEEN})
    assert of(not_asked_for, "workers").mark == "ok"


def test_a_worker_of_two_kinds(cluster: Callable[..., list[Finding]]) -> None:
    findings = cluster({"a": {"CPU": 1, "GPU": 1}})
    assert would_start(findings), "a job takes it for what it counts as, with a warning"
    (found,) = [f for f in findings if f.check == "worker a" and f.mark == "!"]
    assert found.seen == "at tcp://10.0.0.2:4000, advertises CPU and GPU: it counts as cpu"
    assert found.remedy == "restart it with one of them"
    assert not would_start(cluster({"a": {"CPU": 1, "GPU": 1}}, Wanted(Workers(gpu=1))))


def test_a_worker_of_other_versions(cluster: Callable[..., list[Finding]]) -> None:
    found = of(cluster({"a": {"CPU": 1}}, change=lambda versions: versions | {"numpy": "1.0"}), "worker a")
    assert not found.ok
    assert "numpy 1.0" in found.seen
    assert found.remedy == "install the same versions there"
    assert found.remedy not in found.seen


def test_a_worker_that_hangs_is_a_finding_and_the_others_are_looked_at(
    cluster: Callable[..., list[Finding]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_cluster, "ask_workers", partial(ask_workers, within=1.5))
    workers = {"a": {"CPU": 1}, "b": {"CPU": 1}, "c": {"CPU": 1}}
    findings = cluster(workers, Wanted(Workers(cpu=2)), hang=["b"])
    found = of(findings, "worker b")
    assert (found.mark, "does not answer" in found.seen, "leaves it out" in found.remedy) == ("!", True, True)
    assert (of(findings, "worker a").mark, of(findings, "worker c").mark) == ("ok", "ok")
    assert (would_start(findings), of(findings, "workers").seen) == (True, "2 cpu, 0 gpu, 0 ps")
    short = cluster(workers, Wanted(Workers(cpu=3)), hang=["b"])
    assert "a job needs 1 more cpu" in of(short, "workers").seen
    assert not would_start(short)


def test_a_scheduler_that_hangs_is_a_finding(
    cluster: Callable[..., list[Finding]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "ask_scheduler", partial(ask_scheduler, within=0.2))
    monkeypatch.setattr(doctor_cluster, "ANSWER", 0.2)
    found = of(cluster({"a": {"CPU": 1}}, hang=["scheduler"]), "scheduler")
    assert (found.ok, "no answer within 0.2 s" in found.seen) == (False, True)
    assert found.remedy


def test_a_worker_without_the_package(cluster: Callable[..., list[Finding]]) -> None:
    found = of(cluster({"a": {"CPU": 1}}, change=lambda versions: versions | {"daskcnn": "missing"}), "worker a")
    assert "does not have daskcnn" in found.seen


def test_a_driver_that_has_the_package_by_its_path_alone(
    cluster: Callable[..., list[Finding]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "version_of", lambda _: admission.MISSING)
    found = of(cluster({"a": {"CPU": 1}}), "scheduler")
    assert (found.ok, "is not installed" in found.seen, "pip install" in found.remedy) == (False, True, True)


def test_a_data_set_that_is_not_there(cluster: Callable[..., list[Finding]]) -> None:
    found = of(cluster({"a": {"CPU": 1}}, Wanted(data="/no/such.zarr")), "data")
    assert not found.ok
    assert found.seen == "/no/such.zarr: no data set here"
    assert found.remedy.count("daskcnn data prepare") == found.remedy.count("--data") == 1


def test_a_worker_that_does_not_see_the_data_has_one_remedy(path: str) -> None:
    problem = look("cpu", 1, f"{path}x").data_problem
    (found,) = judged(member("a"), replace(SEEN, data_problem=problem), data=f"{path}x")
    assert found.seen.startswith(f"{path}x: no data set here")
    assert "prepare" not in found.seen
    assert "every worker" in found.remedy


def test_without_a_scheduler_the_data_set_is_looked_at_here(path: str) -> None:
    sound = CliRunner().invoke(main, ["doctor", "--data", path])
    assert re.search(r"^ok +data +" + re.escape(path), sound.stdout, re.MULTILINE)
    absent = CliRunner().invoke(main, ["doctor", "--data", f"{path}x"])
    assert absent.exit_code == 3
    assert re.search(r"^NO +data .*no data set here$", absent.stdout, re.MULTILINE)


def test_workers_want_a_scheduler() -> None:
    refused = CliRunner().invoke(main, ["doctor", "--workers", "cpu=2"])
    assert refused.exit_code == 2
    assert "give --scheduler" in refused.output


def test_a_machine_without_a_gpu_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(kind: str) -> None:
        raise ClusterError("device gpu", "CuPy is not installed on this worker", "pip install 'daskcnn[gpu]' there")

    monkeypatch.setattr(doctor, "backend", absent)
    found = finding("GPU")
    assert (found.mark, found.seen) == (
        "ok",
        "none is used here: CuPy is not installed (to use one: pip install 'daskcnn[gpu]')",
    )


def test_one_is_singular(cluster: Callable[..., list[Finding]]) -> None:
    assert ", 1 worker, " in of(cluster({"a": {"CPU": 1}}), "scheduler").seen
    assert ", 2 workers, " in of(cluster({"a": {"CPU": 1}, "b": {"CPU": 1}}), "scheduler").seen


def test_the_last_line_says_if_a_job_would_start_and_why_not(cluster: Callable[..., list[Finding]]) -> None:
    def last(*findings: Finding) -> str:
        return readable_findings(findings).splitlines()[-1]

    fine, better = Finding("memory", True, "8 GiB"), Finding("links", True, "slow", "use cables")
    assert last(fine) == "a job would start"
    assert last(fine, better) == "a job would start (see the remedy of links)"
    assert (
        last(*cluster({"s": {"PS": 1}}))
        == "a job would not start (workers: 0 cpu, 0 gpu, 1 ps; a job needs 1 more cpu)"
    )


def test_the_command_ends_with_that_line(path: str) -> None:
    told = CliRunner().invoke(main, ["doctor", "--data", f"{path}x"])
    assert told.stdout.splitlines()[-1].startswith("a job would not start (")
    assert f"data: {path}x: no data set here" in told.stdout.splitlines()[-1]


def test_no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(settings: Any) -> None:
        raise ClusterError("scheduler tcp://10.0.0.1:8786", "no answer", "start one")

    monkeypatch.setattr(doctor, "connect", connect)
    found = finding("scheduler", "tcp://10.0.0.1:8786")
    assert (found.ok, found.seen) == (False, "scheduler tcp://10.0.0.1:8786: no answer")
    assert found.remedy == "start one"


def test_what_is_asked_for_is_checked() -> None:
    assert asked_for("cpu=2,gpu=1", None) == Wanted(Workers(cpu=2, gpu=1))
    assert asked_for(None, "here.zarr").data == str(Path("here.zarr").absolute())
    with pytest.raises(JobError, match="write cpu=2"):
        asked_for("cpu=two", None)
