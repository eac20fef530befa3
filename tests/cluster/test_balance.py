"""Shares of kernels on real processes: links, speeds that change, devices that differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from distributed import Client

from daskcnn.cluster.link.connect import connect
from daskcnn.job.tables import Cluster, Workers
from daskcnn.training.replica import Replica
from daskcnn.training.worker_calibration import StageSeconds, stage_seconds
from tests.cluster.cluster_jobs import (
    Watch,
    addresses_of,
    counted_seconds,
    run,
    set_throttle,
    small_job,
)
from tests.cluster.references import reference
from tests.cluster.sharded_networks import REACHING, layer_job, losses_of

pytestmark = pytest.mark.cluster


def kernels_of(event: dict[str, Any], worker: str) -> int:
    return sum(event["kernels"][worker].values())


def test_links_are_measured_with_results_and_logged(three_workers: Client, synthetic: str, runs: str) -> None:
    watch, train = Watch(), {"epochs": 1, "kernel_shares": "measured"}
    job = layer_job(synthetic, runs, data={"limit": 164}, train=train, cluster={"workers": {"cpu": 3}})
    run(three_workers, job, watch)
    (links,) = watch.of("links")
    assert {row["name"] for row in links["workers"]} == {"cpu-0", "cpu-1", "cpu-2"}
    assert all(0 < row["bandwidth"] < float("inf") and row["latency"] > 0 for row in links["workers"])
    home = next(row for row in links["workers"] if row["name"] == links["home"])
    assert home["bandwidth"] == max(row["bandwidth"] for row in links["workers"])
    assert 0 < links["task"] < 0.1


def test_a_group_measures_its_members_links(three_workers: Client, synthetic: str, runs: str) -> None:
    train = {"replica_size": 2, "epochs": 1, "increments": 1, "batch_size": 16}
    cluster = {"workers": {"cpu": 2}}
    job = small_job(synthetic, runs, data={"limit": 164}, train=train, cluster=cluster)
    watch = Watch()
    run(three_workers, job, watch)
    (links,) = watch.of("links")
    assert {row["name"] for row in links["workers"]} == {"cpu-0", "cpu-1"}
    assert links["home"] == watch.of("groups")[0]["groups"][0]["home"]


def be_calibrated_too_fast(factor: float) -> None:
    """On a worker: it trains slower, by this factor, than when it was calibrated."""
    from daskcnn.cluster.worker import tasks as worker

    set_throttle(factor)

    def faster(replica: Replica) -> StageSeconds:
        whole, fixed, rest = stage_seconds(replica)
        each = [{name: seconds / factor for name, seconds in part.items()} for part in (whole, fixed)]
        return StageSeconds(each[0], each[1], rest / factor)

    vars(worker)["stage_seconds"] = faster


def be_as_before() -> None:
    """On a worker."""
    from daskcnn.cluster.worker import tasks as worker

    vars(worker)["stage_seconds"] = stage_seconds
    set_throttle(1.0)


@contextmanager
def slower_than_calibrated(client: Client, name: str, factor: float) -> Iterator[None]:
    where = [addresses_of(client)[name]]
    client.run(be_calibrated_too_fast, factor, workers=where)
    try:
        yield
    finally:
        client.run(be_as_before, workers=where)


def test_kernels_move_away_from_a_worker_that_becomes_slower_and_the_loss_does_not_notice(
    three_workers: Client, synthetic: str, runs: str
) -> None:
    """Kernels take their momentum along, and none of it may be lost."""
    job = layer_job(
        synthetic,
        runs,
        data={"limit": 500},  # 50 minibatches of one epoch
        model={"dtype": "float64"},
        train={"lr": 0.003, "epochs": 1, "batch_size": 8},
        cluster={"workers": {"cpu": 2}},
    )
    watch = Watch()
    with slower_than_calibrated(three_workers, "cpu-1", 8.0):
        run(three_workers, job, watch)
    first, *moved = watch.of("shards")
    assert moved
    assert kernels_of(moved[-1], "cpu-1") < kernels_of(first, "cpu-1")
    assert kernels_of(moved[-1], "cpu-0") + kernels_of(moved[-1], "cpu-1") == 15
    assert any("shares no longer fit" in event["message"] for event in watch.of("warning"))
    assert [event["step"] for event in watch.of("steps")] == list(range(1, 51))
    np.testing.assert_allclose(losses_of(watch), reference(job).losses, rtol=1e-9)
    (epoch,) = watch.of("epoch")
    assert epoch["step"] == 50
    assert all(row["conv_seconds"] for row in epoch["workers"] if row["name"] == "cpu-0")


# --- devices ---


@pytest.fixture
def two_cpus_and_a_gpu() -> Iterator[Client]:
    with connect(Cluster(workers=Workers(cpu=2, gpu=1))) as client:
        client.wait_for_workers(4, timeout=60)
        yield client


def stand_in_for_a_gpu() -> None:
    """On a worker: its GPU is the strict stand-in."""
    from daskcnn import arrays
    from daskcnn.cluster.worker import tasks as worker
    from tests.standin import STANDIN

    arrays.BACKENDS["gpu"] = lambda: STANDIN
    vars(worker)["device_profile"] = lambda kind, threads: arrays.DeviceProfile("gpu", "stand-in", 1, 1 << 30)


@pytest.mark.slow
def test_cpus_and_a_gpu_share_a_layer_and_the_loss_is_that_of_one_process(
    two_cpus_and_a_gpu: Client, synthetic: str, runs: str
) -> None:
    job = layer_job(
        synthetic,
        runs,
        data={"limit": 52, "validation": 20},  # four minibatches: the stand-in takes its time
        model={"layers": REACHING, "dtype": "float64"},
        train={"lr": 0.003, "epochs": 1, "batch_size": 8},
        cluster={"workers": {"cpu": 2, "gpu": 1}},
    )
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
    np.testing.assert_allclose(losses_of(watch), reference(job).losses, rtol=1e-9)
