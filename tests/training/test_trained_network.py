"""A trained network looks at images."""

from __future__ import annotations

import numpy as np
import pytest

from daskcnn.arrays import Device
from daskcnn.errors import DataError
from daskcnn.job.resolve import resolve
from daskcnn.store import open_dataset
from daskcnn.store.image_facts import Facts
from daskcnn.training import trained_network as module
from daskcnn.training.replica import Replica
from daskcnn.training.trained_network import Classifier
from tests.rounding_of_networks import of_probabilities
from tests.tiny_runs import CLASSES, random_state, tiny_job


@pytest.fixture
def network(path: str) -> Classifier:
    job = resolve(tiny_job(path))
    return Classifier(job, Facts.of(open_dataset(str(job.data.path))), random_state(job).weights)


def images(count: int) -> np.ndarray:
    return np.random.default_rng(2).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)


def test_probabilities(network: Classifier) -> None:
    found = network.predict(images(7))
    assert found.shape == (7, len(CLASSES))
    assert found.min() >= 0
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-6)
    assert len(np.unique(found.round(4), axis=0)) == 7  # different images are different


def test_an_image_is_judged_alike_in_any_company(network: Classifier, monkeypatch: pytest.MonkeyPatch) -> None:
    together, allowed = network.predict(images(7)), of_probabilities(network, images(7))
    monkeypatch.setattr(module, "BATCH", 3)
    np.testing.assert_allclose(network.predict(images(7)), together, rtol=allowed)
    np.testing.assert_allclose(network.predict(images(7)[4:5]), together[4:5], rtol=allowed)


def test_no_images_no_probabilities(network: Classifier) -> None:
    assert network.predict(images(0)).shape == (0, len(CLASSES))


def test_large_scores_do_not_overflow(network: Classifier) -> None:
    network.weights[...] *= 1e4
    found = network.predict(images(3))
    assert np.isfinite(found).all()


def test_it_agrees_with_the_evaluation_of_training(network: Classifier) -> None:
    dataset = open_dataset(str(network.job.data.path))
    pictures, labels = dataset.test.read(0, len(dataset.test))
    replica = Replica(network.job, dataset, Device(), clock=lambda: 0.0)
    replica.adopt(network.weights)
    score = replica.evaluate(dataset.test, 0, len(dataset.test))
    found = network.predict(pictures)
    assert score.correct == (found.argmax(axis=1) == labels).sum()
    assert score.loss == pytest.approx(-np.log(found[np.arange(60), labels]).mean(), rel=1e-4)


def test_scores_of_views_are_averaged_before_they_are_probabilities(network: Classifier) -> None:
    seen = images(3)
    plain, mirrored = network.predict(seen), network.predict(np.ascontiguousarray(seen[:, :, ::-1]))
    network.views = "mirror"
    logs = (np.log(plain) + np.log(mirrored)) / 2
    expected = np.exp(logs) / np.exp(logs).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(network.predict(seen), expected, rtol=1e-4)


@pytest.mark.parametrize(
    "wrong",
    [images(2)[0], images(2)[:, :, :, :1], images(2)[:, :4], images(2).astype(np.float32), images(2).astype(np.int64)],
    ids=["one image", "grey", "small", "float", "int"],
)
def test_other_images_are_refused(network: Classifier, wrong: np.ndarray) -> None:
    with pytest.raises(DataError, match=r"the network wants uint8 \(N, 8, 8, 3\)") as caught:
        network.predict(wrong)
    assert str(wrong.dtype) in str(caught.value)
