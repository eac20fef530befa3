"""A cluster of `dask scheduler` and `dask worker`, started as a user would, with jobs of their own processes."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner
from distributed import Client

from daskcnn.cli import main as daskcnn
from daskcnn.run import main as run_command
from tests.cluster.by_hand import (
    DASK,
    daskcnn_run,
    finish,
    hand_made_cluster,
    job_file,
    process,
    scheduler,
    wait_for,
    wait_for_checkpoint,
    wait_for_line,
    worker,
)
from tests.cluster.cluster_jobs import LAYERS
from tests.own_module import NAME as MODULE
from tests.own_module import forgotten, write_module

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The scheduler's file of a cluster: two workers, one that says it has a GPU, one for the server, and one that says
    nothing.
    """
    resources = ["CPU=1", "CPU=1", "GPU=1", "PS=1", ""]
    with hand_made_cluster(tmp_path_factory.mktemp("by-hand"), resources) as (file, _):
        wait_for(Path(file))
        with Client(scheduler_file=file) as client:
            client.wait_for_workers(len(resources), timeout=100)
        yield file


def test_two_workers_by_hand_train_a_job(tmp_path: Path, synthetic: str, by_hand: str) -> None:
    job = job_file(tmp_path, synthetic)
    done = finish(daskcnn_run(job, "--scheduler-file", by_hand, "--workers", "cpu=2", "--json"))
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["status"] == "done"
    assert [w["name"] for w in summary["workers"]] == ["cpu-0", "cpu-1"]
    assert Path(summary["checkpoint"]).is_dir()


