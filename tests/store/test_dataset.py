"""Stores are read back as written, and whatever is wrong with one is named before it does harm."""

from __future__ import annotations

import json
import pickle
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskcnn.documents import BOUNDS
from daskcnn.errors import DataError
from daskcnn.store import Split, open_dataset, verify
from daskcnn.store.chunk_facts import Images
from daskcnn.store.chunk_source import CACHE, ChunkCache, StoredChunks
from daskcnn.store.making.writer import write
from daskcnn.store.manifest import Source, describe, sha256
from tests.special_files import SPECIAL, special


def test_reads_back_what_was_written(toy: str, source: Source) -> None:
    data = open_dataset(toy)
    assert (data.name, data.shape, len(data.train), len(data.test)) == ("toy", (32, 32, 3), 230, 60)
    for split, (images, labels) in ((data.train, source.train), (data.test, source.test)):
        x, y = split.read(0, len(split))
        np.testing.assert_array_equal(x, images)
        np.testing.assert_array_equal(y, labels)
        assert (x.dtype, y.dtype) == (np.dtype(np.uint8), np.dtype(np.int64))
    np.testing.assert_array_equal(data.train.labels(), source.train[1])
    verify(data)


def test_statistics_are_those_of_the_training_pixels(toy: str, source: Source) -> None:
    data, pixels = open_dataset(toy), source.train[0].astype(np.float64)
    np.testing.assert_allclose(data.mean, pixels.mean((0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(data.deviation, pixels.std((0, 1, 2)), rtol=1e-12)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> tuple[Split, Images, Images]:
    from daskcnn.store.manifest import Source

    rng = np.random.default_rng(1)
    images, labels = rng.integers(0, 256, (37, 4, 4, 1), dtype=np.uint8), (np.arange(37) % 3).astype(np.uint8)
    source = Source("tiny", ("a", "b", "c"), (images, labels), (images[:5], labels[:5]), {})
    path = str(tmp_path_factory.mktemp("tiny") / "tiny.zarr")
    write(source, describe(source, chunk=7, order="stored", seed=0), path, lambda part: None)
    return open_dataset(path).train, images, labels


@given(indices=st.lists(st.integers(0, 36), max_size=20))
@settings(max_examples=50, deadline=None)
def test_gather_is_indexing(train: tuple[Split, Images, Images], indices: list[int]) -> None:
    split, images, labels = train
    at = np.array(indices, np.int64)
    x, y = split.gather(at)
    np.testing.assert_array_equal(x, images[at])
    np.testing.assert_array_equal(y, labels[at])


@pytest.mark.parametrize(("lo", "hi", "named"), [(-1, 3, -1), (30, 38, 37)])
def test_indices_outside_are_refused(train: tuple[Split, Images, Images], lo: int, hi: int, named: int) -> None:
    with pytest.raises(IndexError, match=f"sample {named}: train has samples 0 to 36"):
        train[0].read(lo, hi)


def test_limit_keeps_the_first_samples_of_each_part(toy: str, source: Source) -> None:
    data = open_dataset(toy, limit=70)
    assert (len(data.train), len(data.test)) == (70, 60)
    np.testing.assert_array_equal(data.train.read(60, 70)[0], source.train[0][60:70])
    with pytest.raises(IndexError):
        data.train.read(69, 71)
    verify(data)


def test_limits_that_leave_nothing_to_learn_are_refused(toy: str) -> None:
    with pytest.raises(DataError, match="limit=0"):
        open_dataset(toy, limit=0)
    with pytest.raises(DataError, match="limit=1 leaves training samples of one class only"):
        open_dataset(toy, limit=1)


def test_an_opened_data_set_travels(toy: str) -> None:
    there = pickle.loads(pickle.dumps(open_dataset(toy)))  # noqa: S301
    np.testing.assert_array_equal(there.train.read(0, 9)[0], open_dataset(toy).train.read(0, 9)[0])


def test_stores_by_url(source: Source) -> None:
    url = "memory://daskcnn-tests/toy.zarr"
    write(source, describe(source, chunk=50, order="stored", seed=0), url, lambda part: None)
    data = open_dataset(url)
    verify(data)
    np.testing.assert_array_equal(data.train.read(40, 60)[0], source.train[0][40:60])


@pytest.mark.parametrize("url", ["nosuch://bucket/x.zarr", "memory://daskcnn-tests/nothing.zarr"])
def test_urls_that_lead_nowhere(url: str) -> None:
    with pytest.raises(DataError, match=url):
        open_dataset(url)


# --- damage ---


def _chunk(path: str, array: str, index: int) -> Path:
    return Path(path, array, "c", str(index), *(["0", "0", "0"] if array.endswith("images") else []))


@pytest.mark.parametrize(
    ("array", "index", "samples"),
    [("train/images", 1, "50 to 99"), ("train/images", 4, "200 to 229"), ("test/labels", 0, "0 to 49")],
)
@pytest.mark.parametrize("harm", ["flip", "missing", "truncated", "longer"])
def test_a_damaged_chunk_is_named(toy: str, array: str, index: int, samples: str, harm: str) -> None:
    file = _chunk(toy, array, index)
    content = bytearray(file.read_bytes())
    if harm == "missing":
        file.unlink()
    elif harm == "flip":
        content[11] ^= 4
        file.write_bytes(content)
    else:
        file.write_bytes(content[:-1] if harm == "truncated" else content + b"!")
    data = open_dataset(toy)
    with pytest.raises(DataError) as caught:
        verify(data)
    for part in (toy, array, f"chunk {index}", f"samples {samples}"):
        assert part in str(caught.value)
    split = data.train if array.startswith("train") else data.test
    with pytest.raises(DataError, match=f"chunk {index} "):
        split.read(0, len(split))


def test_a_chunk_of_zeros_is_stored_so_that_its_absence_shows(source: Source, tmp_path: Path) -> None:
    images = source.train[0].copy()
    images[50:100] = 0
    source, path = replace(source, train=(images, source.train[1])), str(tmp_path / "dark.zarr")
    write(source, describe(source, chunk=50, order="stored", seed=0), path, lambda part: None)
    _chunk(path, "train/images", 1).unlink()
    with pytest.raises(DataError, match=r"chunk 1 .* is missing"):
        verify(open_dataset(path))


def test_chunks_beyond_the_limit_are_not_read(toy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _chunk(toy, "train/images", 3).unlink()
    _chunk(toy, "test/labels", 1).unlink()
    read, load = list[tuple[str, str, int]](), StoredChunks.load

    def noted(source: StoredChunks, array: str, index: int) -> Images:
        read.append((source.name, array, index))
        return load(source, array, index)

    monkeypatch.setattr(StoredChunks, "load", noted)
    verify(open_dataset(toy, limit=50))
    assert {*read} == {(part, array, 0) for part in ("train", "test") for array in ("images", "labels")}
    with pytest.raises(DataError, match=r"chunk 3 .* is missing"):
        verify(open_dataset(toy, limit=151))


def test_every_chunk_is_read_once(toy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, load = Counter[tuple[str, str, int]](), StoredChunks.load

    def noted(source: StoredChunks, array: str, index: int) -> Images:
        read[source.name, array, index] += 1
        return load(source, array, index)

    monkeypatch.setattr(StoredChunks, "load", noted)
    verify(open_dataset(toy))
    assert set(read.values()) == {1}
    assert len(read) == 2 * (5 + 2)


def test_padding_of_the_last_chunk_is_not_data(toy: str) -> None:
    file = _chunk(toy, "train/images", 4)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    verify(open_dataset(toy))


def test_a_label_that_is_no_class_is_named(source: Source, tmp_path: Path) -> None:
    labels = source.train[1].copy()
    manifest = describe(source, chunk=50, order="stored", seed=0)
    labels[123] = 10
    hostile = describe(
        replace(source, classes=(*source.classes, "x"), train=(source.train[0], labels)),
        chunk=50,
        order="stored",
        seed=0,
    )
    train = hostile.train.model_copy(update={"class_counts": manifest.train.class_counts})
    path = str(tmp_path / "bad.zarr")
    wrong = manifest.model_copy(update={"train": train})
    write(replace(source, train=(source.train[0], labels)), wrong, path, lambda part: None)
    with pytest.raises(DataError, match="train/labels, sample 123 has label 10, classes are 0 to 9"):
        verify(open_dataset(path))


def test_class_counts_are_checked(source: Source, tmp_path: Path) -> None:
    manifest = describe(source, chunk=50, order="stored", seed=0)
    counts = (22, 24, *manifest.train.class_counts[2:])
    wrong = manifest.model_copy(update={"train": manifest.train.model_copy(update={"class_counts": counts})})
    write(source, wrong, str(tmp_path / "x.zarr"), lambda part: None)
    with pytest.raises(DataError, match=r"train has class counts \[23, 23"):
        verify(open_dataset(str(tmp_path / "x.zarr")))


# --- metadata ---


Edit = Callable[[dict[str, Any]], object]
"""A change in place."""


def _edit(path: Path, change: Edit) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


HOSTILE_ARRAYS: dict[str, tuple[dict[str, Any], str]] = {
    "huge shape": ({"shape": [1 << 50, 32, 32, 3]}, "shape"),
    "huge chunk": (
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1 << 40, 32, 32, 3]}}},
        "chunk",
    ),
    "object array": ({"data_type": "object"}, "data_type"),
    "dates": ({"data_type": {"name": "numpy.datetime64"}}, "data_type"),
    "pickle": ({"codecs": [{"name": "numcodecs.pickle", "configuration": {}}]}, "codecs"),
    "compressed": ({"codecs": [{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 1}}]}, "codecs"),
    "transformer": ({"storage_transformers": [{"name": "x"}]}, "storage_transformers"),
    "format 2": ({"zarr_format": 2}, "zarr_format"),
}


