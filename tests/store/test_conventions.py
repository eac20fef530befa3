"""Arrays in place mean what their attributes say, and chunks that are not stored count as no data or are refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from daskcnn.datasets.job_dataset import find_dataset, outlined
from daskcnn.errors import DataError
from daskcnn.job.resolve import resolve
from daskcnn.store.foreign import array
from daskcnn.store.foreign.array import open_images
from daskcnn.store.foreign.in_place import Arrays, outline
from daskcnn.store.manifest import is_like
from tests.store.arrays_in_place import opened, write_array

LABELS = np.arange(100) % 4


def pixels(dtype: str = "int16") -> Any:
    return np.random.default_rng(0).integers(1, 200, (100, 4, 4, 2)).astype(dtype)


def arrays(folder: Path, x: Any, **how: Any) -> Arrays:
    """Images in chunks of 10, and labels."""
    images = write_array(folder / "x", x, 10, **how)
    return Arrays(images, write_array(folder / "y", LABELS, 25), validation=8)


def said(own: Arrays, **data: Any) -> list[str]:
    """The warnings of a run on these arrays."""
    job = resolve({"data": {"images": own.images, "labels": own.labels, "validation": 8, "nodata": own.nodata, **data}})
    told = list[str]()
    how: Any = {"progress": lambda *_: None, "warn": told.append}
    outlined(job, **how)
    find_dataset(job, **how)
    return told


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32", "float64"])
def test_attributes_are_followed_as_xarray_follows_them(tmp_path: Path, dtype: str, zarr_format: Any) -> None:
    xarray = pytest.importorskip("xarray")
    x = pixels(dtype)
    x[7, 1, 2, 1], x[8, 0, 0, 0] = 250, 251
    attributes = {"_FillValue": 250, "missing_value": 251, "scale_factor": 0.5, "add_offset": 1000.0}
    own = arrays(tmp_path, x, attributes=attributes, zarr_format=zarr_format)
    data, order = opened(own), outline(own).order
    coded = xarray.Dataset({"x": (("n", "y", "x", "band"), x, attributes)})
    with pytest.warns(xarray.SerializationWarning):
        wanted = xarray.decode_cf(coded)["x"].to_numpy()[order]
    got = data.train.read(0, len(data.train))[0]
    assert got.dtype == data.dtype == np.dtype("float64")
    np.testing.assert_allclose(np.where(got == data.nodata, np.nan, got), wanted, rtol=1e-6)
    np.testing.assert_allclose(data.mean, np.nanmean(wanted.astype(float), (0, 1, 2)), rtol=1e-6)


def test_a_fill_value_stands_for_no_data_and_is_named_and_counted(tmp_path: Path) -> None:
    x = pixels()
    x[40:42] = -9999
    x[43] = -5
    own = arrays(tmp_path, x, attributes={"_FillValue": -9999})
    told = "\n".join(said(own, nodata=-5))
    assert "x: its attributes are followed: -9999 for no data" in told
    assert "x: 96 of 3,200 numbers (3.00%) are no data" in told
    data = opened(replace(own, nodata=-5))
    assert (data.dtype.name, data.nodata) == ("int16", -5)
    kept = np.where(x < 0, np.nan, x)[np.sort(outline(own).order)]
    np.testing.assert_allclose(data.mean, np.nanmean(kept, (0, 1, 2)))
    assert not said(arrays(tmp_path / "other", pixels())), "arrays without attributes need no word"


def test_a_fill_value_of_format_2_is_the_one_that_xarray_keeps_there(tmp_path: Path) -> None:
    how: dict[str, Any] = {"zarr_format": 2, "fill_value": 7}
    own = arrays(tmp_path, pixels(), attributes={"_ARRAY_DIMENSIONS": ["n", "y", "x", "band"]}, **how)
    assert opened(own).nodata == 7
    assert opened(arrays(tmp_path / "plain", pixels(), **how)).nodata is None, "zarr itself fills with 0 or any number"


def test_a_fill_value_of_format_3_is_read_as_xarray_writes_it(tmp_path: Path) -> None:
    xarray = pytest.importorskip("xarray")
    given = xarray.DataArray(np.where(pixels("float32") == 3, np.nan, pixels("float32")), dims=("n", "y", "x", "band"))
    place = str(tmp_path / "z.zarr")
    given.to_dataset(name="x").to_zarr(
        place, encoding={"x": {"_FillValue": -77.5, "chunks": (10, 4, 4, 2)}}, consolidated=False
    )
    own = Arrays(f"{place}/x", write_array(tmp_path / "y", LABELS, 25), validation=8)
    data = opened(own)
    assert data.nodata == -77.5
    np.testing.assert_allclose(data.mean, np.nanmean(given.to_numpy()[outline(own).order], (0, 1, 2)), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "float32", "float64"])
@pytest.mark.parametrize("scale", [None, 0.1])
@pytest.mark.parametrize("offset", [None, -273.15])
@pytest.mark.parametrize("fill", [None, 7])
def test_numbers_are_decoded_as_xarray_decodes_them(
    tmp_path: Path, dtype: str, scale: float | None, offset: float | None, fill: int | None
) -> None:
    """The types may differ in width, which a network takes: xarray goes by the factors' type, we by the numbers'."""
    xarray = pytest.importorskip("xarray")
    known = {"scale_factor": scale, "add_offset": offset, "_FillValue": fill}
    attributes = {name: value for name, value in known.items() if value is not None}
    x = pixels(dtype)
    own = open_images(write_array(tmp_path / "x", x, 10, attributes=attributes), "NHWC")
    theirs = xarray.decode_cf(xarray.Dataset({"x": (("n", "y", "x", "band"), x, attributes)}))["x"]
    found, expected = own.as_images(own.read(0)), theirs.to_numpy()[: own.chunk]
    if fill is not None:
        found = np.where(found == own.nodata, np.nan, found)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)
    if own.coding.packed:
        assert is_like(theirs.dtype, own.dtype)


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"scale_factor": [0.1, 0.2]}, r"scale_factor = \[0.1, 0.2\]: one finite number is needed"),
        ({"scale_factor": 0}, "scale_factor = 0: one finite"),
        ({"_FillValue": "none"}, "_FillValue = 'none': a number is needed; correct the attribute"),
        ({"missing_value": [True]}, "missing_value = "),
        ({"_Unsigned": "true"}, "_Unsigned = 'true', while its numbers are int16"),
    ],
)
def test_attributes_that_are_not_understood_are_refused(tmp_path: Path, attributes: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        outline(arrays(tmp_path, pixels(), attributes=attributes))


def test_test_images_with_another_value_for_no_data_are_refused(tmp_path: Path) -> None:
    own = arrays(tmp_path, pixels(), attributes={"_FillValue": -1})
    other = write_array(tmp_path / "tx", pixels(), 10, attributes={"_FillValue": -2})
    with pytest.raises(DataError, match="tx: -2 stands for no data, -1 in those to train on"):
        outline(replace(own, test=None, test_images=other, test_labels=own.labels))


def test_labels_that_stand_for_no_data_and_labels_that_change_are_refused(tmp_path: Path) -> None:
    images = write_array(tmp_path / "x", pixels(), 10)
    marked = np.where(np.arange(100) > 97, 255, LABELS)
    labels = write_array(tmp_path / "y", marked, 25, attributes={"_FillValue": 255})
    with pytest.raises(DataError, match=r"y: 2 labels stand for no data .* the first one of sample 98; leave"):
        outline(Arrays(images, labels))
    scaled = write_array(tmp_path / "s", LABELS, 25, attributes={"scale_factor": 2.0})
    with pytest.raises(DataError, match="s: labels that its attributes change"):
        outline(Arrays(images, scaled))


# --- chunks that are not stored ---


def with_a_hole(folder: Path, **how: Any) -> Arrays:
    """Images of which zarr leaves out the third chunk and the last, which have its fill value alone."""
    x = pixels()
    x[20:30] = x[90:] = 0
    return arrays(folder, x, **{"config": {"write_empty_chunks": False}, **how})


@pytest.mark.parametrize(
    "how", [{}, {"zarr_format": 2}, {"zarr_format": 2, "chunk_key_encoding": {"name": "v2", "separator": "/"}}]
)
def test_chunks_that_are_not_stored_are_counted_by_a_listing_alone(
    tmp_path: Path, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = with_a_hole(tmp_path, **how)
    reason = r"x: 2 of 10 chunks are not stored \(samples 20 to 29, 90 to 99\), and would be read as .* fill value 0"
    with monkeypatch.context() as patch:
        patch.setattr("daskcnn.store.foreign.array.ImageArray.read", lambda *_: pytest.fail("a chunk was read"))
        with pytest.raises(DataError, match=rf"{reason}; set data.nodata = 0 if they stand for no data"):
            said(own)
    told = "\n".join(said(replace(own, nodata=0)))
    assert "2 of 10 chunks are not stored (samples 20 to 29, 90 to 99) and count as pixels without data" in told
    assert "640 of 3,200 numbers (20.00%) are no data" in told


@pytest.mark.parametrize("how", [{}, {"shards": (50, 4, 4, 2)}])
def test_chunks_that_are_not_stored_are_found_where_nothing_can_be_listed(tmp_path: Path, how: dict[str, Any]) -> None:
    own = with_a_hole(tmp_path, **how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("daskcnn.store.files.Files.keys", lambda *_: None)
        with pytest.raises(DataError, match="x: samples 20 to 29 are not stored, and would be read as"):
            said(own)
        assert any("20.00%" in line for line in said(replace(own, nodata=0)))


@pytest.mark.parametrize("how", [{}, {"shards": (100, 4, 4, 2)}])
def test_a_read_looks_up_its_own_chunks_among_those_that_are_not_stored(tmp_path: Path, how: dict[str, Any]) -> None:
    """The last of many reads takes no more steps than the first: an array may have millions of such chunks."""
    x = np.zeros((400, 4, 4, 2), np.int16)
    x[::100] = 1  # a shard is there, and nearly all of its chunks are not
    path = write_array(tmp_path / "x", x, 1, config={"write_empty_chunks": False}, **how)
    found = replace(open_images(path, "NHWC", 0), chunk=1)  # not several chunks together
    steps = [0]

    def count(frame: Any, event: str, _: Any) -> Any:
        steps[0] += event == "line"
        return count

    def counted(index: int) -> int:
        steps[0], before = 0, sys.gettrace()
        sys.settrace(lambda frame, *_: count if frame.f_code.co_filename == array.__file__ else None)
        try:
            found.read(index)
        finally:
            sys.settrace(before)
        return steps[0]

    first = counted(1)
    for index in range(1, 399):
        found.read(index)
    assert counted(1) <= first


def test_a_whole_array_whose_chunks_are_all_stored_is_taken(tmp_path: Path) -> None:
    assert not said(with_a_hole(tmp_path, config={"write_empty_chunks": True}))
    ends = with_a_hole(tmp_path / "ends", config={"write_empty_chunks": True}, shards=(70, 4, 4, 2))
    assert not said(ends), "the last shard is longer than the array"


@pytest.mark.parametrize("how", [{}, {"zarr_format": 2}, {"shards": (50,)}])
def test_labels_that_are_not_stored_are_refused_and_the_remedy_works(tmp_path: Path, how: dict[str, Any]) -> None:
    images = write_array(tmp_path / "x", pixels(), 10)
    path = write_array(tmp_path / "y", np.sort(LABELS), 10, config={"write_empty_chunks": False}, **how)
    with pytest.raises(DataError, match=r"y: labels that are not stored \(samples 0 to 9, 10 to 19\)") as told:
        outline(Arrays(images, path))
    remedy = told.value.remedy.partition("this writes them: ")[2].replace("PATH", repr(path))
    with zarr.config.set({}):
        exec(remedy, {"zarr": zarr})  # noqa: S102
    assert outline(Arrays(images, path)).labels.counts(np.arange(100)) == (25,) * 4
