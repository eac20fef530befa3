"""Metrics are means over samples, whatever the parts that judge them; a wrong one is refused by name."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskcnn.errors import DataError
from daskcnn.nn.metrics import METRICS, measured, name_problems
from daskcnn.nn.score import Score

MODULE = "a_module_of_metrics"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = ModuleType(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, found)
    return found


def score(names: list[str], probabilities: Any, labels: Any) -> Score:
    return Score(0.0, 0, len(labels), metrics=measured(names, probabilities, labels))


@given(st.integers(0, 2**31), st.lists(st.integers(1, 29), max_size=4))
@settings(max_examples=20)
def test_parts_add_up_to_the_whole(seed: int, cuts: list[int]) -> None:
    rng = np.random.default_rng(seed)
    probabilities, labels = rng.random((30, 8)), rng.integers(0, 8, 30)
    edges = sorted({0, 30, *cuts})
    parts = [score([*METRICS], probabilities[lo:hi], labels[lo:hi]) for lo, hi in pairwise(edges)]
    whole = score([*METRICS], probabilities, labels).judged.metrics
    found = sum(parts, Score(0.0, 0, 0)).judged.metrics
    assert found == pytest.approx(whole)
    above = (probabilities > probabilities[np.arange(30), labels][:, None]).sum(axis=1)
    assert whole == pytest.approx({"top3": (above < 3).mean(), "top5": (above < 5).mean()})


def test_several_labels_are_hit_by_one_of_them() -> None:
    probabilities = np.array([[0.9, 0.8, 0.7, 0.1], [0.9, 0.8, 0.7, 0.1]])
    labels = np.array([[0, 0, 1, 1], [0, 0, 0, 1]])
    assert measured(["top3"], probabilities, labels) == {"top3": 1.0}


@pytest.mark.parametrize("labels", [np.array([0, 0]), np.array([[1, 0, 0, 0], [1, 0, 0, 0]])])
def test_sample_with_a_probability_that_is_no_number_is_not_among_the_highest(labels: Any) -> None:
    probabilities = np.array([[0.9, np.nan, 0.1, 0.1], [0.9, 0.1, 0.1, 0.1]])
    assert measured(["top3"], probabilities, labels) == {"top3": 1.0}


@pytest.mark.parametrize(
    "function", [lambda p, y: (p.argmax(1) == y).mean(), lambda p, y: p.argmax(1) == y], ids=["mean", "numbers"]
)
def test_function_returns_a_mean_or_a_number_for_each_sample(module: ModuleType, function: Any) -> None:
    module.right = function  # type: ignore[attr-defined]
    probabilities, labels = np.eye(4), np.array([0, 1, 0, 3])
    assert measured([f"{MODULE}:right"], probabilities, labels) == {"right": 3.0}


def _changes(probabilities: Any, labels: Any) -> float:
    labels[:] = 0
    return 1.0


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda p, y: p, r"returned an array of shape \(2, 4\)"),
        (lambda p, y: 1 / 0, r"fails \(ZeroDivisionError"),
        (lambda p, y: None, r"fails \(\w*TypeError"),
        (lambda p: 1.0, r"fails \(TypeError"),
        (_changes, r"fails \(ValueError: assignment destination is read-only"),
    ],
)
def test_function_that_breaks_the_contract_is_named(module: ModuleType, function: Any, reason: str) -> None:
    module.wrong = function  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=rf"^metric {MODULE}:wrong: it {reason}.*; return a number for each sample"):
        measured([f"{MODULE}:wrong"], np.full((2, 4), 0.25), np.zeros(2, int))


def test_value_that_is_no_number_is_unknown(module: ModuleType) -> None:
    module.odd = lambda p, y: np.nan  # type: ignore[attr-defined]
    assert score([f"{MODULE}:odd"], np.full((2, 4), 0.25), np.zeros(2, int)).judged.metrics == {"odd": None}


def test_a_script_s_own_function_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process has a module `__main__` of its own."""
    monkeypatch.setattr(sys.modules["__main__"], "confident", len, raising=False)
    told = "train.metrics = '__main__:confident': on a worker __main__ is another module; put the function into a "
    (found,) = name_problems(["__main__:confident"])
    assert found.startswith(told)


def test_names_that_are_none_and_names_of_two_are_told(module: ModuleType) -> None:
    module.top3 = module.accuracy = len  # type: ignore[attr-defined]
    assert [*name_problems(["top3", "top5"])] == []
    told = [*name_problems(["top4", f"{MODULE}:top", f"{MODULE}:accuracy", f"{MODULE}:top3", "top3", "no_module:f"])]
    assert told == [
        "train.metrics = 'top4': no such metric; did you mean 'top5'? A function of yours is my_module:top4",
        f"train.metrics = '{MODULE}:top': {MODULE} has no function of this name; did you mean 'top3'?",
        "train.metrics = 'no_module:f': no_module has no function of this name; there are none",
        "train.metrics: 'accuracy' is the name of another figure too; give the function another name",
        "train.metrics: 'top3' is the name of another figure too; give the function another name",
    ]
