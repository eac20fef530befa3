"""Arrays as people have them, at every door: the numbers that NumPy's array has, or a refusal with its remedy."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import dask.array as da
import numpy as np
import numpy.typing as npt
import pytest
import zarr
from distributed import Client, LocalCluster
from hypothesis import given, settings
from hypothesis import strategies as st

import daskcnn
from daskcnn.cluster.link.own_process import SHARED
from daskcnn.datasets.own_data import with_own_data
from daskcnn.errors import ClusterError, UserError
from daskcnn.job.resolve import resolve
from daskcnn.store import Dataset, open_dataset
from daskcnn.store.manifest import Dtype
from daskcnn.trained.trained_model import TrainedModel
from tests.export.networks import classifier, facts

pytest.importorskip("sklearn")
xarray = pytest.importorskip("xarray")

HIDDEN = 99
"""The number below a mask. No image has it elsewhere."""
NODATA = 77.0
DTYPES = ("uint8", "int8", ">u2", "int16", "float16", "<f4", ">f4", "f8", "i8", "c8")
NAMES = {4: ("tile", "y", "x", "band"), 3: ("tile", "y", "x")}


@dataclass(frozen=True)
class Given:
    """Images that were given, `made`, and the same plainly: (N, H, W, C) in float64, NaN where they have no data."""

    plain: npt.NDArray[np.float64]
    made: Any
    layout: str
    nodata: float | None
    missing: str
    misnamed: bool
    dtype: np.dtype[Any]

    @property
    def odd(self) -> bool:
        """True if some door may refuse the images."""
        return self.misnamed or self.missing != "none" or self.dtype.kind == "c" or self.dtype.itemsize == 8


def _ordered(images: npt.NDArray[Any], order: str) -> npt.NDArray[Any]:
    if order == "fortran":
        return np.asfortranarray(images)
    if order == "negative":
        return images[::-1].copy()[::-1]
    if order == "read-only":
        images = images.copy()
        images.flags.writeable = False
    if order == "subclass":
        return images.view(Own)
    return images


class Own(np.ndarray):
    """An array of a class of its own."""


def _zarr(images: npt.NDArray[Any], names: tuple[str, ...], chunk: int, zarr_format: Any) -> Any:
    how: dict[str, Any] = {"dimension_names": names}
    if zarr_format == 2:  # without a fill value, which xarray would take for one of numbers that are missing
        how = {"attributes": {"_ARRAY_DIMENSIONS": list(names)}, "fill_value": None}
    chunks = (chunk, *images.shape[1:])
    return zarr.create_array({}, data=np.ascontiguousarray(images), chunks=chunks, zarr_format=zarr_format, **how)


def _dask(images: Any, chunk: int) -> Any:
    return da.from_array(images, chunks=(chunk, 1, *images.shape[2:]), asarray=False)


KINDS: dict[str, Callable[[Any, tuple[str, ...], int], Any]] = {
    "numpy": lambda images, names, chunk: images,
    "list": lambda images, names, chunk: list(images),
    "dask": lambda images, names, chunk: _dask(images, chunk),
    "zarr 2": lambda images, names, chunk: _zarr(images, names, chunk, 2),
    "zarr 3": lambda images, names, chunk: _zarr(images, names, chunk, 3),
    "xarray": lambda images, names, chunk: xarray.DataArray(images, dims=names),
    "xarray of dask": lambda images, names, chunk: xarray.DataArray(_dask(images, chunk), dims=names),
}


@st.composite
def givens(draw: st.DrawFn) -> Given:
    """Images of any kind. The first number of each is its own, which tells where it went."""
    dtype, grey = np.dtype(draw(st.sampled_from(DTYPES))), draw(st.booleans())
    samples, size = draw(st.integers(10, 14)), draw(st.tuples(*[st.integers(2, 4)] * 2, st.integers(2, 3)))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    plain = rng.integers(20, 60, (samples, *size[: 2 if grey else 3])).astype(np.float64)
    plain.reshape(samples, -1)[:, 0] = np.arange(samples)
    missing = draw(st.sampled_from(("none", "none", "mask", "NaN") if dtype.kind == "f" else ("none", "mask")))
    gone = np.zeros(plain.shape, bool)
    if missing != "none":
        gone[3, 1, 1] = gone[7, 0, 1] = True
    images: Any = np.where(gone, np.nan if missing == "NaN" else HIDDEN, plain).astype(dtype)
    kind = draw(st.sampled_from([k for k in KINDS if missing != "mask" or not k.startswith("zarr")]))
    layout = draw(st.sampled_from(("NHWC", "NCHW")))
    names, axes = list(NAMES[plain.ndim]), list(range(plain.ndim))
    if layout == "NCHW" and not grey:
        names, axes = [names[i] for i in (0, 3, 1, 2)], [0, 3, 1, 2]
    images, gone = images.transpose(axes), gone.transpose(axes)
    images = _ordered(images, draw(st.sampled_from(("C", "fortran", "negative", "read-only", "subclass"))))
    if missing == "mask":
        images = np.ma.masked_array(images, gone, fill_value=draw(st.sampled_from((None, HIDDEN))))
    named = "zarr" in kind or "xarray" in kind
    misnamed = named and draw(st.booleans())
    if misnamed:
        names = names[1:] + names[:1]
    plain = np.where(gone.transpose(np.argsort(axes)), np.nan, plain)
    made = KINDS[kind](images, tuple(names), draw(st.integers(3, 9)))
    nodata = draw(st.sampled_from((None, NODATA)))
    return Given(plain[..., None] if grey else plain, made, layout, nodata, missing, misnamed, dtype)


def _labels(samples: int) -> npt.NDArray[np.int64]:
    return np.arange(samples) % 2


def _prepared(case: Given, folder: Path) -> Dataset:
    how: dict[str, Any] = {"layout": case.layout, "nodata": case.nodata, "warn": lambda _: None}
    return daskcnn.prepare(case.made, _labels(len(case.plain)), folder / "x.zarr", **how)


def _trained(case: Given, folder: Path) -> Dataset:
    data = {"layout": case.layout, "nodata": case.nodata, "path": str(folder / "x.zarr")}
    with with_own_data({"data": data}, (case.made, _labels(len(case.plain))), None) as (tables, write):
        write(resolve(tables))
    return open_dataset(f"{folder}/x.zarr")


class _Fitted(Exception):
    """A fit came as far as its training, with these samples."""


def _fitted(case: Given, folder: Path) -> Dataset:
    fit = daskcnn.CNNClassifier(nodata=case.nodata, data_dir=folder).fit
    with pytest.MonkeyPatch.context() as patch, suppress(_Fitted):
        patch.setattr("daskcnn.estimator.classifier.train_job", _keep)
        patch.setattr("daskcnn.datasets.own_data.remove", lambda path: None)
        fit(case.made, _labels(len(case.plain)))
    return open_dataset(str(next(folder.glob("*.zarr"))))


def _keep(*_: Any, **__: Any) -> None:
    raise _Fitted


def _check_samples(case: Given, found: Dataset) -> None:
    """All samples are there with their labels, pixels without data are marked, and the statistics are without them."""
    parts = [part.read(0, len(part)) for part in (found.train, found.test)]
    images, labels = (np.concatenate(both) for both in zip(*parts, strict=True))
    order = images[:, 0, 0, 0].astype(int)
    np.testing.assert_array_equal(labels, _labels(len(case.plain))[order])
    unknown = np.zeros(images.shape, bool) if found.nodata is None else images.astype(float) == found.nodata
    unknown |= np.isnan(images.astype(float))
    np.testing.assert_array_equal(np.where(unknown, np.nan, images.astype(float)), case.plain[order])
    seen = case.plain[images[: len(found.train), 0, 0, 0].astype(int)]
    np.testing.assert_allclose(found.mean, np.nanmean(seen, axis=(0, 1, 2)), rtol=1e-5)


FLOAT16_MASKED = pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
"""NumPy's fill value of masked arrays, 1e20, is too large for float16: a copy, or chunks that Dask joins, say so."""

