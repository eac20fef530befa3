"""`CNNClassifier`: an estimator of scikit-learn's kind, on one worker in this process."""

from __future__ import annotations

import doctest
import io
import logging
import pickle
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
import zarr
from distributed import Client, LocalCluster

import daskcnn
from daskcnn.cluster.link.own_process import SHARED
from daskcnn.cluster.run import admission
from daskcnn.errors import ClusterError, JobError, installing
from daskcnn.estimator.classifier import CNNClassifier
from daskcnn.events import CheckpointWritten, EpochEnded, Event
from tests.rounding_of_networks import of_probabilities

sklearn_base = pytest.importorskip("sklearn.base")
estimator_checks = pytest.importorskip("sklearn.utils.estimator_checks")
model_selection = pytest.importorskip("sklearn.model_selection")

EXPECTED_FAILURES = {
    "check_sample_weight_equivalence_on_dense_data": "a sample of weight 2 is in one minibatch, one that is there "
    "twice in two: training by minibatches tells them apart",
}
"""Checks of scikit-learn that fail, with the reason."""

EXACT = {"check_methods_sample_order_invariance", "check_methods_subset_invariance"}
"""Checks that want the same to 1e-7 for samples in another order: some processors' sgemm rounds the last rows of a
product otherwise than the first ones."""


@pytest.fixture(scope="module", autouse=True)
def one_cluster() -> Iterator[None]:
    yield
    SHARED.close()


@pytest.fixture
def images() -> np.ndarray:
    """Forty images, the odd ones brighter."""
    rng = np.random.default_rng(0)
    bright = np.arange(40) % 2
    return (rng.integers(0, 128, (40, 8, 8, 1)) + 120 * bright[:, None, None, None]).astype(np.uint8)


@pytest.fixture
def y() -> np.ndarray:
    return np.where(np.arange(40) % 2, "light", "dark")


def small(**parameters: Any) -> CNNClassifier:
    """A classifier that learns to tell dark from light in a moment."""
    quick = {"model": [{"layer": "dense"}], "epochs": 3, "batch_size": 10, "optimizer": "sgd", "lr": 0.02}
    return CNNClassifier(**{**quick, **parameters})


LONG = {
    "classifier_data_not_an_array",
    "classifiers_classes",
    "classifiers_train",
    "estimators_dtypes",
    "estimators_nan_inf",
    "fit_idempotent",
    "pipeline_consistency",
    "sample_weight_equivalence_on_dense_data",
    "supervised_y_2d",
}
"""Checks that train for seconds."""


checks = list(estimator_checks.estimator_checks_generator(CNNClassifier(), mark=None))


def _param(estimator: CNNClassifier, check: Any) -> Any:
    name = check.func.__name__
    return pytest.param(estimator, check, id=name, marks=[pytest.mark.slow] * (name.removeprefix("check_") in LONG))


@pytest.mark.parametrize(("estimator", "check"), [_param(*each) for each in checks])
@pytest.mark.filterwarnings("default")
def test_scikit_learn_s_checks(estimator: CNNClassifier, check: Any) -> None:
    name = check.func.__name__
    if name in EXACT:
        estimator.set_params(job={"model": {"dtype": "float64"}})
    try:
        check(estimator)
    except Exception as error:
        if type(error).__name__ == "SkipTest":
            pytest.skip(str(error))
        if name not in EXPECTED_FAILURES:
            raise
    else:
        assert name not in EXPECTED_FAILURES, "it passes now"


def test_at_most_eight_checks_fail() -> None:
    assert len(EXPECTED_FAILURES) <= 8
    assert {check.func.__name__ for _, check in checks} > EXPECTED_FAILURES.keys()


# --- inputs ---


def test_a_score_reads_every_chunk_once(images: np.ndarray, y: np.ndarray) -> None:
    read: list[int] = []

    def seen(block: np.ndarray) -> np.ndarray:
        read.append(len(block))
        return block

    lazy = da.from_array(images, chunks=(10, *images.shape[1:])).map_blocks(seen, dtype=images.dtype, meta=images[:0])
    fitted = small().fit(images, y)
    assert fitted.score(lazy, da.from_array(y, chunks=20)) == fitted.score(images, y) == 1
    assert read == [10] * 4


def as_zarr(images: np.ndarray) -> Any:
    stored = zarr.create_array({}, shape=images.shape, chunks=(15, *images.shape[1:]), dtype=images.dtype)
    stored[...] = images
    return stored


