"""AUC against its definition: the share of pairs that the scores put in order."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskcnn.nn.auc import area_under_curve


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
    expected, found = counted(scores, labels), area_under_curve(scores, labels)
    assert found == expected if expected is None else found == pytest.approx(expected, abs=1e-12)


def test_right_order_is_1_wrong_order_0_and_no_order_one_half() -> None:
    labels = np.array([0, 0, 1, 1])
    right = np.array([[4.0, 1], [3, 2], [2, 3], [1, 4]])
    assert area_under_curve(right, labels) == 1
    assert area_under_curve(-right, labels) == 0
    assert area_under_curve(np.ones((4, 2)), labels) == 0.5


def test_a_class_that_is_not_there_does_not_count_and_one_alone_has_no_auc() -> None:
    scores = np.array([[3.0, 1, 9], [1.0, 3, 9], [2.0, 2, 9]])
    assert area_under_curve(scores, np.array([0, 1, 1])) == area_under_curve(scores[:, :2], np.array([0, 1, 1]))
    assert area_under_curve(scores, np.array([1, 1, 1])) is None
