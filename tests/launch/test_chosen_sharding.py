"""A run that chooses to shard kernels, over all its workers or in groups, on a cluster in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client, LocalCluster

import daskcnn
from daskcnn.errors import JobError
from daskcnn.events import KernelsSharded, RunEnded, RunStarted, StrategyChosen
from daskcnn.launch.training import Result
from daskcnn.runs.directory import RunDirectory
from daskcnn.training import sharded_prices, strategy_prices
from daskcnn.training.strategy_prices import PricedStrategy, StepProblem, alone
from tests.tiny_runs import tiny_data, tiny_job

LAYERS: list[dict[str, Any]] = [
    {"layer": "conv", "kernels": 6, "size": 3, "pad": 1},
    {"layer": "relu"},
    {"layer": "maxpool", "size": 4},
    {"layer": "dense", "units": 10},
]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    settings: dict[str, Any] = {"processes": False, "dashboard_address": ":0", "resources": {"CPU": 1}}
    with (
        LocalCluster(n_workers=4, threads_per_worker=1, **settings) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


@pytest.fixture(autouse=True)
def dear_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers alone take a thousand times as long as they do, and there are no others' shared steps."""

    def dear(problem: StepProblem) -> Iterator[PricedStrategy]:
        yield from (replace(each, compute=1000 * each.compute) for each in alone(problem))

    monkeypatch.setattr(strategy_prices, "STRATEGIES", (dear,))
    monkeypatch.setattr(sharded_prices, "TASK", 0.0)
    monkeypatch.setattr(sharded_prices, "HANDOVER", 0.0)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Leaves one way to shard kernels to choose from."""

    def leaves(strategy: str) -> None:
        fits = sharded_prices._fits
        monkeypatch.setattr(sharded_prices, "_fits", lambda job, name, size: name == strategy and fits(job, name, size))

    return leaves


def tables(folder: Path, **train: Any) -> dict[str, Any]:
    run = {"dir": str(folder / "runs"), "name": "it"}
    own = {"strategy": "auto", "batch_size": 20, "epochs": 2, "lr": 0.01, "seed": 3, **train}
    found = tiny_job(tiny_data(folder), train=own, model={"layers": LAYERS}, cluster={"settle": 0.0}, run=run)
    return {section: {key: own for key, own in keys.items() if key != "partition"} for section, keys in found.items()}


def weights(result: Result) -> np.ndarray:
    return np.asarray(result.model.vector)


def test_a_run_becomes_one_of_layer_and_can_be_gone_on_with(client: Client, tmp_path: Path, only: Any) -> None:
    only("layer")
    job = tables(tmp_path)
    result = daskcnn.train(client, job)
    events = RunDirectory.open(result.run).events()
    assert [e.strategy for e in events if isinstance(e, RunStarted)] == ["auto", "layer"]
    (choice,) = [e for e in events if isinstance(e, StrategyChosen)]
    assert (choice.candidates[0].strategy, choice.candidates[0].estimated) == ("layer", True)
    assert any(isinstance(e, KernelsSharded) for e in events)
    assert [e.status for e in events if isinstance(e, RunEnded)] == ["done"]
    assert result.summary["strategy"] == "layer"
    assert json.loads((result.run / "job.json").read_text())["train"]["strategy"] == "layer"
    by_name = {**job, "train": job["train"] | {"strategy": "layer"}, "run": job["run"] | {"name": "named"}}
    np.testing.assert_allclose(weights(result), weights(daskcnn.train(client, by_name)), rtol=1e-4, atol=1e-6)
    more = daskcnn.train(client, {**job, "train": job["train"] | {"epochs": 3}}, resume=result.run)
    assert (more.summary["strategy"], more.summary["epochs"]) == ("layer", 3.0)
    with pytest.raises(JobError, match=r"train\.strategy = agwu: the run"):
        daskcnn.train(client, {**job, "train": job["train"] | {"strategy": "agwu", "epochs": 3}}, resume=result.run)


@pytest.mark.slow
def test_a_run_becomes_one_of_groups(client: Client, tmp_path: Path, only: Any) -> None:
    only("bsp")
    result = daskcnn.train(client, tables(tmp_path))
    first, then = [e for e in RunDirectory.open(result.run).events() if isinstance(e, RunStarted)]
    assert (first.strategy, then.strategy, then.replica_size, then.replicas) == ("auto", "bsp", 2, 2)
    assert result.summary["status"] == "done"