@pytest.mark.parametrize("kind", HOSTILE_ARRAYS)
def test_hostile_arrays_are_refused_unread(toy: str, kind: str) -> None:
    change, named = HOSTILE_ARRAYS[kind]
    _edit(Path(toy, "train/images/zarr.json"), lambda meta: meta.update(change))
    with pytest.raises(DataError, match=f"train/images has {named}"):
        open_dataset(toy)


def _signed(change: Edit) -> Edit:
    """An edit of the manifest whose checksum is right all the same."""

    def edit(root: dict[str, Any]) -> None:
        body = root["attributes"]["daskcnn"]["manifest"]
        change(body)
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        root["attributes"]["daskcnn"]["sha256"] = sha256(text.encode())

    return edit


HOSTILE_MANIFESTS = {
    "one class": (_signed(lambda m: m["train"].update(class_counts=[230] + [0] * 9)), "every sample is of one class"),
    "class names": (_signed(lambda m: m.update(classes=["only"])), "1 class names"),
    "huge chunk": (_signed(lambda m: m.update(chunk=1 << 39)), "larger than"),
    "huge image": (_signed(lambda m: m.update(shape=[1 << 20, 1 << 20, 3])), "larger than"),
    "more samples than checksums": (_signed(lambda m: m["train"].update(samples=1 << 39)), "5 checksums for"),
    "negative shape": (_signed(lambda m: m.update(shape=[-32, -32, 3])), "shape"),
    "means": (_signed(lambda m: m.update(mean=[1.0])), "1 channel means"),
    "counts": (_signed(lambda m: m["test"].update(class_counts=[1] * 10)), "do not add up to 60"),
    "checksum": (_signed(lambda m: m["test"]["images"].__setitem__(0, "abc")), "'abc' is no SHA-256"),
    "empty": (_signed(lambda m: m["train"].update(samples=0)), "train.samples = 0"),
    "unsigned": (lambda r: r["attributes"]["daskcnn"]["manifest"].update(deviation=1.0), "does not match its checksum"),
    "unknown key": (_signed(lambda m: m.update(extra=1)), "'extra': unknown key"),
    "unknown key of a part": (_signed(lambda m: m["test"].update(extra=1)), "'extra': unknown key"),
    "wrong type": (_signed(lambda m: m.update(seed="0")), "seed = '0'"),
    "not finite": (_signed(lambda m: m.update(deviation=float("inf"))), "deviation"),
    "many sources": (_signed(lambda m: m.update(sources=dict.fromkeys(map(str, range(10_001)), ""))), "10,001 sources"),
    "wrong and unsigned": (lambda r: r["attributes"]["daskcnn"]["manifest"].update(seed="0"), "match its checksum"),
    "later format": (lambda r: r["attributes"]["daskcnn"]["manifest"].update(format=3), "format 3"),
    "no manifest": (lambda r: r.update(attributes={}), "not written to its end"),
    "odd attributes": (lambda r: r.update(attributes=[1]), "not written to its end"),
}


