"""The steps of augmentation: each sample looks the same in any minibatch, and as plain code makes it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance

from daskcnn.errors import JobError
from daskcnn.job.resolve import resolve
from daskcnn.store import BatchPlan, Dataset, Scattered, batches, load_batch, open_dataset, sample_keys
from daskcnn.store.augmentation import (
    NAMED,
    STEPS,
    Augment,
    described,
    image_problems,
    read_augment,
    steps_of,
    with_chances,
)
from daskcnn.store.augmentation.step import Chance, MovingStep, Pictures, ShownSamples, Step
from daskcnn.store.augmentation.steps import Crop, Cutout, Jitter, Mirror, Mixup, ResizedCrop, Translate
from daskcnn.store.loader import _augmented
from daskcnn.store.manifest import Source

EXAMPLES: dict[str, list[Step]] = {
    "crop": [Crop(), Crop(pixels=1)],
    "translate": [Translate(), Translate(pixels=3, border="zeros")],
    "mirror": [Mirror(), Mirror(alternate=True)],
    "cutout": [Cutout(size=3), Cutout(size=1)],
    "jitter": [Jitter(brightness=0.4), Jitter(brightness=0.2, contrast=0.5)],
    "resized-crop": [ResizedCrop(), ResizedCrop(scale=(0.5, 0.5), ratio=(2.0, 2.0))],
    "mixup": [Mixup(), Mixup(alpha=1.0)],
}
LISTED = [step for steps in EXAMPLES.values() for step in steps]
BY_SAMPLE = [step for step in LISTED if not isinstance(step, Mixup)]
SHAPES = [(8, 8, 3), (7, 9, 1), (6, 11, 12)]


def facts_of(images: np.ndarray) -> Any:
    """What the steps ask of a data set that has these images."""
    mean, deviation = images.mean((0, 1, 2), dtype=float), images.std((0, 1, 2), dtype=float)
    return SimpleNamespace(shape=images.shape[1:], dtype=images.dtype, mean=mean, deviation=deviation, nodata=None)


def random_images(shape: tuple[int, int, int], dtype: str = "uint8", count: int = 12) -> np.ndarray:
    rng = np.random.default_rng(3)
    values = rng.random((count, *shape)) * 255
    return values.astype(dtype) if dtype != "uint16" else (values * 257).astype(dtype)


def samples_of(indices: np.ndarray, *, presentation: int = 0, seed: int = 5) -> ShownSamples:
    return ShownSamples(sample_keys(BatchPlan((), 8, seed, presentation), indices), indices, seed, presentation)


def chance(step: Step, count: int) -> Chance:
    """Of a single step, for the first samples."""
    ((_, found),) = with_chances([step], samples_of(np.arange(count)))
    return found


def seen(
    images: np.ndarray, augment: Augment, of: Any = None, *, dtype: str = "float64", facts: Any = None, **how: int
) -> Pictures:
    """The images of these numbers among all, after the steps."""
    indices = np.arange(len(images)) if of is None else np.asarray(of)
    facts = facts or facts_of(images)
    return _augmented(facts, Scattered.of(images[indices]), dtype, augment, samples_of(indices, **how))


def plain(images: np.ndarray, facts: Any = None) -> np.ndarray:
    facts = facts or facts_of(images)
    return ((images - facts.mean) * (1 / facts.deviation)).transpose(1, 2, 0, 3)


# --- laws of every step ---


def test_there_are_examples_of_every_step() -> None:
    assert {name: {type(step) for step in steps} for name, steps in EXAMPLES.items()} == {
        n: {s} for n, s in STEPS.items()
    }


@pytest.mark.parametrize("step", BY_SAMPLE, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("shape", "stored"), [(SHAPES[0], "uint8"), (SHAPES[1], "uint16"), (SHAPES[2], "float32")])
def test_a_sample_looks_the_same_in_any_minibatch(
    step: Step, dtype: str, shape: tuple[int, int, int], stored: str
) -> None:
    images, steps = random_images(shape, stored), (step,)
    facts = facts_of(images)
    whole = seen(images, steps, dtype=dtype).x
    for some in ([4], [11, 4, 7], [5, 4, 3, 2, 1]):
        np.testing.assert_array_equal(seen(images, steps, some, dtype=dtype, facts=facts).x, whole[:, :, some])


@pytest.mark.parametrize("step", LISTED, ids=str)
def test_each_pass_shows_other_pictures_and_each_seed_too(step: Step) -> None:
    images, first = random_images((8, 8, 3)), seen(random_images((8, 8, 3)), (step,)).x
    np.testing.assert_array_equal(seen(images, (step,)).x, first)
    assert (seen(images, (step,), presentation=1).x != first).any()
    assert (seen(images, (step,), seed=6).x != first).any()


@pytest.mark.parametrize("step", LISTED, ids=str)
def test_stored_images_stay_as_they_are(step: Step) -> None:
    images = random_images((8, 8, 3))
    before = images.copy()
    seen(images, (step,))
    np.testing.assert_array_equal(images, before)


@pytest.mark.parametrize("step", LISTED, ids=str)
def test_a_step_is_kept_as_a_table(step: Step) -> None:
    assert read_augment([step.model_dump(mode="json")]) == (step,)
    assert pickle.loads(pickle.dumps(step)) == step  # noqa: S301 # our own
    assert resolve({"data": {"augment": [step.model_dump()]}}).data.augment == (step,)


movings = st.lists(
    st.sampled_from([step for step in LISTED if isinstance(step, MovingStep)] + [Cutout(size=2)]), max_size=4
)


@given(steps=movings, stored=st.sampled_from(["uint8", "uint16"]))
@settings(max_examples=40)
def test_moves_that_the_loader_makes_at_once_are_those_made_one_by_one(steps: list[Step], stored: str) -> None:
    images = random_images((7, 9, 2), stored, count=6)
    pictures = Pictures(seen(images, "none").x, facts_of(images))
    for step, of_step in with_chances(steps, samples_of(np.arange(6))):
        pictures = step.apply(pictures, of_step)
    np.testing.assert_array_equal(seen(images, tuple(steps)).x, pictures.x)


def test_steps_draw_other_numbers_each() -> None:
    images = random_images((8, 8, 3))
    once, twice = seen(images, (Cutout(size=3),)).x, seen(images, (Cutout(size=3), Cutout(size=3))).x
    assert (twice == 0).sum() > (once == 0).sum()


def test_the_named_steps_are_a_list_too() -> None:
    images = random_images((9, 8, 3))
    np.testing.assert_array_equal(seen(images, "crop-mirror").x, seen(images, (Crop(), Mirror())).x)
    np.testing.assert_array_equal(seen(images, "none").x, seen(images, ()).x)
    assert steps_of("crop-mirror") == NAMED["crop-mirror"]
    assert described((Crop(), Mirror())) == "crop (pixels = 4), then mirror (alternate = false)"


# --- against plain code ---


@pytest.mark.parametrize("border", ["reflect", "zeros"])
@pytest.mark.parametrize("stored", ["uint8", "float32"])
def test_translations_go_each_way_and_show_what_is_beyond(border: Any, stored: str) -> None:
    images = random_images((5, 7, 2), stored, count=400)
    found, given_x = seen(images, (Translate(pixels=2, border=border),)).x, seen(images, "none").x
    mode: Any = "reflect" if border == "reflect" else "constant"
    padded = np.pad(given_x, ((2, 2), (2, 2), (0, 0), (0, 0)), mode)
    views = np.lib.stride_tricks.sliding_window_view(padded, (5, 7), axis=(0, 1))  # (5, 5, N, C, 5, 7)
    same = (views == found.transpose(2, 3, 0, 1)).all(axis=(3, 4, 5))
    assert same.any(axis=(0, 1)).all()
    assert same.any(axis=2).all(), "each shift is some image's"


def test_every_second_pass_is_mirrored() -> None:
    images, steps = random_images((4, 6, 3), count=200), (Mirror(alternate=True),)
    shown = [seen(images, steps, presentation=i).x for i in range(4)]
    given_x = seen(images, "none").x
    mirrored = [(x[:, ::-1] == given_x).all(axis=(0, 1, 3)) for x in shown]
    for x, flipped in zip(shown, mirrored, strict=True):
        np.testing.assert_array_equal(x, np.where(flipped[:, None], given_x[:, ::-1], given_x))
    assert 60 < mirrored[0].sum() < 140
    np.testing.assert_array_equal(mirrored[1], ~mirrored[0])
    np.testing.assert_array_equal(mirrored[2], mirrored[0])
    np.testing.assert_array_equal(mirrored[3], mirrored[1])
    some = [7, 100, 3]
    np.testing.assert_array_equal(seen(images, steps, some, facts=facts_of(images)).x, shown[0][:, :, some])


@pytest.mark.parametrize("alternate", [False, True])
def test_a_mirror_image_has_the_same_mean(alternate: bool) -> None:
    images = random_images((6, 5, 3))
    found, given_x = seen(images, (Mirror(alternate=alternate),)).x, seen(images, "none").x
    np.testing.assert_array_equal(np.sort(found, axis=1), np.sort(given_x, axis=1))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_one_square_is_cut_out_and_the_rest_stays(size: int) -> None:
    images = random_images((7, 9, 3), count=300)
    found, given_x = seen(images, (Cutout(size=size),)).x, seen(images, "none").x
    gone = (found == 0).all(axis=3)
    assert ((found == given_x) | gone[..., None]).all()
    centres = set()
    for n in range(300):
        rows, columns = (np.flatnonzero(gone[:, :, n].any(axis=axis)) for axis in (1, 0))
        assert gone[:, :, n].sum() == len(rows) * len(columns)
        for places, side in ((rows, 7), (columns, 9)):
            assert len(places) == size or (places[0] == 0 or places[-1] == side - 1)
        centres.add((rows[0], columns[0], len(rows), len(columns)))
    assert len(centres) > 30


def _factors(step: Jitter, count: int) -> np.ndarray:
    most = np.array([step.brightness, step.contrast, step.saturation])
    return 1 + most * (2 * chance(step, count).numbers.T.astype(float) - 1)


@pytest.mark.parametrize(
    ("step", "enhancer", "of", "channels"),
    [
        (Jitter(brightness=0.5), ImageEnhance.Brightness, 0, 3),
        (Jitter(contrast=0.8), ImageEnhance.Contrast, 1, 1),
        (Jitter(saturation=1.0), ImageEnhance.Color, 2, 3),
    ],
    ids=["brightness", "contrast", "saturation"],
)
def test_colours_change_as_pillow_changes_them(step: Jitter, enhancer: Any, of: int, channels: int) -> None:
    """Pillow rounds to whole levels, in between too."""
    images = random_images((8, 9, channels))
    facts, factors = facts_of(images), _factors(step, 12)[:, of]
    found = seen(images, (step,)).x.transpose(2, 0, 1, 3) * facts.deviation + facts.mean
    assert factors.min() < 0.8
    assert factors.max() > 1.2
    for image, factor, own in zip(images, factors, found, strict=True):
        given_image = Image.fromarray(image if channels == 3 else image[:, :, 0])
        expected = np.asarray(enhancer(given_image).enhance(float(factor)), float).reshape(8, 9, channels)
        assert np.abs(own - expected).max() < 2


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stored", ["uint8", "float32"])
def test_colours_change_as_formulas_say(shape: tuple[int, int, int], stored: str) -> None:
    step = Jitter(brightness=0.5, contrast=0.5, saturation=0.5 * (shape[2] == 3))
    images = random_images(shape, stored)
    facts, factors = facts_of(images), _factors(step, 12)[:, :, None, None, None]
    bright = images * factors[:, 0]
    mean = bright.mean(axis=(1, 2), keepdims=True)
    expected = mean + factors[:, 1] * (bright - mean)
    if shape[2] == 3:
        grey = (expected * [0.299, 0.587, 0.114]).sum(axis=3, keepdims=True)
        expected = grey + factors[:, 2] * (expected - grey)
    if stored == "uint8":
        assert expected.max() > 255
        expected = expected.clip(0, 255)
    np.testing.assert_allclose(seen(images, (step,)).x, plain(expected, facts), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(8, 8), (7, 12), (12, 7)])
def test_parts_are_enlarged_as_pillow_enlarges_them(shape: tuple[int, int]) -> None:
    step, images = ResizedCrop(scale=(0.2, 1.0), ratio=(0.5, 2.0)), random_images((*shape, 1), "float32")
    found, given_x = seen(images, (step,), dtype="float32").x, seen(images, "none", dtype="float32").x
    for n, (row, column, height, width) in enumerate(step.boxes(chance(step, 12), shape).tolist()):
        box = column, row, min(column + width, shape[1]), min(row + height, shape[0])
        size = shape[::-1]
        expected = Image.fromarray(np.ascontiguousarray(given_x[:, :, n, 0])).resize(
            size, Image.Resampling.BILINEAR, box
        )
        np.testing.assert_allclose(found[:, :, n, 0], np.asarray(expected), rtol=0, atol=2e-5)


def test_parts_have_the_areas_and_shapes_that_are_asked_for() -> None:
    step = ResizedCrop(scale=(0.25, 0.5), ratio=(0.8, 1.25))
    row, column, height, width = step.boxes(chance(step, 2000), (20, 20)).T
    area, ratio = height * width / 400, width / height
    assert (row >= 0).all()
    assert (column >= 0).all()
    assert (row + height <= 20 + 1e-9).all()
    assert (column + width <= 20 + 1e-9).all()
    for found, (low, high) in ((area, step.scale), (ratio, step.ratio)):
        assert low <= found.min() < low + 0.03 * (high - low)
        assert high >= found.max() > high - 0.03 * (high - low)


def test_the_whole_image_is_a_part_of_itself() -> None:
    images = random_images((8, 8, 3))
    whole = seen(images, (ResizedCrop(scale=(1.0, 1.0), ratio=(1.0, 1.0)),)).x
    np.testing.assert_array_equal(whole, seen(images, "none").x)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_images_are_mixed_with_the_next_of_the_minibatch(dtype: str) -> None:
    images, step = random_images((5, 6, 3)), Mixup(alpha=1.0)
    pictures, given_x = seen(images, (step,), dtype=dtype), seen(images, "none", dtype=dtype).x
    mixture = pictures.mixture
    assert mixture is not None
    assert mixture.partners.tolist() == [*range(1, 12), 0]
    shares = mixture.shares.astype(dtype)[:, None]
    np.testing.assert_array_equal(pictures.x, given_x * shares + given_x[:, :, mixture.partners] * (1 - shares))
    some = seen(images, (step,), [7, 2], facts=facts_of(images)).mixture
    assert some is not None
    np.testing.assert_array_equal(some.shares, mixture.shares[[7, 2]])


def test_shares_are_of_their_distribution_and_the_own_one_is_the_larger() -> None:
    for alpha, expected in ((0.2, 0.0), (1.0, 0.5), (3.0, 0.875)):
        step = Mixup(alpha=alpha)
        shares = step.mixture(chance(step, 4000)).shares
        assert shares.min() >= 0.5
        assert shares.max() <= 1
        if expected:  # of Beta(1, 1): the share above 3/4 is one half
            within = {1.0: 0.5, 3.0: 1 - 2 * 0.103516}[alpha]
            assert abs((shares < 0.75).mean() - within) < 0.03
        else:
            assert (shares > 0.95).mean() > 0.5


# --- through the loader ---


@pytest.fixture
def data(toy: str) -> Dataset:
    return open_dataset(toy)


ALL = (Translate(), Mirror(alternate=True), ResizedCrop(), Jitter(brightness=0.2, saturation=0.3), Cutout(size=8))


def test_two_workers_show_what_one_shows(data: Dataset, source: Source) -> None:
    def shown(ranges: tuple[tuple[int, int], ...], batch_size: int) -> dict[int, bytes]:
        plan, found = BatchPlan(ranges, batch_size, seed=3, presentation=2, augment=ALL), dict[int, bytes]()
        with batches(data, data.train, plan) as stream:
            for batch in stream:
                found |= {int(key): batch.x[:, :, n].tobytes() for n, key in enumerate(batch.keys)}
        return found

    whole = shown(((0, 230),), 32)
    assert len(whole) == 230
    assert shown(((0, 90),), 7) | shown(((90, 230),), 50) == whole


def test_labels_and_weights_come_with_the_mixture(data: Dataset) -> None:
    plan, indices = BatchPlan(((0, 230),), 16, seed=3, augment=(*ALL, Mixup())), np.arange(20, 36)
    batch, alone = (
        load_batch(data, data.train, plan, "float32", indices),
        load_batch(data, data.train, BatchPlan(((0, 230),), 16, seed=3), "float32", indices),
    )
    np.testing.assert_array_equal(batch.labels, alone.labels)
    assert alone.mixture is None
    assert batch.mixture is not None
    assert len(batch.mixture.shares) == 16


# --- what is refused ---


def refused(augment: Any, **data: Any) -> tuple[str, ...]:
    with pytest.raises(JobError) as caught:
        resolve({"data": {"augment": augment, **data}})
    return caught.value.problems


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (
            {"step": "miror"},
            "data.augment.1 = {'step': 'miror'}: step 'miror': there is none of this name; did you mean 'mirror'?",
        ),
        ({"step": "cutout", "sise": 3}, "sise: cutout has no such key; did you mean 'size'?"),
        ({"step": "cutout"}, "data.augment.1.size = {}: field required"),
        ({"step": "cutout", "size": 0}, "data.augment.1.size = 0: input should be greater than or equal to 1"),
        ({"step": "crop", "pixels": 2.5}, "data.augment.1.pixels = 2.5: "),
        ({"step": "translate", "border": "wrap"}, "'zeros' or 'reflect'"),
        ({"step": "mirror", "alternate": 1}, "data.augment.1.alternate = 1: input should be a valid boolean"),
        ({"step": "jitter", "contrast": 1.5}, "less than or equal to 1"),
        ({"step": "jitter", "contrast": float("nan")}, "finite number"),
        ({"step": "resized-crop", "scale": [0.5, 0.2]}, "the smallest comes first; swap the two"),
        ({"step": "resized-crop", "scale": 0.5}, "data.augment.1.scale = 0.5: input should be a valid tuple"),
        ({"step": "resized-crop", "ratio": [0, 1]}, "greater than or equal to 0.01"),
        ({"step": "mixup", "alpha": 0}, "greater than or equal to 0.01"),
        ("mirror", "write a table with a key `step`, one of crop, translate, mirror"),
        ({"pixels": 3}, "write a table with a key `step`"),
    ],
)
def test_a_wrong_step_is_refused_by_its_place(step: Any, problem: str) -> None:
    (found,) = refused([{"step": "crop"}, step])
    assert found.startswith("data.augment.1")
    assert problem in found


def test_all_wrong_steps_are_told_at_once() -> None:
    found = refused([{"step": "crop", "pixels": 0}, {"step": "no"}, {"step": "mixup", "alpha": -1}], validation=0)
    assert [problem.split(" = ")[0] for problem in found] == [
        *("data.validation", "data.augment.0.pixels", "data.augment.1", "data.augment.2.alpha"),
    ]


def test_mixup_comes_last() -> None:
    (found,) = refused([{"step": "mixup"}, {"step": "mirror"}])
    assert found.startswith("data.augment.0: mixup mixes whole images with their labels, so it comes last")


def problems(step: Step, shape: tuple[int, int, int]) -> Iterator[str]:
    return image_problems((Mirror(), step), facts_of(np.zeros((1, *shape), np.uint8)))


@pytest.mark.parametrize(
    ("step", "shape", "problem"),
    [
        (Crop(pixels=5), (8, 5, 3), "1.pixels = 5: nothing of an image of 5 pixels may be left; use at most 4"),
        (Translate(pixels=8), (8, 9, 3), "1.pixels = 8: an image of 8 pixels has no more to show; use at most 7"),
        (Cutout(size=9), (8, 9, 3), "1.size = 9: the square is larger than images of 8 pixels; use at most 8"),
        (
            Jitter(saturation=0.5),
            (8, 8, 12),
            "1.saturation = 0.5: colours have three channels, these images 12 channels",
        ),
        (Jitter(saturation=0.5), (8, 8, 1), "these images 1 channel; remove it"),
        (ResizedCrop(scale=(0.001, 1.0)), (8, 8, 3), "1.scale = [0.001, 1.0]: may leave less than a pixel of 8x8"),
    ],
)
def test_steps_that_do_not_fit_the_images_are_refused(step: Step, shape: tuple[int, int, int], problem: str) -> None:
    (found,) = problems(step, shape)
    assert problem in found
    larger = (60, 60, 3)
    assert not list(problems(step, larger))