@pytest.mark.parametrize("made", [lambda X: da.from_array(X, chunks=(15, 8, 4, 1)), as_zarr], ids=["dask", "zarr"])
def test_dask_and_zarr_arrays_are_fitted_like_numpy_s(images: np.ndarray, y: np.ndarray, made: Any) -> None:
    here, there = small().fit(images, y), small().fit(made(images), da.from_array(y, chunks=7))
    assert here.score(images, y) == 1
    np.testing.assert_array_equal(there.model_.vector, here.model_.vector)
    found = there.predict(made(images))
    assert isinstance(found, da.Array)
    np.testing.assert_array_equal(found.compute(), here.predict(images))
    proba = there.predict_proba(made(images))
    assert isinstance(proba, da.Array)
    assert proba.shape == (40, 2)
    allowed = of_probabilities(here.model_.classifier, images)
    np.testing.assert_allclose(proba.compute(), here.predict_proba(images), rtol=allowed)
    assert there.score(made(images), y) == 1


def test_rows_are_images_of_a_given_shape(images: np.ndarray, y: np.ndarray) -> None:
    rows = images.reshape(40, -1)
    by_shape, by_rows = small(image_shape=(8, 8)).fit(rows, y), small().fit(rows, y)
    np.testing.assert_array_equal(by_shape.model_.vector, small().fit(images, y).model_.vector)
    assert (by_shape.image_shape_, by_rows.image_shape_) == ((8, 8, 1), (1, 64, 1))
    assert by_shape.n_features_in_ == by_rows.n_features_in_ == 64
    np.testing.assert_array_equal(by_shape.predict(rows), by_shape.predict(images))


def test_another_number_type_is_no_loss(images: np.ndarray, y: np.ndarray) -> None:
    fitted = small().fit(images, y)
    np.testing.assert_allclose(fitted.predict_proba(images.astype(np.float64)), fitted.predict_proba(images), rtol=1e-5)
    halves = images.astype(np.float32) + 0.5
    assert not np.allclose(fitted.predict_proba(halves), fitted.predict_proba(images), rtol=1e-5)


def test_images_of_another_shape_are_refused(images: np.ndarray, y: np.ndarray) -> None:
    fitted = small().fit(images, y)
    with pytest.raises(ValueError, match=r"images of shape \(7, 8, 1\)"):
        fitted.predict(images[:, 1:])
    with pytest.raises(ValueError, match="NaN"):
        fitted.predict(np.full((2, 8, 8, 1), np.nan))
    lazy = fitted.predict(da.full((2, 8, 8, 1), np.nan))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with pytest.raises(ValueError, match="Input X contains NaN or infinity in 2 of 2 samples"):
            lazy.compute(scheduler="sync")


# --- parameters ---


def test_history_events_and_run_are_kept(images: np.ndarray, y: np.ndarray, tmp_path: Path) -> None:
    told: list[Event] = []
    fitted = small(run_dir=tmp_path / "runs", on_event=told.append).fit(images, y)
    assert [event["epoch"] for event in fitted.history_] == [1, 2, 3]
    assert len([event for event in told if isinstance(event, EpochEnded)]) == 3
    assert fitted.run_ is not None
    np.testing.assert_array_equal(daskcnn.load(fitted.run_).vector, fitted.model_.vector)
    assert small().fit(images, y).run_ is None


@pytest.mark.slow
def test_the_seed_decides_the_weights(images: np.ndarray, y: np.ndarray) -> None:
    def weights(seed: Any) -> np.ndarray:
        return np.asarray(small(random_state=seed).fit(images, y).model_.vector)

    np.testing.assert_array_equal(weights(np.random.RandomState(3)), weights(np.random.RandomState(3)))
    assert not np.array_equal(weights(1), weights(2))
    assert not np.array_equal(weights(None), weights(None))


@pytest.mark.parametrize("strategy", ["bsp", "agwu", "easgd", "downpour", "layer"])
def test_other_strategies(images: np.ndarray, y: np.ndarray, strategy: str) -> None:
    model = [{"layer": "conv", "kernels": 2, "size": 3, "pad": 1}, {"layer": "dense"}]
    assert small(model=model, strategy=strategy).fit(images, y).score(images, y) == 1