@pytest.mark.parametrize("kind", HOSTILE_MANIFESTS)
def test_bad_manifests_are_refused(toy: str, kind: str) -> None:
    change, message = HOSTILE_MANIFESTS[kind]
    _edit(Path(toy, "zarr.json"), change)
    with pytest.raises(DataError) as caught:
        open_dataset(toy)
    assert message in str(caught.value)
    assert toy in str(caught.value)
    assert "daskcnn data prepare" in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "[1]", "[" * 100_000, "\x00"])
def test_metadata_that_are_no_json_object(toy: str, content: str) -> None:
    Path(toy, "zarr.json").write_text(content)
    with pytest.raises(DataError, match=r"zarr\.json"):
        open_dataset(toy)


def test_huge_metadata_are_not_read(toy: str) -> None:
    with open(Path(toy, "zarr.json"), "wb") as file:
        file.truncate(BOUNDS.size + 1)
    with pytest.raises(DataError, match="67,108,865 bytes of metadata, more than 67,108,864"):
        open_dataset(toy)


@pytest.mark.parametrize(
    ("field", "value"), [("foo", {}), ("foo", {"must_understand": False}), ("must_understand", True), ("", None)]
)
def test_an_array_with_a_field_of_its_own_is_refused(toy: str, field: str, value: object) -> None:
    _edit(Path(toy, "train/images/zarr.json"), lambda meta: meta.update({field: value}))
    with pytest.raises(DataError, match=f"train/images/zarr.json: '{field}': a field that plain arrays do not have"):
        open_dataset(toy)


