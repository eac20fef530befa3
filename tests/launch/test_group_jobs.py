"""Jobs with groups of workers: what they cannot be combined with."""

from __future__ import annotations

from typing import Any

import pytest

from daskcnn.cluster.shell.data_parallel import DataParallel
from daskcnn.errors import JobError
from daskcnn.job.resolve import resolve
from daskcnn.launch.training import driver_of
from daskcnn.training.coordinator.settings import Settings

TWO = {"replica_size": 2}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"train": {"replica_size": 3}, "cluster": {"workers": {"cpu": 2}}}, "more than the workers"),
        ({"train": TWO | {"strategy": "parallel-sgd"}, "cluster": {"workers": "cpu=2,gpu=1"}}, "needs 2 groups"),
        ({"train": TWO | {"strategy": "bsp"}, "rule": {"exchange": "asa"}}, "rule.exchange = 'asa'"),
        ({"train": TWO | {"strategy": "bsp"}, "rule": {"exchange": "asa16"}}, "rule.exchange = 'asa16'"),
        ({"train": TWO | {"strategy": "admm"}}, "rule.rho = 0.01"),
        ({"train": TWO | {"strategy": "layer"}}, "train.replica_size"),
        ({"train": {"sub_batches": 2}}, "train.sub_batches = 2"),
        ({"train": {"first_conv": "samples"}}, "train.first_conv = 'samples'"),
        ({"train": {"kernel_shares": "speeds"}}, "train.kernel_shares = 'speeds'"),
    ],
)
def test_what_groups_cannot_do_is_refused_before_anything_starts(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError) as caught:
        resolve(raw)
    (problem,) = caught.value.problems
    assert words in problem
    assert any(remedy in problem for remedy in ("use", "lower it", "remove it"))


@pytest.mark.parametrize(
    "raw",
    [
        {"train": TWO},
        {"train": TWO | {"sub_batches": 4}, "cluster": {"workers": {"cpu": 2}}},
        {"train": TWO | {"strategy": "admm"}, "rule": {"rho": 0.0}},
        {"train": TWO | {"strategy": "parallel-sgd"}, "cluster": {"workers": {"cpu": 4}}},
        {"train": TWO | {"strategy": "downpour"}, "cluster": {"ps_shards": 2, "wire": "float16"}},
    ],
)
def test_groups_run_any_other_rule(raw: dict[str, Any]) -> None:
    job = resolve(raw)
    assert driver_of(job) is DataParallel
    assert Settings.of(job, 1000).replica_size == 2
