"""Frozen layers in whole runs: their weights and statistics come out as they went in, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskcnn.job.network import frozen_spans, initial_weights
from daskcnn.job.tables import Job
from daskcnn.ps import RULES
from daskcnn.runs.state import TrainingState
from daskcnn.store import Dataset
from tests.cluster.in_process import LocalWorker, train_here
from tests.cluster.run_here import RunHere, assert_same
from tests.cluster.test_runs_here import SAMPLES, SEVERAL_MEETINGS, grouped, job_of
from tests.toy_data import toy_dataset

LAYERS: list[dict[str, Any]] = [
    {"layer": "conv", "kernels": 8, "size": 3, "pad": 1},
    {"layer": "batchnorm"},
    {"layer": "relu"},
    {"layer": "maxpool", "size": 4},
    {"layer": "conv", "kernels": 6, "size": 3, "pad": 1},
    {"layer": "batchnorm"},
    {"layer": "relu"},
    {"layer": "dense", "units": 10},
]
BELOW, BETWEEN = ["conv1", "batchnorm1"], ["conv2", "batchnorm2"]
"""Layers in front of all that are trained, and layers with trained ones on both sides."""
EVERY = {name: (name, SEVERAL_MEETINGS.get(name, {})) for name in RULES} | {
    "bsp sum": ("bsp", {"combine": "sum", "every": 3}),
    "asa": ("bsp", {"exchange": "asa"}),
    "asa sum": ("bsp", {"exchange": "asa", "combine": "sum", "every": 2}),
    "asa16": ("bsp", {"exchange": "asa16"}),
    "adagrad": ("downpour", {"server": "adagrad"}),
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return toy_dataset(tmp_path_factory.mktemp("toy"), train=SAMPLES + 30, size=8)


def model_of(freeze: list[str] | None, dtype: str) -> dict[str, Any]:
    return {"layers": LAYERS, "dtype": dtype, "freeze": freeze}


def started(job: Job, dataset: Dataset) -> TrainingState:
    """A state to start from: weights and statistics of no round numbers, and a zero below zero."""
    _, weights = initial_weights(job, dataset)
    weights += np.random.default_rng(0).uniform(0.01, 0.1, weights.size).astype(weights.dtype)
    weights[3] = -0.0
    return TrainingState(0, 0.0, weights, {}, {})


def assert_frozen(job: Job, dataset: Dataset, before: np.ndarray, after: np.ndarray) -> None:
    """To the bit, and everything else has changed."""
    spans = frozen_spans(job, dataset)
    assert spans
    for place in spans:
        assert before[place].tobytes() == after[place].tobytes()
    others = np.ones(len(before), bool)
    for place in spans:
        others[place] = False
    assert (before != after)[others].mean() > 0.9


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
@pytest.mark.parametrize("freeze", [BELOW, BETWEEN], ids=["below", "between"])
@pytest.mark.parametrize("course", EVERY)
def test_no_rule_changes_frozen_layers(dataset: Dataset, course: str, freeze: list[str], dtype: str) -> None:
    strategy, rule = EVERY[course]
    job = job_of(strategy, rule=rule, model=model_of(freeze, dtype), train={"weight_decay": 0.01})
    start = started(job, dataset)
    before = start.weights.copy()
    run = RunHere(job, dataset, 3)
    assert_frozen(job, dataset, before, run.train(start))
    for state in run.saved:
        for place in frozen_spans(job, dataset):
            assert before[place].tobytes() == np.asarray(state.weights)[place].tobytes()


@pytest.mark.parametrize(
    ("strategy", "wire"),
    [*((name, "float16") for name in RULES), *((name, "int8") for name in ("bsp", "local-sgd", "downpour"))],
)
def test_the_run_keeps_exact_weights_where_less_than_all_of_them_travels(
    dataset: Dataset, strategy: str, wire: str
) -> None:
    model = model_of(BELOW, "float32")
    rule = SEVERAL_MEETINGS.get(strategy, {})
    job = job_of(strategy, rule=rule, model=model, cluster={"wire": wire})
    start = started(job, dataset)
    before = start.weights.copy()
    assert_frozen(job, dataset, before, RunHere(job, dataset, 2).train(start))


@pytest.mark.parametrize(
    ("freeze", "train"),
    [(BELOW, {}), (BETWEEN, {}), (BELOW, {"sub_batches": 3}), (BELOW, {"first_conv": "samples"})],
    ids=["below", "between", "sub-batches", "samples"],
)
def test_no_group_changes_frozen_layers(dataset: Dataset, freeze: list[str], train: dict[str, Any]) -> None:
    """Batch normalising that is frozen lets minibatches be cut; that which is trained does not."""
    layers = [each for i, each in enumerate(LAYERS) if i != 5 or not train]
    model = {"layers": layers, "dtype": "float64", "freeze": freeze}
    job = grouped(job_of("sgwu", model=model), **train)
    start = started(job, dataset)
    before = start.weights.copy()
    assert_frozen(job, dataset, before, RunHere(job, dataset, 4).train(start))


@pytest.mark.parametrize("first", ["kernels", "samples"])
def test_layer_sharding_leaves_frozen_layers_as_they_are(dataset: Dataset, first: str) -> None:
    """And follows one replica on the rest, statistics included."""
    layers = [each for i, each in enumerate(LAYERS) if i != 5]
    tables = job_of("bsp", model={"layers": layers, "dtype": "float64", "freeze": BELOW}).model_dump(mode="json")
    tables |= {"rule": {}, "data": tables["data"] | {"path": dataset.path, "name": "synthetic"}}
    train = {"strategy": "layer", "first_conv": first, "kernel_shares": "speeds", "partition": None, "increments": None}
    found = train_here(tables | {"train": tables["train"] | train}, [LocalWorker()] * 3)
    job = job_of("bsp", model={"layers": layers, "dtype": "float64", "freeze": BELOW})
    _, before = initial_weights(job, dataset)
    assert_frozen(job, dataset, before, np.asarray(found.state.weights))


@pytest.mark.parametrize("strategy", ["sgwu", "bsp"])
def test_freezing_nothing_changes_nothing(dataset: Dataset, strategy: str) -> None:
    same = {"reproducible": True}  # shares of a step go by no clock
    models = (model_of(patterns, "float32") for patterns in (list[str](), None))
    with_key, without = (job_of(strategy, model=model, train=same) for model in models)
    assert_same(RunHere(with_key, dataset, 2).train(), RunHere(without, dataset, 2).train())
