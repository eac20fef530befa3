"""Runs whose first convolution whitens: who makes its kernels, of what, and where they are kept; what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daskcnn.errors import JobError
from daskcnn.job.network import initial_weights, whitened
from daskcnn.job.prepared import Start
from daskcnn.job.resolve import resolve
from daskcnn.launch import training as runner
from daskcnn.launch.prepared_job import fitted
from daskcnn.launch.recorder import Recorder
from daskcnn.launch.resume import EarlierRun, begins
from daskcnn.nn import Layout
from daskcnn.nn.network import patch_moments, whitening_kernels
from daskcnn.runs.directory import RunDirectory
from daskcnn.store import Dataset, normalise, open_dataset
from daskcnn.trained.fine_tuning import first_weights
from tests.tiny_runs import tiny_data, tiny_job, tiny_run

WHITENING: list[dict[str, Any]] = [
    {"layer": "conv", "kernels": 24, "size": 2, "initial": "whitening"},
    {"layer": "gelu"},
    {"layer": "conv", "kernels": 30, "size": 3, "pad": 1, "initial": "dirac"},
    {"layer": "dense", "units": 10},
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def dataset(store: str) -> Dataset:
    return open_dataset(store)


def raw(store: str, **sections: dict[str, Any]) -> dict[str, Any]:
    return tiny_job(store, model={"layers": WHITENING, "freeze": ["conv1"]}, **sections)


def kernels(layout: Layout, weights: np.ndarray, name: str = "conv1") -> np.ndarray:
    found: np.ndarray = layout.views(weights)[0][name]["w"]
    return found


def test_kernels_are_made_of_the_training_images_that_are_not_for_validation(store: str, dataset: Dataset) -> None:
    job = resolve(raw(store))
    weights, (layout, initial) = whitened(job, dataset), initial_weights(job, dataset)
    assert weights is not None
    images, _ = dataset.train.read(0, 100)
    sums, count = patch_moments(normalise(dataset, images, "float64"), 2)
    expected = whitening_kernels(sums / count, 2)
    np.testing.assert_allclose(kernels(layout, weights), expected, rtol=1e-3, atol=1e-4)
    kernels(layout, weights)[...] = kernels(layout, initial)
    np.testing.assert_array_equal(weights, initial)  # the rest is as ever


def test_augmentation_and_batches_do_not_matter(store: str, dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, cropped = (whitened(resolve(raw(store, data={"augment": a})), dataset) for a in ("none", "crop-mirror"))
    monkeypatch.setattr("daskcnn.job.network._PATCH_NUMBERS", 8 * 8 * 12 * 7)
    in_parts = whitened(resolve(raw(store)), dataset)
    assert plain is not None
    assert cropped is not None
    assert in_parts is not None
    np.testing.assert_array_equal(plain, cropped)
    np.testing.assert_allclose(plain, in_parts, rtol=0, atol=1e-5)


def test_no_image_is_read_for_other_networks(store: str, dataset: Dataset) -> None:
    assert whitened(resolve(tiny_job(store)), dataset) is None
    assert first_weights(resolve(tiny_job(store)), dataset, None) is None


def test_trained_kernels_stay(store: str, dataset: Dataset) -> None:
    job = resolve(raw(store))
    layout, initial = initial_weights(job, dataset)
    loaded = Start("there", initial, ("conv1", "conv2"), {"dense1": "10 classes instead of 3"})
    assert first_weights(job, dataset, loaded) is initial
    new = Start("there", initial, ("conv2",), {"conv1": "there is none of this name"})
    found = first_weights(job, dataset, new)
    assert found is not None
    assert (kernels(layout, found) != kernels(layout, initial)).any()
    np.testing.assert_array_equal(kernels(layout, found, "conv2"), kernels(layout, initial, "conv2"))


@pytest.mark.parametrize("strategy", ["sgwu", "layer"])
def test_a_run_keeps_them_as_its_first_checkpoint(tmp_path: Path, store: str, strategy: str) -> None:
    prepared = fitted(resolve(raw(store, train={"strategy": strategy})), open_dataset(store))
    own = tiny_run(tmp_path, prepared.job.model_dump(mode="json"))
    with RunDirectory.open(own, writable=True) as directory:
        state = runner._started(Recorder(directory, runner.Silent(), prepared))
    assert state is not None
    assert not begins(EarlierRun.at(own))
    np.testing.assert_array_equal(state.weights, whitened(prepared.job, prepared.dataset))
    assert set(state.optimizers) == ({"layer"} if strategy == "layer" else set())


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        (
            {"model": {"layers": [{**WHITENING[0], "kernels": 8}, *WHITENING[1:]], "freeze": None}},
            "model: layer conv1: initial = 'whitening' makes 2·size²·channels = 24 kernels, not 8; set kernels = 24",
        ),
        (
            {"model": {"layers": [*WHITENING[1:3], WHITENING[0], WHITENING[3]], "freeze": None}},
            "model: layer conv2: initial = 'whitening' is for the network's first layer",
        ),
        (
            {"data": {"augment": [{"step": "cutout", "size": 9}]}},
            "data.augment.0.size = 9: the square is larger than images of 8 pixels; use at most 8",
        ),
    ],
)
def test_what_does_not_fit_the_images_is_refused(sections: dict[str, Any], problem: str, store: str) -> None:
    given = tiny_job(store, **{"model": {"layers": WHITENING}, **sections})
    with pytest.raises(JobError) as caught:
        fitted(resolve(given), open_dataset(store))
    (found,) = caught.value.problems
    assert found.startswith(problem)


def test_all_that_does_not_fit_is_told_at_once(tmp_path: Path) -> None:
    store = tiny_data(tmp_path, shape=(1, 8, 1))
    layers = [{"layer": "dense", "units": 9}]
    augment = [{"step": "jitter", "saturation": 0.5}, {"step": "translate", "pixels": 1}]
    given = tiny_job(store, model={"layers": layers}, data={"views": "mirror-translate", "augment": augment})
    with pytest.raises(JobError) as caught:
        fitted(resolve(given), open_dataset(store))
    starts = [
        "data.augment.0.saturation = 0.5",
        "data.augment.1.pixels = 1",
        "data.views = 'mirror-translate'",
        "model",
    ]
    assert [problem.split(": ")[0] for problem in caught.value.problems] == starts
