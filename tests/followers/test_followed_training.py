"""A real run, on a cluster in this process, that tools follow from its first event to its last."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster

import daskcnn
from daskcnn.cluster.link.metrics_port import collector_here
from daskcnn.events import EpochEnded, Event, RunEnded, Warned
from daskcnn.followers import tensorboard_files
from daskcnn.followers.tensorboard_files import FOLDER
from daskcnn.runs.directory import RunDirectory
from tests.tiny_runs import tiny_job

pytest.importorskip("tensorboardX")
pytest.importorskip("prometheus_client")


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    settings: dict[str, Any] = {"processes": False, "dashboard_address": "127.0.0.1:0", "resources": {"CPU": 1}}
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, **settings) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


@pytest.fixture
def job(tmp_path: Path, path: str) -> dict[str, Any]:
    run = {"dir": str(tmp_path), "name": "followed", "tensorboard": True, "prometheus": True}
    return tiny_job(path, train={"epochs": 2, "batch_size": 20}, cluster={"settle": 0.0}, run=run)


@pytest.mark.parametrize("strategy", ["sgwu", "layer"])
def test_tools_see_the_run_to_its_end(client: Client, job: dict[str, Any], strategy: str) -> None:
    job["train"]["strategy"] = strategy
    result = daskcnn.train(client, job)
    log = RunDirectory.open(result.run).events()
    ports = {sample.name: sample for family in collector_here().collect() for sample in family.samples}
    assert ports["daskcnn_run_epoch"].value == 2
    assert any(name.startswith("daskcnn_worker_seconds") for name in ports)
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(result.run / FOLDER)).Reload()
    assert len(found.Scalars("validation/loss")) == sum(isinstance(event, EpochEnded) for event in log)
    assert found.Scalars("test/accuracy")[0].value == pytest.approx(result.summary["test"]["accuracy"])


def test_a_tool_that_fails_does_not_end_the_run(
    client: Client, job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensorboard_files.TensorBoardFiles, "write", full)
    told: list[Event] = []
    result = daskcnn.train(client, job, on_event=told.append)
    assert result.summary["status"] == "done"
    assert any(isinstance(event, RunEnded) for event in told)
    (warned,) = [event for event in told if isinstance(event, Warned) and "run.tensorboard" in event.value]
    assert "No space left on device" in warned.reason