def test_members_of_ones_own_train_and_predict_on_processes_that_cannot_find_their_module(
    tmp_path: Path, synthetic: str, by_hand: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [{"layer": "slope"} if layer["layer"] == "relu" else layer for layer in LAYERS]
    train = {"strategy": "median", "partition": "gentle", "epochs": 1}
    job = job_file(tmp_path, synthetic, model={"layers": layers}, train=train)
    write_module(tmp_path)  # beside the job file, where neither scheduler nor workers look
    there = ["--scheduler-file", by_hand, "--workers", "cpu=2"]
    with forgotten():
        done = CliRunner().invoke(run_command, [job, *there, "--import", MODULE, "--json"])
        assert done.exit_code == 0, done.stderr
    run, table = json.loads(done.stdout)["run"], tmp_path / "predictions.csv"
    monkeypatch.chdir(tmp_path)
    with forgotten():
        done = CliRunner().invoke(daskcnn, ["predict", run, synthetic, "--out", str(table), *there])
        assert done.exit_code == 0, done.stderr
    assert len(table.read_text().splitlines()) > 900

    write_module(tmp_path, "import a_module_that_nobody_has\n", "needs_another")
    monkeypatch.setitem(sys.modules, "a_module_that_nobody_has", ModuleType("a_module_that_nobody_has"))
    with forgotten("needs_another"):
        refused = CliRunner().invoke(run_command, [job, *there, "--import", MODULE, "--import", "needs_another"])
    assert refused.exit_code == 3
    assert re.search(
        r"worker \S+ \(tcp://\S+\): module needs_another: it imports a_module_that_nobody_has", refused.stderr
    )
    assert "--import a_module_that_nobody_has" in refused.stderr
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_missing_resource_is_named_with_its_remedy(tmp_path: Path, synthetic: str, by_hand: str) -> None:
    job = job_file(tmp_path, synthetic)
    arguments = [job, "--scheduler-file", by_hand, "--workers", "cpu=1,gpu=2", "--wait", "1"]
    refused = CliRunner().invoke(run_command, arguments)
    assert refused.exit_code == 3
    assert "1 more with GPU=1" in refused.stderr
    assert "--resources GPU=1" in refused.stderr
    assert "1 worker" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_job_waits_for_a_scheduler_and_workers_that_come_late(tmp_path: Path, synthetic: str) -> None:
    job, file, log = job_file(tmp_path, synthetic), str(tmp_path / "late.json"), tmp_path / "log"
    command = daskcnn_run(job, "--scheduler-file", file, "--workers", "cpu=2", "--wait", "90", "--json")
    with ExitStack() as stack:
        run = stack.enter_context(process(*command))
        wait_for_line(run, f"waiting for scheduler file {file} (there is no such file)")
        stack.enter_context(process(*scheduler(file), log=log))
        wait_for_line(run, "waiting for workers: 2 more with CPU=1 (found 0 cpu, 0 gpu, 0 ps)")
        stack.enter_context(process(*worker(file, tmp_path / "w0", "CPU=1"), "--name", "desk 1", log=log))
        wait_for_line(run, "waiting for workers: 1 more with CPU=1 (found 1 cpu, 0 gpu, 0 ps)")
        stack.enter_context(process(*worker(file, tmp_path / "w1", "CPU=1"), "--no-nanny", log=log))
        out, told = run.communicate(timeout=100)
    assert run.returncode == 0, told
    assert [w["name"] for w in json.loads(out)["workers"]] == ["desk-1", "cpu-0"]
    assert "worker desk-1: cpu" in told, "the log has the same names"


@pytest.mark.slow
def test_doctor_looks_at_a_cluster(tmp_path: Path, synthetic: str, by_hand: str) -> None:
    look = ["doctor", "--scheduler-file", by_hand, "--json", "--workers"]
    sound = finish([*DASK, "cnn", *look, "cpu=2", "--data", synthetic, "--wait", "60"])
    missing = str(tmp_path / "none.zarr")
    short = CliRunner().invoke(daskcnn, [*look, "cpu=2,gpu=2", "--data", missing, "--wait", "1"])
    findings = json.loads(sound.stdout)
    assert sound.returncode == 0, [f for f in findings if not f["ok"]]
    found = {f["check"]: f for f in findings}
    assert found["workers"]["seen"].startswith("2 cpu, 1 gpu, ")
    assert sum(bool(f["facts"].get("fingerprint")) for f in findings if f["check"].startswith("worker ")) == 3
    ways = found["links"]["facts"]["ways"]
    assert len(ways) == 4 * 3, "every two of the workers, the server's too"
    assert all(way["bandwidth"] > 1e6 and not way["problem"] for way in ways)
    assert all(abs(offset) < 1 for offset in found["clocks"]["facts"].values())
    assert short.exit_code == 3
    assert [f["check"] for f in json.loads(short.stdout) if not f["ok"]][:2] == ["workers", "data"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="the worker would have its GPU")
def test_worker_that_advertises_a_gpu_it_lacks_is_left_out(tmp_path: Path, synthetic: str, by_hand: str) -> None:
    job = job_file(tmp_path, synthetic)
    done = finish(daskcnn_run(job, "--scheduler-file", by_hand, "--workers", "cpu=1,gpu=1", "--json"))
    assert done.returncode == 0, done.stderr
    assert "worker gpu-0 is left out: device gpu: CuPy is not installed" in done.stderr
    assert [w["name"] for w in json.loads(done.stdout)["workers"]] == ["cpu-0"]
    look = finish([*DASK, "cnn", "doctor", "--scheduler-file", by_hand, "--workers", "cpu=1,gpu=1", "--json"])
    (workers,) = [f for f in json.loads(look.stdout) if f["check"] == "workers"]
    assert (look.returncode, workers["ok"]) == (0, True), look.stdout
    assert "1 gpu, of which none can be used" in workers["seen"]


@pytest.mark.slow
def test_worker_that_advertises_two_kinds_trains_as_the_first_with_a_warning(tmp_path: Path, synthetic: str) -> None:
    with hand_made_cluster(tmp_path, ["CPU=1 GPU=1"]) as (file, _):
        done = finish(daskcnn_run(job_file(tmp_path, synthetic), "--scheduler-file", file, "--json", "--wait", "60"))
        look = finish([*DASK, "cnn", "doctor", "--scheduler-file", file, "--json"])
        short = finish(
            daskcnn_run(job_file(tmp_path, synthetic), "--scheduler-file", file, "--workers", "gpu=1", "--wait", "1")
        )
    assert done.returncode == 0, done.stderr
    assert re.search(r"worker cpu-0 \(tcp://\S+\): advertises CPU and GPU, and trains as cpu; restart it", done.stderr)
    assert look.returncode == 0, look.stdout
    assert "advertises CPU and GPU: it counts as cpu" in look.stdout
    assert short.returncode == 3
    assert "advertises CPU and GPU, and counts as cpu: restart it" in short.stderr


@pytest.mark.slow
def test_a_run_that_chooses_goes_on_where_its_servers_host_is_lost_before_it_has_a_server(
    tmp_path: Path, synthetic: str
) -> None:
    """No call to it is under way while workers measure themselves."""
    job, log = job_file(tmp_path, synthetic, train={"strategy": "auto"}), tmp_path / "runs" / "first" / "events.jsonl"
    with hand_made_cluster(tmp_path, ["CPU=1", "CPU=1"]) as (file, _):
        wait_for(Path(file))
        with process(*worker(file, tmp_path / "host", "PS=1"), "--no-nanny") as host, Client(scheduler_file=file) as c:
            c.wait_for_workers(3, timeout=100)
            given = ["--scheduler-file", file, "--workers", "cpu=2", "--name", "first"]
            with process(*daskcnn_run(job, *given, "--json")) as run:
                wait_for(log)  # it begins with the first calibration
                host.kill()
                assert run.wait(timeout=100) == 0, run.communicate()


@pytest.mark.slow
def test_a_run_whose_scheduler_is_started_anew_is_told_what_to_do_and_goes_on_there(
    tmp_path: Path, synthetic: str
) -> None:
    """It has another port, and its file is read anew."""
    job, kept = job_file(tmp_path, synthetic, train={"epochs": 400}, run={"name": "it"}), tmp_path / "runs/it"
    with (
        hand_made_cluster(tmp_path, ["CPU=1"]) as (file, there),
        process(*daskcnn_run(job, "--scheduler-file", file)) as run,
    ):
        wait_for_checkpoint(kept, run)
        there.kill()
        there.wait()
        Path(file).unlink()  # else the new worker may read the old address
        with hand_made_cluster(tmp_path, ["CPU=1"]):
            _, told = run.communicate(timeout=100)
            assert run.returncode == 5, told
            assert "start it and its workers again, then go on" in told
            before = max(kept.glob("checkpoints/step-*"))
            with process(*daskcnn_run("--resume", str(kept))) as again:
                deadline = time.monotonic() + 60
                while max(kept.glob("checkpoints/step-*")) == before:
                    assert again.poll() is None, again.communicate()
                    assert time.monotonic() < deadline
                    time.sleep(0.1)


def test_killed_scheduler_ends_the_job_resumably(tmp_path: Path, synthetic: str) -> None:
    job = job_file(tmp_path, synthetic, train={"epochs": 400}, run={"name": "it"})
    with (
        hand_made_cluster(tmp_path, ["CPU=1"]) as (file, there),
        process(*daskcnn_run(job, "--scheduler-file", file)) as run,
    ):
        wait_for_checkpoint(tmp_path / "runs/it", run)
        there.kill()
        _, told = run.communicate(timeout=100)
    assert run.returncode == 5, told
    assert f"--resume {tmp_path}/runs/it" in told
    assert "last good checkpoint" in told
    assert "Traceback" not in told
