"""Zarr arrays are used in place: read as they are, split by their labels, and checked against their index."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from pydantic import ValidationError

from daskcnn.errors import DataError
from daskcnn.store import BatchPlan, batches
from daskcnn.store import loader as loader_module
from daskcnn.store.array_index import ArrayChanged, ArrayIndex, keep_in_cache, kept_in_cache, read_index, write_index
from daskcnn.store.chunk_source import CACHE
from daskcnn.store.foreign.array import ImageArray
from daskcnn.store.foreign.in_place import Arrays, look, outline
from tests.store.arrays_in_place import index_of, opened, tiles, write_array


def stored(arrays: Arrays) -> tuple[Any, Any]:
    return zarr.open_array(arrays.images, mode="r")[...], zarr.open_array(arrays.labels, mode="r")[...]


def test_every_sample_is_in_one_part_with_its_label(tmp_path: Path) -> None:
    arrays = tiles(tmp_path)
    x, y = stored(arrays)
    found, data = outline(arrays), opened(arrays)
    assert (len(data.train), len(data.test), data.shape, data.dtype.name) == (240, 60, (8, 6, 3), "uint16")
    for split, numbers in ((data.train, found.order), (data.test, found.test)):
        images, labels = split.read(0, len(split))
        np.testing.assert_array_equal(images, x[numbers])
        np.testing.assert_array_equal(labels, y[numbers])
        assert (images.dtype, labels.dtype) == (np.dtype("uint16"), np.dtype("int64"))
    assert sorted([*found.order.tolist(), *found.test.tolist()]) == list(range(300))
    assert data.name == "tiles.zarr/x"
    assert data.classes == ("0", "1", "2", "3", "4")


def test_test_and_validation_samples_are_stratified_and_the_rest_are_chunks_in_another_order(tmp_path: Path) -> None:
    arrays = tiles(tmp_path)
    data, found = opened(arrays), outline(arrays)
    assert np.bincount(data.test.labels()).tolist() == [12] * 5
    assert np.bincount(data.train.labels()[-40:]).tolist() == [8] * 5
    chunks = found.order[:200] // 20
    changes = np.flatnonzero(np.diff(chunks)) + 1
    assert len(changes) == 14, "each of the 15 chunks is there once"
    assert np.asarray(data.train.cuts)[:14].tolist() == changes.tolist()
    assert chunks[[0, *changes]].tolist() != sorted(set(chunks.tolist()))
    other = outline(replace(arrays, seed=1))
    assert other.order.tolist() != found.order.tolist()
    assert other.test.tolist() != found.test.tolist()


def test_statistics_are_those_of_the_training_part(tmp_path: Path) -> None:
    arrays = tiles(tmp_path)
    pixels = stored(arrays)[0][np.sort(outline(arrays).order)].astype(float)
    data = opened(arrays)
    np.testing.assert_allclose(data.mean, pixels.mean((0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(data.deviation, pixels.std((0, 1, 2)), rtol=1e-12)


def test_pixels_without_data_do_not_count(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(100, 4, 4, 2)).astype("float32")
    x[7, 1, 2, 1] = np.nan
    x[8, 0, 0, 0] = -99
    images = write_array(tmp_path / "x", x, 10)
    arrays = Arrays(images, write_array(tmp_path / "y", np.arange(100) % 4, 100), validation=8)
    with pytest.raises(DataError, match=r"x: sample 7, channel 1, pixel \(1, 2\) is nan; set data.nodata"):
        opened(arrays)
    data = opened(arrays, nodata=-99)
    kept = np.where(np.isnan(x) | (x == -99), np.nan, x)[np.sort(outline(arrays).order)].astype(float)
    np.testing.assert_allclose(data.mean, np.nanmean(kept, (0, 1, 2)), rtol=1e-6)


@pytest.mark.parametrize(
    ("how", "zarr_format"),
    [
        (how, form)
        for how in ("plain", "NCHW", "grey", "grey NCHW", "big end", "gzip", "text", "rows")
        for form in (2, 3)
    ]
    + [("sharded", 3)],
)
def test_arrays_of_many_kinds(tmp_path: Path, zarr_format: Any, how: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 99, (60, 6, 5, 3)).astype("int16")
    y: Any = np.array(["cat", "dog", "eel"])[np.arange(60) % 3] if how == "text" else np.arange(60) % 3
    options: dict[str, Any] = {"zarr_format": zarr_format}
    layout: Any = "NHWC"
    written: Any = x
    if how == "NCHW":
        written, layout = x.transpose(0, 3, 1, 2), "NCHW"
    if how.startswith("grey"):
        layout = "NCHW" if how == "grey NCHW" else "NHWC"
        x = x[..., :1]
        written = x[..., 0]
    if how == "big end":
        written = x.astype(">i2")
    if how == "gzip":
        gzip: Any = {"id": "gzip", "level": 1} if zarr_format == 2 else {"name": "gzip", "configuration": {"level": 1}}
        options["compressors"] = [gzip]
    if how == "rows":
        y = (rng.random((60, 4)) < 0.4).astype("uint8")
    if how == "sharded":
        options["shards"] = (20, *x.shape[1:])
    images = write_array(tmp_path / "x", written, 10, **options)
    labels = write_array(tmp_path / "y", y, 25 if y.ndim == 1 else (25, 4), zarr_format=zarr_format)
    data = opened(Arrays(images, labels, layout=layout, validation=6))
    found = outline(Arrays(images, labels, layout=layout, validation=6))
    got, codes = data.train.read(0, len(data.train))
    np.testing.assert_array_equal(got, x[found.order])
    if how == "rows":
        assert data.labels == "several"
        np.testing.assert_array_equal(codes, y[found.order])
    else:
        assert [data.classes[code] for code in codes] == [str(label) for label in y[found.order]]


def test_test_arrays_of_their_own(tmp_path: Path) -> None:
    arrays = tiles(tmp_path)
    x = np.random.default_rng(9).integers(0, 9, (30, 8, 6, 3)).astype("uint16")
    images = write_array(tmp_path / "tx", x, 7)
    own = replace(
        arrays, test=None, test_images=images, test_labels=write_array(tmp_path / "ty", np.arange(30) % 5, 30)
    )
    data = opened(own)
    assert (len(data.train), len(data.test)) == (300, 30)
    np.testing.assert_array_equal(data.test.read(0, 30)[0], x)
    unlike = write_array(tmp_path / "tz", x[..., :2], 7)
    with pytest.raises(DataError, match=r"tz: images of uint16 \(8, 6, 2\), those to train on are"):
        outline(replace(own, test_images=unlike))
    strange = write_array(tmp_path / "ts", np.arange(30) % 6, 30)
    with pytest.raises(
        DataError, match=r"ts: sample 5 has '5', .* 5 classes \(those of the labels to train on\); correct it, or train"
    ):
        outline(replace(own, test_labels=strange))


def test_a_limit_keeps_samples_of_every_class(tmp_path: Path) -> None:
    data = opened(tiles(tmp_path), limit=100)
    assert (len(data.train), len(data.test)) == (100, 60)
    assert np.bincount(data.train.labels()[-40:]).tolist() == [8] * 5
    data.train.read(0, 100)
    data = opened(tiles(tmp_path / "again"), limit=50)
    assert np.bincount(data.test.labels()).tolist() == [10] * 5


def test_a_limit_trains_on_every_class_of_an_array_sorted_by_class(tmp_path: Path) -> None:
    arrays = replace(tiles(tmp_path, classes=10), limit=50, validation=10)
    found = outline(arrays)
    assert np.bincount(found.labels.values[found.order[:40]]).tolist() == [4] * 10
    data = found.dataset(index_of(found))
    np.testing.assert_array_equal(data.train.read(0, 50)[0], stored(arrays)[0][found.order])
    few = np.r_[np.repeat([0, 1], 140), np.repeat(np.arange(2, 12), 2)]  # of which one is tested
    own = replace(arrays, labels=write_array(tmp_path / "few", few, 300), test=0.5)
    found = outline(own)
    assert np.bincount(found.labels.values[found.order[:40]]).tolist() == [15, 15] + [1] * 10
    with pytest.raises(DataError, match=r"the training part has none; raise data\.limit"):
        outline(replace(own, limit=12, validation=3))


# --- the loader ---


def test_batches_show_every_sample_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "IN_PLACE_WINDOW_BYTES", 60 * 8 * 6 * 3 * 2)
    data = opened(tiles(tmp_path))
    plan = BatchPlan(((0, 90), (120, 200)), 32, seed=1)
    with batches(data, data.train, plan) as stream:
        keys = np.concatenate([batch.keys for batch in stream])
    assert len(set(keys.tolist())) == 170


def test_scattered_samples_are_read_once_though_chunks_pass_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays, reads = tiles(tmp_path), list[int]()
    data, scattered = opened(arrays), outline(arrays).order[200:]
    read = ImageArray.read

    def noted(array: ImageArray, index: int) -> Any:
        reads.append(index)
        return read(array, index)

    monkeypatch.setattr(ImageArray, "read", noted)
    monkeypatch.setattr(CACHE, "limit", 20 * 8 * 6 * 3 * 2 * 4)
    monkeypatch.setattr(CACHE, "spared", 20 * 8 * 6 * 3 * 2 * 2)
    first = data.train.read(200, 240)
    assert sorted(reads) == sorted(set((scattered // 20).tolist()))
    data.train.read(0, 200)
    reads.clear()
    again = data.train.read(200, 240)
    assert reads == []
    np.testing.assert_array_equal(first[0], again[0])


# --- the index ---


def test_an_index_travels_and_is_kept(tmp_path: Path) -> None:
    found = outline(tiles(tmp_path))
    index = index_of(found)
    write_index(tmp_path / "run" / "index.json", index)
    assert read_index(tmp_path / "run" / "index.json") == index == pickle.loads(pickle.dumps(index))  # noqa: S301
    assert read_index(tmp_path / "none.json") is None
    keep_in_cache(found.cache_key, index)
    assert kept_in_cache(found.cache_key) == index
    there = pickle.loads(pickle.dumps(found.dataset(index)))  # noqa: S301
    np.testing.assert_array_equal(there.train.read(0, 9)[0], found.dataset(index).train.read(0, 9)[0])


def test_pieces_travel_and_come_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daskcnn.store.foreign.in_place._RUN_BYTES", 3 * 20 * 8 * 6 * 3 * 4)
    found = outline(tiles(tmp_path, dtype="float32"))
    pieces = [pickle.loads(pickle.dumps(piece)) for piece in found.pieces()]  # noqa: S301
    assert [len(piece.chunks) for piece in pieces] == [3] * 5
    assert found.index([seen for piece in reversed(pieces) for seen in look(piece)]) == index_of(found)


def test_an_index_with_many_wrong_entries_is_refused_by_the_first(tmp_path: Path) -> None:
    index, file = index_of(outline(tiles(tmp_path))).model_dump(mode="json"), tmp_path / "index.json"
    for field in ("images", "test_images", "mean", "deviation"):
        file.write_text(json.dumps(index | {field: [None] * 1000}))
        with pytest.raises(DataError, match="no index of an array") as caught:
            read_index(file)
        assert isinstance(caught.value.__cause__, ValidationError)
        assert caught.value.__cause__.error_count() == 1, "each error takes memory"
    file.write_text(json.dumps(index | {f"key{i}": 1 for i in range(1000)}))
    with pytest.raises(DataError, match=r"no index of an array \('key0': unknown key\)"):
        read_index(file)


@pytest.mark.parametrize("damage", ["{}", "[]", "nothing", '{"format": 1, "identity": 7}'])
def test_a_damaged_index_is_refused_by_its_file(tmp_path: Path, damage: str) -> None:
    (tmp_path / "index.json").write_text(damage)
    with pytest.raises(DataError, match=r"index\.json: .*; remove it, so that the array is read again"):
        read_index(tmp_path / "index.json")


def test_what_is_kept_is_of_no_use_once_the_storage_says_otherwise(tmp_path: Path) -> None:
    arrays = tiles(tmp_path)
    before = outline(arrays).cache_key
    assert outline(arrays).cache_key == before
    zarr.open_array(arrays.images, mode="r+")[3] = 7
    assert outline(arrays).cache_key != before


def test_a_chunk_that_changed_since_is_named(tmp_path: Path) -> None:
    arrays = tiles(tmp_path)
    data = opened(arrays)
    zarr.open_array(arrays.images, mode="r+")[47, 0, 0, 0] = 999
    with pytest.raises(ArrayChanged, match=r"x: samples 40 to 59 \(chunk 2\) have changed since .*; restore the array"):
        data.train.read(0, 240)


def test_an_index_of_another_array_is_refused(tmp_path: Path) -> None:
    found = outline(tiles(tmp_path))
    index = index_of(found)
    other = outline(tiles(tmp_path / "other", classes=4))
    with pytest.raises(DataError, match="is another array than its index was made of"):
        other.dataset(index)
    short = ArrayIndex(**(index.model_dump() | {"images": index.images[1:]}))
    with pytest.raises(DataError, match="is another array than its index was made of"):
        found.dataset(short)


# --- scale ---


def test_a_scale_of_ones_own(tmp_path: Path) -> None:
    data = opened(tiles(tmp_path)).scaled((1, 2, 3), (4, 5, 6))
    assert (data.mean.tolist(), data.deviation.tolist()) == ([1, 2, 3], [4, 5, 6])
    with pytest.raises(DataError, match=r"data\.scale\.mean: 2 numbers for 3 channels of .*x; give one for each"):
        opened(tiles(tmp_path / "b")).scaled((1, 2), (4, 5, 6))
