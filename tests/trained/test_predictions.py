"""`daskcnn predict --out` in one process: what the tasks do, what is kept, what is written, and what is refused."""

from __future__ import annotations

import csv
import gc
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import dask.array
import numpy as np
import pyarrow.parquet
import pytest
import zarr
from click.testing import CliRunner, Result
from PIL import Image

from daskcnn import load as daskcnn_load
from daskcnn.arrays import Device
from daskcnn.cli import main as daskcnn
from daskcnn.compiled import warm
from daskcnn.errors import DataError, Interrupted, Lost, installing
from daskcnn.export.model_file import write_model
from daskcnn.job.resolve import resolve
from daskcnn.store import open_dataset
from daskcnn.store.chunk_source import CACHE
from daskcnn.store.image_facts import Facts
from daskcnn.store.making.writer import write
from daskcnn.store.manifest import Source, describe
from daskcnn.trained import predict
from daskcnn.trained.place import find_network
from daskcnn.trained.predictions import parts as kept
from daskcnn.trained.predictions import sources, tables, whole
from daskcnn.trained.predictions.parts import Predicted
from daskcnn.trained.predictions.sources import Part
from daskcnn.trained.predictions.tables import Columns
from daskcnn.training.trained_network import Classifier
from tests.export.networks import classifier, facts
from tests.rounding_of_networks import of_probabilities
from tests.special_files import SPECIAL, special
from tests.tiny_runs import CLASSES, random_state, tiny_data, tiny_job, tiny_run

DONE: list[Part] = []
"""The parts that were predicted, in order."""


def _sent(what: Any) -> Any:
    """The copy that another process gets."""
    return pickle.loads(pickle.dumps(what))  # noqa: S301 # made here


class SpreadHere:
    """Does what tasks do here, one part after the other; all travels as it would between processes."""

    stop_after: int | None = None
    stop: Exception = Lost("the cluster is gone")

    @classmethod
    def over(
        cls, client: None, function: Any, parts: Iterable[Part], settings: Any, **options: Any
    ) -> Iterator[tuple[Part, Any]]:
        assert options["whole"]
        function = _sent(function)
        for number, part in enumerate(reversed(list(parts))):  # they come in any order
            if number == cls.stop_after:
                raise cls.stop
            there = _sent(part)
            DONE.append(part)
            yield part, _sent(function(there, kind="cpu", threads=2))


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Work in an empty folder, with parts of a chunk, and without a cluster."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(whole, "connect", lambda *_, **__: nullcontext())
    monkeypatch.setattr(whole, "wait_for_members", lambda *_, **__: _NoMembers)
    monkeypatch.setattr(whole, "check_versions", lambda *_: None)
    monkeypatch.setattr(whole, "spread", SpreadHere.over)
    monkeypatch.setattr(sources, "_LEAST_BYTES", 1)
    monkeypatch.setattr(SpreadHere, "stop_after", None)
    monkeypatch.setattr(SpreadHere, "stop", Lost("the cluster is gone"))
    DONE.clear()
    CACHE.clear()
    yield
    CACHE.clear()


class _NoMembers:
    workers = ()


@pytest.fixture
def store(tmp_path: Path) -> str:
    return tiny_data(tmp_path)


@pytest.fixture
def run(tmp_path: Path, store: str) -> Path:
    raw = tiny_job(store)
    return tiny_run(tmp_path, raw, random_state(resolve(raw)))


@pytest.fixture
def network(run: Path) -> Classifier:
    return find_network(str(run), "last", pytest.fail).classifier


def invoke(*args: object) -> Result:
    result = CliRunner().invoke(daskcnn, [str(a) for a in args])
    assert "Traceback" not in result.output
    assert "internal error" not in result.output
    return result


def predicted(*args: object) -> Result:
    result = invoke("predict", *args)
    assert result.exit_code == 0, result.output
    return result


def refused(*args: object, code: int = 2) -> str:
    result = invoke("predict", *args)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    return result.stderr


def rows(file: str | Path) -> list[dict[str, str]]:
    with open(file, encoding="utf-8", newline="") as opened:
        return list(csv.DictReader(opened))


def chances(found: list[dict[str, str]], names: Iterable[str] = CLASSES) -> Any:
    return np.array([[float(row[f"p_{name}"]) for name in names] for row in found], np.float32)


# --- data sets ---


def test_a_data_set_as_csv(run: Path, store: str, network: Classifier) -> None:
    told = predicted(run, store, "--out", "p.csv").stdout
    images, labels = open_dataset(store).test.read(0, 60)
    expected = network.predict(images)
    found = rows("p.csv")
    assert list(found[0]) == ["sample", "label", "predicted", *(f"p_{name}" for name in CLASSES)]
    assert [int(row["sample"]) for row in found] == list(range(60))
    assert [row["label"] for row in found] == [CLASSES[label] for label in labels]
    assert [row["predicted"] for row in found] == [CLASSES[n] for n in expected.argmax(axis=1)]
    # parts of another size may be convolved in another way
    np.testing.assert_allclose(chances(found), expected, rtol=of_probabilities(network, images), atol=1e-6)
    assert [(p.split, p.lo, p.hi) for p in sorted(DONE, key=lambda p: p.index)] == [("test", 0, 50), ("test", 50, 60)]
    assert told.startswith(f"p.csv: 60 samples of {store} (test), ")
    assert not Path("p.csv.parts").exists()


