"""Training on mixed images: the gradients are those of the mixed labels, weights count, layers may be sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daskcnn.arrays import Device
from daskcnn.job.tables import Job
from daskcnn.nn import LOSSES, Context, StepPace, loss_and_gradients
from daskcnn.nn.losses import SoftmaxCrossEntropy, mixed_loss
from daskcnn.sharded.passes import loss_of
from daskcnn.store import Batch, BatchPlan, Dataset, load_batch
from daskcnn.store.augmentation.steps import Mixup
from daskcnn.training.replica import Replica, presentations
from tests.toy_data import toy_dataset

MIXUP = [{"step": "mirror"}, {"step": "mixup", "alpha": 1.0}]
N, CLASSES = 6, 5
SHARES = np.array([0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
PARTNERS = np.roll(np.arange(N), -1)
OF_LABELS = [name for name, loss in LOSSES.items() if loss.labels != "image"]


def one_hot(labels: np.ndarray) -> np.ndarray:
    return np.eye(CLASSES)[labels] if labels.ndim == 1 else labels.astype(float)


@pytest.mark.parametrize("name", OF_LABELS)
def test_the_gradient_is_that_of_the_mixed_label(name: str, device: Device, rng: np.random.Generator) -> None:
    loss, scores = LOSSES[name], rng.standard_normal((N, CLASSES))
    several = loss.labels == "several"
    labels = rng.integers(0, 2, (N, CLASSES)).astype(np.uint8) if several else rng.integers(0, CLASSES, N)
    move, host = device.backend.from_host, device.backend.to_host
    targets, others = (labels, SHARES), (labels[PARTNERS], 1 - SHARES)
    own, theirs = ((move(a), move(b)) for a, b in (targets, others))
    value, dscores = mixed_loss(loss, move(scores), own, theirs, device.xp)
    soft = SHARES[:, None] * one_hot(labels) + (1 - SHARES[:, None]) * one_hot(labels[PARTNERS])
    answers = {"softmax": loss.probabilities(scores), "sigmoid": 1 / (1 + np.exp(-scores)), "squared": scores}[name]
    np.testing.assert_allclose(host(dscores), (answers - soft) / N, rtol=1e-9, atol=1e-12)
    if name != "squared":
        wrong = 0 if not several else ((1 - soft) * np.log(1 - answers)).sum(axis=1)
        expected = -((soft * np.log(answers)).sum(axis=1) + wrong).mean()
        assert device.backend.scalar(value) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", OF_LABELS)
def test_a_sample_that_is_mixed_with_itself_is_itself(name: str, rng: np.random.Generator) -> None:
    loss, scores = LOSSES[name], rng.standard_normal((N, CLASSES))
    labels = rng.integers(0, 2, (N, CLASSES)) if loss.labels == "several" else rng.integers(0, CLASSES, N)
    plain, whole = loss(scores, labels), mixed_loss(loss, scores, (labels, SHARES), (labels, 1 - SHARES), np)
    assert whole[0] == pytest.approx(float(plain[0]))
    np.testing.assert_allclose(whole[1], plain[1], rtol=1e-9, atol=1e-15)
    alone = mixed_loss(loss, scores, (labels, None), None, np)
    np.testing.assert_array_equal(alone[1], plain[1])


def test_smoothed_labels_are_mixed_too(rng: np.random.Generator) -> None:
    scores, labels = rng.standard_normal((N, CLASSES)), rng.integers(0, CLASSES, N)
    loss = SoftmaxCrossEntropy(0.2)
    _, dscores = mixed_loss(loss, scores, (labels, SHARES), (labels[PARTNERS], 1 - SHARES), np)
    hard = SHARES[:, None] * one_hot(labels) + (1 - SHARES[:, None]) * one_hot(labels[PARTNERS])
    np.testing.assert_allclose(dscores, (loss.probabilities(scores) - 0.8 * hard - 0.2 / CLASSES) / N, atol=1e-12)


def test_a_sharded_network_has_the_same_loss(device: Device, rng: np.random.Generator) -> None:
    scores, labels = rng.standard_normal((N, CLASSES)), rng.integers(0, CLASSES, N)
    others = labels[PARTNERS], 1 - SHARES
    dscores, score = loss_of(LOSSES["softmax"], scores, labels, device, 0.5, SHARES, others)
    value, expected = mixed_loss(LOSSES["softmax"], scores, (labels, SHARES), others, np)
    np.testing.assert_allclose(dscores, expected / 2, rtol=1e-9)
    assert score.loss == pytest.approx(float(value))
    assert score.correct == (scores.argmax(axis=1) == labels).sum()


# --- a replica ---


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(4)


def job_of(*, augment: Any = MIXUP, views: str = "none", units: int = 10, **train: Any) -> Job:
    layers = [{"layer": "conv", "kernels": 3, "size": 3}, {"layer": "relu"}, {"layer": "dense", "units": units}]
    usual = {"batch_size": 16, "epochs": 2, "lr": 0.05}
    return Job.model_validate(
        {
            "data": {"validation": 30, "augment": augment, "views": views},
            "model": {"layers": layers, "dtype": "float64"},
            "train": usual | train,
        }
    )


def replica_of(dataset: Dataset, **options: Any) -> Replica:
    return Replica(job_of(**options), dataset, Device(), clock=lambda: 0.0)


def mixed_batch(replica: Replica) -> Batch:
    (plan,) = presentations(replica.job, ((0, 200),), 16, 0, None)
    return load_batch(replica.dataset, replica.dataset.train, plan, "float64", np.arange(16))


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_step_counts_labels_by_their_shares(tmp_path: Path, several: bool, weighted: bool) -> None:
    dataset = toy_dataset(tmp_path, size=6, several=several, weighted=weighted)
    replica = replica_of(dataset, **({} if several else {"class_weights": "balanced"}))
    batch, partners = mixed_batch(replica), replica.partners(mixed_batch(replica))
    assert batch.mixture is not None
    assert partners is not None
    shares, of = batch.mixture.shares, batch.mixture.partners
    np.testing.assert_array_equal(partners[0], batch.labels[of])
    plain = Batch(batch.x, batch.labels, batch.keys, batch.weights)
    alone = replica.sample_weights(plain)
    alone = np.ones(16) if alone is None else alone
    own, others = replica.sample_weights(batch), partners[1]
    assert own is not None
    assert others is not None
    np.testing.assert_allclose(own, alone * shares, rtol=1e-12)
    np.testing.assert_allclose(others, alone[of] * (1 - shares), rtol=1e-12)
    params, state = replica.layout.views(replica.weights)
    value, _, grads, _ = loss_and_gradients(
        replica.model,
        params,
        state,
        batch.x,
        batch.labels,
        replica.training_loss,
        Context(Device()),
        alone * shares,
        (batch.labels[of], alone[of] * (1 - shares)),
    )
    before, lr = replica.host_weights(), 0.1
    loss, _ = replica.step(batch, StepPace(lr))
    assert loss == pytest.approx(float(value))
    assert (replica.host_weights() != before).any()
    assert grads["conv1"]["w"].shape == (3, 3, 3, 3)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_mixed_image_that_is_reconstructed_is_its_own_label(tmp_path: Path, weighted: bool) -> None:
    dataset = toy_dataset(tmp_path, size=6, weighted=weighted)
    replica = replica_of(dataset, units=6 * 6 * 3, loss="reconstruction")
    batch = mixed_batch(replica)
    assert batch.mixture is not None
    assert replica.partners(batch) is None
    weights, given = replica.sample_weights(batch), np.ones(16)
    if weighted:
        alone = replica.sample_weights(Batch(batch.x, batch.labels, batch.keys, batch.weights))
        shares, of = batch.mixture.shares, batch.mixture.partners
        assert weights is not None
        assert alone is not None
        given = shares * alone + (1 - shares) * alone[of]
        np.testing.assert_allclose(weights, given, rtol=1e-12)
    else:
        assert weights is None
    params, state = replica.layout.views(replica.weights)
    scores, _, _ = replica.model.forward(params, state, batch.x, Context(Device()))
    errors = ((scores - batch.x.transpose(2, 0, 1, 3).reshape(16, -1)) ** 2).mean(axis=1)
    loss, right = replica.step(batch, StepPace(0.1))
    assert loss == pytest.approx((given * errors).mean(), rel=1e-9)
    assert right is None


def test_images_that_are_not_mixed_have_no_partners(tmp_path: Path) -> None:
    replica = replica_of(toy_dataset(tmp_path, size=6), augment="crop-mirror")
    batch = mixed_batch(replica)
    assert batch.mixture is None
    assert replica.partners(batch) is None
    assert replica.sample_weights(batch) is None


def test_mixing_is_learnt_from(tmp_path: Path) -> None:
    dataset = toy_dataset(tmp_path, train=70, size=6)
    replica = replica_of(dataset)
    first = replica.train(((0, 40),), 40, presentation=0, progress=(0.0, 0.0)).score.loss
    for epoch in range(1, 40):
        last = replica.train(((0, 40),), 40, presentation=epoch, progress=(0.0, 0.0)).score.loss
    assert last < 0.7 * first


def test_the_steps_of_a_job_reach_the_loader() -> None:
    (plan,) = presentations(job_of(), ((0, 200),), 16, 3, None)
    assert isinstance(plan, BatchPlan)
    assert isinstance(plan.augment, tuple)
    assert plan.augment[-1] == Mixup(alpha=1.0)


# --- views ---


def test_an_evaluation_over_views_is_that_of_the_averaged_scores(tmp_path: Path) -> None:
    dataset = toy_dataset(tmp_path, size=6)
    replica, found = replica_of(dataset), list[np.ndarray]()
    mirrored = replica.evaluate(dataset.test, 0, 40, views="mirror", look=lambda scores, _: found.append(scores))
    plain = replica.evaluate(dataset.test, 0, 40, look=lambda scores, _: found.append(scores))
    assert mirrored.loss != plain.loss
    labels = dataset.test.labels()[:40]
    assert mirrored.correct == (found[0].argmax(axis=1) == labels).sum()