DOORS = {"prepare": _prepared, "train": _trained, "fit": _fitted}


@pytest.mark.filterwarnings("ignore:images of shape")
@FLOAT16_MASKED
@pytest.mark.parametrize("door", DOORS)
@settings(max_examples=15)
@given(case=givens())
def test_the_numbers_trained_on_are_those_of_numpy_s_array_or_none(door: str, case: Given) -> None:
    grey = case.plain.shape[3] == 1
    if door == "fit" and case.layout == "NCHW" and not grey:
        return  # it has no layout; what has names is refused, and nothing else can be known
    with tempfile.TemporaryDirectory() as folder:
        found = _given_or_refused(case, lambda: DOORS[door](case, Path(folder)))
        if found is not None:
            _check_samples(case, found)


def _given_or_refused(case: Given, door: Callable[[], Any], *, strict: bool = False) -> Any:
    """What the door gives. None where it refuses images that may be refused, with value, reason and remedy.

    strict: whether it takes NumPy's arrays of four axes alone.
    """
    refused: Exception | None = None
    try:
        found = door()
    except (UserError, ValueError) as error:  # the latter as scikit-learn has it
        refused = error
    if refused is None:
        assert not case.misnamed
        return found
    assert case.odd or (strict and (case.plain.shape[3] == 1 or isinstance(case.made, list))), refused
    if isinstance(refused, UserError):
        assert all((refused.value, refused.reason, refused.remedy))
    assert str(refused)
    return None