@pytest.mark.parametrize(
    "change",
    [
        {"attributes": 3},
        {"attributes": [[1]]},
        {"dimension_names": 3},
        {"dimension_names": ["a"]},
        {"dimension_names": [[], {}, 1, 2]},
        {"fill_value": False},
        {"shape": [230.0, 32, 32, 3]},
        {"codecs": [{"name": "bytes", "configuration": {}}]},
    ],
)
def test_an_array_with_an_odd_field_is_refused_or_read(toy: str, change: dict[str, Any]) -> None:
    _edit(Path(toy, "train/images/zarr.json"), lambda meta: meta.update(change))
    with suppress(DataError):
        verify(open_dataset(toy))


@pytest.mark.parametrize(
    "url",
    [
        *("zip:///nothing.zip", "zip://{toy}", "zip://", "simplecache::{toy}", "simplecache::file://{toy}/x"),
        *("simplecache::zip://{toy}", "a::b::c://d", "://", "file://", "memory://nothing", "reference://x", "dir://x"),
        *("tar:///nothing.tar", "tar://x::file://{toy}/zarr.json", "data:://", "github://a", "cached://x"),
    ],
)
def test_urls_that_lead_to_no_store_are_refused(toy: str, url: str) -> None:
    with pytest.raises(DataError, match=r".*; .*"):
        open_dataset(url.format(toy=toy))


# --- what is no regular file ---


@pytest.mark.parametrize("key", ["zarr.json", "train/images/zarr.json", "test/labels/c/0", "train/images/c/1/0/0/0"])
@pytest.mark.parametrize("kind", ["pipe", "device", "socket"])
def test_what_is_no_regular_file_is_not_opened(toy: str, key: str, kind: str) -> None:
    special(Path(toy, key), kind)
    with pytest.raises(DataError, match=f"{key}: a {SPECIAL[kind]}, not a regular file; give a regular file"):
        verify(open_dataset(toy))


