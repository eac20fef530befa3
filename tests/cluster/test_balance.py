"""Shares of kernels on real processes: unequal workers, slow links, speeds that change, devices that differ."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from distributed import Client

from daskcnn.cluster.connect import connect
from daskcnn.cluster.layers import driver
from daskcnn.errors import ClusterError, Lost
from daskcnn.job.tables import Cluster, Workers
from daskcnn.nn import sequential_from_spec
from daskcnn.sharded import StepPlan, WorkerLink, WorkerLinks, stages_of, traffic, weight_traffic
from tests.cluster.cluster_jobs import (
    LAYERS,
    Watch,
    addresses_of,
    counted_seconds,
    kill_worker,
    one_process,
    run,
    sharded_by_speed,
    small_job,
)
from tests.cluster.test_layer_sharding import EACH, REACHING, losses_of

pytestmark = pytest.mark.cluster

WIDE: list[dict[str, Any]] = [
    {"layer": "conv", "kernels": 40, "size": 5, "pad": 2},
    {"layer": "maxpool", "size": 4},
    {"layer": "conv", "kernels": 40, "size": 5, "pad": 2},
    {"layer": "averagepool", "size": 2},
    {"layer": "dense", "units": 10},
]


def layer_job(path: str, runs: str, **sections: dict[str, Any]) -> dict[str, Any]:
    return sharded_by_speed(small_job(path, runs, **sections))


def kernels_of(event: dict[str, Any], worker: str) -> int:
    return sum(event["kernels"][worker].values())


def messages(watch: Watch) -> list[str]:
    return [event["message"] for event in watch.of("warning")]


def change_throttle(factor: float) -> None:
    from daskcnn.cluster.session import session as kept

    for session in kept._sessions.values():
        session.replica._throttle = factor


# --- links ---


def test_links_are_measured_with_results_and_logged(
    three_workers: Client, synthetic: str, runs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch()
    measured = {"epochs": 1, "kernel_shares": "measured"}
    run(three_workers, layer_job(synthetic, runs, train=measured, cluster={"workers": {"cpu": 3}}), watch)
    (links,) = watch.of("links")
    assert {row["name"] for row in links["workers"]} == {"cpu-0", "cpu-1", "cpu-2"}
    assert all(0 < row["bandwidth"] < float("inf") and row["latency"] > 0 for row in links["workers"])
    home = next(row for row in links["workers"] if row["name"] == links["home"])
    assert home["bandwidth"] == max(row["bandwidth"] for row in links["workers"])
    assert 0 < links["task"] < 0.1


def test_a_worker_behind_a_slow_link_gets_no_kernels_and_the_log_says_so(
    three_workers: Client, synthetic: str, runs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "measure_links", lambda context, home: WorkerLinks({"cpu-1": WorkerLink(1e3, 0.01)}))
    watch = Watch()
    with counted_seconds(three_workers, {"cpu-1": 1.5}):  # cpu-0 is home
        job = layer_job(synthetic, runs, train={"kernel_shares": "measured"}, cluster={"workers": {"cpu": 2}})
        result = run(three_workers, job, watch)
    assert result.summary["status"] == "done"
    assert kernels_of(watch.of("shards")[0], "cpu-1") == 0
    assert result.summary["bytes"] == {"up": 0, "down": 0}
    told = messages(watch)
    for layer in ("conv1", "conv2"):
        (line,) = [each for each in told if each.startswith(f"worker cpu-1 gets no kernels of {layer}")]
        assert "0.001 MB/s" in line


@pytest.mark.parametrize(("layers", "workers"), [(LAYERS, 2), (LAYERS, 3), (REACHING, 2)])
def test_counted_bytes_are_those_of_the_scheme(
    three_workers: Client, synthetic: str, runs: str, layers: list[dict[str, Any]], workers: int
) -> None:
    watch = Watch()
    model = {"name": None, "layers": layers}
    job = layer_job(
        synthetic,
        runs,
        data={"limit": 500},
        model=model,
        train={"epochs": 1},
        cluster={"workers": {"cpu": workers}},
    )
    run(three_workers, job, watch)
    (shards,) = watch.of("shards")
    by_worker = shards["kernels"]
    stages = stages_of(sequential_from_spec(layers))
    kernels = [{w: own[s.name] for w, own in by_worker.items() if own[s.name]} for s in stages]
    plan, epoch = StepPlan.of(stages, (32, 32, 3), kernels, shards["home"]), watch.of("epoch")[0]
    expected, edges = traffic(plan), weight_traffic(plan)
    for row in epoch["workers"]:
        a_sample, a_step = expected[row["name"]], edges.get(row["name"], (0, 0))
        assert row["bytes_up"] == 4 * (400 * a_sample.up + epoch["step"] * a_step[0])
        assert row["bytes_down"] == 4 * (400 * a_sample.down + epoch["step"] * a_step[1])


# --- speeds ---


def test_workers_of_one_and_three_times_the_seconds_get_kernels_three_to_one(
    three_workers: Client, synthetic: str, runs: str
) -> None:
    job = layer_job(
        synthetic,
        runs,
        data={"limit": 164},
        model={"layers": WIDE},
        train={"epochs": 1, "batch_size": 16},
        cluster={"workers": {"cpu": 2}},
    )
    watch = Watch()
    with counted_seconds(three_workers, {"cpu-1": 3.0}):
        run(three_workers, job, watch)
    shards = watch.of("shards")[0]
    assert shards["kernels"] == {"cpu-0": {"conv1": 30, "conv2": 30}, "cpu-1": {"conv1": 10, "conv2": 10}}
    assert shards["home"] == "cpu-0"


def test_kernels_move_away_from_a_worker_that_becomes_slower_and_the_loss_does_not_notice(
    three_workers: Client, synthetic: str, runs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their momentum, of which nothing may be lost."""
    job = small_job(
        synthetic, runs, model={"dtype": "float64"}, train={"lr": 0.003}, cluster={"workers": {"cpu": 2}}, run=EACH
    )
    expected, _ = one_process(job)
    job = sharded_by_speed(job)
    where = [addresses_of(three_workers)["cpu-1"]]
    watch = Watch("steps", lambda: three_workers.run(change_throttle, 8.0, workers=where))
    run(three_workers, job, watch)
    first, *moved = watch.of("shards")
    assert moved
    assert kernels_of(moved[-1], "cpu-1") < kernels_of(first, "cpu-1")
    assert kernels_of(moved[-1], "cpu-0") + kernels_of(moved[-1], "cpu-1") == 15
    assert any("shares no longer fit" in message for message in messages(watch))
    steps = [event["step"] for event in watch.of("steps")]
    assert steps == list(range(1, 51))
    np.testing.assert_allclose(losses_of(watch), expected, rtol=1e-9)
    epochs = watch.of("epoch")
    assert [event["step"] for event in epochs] == [25, 50]
    assert all(row["conv_seconds"] for event in epochs for row in event["workers"] if row["name"] == "cpu-0")


