"""Jobs on zarr arrays that are used in place: read once by the workers, trained on, evaluated, resumed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from distributed import Client, LocalCluster

from daskcnn.datasets.job_dataset import find_dataset
from daskcnn.errors import DataError, JobError
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import Job
from daskcnn.launch.dry_run import dry_run
from daskcnn.launch.resume import job_to_run
from daskcnn.launch.training import train_job
from daskcnn.planning.simulate import scenario_of, simulate
from daskcnn.sim.cluster import SimulatedCluster, Worker
from daskcnn.store.array_index import INDEX
from daskcnn.store.chunk_source import CACHE
from daskcnn.store.foreign.array import ImageArray
from daskcnn.store.foreign.in_place import Arrays
from daskcnn.trained.evaluate import evaluate
from tests.store.arrays_in_place import tiles, write_array

LAYERS: list[dict[str, Any]] = [
    {"layer": "conv", "kernels": 4, "size": 3, "pad": 1},
    {"layer": "relu"},
    {"layer": "dense", "units": 5},
]


@pytest.fixture(autouse=True)
def fresh_cache() -> Iterator[None]:
    CACHE.clear()
    yield
    CACHE.clear()


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A worker in this process."""
    alone: dict[str, Any] = {"n_workers": 1, "threads_per_worker": 1, "processes": False, "dashboard_address": ":0"}
    with LocalCluster(**alone, resources={"CPU": 1}) as cluster, Client(cluster) as client:
        yield client


def job_on(arrays: Arrays, runs: Path, **data: Any) -> dict[str, Any]:
    """The tables of a small job."""
    keys: dict[str, Any] = {"images": arrays.images, "labels": arrays.labels, "validation": arrays.validation} | data
    return {
        "data": keys,
        "model": {"layers": LAYERS},
        "train": {"epochs": 2, "batch_size": 32, "strategy": "bsp", "partition": "udpa"},
        "run": {"dir": str(runs), "name": "one"},
    }