@pytest.mark.parametrize("kind", ["tables", "job", "file"])
def test_a_job_s_tables_are_laid_over(images: np.ndarray, y: np.ndarray, kind: str, tmp_path: Path) -> None:
    tables = {"train": {"momentum": 0.5, "nesterov": False}}
    (tmp_path / "job.toml").write_text("[train]\nmomentum = 0.5\nnesterov = false\n")
    kinds = {"tables": tables, "job": daskcnn.Job.model_validate(tables), "file": tmp_path / "job.toml"}
    estimator = small(job=kinds[kind])
    fitted = estimator.fit(images, y)
    assert (fitted.model_.job.train.momentum, fitted.model_.job.train.epochs) == (0.5, 3)
    np.testing.assert_array_equal(fitted.model_.vector, small(job=tables).fit(images, y).model_.vector)
    assert estimator.set_params(job__train__clip=2.0).job == {"train": {**tables["train"], "clip": 2.0}}


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"job": {"data": {"path": "old.zarr"}}}, "data.path: the samples of a fit are its X and y; remove it"),
        ({"job": {"data": {"images": "a", "labels": "b"}}}, "data.labels: the samples of a fit are its X and y"),
        ({"job": {"run": {"dir": "runs"}}}, "run.dir: the runs of fits are kept in run_dir; give that"),
        ({"job": {"run": {"tensorboard": True}}}, "run.tensorboard: the runs of fits are not kept; give run_dir"),
        ({"job": {"train": {"epochs": 5}}}, "train.epochs: the estimator's epochs is given too; keep one"),
        ({"job": {"model": {"name": "quick"}}}, "model.name: the estimator's model is given too; keep one"),
        (
            {"random_state": 3, "job": {"train": {"seed": 4}}},
            "train.seed: the estimator's random_state is given too; keep one",
        ),
    ],
)
def test_what_a_fit_gives_is_not_laid_over(
    images: np.ndarray, y: np.ndarray, parameters: dict[str, Any], told: str
) -> None:
    with pytest.raises(JobError) as caught:
        small(**parameters).fit(images, y)
    assert f"job: {told}" in str(caught.value)


def test_where_a_warm_start_goes_on_from_is_not_laid_over(images: np.ndarray, y: np.ndarray, tmp_path: Path) -> None:
    first = small(run_dir=tmp_path).fit(images, y)
    warm = small(model=None, warm_start=True, job={"model": {"from": str(first.run_)}}).fit(images, y)
    assert warm.model_.job.model.layers == first.model_.job.model.layers
    with pytest.raises(JobError, match=r"job: model\.from: with warm_start this fit goes on from the weights"):
        warm.fit(images, y)


def test_a_parameter_that_was_not_set_may_be_laid_over(images: np.ndarray, y: np.ndarray) -> None:
    model: list[dict[str, Any]] = [{"layer": "conv", "kernels": 2, "size": 3, "pad": 1}, {"layer": "dense"}]
    tables = {"train": {"strategy": "layer", "lr": np.float32(0.5), "batch_size": np.int64(8)}}
    fitted = CNNClassifier(model=model, epochs=1, job=tables).fit(images, y)
    train = fitted.model_.job.train
    assert (train.strategy, train.partition, train.lr, train.batch_size) == ("layer", None, 0.5, 8)


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        ({"cluster": {"workers": {"cpu": 2}}}, "cluster.workers = cpu=2"),
        ({"cluster": {"workers": "gpu=1"}}, "cluster.workers = gpu=1"),
        ({"train": {"replica_size": 2}}, "train.replica_size = 2"),
        ({"train": {"strategy": "admm"}}, "train.strategy = 'admm' is for 2 workers or more"),
    ],
)
def test_more_than_one_worker_without_a_client_is_refused_at_once(
    images: np.ndarray, y: np.ndarray, tables: dict[str, Any], told: str
) -> None:
    with pytest.raises(JobError) as caught:
        small(job=tables).fit(images, y)
    assert f"{told}: a fit without a client has one CPU worker, in this process; give client" in str(caught.value)


@pytest.mark.slow
def test_a_job_may_name_the_scheduler(images: np.ndarray, y: np.ndarray) -> None:
    settings: dict[str, Any] = {"processes": False, "dashboard_address": ":0", "silence_logs": "ERROR"}
    with LocalCluster(n_workers=2, threads_per_worker=1, **settings) as cluster:
        tables = {"cluster": {"scheduler": cluster.scheduler_address}}
        fitted = small(job=tables).fit(images, y)
        assert len(fitted.summary_["workers"]) == 2
        with (
            Client(cluster, set_as_default=False) as client,
            pytest.raises(JobError, match=r"cluster\.scheduler: the estimator has a client; keep one"),
        ):
            small(job=tables, client=client).fit(images, y)
    with pytest.raises(ClusterError, match="scheduler no-scheme"):
        small(job={"cluster": {"scheduler": "no-scheme"}}).fit(images, y)


