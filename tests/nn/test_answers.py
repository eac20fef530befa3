"""Counts of right and wrong answers against scikit-learn's, and against looking at every sample."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

from daskcnn.nn import score
from daskcnn.nn.score import ClassAnswers, LabelAnswers, shares

CLASSES, SAMPLES = 12, 200


def _classes(ties: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Scores and labels; one class is never there, another never answered."""
    rng = np.random.default_rng(5)
    scores = rng.integers(0, 4, (SAMPLES, CLASSES)).astype(np.float32) if ties else rng.random((SAMPLES, CLASSES))
    scores[:, 7] = -1
    return scores, np.where((found := rng.integers(0, CLASSES, SAMPLES)) == 3, 4, found)


def _several() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(6)
    scores, labels = rng.standard_normal((SAMPLES, 4)), rng.integers(0, 2, (SAMPLES, 4)).astype(np.uint8)
    scores[:, 1], labels[:, 2] = -1, 0
    return scores, labels


def _counted(counts: Any, scores: np.ndarray, labels: np.ndarray) -> Any:
    for lo, hi in ((0, 90), (90, 90), (90, 91), (91, SAMPLES)):
        counts.add(scores[lo:hi], labels[lo:hi])
    return counts


def _compared(found: list[float | None], expected: np.ndarray) -> None:
    assert [-1 if each is None else each for each in found] == pytest.approx(list(np.nan_to_num(expected, nan=-1)))


def test_precision_recall_and_confusion_are_scikit_learns() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    scores, labels = _classes()
    counts, every = _counted(ClassAnswers(CLASSES), scores, labels), list(range(CLASSES))
    given = labels, scores.argmax(axis=1)
    precision, recall, _, present = metrics.precision_recall_fscore_support(*given, labels=every, zero_division=np.nan)
    _compared(shares(counts.hits, counts.answered), precision)
    _compared(shares(counts.hits, counts.present), recall)
    np.testing.assert_array_equal(counts.present, present)
    np.testing.assert_array_equal(counts.confusion, metrics.confusion_matrix(*given, labels=every))
    top = metrics.top_k_accuracy_score(labels, scores, k=5, labels=every, normalize=False)
    assert counts.in_top == top


def test_precision_and_recall_by_label_are_scikit_learns() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    scores, labels = _several()
    counts = _counted(LabelAnswers(4), scores, labels)
    precision, recall, _, present = metrics.precision_recall_fscore_support(labels, scores > 0, zero_division=np.nan)
    _compared(shares(counts.hits, counts.answered), precision)
    _compared(shares(counts.hits, counts.present), recall)
    np.testing.assert_array_equal(counts.present, present)


@pytest.mark.parametrize("ties", [False, True])
def test_classes_are_counted_sample_by_sample(ties: bool) -> None:
    scores, labels = _classes(ties)
    counts = _counted(ClassAnswers(CLASSES), scores, labels)
    confusion, in_top = np.zeros((CLASSES, CLASSES), np.int64), 0
    for own, label in zip(scores.tolist(), labels.tolist(), strict=True):
        order = sorted(range(CLASSES), key=lambda c: (-own[c], c))
        confusion[label, order[0]] += 1
        in_top += label in order[:5]
    np.testing.assert_array_equal(counts.confusion, confusion)
    np.testing.assert_array_equal(counts.present, confusion.sum(axis=1))
    np.testing.assert_array_equal(counts.answered, confusion.sum(axis=0))
    np.testing.assert_array_equal(counts.hits, confusion.diagonal())
    assert counts.in_top == in_top


def test_labels_are_counted_sample_by_sample() -> None:
    scores, labels = _several()
    counts = _counted(LabelAnswers(4), scores, labels)
    pairs = [[(own[c] > 0, bool(has[c])) for own, has in zip(scores, labels, strict=True)] for c in range(4)]
    assert counts.hits.tolist() == [each.count((True, True)) for each in pairs]
    assert counts.answered.tolist() == [sum(yes for yes, _ in each) for each in pairs]
    assert counts.present.tolist() == [sum(has for _, has in each) for each in pairs]


def test_a_share_of_nothing_is_not_known() -> None:
    assert shares(np.array([0, 1]), np.array([0, 4])) == [None, 0.25]


def test_a_sample_with_a_score_that_is_no_number_has_no_answer() -> None:
    counts, scores = ClassAnswers(CLASSES), np.zeros((4, CLASSES))
    scores[0], scores[1, 1], scores[2, 0], scores[3, 11] = np.nan, np.nan, np.inf, 1
    counts.add(scores, np.array([0, 1, 5, 11]))
    assert counts.in_top == counts.hits.sum() == counts.answered.sum() == counts.hits[11] == 1
    assert counts.confusion is not None
    assert counts.confusion.sum() == 1
    assert counts.present.sum() == 4


def test_of_very_many_classes_there_is_no_matrix() -> None:
    with mock.patch.object(score, "MOST_CONFUSED", CLASSES - 1):
        counts = _counted(ClassAnswers(CLASSES), *_classes())
    assert counts.confusion is None
    whole = _counted(ClassAnswers(CLASSES), *_classes())
    np.testing.assert_array_equal(counts.hits, whole.hits)
    np.testing.assert_array_equal(counts.answered, whole.answered)
