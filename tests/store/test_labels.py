"""Labels as people have them become numbers with names."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from daskcnn.errors import DataError
from daskcnn.store.foreign.labels import numbered


@pytest.mark.parametrize(
    ("labels", "classes", "values", "names"),
    [
        (np.array([7, 3, 7]), None, [1, 0, 1], ("3", "7")),
        (np.array(["dog", "cat", "dog"]), None, [1, 0, 1], ("cat", "dog")),
        (np.array(["dog", "cat", "dog"], np.dtypes.StringDType()), None, [1, 0, 1], ("cat", "dog")),
        (np.array(["dog", "cat"], object), ["dog", "cat", "cow"], [0, 1], ("dog", "cat", "cow")),
        (np.array([True, False]), None, [1, 0], ("False", "True")),
        (np.array([1.0, 0.0, 2.0]), ["a", "b", "c"], [1, 0, 2], ("a", "b", "c")),
        (np.array([-1, 1]), None, [0, 1], ("-1", "1")),
        (np.array([3, 1], object), None, [1, 0], ("1", "3")),
    ],
)
def test_one_class_a_sample(
    labels: npt.NDArray[Any], classes: list[str] | None, values: list[int], names: tuple[str, ...]
) -> None:
    found = numbered(labels, classes)
    assert (found.values.tolist(), found.classes) == (values, names)


def test_rows_are_several_labels() -> None:
    found = numbered(np.array([[True, False], [True, True]]))
    assert found.values.dtype == np.uint8
    assert (found.values.tolist(), found.classes) == ([[1, 0], [1, 1]], ("0", "1"))


@pytest.mark.parametrize(
    ("labels", "classes", "words"),
    [
        (np.array([0, 1, 5]), ["a", "b"], "sample 2 has 5, which is none of 2 classes"),
        (np.array(["a", "z"]), ["a", "b"], "sample 1 has 'z', which is none of 2 classes"),
        (np.array([0, 1]), ["a", "a"], "classes: 'a' stands there twice; give each class a name of its own"),
        (np.array([0.0, 0.5]), None, "sample 1 has 0.5, which is no whole number; give one integer or string"),
        (np.array([0.0, 1.0, np.nan]), None, "sample 2 has nan, which is no whole number"),
        (np.array([None, "a"], object), None, "sample 0 has None; give one integer or string for each image"),
        (np.array([0.0, np.inf]), None, "sample 1 has inf, which is no whole number"),
        (np.array([0, 2**70], object), None, "sample 1 has 1180591620717411303424"),
        (np.array([[1, 1]]), ["a"], "1 names for labels with 2 columns; give a name for each column"),
        (np.array([[1, 1]]), [], "0 names for labels with 2 columns"),
        (np.array([[1, 1]]), ["a", "a"], "'a' stands there twice"),
        (np.array([[0, 2]]), None, "sample 0, column 1 has 2"),
        (np.zeros((2, 2, 2)), None, r"an array of shape \(2, 2, 2\)"),
        (np.zeros((2, 0)), None, r"an array of shape \(2, 0\)"),
    ],
)
def test_what_is_no_label_is_named(labels: npt.NDArray[Any], classes: list[str] | None, words: str) -> None:
    with pytest.raises(DataError, match=words):
        numbered(labels, classes)
