"""Networks that reconstruct images: every strategy trains them as one process does. Dask is left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskcnn.arrays import Device
from daskcnn.events import EpochEnded, RoundEnded
from daskcnn.job.network import training_samples
from daskcnn.ps import RULES, AccuracyWeighted
from daskcnn.sim.learners import Training
from daskcnn.sim.simulation import Simulation
from daskcnn.sim.workload import Workload
from daskcnn.store import Dataset
from daskcnn.training.replica import Replica
from tests.cluster.in_process import LocalWorker, train_here
from tests.cluster.references import reference, trained_in_rounds
from tests.cluster.sharded_networks import layer_job
from tests.cluster.test_runs_here import SEVERAL_MEETINGS, grouped, job_of, presented, trained
from tests.sim.sim_cases import cluster, of, run
from tests.toy_data import toy_dataset

SAMPLES = 100
LAYERS: list[dict[str, Any]] = [
    {"layer": "conv", "kernels": 4, "size": 3, "pad": 1},
    {"layer": "relu"},
    {"layer": "maxpool", "size": 2},
    {"layer": "dense", "units": 12},
    {"layer": "tanh"},
    {"layer": "dense", "units": 64, "tied": "dense1"},
    {"layer": "reshape", "shape": [4, 4, 4]},
    {"layer": "upsample"},
    {"layer": "conv", "kernels": 3, "size": 3, "pad": 1},
]
RECONSTRUCTING = {"loss": "reconstruction"}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return toy_dataset(tmp_path_factory.mktemp("toy"), train=SAMPLES + 30, size=8)


def whole(**more: Any) -> dict[str, Any]:
    return {"model": {"layers": LAYERS, "dtype": "float64"}, "train": {**RECONSTRUCTING, **more}}


@pytest.mark.parametrize("workers", [1, 3])
def test_layer_sharding_follows_one_process(dataset: Dataset, workers: int) -> None:
    train = {"batch_size": 8, "lr": 0.1, "sub_batches": workers}
    job = layer_job(dataset.path, "runs", data={"validation": 30}, **whole(**train))
    found, expected = train_here(job, [LocalWorker()] * workers), reference(job)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-9)
    np.testing.assert_allclose(found.state.weights, expected.weights, rtol=1e-9, atol=1e-12)
    assert found.state.validation is not None
    assert (found.state.validation.accuracy, found.state.validation.samples) == (None, 30)
    assert all(event.accuracy is None for event in found.of(EpochEnded))


@pytest.mark.parametrize("strategy", ["sgwu", "bsp"])
def test_one_worker_is_trained_in_rounds(dataset: Dataset, strategy: str) -> None:
    job = job_of(strategy, model={"layers": LAYERS}, train=RECONSTRUCTING)
    weights, _ = trained(job, dataset, 1)
    np.testing.assert_array_equal(weights, trained_in_rounds(job, dataset))


def test_one_group_is_trained_in_rounds(dataset: Dataset) -> None:
    job = job_of("sgwu", **whole())
    weights, _ = trained(grouped(job), dataset, 2)
    np.testing.assert_allclose(weights, trained_in_rounds(job, dataset, rounded=True), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("strategy", [*RULES, "asa"])
def test_every_rule_trains_and_judges_by_the_loss(dataset: Dataset, strategy: str) -> None:
    rule = {"exchange": "asa"} if strategy == "asa" else SEVERAL_MEETINGS.get(strategy, {})
    job = job_of("bsp" if strategy == "asa" else strategy, rule=rule, **whole(lr=0.1))
    _, found = trained(job, dataset, 3)
    assert presented(found) == 2 * SAMPLES
    last = found.of(EpochEnded)[-1].validation
    assert last is not None
    assert last.loss is not None
    assert (last.accuracy, last.auc) == (None, None)
    rounds = found.of(RoundEnded)
    assert all(event.accuracy is None and event.loss is not None for event in rounds)
    if isinstance(job.rule, AccuracyWeighted):
        assert all(event.q is not None and 0 < event.q < 1 for event in rounds)


@pytest.mark.parametrize("strategy", ["sgwu", "agwu"])
def test_the_simulators_real_arithmetic_trains_by_the_loss(dataset: Dataset, strategy: str) -> None:
    job = job_of(strategy, **whole())

    def replica() -> Replica:
        return Replica(job, dataset, Device.of("cpu"), clock=lambda: 0.0)

    work = Workload.of_job(job, samples=training_samples(job, dataset), numbers=replica().layout.size)
    simulated: tuple[Simulation, list[Any]] = run(
        work, cluster(100.0, 150.0), learner=lambda: Training(replica(), work.rule)
    )
    last = of(EpochEnded, simulated[1])[-1].validation
    assert last.loss > 0
    assert last.accuracy is None
