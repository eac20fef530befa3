"""What a worker's calibration for sharded layers measures: which passes count for the stages, which for home."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from daskcnn.arrays import Device
from daskcnn.job.tables import Job
from daskcnn.store import open_dataset
from daskcnn.training import worker_calibration
from daskcnn.training.replica import Replica
from tests.tiny_runs import tiny_data

SECONDS = {
    "shard_forward": 8.0,
    "shard_backward": 16.0,
    "descended": 32.0,
    "merged_forward": 1.0,
    "merged_backward": 2.0,
    "loss_of": 4.0,
}
"""What each pass of a minibatch takes by the test's own clock."""
CONV: dict[str, Any] = {"layer": "conv", "kernels": 4, "size": 3}
HEADS: dict[str, list[dict[str, Any]]] = {
    "a bias": [{"layer": "dense", "units": 10}],
    "layers with weights": [
        {"layer": "dense", "units": 6},
        {"layer": "relu"},
        {"layer": "dense", "units": 10},
    ],
    "no weights": [{"layer": "flatten"}],
}


class Clock:
    """Time goes on only in passes."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advancing(self, name: str) -> Callable[..., Any]:
        own = getattr(worker_calibration, name)

        def timed(*args: Any, **more: Any) -> Any:
            self.now += SECONDS[name]
            return own(*args, **more)

        return timed


def measured(
    layers: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> worker_calibration.StageSeconds:
    """Seconds a minibatch of 10."""
    job = Job.model_validate(
        {
            "data": {"path": tiny_data(tmp_path), "validation": 10},
            "model": {"layers": layers},
            "train": {"strategy": "layer", "batch_size": 10},
        }
    )
    clock = Clock()
    replica = Replica(job, open_dataset(job.data.path or ""), Device(), clock=clock)
    weights, velocity = replica.host_weights(), replica.host_optimizer().vectors
    for name in SECONDS:
        monkeypatch.setattr(worker_calibration, name, clock.advancing(name))
    found = worker_calibration.stage_seconds(replica, steps=2)
    assert (replica.host_weights() == weights).all()
    assert (replica.host_optimizer().vectors == velocity).all()
    return found


@pytest.mark.parametrize(("head", "rest"), [("a bias", 39.0), ("layers with weights", 39.0), ("no weights", 7.0)])
def test_home_s_seconds_are_those_of_its_layers_and_the_loss(
    head: str, rest: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, back, the loss, and the optimizer's step of layers with weights."""
    last = {"kernels": 10, "size": 8} if head == "no weights" else {}
    found = measured([CONV | last, *HEADS[head]], tmp_path, monkeypatch)
    assert found.rest == pytest.approx(rest / 10)


def test_a_shard_s_seconds_have_its_own_optimizer_s_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured([CONV, {"layer": "relu"}, *HEADS["a bias"]], tmp_path, monkeypatch)
    assert found.whole == {"conv1": pytest.approx((8 + 16 + 32) / 10)}


def test_layers_between_convolutions_that_are_not_divided_are_home_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two merged stages one has the loss, and one has weights."""
    normalised = {"layer": "batchnorm"}
    found = measured([normalised, CONV, *HEADS["a bias"]], tmp_path, monkeypatch)
    assert found.rest == pytest.approx(((1 + 2 + 32) + (1 + 2 + 4 + 32)) / 10)
