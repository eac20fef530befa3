"""What users give an estimator: shapes, number types, labels and weights. No cluster is needed."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
import pytest

from daskcnn.estimator.classifier import CNNClassifier
from daskcnn.estimator.fit_job import merged
from daskcnn.estimator.samples import (
    as_images,
    checked_weights,
    class_names,
    encode_labels,
    held_out,
    image_shape_of,
    stored_dtype,
)


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        *((name, name) for name in ("uint8", "uint16", "int16", "float16", "float32", "float64")),
        *(("bool", "uint8"), ("int8", "int16"), (">f4", "float32"), ("longdouble", "float64")),
        *((name, "float64") for name in ("int32", "int64", "uint32", "uint64")),
    ],
)
def test_images_are_kept_in_their_number_type_or_one_that_holds_it(given: str, stored: str) -> None:
    assert stored_dtype(given) == stored


@pytest.mark.parametrize("given", ["complex64", "U3", "M8[s]", "O"])
def test_what_is_no_real_number_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match="real numbers"):
        stored_dtype(given)


@pytest.mark.parametrize(
    ("shape", "wanted", "found"),
    [
        ((5, 12), None, (1, 12, 1)),
        ((5, 12), (2, 2, 3), (2, 2, 3)),
        ((5, 12), (3, 4), (3, 4, 1)),
        ((5, 4, 6), None, (4, 6, 1)),
        ((5, 4, 6, 2), None, (4, 6, 2)),
        ((5, 4, 6, 2), (4, 6, 2), (4, 6, 2)),
    ],
)
def test_images_are_found_in_arrays_of_two_to_four_dimensions(
    shape: tuple[int, ...], wanted: tuple[int, ...] | None, found: tuple[int, ...]
) -> None:
    assert image_shape_of(shape, wanted) == found


@pytest.mark.parametrize(
    ("shape", "wanted", "problem"),
    [
        ((5, 12), (2, 5), "12 features"),
        ((5,), None, "Expected 2D array"),
        ((5, 1, 1, 1, 1), None, "3 or 4 dimensions"),
        ((5, 4, 6), (4, 5), "leave image_shape out"),
        ((5, 12), (0, 12), "give"),
        ((5, 12), (1, 2, 3, 2), "give"),
    ],
)
def test_an_image_shape_that_does_not_fit_is_refused(
    shape: tuple[int, ...], wanted: tuple[int, ...] | None, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        image_shape_of(shape, wanted)


@pytest.mark.parametrize("made", [np.asarray, lambda X: da.from_array(X, chunks=(2, -1))])
def test_rows_become_images_without_being_computed(made: Any) -> None:
    X = np.arange(36, dtype=np.int64).reshape(3, 12)
    images = as_images(made(X), (2, 2, 3))
    assert (type(images), images.shape, images.dtype) == (type(made(X)), (3, 2, 2, 3), np.float64)
    np.testing.assert_array_equal(np.asarray(images).reshape(3, 12), X)


@pytest.mark.parametrize(
    "y", [["b", "a", "b"], [2.0, -1.0, 2.0], [True, False, True], np.array(["b", "a", "b"], object)]
)
def test_labels_are_places_among_sorted_classes(y: Any) -> None:
    classes, labels = encode_labels(np.asarray(y))
    assert labels.tolist() == [1, 0, 1]
    assert (classes[labels] == np.asarray(y)).all()


DAY = np.datetime64("2026-01-01")


@pytest.mark.parametrize(
    "y",
    [
        np.array(["a", "b", None, "a"], object),
        np.array(["a", "b", np.nan, "a"], object),
        np.array([DAY, DAY + 1, np.datetime64("NaT"), DAY]),
        [0.0, 1.0, np.nan, 0.0],
        [0.0, 1.0, np.inf, 0.0],
    ],
    ids=["None", "NaN among texts", "NaT", "NaN", "infinity"],
)
def test_a_missing_label_is_no_class(y: Any) -> None:
    with pytest.raises(ValueError, match=r"Input y contains NaN, .* in sample 2: leave out samples without a label"):
        CNNClassifier().fit(np.zeros((4, 8, 8)), y)


@pytest.mark.parametrize("values", [["a", "b", None, "a"], [DAY, DAY + 1, None, DAY]], ids=["texts", "dates"])
def test_a_missing_value_of_pandas_is_no_class(values: list[Any]) -> None:
    pandas = pytest.importorskip("pandas")
    kind = "string" if values[0] == "a" else "datetime64[s]"
    with pytest.raises(ValueError, match=r"Input y contains NaN, .* in sample 2"):
        CNNClassifier().fit(np.zeros((4, 8, 8)), pandas.Series(values, dtype=kind))


def test_one_class_is_refused() -> None:
    with pytest.raises(ValueError, match="1 class"):
        encode_labels(np.array([3, 3]))


def test_classes_that_print_alike_are_numbered() -> None:
    assert class_names(np.array([1, 2])) == ("1", "2")
    assert class_names(np.array([1, "1"], object)) == ("0: 1", "1: 1")


def test_weights_are_one_a_sample() -> None:
    assert checked_weights(None, 3) is None
    assert checked_weights(2, 3) is None, "all alike"
    assert checked_weights([1, 1, 1], 3) is None
    found = checked_weights(np.array([1, 2, 0]), 3)
    assert found is not None
    assert (found.dtype.name, found.tolist()) == ("float32", [1, 2, 0])


@pytest.mark.parametrize("weights", [[1, 2], [[1], [2], [3]], [1, 2, -1], [1, 2, np.nan], [0, 0, 0]])
def test_wrong_weights_are_refused(weights: Any) -> None:
    with pytest.raises(ValueError, match="sample_weight"):
        checked_weights(weights, 3)


def test_the_held_out_part_leaves_samples_to_train_on() -> None:
    assert [held_out(n, 0.1) for n in (2, 10, 104)] == [1, 1, 10]
    assert held_out(3, 0.99) == 2
    for fraction in (0, 1, -1):
        with pytest.raises(ValueError, match="validation_fraction"):
            held_out(10, fraction)


def test_a_job_s_tables_are_laid_over_the_estimator_s() -> None:
    below = {"train": {"epochs": 1, "schedule": {"name": "step", "every": 3}}, "data": {"name": "x"}}
    over = {"train": {"schedule": {"every": 2}}, "rule": {"every": 5}}
    assert merged(below, over) == {
        "train": {"epochs": 1, "schedule": {"name": "step", "every": 2}},
        "data": {"name": "x"},
        "rule": {"every": 5},
    }