def test_blocks_in_another_cluster_s_memory_are_refused_with_the_remedy(tmp_path: Path) -> None:
    """Its workers ask each other for the blocks in vain, and are taken for lost."""
    settings: dict[str, Any] = {"processes": False, "dashboard_address": ":0", "silence_logs": "ERROR"}
    images = np.random.default_rng(0).random((40, 8, 8), np.float32)
    refused = pytest.raises(ClusterError, match=r"persisted on another cluster .*; give client=, a client of the")
    with LocalCluster(n_workers=1, threads_per_worker=1, **settings) as cluster:
        with Client(cluster):
            lazy = da.from_array(images, chunks=(20, 8, 8)).persist() + 1
            with SHARED.client() as other, refused:
                daskcnn.prepare(lazy, _labels(40), tmp_path / "other.zarr", client=other)
            with refused:
                daskcnn.CNNClassifier().fit(lazy, _labels(40))
            with Client(cluster, set_as_default=False) as again:  # another client of the same scheduler
                assert len(daskcnn.prepare(lazy, _labels(40), tmp_path / "x.zarr", client=again).train) == 32
        with refused:
            daskcnn.prepare(lazy, _labels(40), tmp_path / "none.zarr")
    SHARED.close()


@pytest.mark.filterwarnings("ignore:.* have NaN or infinities")
@FLOAT16_MASKED
@settings(max_examples=15)
@given(case=givens())
def test_predictions_are_those_of_numpy_s_array_or_none(case: Given) -> None:
    if case.layout == "NCHW" or case.dtype.kind == "c" or case.dtype.newbyteorder("=").name not in get_args(Dtype):
        return
    shape, dtype = case.plain.shape[1:], case.dtype.newbyteorder("=")
    model = TrainedModel(
        classifier({"layers": [{"layer": "dense", "units": 4}]}, facts(shape, dtype=dtype, nodata=case.nodata))
    )
    mark = np.nan if dtype.kind == "f" else case.nodata
    found = _given_or_refused(case, lambda: _computed(model.predict(case.made)), strict=True)
    if found is not None:
        assert mark is not None or case.missing == "none"
        plain = np.where(np.isnan(case.plain), mark or 0, case.plain).astype(dtype)
        np.testing.assert_allclose(found, model.predict(plain), rtol=1e-5)


def _computed(found: Any) -> npt.NDArray[Any]:
    return np.asarray(found.compute() if hasattr(found, "compute") else found)
