"""Arrays that cannot be used in place are refused before training, by their path, with reason and remedy."""

from __future__ import annotations

import asyncio
import gzip
import json
import resource
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numcodecs  # type: ignore[import-untyped] # it has no types
import numpy as np
import pytest
import zarr
from zarr.abc.store import RangeByteRequest
from zarr.codecs import ZstdCodec
from zarr.core.buffer import default_buffer_prototype

from daskcnn.documents import BOUNDS
from daskcnn.errors import DataError
from daskcnn.store.foreign.array import array_at, open_images, read_labels
from daskcnn.store.foreign.in_place import Arrays, outline
from daskcnn.store.foreign.sized_store import unpacked_size
from tests.store.arrays_in_place import opened, tiles, write_array


def refused(path: str) -> str:
    with pytest.raises(DataError) as caught:
        open_images(path, "NHWC")
    assert str(caught.value).startswith(path)
    return str(caught.value)


# --- labels and images that do not belong together ---


def test_labels_and_images_of_different_length(tmp_path: Path) -> None:
    arrays = replace(tiles(tmp_path), labels=write_array(tmp_path / "short", np.arange(299) % 5, 100))
    with pytest.raises(DataError, match=r"x: 300 images, and 299 labels in .*short; give one label for each image"):
        outline(arrays)


def test_one_class_only(tmp_path: Path) -> None:
    arrays = replace(tiles(tmp_path), labels=write_array(tmp_path / "same", np.full(300, 4), 100))
    with pytest.raises(DataError, match="same: train: every sample is of one class"):
        outline(arrays)


def test_rows_of_something_else_than_0_and_1(tmp_path: Path) -> None:
    rows = np.zeros((300, 3), "int64")
    rows[9, 2] = 2
    arrays = replace(tiles(tmp_path), labels=write_array(tmp_path / "rows", rows, 100))
    with pytest.raises(DataError, match=r"rows: sample 9, column 2 has 2; several labels a sample are rows of 0 and 1"):
        outline(arrays)


def test_labels_of_real_numbers_and_of_too_many_axes(tmp_path: Path) -> None:
    real = np.arange(300) % 5 * 1.0
    given = tiles(tmp_path)
    whole = replace(given, labels=write_array(tmp_path / "whole", real, 100))
    assert outline(whole).labels.classes == ("0", "1", "2", "3", "4"), "whole numbers, as daskcnn.prepare takes them"
    apart: dict[str, Any] = {"test": None, "test_images": given.images, "test_labels": whole.labels}
    assert outline(replace(whole, **apart)).test_labels.classes == ("0", "1", "2", "3", "4")
    real[8] = np.nan
    with pytest.raises(DataError, match=r"real: sample 8 has nan, which is no whole number; give one integer or str"):
        outline(replace(given, labels=write_array(tmp_path / "real", real, 100)))
    with pytest.raises(DataError, match=r"cube: shape \(2, 2, 2\) is not that of labels"):
        read_labels(write_array(tmp_path / "cube", np.zeros((2, 2, 2), "uint8"), 2))
    with pytest.raises(DataError, match=r"long: a label of 201 letters"):
        read_labels(write_array(tmp_path / "long", np.array(["a", "b" * 201]), 2))


def test_every_class_has_one_sample(tmp_path: Path) -> None:
    images = write_array(tmp_path / "x", np.zeros((4, 2, 2, 1), "uint8"), 2)
    labels = write_array(tmp_path / "y", np.arange(4), 4)
    with pytest.raises(DataError, match=r"0\.2 of 4 samples leaves none for testing; every class needs two"):
        outline(Arrays(images, labels))


def test_images_that_are_all_the_same(tmp_path: Path) -> None:
    arrays = replace(tiles(tmp_path), images=write_array(tmp_path / "x", np.full((300, 4, 4, 1), 9, "uint8"), 50))
    with pytest.raises(DataError, match="every training image is the same plain colour"):
        opened(arrays)


# --- arrays ---


