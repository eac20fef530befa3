"""Sample and class weights: what they are made of, and that they train as samples shown more often do."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from daskcnn.arrays import Device
from daskcnn.errors import DataError, JobError
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import Job
from daskcnn.launch.prepared_job import fitted
from daskcnn.nn.losses import SoftmaxCrossEntropy
from daskcnn.store import Batch, Dataset, Scattered, open_dataset
from daskcnn.training.replica import Replica
from daskcnn.training.weighting import weighting_of
from tests.tiny_runs import tiny_job
from tests.toy_data import toy_dataset

NAMES, VALIDATION = ("ant", "bee", "cow"), 9


@dataclass(frozen=True)
class Part:
    """Samples in memory, as `store.Split` has them on disk."""

    images: np.ndarray
    rows: np.ndarray
    own: np.ndarray | None
    cuts: int = 1 << 30
    source: None = None

    def __len__(self) -> int:
        return len(self.rows)

    def scattered(self, indices: np.ndarray, near: object = None) -> tuple[Scattered, np.ndarray]:
        return Scattered.of(self.images[indices]), self.rows[indices]

    def weights(self, indices: np.ndarray) -> np.ndarray | None:
        return None if self.own is None else self.own[indices]

    def labels(self) -> np.ndarray:
        return self.rows


@dataclass(frozen=True)
class Memory:
    """The part of a `store.Dataset` that a replica uses."""

    train: Part
    labels: str = "classes"
    classes: tuple[str, ...] = NAMES
    shape: tuple[int, int, int] = (3, 3, 1)
    mean: np.ndarray = field(default_factory=lambda: np.full(1, 128.0))
    deviation: np.ndarray = field(default_factory=lambda: np.full(1, 70.0))
    nodata: None = None
    sample_bytes: int = 9
    path: str = "memory"


def memory(*, times: np.ndarray | None = None, weights: np.ndarray | None = None, several: bool = False) -> Dataset:
    """30 uneven samples to train on, repeated as `times` says, and 9 behind them for validation."""
    rng = np.random.default_rng(3)
    images = rng.integers(0, 256, (30 + VALIDATION, 3, 3, 1), dtype=np.uint8)
    rows = rng.integers(0, 2, (len(images), 3)).astype(np.uint8) if several else rng.choice(3, len(images), p=P)
    show = np.concatenate([np.repeat(np.arange(30), 1 if times is None else times), 30 + np.arange(VALIDATION)])
    own = None if weights is None else np.concatenate([weights, np.full(VALIDATION, 77)]).astype(np.float32)
    part = Part(images[show], rows[show], own)
    return cast(Dataset, Memory(part, "several" if several else "classes"))


P = (0.6, 0.3, 0.1)
TIMES = np.random.default_rng(5).integers(0, 4, 30)


def job_of(**train: Any) -> Job:
    """One minibatch is all samples, so a sample more often is a sample that counts more."""
    layers = [{"layer": "dense", "units": 8}, {"layer": "tanh"}, {"layer": "dense", "units": 3}]
    usual = {"batch_size": 1000, "epochs": 3, "lr": 0.1, "partition": None}
    return Job.model_validate(
        {
            "data": {"validation": VALIDATION},
            "model": {"layers": layers, "dtype": "float64"},
            "train": {**usual, **train},
        }
    )


def trained(dataset: Dataset, **train: Any) -> np.ndarray:
    job, samples = job_of(**train), len(dataset.train) - VALIDATION
    replica = Replica(job, dataset, Device(), clock=lambda: 0.0)
    for epoch in range(3):
        replica.train(((0, samples),), samples, presentation=epoch, progress=(epoch / 3, (epoch + 1) / 3))
    return replica.host_weights()


def weights_of(dataset: Dataset, **train: Any) -> np.ndarray:
    """Of the training samples in their order."""
    weighting, n = weighting_of(job_of(**train), dataset), len(dataset.train) - VALIDATION
    assert weighting is not None
    indices = np.arange(n)
    labels, own = dataset.train.scattered(indices)[1], dataset.train.weights(indices)
    return weighting.of(Batch(np.empty(0), labels, np.empty(0, np.uint64), own), "float64")


# --- training ---


@pytest.mark.parametrize("several", [False, True])
def test_whole_weights_train_as_samples_that_are_repeated(several: bool) -> None:
    weighted, repeated = memory(weights=TIMES, several=several), memory(times=TIMES, several=several)
    np.testing.assert_allclose(trained(weighted), trained(repeated), rtol=1e-10, atol=1e-12)
    assert not np.allclose(trained(weighted), trained(memory(several=several)), rtol=1e-3)


@pytest.mark.parametrize("given", ["balanced", [1.0, 2.0, 5.0], {"bee": 3}])
def test_so_they_do_beneath_class_weights(given: Any) -> None:
    weighted, repeated = memory(weights=TIMES), memory(times=TIMES)
    found, expected = (trained(data, class_weights=given) for data in (weighted, repeated))
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
    assert not np.allclose(found, trained(weighted), rtol=1e-3)


def test_class_weights_train_as_classes_that_are_repeated() -> None:
    plain = memory()
    times = np.array([1, 3, 2])[plain.train.labels()[:30]]
    expected = trained(memory(times=times))
    np.testing.assert_allclose(trained(plain, class_weights=[2, 6, 4]), expected, rtol=1e-10, atol=1e-12)


def test_weights_that_are_all_the_same_change_no_bit() -> None:
    expected = trained(memory()).tobytes()
    assert trained(memory(weights=np.full(30, 4))).tobytes() == expected
    assert trained(memory(), class_weights=[8.0, 8.0, 8.0]).tobytes() == expected


def test_the_loss_that_validation_reports_is_not_weighted() -> None:
    plain, weighted = (
        Replica(job_of(class_weights=given), data, Device(), clock=lambda: 0.0).evaluate(data.train, 30, 39)
        for given, data in ((None, memory()), ("balanced", memory(weights=TIMES)))
    )
    assert plain == weighted


# --- what they are ---


def test_balanced_weights_are_samples_by_classes_by_samples_of_the_class() -> None:
    data = memory()
    labels = data.train.labels()[:30]
    counts = np.bincount(labels, minlength=3)
    assert len(set(counts.tolist())) == 3
    np.testing.assert_allclose(weights_of(data, class_weights="balanced"), (30 / (3 * counts))[labels], rtol=1e-14)


def test_balanced_weights_are_scikit_learns() -> None:
    utils = pytest.importorskip("sklearn.utils.class_weight")
    labels = memory().train.labels()[:30]
    expected = utils.compute_sample_weight("balanced", labels)
    np.testing.assert_allclose(weights_of(memory(), class_weights="balanced"), expected, rtol=1e-14)


@pytest.mark.parametrize("own", [None, TIMES])
@pytest.mark.parametrize("given", ["balanced", [1.0, 0.0, 5.0], {"bee": 3}])
def test_their_mean_over_the_training_samples_is_1(own: np.ndarray | None, given: Any) -> None:
    assert weights_of(memory(weights=own), class_weights=given).mean() == pytest.approx(1, rel=1e-13)


def test_sample_weights_alone_are_divided_by_their_mean() -> None:
    np.testing.assert_allclose(weights_of(memory(weights=TIMES)), TIMES / TIMES.mean(), rtol=1e-14)
    assert weighting_of(job_of(), memory()) is None


def test_class_weights_multiply_sample_weights() -> None:
    given = np.array([1.0, 2.0, 5.0])
    product = TIMES * given[memory().train.labels()[:30]]
    found = weights_of(memory(weights=TIMES), class_weights=given.tolist())
    np.testing.assert_allclose(found, product / product.mean(), rtol=1e-14)


def test_a_table_gives_1_to_a_class_that_it_does_not_name() -> None:
    by_name, by_order = ({"class_weights": given} for given in ({"bee": 3}, [1.0, 3.0, 1.0]))
    np.testing.assert_array_equal(weights_of(memory(), **by_name), weights_of(memory(), **by_order))


def test_a_class_without_training_samples_does_not_count() -> None:
    data = memory(times=np.where(memory().train.labels()[:30] == 1, 0, 1))
    labels = data.train.labels()[: len(data.train) - VALIDATION]
    counts, found = np.bincount(labels, minlength=3), weights_of(data, class_weights="balanced")
    assert counts[1] == 0
    np.testing.assert_allclose(found, len(labels) / (2 * counts[labels]), rtol=1e-14)


# --- what is refused ---


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"class_weights": [1.0, 2.0]}, r"train\.class_weights: 2 numbers for 3 classes; give one for each"),
        ({"class_weights": {"be": 2.0}}, r"train\.class_weights\.be: no such class; did you mean 'bee'\?"),
        ({"class_weights": [0.0, 0.0, 0.0]}, "no training sample has a weight above 0; raise some"),
    ],
)
def test_class_weights_that_do_not_fit_are_refused(train: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        weighting_of(job_of(**train), memory())


@pytest.mark.parametrize("given", ["balanced", [1.0, 1.0, 1.0]])
def test_class_weights_are_refused_where_samples_have_several_labels(given: Any) -> None:
    with pytest.raises(JobError, match="a sample has several labels, so it belongs to no one class whose weight"):
        weighting_of(job_of(class_weights=given), memory(several=True))


@pytest.mark.parametrize("wrong", [np.zeros(30), np.full(30, np.nan), np.linspace(-1, 1, 30), np.full(30, np.inf)])
def test_sample_weights_that_are_none_are_refused(wrong: np.ndarray) -> None:
    with pytest.raises(DataError, match="its sample weights are not numbers of 0 or more, one at least above 0"):
        weighting_of(job_of(), memory(weights=wrong))


def test_job_and_data_set_are_checked_together(tmp_path: Path) -> None:
    several = toy_dataset(tmp_path, size=8, several=True)
    wrong = tiny_job(several.path, train={"loss": "softmax", "class_weights": "balanced"})
    with pytest.raises(JobError) as found:
        fitted(resolve(wrong), several)
    assert "train.loss = 'softmax': the data set has several labels a sample; remove it, or use 'sigmoid'" in str(
        found.value
    )
    assert "train.class_weights = 'balanced': a sample has several labels" in str(found.value)
    assert fitted(resolve(tiny_job(several.path)), several).job.train.loss == "sigmoid"


def test_a_loss_for_several_labels_is_refused_where_samples_have_one_class(path: str) -> None:
    data = open_dataset(path)
    with pytest.raises(JobError, match="'sigmoid': the data set has one class a sample; remove it, or use 'so"):
        fitted(resolve(tiny_job(path, train={"loss": "sigmoid"})), data)
    assert fitted(resolve(tiny_job(path)), data).job.train.loss == "softmax"
    assert fitted(resolve(tiny_job(path, train={"loss": "squared"})), data).job.train.loss == "squared"


def test_only_the_softmax_takes_smoothed_labels(path: str) -> None:
    data = open_dataset(path)
    with pytest.raises(JobError, match=r"label_smoothing = 0\.1: it is for the loss 'softmax', and this one is 'squ"):
        fitted(resolve(tiny_job(path, train={"loss": "squared", "label_smoothing": 0.1})), data)
    job = fitted(resolve(tiny_job(path, train={"label_smoothing": 0.1})), data).job
    replica = Replica(job, data, Device(), clock=time.perf_counter)
    assert (replica.loss, replica.training_loss) == (SoftmaxCrossEntropy(), SoftmaxCrossEntropy(0.1))
