"""The split is stratified, and depends on the seed alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from daskcnn.store.split import shuffled_order, stratified

LABELS = st.lists(st.integers(0, 4), min_size=2, max_size=80).map(np.array)


@given(labels=LABELS, share=st.floats(0, 1), seed=st.integers(0, 9))
def test_every_class_gives_its_share_and_keeps_a_sample(labels: np.ndarray, share: float, seed: int) -> None:
    test = round(share * len(labels))
    mask = stratified(labels, test, seed)
    assert mask.sum() <= test
    for c in np.unique(labels):
        of_class = labels == c
        taken, quota = int(mask[of_class].sum()), of_class.sum() * test / len(labels)
        assert taken < of_class.sum()
        assert taken < quota + 1
        assert taken > quota - 1 or taken == of_class.sum() - 1
    if test <= len(labels) - len(np.unique(labels)) and all(
        np.ceil((labels == c).sum() * test / len(labels)) < (labels == c).sum() for c in np.unique(labels)
    ):
        assert mask.sum() == test


@given(labels=LABELS)
def test_the_seed_decides(labels: np.ndarray) -> None:
    np.testing.assert_array_equal(stratified(labels, len(labels) // 3, 1), stratified(labels, len(labels) // 3, 1))


def test_another_seed_is_another_split() -> None:
    labels = np.arange(400) % 4
    masks = {stratified(labels, 100, seed).tobytes() for seed in range(8)}
    assert len(masks) == 8


def test_rows_of_labels_count_as_classes() -> None:
    rows = np.array([[0, 1]] * 40 + [[1, 1]] * 20 + [[1, 0]] * 20)
    mask = stratified(rows, 20, 0)
    assert [mask[:40].sum(), mask[40:60].sum(), mask[60:].sum()] == [10, 5, 5]


@given(seed=st.integers(0, 99))
def test_rows_that_no_other_sample_has_give_their_share_too(seed: int) -> None:
    rows = (np.random.default_rng(seed).random((100, 30)) < 0.5).astype(np.uint8)
    assert len(np.unique(rows, axis=0)) == 100
    assert stratified(rows, 20, seed).sum() == 20


@given(seed=st.integers(0, 99), rare=st.integers(1, 8))
def test_every_label_keeps_a_sample_outside(seed: int, rare: int) -> None:
    rows = (np.random.default_rng(seed).random((60, 12)) < 0.3).astype(np.uint8)
    rows[:, 4] = 0
    rows[:rare, 4] = 1
    mask = stratified(rows, 55, seed)
    assert mask.sum() >= 40
    assert not (rows[mask].any(axis=0) & ~rows[~mask].any(axis=0)).any()


@given(samples=st.integers(0, 200), seed=st.integers(0, 9))
def test_an_order_is_a_permutation(samples: int, seed: int) -> None:
    assert sorted(shuffled_order(samples, seed, 0).tolist()) == list(range(samples))
