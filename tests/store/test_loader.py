"""Every sample once, in an order and with an augmentation that depend on nothing but seed, presentation and sample."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskcnn.arrays import Array
from daskcnn.errors import DataError
from daskcnn.store import BatchPlan, Dataset, Split, batches, load_batch, normalise, open_dataset, sample_keys
from daskcnn.store.augmentation import NAMED, AugmentName, first_move, with_chances
from daskcnn.store.augmentation.step import Moves, ShownSamples, moved
from daskcnn.store.chunk_source import Indices
from daskcnn.store.dataset import Near
from daskcnn.store.loader import DEPTH, Batch, _normalised, batch_edges, sample_order
from daskcnn.store.manifest import Source


@pytest.fixture
def data(toy: str) -> Dataset:
    return open_dataset(toy)


def loader_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("daskcnn-loader")]


# --- order ---

cuts = st.lists(st.integers(0, 500), max_size=8, unique=True).map(sorted)
ranges = cuts.map(lambda c: tuple(zip(c[::2], c[1::2], strict=False)))


@given(ranges=ranges, window=st.integers(1, 300), presentation=st.integers(0, 3), shuffle=st.booleans())
def test_an_order_holds_each_sample_once(
    ranges: tuple[tuple[int, int], ...], window: int, presentation: int, shuffle: bool
) -> None:
    plan = BatchPlan(ranges, 8, seed=5, presentation=presentation, shuffle=shuffle)
    order = sample_order(plan, 50, window)
    expected = [i for lo, hi in ranges for i in range(lo, hi)]
    assert sorted(order.tolist()) == expected
    assert shuffle or order.tolist() == expected


@given(window=st.integers(50, 300))
def test_a_window_touches_few_chunks(window: int) -> None:
    order = sample_order(BatchPlan(((0, 1000),), 8, seed=5), 50, window)
    whole = window // 50 * 50
    for lo in range(0, 1000, whole):
        assert len(set((order[lo : lo + whole] // 50).tolist())) == len(order[lo : lo + whole]) // 50


def test_orders_differ_by_seed_and_presentation_only() -> None:
    plan = BatchPlan(((0, 200), (300, 400)), 8, seed=5)
    order = sample_order(plan, 50, 1000).tolist()
    assert order == sample_order(BatchPlan(((0, 200), (300, 400)), 64, seed=5), 50, 1000).tolist()
    assert order != sample_order(BatchPlan(((0, 200), (300, 400)), 8, seed=6), 50, 1000).tolist()
    assert order != sample_order(BatchPlan(((0, 200), (300, 400)), 8, seed=5, presentation=1), 50, 1000).tolist()


def test_limit_is_the_beginning_of_the_order() -> None:
    whole = sample_order(BatchPlan(((0, 200),), 8, seed=5), 50, 100)
    np.testing.assert_array_equal(sample_order(BatchPlan(((0, 200),), 8, seed=5, limit=33), 50, 100), whole[:33])
    assert sample_order(BatchPlan(((0, 200),), 8, seed=5, limit=0), 50, 100).size == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"augment": "rotate"}, "'rotate': use one of none, crop-mirror, or steps"),
        ({"ranges": ((5, 3),)}, r"range \(5, 3\)"),
        ({"limit": -1}, "limit=-1"),
        ({"steps": 0}, "steps=0"),
    ],
)
def test_plans_without_sense_are_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"ranges": ((0, 10),), "batch_size": 4, "seed": 0} | change
    with pytest.raises(ValueError, match=message):
        BatchPlan(**arguments)


# --- batches ---


def test_batches_hold_what_was_stored(data: Dataset, source: Source) -> None:
    plan = BatchPlan(((10, 120), (200, 230)), 32, seed=1)
    with batches(data, data.train, plan, np.float64) as stream:
        got = list(stream)
    assert [len(b.labels) for b in got] == [32, 32, 32, 32, 12]
    order = sample_order(plan, 50, 1 << 20)
    x = np.concatenate([b.x for b in got], axis=2).transpose(2, 0, 1, 3)
    pixels = source.train[0].astype(float)
    mean = pixels.mean((0, 1, 2))
    np.testing.assert_allclose(x, (pixels[order] - mean) / pixels.std((0, 1, 2)), rtol=0, atol=1e-12)
    np.testing.assert_array_equal(np.concatenate([b.labels for b in got]), source.train[1][order])
    np.testing.assert_array_equal(np.concatenate([b.keys for b in got]), sample_keys(plan, order))


@given(samples=st.integers(0, 500), batch_size=st.integers(1, 600))
def test_batches_are_of_the_size_and_the_last_one_is_the_rest(samples: int, batch_size: int) -> None:
    edges = list(batch_edges(BatchPlan((), batch_size, seed=0), samples))
    sizes = [hi - lo for lo, hi in edges]
    assert sizes == [batch_size] * (samples // batch_size) + [samples % batch_size] * bool(samples % batch_size)
    assert [lo for lo, _ in edges] == list(range(0, samples, batch_size))


@given(samples=st.integers(0, 500), steps=st.integers(1, 600), batch_size=st.integers(1, 600))
def test_so_many_steps_are_equal_within_one_sample_and_none_is_empty(samples: int, steps: int, batch_size: int) -> None:
    edges = list(batch_edges(BatchPlan((), batch_size, seed=0, steps=steps), samples))
    sizes = [hi - lo for lo, hi in edges]
    assert len(edges) == min(steps, samples)
    assert sum(sizes) == samples
    assert [lo for lo, _ in edges] == [sum(sizes[:i]) for i in range(len(sizes))]
    assert not sizes or 1 <= min(sizes) <= max(sizes) <= min(sizes) + 1


def test_so_many_steps_show_the_same_samples_in_the_same_order(data: Dataset) -> None:
    whole = BatchPlan(((10, 120), (200, 230)), 32, seed=1, limit=101)
    with batches(data, data.train, whole) as stream:
        keys = np.concatenate([b.keys for b in stream])
    with batches(data, data.train, replace(whole, steps=7)) as stream:
        got = list(stream)
    assert sorted(len(b.labels) for b in got) == [14] * 4 + [15] * 3
    np.testing.assert_array_equal(np.concatenate([b.keys for b in got]), keys)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("augment", NAMED)
def test_layout_and_type(data: Dataset, dtype: str, augment: AugmentName) -> None:
    with batches(data, data.test, BatchPlan(((0, 60),), 25, seed=1, augment=augment), dtype) as stream:
        first = next(stream)
    assert first.x.shape == (32, 32, 25, 3)
    assert first.x.dtype == dtype
    assert first.x.flags.c_contiguous
    assert (first.labels.dtype, first.keys.dtype) == (np.dtype(np.int64), np.dtype(np.uint64))


def test_small_windows_show_the_same_samples(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daskcnn.store.loader.WINDOW_BYTES", 60 * 32 * 32 * 3)
    plan = BatchPlan(((0, 230),), 32, seed=1)
    with batches(data, data.train, plan) as stream:
        keys = np.concatenate([b.keys for b in stream])
    assert set(keys.tolist()) == set(sample_keys(plan, np.arange(230)).tolist())


def test_nothing_to_show(data: Dataset) -> None:
    with batches(data, data.train, BatchPlan((), 8, seed=0)) as stream:
        assert list(stream) == []


def test_keys_are_of_seed_presentation_and_sample() -> None:
    at = np.arange(1000)
    plans = [BatchPlan((), 8, seed=s, presentation=p) for s in range(3) for p in range(3)]
    keys = np.concatenate([sample_keys(plan, at) for plan in plans])
    assert len(set(keys.tolist())) == 9000
    np.testing.assert_array_equal(sample_keys(plans[0], at[::-1]), sample_keys(plans[0], at)[::-1])


def test_reading_goes_ahead_by_two_and_no_more(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, third = list[int](), threading.Event()

    def load(
        dataset: Dataset, split: Split, plan: BatchPlan, dtype: npt.DTypeLike, indices: Indices, near: Near
    ) -> Batch:
        loaded.append(len(loaded))
        if len(loaded) == 1 + DEPTH:
            third.set()
        return load_batch(dataset, split, plan, dtype, indices, near)

    monkeypatch.setattr("daskcnn.store.loader.load_batch", load)
    with batches(data, data.train, BatchPlan(((0, 230),), 10, seed=0)) as stream:
        next(stream)
        assert third.wait(10)
    assert len(loaded) == 1 + DEPTH


def test_leaving_early_stops_the_thread(data: Dataset) -> None:
    with batches(data, data.train, BatchPlan(((0, 230),), 10, seed=0)) as stream:
        next(stream)
        assert loader_threads()
    assert not loader_threads()


def test_an_error_in_the_loop_stops_the_thread(data: Dataset) -> None:
    def train() -> None:
        with batches(data, data.train, BatchPlan(((0, 230),), 10, seed=0)) as stream:
            next(stream)
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        train()
    assert not loader_threads()


def test_a_damaged_chunk_reaches_the_consumer(data: Dataset, toy: str) -> None:
    Path(toy, "train/images/c/2/0/0/0").write_bytes(b"")
    plan = BatchPlan(((0, 230),), 50, seed=0, shuffle=False)
    with batches(data, data.train, plan) as stream:
        assert len(next(stream).labels) == len(next(stream).labels) == 50
        with pytest.raises(DataError, match="chunk 2 "):
            next(stream)
    assert not loader_threads()


def test_normalise(data: Dataset) -> None:
    images = np.zeros((2, 32, 32, 3), np.uint8)
    images[1, 4, 5] = (10, 20, 30)
    x = normalise(data, images, np.float64)
    np.testing.assert_allclose(x[4, 5, 1], (np.array([10, 20, 30]) - data.mean) / data.deviation)


# --- augmentation ---

PAD = 4


def _move(name: AugmentName, keys: npt.NDArray[np.uint64], shape: tuple[int, int]) -> Moves:
    """The move of samples with these keys."""
    move, rest = first_move(with_chances(NAMED[name], ShownSamples(keys, np.arange(len(keys)), 0, 0)), shape)
    assert not rest
    return move


def _padded(x: Array) -> Array:
    """An image with what a crop may reach beyond it."""
    return np.pad(x, ((PAD, PAD), (PAD, PAD), (0, 0)))


@pytest.mark.parametrize("shape", [(32, 32, 3), (28, 28, 1), (5, 7, 2)])
def test_every_image_is_a_shift_and_perhaps_a_mirror_image(shape: tuple[int, int, int]) -> None:
    h, w, c = shape
    rng = np.random.default_rng(0)
    x, keys = rng.normal(size=(h, w, 300, c)), rng.integers(0, 1 << 63, 300).astype(np.uint64)
    y = moved(x, _move("crop-mirror", keys, (h, w)))
    seen = []
    for n in range(300):
        crops = np.lib.stride_tricks.sliding_window_view(_padded(x[:, :, n]), (h, w), axis=(0, 1))
        for flipped, image in ((False, y[:, :, n]), (True, y[:, ::-1, n])):
            same = (crops == image.transpose(2, 0, 1)).all(axis=(2, 3, 4))
            seen += [(row, column, flipped) for row, column in np.argwhere(same).tolist()]
    assert len(seen) >= 300
    rows, columns, mirrored = (set(values) for values in zip(*seen, strict=True))
    assert rows == columns == set(range(9))
    assert mirrored == {False, True}
    assert 110 < sum(m for _, _, m in seen) < 190


def test_augmentation_is_of_the_sample_not_of_its_batch(data: Dataset) -> None:
    plan = BatchPlan(((0, 230),), 16, seed=3, augment="crop-mirror")
    alone = load_batch(data, data.train, plan, "float32", np.array([77]))
    among = load_batch(data, data.train, plan, "float32", np.array([3, 200, 77, 5]))
    np.testing.assert_array_equal(alone.x[:, :, 0], among.x[:, :, 2])
    later = BatchPlan(((0, 230),), 16, seed=3, presentation=1, augment="crop-mirror")
    shown = load_batch(data, data.train, later, "float32", np.arange(20)).x
    assert (shown != load_batch(data, data.train, plan, "float32", np.arange(20)).x).any()


def test_augmentation_leaves_its_input(data: Dataset) -> None:
    x = np.ones((8, 8, 2, 1), np.float32)
    moved(x, _move("crop-mirror", np.arange(2, dtype=np.uint64), (8, 8)))
    assert (x == 1).all()


@pytest.mark.parametrize("augment", NAMED)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bytes_in_one_pass_are_what_array_expressions_make_of_them(data: Dataset, augment: Any, dtype: str) -> None:
    plan, indices = BatchPlan(((0, 230),), 16, seed=3, augment=augment), np.arange(5, 200, 3)
    images, keys = data.train.gather(indices)[0], sample_keys(plan, indices)
    expected = moved(_normalised(data, images, dtype), _move(augment, keys, images.shape[1:3]))
    np.testing.assert_array_equal(load_batch(data, data.train, plan, dtype, indices).x, expected)