def test_chunks_that_cut_images(tmp_path: Path) -> None:
    path = write_array(tmp_path / "cut", np.zeros((10, 8, 8, 3), "uint8"), (10, 4, 8, 3))
    told = refused(path)
    assert "its chunks (10, 4, 8, 3) cut images of shape (8, 8, 3)" in told
    assert "daskcnn.prepare" in told


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64"])
def test_number_types_that_are_none_of_ours(tmp_path: Path, dtype: str) -> None:
    told = refused(write_array(tmp_path / "x", np.zeros((4, 2, 2, 1), dtype), 2))
    assert f"images of type {dtype}; convert them to one of uint8, uint16" in told


@pytest.mark.parametrize(("dtype", "kept"), [("bool", "uint8"), ("int8", "int16")])
def test_number_types_that_are_widened(tmp_path: Path, dtype: str, kept: str) -> None:
    x = np.random.default_rng(0).integers(0, 2, (6, 4, 4)).astype(dtype)
    found = open_images(write_array(tmp_path / "x", x, 3), "NHWC")
    images = found.as_images(found.read(1))
    assert (found.dtype.name, images.dtype.name) == (kept, kept)
    np.testing.assert_array_equal(images, x[3:, ..., None])


def test_shapes_that_are_no_images(tmp_path: Path) -> None:
    assert "shape (4, 2) is not that of images" in refused(write_array(tmp_path / "x", np.zeros((4, 2), "uint8"), 2))
    told = refused(write_array(tmp_path / "y", np.zeros((4, 2, 2, 3, 1), "uint8"), 2))
    assert "an array of 5 axes, (4, 2, 2, 3, 1); give images (N, H, W, C) or (N, H, W)" in told


