"""AUC against its definition: the share of pairs that the scores put in order."""

from __future__ import annotations

import operator
from functools import reduce
from itertools import pairwise, product
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskcnn.events import Judged
from daskcnn.nn import score
from daskcnn.nn.losses import softmax
from daskcnn.nn.score import ClassScores, Collected, Score, areas_under_curves


def counted(scores: np.ndarray, labels: np.ndarray) -> float | None:
    """Every pair of a sample of the class and another one, looked at."""
    areas = []
    for c in range(scores.shape[1]):
        pairs = list(product(scores[labels == c, c], scores[labels != c, c]))
        if pairs:
            areas.append(sum((own > other) + 0.5 * (own == other) for own, other in pairs) / len(pairs))
    return sum(areas) / len(areas) if areas else None


@given(st.data())
def test_auc_is_the_share_of_pairs_in_order_ties_counting_half(data: st.DataObject) -> None:
    samples, classes = data.draw(st.integers(1, 25)), data.draw(st.integers(1, 4))
    few = st.integers(0, 5)  # so that there are ties
    scores = np.array(data.draw(st.lists(few, min_size=samples * classes, max_size=samples * classes)), np.float32)
    labels = np.array(data.draw(st.lists(st.integers(0, classes - 1), min_size=samples, max_size=samples)))
    scores = scores.reshape(samples, classes)
    expected, found = counted(scores, labels), ClassScores(scores, labels).auc
    assert found == expected if expected is None else found == pytest.approx(expected, abs=1e-12)


def test_right_order_is_1_wrong_order_0_and_no_order_one_half() -> None:
    labels = np.array([0, 0, 1, 1])
    right = np.array([[4.0, 1], [3, 2], [2, 3], [1, 4]])
    assert ClassScores(right, labels).auc == 1
    assert ClassScores(-right, labels).auc == 0
    assert ClassScores(np.ones((4, 2)), labels).auc == 0.5


def test_a_class_that_is_not_there_does_not_count_and_one_alone_has_no_auc() -> None:
    scores = np.array([[3.0, 1, 9], [1.0, 3, 9], [2.0, 2, 9]])
    assert ClassScores(scores, np.array([0, 1, 1])).auc == ClassScores(scores[:, :2], np.array([0, 1, 1])).auc
    assert ClassScores(scores, np.array([1, 1, 1])).auc is None


def test_several_labels_have_the_auc_of_each_by_itself() -> None:
    rng = np.random.default_rng(3)
    scores, labels = rng.integers(0, 6, (40, 3)).astype(np.float32), rng.integers(0, 2, (40, 3)).astype(np.uint8)
    labels[:, 2] = 1
    each = [counted(scores[:, [c]] * [[-1, 1]], labels[:, c]) for c in (0, 1)]  # of two classes it is the same twice
    assert areas_under_curves(scores, labels) == [*(pytest.approx(area) for area in each), None]
    assert ClassScores(scores, labels).auc == pytest.approx(np.mean([area or 0.0 for area in each]))
    assert ClassScores(scores[:, 2:], labels[:, 2:]).auc is None


@pytest.mark.parametrize("several", [False, True])
def test_auc_is_scikit_learns(several: bool) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(4)
    scores = softmax(rng.standard_normal((60, 4))).round(2)
    if several:
        labels = rng.integers(0, 2, (60, 4))
        expected = metrics.roc_auc_score(labels, scores, average=None)
    else:
        labels = np.arange(60) % 4
        expected = metrics.roc_auc_score(np.eye(4)[labels], scores, average=None)
    assert areas_under_curves(scores, labels) == pytest.approx(list(expected), rel=1e-12)


# --- parts that add up ---


def collected(scores: Any, labels: Any, cuts: list[int], batch: int) -> list[ClassScores | None]:
    """What those who judge the parts between the cuts return, in batches of so many samples."""
    parts = []
    for lo, hi in pairwise([0, *cuts, len(labels)]):
        own = Collected(lo, len(labels))
        for begin in range(lo, hi, batch):
            end = min(begin + batch, hi)
            own.add(scores[begin:end], labels[begin:end])
        parts.append(own.done())
    return parts


@given(st.data())
def test_parts_add_up_to_the_auc_of_the_whole_to_the_last_bit_in_any_order(data: st.DataObject) -> None:
    samples, classes = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 4))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    scores = rng.integers(0, 8, (samples, classes)).astype(np.float32) / 8  # with ties
    labels = rng.integers(0, classes, samples)
    cuts = sorted(data.draw(st.lists(st.integers(0, samples), max_size=4)))
    parts = collected(scores, labels, cuts, data.draw(st.integers(1, 20)))
    known = [part for part in data.draw(st.permutations(parts)) if part is not None]
    assert reduce(operator.add, known).auc == ClassScores(scores, labels).auc


@given(st.integers(1, 40), st.integers(1, 7), st.lists(st.integers(0, 200), max_size=5))
def test_of_a_large_split_every_nth_sample_counts_however_it_is_cut(batch: int, every: int, cuts: list[int]) -> None:
    rng = np.random.default_rng(3)
    scores, labels = rng.random((200, 10), np.float32), rng.integers(0, 10, 200)
    with mock.patch.object(score, "MOST", 200 * 10 // every):
        parts = [part for part in collected(scores, labels, sorted(cuts), batch) if part is not None]
        step = -(-200 * 10 // score.MOST)
    total = reduce(operator.add, parts)
    np.testing.assert_array_equal(total.scores, scores[::step])
    assert total.scores.size <= max(200 * 10 // every, 10)
    assert total.auc == ClassScores(scores[::step], labels[::step]).auc


def test_more_classes_than_are_kept_leave_one_sample_of_each_stride() -> None:
    with mock.patch.object(score, "MOST", 5):
        (part,) = collected(np.ones((4, 10)), np.arange(4), [], 4)
    assert part is not None
    assert len(part.labels) == 1
    assert part.auc is None


def test_scores_that_are_no_numbers_have_no_auc() -> None:
    assert ClassScores(np.full((2, 2), np.nan, np.float32), np.array([0, 1])).auc is None


def test_scores_add_up_with_their_classes_and_only_where_every_part_has_them() -> None:
    scores, labels = np.array([[0.9, 0.1], [0.4, 0.6], [0.7, 0.3]], np.float32), np.array([0, 1, 1])
    one, two = (Score(1.0, 1, n, ClassScores(scores[a:b], labels[a:b])) for n, a, b in ((2, 0, 2), (1, 2, 3)))
    assert (Score(0.0, 0, 0) + one + two).judged == Judged(
        accuracy=2 / 3, loss=2 / 3, auc=ClassScores(scores, labels).auc
    )
    assert (one + Score(1.0, 1, 1)).judged.auc is None
    assert (Score(0.0, 0, 0) + Score(0.0, 0, 0)).judged == Judged()
    assert one == Score(1.0, 1, 2), "what the AUC is made of is no part of a score's value"
