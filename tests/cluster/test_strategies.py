"""Both strategies on real processes, against one process that does the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from distributed import Client

from daskcnn.ps import RULES
from tests.cluster.cluster_jobs import Watch, counted_seconds, one_process, run, small_job

pytestmark = pytest.mark.cluster


def test_sgwu_with_one_worker_is_plain_sgd(three_workers: Client, synthetic: str, runs: str) -> None:
    job = small_job(synthetic, runs, train={"increments": 1}, cluster={"workers": {"cpu": 1}})
    _, replica = one_process(job)
    result = run(three_workers, job)
    np.testing.assert_array_equal(result.model.weights, replica.host_weights())


def test_bsp_with_one_worker_is_plain_sgd(three_workers: Client, synthetic: str, runs: str) -> None:
    job = small_job(synthetic, runs, train={"strategy": "bsp", "increments": 1}, cluster={"workers": {"cpu": 1}})
    _, replica = one_process(job | {"train": job["train"] | {"strategy": "sgwu"}})
    result = run(three_workers, job)
    np.testing.assert_array_equal(result.model.weights, replica.host_weights())


SEVERAL_MEETINGS: dict[str, dict[str, Any]] = {
    "bsp": {"every": 5},
    "easgd": {"tau": 3},
    "downpour": {"n_push": 2, "n_fetch": 3},
    "admm": {"every": 4, "rho": 0.1},
    "parallel-sgd": {"rounds": 4},
}


@pytest.mark.parametrize(
    ("strategy", "partition"), [*((name, "idpa") for name in RULES), ("sgwu", "udpa"), ("agwu", "udpa")]
)
def test_replicas_learn_and_every_sample_is_presented(
    three_workers: Client, synthetic: str, runs: str, strategy: str, partition: str
) -> None:
    train = {"strategy": strategy, "partition": partition, "epochs": 4}
    rule = SEVERAL_MEETINGS.get(strategy, {})
    if strategy == "downpour":  # what three replicas with momentum have accrued is added up
        train["lr"] = 0.003
    watch = Watch()
    result = run(three_workers, small_job(synthetic, runs, train=train, data={"limit": 1300}, rule=rule), watch)
    rounds = watch.of("round")
    assert sum(event["samples"] for event in rounds) == 4 * 1200
    assert sum(watch.of("allocation")[-1]["sizes"].values()) == 1200
    assert result.summary["status"] == "done"
    assert result.summary["epochs"] == 4
    assert {w["name"] for w in result.summary["workers"]} == {"cpu-0", "cpu-1", "cpu-2"}
    assert rounds[-1]["loss"] < 2.2 < rounds[0]["loss"]
    assert result.summary["bytes"]["up"] == sum(event["pushes"] for event in rounds) * result.model.weights.nbytes
    assert watch.of("epoch")[-1]["validation"]["accuracy"] > 0.2
    assert all(0.5 < event["validation"]["auc"] <= 1 for event in watch.of("epoch")[1:])
    assert watch.of("end")[-1]["test"] == result.summary["test"]
    assert 0.5 < result.summary["test"]["auc"] <= 1


def test_half_precision_on_the_wire_halves_the_bytes(three_workers: Client, synthetic: str, runs: str) -> None:
    job = small_job(synthetic, runs, cluster={"workers": {"cpu": 2}, "wire": "float16"})
    result = run(three_workers, job)
    assert result.model.weights.dtype == np.float32
    assert result.summary["bytes"]["up"] % (result.model.weights.size * 2) == 0
    assert result.summary["status"] == "done"
    assert len(result.summary["workers"]) == 2


def test_slow_worker_gets_fewer_samples(three_workers: Client, synthetic: str, runs: str) -> None:
    """Of two workers, one is throttled: IDPA measures it. Loading, half of a step's seconds here, is not throttled."""
    job = small_job(synthetic, runs, train={"epochs": 4}, data={"limit": 2100}, cluster={"workers": {"cpu": 2}})
    watch = Watch()
    with counted_seconds(three_workers, {"cpu-1": 5.0}):
        run(three_workers, job, watch)
    sizes = watch.of("allocation")[-1]["sizes"]
    assert sizes["cpu-0"] > 1.8 * sizes["cpu-1"]
