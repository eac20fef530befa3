"""CF attributes and chunks that are not stored, of Zarr arrays and DataArrays given to `prepare`, `fit`, `predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zarr
from zarr.storage import MemoryStore

from daskcnn import CNNClassifier
from daskcnn.datasets.prepare_arrays import prepare
from daskcnn.errors import DataError
from daskcnn.store.image_facts import Facts
from daskcnn.trained.predictions.sources import source_of
from daskcnn.trained.trained_model import TrainedModel
from tests.datasets.test_given_arrays import HOLES, IMAGES, LABELS, model, pixels
from tests.export.networks import classifier

STORED = np.where(HOLES, -9999, IMAGES * 10).astype(np.int16)
CODING = {"_FillValue": -9999, "scale_factor": 0.5, "add_offset": 2.0}
MEANT = np.where(HOLES, np.nan, STORED * 0.5 + 2)


def zarr_array(place: Any, stored: npt.NDArray[Any] = STORED, attributes: dict[str, Any] | None = None) -> Any:
    """An array in chunks of 7 samples; those of its fill value alone are not stored."""
    how: dict[str, Any] = {"chunks": (7, *stored.shape[1:]), "shape": stored.shape, "dtype": stored.dtype}
    how["config"] = {"write_empty_chunks": False}  # whatever another thread of the process has set for its arrays
    found = zarr.create_array(place, attributes=attributes, **how)
    found[:] = stored
    return found


def places(folder: Path) -> dict[str, Any]:
    """The places that a Zarr array may have here."""
    return {"files": str(folder / "x.zarr"), "memory": MemoryStore()}


@pytest.mark.parametrize("place", ["files", "memory"])
def test_a_zarr_array_is_decoded(tmp_path: Path, place: str) -> None:
    images = zarr_array(places(tmp_path)[place], attributes=CODING)
    found = prepare(images, LABELS, tmp_path / "out.zarr", order="stored")
    wanted, seen = MEANT.reshape(-1), pixels(found).reshape(-1)
    np.testing.assert_array_equal(np.sort(seen), np.sort(wanted))
    assert found.mean == pytest.approx(np.nanmean(MEANT[found_in(found)], axis=(0, 1, 2)), rel=1e-5)


def found_in(found: Any) -> npt.NDArray[np.bool_]:
    """The samples of the training part, by their pixels."""
    train = {
        image.astype(float).tobytes() for image in np.nan_to_num(pixels_of_part(found.train, found.nodata), nan=-1)
    }
    return np.array([np.nan_to_num(image, nan=-1).tobytes() in train for image in MEANT])


def pixels_of_part(part: Any, nodata: float | None) -> npt.NDArray[Any]:
    """The images of a part, NaN where they have no data."""
    images = part.read(0, len(part))[0].astype(float)
    return np.where(images == nodata, np.nan, images)


def test_predictions_of_a_zarr_array_are_of_its_decoded_numbers(tmp_path: Path) -> None:
    network = model(nodata=-1, dtype="float64")
    found = network.predict(zarr_array(tmp_path / "x.zarr", attributes=CODING))
    np.testing.assert_allclose(np.asarray(found), network.predict(MEANT), rtol=1e-5)


def test_the_estimator_decodes_a_zarr_array(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    images = zarr_array(tmp_path / "x.zarr", attributes=CODING)
    how: dict[str, Any] = {"model": [{"layer": "dense"}], "epochs": 1}
    mine, wanted = CNNClassifier(**how).fit(images, LABELS), CNNClassifier(nodata=-1, **how).fit(MEANT, LABELS)
    np.testing.assert_allclose(
        np.asarray(mine.predict_proba(images)), wanted.predict_proba(MEANT), rtol=1e-4, atol=1e-6
    )


FACTORS = {"scale_factor": 1e-4, "add_offset": -0.1}
SPARSE = np.where(HOLES | (np.arange(len(HOLES)) < 7)[:, None, None, None], 0, (IMAGES * 200).astype(np.int16))
"""Stored numbers of which 0 is no data; the first chunk is not stored. 1000 is decoded to 0.0, which is data."""
SPARSE[10, 0, 0, 0] = 1000
MEANT_BY_FACTORS = np.where(SPARSE == 0, np.nan, SPARSE * 1e-4 - 0.1)


@pytest.mark.parametrize("place", ["files", "memory"])
def test_a_stored_number_for_no_data_is_decoded_with_the_array(tmp_path: Path, place: str) -> None:
    images = zarr_array(places(tmp_path)[place], SPARSE.astype(np.int16), FACTORS)
    found = prepare(images, LABELS, tmp_path / "out.zarr", order="stored", nodata=0)
    assert found.nodata == -0.1
    assert np.isnan(pixels(found)).sum() == np.isnan(MEANT_BY_FACTORS).sum()
    network = TrainedModel(classifier({"layers": [{"layer": "dense", "units": 2}]}, Facts.of(found)))
    wanted = network.predict(MEANT_BY_FACTORS)
    np.testing.assert_allclose(np.asarray(network.predict(images)), wanted, rtol=1e-5)
    if place == "files":
        source = source_of([str(tmp_path / "x.zarr")], None, Facts.of(found), skip_bad=False)
        read = np.concatenate([source.read(part).images for part in source.parts])
        np.testing.assert_allclose(network.predict(read), wanted, rtol=1e-5)


def test_the_estimator_decodes_the_number_for_no_data(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    images = zarr_array(tmp_path / "x.zarr", SPARSE.astype(np.int16), FACTORS)
    how: dict[str, Any] = {"model": [{"layer": "dense"}], "epochs": 1}
    mine, wanted = (
        CNNClassifier(nodata=mark, **how).fit(X, LABELS) for mark, X in ((0, images), (-0.1, MEANT_BY_FACTORS))
    )
    assert mine.model_.classifier.facts.nodata == -0.1
    proba = wanted.predict_proba(MEANT_BY_FACTORS)
    np.testing.assert_allclose(np.asarray(mine.predict_proba(images)), proba, rtol=1e-4, atol=1e-6)


def test_images_for_testing_of_another_coding_are_refused(tmp_path: Path) -> None:
    train, test = (
        zarr_array(tmp_path / f"{offset}.zarr", SPARSE.astype(np.int16), FACTORS | {"add_offset": offset})
        for offset in (-0.1, -0.2)
    )
    with pytest.raises(DataError, match=r"test: -0\.2 stands for no data once it is decoded, -0\.1 in those for tr"):
        prepare(train, LABELS, tmp_path / "out.zarr", test=(test, LABELS), nodata=0)


@pytest.mark.parametrize("lazy", ["memory", "dask", "disk"])
def test_the_marks_of_a_data_array_are_no_data(tmp_path: Path, lazy: str) -> None:
    xarray = pytest.importorskip("xarray")
    images = xarray.DataArray(
        STORED, dims=("tile", "y", "x", "band"), attrs={"_FillValue": np.int16(-9999)}, name="tiles"
    )
    if lazy == "disk":
        images.to_netcdf(tmp_path / "x.nc", engine="scipy")
        images = xarray.open_dataset(tmp_path / "x.nc", engine="scipy", mask_and_scale=False)["tiles"]
    found = prepare(images.chunk(tile=7) if lazy == "dask" else images, LABELS, tmp_path / "out.zarr")
    assert found.nodata == -9999
    assert np.isnan(pixels(found)).sum() == HOLES.sum()


def test_factors_of_a_data_array_are_refused_with_the_remedy(tmp_path: Path) -> None:
    xarray = pytest.importorskip("xarray")
    images = xarray.DataArray(STORED, dims=("tile", "y", "x", "band"), attrs=CODING)
    words = r"numbers to be decoded \(scale_factor = 0.5, add_offset = 2, .*mask_and_scale=True\); if .*drop_attrs"
    with pytest.raises(DataError, match=words):
        prepare(images, LABELS, tmp_path / "out.zarr")
    with pytest.raises(DataError, match=words):
        model().predict(images)


def test_chunks_that_are_not_stored_are_no_data_or_refused(tmp_path: Path) -> None:
    stored = np.where(np.arange(len(STORED))[:, None, None, None] < 7, 0, np.abs(STORED) + 1).astype(np.int16)
    images = zarr_array(tmp_path / "x.zarr", stored)
    with pytest.raises(DataError, match=r"1 of 6 chunks are not stored, and .* fill value 0; set nodata to 0"):
        prepare(images, LABELS, tmp_path / "out.zarr")
    with pytest.raises(DataError, match="1 of 6 chunks are not stored"):
        model(dtype="int16").predict(images)
    found = prepare(images, LABELS, tmp_path / "out.zarr", nodata=0)
    assert np.isnan(pixels(found)).sum() == 7 * STORED[0].size
    assert model(nodata=0, dtype="int16").predict(images).shape == (len(STORED), 4)


@pytest.mark.parametrize("index", ["start", "end"])
def test_chunks_missing_in_shards_are_found_by_the_indices(tmp_path: Path, index: Any) -> None:
    whole = np.abs(STORED) + 1  # 40 samples, in shards of 12
    shards: Any = {"shape": (12, *STORED.shape[1:]), "index_location": index}
    how = {"shape": STORED.shape, "dtype": np.int16, "chunks": (3, *STORED.shape[1:]), "shards": shards}
    images = zarr.create_array(str(tmp_path / "x.zarr"), config={"write_empty_chunks": True}, **how)
    images[:] = whole
    found = prepare(images, LABELS, tmp_path / "all.zarr")
    assert (found.shape, len(found.train) + len(found.test)) == (STORED.shape[1:], 40)
    images = zarr.create_array(str(tmp_path / "y.zarr"), config={"write_empty_chunks": False}, **how)
    images[:3], images[13:36] = whole[:3], whole[13:36]
    with pytest.raises(DataError, match=r"5 of 14 chunks are not stored, and .* fill value 0"):
        prepare(images, LABELS, tmp_path / "out.zarr")
    with pytest.raises(DataError, match="5 of 14 chunks are not stored"):
        model(dtype="int16").predict(images)


def test_labels_in_a_zarr_array_are_all_stored_and_mean_themselves(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"labels: 1 of 6 chunks are not stored"):
        prepare(IMAGES, zarr_array(tmp_path / "y.zarr", np.arange(len(IMAGES)) // 7), tmp_path / "out.zarr")
    marked = zarr_array(tmp_path / "z.zarr", LABELS + 1, {"_FillValue": 2})
    with pytest.raises(DataError, match=r"labels: 20 labels stand for no data"):
        prepare(IMAGES, marked, tmp_path / "out.zarr")


@pytest.mark.parametrize("lazy", [False, True])
def test_labels_in_a_data_array_mean_themselves(tmp_path: Path, lazy: bool) -> None:
    xarray = pytest.importorskip("xarray")
    labels = xarray.DataArray(np.where(np.arange(len(LABELS)) == 5, 255, LABELS).astype(np.uint8), dims="tile")
    labels = labels.chunk(tile=7) if lazy else labels
    marked = labels.assign_attrs(_FillValue=np.uint8(255))
    with pytest.raises(
        DataError, match=r"labels: 1 labels stand for no data by its attributes .* first one of sample 5"
    ):
        prepare(IMAGES, marked, tmp_path / "out.zarr")
    with pytest.raises(DataError, match=r"labels: labels that its attributes change \(scale_factor = 2\)"):
        prepare(IMAGES, labels.assign_attrs(scale_factor=2.0), tmp_path / "out.zarr")
    found = prepare(IMAGES, labels.assign_attrs(_FillValue=np.uint8(254)), tmp_path / "out.zarr", test=0.5)
    assert found.classes == ("0", "1", "255")
