"""Data sets of every number type, of several labels a sample, with weights and with missing pixels."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from daskcnn.errors import DataError
from daskcnn.store import BatchPlan, Dataset, batches, normalise, open_dataset, verify
from daskcnn.store.chunk_facts import Images, Moments, chunk_facts
from daskcnn.store.image_facts import Facts
from daskcnn.store.making.writer import write
from daskcnn.store.manifest import PartManifest, Source, describe, draft_of

DTYPES = ["uint8", "uint16", "int16", "float16", "float32", "float64"]


def tiles(dtype: str, count: int = 60, channels: int = 5) -> Images:
    """Random images (count, 3, 4, channels) that use the type's range, or a good part of it."""
    rng, kind = np.random.default_rng(3), np.dtype(dtype)
    if kind.kind == "f":
        return rng.normal(-3, 7, (count, 3, 4, channels)).astype(kind)
    info = np.iinfo(kind)
    return rng.integers(info.min, info.max, (count, 3, 4, channels), dtype=kind, endpoint=True)


def stored(folder: Path, source: Source, *, nodata: float | None = None) -> Dataset:
    """The source as a store in chunks of 7, opened."""
    path = str(folder / "tiles.zarr")
    manifest = describe(source, chunk=7, order="stored", seed=0, nodata=nodata)
    write(source, manifest, path, lambda part: None)
    return open_dataset(path)


def in_classes(images: Images) -> Source:
    """A source of two classes in turn; a sixth of the images are the test part."""
    labels, cut = (np.arange(len(images)) % 2).astype(np.uint8), len(images) * 5 // 6
    return Source("tiles", ("no", "yes"), (images[:cut], labels[:cut]), (images[cut:], labels[cut:]), {})


@pytest.mark.parametrize("dtype", DTYPES)
def test_images_come_back_as_they_were(tmp_path: Path, dtype: str) -> None:
    source = in_classes(tiles(dtype))
    data = stored(tmp_path, source)
    verify(data)
    assert data.dtype == np.dtype(dtype)
    images, labels = data.train.gather(np.array([44, 3, 17, 3]))
    assert images.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(images, source.train[0][[44, 3, 17, 3]])
    assert labels.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_network_sees_mean_zero_and_deviation_one_in_every_channel(tmp_path: Path, dtype: str) -> None:
    source = in_classes(tiles(dtype))
    data = stored(tmp_path, source)
    x = normalise(data, source.train[0], np.float64)
    np.testing.assert_allclose(x.mean(axis=(0, 1, 2)), 0, atol=1e-9)
    np.testing.assert_allclose(x.std(axis=(0, 1, 2)), 1, rtol=1e-6)


def test_a_channel_that_is_the_same_everywhere_becomes_zero(tmp_path: Path) -> None:
    images = tiles("uint16")
    images[..., 2] = 17
    told = list[str]()
    describe(in_classes(images), chunk=7, order="stored", seed=0, warn=told.append)
    assert told == ["tiles: channel 2 is the same in every training image"]
    x = normalise(stored(tmp_path, in_classes(images)), images)
    assert not x[..., 2].any()
    assert np.isfinite(x).all()


@pytest.mark.parametrize("value", [23.7, 0.1, -1e5 / 3])
def test_a_channel_of_one_real_number_has_no_deviation(tmp_path: Path, value: float) -> None:
    """The rounding error of its mean is none: images would be divided by it."""
    images = tiles("float64")
    images[..., 2] = value
    told = list[str]()
    describe(in_classes(images), chunk=7, order="stored", seed=0, warn=told.append)
    assert told == ["tiles: channel 2 is the same in every training image"]
    data = stored(tmp_path, in_classes(images))
    assert (data.mean[2], data.deviation[2]) == (value, 1)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_named(value: float) -> None:
    images = tiles("float32")
    images[33, 1, 2, 4] = value
    with pytest.raises(DataError, match=rf"tiles: train: sample 33, channel 4, pixel \(1, 2\) is {value}"):
        describe(in_classes(images), chunk=7, order="stored", seed=0)


