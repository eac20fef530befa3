"""`CNNClassifier` against the command that trains the same job on the same data: the same weights, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
import tomli_w
from distributed import Client, LocalCluster

import daskcnn
from daskcnn.datasets import own_data
from tests.cluster.cluster_jobs import LAYERS

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data set of a fit stays where it is."""
    monkeypatch.setattr(own_data, "remove", lambda path: None)


@pytest.fixture
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What convolutions are computed by does not depend on what was measured."""
    monkeypatch.setenv("DASKCNN_TUNE", "0")


def samples() -> tuple[Any, np.ndarray]:
    """Random images of ten classes as a Dask array, and their labels."""
    rng = np.random.default_rng(0)
    return da.from_array(rng.integers(0, 256, (300, 16, 16, 3), dtype=np.uint8), chunks=(70, 16, 8, 3)), np.arange(
        300
    ) % 10


def by_command(fitted: daskcnn.CNNClassifier, folder: Path, workers: int) -> np.ndarray:
    """The weights that `daskcnn run` comes to with the job of a fit."""
    assert fitted.run_ is not None
    job: dict[str, Any] = json.loads((fitted.run_ / "job.json").read_text())
    job["run"] |= {"dir": str(folder / "by-command"), "name": "it"}
    job["cluster"] |= {"workers": {"cpu": workers}}
    threads = job["train"].get("threads") or 1
    job["train"] |= {"threads": threads}
    (folder / "job.toml").write_text(tomli_w.dumps(without_none(job)))
    command = [sys.executable, "-m", "daskcnn.run", str(folder / "job.toml"), "--json"]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return np.asarray(daskcnn.load(folder / "by-command/it").vector)


def without_none(table: dict[str, Any]) -> dict[str, Any]:
    """The table as TOML has it: keys without a value are left out."""
    return {k: without_none(v) if isinstance(v, dict) else v for k, v in table.items() if v is not None}


@pytest.mark.usefixtures("kept", "untuned")
def test_one_worker_trains_to_the_same_weights_as_the_command(tmp_path: Path) -> None:
    images, labels = samples()
    estimator = daskcnn.CNNClassifier(
        model=LAYERS, epochs=3, data_dir=tmp_path, run_dir=tmp_path / "runs", job={"train": {"threads": 1}}
    )
    fitted = estimator.fit(images, labels)
    np.testing.assert_array_equal(by_command(fitted, tmp_path, 1), fitted.model_.vector)


@pytest.mark.usefixtures("kept", "untuned")
def test_two_workers_train_to_the_same_weights_as_the_command(tmp_path: Path) -> None:
    images, labels = samples()
    settings: dict[str, Any] = {"threads_per_worker": 1, "dashboard_address": ":0", "silence_logs": "ERROR"}
    with LocalCluster(n_workers=2, **settings) as cluster, Client(cluster, set_as_default=False) as client:
        estimator = daskcnn.CNNClassifier(
            model=LAYERS,
            strategy="bsp",
            epochs=3,
            client=client,
            data_dir=tmp_path,
            run_dir=tmp_path / "runs",
            job={"train": {"threads": 1, "partition": "udpa"}},
        )
        fitted = estimator.fit(images, labels)
    assert [worker["samples"] for worker in fitted.summary_["workers"]] == [405, 405]
    np.testing.assert_array_equal(by_command(fitted, tmp_path, 2), fitted.model_.vector)


def test_a_fit_in_a_task_has_its_own_cluster() -> None:
    """As joblib's backend `dask` and searches on a cluster have it."""
    X, y = np.random.default_rng(0).normal(size=(20, 4, 4)), np.arange(20) % 2
    estimator = daskcnn.CNNClassifier(model=[{"layer": "dense"}], epochs=1)
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        there = client.submit(lambda: estimator.fit(X, y).model_.vector).result()
    np.testing.assert_array_equal(there, estimator.fit(X, y).model_.vector)