def test_weights_of_classes_are_by_the_labels_in_y(images: np.ndarray) -> None:
    y = np.arange(40) % 2
    of_labels = {1: 50.0} | {np.int64(0): 2.0}
    fitted = [
        small(job={"train": {"class_weights": weights}}).fit(images, labels)
        for labels, weights in ((y, of_labels), (y, {"1": 50.0, "0": 2}), (y * 2.0, {2.0: 50, 0.0: 2}))
    ]
    for each in fitted[1:]:
        np.testing.assert_array_equal(each.model_.vector, fitted[0].model_.vector)
    assert not np.array_equal(small().fit(images, y).model_.vector, fitted[0].model_.vector)


def fails_once_trained(event: Event) -> None:
    if isinstance(event, EpochEnded):
        raise ZeroDivisionError("mine")


@pytest.mark.parametrize("parameters", [{"lr": 1e30}, {"on_event": fails_once_trained}])
def test_errors_name_no_folder_that_is_gone(images: np.ndarray, y: np.ndarray, parameters: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=r"diverged|mine") as caught:
        small(**parameters).fit(images, y)
    told = [str(caught.value), *getattr(caught.value, "__notes__", ())]
    assert not [text for text in told if "daskcnn-" in text or "--resume" in text or "checkpoint" in text]