def test_a_data_set_as_parquet_and_zarr_says_the_same(run: Path, store: str) -> None:
    for suffix in ("csv", "parquet", "zarr"):
        predicted(run, store, "--part", "all", "--out", f"p.{suffix}")
    expected = rows("p.csv")
    table = pyarrow.parquet.read_table("p.parquet")
    assert table.column_names == list(expected[0])
    for name in ("part", "label", "predicted"):
        assert table[name].to_pylist() == [row[name] for row in expected]
    assert table["sample"].to_pylist() == [int(row["sample"]) for row in expected] == [*range(120), *range(60)]
    np.testing.assert_array_equal(np.array([table[f"p_{name}"] for name in CLASSES]).T, chances(expected))
    group: Any = zarr.open_group("p.zarr", mode="r")
    np.testing.assert_array_equal(group["probabilities"][:], chances(expected))
    assert tuple(group.attrs["classes"]) == CLASSES
    assert [CLASSES[number] for number in group["predicted"][:]] == [row["predicted"] for row in expected]
    assert [CLASSES[number] for number in group["label"][:]] == [row["label"] for row in expected]
    assert list(group["part"][:]) == ["train"] * 120 + ["test"] * 60


@pytest.mark.parametrize(("part", "samples"), [("train", 120), ("test", 60), ("all", 180)])
def test_parts_of_a_data_set(run: Path, store: str, part: str, samples: int) -> None:
    done = json.loads(predicted(run, store, "--part", part, "--out", "p.csv", "--json").stdout)
    assert (done["samples"], done["unreadable"], done["out"]) == (samples, 0, "p.csv")
    assert len(rows("p.csv")) == samples


def test_small_chunks_are_joined(run: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_LEAST_BYTES", 2 * 50 * 8 * 8 * 3)
    predicted(run, store, "--part", "train", "--out", "p.csv")
    assert sorted((p.lo, p.hi) for p in DONE) == [(0, 100), (100, 120)]


def test_a_worker_that_sees_another_data_set_is_refused(run: Path, store: str, tmp_path: Path) -> None:
    source = sources.of_store(store, "test", open_dataset(store))
    other = sources.StoreReader(store, "0" * 64)
    assert len(source.read(source.parts[0]).images) == 50
    with pytest.raises(DataError, match="another data set than the driver sees"):
        other(source.parts[0])


def test_a_data_set_of_another_shape_is_refused(run: Path, tmp_path: Path) -> None:
    other = tiny_data(tmp_path, name="other", shape=(8, 8, 1))
    told = refused(run, other, "--out", "p.csv")
    assert "images uint8 (8, 8, 1), the network takes uint8 (8, 8, 3)" in told


def unusual(folder: Path) -> tuple[Classifier, str]:
    """A network, and a store, of tiles of twelve channels in int16 with marks for no data and several labels."""
    rng = np.random.default_rng(0)

    def part(count: int) -> tuple[Any, Any]:
        images = rng.integers(-500, 500, (count, 8, 8, 12)).astype(np.int16)
        images[rng.random(images.shape) < 0.1] = -999
        return images, rng.integers(0, 2, (count, 3)).astype(np.uint8)

    source = Source("tiles", ("sun", "rain", "snow"), part(60), part(30), {})
    path = str(folder / "tiles.zarr")
    write(source, describe(source, chunk=20, order="stored", seed=0, nodata=-999), path, lambda _: None)
    layers = [{"layer": "conv", "kernels": 4, "size": 3}, {"layer": "relu"}, {"layer": "dense", "units": 3}]
    return classifier({"layers": layers}, Facts.of(open_dataset(path))), path


def test_tiles_of_twelve_channels_with_several_labels(tmp_path: Path) -> None:
    network, path = unusual(tmp_path)
    write_model(network, "", tmp_path / "m.safetensors")
    predicted("m.safetensors", path, "--out", "p.csv")
    images, labels = open_dataset(path).test.read(0, 30)
    expected, names = network.predict(images), ("sun", "rain", "snow")
    np.testing.assert_array_equal(chances(rows("p.csv"), names), expected)
    for row, numbers, truth in zip(rows("p.csv"), expected, labels, strict=True):
        assert row["predicted"] == ";".join(n for n, p in zip(names, numbers, strict=True) if p >= 0.5)
        assert row["label"] == ";".join(n for n, yes in zip(names, truth, strict=True) if yes)


@pytest.mark.parametrize("several", [False, True])
def test_labels_and_predictions_are_numbered_alike(tmp_path: Path, several: bool) -> None:
    """The data set has the network's classes in another order, and one that it does not know."""
    known = replace(facts((8, 8, 1)), classes=("a", "b", "c"), labels="several" if several else "classes")
    network = classifier({"layers": [{"layer": "dense", "units": 3}]}, known)
    write_model(network, "", tmp_path / "m.safetensors")
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 1), dtype=np.uint8)
    found, names = network.predict(images), ("c", "x", "b", "a")
    numbers = np.array([3, 2, 0])[found.argmax(axis=1)]  # the network's answers are right
    numbers[0] = 1
    rows_of = np.stack([found[:, 2] >= 0.5, np.arange(40) == 0, found[:, 1] >= 0.5, found[:, 0] >= 0.5], axis=1)
    labels = rows_of.astype(np.uint8) if several else numbers
    source = Source("other", names, (images, labels), (images, labels), {})
    write(source, describe(source, chunk=20, order="stored", seed=0), "d.zarr", lambda _: None)
    for out in ("p.csv", "p.zarr"):
        predicted("m.safetensors", "d.zarr", "--out", out)
    group: Any = zarr.open_group("p.zarr", mode="r")
    assert group["label"].shape == group["predicted"].shape
    assert group.attrs["classes"] == ["a", "b", "c"]
    np.testing.assert_array_equal(group["label"][1:], group["predicted"][1:])
    assert several or group["label"][0] == -1
    table = rows("p.csv")
    assert [row["label"] for row in table[1:]] == [row["predicted"] for row in table[1:]]
    assert table[0]["label"].endswith("x")


