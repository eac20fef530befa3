"""Compiled gathering and augmenting of images that lie anywhere, against NumPy's expressions."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest

from daskcnn.compiled import minibatch
from daskcnn.compiled.given import addresses
from daskcnn.store.augmentation.step import Moves, moved

ZEROS = [(shape, "zeros") for shape in ((8, 8, 3), (7, 5, 1), (5, 9, 2), (1, 1, 4))]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("shape", "border"), [*(((*hw, c), "reflect") for hw in ((8, 8), (7, 5), (5, 9)) for c in (1, 2, 3)), *ZEROS]
)
def test_images_of_several_arrays_are_normalised_shifted_and_mirrored(
    rng: np.random.Generator, shape: tuple[int, int, int], border: Literal["zeros", "reflect"], dtype: str
) -> None:
    H, W, C = shape
    images = [rng.integers(0, 256, shape, np.uint8) for _ in range(20)]
    before = [image.copy() for image in images]
    mean, factor = rng.random((2, C)).astype(dtype)
    ways = rng.choice([1, -1], len(images))
    shifts = rng.integers(-4, 5, (2, len(images)))
    places = np.stack([shifts[0], shifts[1] + np.where(ways < 0, W - 1, 0), ways], axis=1)
    x, rows = np.empty((H, W, len(images), C), dtype), np.empty((len(images), minibatch.ROWS, W * C), dtype)
    loop = minibatch.normalise if border == "zeros" else minibatch.normalise_reflected
    loop(addresses(images), np.tile(mean, W), np.tile(factor, W), places, rows, x)
    given = np.stack(images, axis=2).astype(dtype)
    np.testing.assert_array_equal(
        x, moved((given - mean) * factor, Moves(places[:, 0], places[:, 1], places[:, 2], 4, border))
    )
    np.testing.assert_array_equal(images, before)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float64"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 5, 3)])
def test_samples_are_copied_from_where_they_lie(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> None:
    chunks = [rng.integers(0, 100, (4, *shape)).astype(dtype) for _ in range(3)]
    chosen: list[Any] = [(2, 3), (0, 0), (1, 2), (2, 3)]
    samples = np.empty((len(chosen), *shape), dtype)
    found = addresses([chunks[chunk][place : place + 1] for chunk, place in chosen])
    minibatch.gather(found, samples.reshape(len(chosen), int(np.prod(shape))).view(np.uint8))
    np.testing.assert_array_equal(samples, [chunks[chunk][place] for chunk, place in chosen])