@pytest.mark.slow
def test_a_worker_that_does_not_see_the_samples_asks_for_data_dir(
    images: np.ndarray, y: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daskcnn.cluster.run.admission.check_dataset", lambda *_: "no data set there")
    with pytest.raises(ClusterError, match=r"worker cpu-0 .* set data_dir to a folder or URL that every worker sees"):
        small().fit(images, y)
    with (
        SHARED.client() as client,
        pytest.raises(ClusterError, match=r"worker cpu-0 .* set data\.path of the job to a folder or URL"),
    ):
        daskcnn.train(client, data=(images, (y == "dark").astype(int)))


def test_a_worker_that_cannot_write_the_samples_asks_for_data_dir(
    images: np.ndarray, y: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unseen(source: Any, target: str) -> Any:
        return admission.unseen(source, "/nowhere")

    monkeypatch.setattr(admission, "partial", lambda _, *arguments: lambda: unseen(*arguments))
    lazy = da.from_array(images, chunks=(10, *images.shape[1:]))
    with pytest.raises(ClusterError, match=r"worker cpu-0 .* set data_dir to a folder or URL that every worker sees"):
        small().fit(lazy, y)


def test_early_stopping_keeps_the_best_weights_without_a_run_directory_too(
    images: np.ndarray, y: np.ndarray, tmp_path: Path
) -> None:
    told: list[Event] = []
    how: dict[str, Any] = {"epochs": 20, "lr": 0.5, "job": {"train": {"early_stopping": 2}}}
    stopped, kept = small(**how, on_event=told.append).fit(images, y), small(**how, run_dir=tmp_path).fit(images, y)
    assert kept.run_ is not None
    np.testing.assert_array_equal(stopped.model_.vector, daskcnn.load(kept.run_, checkpoint="best").vector)
    best = max(event["validation"]["accuracy"] for event in stopped.history_)
    assert stopped.summary_["validation"]["accuracy"] == best
    assert len(stopped.history_) < 20
    assert len([event for event in told if isinstance(event, CheckpointWritten)]) >= len(stopped.history_)
    told.clear()
    small(epochs=5, on_event=told.append).fit(images, y)
    assert len([event for event in told if isinstance(event, CheckpointWritten)]) <= 2, "its end, and what is due then"


def test_a_wrong_job_is_told_in_its_words(images: np.ndarray, y: np.ndarray) -> None:
    with pytest.raises(daskcnn.errors.JobError, match=r"train\.strategy = 'sgwuu'"):
        small(strategy="sgwuu").fit(images, y)
    with pytest.raises(daskcnn.errors.JobError) as caught:
        small(epochs=0, lr="fast").fit(images, y)
    assert len(caught.value.problems) == 2


def test_a_wrong_job_is_told_before_an_image_is_read(images: np.ndarray, y: np.ndarray) -> None:
    """A large array takes hours to write: what is wrong is told before that."""
    unreadable = da.from_array(images, chunks=10).map_blocks(_fail, dtype=images.dtype, meta=images[:0])
    with pytest.raises(daskcnn.errors.JobError, match=r"train\.strategy = 'sgwuu'"):
        small(strategy="sgwuu").fit(unreadable, y)


def _fail(block: Any) -> Any:
    raise AssertionError("an image was read")


def test_a_refusal_is_told_once(images: np.ndarray, y: np.ndarray, caplog: pytest.LogCaptureFixture) -> None:
    """Dask logs what a task raises with its traceback; a bug's stays."""
    broken = images.astype(np.float32)
    broken[3] = np.nan
    with pytest.raises(daskcnn.errors.DataError, match="sample 3, channel 0"):
        small().fit(da.from_array(broken, chunks=10), y)
    assert "Compute Failed" not in caplog.text
    unreadable = da.from_array(images, chunks=10).map_blocks(_fail, dtype=images.dtype, meta=images[:0])
    with pytest.raises(AssertionError, match="an image was read"):
        small().fit(unreadable, y)
    assert "Compute Failed" in caplog.text


def test_a_fit_leaves_the_log_of_other_clusters_as_it_was(images: np.ndarray, y: np.ndarray) -> None:
    """The shared cluster goes on after the fit, and says nothing there but errors."""
    log, heard = logging.getLogger("distributed"), io.StringIO()
    log.addHandler(handler := logging.StreamHandler(heard))
    SHARED.close()
    try:
        with LocalCluster(n_workers=0, processes=False, dashboard_address=":0", silence_logs=False):
            before, _ = [each.level for each in log.handlers], heard.truncate(0)
            small(epochs=1).fit(images, y)
            assert [each.level for each in log.handlers] == before
            assert not heard.getvalue()
            logging.getLogger("distributed.worker").warning("of another cluster")
            assert heard.getvalue().strip("\0\n") == "of another cluster"
            heard.truncate(0)
            SHARED.close()
            assert not heard.getvalue().strip("\0")
    finally:
        log.removeHandler(handler)


def test_numbers_of_numpy_s_are_numbers(images: np.ndarray, y: np.ndarray) -> None:
    """As a search over `np.arange` sets them."""
    fitted = small(epochs=np.int64(2), batch_size=np.int32(8), lr=np.float32(0.5)).fit(images, y)
    train = fitted.model_.job.train
    assert (train.epochs, train.batch_size, train.lr) == (2, 8, 0.5)


def test_dask_arrays_of_unknown_length(images: np.ndarray, y: np.ndarray) -> None:
    """As they are after samples were picked by a condition."""
    X, labels = da.from_array(images, chunks=10), da.from_array(y, chunks=10)
    known = da.from_array(np.arange(len(y)) >= 4, chunks=10)
    picked = X[known]
    fitted = small().fit(picked, labels[known])
    np.testing.assert_array_equal(fitted.model_.vector, small().fit(images[4:], y[4:]).model_.vector)
    np.testing.assert_array_equal(fitted.predict(picked).compute(), fitted.predict(images[4:]))
    assert np.isnan(picked.shape[0]), "the user's array is left as it was"


def test_a_warm_start_goes_on_from_the_weights_of_the_fit_before(images: np.ndarray, y: np.ndarray) -> None:
    cold, warm = small(epochs=1, lr=1e-9), small(epochs=1, lr=1e-9, warm_start=True)
    warm.set_params(lr=0.02).fit(images, y)
    before = np.array(warm.model_.vector)
    warm.set_params(lr=1e-9).fit(images, y)
    np.testing.assert_allclose(warm.model_.vector, before, atol=1e-6)
    assert not np.allclose(cold.fit(images, y).model_.vector, before, atol=1e-3)


def test_a_fit_replaces_all_of_the_one_before_or_where_it_fails_nothing(images: np.ndarray, y: np.ndarray) -> None:
    fitted = small(epochs=1, warm_start=True)
    fitted.feature_names_in_ = np.array(["of", "an", "earlier", "fit"])
    assert not hasattr(fitted.fit(images, y), "feature_names_in_"), "images have none"
    before = {name: id(value) for name, value in vars(fitted).items() if name.endswith("_")}
    with pytest.raises(JobError) as caught:
        fitted.fit(images, np.char.add("new ", y))
    words = "the fit before (warm_start): the classes have other names; its one layer with weights starts anew then"
    assert f"model.from: {words}, so leave it out" in str(caught.value)
    with pytest.raises(JobError, match=r"train\.lr"):
        fitted.set_params(lr=-1.0).fit(images[:, :4], np.arange(40) % 2)
    assert {name: id(value) for name, value in vars(fitted).items() if name.endswith("_")} == before
    assert fitted.predict(images[:1])[0] in y
    new = small(lr=-1.0, epochs=1)
    with pytest.raises(JobError, match=r"train\.lr"):
        new.partial_fit(images, y, classes=["dark", "light", "typo"])
    assert not hasattr(new, "classes_")


# --- chunk by chunk ---


@pytest.mark.parametrize("strategy", ["sgwu", pytest.param("layer", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("optimizer", "ema"), [pytest.param("sgd", None, marks=pytest.mark.slow), ("adamw", None), ("sgd", 0.9)]
)
def test_calls_of_partial_fit_are_epochs_of_one_training(
    images: np.ndarray, y: np.ndarray, strategy: str, optimizer: str, ema: float | None
) -> None:
    """Of the same samples, in one minibatch: weights, momentum and its bias go on from call to call, pickled or not."""
    averaged = {} if ema is None else {"ema": ema}
    tables = {"model": {"dtype": "float64"}, "train": {"schedule": "constant", **averaged}}
    model = [{"layer": "conv", "kernels": 2, "size": 3, "pad": 1}, {"layer": "dense"}]
    how: dict[str, Any] = {"strategy": strategy, "optimizer": optimizer, "batch_size": 64, "model": model}
    whole = small(**how, epochs=3, job=tables).fit(images, y)
    parts = small(**how, job={"model": {"dtype": "float64"}, "train": averaged})
    for _ in range(3):
        parts = pickle.loads(pickle.dumps(parts.partial_fit(images, y, classes=["light", "dark"])))  # noqa: S301
    np.testing.assert_allclose(parts.model_.vector, whole.model_.vector, rtol=1e-9)
    assert parts.history_[-1]["lr"] == 0.02
    again = parts.fit(images, y).model_.vector
    assert not np.allclose(again, whole.model_.vector), "a fit begins anew"


@pytest.mark.slow
def test_chunks_may_differ_in_all_but_what_the_first_one_decides(images: np.ndarray, y: np.ndarray) -> None:
    fitted = small(lr=0.05)
    for begin in (0, 10, 20, 24):
        fitted.partial_fit(images[begin : begin + 10] / 2, y[begin : begin + 10], classes=["dark", "light", "none"])
    assert fitted.predict_proba(images / 2).shape == (40, 3)
    assert fitted.score(images / 2, y) > 0.9
    lazy = da.from_array(images[30:], chunks=5)
    fitted.set_params(optimizer="adamw", lr=1e-9).partial_fit(lazy, da.from_array(y[30:]), sample_weight=np.arange(10))
    assert fitted.score(images / 2, y) > 0.9


def test_partial_fit_goes_on_from_a_fit(images: np.ndarray, y: np.ndarray) -> None:
    fitted = small().fit(images, y)
    before = np.array(fitted.model_.vector)
    np.testing.assert_allclose(fitted.set_params(lr=1e-9).partial_fit(images, y).model_.vector, before, atol=1e-6)


def test_what_partial_fit_does_not_take(images: np.ndarray, y: np.ndarray) -> None:
    with pytest.raises(ValueError, match="classes must be passed on the first call to partial_fit"):
        small().partial_fit(images, y)
    with pytest.raises(JobError, match=r"train\.schedule: partial_fit trains one epoch by one rate; give lr"):
        small(job={"train": {"schedule": "cosine"}}).partial_fit(images, y, classes=["dark", "light"])
    fitted = small().partial_fit(images, y, classes=["dark", "light"])
    with pytest.raises(ValueError, match="is not the same as on last call to partial_fit"):
        fitted.partial_fit(images, y, classes=["dark", "grey", "light"])
    with pytest.raises(ValueError, match=r"y has labels \['grey'\] that are none of the classes"):
        fitted.partial_fit(images[:2], ["dark", "grey"])
    with pytest.raises(ValueError, match=r"y has 1 class \('dark'\): give samples of 2 or more together"):
        fitted.partial_fit(images[::2], y[::2])
    with pytest.raises(ValueError, match=r"X has images of shape \(8, 7, 1\), those of the calls before had"):
        fitted.partial_fit(images[:, :, 1:], y)


# --- scikit-learn's tools ---


@pytest.mark.slow
def test_a_halving_search_gives_more_epochs_to_the_better_half(images: np.ndarray, y: np.ndarray) -> None:
    pytest.importorskip("sklearn.experimental.enable_halving_search_cv")
    how: dict[str, Any] = {"resource": "epochs", "min_resources": 1, "max_resources": 2, "factor": 2, "cv": 2}
    search = model_selection.HalvingGridSearchCV(small(), {"lr": [1e-9, 0.05]}, **how, random_state=0)
    found = search.fit(images, y).best_estimator_
    assert (search.best_params_["lr"], found.epochs, len(found.history_)) == (0.05, 2, 2)


@pytest.mark.slow
def test_pipelines_searches_and_five_folds(images: np.ndarray, y: np.ndarray) -> None:
    pipeline = pytest.importorskip("sklearn.pipeline")
    preprocessing = pytest.importorskip("sklearn.preprocessing")
    rows = images.reshape(40, -1)
    scores = model_selection.cross_val_score(small(), images, y, cv=5)
    assert (scores.shape, scores.mean() > 0.9) == ((5,), True)
    both = pipeline.make_pipeline(preprocessing.StandardScaler(), small(image_shape=(8, 8)))
    search = model_selection.GridSearchCV(both, {"cnnclassifier__lr": [1e-9, 0.05]}, cv=2).fit(rows, y)
    assert search.best_params_ == {"cnnclassifier__lr": 0.05}
    assert search.score(rows, y) == 1


@pytest.mark.slow
def test_a_search_varies_one_key_of_the_job(images: np.ndarray, y: np.ndarray) -> None:
    tables = {"train": {"momentum": 0.5, "nesterov": False}}
    search = model_selection.GridSearchCV(
        small(epochs=1, job=tables), {"job__train__momentum": [0.1, 0.9], "job__train__clip": [1.0]}, cv=2
    )
    found = search.fit(images, y).best_estimator_
    assert found.model_.job.train.momentum == search.best_params_["job__train__momentum"]
    assert (found.model_.job.train.nesterov, found.model_.job.train.clip) == (False, 1.0)
    assert tables == {"train": {"momentum": 0.5, "nesterov": False}}
    with pytest.raises(JobError, match=r"train\.momentun: unknown key; did you mean 'momentum'"):
        small().set_params(job__train__momentun=0.5).fit(images, y)
    with pytest.raises(ValueError, match="Invalid parameter"):
        small().set_params(train__momentum=0.5)


def test_fits_on_threads_take_turns(images: np.ndarray, y: np.ndarray) -> None:
    found: list[CNNClassifier] = []
    threads = [threading.Thread(target=lambda: found.append(small().fit(images, y))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.score(images, y) for each in found] == [1, 1, 1]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_fits_after_its_parent_has(images: np.ndarray, y: np.ndarray) -> None:
    """As joblib's backend `multiprocessing` has it."""
    fitted = small().fit(images, y)

    def fit() -> None:
        np.testing.assert_array_equal(small().fit(images, y).model_.vector, fitted.model_.vector)

    forked = get_context("fork").Process(target=fit)
    forked.start()
    forked.join(60)
    forked.kill()
    assert forked.exitcode == 0
    assert fitted.fit(images, y).score(images, y) == 1, "the parent goes on"


def test_a_clone_has_the_client_and_a_pickle_has_none(images: np.ndarray, y: np.ndarray) -> None:
    settings: dict[str, Any] = {"processes": False, "dashboard_address": ":0", "silence_logs": "ERROR"}
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, **settings) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        fitted = small(client=client, job={"train": {"momentum": 0.5}}).fit(images, y)
        clone = sklearn_base.clone(fitted)
        assert clone.client is client
        assert not hasattr(clone, "model_")
        copied = pickle.loads(pickle.dumps(fitted))  # noqa: S301
    assert copied.client is None
    np.testing.assert_array_equal(copied.predict(images), fitted.predict(images))
    assert copied.fit(images, y).score(images, y) == 1, "in a process of its own"


class Ears:
    def hear(self, event: Event) -> None:
        raise AssertionError(event)


def test_a_clone_tells_the_same_object_of_events() -> None:
    """A search fits clones: an object that was copied would not hear of them."""
    ears = Ears()
    assert sklearn_base.clone(small(on_event=ears.hear)).on_event.__self__ is ears


def test_what_is_no_client_and_what_is_no_epoch_is_refused(images: np.ndarray, y: np.ndarray) -> None:
    with pytest.raises(ClusterError, match="not a client of Dask"):
        small(client="tcp://host:8786").fit(images, y)
    with pytest.raises(JobError, match=r"the job has a problem:\n  train\.epochs = 0") as caught:
        small(epochs=0).fit(images, y)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"model": {"name": "quick"}}, "model = {'name': 'quick'}: give the name of a network, or a list of layers"),
        ({"model": 3}, "model = 3: give the name of a network, or a list of layers"),
        ({"model": ["conv", "dense"]}, "model.layers.1 = 'dense': write a table of keys"),
        ({"job": 3}, "job = 3: no job; give its tables, a daskcnn.Job, or the path of a job file"),
        ({"optimizer": None}, "train.optimizer = None: write a name, or a table"),
        ({"image_shape": 64}, "image_shape=64: give (height, width) or (height, width, channels)"),
        ({"image_shape": "8x8"}, "image_shape='8x8': give (height, width) or (height, width, channels)"),
        ({"random_state": 1.5}, "random_state=1.5: give a whole number, a generator of NumPy, or None"),
        ({"validation_fraction": None}, "validation_fraction=None: give a number between 0 and 1"),
        ({"on_event": "x"}, "on_event = 'x': give a function of one argument, the event"),
    ],
    ids=str,
)
def test_parameters_of_another_kind_are_refused_in_words(
    images: np.ndarray, y: np.ndarray, parameters: dict[str, Any], told: str
) -> None:
    with pytest.raises((ValueError, JobError)) as caught:
        small(**parameters).fit(
            da.from_array(images, chunks=10).map_blocks(_fail, dtype=images.dtype, meta=images[:0]), y
        )
    assert told in str(caught.value)


