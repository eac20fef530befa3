"""Several labels a sample, and weights: every strategy trains on them as one process does. Dask is left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskcnn.arrays import Device
from daskcnn.events import EpochEnded, RoundEnded, StepsEnded
from daskcnn.job.network import training_samples
from daskcnn.ps import RULES
from daskcnn.sim.learners import Training
from daskcnn.sim.simulation import Simulation
from daskcnn.sim.workload import Workload
from daskcnn.store import Dataset
from daskcnn.training.replica import Replica
from tests.cluster.in_process import LocalWorker, train_here
from tests.cluster.references import reference, trained_in_rounds
from tests.cluster.sharded_networks import NORMALISED, REACHING, layer_job
from tests.cluster.test_runs_here import SEVERAL_MEETINGS, WHOLE, grouped, job_of, presented, trained
from tests.sim.sim_cases import cluster, of, run
from tests.standin import device_of
from tests.toy_data import toy_dataset

SAMPLES = 100
DATA = {
    "several": {"several": True},
    "several, weighted": {"several": True, "weighted": True},
    "weighted, balanced": {"weighted": True},
}
every_kind = pytest.mark.parametrize("kind", DATA)
several = pytest.mark.parametrize("kind", ["several, weighted"])


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    """130 images of 8 by 8 of each kind, the last 30 for validation."""
    folder = tmp_path_factory.mktemp
    return {kind: toy_dataset(folder("toy"), train=SAMPLES + 30, size=8, **made) for kind, made in DATA.items()}


def train_of(kind: str) -> dict[str, Any]:
    return {"class_weights": "balanced"} if "balanced" in kind else {}


# --- layer ---


@every_kind
@pytest.mark.parametrize(
    ("layers", "workers", "train"),
    [
        (REACHING, 1, {}),
        pytest.param(REACHING, 2, {"sub_batches": 3}, marks=pytest.mark.slow),
        (REACHING, 3, {"first_conv": "samples", "sub_batches": 2}),
        (NORMALISED, 3, {}),
    ],
    ids=["one", "parts of minibatches", "samples divided", "normalised"],
)
def test_layer_sharding_follows_one_process(
    datasets: dict[str, Dataset], kind: str, layers: list[dict[str, Any]], workers: int, train: dict[str, Any]
) -> None:
    model, found = {"layers": layers, "dtype": "float64"}, datasets[kind]
    sections: dict[str, Any] = {"data": {"validation": 30}, "model": model}
    job = layer_job(found.path, "runs", **sections, train={"batch_size": 8, "lr": 0.003, **train, **train_of(kind)})
    run = train_here(job, [LocalWorker()] * workers)
    expected = reference(job)
    assert [event.step for event in run.of(StepsEnded)] == list(range(1, 27))
    np.testing.assert_allclose(run.losses, expected.losses, rtol=1e-9)
    np.testing.assert_allclose(run.state.weights, expected.weights, rtol=1e-9, atol=1e-12)
    assert run.state.validation is not None
    assert run.state.validation.answers == (10 if "several" in kind else 1)
    assert 0 < run.state.validation.quality < 1


@several
def test_cpus_and_a_gpu_share_a_layer(datasets: dict[str, Dataset], kind: str) -> None:
    model: dict[str, Any] = {"layers": REACHING, "dtype": "float64"}
    sections: dict[str, Any] = {"data": {"validation": 30}, "train": {"batch_size": 8, "lr": 0.003, "epochs": 1}}
    job = layer_job(datasets[kind].path, "runs", model=model, **sections)
    gpu = LocalWorker(4.0, kind="gpu", device=lambda: device_of("standin"))
    found = train_here(job, [LocalWorker(), gpu])
    np.testing.assert_allclose(found.losses, reference(job).losses, rtol=1e-9)


# --- replicas and groups ---


@every_kind
@pytest.mark.parametrize("strategy", ["sgwu", "bsp"])
def test_one_worker_is_trained_in_rounds(datasets: dict[str, Dataset], kind: str, strategy: str) -> None:
    job = job_of(strategy, train=train_of(kind))
    weights, _ = trained(job, datasets[kind], 1)
    np.testing.assert_array_equal(weights, trained_in_rounds(job, datasets[kind]))
    plain = job.model_copy(update={"train": job.train.model_copy(update={"class_weights": None})})
    if "balanced" in kind:
        assert not np.allclose(weights, trained_in_rounds(plain, datasets[kind]), rtol=1e-3)


@every_kind
def test_one_group_is_trained_in_rounds(datasets: dict[str, Dataset], kind: str) -> None:
    job = job_of("sgwu", model=WHOLE, cluster={"chain": 3}, train=train_of(kind))
    weights, _ = trained(grouped(job, sub_batches=3), datasets[kind], 2)
    expected = trained_in_rounds(job, datasets[kind], rounded=True)
    np.testing.assert_allclose(weights, expected, rtol=1e-9, atol=1e-9)


@several
@pytest.mark.parametrize("strategy", [*RULES, "asa"])
def test_every_rule_trains_and_judges_by_label(datasets: dict[str, Dataset], kind: str, strategy: str) -> None:
    rule = {"exchange": "asa"} if strategy == "asa" else SEVERAL_MEETINGS.get(strategy, {})
    _, run = trained(job_of("bsp" if strategy == "asa" else strategy, rule=rule), datasets[kind], 3)
    assert presented(run) == 2 * SAMPLES
    last = run.of(EpochEnded)[-1].validation
    assert last is not None
    assert last.accuracy is not None
    assert 0.5 < last.accuracy < 1, "of labels that are 0 in seven of ten cases"
    assert last.auc is not None
    assert all(event.accuracy is not None and 0 < event.accuracy < 1 for event in run.of(RoundEnded))


@several
@pytest.mark.parametrize("strategy", RULES)
def test_the_simulators_real_arithmetic_trains_by_label(datasets: dict[str, Dataset], kind: str, strategy: str) -> None:
    job, data = job_of(strategy, rule=SEVERAL_MEETINGS.get(strategy, {})), datasets[kind]

    def replica() -> Replica:
        return Replica(job, data, Device.of("cpu"), clock=lambda: 0.0)

    work = Workload.of_job(job, samples=training_samples(job, data), numbers=replica().layout.size)
    simulated: tuple[Simulation, list[Any]] = run(
        work, cluster(100.0, 150.0), learner=lambda: Training(replica(), work.rule)
    )
    last = of(EpochEnded, simulated[1])[-1].validation
    assert 0.5 < last.accuracy < 1
    assert last.auc is not None