@pytest.mark.parametrize("own", [None, -1])
def test_a_data_set_has_its_own_value_for_no_data(tmp_path: Path, own: int | None) -> None:
    """As for `evaluate`: a number that stands for no data in training is data where the data set says another one."""
    rng = np.random.default_rng(0)
    images = rng.integers(-500, 500, (60, 8, 8, 12)).astype(np.int16)
    gone, seen = rng.random(images.shape) < 0.1, rng.random(images.shape) < 0.1
    source = Source("tiles", CLASSES[:2], (images, np.arange(60) % 2), (images, np.arange(60) % 2), {})
    source = replace(
        source, test=(np.where(gone, np.int16(-999), np.where(seen, np.int16(-1), images)), source.test[1])
    )
    write(source, describe(source, chunk=20, order="stored", seed=0, nodata=-999), "b.zarr", lambda _: None)
    known = facts((8, 8, 12), dtype=np.dtype("int16"))
    network = classifier({"layers": [{"layer": "dense", "units": 4}]}, replace(known, nodata=own))
    write_model(network, "", tmp_path / "m.safetensors")
    predicted("m.safetensors", "b.zarr", "--out", "p.csv")
    expected = Classifier(network.job, replace(known, nodata=-999), network.weights).predict(source.test[0])
    np.testing.assert_array_equal(chances(rows("p.csv"), network.classes), expected)


def test_a_data_set_of_another_range_of_values_is_refused(tmp_path: Path) -> None:
    network, path = unusual(tmp_path)
    images = Facts.of(open_dataset(path))
    network = Classifier(network.job, replace(images, value_range=(0.0, 4095.0)), network.weights)
    write_model(network, "", tmp_path / "m.safetensors")
    other = open_dataset(path).manifest.model_copy(update={"value_range": (0.0, 255.0)})
    zarr.open_group(path, mode="r+").update_attributes(other.attributes())
    told = refused("m.safetensors", path, "--out", "p.csv")
    assert "black and white at (0.0, 255.0), the network was trained on (0.0, 4095.0); give a data set like" in told


def test_array_files_of_the_networks_own_number_type(tmp_path: Path) -> None:
    network, path = unusual(tmp_path)
    write_model(network, "", tmp_path / "m.safetensors")
    images, _ = open_dataset(path).test.read(0, 2)
    np.save("little.npy", images[0])
    np.save("big.npy", images[1].astype(">i2"))
    predicted("m.safetensors", "little.npy", "big.npy", "--out", "p.csv")
    np.testing.assert_array_equal(chances(rows("p.csv"), ("sun", "rain", "snow")), network.predict(images))
    np.save("other.npy", images[0].astype(np.int32))
    assert "other.npy: int32 of shape (8, 8, 12); give int16 of shape (8, 8, 12)" in refused(
        "m.safetensors", "other.npy"
    )
    Image.new("RGB", (8, 8)).save("a.png")
    assert "images of 12 channels, which image files do not have" in refused("m.safetensors", "a.png")


@pytest.mark.parametrize(("layout", "version"), [("NHWC", 3), ("NCHW", 3), ("NHWC", 2)])
def test_a_zarr_array_of_ones_own_is_predicted_in_place(tmp_path: Path, layout: str, version: Any) -> None:
    network, path = unusual(tmp_path)
    write_model(network, "", tmp_path / "m.safetensors")
    images, _ = open_dataset(path).test.read(0, 30)
    given = images if layout == "NHWC" else images.transpose(0, 3, 1, 2)
    chunks = (7, *given.shape[1:])
    zarr.create_array("own.zarr", shape=given.shape, dtype=given.dtype, chunks=chunks, zarr_format=version)[...] = given
    predicted("m.safetensors", "own.zarr", "--out", "p.csv")
    found = rows("p.csv")
    assert [row["sample"] for row in found] == [str(i) for i in range(30)]
    assert "label" not in found[0]
    np.testing.assert_array_equal(chances(found, ("sun", "rain", "snow")), network.predict(images))
    assert "an array has no parts" in refused("m.safetensors", "own.zarr", "--part", "all", "--out", "q.csv")
    assert "say where to write: --out p.csv" in refused("m.safetensors", "own.zarr")


@pytest.mark.parametrize("version", [2, 3])
def test_a_group_that_is_no_data_set_is_refused_by_the_names_of_its_arrays(run: Path, version: Any) -> None:
    """As xarray writes one."""
    group = zarr.open_group("own.zarr", mode="w", zarr_format=version)
    group.create_array("x", data=np.zeros((5, 8, 8, 3), np.uint8))
    told = refused(run, "own.zarr", "--out", "p.csv")
    assert "own.zarr: a zarr group, not an array (arrays in it: x); give the path of one of its arrays" in told


def test_a_zarr_array_of_other_images_is_refused(run: Path) -> None:
    zarr.create_array("tiles.zarr", data=np.zeros((5, 8, 8, 12), np.uint8))
    told = refused(run, "tiles.zarr", "--out", "p.csv")
    assert (
        "images uint8 (8, 8, 12), the network takes uint8 (8, 8, 3); give an array (N, H, W, C) or (N, C, H, W)" in told
    )