class Brief(CNNClassifier):
    """A classifier of one network, with fewer parameters."""

    def __init__(self, epochs: int = 2, lr: float = 0.02) -> None:
        super().__init__(model=[{"layer": "dense"}], epochs=epochs, lr=lr, optimizer="sgd", batch_size=10)


def test_a_subclass_may_have_fewer_parameters(images: np.ndarray, y: np.ndarray) -> None:
    fitted = sklearn_base.clone(Brief(epochs=3)).fit(images, y)
    np.testing.assert_array_equal(fitted.model_.vector, small().fit(images, y).model_.vector)
    fitted.set_params(job__train__lr=0.5).fit(images, y)
    assert fitted.model_.job.train.lr == 0.5, "it was not set"
    with pytest.raises(JobError, match=r"train\.optimizer: the estimator's optimizer is given too; keep one"):
        fitted.set_params(job__train__optimizer="adamw").fit(images, y)


def test_help_has_an_example_that_runs() -> None:
    (found,) = doctest.DocTestFinder(recurse=False).find(CNNClassifier, "CNNClassifier", globs={})
    assert found.examples
    assert not doctest.DocTestRunner(verbose=False).run(found).failed


def test_without_scikit_learn_all_else_works_and_the_remedy_is_named() -> None:
    code = """
import inspect, sys
sys.modules["sklearn"] = None
import daskcnn
from daskcnn import *
print(train.__name__, len(inspect.getmembers(daskcnn)) > 10)
try:
    from daskcnn import CNNClassifier
except ImportError as error:
    print(error)
try:
    daskcnn.CNNClassifier
except daskcnn.errors.UserError as error:
    print(error.remedy)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    missing = f"package scikit-learn: it is not installed; {installing('sklearn')}"
    assert told.stdout.splitlines() == ["train True", missing, installing("sklearn")], told.stderr


@pytest.mark.parametrize(("given", "first"), [(None, 8), ("auto", 8), (4, 4)])
def test_an_automatic_batch_begins_as_the_default_does_and_may_grow(
    given: Any, first: int, images: np.ndarray, y: np.ndarray
) -> None:
    seen: list[Event] = []
    fitted = small(batch_size=given, epochs=1, on_event=seen.append).fit(images, y)
    assert fitted.batch_size_ == first
    assert fitted.model_.job.train.largest_batch == ("memory" if given == "auto" else None)
    (epoch,) = [event for event in seen if isinstance(event, EpochEnded)]
    assert epoch.step_samples == (first if given == "auto" else None)
