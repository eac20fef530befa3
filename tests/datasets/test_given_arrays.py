"""Arrays as people have them: masks, names of axes, coordinates of samples, rows of labels, orders in memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import numpy.typing as npt
import pytest
import zarr

from daskcnn.datasets.prepare_arrays import prepare
from daskcnn.errors import DataError
from daskcnn.store import Dataset
from daskcnn.store.foreign.in_place import outline
from daskcnn.trained.predictions.sources import source_of
from daskcnn.trained.trained_model import TrainedModel
from tests.export.networks import CLASSES, classifier, facts
from tests.store.arrays_in_place import opened, tiles, write_array

N = 40
RNG = np.random.default_rng(0)
IMAGES = RNG.normal(5, 1, (N, 3, 4, 2)).astype(np.float32)
HOLES = RNG.random(IMAGES.shape) < 0.1
WITH_HOLES = np.where(HOLES, np.float32(-9999), IMAGES)
LABELS = np.arange(N) % 2


def stored(folder: Path, images: Any, labels: Any = LABELS, **how: Any) -> Dataset:
    """The arrays as a data set in their order."""
    return prepare(images, labels, folder / "out.zarr", order="stored", **how)


def pixels(found: Dataset) -> npt.NDArray[Any]:
    """All images, those for training first, NaN where they have no data."""
    images = np.concatenate([part.read(0, len(part))[0] for part in (found.train, found.test)]).astype(float)
    return np.where(images == found.nodata, np.nan, images)


# --- masks ---


def _array_of_dask(images: Any) -> Any:
    xarray = pytest.importorskip("xarray")
    return xarray.DataArray(da.ma.masked_equal(da.from_array(images, chunks=7), -9999), dims=("tile", "y", "x", "band"))


HIDING = "xarray of dask"
"""Nothing says before its chunks are read that they are masked."""
MASKED = {
    "numpy": lambda images: np.ma.masked_equal(images, -9999),
    "list": lambda images: list(np.ma.masked_equal(images, -9999)),
    "dask": lambda images: da.ma.masked_equal(da.from_array(images, chunks=(7, 1, 4, 1)), -9999),
    HIDING: _array_of_dask,
}


def _by_pixels(images: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    return np.lexsort(np.nan_to_num(images.reshape(len(images), -1)).T)


@pytest.mark.parametrize(
    ("kind", "nodata"), [*((kind, -1) for kind in MASKED), *((kind, None) for kind in MASKED if kind != HIDING)]
)
def test_what_is_masked_is_no_data(tmp_path: Path, kind: str, nodata: float | None) -> None:
    found = stored(tmp_path, MASKED[kind](WITH_HOLES), nodata=nodata)
    assert found.nodata is not None
    seen = pixels(found)
    wanted = np.where(HOLES, np.nan, IMAGES)
    np.testing.assert_array_equal(seen[_by_pixels(seen)], wanted[_by_pixels(wanted)])
    assert 4.8 < min(found.mean) < max(found.mean) < 5.2, "the hidden numbers are not in it"


def test_a_mask_that_shows_late_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"sample .* is nan; set nodata to any number such as -9999"):
        stored(tmp_path, MASKED[HIDING](WITH_HOLES))


@pytest.mark.parametrize(("dtype", "nodata"), [("uint8", 255), ("int16", -1)])
def test_masked_integers_become_the_number_for_no_data(tmp_path: Path, dtype: str, nodata: int) -> None:
    images = np.ma.masked_array((IMAGES * 10).astype(dtype), HOLES)
    seen = pixels(stored(tmp_path, images, nodata=nodata))
    assert np.isnan(seen).sum() == HOLES.sum()


REFUSED = {
    "no number": ({}, None, "pixels are masked, and no number stands for no data; set nodata to a uint8"),
    "no room": ({"nodata": -9999}, None, "pixels are masked, and no uint8 is -9999, no data; set nodata to a uint8"),
    "own number is seen": ({}, 50, "pixels that are not masked are 50, the fill value of those that are"),
}


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_a_mask_that_no_number_can_stand_for_is_refused(tmp_path: Path, case: str, lazy: bool) -> None:
    how, fill, words = REFUSED[case]
    images: Any = np.ma.masked_array((IMAGES * 10).astype(np.uint8), HOLES, fill_value=fill)
    with pytest.raises(DataError, match=words):
        stored(tmp_path, da.from_array(images, chunks=9, asarray=False) if lazy else images, **how)
    assert not (tmp_path / "out.zarr").exists()


def test_a_mask_of_nothing_changes_nothing(tmp_path: Path) -> None:
    images = (IMAGES * 10).astype(np.uint8)
    found = stored(tmp_path, np.ma.masked_array(images, np.zeros(images.shape, bool)))
    assert found.nodata is None


@pytest.mark.parametrize("what", ["labels", "weights"])
@pytest.mark.parametrize("lazy", [False, True])
def test_masked_labels_and_weights_are_refused(tmp_path: Path, what: str, lazy: bool) -> None:
    masked: Any = np.ma.masked_equal(np.where(np.arange(N) == 7, -9999, LABELS + 1), -9999)
    masked = da.from_array(masked, chunks=9, asarray=False) if lazy else masked
    with pytest.raises(DataError, match=f"{what}: sample 7 is masked; leave such samples out"):
        stored(tmp_path, IMAGES, **{"labels": LABELS, what: masked})


def model(nodata: float | None = None, dtype: str = "float32") -> TrainedModel:
    """A network for the images."""
    known = facts((3, 4, 2), dtype=np.dtype(dtype), nodata=nodata)
    return TrainedModel(classifier({"layers": [{"layer": "dense", "units": 4}]}, known))


@pytest.mark.parametrize("kind", MASKED)
def test_predictions_of_masked_images(kind: str) -> None:
    found = model(nodata=-1).predict(MASKED[kind](WITH_HOLES))
    wanted = model(nodata=-1).predict(np.where(HOLES, np.float32(-1), IMAGES))
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-5)
    with pytest.warns(UserWarning, match="have NaN or infinities"):
        unknown = np.asarray(model().predict(MASKED[kind](WITH_HOLES)))
    assert np.isnan(unknown).any()


def test_masked_integers_cannot_be_predicted_without_a_number_for_no_data() -> None:
    images = np.ma.masked_array((IMAGES * 10).astype(np.uint8), HOLES)
    with pytest.raises(DataError, match="are masked, and no number stands for no data; set nodata in training"):
        model(dtype="uint8").predict(images)


# --- lazy predictions ---


@pytest.mark.parametrize("change", ["views", "loss"])
def test_networks_of_the_same_weights_that_predict_otherwise_share_no_tasks(change: str) -> None:
    units, losses = (24, ("reconstruction", "sigmoid-reconstruction")) if change == "loss" else (4, (None, None))
    layers: dict[str, Any] = {"layers": [{"layer": "dense", "units": units}]}
    known = facts((3, 4, 2), dtype=np.dtype("float32"))
    one, other = (TrainedModel(classifier(layers, known, loss=loss)) for loss in losses)
    if change == "views":
        other.classifier.views = "mirror"
    images = da.from_array(IMAGES, chunks=(7, 3, 4, 2))
    found = da.compute(one.predict(images), other.predict(images))
    for model, lazy in zip((one, other), found, strict=True):
        np.testing.assert_allclose(lazy, model.predict(IMAGES), rtol=1e-5)
    assert np.abs(found[0] - found[1]).max() > 1e-3


# --- arrays that are gone ---


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_an_array_that_is_not_seen_is_not_read_as_its_fill_value(tmp_path: Path, zarr_format: Any) -> None:
    array = zarr.create_array(tmp_path / "x.zarr", data=IMAGES, chunks=(7, 3, 4, 2), zarr_format=zarr_format)
    lazy = model().predict(array)
    np.testing.assert_allclose(lazy.compute(), model().predict(IMAGES), rtol=1e-5)
    shutil.rmtree(tmp_path / "x.zarr")
    with pytest.raises(DataError, match=r"x\.zarr: no array there, as this process sees it; give an array"):
        lazy.compute()


# --- names of axes ---

CONTRARY = {
    ("time", "band", "y", "x"): "('time', 'y', 'x', 'band')",
    ("y", "x", "band", "time"): "('time', 'y', 'x', 'band')",
    ("lat", "lon", "time"): "('time', 'lat', 'lon')",
}


@pytest.mark.parametrize("dims", [*CONTRARY, ("band", "y", "x")])
def test_a_door_without_a_layout_names_the_order(dims: tuple[str, ...]) -> None:
    xarray = pytest.importorskip("xarray")
    images = xarray.DataArray(np.zeros((4,) * len(dims), np.float32), dims=dims)
    with pytest.raises(DataError, match="elsewhere") as caught:
        model().predict(images)
    assert caught.value.remedy.startswith(
        f"give images.transpose{CONTRARY[dims]}" if dims in CONTRARY else "give images with an axis of samples"
    )


@pytest.mark.parametrize("dims", [("trial", "electrode", "t"), ("trial", "channel", "time"), ("a", "b", "c", "band")])
def test_names_that_say_nothing_against_it_are_taken(tmp_path: Path, dims: tuple[str, ...]) -> None:
    xarray = pytest.importorskip("xarray")
    images = IMAGES if len(dims) == 4 else IMAGES[..., 0]
    assert len(stored(tmp_path, xarray.DataArray(images, dims=dims)).train) == 32


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_names_of_zarr_arrays_count_at_every_door(tmp_path: Path, zarr_format: Any) -> None:
    names = ["tile", "band", "y", "x"]
    how = {"dimension_names": names} if zarr_format == 3 else {"attributes": {"_ARRAY_DIMENSIONS": names}}
    arrays = tiles(tmp_path, zarr_format=zarr_format, **how)
    array = zarr.open_array(arrays.images, mode="r")
    elsewhere = r"of \(tile, band, y, x\): layout NHWC has the channels elsewhere; "
    with pytest.raises(DataError, match=f"images {elsewhere}give layout='NCHW'"):
        prepare(array, np.arange(300) % 5, tmp_path / "out.zarr")
    with pytest.raises(DataError, match=rf"{elsewhere}put the axes in the order \(tile, y, x, band\)"):
        model().predict(array)
    with pytest.raises(DataError, match=f"{arrays.images} {elsewhere}give data.layout = 'NCHW'"):
        outline(arrays)
    assert opened(arrays, layout="NCHW").shape == (6, 3, 8)
    with pytest.raises(DataError, match=elsewhere):
        source_of([arrays.images], None, facts((8, 6, 3), dtype=np.dtype("uint16")), skip_bad=False)


# --- coordinates of samples ---


def _labelled(order: npt.NDArray[Any], kind: str) -> Any:
    if kind == "pandas":
        return pytest.importorskip("pandas").Series(LABELS[order], index=100 + order)
    xarray = pytest.importorskip("xarray")
    found = xarray.DataArray(LABELS[order], dims="tile", coords={"tile": 100 + order})
    return found if kind == "xarray" else found.chunk(9)


def _with_coordinates(images: Any = IMAGES) -> Any:
    xarray = pytest.importorskip("xarray")
    return xarray.DataArray(
        images,
        dims=("tile", "y", "x", "band"),
        coords={"tile": 100 + np.arange(N), "place": ("tile", np.arange(N) * 2.0), "y": [3, 2, 1]},
        attrs={"units": "K"},
    )


@pytest.mark.parametrize("kind", ["xarray", "xarray of dask", "pandas"])
def test_labels_and_weights_are_taken_in_the_order_of_the_images(tmp_path: Path, kind: str) -> None:
    order = np.random.default_rng(1).permutation(N)
    wanted = stored(tmp_path / "a", IMAGES, name="x", weights=1 + LABELS)
    found = stored(tmp_path / "b", _with_coordinates(), _labelled(order, kind), name="x", weights=1 + LABELS)
    assert found.fingerprint == wanted.fingerprint


def test_labels_of_other_samples_are_refused(tmp_path: Path) -> None:
    labels = _labelled(np.arange(N), "xarray")
    for other in (labels.assign_coords(tile=np.arange(N)), labels.assign_coords(tile=np.arange(N) // 2)):
        with pytest.raises(DataError, match="labels: coordinates tile of other samples than the images'; give labels"):
            stored(tmp_path, _with_coordinates(), other)
    by_place = _labelled(np.arange(N), "pandas").reset_index(drop=True)
    assert len(stored(tmp_path, _with_coordinates(), by_place).train) == 32, "numbers of rows are no coordinates"


def test_numbers_of_rows_that_may_be_coordinates_are_asked_about(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    order = np.random.default_rng(1).permutation(N)
    images = _with_coordinates().assign_coords(tile=np.arange(N)).isel(tile=order)
    by_place, by_tile = pandas.Series(LABELS[order]), pandas.Series(LABELS)
    for labels in (by_place, by_tile):
        with pytest.raises(DataError, match=r"labels: .* the numbers of their rows.*; give labels\.to_numpy\(\) if"):
            stored(tmp_path, images, labels)
    wanted = stored(tmp_path / "a", images.values, LABELS[order], name="x")
    for place, labels in enumerate((by_place.to_numpy(), by_tile.rename_axis("tile"))):
        assert stored(tmp_path / str(place), images, labels, name="x").fingerprint == wanted.fingerprint


@pytest.mark.parametrize("lazy", [False, True])
def test_predictions_have_the_coordinates_of_the_samples(lazy: bool) -> None:
    images = _with_coordinates()
    found = model().predict(images.chunk(tile=9) if lazy else images)
    assert (found.dims, found.shape, found.attrs) == (("tile", "class"), (N, 4), {})
    assert (found.chunks is not None) == lazy
    assert set(found.coords) == {"tile", "place", "class"}
    assert found["class"].values.tolist() == list(CLASSES)
    np.testing.assert_allclose(found.sel(tile=[107, 103]), model().predict(IMAGES[[7, 3]]), rtol=1e-5)


def test_predictions_have_no_coordinates_of_a_corner_s_pixels() -> None:
    by_pixel = {"lat": (("tile", "y"), np.zeros((N, 3))), "lon": (("y", "x"), np.ones((3, 4))), "run": 7}
    found = model().predict(_with_coordinates().assign_coords(by_pixel))
    assert set(found.coords) == {"tile", "place", "run", "class"}


def test_a_network_that_reconstructs_gives_images_like_those_given() -> None:
    layers = [{"layer": "conv", "kernels": 2, "size": 3, "pad": 1}]
    network = TrainedModel(
        classifier({"layers": layers}, facts((3, 4, 2), dtype=np.dtype("float32")), loss="reconstruction")
    )
    found = network.predict(_with_coordinates())
    assert found.dims == ("tile", "y", "x", "band")
    assert set(found.coords) == {"tile", "place", "y"}
    network = TrainedModel(
        classifier({"layers": [layers[0] | {"kernels": 1}]}, facts((3, 4, 1)), loss="reconstruction")
    )
    grey = _with_coordinates(IMAGES.astype(np.uint8)).isel(band=0)
    assert network.predict(grey).dims == ("tile", "y", "x"), "images without an axis of channels"


# --- rows of labels ---

ONE_HOT = np.eye(3, dtype=int)[np.arange(N) % 3]


def test_rows_with_exactly_one_1_are_asked_about(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"every row of 3 columns has exactly one 1.*; set labelling to 'classes' if"):
        stored(tmp_path, IMAGES, ONE_HOT)
    as_classes = stored(tmp_path / "a", IMAGES, ONE_HOT, labelling="classes", name="x")
    assert as_classes.manifest == stored(tmp_path / "b", IMAGES, ONE_HOT.argmax(axis=1), name="x").manifest
    several = stored(tmp_path / "c", IMAGES, ONE_HOT, labelling="several")
    assert (several.labels, several.classes) == ("several", ("0", "1", "2"))


def test_a_column_is_one_class_a_sample(tmp_path: Path) -> None:
    found = stored(tmp_path / "a", IMAGES, (LABELS == 1)[:, None], classes=["other", "forest"])
    assert (found.labels, found.classes) == ("classes", ("other", "forest"))
    assert stored(tmp_path / "b", IMAGES, (LABELS == 1)[:, None], labelling="several").labels == "several"


@pytest.mark.parametrize(
    ("labels", "how", "words"),
    [
        (ONE_HOT | ONE_HOT[::-1], {"labelling": "classes"}, "sample .* has .*, and labelling is 'classes'; give rows"),
        (LABELS, {"labelling": "several"}, "one for each image, and labelling is 'several'; give rows of 0 and 1"),
        (LABELS, {"labelling": "one-hot"}, "labelling='one-hot': unknown; use one of classes, several"),
    ],
)
def test_labels_that_are_not_what_is_said_are_refused(
    tmp_path: Path, labels: Any, how: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        stored(tmp_path, IMAGES, labels, **how)


@pytest.mark.parametrize("labelling", ["classes", "several"])
def test_labels_for_testing_mean_what_those_for_training_do(tmp_path: Path, labelling: Any) -> None:
    found = stored(tmp_path, IMAGES, ONE_HOT, labelling=labelling, test=(IMAGES[:5], ONE_HOT[:5]))
    np.testing.assert_array_equal(found.test.labels(), ONE_HOT[:5] if labelling == "several" else np.arange(5) % 3)


def test_rows_of_arrays_in_place_are_asked_about_too(tmp_path: Path) -> None:
    arrays = tiles(tmp_path)
    one_hot = np.eye(3, dtype=np.uint8)[np.arange(300) % 3]
    labels = write_array(tmp_path / "rows.zarr", one_hot, 50)
    with pytest.raises(DataError, match=r"rows\.zarr: every row of 3 columns has exactly one 1"):
        opened(arrays, labels=labels)
    assert opened(arrays, labels=labels, labelling="classes").classes == ("0", "1", "2")
    assert opened(arrays, labels=labels, labelling="several").labels == "several"
    more = {"labelling": "classes", "test": None, "test_images": arrays.images, "test_labels": labels}
    assert len(opened(arrays, labels=labels, **more).test) == 300


# --- orders in memory ---


class Own(np.ndarray):
    """An array of a class of its own."""


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array = array.copy()
    array.flags.writeable = False
    return array


ORDERS: dict[str, Callable[[Any], Any]] = {
    "fortran": np.asfortranarray,
    "negative strides": lambda array: array[::-1].copy()[::-1],
    "read-only": _read_only,
    "big-endian": lambda array: array.astype(array.dtype.newbyteorder(">")),
    "subclass": lambda array: array.view(Own),
}
ROWS = np.random.default_rng(1).integers(0, 2, (N, 3))


@pytest.mark.parametrize("labels", [LABELS, ROWS, ROWS.astype(float)], ids=["classes", "several", "real"])
def test_labels_and_weights_in_any_order_in_memory(tmp_path: Path, labels: Any) -> None:
    weights, tests = 1.0 + LABELS, (IMAGES[:4], labels[:4])
    wanted = stored(tmp_path / "plain", IMAGES, labels, weights=weights, test=tests, name="x")
    for name, made in ORDERS.items():
        own = {"weights": made(weights), "test": (made(tests[0]), made(tests[1])), "name": "x"}
        assert stored(tmp_path / name, made(IMAGES), made(labels), **own).fingerprint == wanted.fingerprint


@pytest.mark.parametrize("order", ORDERS)
def test_predictions_of_images_in_any_order_in_memory(order: str) -> None:
    for images in (ORDERS[order](IMAGES), da.from_array(ORDERS[order](IMAGES), chunks=9)):
        np.testing.assert_allclose(np.asarray(model().predict(images)), model().predict(IMAGES), rtol=1e-5)


@pytest.mark.parametrize(
    ("images", "labels", "weights", "words"),
    [
        (np.float32(3), LABELS, None, r"images: an array of shape \(\)"),
        (np.ma.masked, LABELS, None, r"images: an array of shape \(\)"),
        (IMAGES, np.int64(3), None, r"labels: an array of shape \(\)"),
        (IMAGES, np.ma.masked, None, "labels: sample 0 is masked"),
        (IMAGES, LABELS, np.float64(2), "weights: 1 for 40 images"),
    ],
)
def test_arrays_without_axes_are_refused(tmp_path: Path, images: Any, labels: Any, weights: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        stored(tmp_path, images, labels, weights=weights)


def test_a_number_in_place_of_images_has_no_prediction() -> None:
    with pytest.raises(DataError, match="the network wants"):
        model().predict(np.float32(3))