# --- devices ---


@pytest.fixture(scope="module")
def two_cpus_and_a_gpu() -> Iterator[Client]:
    """What gpu-0 has for one is each test's own affair."""
    with connect(Cluster(workers=Workers(cpu=2, gpu=1))) as client:
        client.wait_for_workers(4, timeout=60)
        yield client


def stand_in_for_a_gpu() -> None:
    """On a worker: its GPU is the strict stand-in."""
    from daskcnn import arrays
    from daskcnn.cluster.session import tasks as worker
    from tests.standin import STANDIN

    arrays.BACKENDS["gpu"] = lambda: STANDIN
    worker.device_profile = lambda kind, threads: arrays.DeviceProfile("gpu", "stand-in", 1, 1 << 30)


def without_a_gpu() -> None:
    """On a worker: there is none, whatever the machine has."""
    from daskcnn import arrays

    def missing() -> Any:
        raise ClusterError("device gpu: no usable GPU on this worker")

    arrays.BACKENDS["gpu"] = missing


def test_cpus_and_a_gpu_share_a_layer_and_the_loss_is_that_of_one_process(
    two_cpus_and_a_gpu: Client, synthetic: str, runs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = small_job(
        synthetic,
        runs,
        data={"limit": 292},  # 12 whole minibatches and the validation samples
        model={"name": None, "layers": REACHING, "dtype": "float64"},
        train={"lr": 0.003, "epochs": 1, "batch_size": 16},
        cluster={"workers": {"cpu": 2, "gpu": 1}},
        run=EACH,
    )
    expected, _ = one_process(job)
    job = sharded_by_speed(job)
    two_cpus_and_a_gpu.run(stand_in_for_a_gpu, workers=[addresses_of(two_cpus_and_a_gpu)["gpu-0"]])
    watch = Watch()
    with counted_seconds(two_cpus_and_a_gpu, {"cpu-0": 4.0, "cpu-1": 4.0}):
        run(two_cpus_and_a_gpu, job, watch)
    assert {row["name"]: row["device"] for row in watch.of("calibration")[0]["workers"]} == {
        "cpu-0": "cpu",
        "cpu-1": "cpu",
        "gpu-0": "gpu",
    }
    shards = watch.of("shards")[0]
    assert shards["home"] == "gpu-0"
    assert {worker: own["conv1"] for worker, own in shards["kernels"].items()} == {"cpu-0": 4, "cpu-1": 4, "gpu-0": 16}
    np.testing.assert_allclose(losses_of(watch), expected, rtol=1e-9)


def test_a_gpu_that_is_advertised_but_absent_is_left_out(two_cpus_and_a_gpu: Client, synthetic: str, runs: str) -> None:
    two_cpus_and_a_gpu.run(without_a_gpu, workers=[addresses_of(two_cpus_and_a_gpu)["gpu-0"]])
    watch = Watch()
    job = layer_job(synthetic, runs, train={"epochs": 1}, cluster={"workers": {"cpu": 1, "gpu": 1}})
    result = run(two_cpus_and_a_gpu, job, watch)
    assert result.summary["status"] == "done"
    (left,) = watch.of("worker-left-out")
    assert (left["worker"], left["reason"]) == ("gpu-0", "device gpu: no usable GPU on this worker")
    assert watch.of("shards")[0]["kernels"].keys() == {"cpu-0"}


# --- bad input ---


def test_more_workers_than_kernels_is_said_and_trains(three_workers: Client, synthetic: str, runs: str) -> None:
    layers = [
        {"layer": "conv", "kernels": 2, "size": 3},
        {"layer": "maxpool", "size": 4},
        {"layer": "dense", "units": 10},
    ]
    watch = Watch()
    job = layer_job(synthetic, runs, model={"layers": layers}, train={"epochs": 1}, cluster={"workers": {"cpu": 3}})
    assert run(three_workers, job, watch).summary["status"] == "done"
    idle = [w for w, own in watch.of("shards")[0]["kernels"].items() if not own["conv1"]]
    assert idle
    told = messages(watch)
    for worker in idle:
        assert f"worker {worker} gets no kernels of conv1: 2 are few for 3 workers, and others are faster" in told


def test_a_worker_that_stands_still_ends_the_run_by_its_name(
    three_workers: Client, synthetic: str, runs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP: its connections stay open, and nothing comes through them any more. The last snapshot is kept."""
    cluster = {"stall_timeout": 4.0, "chain": 5, "workers": {"cpu": 3}}
    job = layer_job(synthetic, runs, train={"epochs": 40}, cluster=cluster, run={"report_every": 4})
    go_on = kill_worker(three_workers, "cpu-1", signal.SIGCONT)
    stop = kill_worker(three_workers, "cpu-1", signal.SIGSTOP)
    watch = Watch("steps", stop, lambda event: event["step"] >= 12)
    try:
        with pytest.raises(Lost, match=r"no progress for 4 s, waiting for cpu-1\n") as caught:
            run(three_workers, job, watch)
    finally:
        go_on()
    assert caught.value.exit_code == 5
    assert "last good checkpoint: " in str(caught.value)
    assert watch.of("checkpoint")[-1]["step"] == 10