class Bomb:
    """Says that it was unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return pytest.fail, ("it was unpickled",)


@pytest.mark.parametrize("codec", ["pickle", "json2", "msgpack2", "vlen-array"])
def test_codecs_of_objects_are_refused_and_nothing_is_unpickled(tmp_path: Path, codec: str) -> None:
    folder = tmp_path / "objects"
    folder.mkdir()
    about = {"zarr_format": 2, "shape": [4], "chunks": [4], "dtype": "|O", "fill_value": None, "order": "C"}
    (folder / ".zarray").write_text(json.dumps(about | {"filters": [{"id": codec}], "compressor": None}))
    (folder / "0").write_bytes(__import__("pickle").dumps([Bomb()] * 4))
    for use in (lambda path: open_images(path, "NHWC"), read_labels):
        with pytest.raises(DataError, match=rf"objects: its codec '{codec}' is none of those that are read"):
            use(str(folder))


def test_python_objects_without_a_codec(tmp_path: Path) -> None:
    about = {"zarr_format": 2, "shape": [4], "chunks": [4], "dtype": "|O", "filters": None, "compressor": None}
    (tmp_path / ".zarray").write_text(json.dumps(about))
    assert "holds Python objects, and not numbers or text" in refused(str(tmp_path))


def test_numbers_of_many_fields(tmp_path: Path) -> None:
    about = {"zarr_format": 2, "shape": [4], "chunks": [4], "dtype": [["a", "<i4"]], "filters": None}
    (tmp_path / ".zarray").write_text(json.dumps(about))
    assert "neither numbers nor text" in refused(str(tmp_path))


def changed(path: Path, **fields: Any) -> None:
    file = path / "zarr.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def grid(*shape: object) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": list(shape)}}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"shape": [1 << 60, 8, 6, 3]}, "shape = "),
        ({"shape": [-1, 8, 6, 3]}, "shape = "),
        ({"shape": "many"}, "shape = 'many'"),
        ({"shape": [1] * 9}, "shape = "),
        ({"shape": [300, 8, 6, True]}, "shape = "),
        ({"chunk_grid": grid(20, 8, 6)}, "with chunks"),
        ({"chunk_grid": grid(0, 8, 6, 3)}, "chunks = "),
        ({"chunk_grid": grid(1 << 30, 8, 6, 3)}, "are larger than"),
        ({"chunk_grid": {"name": "rectilinear"}}, "only regular grids"),
        ({"chunk_grid": 5}, "only regular grids"),
        ({"codecs": 3}, "codecs = 3"),
        ({"codecs": [{"name": "bytes"}] * 99}, "codecs = "),
        ({"codecs": [5]}, "codecs holds 5"),
        ({"codecs": [{"name": "numcodecs.pickle"}]}, "its codec 'numcodecs.pickle'"),
        ({"codecs": [{"name": "sharding_indexed", "configuration": {"chunk_shape": [7, 8, 6, 3]}}]}, "codecs = None"),
        ({"data_type": "complex64"}, "complex64"),
        ({"data_type": 5}, "type 5"),
        ({"data_type": "x"}, "type 'x'"),
        ({"storage_transformers": [{"name": "x"}]}, "storage transformers"),
        ({"surprise": {"must_understand": True}}, "surprise"),
        ({"zarr_format": 4}, "cannot be read"),
        ({"fill_value": "red"}, "cannot be read"),
    ],
)
def test_hostile_metadata_are_refused_before_zarr_acts_on_them(
    tmp_path: Path, fields: dict[str, Any], told: str
) -> None:
    arrays = tiles(tmp_path)
    changed(Path(arrays.images), **fields)
    assert told in refused(arrays.images)


def test_metadata_of_sixty_megabytes(tmp_path: Path) -> None:
    arrays = tiles(tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for content in (b'{"a": "' + b"x" * BOUNDS.size + b'"}', b"[" + b"[]," * (20 << 20) + b"1]"):
        Path(arrays.images, "zarr.json").write_bytes(content)
        refused(arrays.images)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 << 10


def test_a_huge_array_of_nothing_takes_no_memory(tmp_path: Path) -> None:
    arrays = tiles(tmp_path)
    changed(Path(arrays.labels), shape=[1 << 39], chunk_grid=grid(64))
    with pytest.raises(DataError, match=r"y: labels of [\d,]+ bytes, more than the"):
        outline(arrays)


# --- chunks ---


@pytest.mark.parametrize(("codec", "pack"), [("gzip", gzip.compress), ("zlib", zlib.compress)])
def test_what_would_unpack_to_more_than_its_array_says(codec: str, pack: Callable[[bytes], bytes]) -> None:
    def size(content: bytes, limit: int) -> int:
        return unpacked_size(memoryview(content), codec, limit)

    assert size(pack(bytes(50 << 20)), 1 << 20) > 1 << 20
    assert size(pack(bytes(50 << 20)), 1 << 20) < 3 << 20, "no more is unpacked than it takes to see"
    assert size(pack(bytes(1 << 20)), 2 << 20) <= 1 << 20
    assert size(pack(bytes(9)) + bytes(7) + pack(bytes(50 << 20)), 1 << 20) > 1 << 20, "in a stream behind another"
    assert size(pack(b"") * 5000, 1 << 20) > 1 << 20, "very many streams"


def zstd_without_size(content: int) -> bytes:
    """A zstd frame of zeros that does not say how many, in blocks of one repeated byte (RFC 8878)."""
    blocks = [((1 << 17) << 3 | 1 << 1).to_bytes(3, "little") + b"\0"] * (content >> 17)
    last = (1 << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"\0"
    return b"\x28\xb5\x2f\xfd" + bytes([0, 0x58]) + b"".join(blocks) + last


def lz4_of_zeros(content: int) -> bytes:
    """What numcodecs packs by lz4 begins with the size."""
    return bytes(numcodecs.LZ4().encode(bytes(content)))


BOMBS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "zstd": ("zstd", lambda: zstd_without_size(300 << 20)),
    "zstd behind a skipped frame": (
        "zstd",
        lambda: bytes.fromhex("502a4d1804000000") + b"skip" + zstd_without_size(300 << 20),
    ),
    "zstd behind a small frame": (
        "zstd",
        lambda: bytes(numcodecs.Zstd().encode(bytes(9))) + zstd_without_size(300 << 20),
    ),
    "lz4": ("lz4", lambda: lz4_of_zeros(300 << 20)),
    "blosc": ("blosc", lambda: bytes(numcodecs.Blosc("zstd").encode(bytes(300 << 20))) + b"behind"),
    "gzip": ("gzip", lambda: gzip.compress(bytes(9)) + gzip.compress(bytes(300 << 20))),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_that_do_not_look_like_one(tmp_path: Path, name: str) -> None:
    codec, pack = BOMBS[name]
    about = {"zarr_format": 2, "shape": [4, 8, 8, 1], "chunks": [4, 8, 8, 1], "dtype": "|u1", "fill_value": 0}
    compressor = {"id": codec, "level": 1, "cname": "zstd", "clevel": 5, "shuffle": 1, "acceleration": 1}
    wanted = {key: compressor[key] for key in numcodecs.get_codec({"id": codec}).get_config() if key in compressor}
    (tmp_path / ".zarray").write_text(json.dumps(about | {"order": "C", "filters": None, "compressor": wanted}))
    (tmp_path / "0.0.0.0").write_bytes(pack())
    with pytest.raises(DataError, match="a chunk of more bytes than its array says"):  # before it is unpacked
        open_images(str(tmp_path), "NHWC").read(0)


@pytest.mark.parametrize("content", [b"", bytes(1 << 20), np.random.default_rng(0).bytes(700_000)])
def test_frames_of_zstd_are_as_large_as_what_they_hold(content: bytes) -> None:
    packed = bytes(numcodecs.Zstd(level=3, checksum=True).encode(content)) if content else zstd_without_size(0)
    assert unpacked_size(memoryview(packed), "zstd", 1 << 30) == max(len(packed), len(content) or 1)
    assert unpacked_size(memoryview(packed[: len(packed) // 2]), "zstd", 1 << 30) >= 0, "a truncated one"


@pytest.mark.parametrize("first", ["start", "end"])
def test_a_bomb_among_the_chunks_of_a_shard(tmp_path: Path, first: Literal["start", "end"]) -> None:
    x = np.random.default_rng(0).integers(0, 9, (8, 8, 8, 1)).astype("uint8")
    zstd = ZstdCodec(level=1)
    shards: Any = {"shape": (8, 8, 8, 1), "index_location": first}
    path = write_array(tmp_path / "x", x, 2, shards=shards, compressors=zstd)
    array = open_images(path, "NHWC")
    np.testing.assert_array_equal(array.stored[0:8], x)
    np.testing.assert_array_equal(array.read(1), x[2:4])
    file = Path(path, "c/0/0/0/0")
    stored, bomb, index = file.read_bytes(), zstd_without_size(300 << 20), 4 * 16
    begin = 0 if first == "start" else len(stored) - index - 4
    entries = np.frombuffer(stored[begin : begin + index], "<u8").reshape(4, 2).copy()
    at = len(stored) if first == "start" else begin
    entries[1] = at, len(bomb)
    packed = bytes(numcodecs.CRC32C(location="end").encode(entries.tobytes()))
    file.write_bytes(packed + stored[index + 4 :] + bomb if first == "start" else stored[:begin] + bomb + packed)
    ranges = [RangeByteRequest(*place) for place in ((0, 4), (at, at + len(bomb)))]
    for read in (
        lambda: array.read(1),
        lambda: array.stored[0:8],
        lambda: asyncio.run(values(array.stored.store, "c/0/0/0/0", ranges)),
    ):
        with pytest.raises(DataError, match="a chunk of more bytes than its array says"):
            read()
    assert asyncio.run(values(array.stored.store, "c/0/0/0/0", ranges[:1])) == [(0, file.read_bytes()[:4])]
    with pytest.raises(FileNotFoundError):
        asyncio.run(values(array.stored.store, "c/9", ranges))


async def values(store: Any, key: str, ranges: list[RangeByteRequest]) -> list[tuple[int, bytes]]:
    """What zarr 3.4 reads the chunks of a shard by."""
    assert not store._supports_sync_io, "which reads past `get`"
    groups = store.get_ranges(key, ranges, prototype=default_buffer_prototype(), max_concurrency=1)
    return [(i, part.to_bytes()) async for group in groups for i, part in group]


@pytest.mark.parametrize(
    ("codecs", "told"),
    [
        ([{"name": "bytes"}, {"name": "zstd"}, {"name": "gzip"}], "its codec zstd is followed by gzip"),
        ([{"name": "bytes"}, {"name": "zstd"}, {"name": "numcodecs.crc32"}], "is followed by numcodecs.crc32"),
    ],
)
def test_chunks_that_hide_what_they_unpack_to(tmp_path: Path, codecs: list[dict[str, str]], told: str) -> None:
    arrays = tiles(tmp_path)
    changed(Path(arrays.images), codecs=codecs)
    assert told in refused(arrays.images)


@pytest.mark.parametrize("codec", ["lz4", "zlib", "zstd", "blosc", "gzip"])
@pytest.mark.parametrize("checksum", [False, True])
def test_old_arrays_of_every_compressor_are_read(tmp_path: Path, codec: str, checksum: bool) -> None:
    x = np.random.default_rng(0).integers(0, 9, (40, 8, 8, 1)).astype("uint16")
    filters = [numcodecs.Shuffle(2), *([numcodecs.CRC32()] if checksum else [])]
    packing: Any = {"zarr_format": 2, "filters": filters, "compressors": numcodecs.get_codec({"id": codec})}
    np.testing.assert_array_equal(open_images(write_array(tmp_path / "x", x, 10, **packing), "NHWC").read(1), x[10:20])


@pytest.mark.parametrize("codec", ["zstd", "blosc", "gzip"])
def test_a_chunk_that_unpacks_to_more_is_refused_by_its_samples(tmp_path: Path, codec: str) -> None:
    configuration = {"zstd": {"level": 1, "checksum": False}, "gzip": {"level": 1}, "blosc": {"cname": "lz4"}}[codec]
    compressor: Any = [{"name": codec, "configuration": configuration}]
    x = np.random.default_rng(0).integers(0, 9, (40, 8, 8, 1)).astype("uint8")
    path = write_array(tmp_path / "x", x, 10, compressors=compressor)
    bomb = write_array(tmp_path / "bomb", np.full((1, 100 << 20), 7, "uint8"), 1, compressors=compressor)
    array = open_images(path, "NHWC")
    np.testing.assert_array_equal(array.read(1), x[10:20])
    Path(path, "c/1/0/0/0").write_bytes(Path(bomb, "c/0/0").read_bytes())
    with pytest.raises(DataError, match=r"x/c/1/0/0/0: a chunk of more bytes than its array says"):
        array.read(1)


def test_a_file_larger_than_any_chunk(tmp_path: Path) -> None:
    arrays = tiles(tmp_path, compressors=None)
    Path(arrays.images, "c/0/0/0/0").write_bytes(bytes(20 * 8 * 6 * 3 * 2 + (2 << 20)))
    with pytest.raises(DataError, match="a chunk of more bytes than its array says"):
        open_images(arrays.images, "NHWC").read(0)


# --- places ---


def test_a_group_is_told_which_arrays_are_in_it(tmp_path: Path) -> None:
    arrays = tiles(tmp_path)
    group = str(tmp_path / "tiles.zarr")
    zarr.open_group(group, mode="a")
    assert "a zarr group, not an array (arrays in it: x, y); give the path of one of its arrays" in refused(group)
    with pytest.raises(DataError, match="arrays in it: x, y"):
        array_at(group)
    assert array_at(arrays.images) is not None


def test_old_groups_are_told_too(tmp_path: Path) -> None:
    group = zarr.open_group(str(tmp_path / "old.zarr"), mode="w", zarr_format=2)
    group.create_array("pixels", shape=(4, 2, 2, 1), chunks=(2, 2, 2, 1), dtype="uint8")
    assert "arrays in it: pixels" in refused(str(tmp_path / "old.zarr"))


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("nowhere.zarr/x", "no zarr array here; give the path or URL of an array"),
        ("memory://in-place-tests/nothing", "no zarr array here"),
        ("zip://x::nowhere.zip", "No such file"),
        ("zip://nowhere.zip", ""),
        ("simplecache::memory://in-place-tests/none", ""),
        ("nosuch://bucket/x", "give a local path or the URL"),
        ("gcs://bucket/x", "gcsfs"),
    ],
)
def test_places_that_lead_nowhere(path: str, told: str) -> None:
    assert told in refused(path)


def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    path = tiles(tmp_path).images
    monkeypatch.setattr("daskcnn.store.files.open_regular", denied)
    assert "cannot be read ([Errno 13] Permission denied); check the path and its permissions" in refused(path)
