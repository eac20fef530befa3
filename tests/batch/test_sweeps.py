"""Sweeps: a job, a grid and seeds become named jobs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskcnn.batch.sweeps import expanded, grid_values
from daskcnn.errors import JobError
from daskcnn.job.resolve import resolve

RAW: dict[str, Any] = {"data": {"name": "synthetic"}, "train": {"epochs": 2, "strategy": "bsp", "seed": 7}}


def problems(raw: dict[str, Any], grid: list[str], seeds: int = 1, name: str = "sweep") -> str:
    with pytest.raises(JobError) as error:
        expanded(raw, grid, seeds, name=name)
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("train.lr=0.01,0.02", "train.lr", [0.01, 0.02]),
        ("train.strategy=sgwu, bsp", "train.strategy", ["sgwu", "bsp"]),
        ("cluster.overlap=true,false", "cluster.overlap", [True, False]),
        ('model.layers=[{layer="dense"}],[]', "model.layers", [[{"layer": "dense"}], []]),
        ("rule.every=auto,4", "rule.every", ["auto", 4]),
        ('train.schedule={name="step",every=3},cosine', "train.schedule", [{"name": "step", "every": 3}, "cosine"]),
        ("run.mlflow='a,b',c", "run.mlflow", ["a,b", "c"]),
        ("run.dir=ann's,bob's", "run.dir", ["ann's", "bob's"]),
    ],
)
def test_values_are_read_as_those_of_set(text: str, key: str, values: list[Any]) -> None:
    assert grid_values(text) == (key, values)


def test_a_sweep_has_a_job_for_each_combination_and_seed() -> None:
    children = expanded(RAW, ["train.lr=0.01,0.02", "train.strategy=sgwu,bsp"], 3, name="lab")
    assert len(children) == 12
    assert [child.name for child in children][:4] == [
        "lab-lr0.01-sgwu-seed7",
        "lab-lr0.01-sgwu-seed8",
        "lab-lr0.01-sgwu-seed9",
        "lab-lr0.01-bsp-seed7",
    ]
    job = resolve(children[4].tables)
    assert (job.train.lr, job.train.strategy, job.train.seed, job.run.name) == (0.01, "bsp", 8, children[4].name)
    assert "lr" not in RAW["train"]


@settings(max_examples=25)
@given(
    st.lists(st.floats(0.001, 1.0), min_size=1, max_size=3, unique=True),
    st.lists(st.integers(1, 64), min_size=1, max_size=3, unique=True),
    st.integers(1, 3),
)
def test_names_are_different_and_values_are_the_jobs(rates: list[float], sizes: list[int], seeds: int) -> None:
    grid = [f"train.lr={','.join(map(repr, rates))}", f"train.batch_size={','.join(map(str, sizes))}"]
    children = expanded(RAW, grid, seeds, name="s")
    assert len({child.name for child in children}) == len(children) == len(rates) * len(sizes) * seeds
    for child in children:
        train = resolve(child.tables).train
        assert (train.lr, train.batch_size) == (child.values["train.lr"], child.values["train.batch_size"])


def test_long_names_are_numbers() -> None:
    layers = '[{layer="conv",kernels=8,size=3},{layer="relu"},{layer="dense",units=10}]'
    children = expanded(RAW, [f'model.layers={layers},[{{layer="dense",units=10}}]'], name="nets")
    assert [child.name for child in children] == ["nets-1", "nets-2"]


def test_the_problems_of_all_jobs_are_told_at_once_those_of_all_without_names() -> None:
    raw = {**RAW, "train": {**RAW["train"], "epochs": 0}}
    told = problems(raw, ["train.lr=-1,0.1", "train.strategy=bsp,spg"])
    assert "\n  train.epochs = 0: " in told
    assert "sweep-lr-1-bsp, sweep-lr-1-spg: train.lr = -1" in told
    assert "train.strategy = 'spg'" in told


@pytest.mark.parametrize(
    ("grid", "seeds", "words"),
    [
        (["train.lr"], 1, "--grid train.lr: write section.key=value,value"),
        (["lr=1"], 1, "write section.key"),
        (["train.lr=0.1,,0.2"], 1, "a value is empty"),
        (["train.lr=0.1,0.1"], 1, "0.1 stands there twice"),
        (["train.lr=0.1", "train.lr=0.2"], 1, "it is given twice"),
        (["train.seed=1,2"], 2, "gives the seeds already"),
        (["run.name=a,b"], 1, "--grid run.name: a sweep names its jobs by their values"),
        ([f"train.lr={','.join(f'0.{i}1' for i in range(1, 1002))}"], 1, "1,001 jobs; a sweep has at most 1,000"),
    ],
)
def test_what_is_no_grid_is_refused(grid: list[str], seeds: int, words: str) -> None:
    assert words in problems(RAW, grid, seeds)


def test_a_sweep_has_a_name_that_a_folder_can_have() -> None:
    assert "a sweep is named by letters" in problems(RAW, ["train.lr=0.1"], name="a/b")