@pytest.mark.parametrize(("dtype", "nodata"), [("float32", -9999.0), ("int16", -9999.0), ("float64", float("nan"))])
def test_missing_pixels_count_for_nothing_and_become_the_mean(tmp_path: Path, dtype: str, nodata: float) -> None:
    images = tiles(dtype)
    missing = np.random.default_rng(0).random(images.shape) < 0.2
    images[missing] = nodata
    missing |= images == nodata
    if dtype == "float32":
        images[5, 0, 0, 0], missing[5, 0, 0, 0] = np.nan, True
    data = stored(tmp_path, in_classes(images), nodata=nodata if np.isfinite(nodata) else 0.0)
    seen = np.ma.array(images[:50].astype(np.float64), mask=missing[:50])
    np.testing.assert_allclose(data.mean, seen.mean(axis=(0, 1, 2)), rtol=1e-9)
    np.testing.assert_allclose(data.deviation, seen.std(axis=(0, 1, 2)), rtol=1e-6)
    x = normalise(Facts.from_dict(json.loads(json.dumps(Facts.of(data).to_dict()))), images, np.float64)
    assert not x[missing.transpose(1, 2, 0, 3)].any()
    assert np.isfinite(x).all()


def test_infinities_are_refused_where_there_is_a_nodata_value_too() -> None:
    images = tiles("float32")
    images[0, 0, 0, 0], images[1, 0, 0, 0] = np.nan, np.inf
    with pytest.raises(DataError, match=r"sample 1, channel 0, pixel \(0, 0\) is inf; replace it"):
        describe(in_classes(images), chunk=7, order="stored", seed=0, nodata=-1.0)


def test_several_labels_a_sample(tmp_path: Path) -> None:
    rows = np.random.default_rng(1).integers(0, 2, (60, 4)).astype(np.uint8)
    images = tiles("uint8")
    source = Source("marks", ("a", "b", "c", "d"), (images[:50], rows[:50]), (images[50:], rows[50:]), {})
    data = stored(tmp_path, source)
    verify(data)
    assert data.labels == "several"
    assert data.manifest.train.class_counts == tuple(rows[:50].sum(axis=0).tolist())
    np.testing.assert_array_equal(data.train.gather(np.array([49, 0]))[1], rows[[49, 0]])
    with batches(data, data.train, BatchPlan(((0, 50),), 8, 0)) as ready:
        shown = np.concatenate([batch.labels for batch in ready])
    assert sorted(map(tuple, shown.tolist())) == sorted(map(tuple, rows[:50].tolist()))


def test_a_row_that_holds_another_number_is_named(tmp_path: Path) -> None:
    rows = np.random.default_rng(1).integers(0, 2, (60, 4)).astype(np.uint8)
    images, wrong = tiles("uint8"), rows.copy()
    wrong[20, 1] = 2
    source = Source("marks", ("a", "b", "c", "d"), (images[:50], rows[:50]), (images[50:], rows[50:]), {})
    bad = replace(source, train=(images[:50], wrong[:50]))
    manifest = describe(bad, chunk=7, order="stored", seed=0)
    write(bad, manifest, str(tmp_path / "x"), lambda part: None)
    with pytest.raises(DataError, match="train/labels, sample 20 has label 2, labels are 0 to 1"):
        verify(open_dataset(str(tmp_path / "x")))


def test_labels_that_are_all_the_same_teach_nothing() -> None:
    images, rows = tiles("uint8"), np.tile(np.array([1, 0], np.uint8), (60, 1))
    source = Source("marks", ("a", "b"), (images[:50], rows[:50]), (images[50:], rows[50:]), {})
    with pytest.raises(DataError, match="every sample has the same labels"):
        describe(source, chunk=7, order="stored", seed=0)


def test_more_than_256_classes(tmp_path: Path) -> None:
    images = tiles("uint8", 620)
    labels = np.arange(620) % 300
    names = tuple(f"class {i}" for i in range(300))
    source = Source("many", names, (images[:600], labels[:600]), (images[600:], labels[600:]), {})
    data = stored(tmp_path, source)
    verify(data)
    np.testing.assert_array_equal(data.train.labels(), labels[:600])


def test_weights_go_with_their_samples(tmp_path: Path) -> None:
    weights = np.linspace(0, 2, 50).astype(np.float32)
    data = stored(tmp_path, replace(in_classes(tiles("uint8")), weights=weights))
    verify(data)
    np.testing.assert_array_equal(data.train.weights(np.array([3, 49, 0])), weights[[3, 49, 0]])
    assert data.test.weights(np.array([0])) is None
    with batches(data, data.train, BatchPlan(((0, 50),), 8, 0, shuffle=False)) as ready:
        shown = [batch.weights for batch in ready]
    np.testing.assert_array_equal(np.concatenate([w for w in shown if w is not None]), weights)


