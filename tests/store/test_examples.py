"""Samples of each class to look at: which, how small, and in which colours."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daskcnn.datasets.show_data import as_pictures, find_examples, small_images
from daskcnn.errors import DataError
from daskcnn.store import Dataset, open_dataset
from daskcnn.store.chunk_source import StoredChunks
from daskcnn.store.making.writer import write
from daskcnn.store.manifest import Source, describe


def stored(folder: Path, images: Any, labels: Any, classes: int = 3, nodata: float | None = None) -> Dataset:
    """The same samples as training and as test part, in chunks of 10."""
    part = np.asarray(images), np.asarray(labels, np.uint8)
    source = Source("toy", tuple(f"class {c}" for c in range(classes)), part, part, {})
    path = str(folder / "toy.zarr")
    write(source, describe(source, chunk=10, order="stored", seed=0, nodata=nodata), path, lambda _: None)
    return open_dataset(path)


def random(shape: tuple[int, ...], dtype: str = "uint8") -> Any:
    return np.random.default_rng(0).integers(0, 255, shape).astype(dtype)


def test_the_first_samples_of_each_class_of_a_store_sorted_by_class(tmp_path: Path) -> None:
    """A class that has fewer gives all that it has, and one that has none gives none."""
    dataset = stored(tmp_path, random((45, 4, 4, 3)), [0] * 30 + [2] * 13 + [3] * 2, classes=4)
    found = find_examples(dataset.train, 4, 5)
    assert found == {0: [0, 1, 2, 3, 4], 1: [], 2: [30, 31, 32, 33, 34], 3: [43, 44]}
    assert find_examples(dataset.train, 1, 2) == {0: [0, 1]}


def test_no_more_labels_are_read_than_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = stored(tmp_path, random((60, 4, 4, 3)), np.arange(60) % 3)
    read: list[int] = []
    load = StoredChunks.load

    def noted(self: StoredChunks, array: str, index: int) -> Any:
        read.append(index)
        return load(self, array, index)

    monkeypatch.setattr(StoredChunks, "load", noted)
    find_examples(dataset.train, 3, 4)
    assert read == [0, 1]


def test_a_sample_of_several_labels_is_an_example_of_each(tmp_path: Path) -> None:
    labels = np.zeros((12, 3), np.uint8)
    labels[[1, 11], 0] = labels[1, 2] = 1
    dataset = stored(tmp_path, random((12, 4, 4, 3)), labels)
    assert dataset.labels == "several"
    assert find_examples(dataset.train, 3, 5) == {0: [1, 11], 1: [], 2: [1]}


@pytest.mark.parametrize(
    ("shape", "small"),
    [((5, 4, 3), (5, 4, 3)), ((50, 20, 4), (8, 3, 3)), ((17, 9, 2), (6, 3, 1)), ((8, 8, 1), (8, 8, 1))],
)
def test_images_become_small(tmp_path: Path, shape: tuple[int, int, int], small: tuple[int, int, int]) -> None:
    images = random((12, *shape))
    dataset = stored(tmp_path, images, np.arange(12) % 3)
    found = small_images(dataset.train, {11, 2}, 8)
    assert set(found) == {2, 11}
    step = -(-max(shape[:2]) // 8)
    for index, image in found.items():
        assert image.shape == small
        np.testing.assert_array_equal(image, images[index, ::step, ::step, : small[2]])


@pytest.mark.slow
def test_memory_is_that_of_a_chunk(tmp_path: Path) -> None:
    """Samples of every chunk are asked for, of 40 MB in all."""
    dataset = stored(tmp_path, random((200, 256, 256, 3)), np.arange(200) % 3)
    tracemalloc.start()
    small_images(dataset.train, set(range(0, 200, 10)), 32)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2.5 * 10 * 256 * 256 * 3


def test_a_damaged_chunk_is_named(tmp_path: Path) -> None:
    dataset = stored(tmp_path, random((25, 4, 4, 3)), np.arange(25) % 3)
    (tmp_path / "toy.zarr" / "train" / "images" / "c" / "2" / "0" / "0" / "0").unlink()
    small_images(dataset.train, {3}, 8)
    with pytest.raises(DataError, match=r"chunk 2 .* is missing"):
        small_images(dataset.train, {3, 22}, 8)


# --- colours ---


def test_bytes_are_shown_as_they_are() -> None:
    image = random((6, 5, 3))
    np.testing.assert_array_equal(as_pictures({4: image}, None)[4], image)
    grey = random((6, 5, 1))
    np.testing.assert_array_equal(as_pictures({0: grey}, None)[0], np.repeat(grey, 3, axis=2))


@pytest.mark.parametrize("dtype", ["uint16", "int16", "float16", "float32", "float64"])
def test_other_numbers_are_stretched_over_all_images_channel_by_channel(dtype: str) -> None:
    ramp = np.linspace(-200 if dtype != "uint16" else 100, 900, 200)
    images = {
        i: np.stack([half, half * 2], axis=-1).reshape(10, 10, 2) for i, half in enumerate((ramp[:100], ramp[100:]))
    }
    both = {i: np.concatenate([image, image[..., :1]], axis=-1).astype(dtype) for i, image in images.items()}
    found = as_pictures(both, None)
    assert all(picture.dtype == np.uint8 for picture in found.values())
    assert (found[0][..., 0].min(), found[1][..., 0].max()) == (0, 255)
    assert 110 < found[0][..., 0].max() <= found[1][..., 0].min() < 145
    np.testing.assert_allclose(found[0][..., 0].astype(int), found[0][..., 1], atol=1)


def test_pixels_without_data_are_magenta_and_do_not_count() -> None:
    image = np.linspace(0, 1, 300, dtype=np.float32).reshape(10, 10, 3)
    image[0, 0, 1], image[5, 5, 2] = np.nan, -9999
    picture = as_pictures({0: image}, -9999)[0]
    assert picture[0, 0].tolist() == picture[5, 5].tolist() == [255, 0, 255]
    assert picture[9, 9].min() > 240
    assert as_pictures({0: image[:1]}, None)[0].shape == (1, 10, 3), "NaN in a store that names no value for it"


@pytest.mark.parametrize("value", [0.0, 3.5, np.nan])
def test_a_plain_image_is_black(value: float) -> None:
    assert not as_pictures({0: np.full((4, 4, 1), value, np.float32)}, None)[0].any()
    assert as_pictures({}, None) == {}
