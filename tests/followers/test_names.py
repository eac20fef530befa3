"""A figure and a hyper-parameter have one name in every tool that draws a run."""

from __future__ import annotations

import re
import sys
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from daskcnn.followers.mlflow_run import MLflowRun
from daskcnn.followers.tensorboard_files import TensorBoardFiles
from daskcnn.followers.tool import parameters
from tests.followers.runs_followed import END, events, followed
from tests.show.run_events import calibration, epoch, layer_sharded, round_of, start

Metric = namedtuple("Metric", "key value timestamp step")
Param = namedtuple("Param", "key value")
RunTag = namedtuple("RunTag", "key value")
WORKERS = ("ann@home+1", "büro")  # names that workers of a run may have


class Client:
    """MLflow's client, as far as a run needs it, which keeps what it is told."""

    logged: dict[str, list[Any]]

    def __init__(self, tracking_uri: str) -> None:
        type(self).logged = {"metrics": [], "params": [], "tags": []}

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="1")

    def create_run(self, *args: Any, **options: Any) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id="run"))

    def log_batch(self, run: str, **rows: Sequence[Any]) -> None:
        for kind, more in rows.items():
            self.logged[kind] += more


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> type[Client]:
    entities, package = ModuleType("mlflow.entities"), ModuleType("mlflow")
    vars(entities).update(Metric=Metric, Param=Param, RunTag=RunTag)
    vars(package).update(MlflowClient=Client, entities=entities)
    exceptions = ModuleType("mlflow.exceptions")
    vars(exceptions).update(MlflowException=Exception)
    for module in (package, entities, exceptions):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return Client


def a_run() -> list[Any]:
    rounds = [round_of(name, round=0, staleness=1, gamma=0.5, lr=0.1, accuracy=0.5, loss=1.0) for name in WORKERS]
    judged = {"accuracy": 0.5, "loss": 1.0, "auc": 0.7}
    sharded = [event for event in layer_sharded() if event["event"] in ("steps", "epoch")]
    return events(start(), calibration(*WORKERS), *rounds, epoch(validation=judged, lr=0.1), *sharded, END)


def test_tensorboard_and_mlflow_have_the_same_names(tmp_path: Path, path: str, mlflow: type[Client]) -> None:
    pytest.importorskip("tensorboardX")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    plugin = pytest.importorskip("tensorboard.plugins.hparams.plugin_data_pb2")
    with followed(tmp_path, path, tensorboard=True, mlflow="http://127.0.0.1:9") as run:
        for tool in (TensorBoardFiles(run), MLflowRun(run)):
            tool.write(a_run())
            tool.close()
        wanted = parameters(run.job)
        files = reader.EventAccumulator(str(run.directory() / "tensorboard")).Reload()
    drawn = {(tag, point.step) for tag in files.Tags()["scalars"] for point in files.Scalars(tag)}
    assert drawn == {(metric.key, metric.step) for metric in mlflow.logged["metrics"]}
    names = {name for name, _ in drawn}
    assert {"learning_rate", "samples_per_second", "workers/ann_home_1/busy_seconds", "workers/büro/gamma"} <= names
    assert all(re.fullmatch(r"[\w\-./]+", name) for name in names)
    data = plugin.HParamsPluginData()
    data.ParseFromString(files.summary_metadata["_hparams_/session_start_info"].plugin_data.content)
    assert {*data.session_start_info.hparams} == {param.key for param in mlflow.logged["params"]} == {*wanted}