@given(
    pixels=arrays(np.int16, st.tuples(st.integers(1, 12), st.just(2))),
    cut=st.integers(0, 12),
)
@settings(max_examples=60, deadline=None)
def test_moments_of_integers_do_not_depend_on_the_cut(pixels: npt.NDArray[np.int16], cut: int) -> None:
    whole = Moments.of(pixels)
    assert Moments.of(pixels[:cut]) + Moments.of(pixels[cut:]) == whole
    np.testing.assert_allclose(whole.mean, pixels.mean(axis=0, dtype=np.float64), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(whole.deviation, pixels.astype(np.float64).std(axis=0), rtol=1e-9, atol=1e-9)


@given(pixels=arrays(np.float64, (9, 2), elements=st.floats(-1e6, 1e6)), cut=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_moments_of_real_numbers_are_those_of_the_whole(pixels: npt.NDArray[np.float64], cut: int) -> None:
    joined = Moments.of(pixels[:cut]) + Moments.of(pixels[cut:])
    np.testing.assert_allclose(joined.mean, pixels.mean(axis=0), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(joined.deviation, pixels.std(axis=0), rtol=1e-6, atol=1e-6)


def test_a_chunk_without_any_data_changes_nothing() -> None:
    pixels = tiles("float32", 4)
    empty = np.full_like(pixels, np.nan)
    labels = np.zeros(4, np.uint8)
    facts = chunk_facts(pixels, labels, classes=2, nodata=0.5)
    none = chunk_facts(empty, labels, classes=2, nodata=0.5)
    assert facts.moments + none.moments == facts.moments
    assert none.moments + facts.moments == facts.moments


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_pixels_too_large_to_compute_with_are_named(dtype: str) -> None:
    images = tiles(dtype)
    images[8, 1, 2, 3] = -3e38
    with pytest.raises(DataError, match=r"sample 8, channel 3, pixel \(1, 2\) is -3\S*e\+38, more than 1e\+30 in size"):
        chunk_facts(images[5:], np.zeros(55, np.uint8), classes=2, first=5)
    marked = chunk_facts(images, np.zeros(60, np.uint8), classes=2, nodata=float(images[8, 1, 2, 3]))
    assert marked.moments.counts == (720, 720, 720, 719, 720)
    chunk_facts(np.clip(images, -1e30, 1e30), np.zeros(60, np.uint8), classes=2)


def test_a_mark_for_no_data_that_the_type_has_no_room_for(tmp_path: Path) -> None:
    images = tiles("float16")
    images[3, 0, 0, 1] = np.nan
    data = stored(tmp_path, in_classes(images), nodata=-99999.0)
    assert np.isfinite(normalise(data, images)).all()
    images[3, 0, 0, 1] = -np.inf
    with pytest.raises(DataError, match=r"sample 3, channel 1, pixel .* is -inf; replace it"):
        stored(tmp_path, in_classes(images), nodata=-99999.0)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"nodata": float("nan")}, "nodata = nan: input should be a finite number"),
        ({"order": "random"}, "order = 'random': input should be 'shuffled' or 'stored'"),
        ({"name": ""}, "name = '': string should have at least 1 character"),
        ({"chunk": -1}, "chunk = -1: input should be greater than or equal to 1"),
        ({"chunk": 10**8}, "chunks of 100,000,000 samples of shape .* are larger than .*; give a smaller chunk"),
    ],
)
def test_fields_that_no_manifest_can_have(fields: dict[str, object], told: str) -> None:
    common = {"name": "x", "classes": ("a", "b"), "shape": (3, 4, 1), "chunk": 5, "order": "stored", "seed": 0}
    part = PartManifest(samples=9, class_counts=(5, 4), images=(), labels=())
    with pytest.raises(DataError, match=told):
        draft_of(common | {"sources": {}} | fields, {"train": part, "test": part})


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_mean_is_taken_off_before_numbers_are_cut_to_the_type_of_the_network(tmp_path: Path, dtype: str) -> None:
    """Near 1e9 the numbers of float32 are 64 apart."""
    images = 1e9 + np.random.default_rng(3).normal(0, 2.6, (60, 3, 4, 2))
    data = stored(tmp_path, in_classes(images))
    x = normalise(data, images, dtype)
    assert x.dtype == dtype
    wanted = ((images - images[:50].mean((0, 1, 2))) / images[:50].std((0, 1, 2))).transpose(1, 2, 0, 3)
    np.testing.assert_allclose(x, wanted, atol=1e-5)