def test_what_is_not_there(tmp_path: Path, toy: str) -> None:
    with pytest.raises(
        DataError, match=r"no data set here; check the path, or make a data set with `daskcnn data prepare`"
    ):
        open_dataset(str(tmp_path / "nothing.zarr"))
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="file"):
        open_dataset(str(tmp_path / "file"))
    (tmp_path / "old.zarr").mkdir()
    (tmp_path / "old.zarr" / ".zgroup").write_text('{"zarr_format": 2}')
    with pytest.raises(DataError, match="format 2, format 3 is needed"):
        open_dataset(str(tmp_path / "old.zarr"))
    with pytest.raises(DataError, match=r"no-such-user/x: no data set here"):
        open_dataset("~no-such-user/x")
    with pytest.raises(DataError, match=r"images: a zarr array, not a data set; use it in place by data\.images"):
        open_dataset(f"{toy}/train/images")
    shutil.rmtree(Path(toy, "test"))
    with pytest.raises(DataError, match="array test/images is missing"):
        open_dataset(toy)


# --- cache ---


def test_the_cache_forgets_what_was_not_used_longest() -> None:
    cache, loads = ChunkCache(250), list[str]()

    def get(key: str) -> Images:
        def load() -> Images:
            loads.append(key)
            return np.zeros(100, np.uint8)

        return cache.get(key, load)

    for key in "abacab":
        get(key)
    assert loads == ["a", "b", "c", "b"]
    assert cache.nbytes == 200


def test_an_array_larger_than_the_cache_is_not_kept() -> None:
    cache = ChunkCache(10)
    assert cache.get("a", lambda: np.zeros(11, np.uint8)).size == 11
    assert cache.nbytes == 0


def test_what_is_spared_stays_while_others_pass_through() -> None:
    cache = ChunkCache(400, spared=200)
    for key in "ab":
        cache.get(key, lambda: np.zeros(100, np.uint8), spare=True)
    for key in "cdefgh":
        cache.get(key, lambda: np.zeros(100, np.uint8))
    for key in "abgh":
        cache.get(key, lambda: pytest.fail("dropped"))
    cache.get("x", lambda: np.zeros(100, np.uint8), spare=True)
    assert cache.nbytes == 400
    anew = np.ones(100, np.uint8)
    assert cache.get("a", lambda: anew) is anew, "the bound of what is spared holds too"


def test_a_chunk_that_is_being_read_is_waited_for() -> None:
    cache, begun, go, loads = ChunkCache(1000), threading.Event(), threading.Event(), list[int]()

    def load() -> Images:
        loads.append(1)
        begun.set()
        assert go.wait(20)
        if len(loads) == 1:
            raise DataError("damaged")
        return np.zeros(10, np.uint8)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get, "a", load)
        assert begun.wait(20)
        second = pool.submit(cache.get, "a", load)
        go.set()
        with pytest.raises(DataError, match="damaged"):
            first.result(20)
        with suppress(DataError):  # it came while the first was reading, or after it
            second.result(20)
    assert cache.get("a", load).size == 10


def test_held_chunks_cannot_be_written_to_and_are_shared_between_openings(
    toy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_dataset(toy).train.read(0, 230)
    again = open_dataset(toy).train
    monkeypatch.setattr(StoredChunks, "load", lambda *_: pytest.fail("read twice"))
    again.read(0, 230)
    block = again.source.held("images", 0)
    with pytest.raises(ValueError, match="read-only"):
        block[0] = 0


def test_threads_share_the_cache(toy: str, source: Source) -> None:
    data, start = open_dataset(toy), threading.Barrier(8)

    def read(seed: int) -> bool:
        at = np.random.default_rng(seed).integers(0, 230, 100)
        start.wait()
        return bool((data.train.gather(at)[0] == source.train[0][at]).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(8)))
    assert CACHE.nbytes == source.train[0].nbytes + source.train[1].nbytes