def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The chunks that are read from now on."""
    noted, read = list[int](), ImageArray.read

    def reading(array: ImageArray, index: int) -> Any:
        noted.append(index)
        return read(array, index)

    monkeypatch.setattr(ImageArray, "read", reading)
    return noted


def test_a_run_reads_the_array_once_and_the_next_one_not_again(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, said = job_on(tiles(tmp_path), tmp_path / "runs"), list[str]()
    result = train_job(resolve(raw), client=client, say=said.append)
    assert result.summary["status"] == "done"
    assert any("for its statistics 100 %" in line for line in said)
    assert (result.run / INDEX).is_file()
    said.clear()
    CACHE.clear()
    chunks = reads(monkeypatch)
    raw["run"]["name"] = "two"
    train_job(resolve(raw), client=client, say=said.append)
    assert not any("statistics" in line for line in said)
    assert len(chunks) <= 15 + 1, "each chunk once for training; the first one to see whether it can be read"
    told = evaluate(str(result.run), checkpoint="last", path=None, say=said.append)
    assert told["samples"] == 60
    assert told["accuracy"] == pytest.approx(result.summary["test"]["accuracy"])


@pytest.mark.slow
def test_an_array_that_changes_ends_the_run_so_that_it_can_go_on(client: Client, tmp_path: Path) -> None:
    arrays = tiles(tmp_path)
    raw = job_on(arrays, tmp_path / "runs")
    find_dataset(resolve(raw), progress=lambda *_: None)
    images = zarr.open_array(arrays.images, mode="r+")
    # the index of a storage that says nothing of versions stays in the cache
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("daskcnn.store.foreign.in_place.storage_version", lambda files: "")
        find_dataset(resolve(raw), progress=lambda *_: None)
        before = np.array(images[130])
        images[130] = 1
        with pytest.raises(DataError) as caught:
            train_job(resolve(raw), client=client)
        told = str(caught.value)
        assert "samples 120 to 139 (chunk 6) have changed since" in told
        assert f"--resume {tmp_path / 'runs' / 'one'}" in told
        CACHE.clear()
        images[130] = before
        job, path = job_to_run({}, str(tmp_path / "runs" / "one"))
        assert train_job(job, client=client, resume=path).summary["status"] == "done"
        images[130] = 1
        CACHE.clear()
        raw["run"]["name"] = "anew"
        assert train_job(resolve(raw), client=client).summary["status"] == "done", "its index was forgotten"


@pytest.mark.slow
def test_an_array_that_has_changed_before_a_run_is_read_anew_by_the_next(client: Client, tmp_path: Path) -> None:
    arrays = tiles(tmp_path)
    raw = job_on(arrays, tmp_path / "runs")
    # the index of a storage that says nothing of versions stays in the cache
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("daskcnn.store.foreign.in_place.storage_version", lambda files: "")
        find_dataset(resolve(raw), progress=lambda *_: None)
        images = zarr.open_array(arrays.images, mode="r+")
        images[:] = np.asarray(images[:]) + 1
        with pytest.raises(DataError, match=r"samples \d+ to \d+ \(chunk \d+\) have changed since"):
            train_job(resolve(raw), client=client)
        assert not (tmp_path / "runs").exists(), "the workers are asked before the run begins"
        CACHE.clear()
        assert train_job(resolve(raw), client=client).summary["status"] == "done", "its index was forgotten"


@pytest.mark.slow
def test_pixels_that_are_no_numbers_are_found_before_training(client: Client, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(100, 4, 4, 2)).astype("float32")
    x[63, 1, 2, 1] = np.nan
    arrays = Arrays(write_array(tmp_path / "x", x, 10), write_array(tmp_path / "y", np.arange(100) % 5, 100))
    raw = job_on(replace(arrays, validation=8), tmp_path / "runs")
    with pytest.raises(DataError, match=r"x: sample 63, channel 1, pixel \(1, 2\) is nan; set data.nodata"):
        train_job(resolve(raw), client=client)
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_reads_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = reads(monkeypatch)
    _, words = dry_run(job_on(tiles(tmp_path), tmp_path / "runs"), resume=None)
    assert "index     300 images will be read once by the workers" in words
    assert "tiles.zarr/x" in words
    assert chunks == []


def test_the_simulator_takes_arrays_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = reads(monkeypatch)
    cluster = SimulatedCluster(worker=[Worker(name="a", images_per_second=1000.0)])
    chosen = scenario_of(resolve(job_on(tiles(tmp_path), tmp_path / "runs")), cluster, "here")
    assert (chosen.samples, chosen.about["dataset"]) == (200, "tiles.zarr/x")
    assert resolve(chosen.job.model_dump(mode="json")).data.name == "tiles.zarr/x"
    simulate(chosen)
    assert chunks == []
    simulate(chosen, train=True)
    assert set(chunks) == set(range(15))


def test_a_scale_reaches_the_network(tmp_path: Path) -> None:
    raw = job_on(tiles(tmp_path), tmp_path / "runs", scale={"mean": [1, 2, 3], "deviation": [4.0, 5.0, 6.0]})
    data = find_dataset(resolve(raw), progress=lambda *_: None)
    assert (data.mean.tolist(), data.deviation.tolist()) == ([1, 2, 3], [4, 5, 6])
    assert Job.model_validate(resolve(raw).model_dump(mode="json")) == resolve(raw)


def test_a_class_of_which_only_test_samples_are_there(tmp_path: Path) -> None:
    arrays = tiles(tmp_path)
    x = np.zeros((6, 8, 6, 3), "uint16")
    data = {
        "test_images": write_array(tmp_path / "u", x, 6),
        "test_labels": write_array(tmp_path / "v", np.arange(6), 6),
    }
    with pytest.raises(DataError, match=r"v: sample 5 has '5', which is none of 5 classes"):
        find_dataset(resolve(job_on(arrays, tmp_path / "runs", **data)), progress=lambda *_: None)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"labels": None}, "data.labels: missing; data.images needs the array of its labels"),
        ({"path": "x.zarr"}, "data.path: a prepared data set has it"),
        ({"archive": "x.tar"}, "data.archive: a prepared data set has it"),
        ({"order": "stored"}, "data.order: a prepared data set has it"),
        ({"test_images": "t"}, "data.test_images and data.test_labels: one without the other"),
        ({"test_images": "t", "test_labels": "u", "test": 0.5}, "data.test and data.test_images: each says which"),
        ({"images": None}, "data.labels: goes with data.images"),
        (
            {"images": None, "labels": None, "nodata": 0.0},
            "data.nodata: goes with data.images, arrays that are used in place; give nodata to",
        ),
        ({"test": 1.5}, "data.test = 1.5: "),
        ({"scale": {"mean": [0.0], "deviation": [0.0]}}, "data.scale.deviation"),
        ({"scale": {"mean": [1e300], "deviation": [1.0]}}, "data.scale.mean.0"),
    ],
)
def test_keys_that_contradict_each_other(data: dict[str, Any], told: str) -> None:
    keys = {key: value for key, value in ({"images": "x", "labels": "y"} | data).items() if value is not None}
    with pytest.raises(JobError) as caught:
        resolve({"data": keys})
    assert any(problem.startswith(told) for problem in caught.value.problems), caught.value.problems