def test_an_array_that_has_changed_is_other_data(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    array = zarr.create_array("tiles.zarr", data=data, chunks=(10, 8, 8, 3))
    monkeypatch.setattr(SpreadHere, "stop_after", 2)
    refused(run, "tiles.zarr", "--out", "p.csv", code=5)
    array[0] = 0
    assert "parts of other data" in refused(run, "tiles.zarr", "--out", "p.csv")


@pytest.mark.parametrize(
    ("dtype", "kept", "channels"), [("bool", "uint8", 2), ("int8", "int16", 2), ("uint8", "uint8", 1)]
)
def test_images_are_taken_as_they_are_prepared(tmp_path: Path, dtype: str, kept: str, channels: int) -> None:
    """Booleans and int8, and (N, H, W) for images of one channel: in memory, lazy, with names, and in place."""
    xarray, known = pytest.importorskip("xarray"), facts((8, 8, channels), dtype=np.dtype(kept))
    network = classifier({"layers": [{"layer": "dense", "units": 4}]}, known)
    write_model(network, "", tmp_path / "m.safetensors")
    given = np.random.default_rng(0).integers(0, 2, (20, 8, 8, channels)).astype(dtype)
    expected = network.predict(given.astype(kept))
    given = given[..., 0] if channels == 1 else given
    model = daskcnn_load(tmp_path / "m.safetensors")
    lazy = dask.array.from_array(given, chunks=5)
    named = xarray.DataArray(lazy, dims=("n", "y", "x", "band")[: given.ndim], coords={"n": np.arange(20)})
    for images in (given, np.ma.masked_array(given), lazy, named):
        np.testing.assert_allclose(np.asarray(model.predict(images)), expected, rtol=1e-6)
    zarr.create_array("own.zarr", data=given, chunks=(7, *given.shape[1:]))
    predicted("m.safetensors", "own.zarr", "--out", "p.csv")
    np.testing.assert_allclose(chances(rows("p.csv"), network.classes), expected, rtol=1e-6)


@pytest.mark.parametrize("trained", ["float32", "float64"])
@pytest.mark.parametrize("nodata", [None, -99.9])
def test_float32_and_float64_stand_for_each_other(tmp_path: Path, trained: str, nodata: float | None) -> None:
    """Scaled integers are float32 in place and float64 to xarray; marks are rounded by each type in its own way."""
    xarray = pytest.importorskip("xarray")
    known = facts((8, 8, 2), dtype=np.dtype(trained), nodata=nodata)
    network = classifier({"layers": [{"layer": "dense", "units": 4}]}, known)
    write_model(network, "", tmp_path / "m.safetensors")
    stored = np.random.default_rng(0).integers(-1000, 1000, (20, 8, 8, 2)).astype(np.int16)
    stored[3, 4, 4, 1] = -999
    attributes: dict[str, Any] = {"scale_factor": 0.1} | ({} if nodata is None else {"_FillValue": -999})
    group = zarr.open_group("own.zarr", mode="w")
    group.create_array("x", data=stored, chunks=(7, 8, 8, 2), dimension_names=("n", "y", "x", "band"))
    group["x"].update_attributes(attributes)
    opened = xarray.open_zarr("own.zarr", consolidated=False)["x"]
    decoded = stored * 0.1
    expected = network.predict(np.where(stored == -999, nodata or -99.9, decoded).astype(trained))
    model = daskcnn_load(tmp_path / "m.safetensors")
    for images in (opened, opened.load(), decoded.astype(np.float32), group["x"]):
        np.testing.assert_allclose(np.asarray(model.predict(images)), expected, rtol=1e-4)
    predicted("m.safetensors", "own.zarr/x", "--out", "p.csv")
    np.testing.assert_allclose(chances(rows("p.csv"), network.classes), expected, rtol=1e-4)
    for dtype in ("float32", "float64"):
        images = decoded.astype(dtype)
        source = Source("own", network.classes, (images, np.arange(20) % 4), (images, np.arange(20) % 4), {})
        write(source, describe(source, chunk=7, order="stored", seed=0, nodata=nodata), f"{dtype}.zarr", lambda _: None)
        predicted("m.safetensors", f"{dtype}.zarr", "--out", f"{dtype}.csv")
        np.testing.assert_allclose(chances(rows(f"{dtype}.csv"), network.classes), expected, rtol=1e-4)


def real_numbers(tmp_path: Path, nodata: float | None) -> Classifier:
    """A network for images (8, 8, 2) of real numbers."""
    network = classifier(
        {"layers": [{"layer": "dense", "units": 4}]}, facts((8, 8, 2), dtype=np.dtype("float32"), nodata=nodata)
    )
    write_model(network, "", tmp_path / "m.safetensors")
    return network


def test_a_fill_value_of_an_array_is_the_networks_own_value_for_no_data(tmp_path: Path) -> None:
    images = np.random.default_rng(0).normal(100, 50, (20, 8, 8, 2)).astype(np.float32)
    images[13, 4, 4, 1] = -1
    network = real_numbers(tmp_path, -1.0)
    given = np.where(images == -1, np.float32(-9999), images)
    zarr.create_array("tiles.zarr", data=given, chunks=(10, 8, 8, 2), attributes={"_FillValue": -9999.0})
    predicted("m.safetensors", "tiles.zarr", "--out", "p.csv")
    np.testing.assert_array_equal(chances(rows("p.csv"), network.classes), network.predict(images))
    real_numbers(tmp_path, None)
    told = refused("m.safetensors", "tiles.zarr", "--out", "q.csv")
    assert "1 numbers of samples 10 to 19 are no data by its attributes (-9999 for no data)" in told


@pytest.mark.parametrize("nodata", [None, -1.0])
def test_samples_with_nan_have_no_prediction_unless_they_have_no_data(tmp_path: Path, nodata: float | None) -> None:
    images = np.random.default_rng(0).normal(100, 50, (20, 8, 8, 2)).astype(np.float32)
    images[13, 4, 4, 1] = np.nan
    network = real_numbers(tmp_path, nodata)
    zarr.create_array("tiles.zarr", data=images, chunks=(10, 8, 8, 2))
    done = predicted("m.safetensors", "tiles.zarr", "--out", "p.csv")
    found = chances(rows("p.csv"), network.classes)
    if nodata is not None:
        assert np.isfinite(found).all()
        return
    assert "warning: passed over: sample 13: has NaN or infinities" in done.stderr
    assert "20 samples" in done.stdout
    assert "1 of them unreadable" in done.stdout
    assert rows("p.csv")[13]["predicted"] == ""
    assert np.isfinite(np.delete(found, 13, 0)).all()
    np.save("a.npy", images[13])
    told = refused("m.safetensors", "a.npy")
    assert "channel 1, pixel (4, 4) is nan; set data.nodata in training to any number" in told


def test_a_data_set_with_other_labels_is_refused(run: Path, tmp_path: Path) -> None:
    network, path = unusual(tmp_path)
    write_model(
        Classifier(network.job, replace(network.facts, labels="classes"), network.weights),
        "",
        tmp_path / "m.safetensors",
    )
    assert "one a sample, or several" in refused("m.safetensors", path, "--out", "p.csv")


def test_progress_is_told(run: Path, store: str) -> None:
    told = predicted(run, store, "--part", "all", "--out", "p.csv").stderr
    assert [line.partition(",")[0] for line in told.splitlines()[1:]] == [
        f"predict: {tenth} %" for tenth in (30, 40, 70, 100)
    ]


# --- image files ---


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five images and an array in two folders, something else beside them."""
    place = tmp_path / "pictures"
    rng = np.random.default_rng(3)
    for number, name in enumerate(["a/1.png", "a/2.JPG", "b/3.bmp", "b/4.gif", "b/x/5.webp"]):
        file = place / name
        file.parent.mkdir(parents=True, exist_ok=True)
        size = 8 if number else 20
        Image.fromarray(rng.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(file)
    np.save(place / "a" / "6.npy", rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    (place / "notes.txt").write_text("no image")
    (place / ".hidden.png").write_text("no image")
    return place


@pytest.mark.parametrize("most", ["files", "bytes"])
def test_a_folder(run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, most: str) -> None:
    if most == "files":
        monkeypatch.setattr(sources, "FILES", 2)
    else:
        monkeypatch.setattr(predict, "_TOGETHER_BYTES", 2 * 8 * 8 * 3)
    predicted(run, folder, "--out", "p.csv")
    found = rows("p.csv")
    assert list(found[0])[:2] == ["file", "predicted"]
    files = [row["file"] for row in found]
    assert [str(Path(f).relative_to(folder)) for f in files] == [
        "a/1.png",
        "a/2.JPG",
        "a/6.npy",
        "b/3.bmp",
        "b/4.gif",
        "b/x/5.webp",
    ]
    assert len(DONE) == 3
    alone = json.loads(invoke("predict", run, *files, "--top", "10", "--json").stdout)
    expected = [{c["class"]: c["probability"] for c in one["classes"]} for one in alone]
    np.testing.assert_allclose(chances(found), [[e[name] for name in CLASSES] for e in expected], rtol=1e-5, atol=1e-7)


def test_files_in_folders_named_after_classes_have_labels(run: Path, folder: Path) -> None:
    (folder / "b" / "x" / "5.webp").unlink()
    predicted(run, folder, "--out", "p.csv")
    assert [row["label"] for row in rows("p.csv")] == list("aaabb")
    predicted(run, folder / "a" / "1.png", folder / "b" / "3.bmp", "--out", "p.zarr")
    group: Any = zarr.open_group("p.zarr", mode="r")
    assert list(group["label"][:]) == [0, 1]
    assert [Path(f).name for f in group["file"][:]] == ["1.png", "3.bmp"]


def test_a_broken_file_is_named_and_what_is_done_is_kept(
    run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "FILES", 2)
    (folder / "b" / "3.bmp").write_bytes(b"no image")
    told = refused(run, folder, "--out", "p.csv")
    assert "b/3.bmp: not an image that can be read" in told
    assert "--skip-bad" in told
    assert not Path("p.csv").exists()
    DONE.clear()
    result = predicted(run, folder, "--out", "p.csv", "--skip-bad")
    assert len(DONE) == 2  # of three: the part behind the broken one was done
    assert "b/3.bmp: not an image" in result.stderr
    assert ", 1 of them unreadable" in result.stdout
    bad = rows("p.csv")[3]
    assert (bad["predicted"], bad["p_a"]) == ("", "nan")
    assert sum(row["predicted"] == "" for row in rows("p.csv")) == 1


def test_compiling_on_a_machines_first_prediction_says_so(
    run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def slowly(dtype: str, say: Any = lambda done, of: None) -> int:
        for done in range(1, 26):
            say(done, 25)
        return 25

    def lines(*command: object) -> list[str]:
        return [line for line in invoke(*command).stderr.splitlines() if line.startswith("compil")]

    model = daskcnn_load(run)
    monkeypatch.setattr(warm, "is_ready", lambda _: False)
    monkeypatch.setattr(warm, "warm", slowly)
    image = folder / "a" / "1.png"
    for command in (["predict", run, image], ["predict", run, folder, "--out", "p.csv"], ["evaluate", run]):
        first, *others = lines(*command)
        assert first.startswith("compiling loops, once for this machine: this takes a minute or more")
        assert others == [f"compiled loop {done} of 25" for done in (10, 20, 25)]
    capsys.readouterr()
    model.predict(np.zeros((1, 8, 8, 3), np.uint8))
    assert "compiling loops, once for this machine" in capsys.readouterr().err
    monkeypatch.setattr(warm, "is_ready", lambda _: True)
    monkeypatch.setattr(warm, "warm", lambda *_: 0)
    assert lines("predict", run, image) == []


@pytest.mark.parametrize("kind", ["dangling", "circle", *SPECIAL])
def test_a_name_in_a_folder_that_leads_to_no_image_is_a_broken_file(run: Path, folder: Path, kind: str) -> None:
    spoilt = folder / "b" / "4.png"
    if kind in SPECIAL:
        special(spoilt, kind)
    else:
        spoilt.symlink_to("nowhere" if kind == "dangling" else "4.png")
    told = refused(run, folder, "--out", "p.csv")
    reason = {"dangling": "a link to a file that is not there", "circle": "Too many levels of symbolic links"}
    assert "b/4.png: " in told
    assert reason.get(kind, "not a regular file") in told
    assert "--skip-bad" in told
    result = predicted(run, folder, "--out", "p.csv", "--skip-bad")
    assert ", 1 of them unreadable" in result.stdout
    assert sum(row["predicted"] == "" for row in rows("p.csv")) == 1


def test_a_folder_is_looked_through_as_in_preparation(run: Path, folder: Path, tmp_path: Path) -> None:
    (folder / "b").rename(tmp_path / "elsewhere")
    (folder / "b").symlink_to(tmp_path / "elsewhere")
    (folder / "a" / "back").symlink_to(folder)
    (folder / "a" / "folder.png").mkdir()
    predicted(run, folder, "--out", "p.csv")
    assert len(rows("p.csv")) == 6


def test_a_broken_file_has_no_class_in_zarr(run: Path, folder: Path) -> None:
    (folder / "b" / "3.bmp").write_bytes(b"no image")
    predicted(run, folder, "--out", "p.zarr", "--skip-bad")
    group: Any = zarr.open_group("p.zarr", mode="r")
    assert group["predicted"][3] == -1
    assert (group["predicted"][:] >= 0).sum() == 5


def test_names_that_are_not_utf8(run: Path, folder: Path) -> None:
    os.rename(os.fsencode(folder / "b" / "3.bmp"), os.fsencode(folder) + b"/b/\xff\n.bmp")
    for suffix in ("csv", "parquet", "zarr"):
        predicted(run, folder, "--out", f"p.{suffix}")
    assert rows("p.csv")[5]["file"].endswith("b/\\udcff\n.bmp")


def test_a_folder_without_images(run: Path, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    assert "none: a folder without images" in refused(run, "none", "--out", "p.csv")
    assert "b.png: there is no such file" in refused(run, "b.png", "--out", "p.csv")


# --- going on ---


def interrupted(run: Path, store: str, out: str, after: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Predict all parts but the last ones. Returns what is told."""
    monkeypatch.setattr(SpreadHere, "stop_after", after)
    told = refused(run, store, "--part", "all", "--out", out, code=5)
    monkeypatch.setattr(SpreadHere, "stop_after", None)
    return told


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_second_call_goes_on(run: Path, store: str, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    predicted(run, store, "--part", "all", "--out", f"whole.{suffix}")
    told = interrupted(run, store, f"p.{suffix}", 3, monkeypatch)
    assert "the cluster is gone" in told
    assert "the same command goes on with it" in told
    assert not Path(f"p.{suffix}").exists()
    DONE.clear()
    result = predicted(run, store, "--part", "all", "--out", f"p.{suffix}")
    assert "going on: 80 of 180 samples are predicted already" in result.stderr
    assert len(DONE) == 2
    assert Path(f"p.{suffix}").read_bytes() == Path(f"whole.{suffix}").read_bytes()


def test_a_signal_keeps_what_is_done(run: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpreadHere, "stop_after", 1)
    monkeypatch.setattr(SpreadHere, "stop", Interrupted.by(2))
    assert "the same command goes on" in refused(run, store, "--out", "p.csv", code=130)
    monkeypatch.setattr(SpreadHere, "stop_after", None)
    predicted(run, store, "--out", "p.csv")
    assert len(DONE) == 2


def test_nothing_starts_where_all_parts_are_done(run: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    predicted(run, store, "--out", "whole.csv")
    monkeypatch.setattr(whole, "write_table", _full)
    assert "No space left" in refused(run, store, "--out", "p.csv")
    monkeypatch.undo()
    monkeypatch.setattr(sources, "_LEAST_BYTES", 1)
    monkeypatch.setattr(whole, "connect", pytest.fail)
    predicted(run, store, "--out", str(run.parent / "p.csv"))
    assert (run.parent / "p.csv").read_bytes() == (run.parent / "whole.csv").read_bytes()


def _full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_an_output_that_another_process_writes_is_refused(
    run: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[str]()

    def beside_another(*args: Any, **options: Any) -> Iterator[tuple[Part, Any]]:
        told.append(refused(run, store, "--out", "p.csv"))
        return SpreadHere.over(*args, **options)

    monkeypatch.setattr(whole, "spread", beside_another)
    predicted(run, store, "--out", "p.csv")
    assert len(rows("p.csv")) == 60
    assert "p.csv.parts: another process writes it; wait for its end, or give another path" in told[0]
    assert not Path("p.csv.parts").exists()


def test_an_output_that_another_process_has_written_meanwhile_stays(
    run: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_slowly(*args: Any, **options: Any) -> Any:
        Path("p.csv").write_text("mine")
        return find_network(*args, **options)

    monkeypatch.setattr(whole, "find_network", find_slowly)
    assert "p.csv: exists already" in refused(run, store, "--out", "p.csv")
    assert Path("p.csv").read_text() == "mine"
    assert not Path("p.csv.parts").exists()


@pytest.mark.parametrize(("out", "links"), [("p.csv", True), ("p.csv", False), ("p.parquet", True), ("p.zarr", True)])
def test_an_output_that_appears_while_parts_are_predicted_stays(
    run: Path, store: str, monkeypatch: pytest.MonkeyPatch, out: str, links: bool
) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError("Operation not permitted")

    def appearing(*args: Any, **options: Any) -> Iterator[tuple[Part, Any]]:
        Path(out).mkdir() if out == "p.zarr" else Path(out).write_text("mine")  # an empty folder would be replaced
        return SpreadHere.over(*args, **options)

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(whole, "spread", appearing)
    told = refused(run, store, "--out", out)
    assert f"{out}: has appeared while the table was made; remove it: the same command goes on" in told
    assert not any(Path(out).iterdir()) if out == "p.zarr" else Path(out).read_text() == "mine"
    Path(out).rmdir() if out == "p.zarr" else Path(out).unlink()
    DONE.clear()
    monkeypatch.setattr(whole, "spread", SpreadHere.over)
    predicted(run, store, "--out", out)
    assert not DONE
    assert {path.name for path in Path().glob("*p.*")} == {out}


@pytest.mark.parametrize("damage", [b"", b"abc", None])
def test_a_damaged_part_is_predicted_anew(
    run: Path, store: str, damage: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted(run, store, "--part", "all", "--out", "whole.csv")
    interrupted(run, store, "p.csv", 3, monkeypatch)
    part = max(Path("p.csv.parts").glob("part-*"))
    part.write_bytes(part.read_bytes()[:-1] if damage is None else damage)
    DONE.clear()
    predicted(run, store, "--part", "all", "--out", "p.csv")
    assert len(DONE) == 3
    assert Path("p.csv").read_bytes() == Path("whole.csv").read_bytes()


def _other_network(run: Path, store: str, folder: Path) -> list[Any]:
    raw = tiny_job(store)
    (folder / "other").mkdir()
    return [tiny_run(folder / "other", raw, random_state(resolve(raw), seed=5)), store, "--part", "all"]


def _other_part(run: Path, store: str, folder: Path) -> list[Any]:
    return [run, store, "--part", "train"]


def _other_data(run: Path, store: str, folder: Path) -> list[Any]:
    return [run, tiny_data(folder, name="other", train=130), "--part", "all"]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (_other_network, "parts that another network has predicted"),
        (_other_part, "parts of other data"),
        (_other_data, "parts of other data"),
    ],
)
def test_parts_of_something_else_are_refused(
    run: Path,
    store: str,
    tmp_path: Path,
    other: Callable[[Path, str, Path], list[Any]],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupted(run, store, "p.csv", 3, monkeypatch)
    there = sorted(Path("p.csv.parts").iterdir())
    told = refused(*other(run, store, tmp_path), "--out", "p.csv")
    assert words in told
    assert "remove p.csv.parts to start anew" in told
    assert sorted(Path("p.csv.parts").iterdir()) == there


def test_files_that_changed_are_other_data(run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "FILES", 2)
    monkeypatch.setattr(SpreadHere, "stop_after", 1)
    refused(run, folder, "--out", "p.csv", code=5)
    monkeypatch.setattr(SpreadHere, "stop_after", None)
    Image.new("RGB", (8, 8)).save(folder / "a" / "1.png")
    assert "parts of other data" in refused(run, folder, "--out", "p.csv")


@pytest.mark.parametrize(
    ("content", "words"), [("{", "not JSON"), ("[]", "another version"), ('{"format": 2}', "another version")]
)
def test_a_foreign_folder_of_parts_is_refused(run: Path, store: str, content: str, words: str) -> None:
    Path("p.csv.parts").mkdir()
    (Path("p.csv.parts") / "task.json").write_text(content)
    assert words in refused(run, store, "--out", "p.csv")
    (Path("p.csv.parts") / "task.json").rename(Path("p.csv.parts") / "mine.json")
    assert "a folder with other files" in refused(run, store, "--out", "p.csv")
    (Path("p.csv.parts") / "mine.json").rename(Path("p.csv.parts") / ".task.json.tmp")  # of one that was killed
    predicted(run, store, "--out", "p.csv")


# --- what is asked for ---


def test_an_output_is_never_replaced(run: Path, store: str) -> None:
    Path("p.csv").write_text("mine")
    assert "p.csv: exists already" in refused(run, store, "--out", "p.csv")
    assert Path("p.csv").read_text() == "mine"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--out", "p.xlsx"], "its format is not known; end its name with one of .csv, .parquet, .zarr"),
        (["--out", "none/p.csv"], "there is no folder none"),
        (["--out", "p.csv", "--workers", "two"], "write cpu=2, gpu=1 or cpu=2,gpu=1"),
        (["--out", "p.csv", "--top", "3"], "--top"),
        (["--out", "p.csv", "--wait", "soon"], "cluster.wait = 'soon'"),
        (["--part", "test"], "need --out"),
        (["--wait", "3"], "need --out"),
        (["--skip-bad"], "need --out"),
    ],
)
def test_wrong_options_are_refused(run: Path, store: str, args: list[str], words: str) -> None:
    assert words in " ".join(refused(run, store, *args).split())


def test_files_have_no_parts(run: Path, folder: Path) -> None:
    assert "--part train: files have no parts" in refused(run, folder, "--part", "train", "--out", "p.csv")


def test_pyarrow_is_asked_for_before_anything_starts(run: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    missing: Any = None
    monkeypatch.setitem(sys.modules, "pyarrow", missing)
    told = refused(run, store, "--out", "p.parquet")
    assert f"package pyarrow: it is not installed; {installing('parquet')}" in told
    assert DONE == []


def test_a_model_file_stands_for_a_run(run: Path, store: str, network: Classifier, tmp_path: Path) -> None:
    (file,) = write_model(network, "", tmp_path / "m.safetensors")
    predicted(run, store, "--out", "by-run.csv")
    predicted(file, store, "--out", "by-file.csv")
    assert Path("by-run.csv").read_bytes() == Path("by-file.csv").read_bytes()


# --- tables ---

SEVERAL = Columns("sample", False, ("sun", "rain"), ("sun", "rain"), several=True)
PART = Part(0, "test", 5, 8)
ROWS = Predicted(
    np.array([[0.7, 0.6], [0.2, 0.1], [0.5, 0.4]], np.float32), np.array([[1, 1], [0, 0], [0, 1]], np.uint8)
)


def test_several_labels_in_csv_and_parquet(tmp_path: Path) -> None:
    for suffix in (".csv", ".parquet"):
        tables.write_table(tmp_path / f"p{suffix}", SEVERAL, 3, [(PART, ROWS)])
    found = rows(tmp_path / "p.csv")
    assert [(row["sample"], row["label"], row["predicted"]) for row in found] == [
        ("5", "sun;rain", "sun;rain"),
        ("6", "", ""),
        ("7", "rain", "sun"),
    ]
    assert pyarrow.parquet.read_table(tmp_path / "p.parquet")["label"].to_pylist() == ["sun;rain", "", "rain"]


def test_several_labels_in_zarr(tmp_path: Path) -> None:
    tables.write_table(tmp_path / "p.zarr", SEVERAL, 3, [(PART, ROWS)])
    group: Any = zarr.open_group(tmp_path / "p.zarr", mode="r")
    np.testing.assert_array_equal(group["predicted"][:], [[1, 1], [0, 0], [1, 0]])
    np.testing.assert_array_equal(group["label"][:], ROWS.labels)


def test_chunks_of_zarr_are_of_a_size_in_bytes_and_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_CHUNK_BYTES", 4 * 2 * 4)
    begins, put = list[int](), zarr.Array.__setitem__

    def noted(array: Any, at: Any, values: Any) -> None:
        begins.append(at.start)
        put(array, at, values)

    monkeypatch.setattr(zarr.Array, "__setitem__", noted)
    tables.write_table(tmp_path / "p.zarr", SEVERAL, 15, [(Part(i, "test", 3 * i, 3 * i + 3), ROWS) for i in range(5)])
    group: Any = zarr.open_group(tmp_path / "p.zarr", mode="r")
    assert group["probabilities"].chunks == (4, 2)
    assert set(begins) == {0, 4, 8, 12}
    np.testing.assert_array_equal(group["probabilities"][:], np.tile(ROWS.probabilities, (5, 1)))
    np.testing.assert_array_equal(group["sample"][:], np.arange(15))


def test_a_table_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def failing() -> Iterator[tuple[Part, Predicted]]:
        yield PART, ROWS
        raise OSError(28, "No space left on device")

    for suffix in tables.TABLES:
        with pytest.raises(OSError, match="No space"):
            tables.write_table(tmp_path / f"p{suffix}", SEVERAL, 6, failing())
    assert list(tmp_path.iterdir()) == []


def test_the_identity_of_a_task_is_that_of_its_numbers(store: str) -> None:
    source = sources.of_store(store, "test", open_dataset(store))
    same = [kept.identity(classifier({"name": "5:7"}, facts(), seed), source) for seed in (0, 0, 1)]
    assert same[0] == same[1] != same[2]
    other = kept.identity(classifier({"name": "5:7", "relu": False}, facts()), source)
    assert other["network"] != same[0]["network"]


def test_a_worker_keeps_freed_memory_while_it_predicts(
    store: str, network: Classifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dask has it return at once what every part takes anew."""
    told: list[str] = []
    monkeypatch.setattr(kept, "keep_freed_memory", lambda: told.append("keep"))
    monkeypatch.setattr(kept, "release_freed_memory", lambda: told.append("release"))
    source = sources.of_store(store, "test", open_dataset(store))
    work = kept.PredictionTask(network, source.read)
    for part in source.parts:
        work.predict(part, "cpu", 1)
    _sent(work)  # without its predictor
    assert told == ["keep"]
    del work
    gc.collect()
    assert told == ["keep", "release"]


def test_threads_of_a_worker_predict_parts_of_one_task_as_one_thread_does() -> None:
    """A worker that advertises no resource has two parts at once. It reads one while it computes the other."""
    network, together = classifier({"name": "quick"}, facts((32, 32, 3))), Barrier(2, timeout=60)
    images = np.random.default_rng(0).integers(0, 256, (12, 16, 32, 32, 3), dtype=np.uint8)
    parts = [Part(i, "", 16 * i, 16 * i + 16) for i in range(len(images))]

    def read(part: Part) -> sources.Samples:
        together.wait()
        return sources.Samples(images[part.index])

    task, alone = kept.PredictionTask(network, read), network.on(Device(exact=network.job.train.exact))
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda part: task.predict(part, "cpu", 1).probabilities, parts))
    for own, given in zip(found, images, strict=True):
        np.testing.assert_array_equal(own, alone.probabilities(given))
