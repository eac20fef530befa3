"""Zarr arrays that are used in place, by workers that are processes: read there, changed meanwhile, or out of reach."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client

import daskcnn
from daskcnn.errors import ClusterError, DataError
from daskcnn.events import Event, RunStarted
from daskcnn.store.array_index import INDEX, read_index
from daskcnn.store.foreign.in_place import Arrays, outline
from daskcnn.trained.evaluate import evaluate
from tests.cluster.cluster_jobs import addresses_of, local_cluster
from tests.special_files import NOBODY
from tests.store.arrays_in_place import index_of, tiles, write_array

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Two CPU workers and one for the server."""
    with local_cluster(2) as client:
        yield client


def job_on(arrays: Arrays, runs: Path) -> dict[str, Any]:
    data = {"images": arrays.images, "labels": arrays.labels, "validation": arrays.validation}
    train = {"epochs": 2, "batch_size": 20, "strategy": "bsp", "partition": "udpa"}
    model = {"layers": [{"layer": "dense", "units": 5}]}
    return {"data": data, "model": model, "train": train, "run": {"dir": str(runs), "name": "one"}}


def test_two_processes_read_the_arrays_and_train_on_them(client: Client, tmp_path: Path) -> None:
    arrays = tiles(tmp_path)
    result = daskcnn.train(client, job_on(arrays, tmp_path / "runs"))
    assert result.summary["status"] == "done"
    assert [worker["samples"] > 0 for worker in result.summary["workers"]] == [True, True]
    assert read_index(result.run / INDEX) == index_of(outline(arrays))
    told = evaluate(str(result.run), checkpoint="last", path=None, say=lambda _: None)
    assert told["accuracy"] == pytest.approx(result.summary["test"]["accuracy"])


def test_an_array_that_changes_after_it_was_read_ends_the_run(client: Client, tmp_path: Path) -> None:
    arrays = tiles(tmp_path)

    def write(event: Event) -> None:
        if isinstance(event, RunStarted):
            zarr.open_array(arrays.images, mode="r+")[:] = 7

    with pytest.raises(DataError, match=r"samples \d+ to \d+ \(chunk \d+\) have changed since"):
        daskcnn.train(client, job_on(arrays, tmp_path / "runs"), on_event=write)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a worker another user's")
def test_the_one_worker_that_may_not_read_is_named(client: Client, tmp_path: Path) -> None:
    arrays = tiles(tmp_path)
    os.chmod(tmp_path, 0o700)
    other = addresses_of(client)["cpu-1"]
    try:
        client.run(os.seteuid, NOBODY, workers=[other])
        with pytest.raises(ClusterError, match=r"does not see the data set: .*Permission denied") as caught:
            daskcnn.train(client, job_on(arrays, tmp_path / "runs"))
    finally:
        client.run(os.seteuid, 0, workers=[other])
    assert other in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_storage_of_one_process_alone_is_not_seen_by_the_workers(client: Client, tmp_path: Path) -> None:
    arrays = tiles("memory://in-place")
    with pytest.raises(ClusterError, match=r"worker .* does not see the data set: memory://in-place"):
        daskcnn.train(client, job_on(arrays, tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()
    np.testing.assert_array_equal(zarr.open_array(arrays.labels, mode="r")[:5], 0)


@pytest.mark.slow
def test_a_refusal_is_told_in_a_line_and_not_by_tracebacks_of_workers(tmp_path: Path) -> None:
    images = np.ones((100, 8, 8, 2), np.float32)
    images[63, 1, 2, 1] = np.nan
    paths = write_array(tmp_path / "x", images, 10), write_array(tmp_path / "y", np.arange(100) % 5, 100)
    flags = [f"--set=data.{key}='{path}'" for key, path in zip(("images", "labels"), paths, strict=True)]
    ended = subprocess.run(
        [sys.executable, "-m", "daskcnn.run", *flags, "--set=data.validation=8", "--workers", "cpu=1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2
    assert "error: " in ended.stderr.splitlines()[-1]
    assert "sample 63, channel 1, pixel (1, 2) is nan; set data.nodata" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
