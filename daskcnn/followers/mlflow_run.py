"""A run as a run of MLflow: parameters, metrics by step, tags, files and, at the end, the trained network."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from daskcnn.events import Event, RunEnded, RunStarted
from daskcnn.followers.tool import Curves, FollowedRun, Tool, parameters
from daskcnn.runs.log import read_events
from daskcnn.show.renderers.run_text import format_report
from daskcnn.show.report_tables import tables
from daskcnn.temporary import OwnFolder
from daskcnn.trained.trained_model import TrainedModel, load

EXPERIMENT, USUAL_EXPERIMENT = "MLFLOW_EXPERIMENT_NAME", "daskcnn"
"""MLflow's own variable for the experiment, and the experiment without it."""
KEPT_ID = "mlflow-run"  # file of the run directory with the id of the run of MLflow, which a resume goes on with
MODEL = "model"  # path of the network among the artifacts
_FILES = ("job.json", "environment.json", "events.jsonl", "summary.json")
_STATUS = {"done": "FINISHED", "stopped": "FINISHED", "interrupted": "KILLED"}
_MOST_METRICS, _MOST_PARAMETERS, _LONGEST = 1000, 100, 6000  # of a message to MLflow, and characters of a parameter
_CONNECT = 5.0  # seconds


class MLflowRun(Tool):
    """Logs by MLflow's client, which has no state of the process: a notebook may have a run of its own."""

    key, extra, package = "mlflow", "mlflow", "mlflow"

    def __init__(self, run: FollowedRun) -> None:
        from mlflow import MlflowClient

        self._run, self._curves, self._status = run, Curves(), "FAILED"
        self._client = MlflowClient(tracking_uri=run.job.run.mlflow)
        self._id = self._resumed() or self._created()

    @classmethod
    def problems(cls, setting: str | bool) -> Iterator[str]:
        """Yield why the package cannot be used: it is missing, or nothing answers at the URI."""
        missing = list(super().problems(setting))
        yield from missing
        if not missing and (reason := _unreachable(str(setting))):
            remedy = "start it with `mlflow server`, correct the URI, or remove the key"
            yield f"run.mlflow = {setting!r}: {reason}; {remedy}"

    def write(self, events: Sequence[Event]) -> None:
        """Log the points of all events together."""
        from mlflow.entities import Metric

        metrics: list[Metric] = []
        for event in events:
            if isinstance(event, RunStarted):
                tags = {"strategy": event.strategy, "dataset": event.dataset or "", "model": event.model or ""}
                self._client_log(tags=tags)
            if isinstance(event, RunEnded):
                self._status = _STATUS.get(event.status, "FAILED")
                self._client_log(tags={"status": event.status})
            points = self._curves.points(event)
            metrics += [Metric(p.curve, p.value, round(1000 * p.at), p.step) for p in points]
        for begun in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[begun : begun + _MOST_METRICS])

    def finish(self) -> None:
        """Log the run's files, its report and, where it has trained to an end, the network. Then end MLflow's run."""
        folder = self._run.directory()
        for name in _FILES:
            if (folder / name).is_file():
                self._client.log_artifact(self._id, str(folder / name))
        self._client.log_text(self._id, format_report(tables(read_events(folder / "events.jsonl"))), "report.txt")
        if self._status == "FINISHED":
            with OwnFolder() as temporary:
                model = save_model(load(folder), Path(temporary))
                self._client.log_artifacts(self._id, str(model), MODEL)
        self._client.set_terminated(self._id, self._status)

    def _client_log(self, *, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        self._client.log_batch(self._id, tags=[RunTag(f"daskcnn.{key}", value) for key, value in tags.items()])

    def _resumed(self) -> str | None:
        """The run of MLflow that an earlier life of this run logged to, if it is still there."""
        from mlflow.exceptions import MlflowException

        kept = self._run.directory() / KEPT_ID
        if not kept.is_file():
            return None
        found = kept.read_text(encoding="utf-8").strip()[:200]
        with suppress(MlflowException):  # removed there, or of another server
            self._client.update_run(found, status="RUNNING")
            return found
        return None

    def _created(self) -> str:
        """A new run of MLflow, with the job's parameters."""
        from mlflow.entities import Param

        folder, job = self._run.directory(), self._run.job
        tags = {"daskcnn.run": str(folder.absolute()), "mlflow.source.name": "daskcnn"}
        name = os.environ.get(EXPERIMENT) or USUAL_EXPERIMENT
        found = self._client.get_experiment_by_name(name)
        experiment = str(self._client.create_experiment(name) if found is None else found.experiment_id)
        made: str = self._client.create_run(experiment, run_name=folder.name, tags=tags).info.run_id
        (folder / KEPT_ID).write_text(f"{made}\n", encoding="utf-8")
        params = [Param(key, str(value)[:_LONGEST]) for key, value in parameters(job).items()]
        for begun in range(0, len(params), _MOST_PARAMETERS):
            self._client.log_batch(made, params=params[begun : begun + _MOST_PARAMETERS])
        return made


def _unreachable(uri: str) -> str:
    """Why there is no store of MLflow at the URI; empty where there is one."""
    from mlflow import MlflowClient

    parts = urlsplit(uri)
    try:
        if parts.scheme in ("http", "https"):  # where nothing listens, MLflow's client tries again for minutes
            port = parts.port or (443 if parts.scheme == "https" else 80)
            socket.create_connection((parts.hostname or "", port), timeout=_CONNECT).close()
        MlflowClient(tracking_uri=uri).search_experiments(max_results=1)
    except Exception as error:  # MLflow, its stores and their drivers have errors of their own
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"no store of MLflow answers ({lines[0]})"
    return ""


def save_model(model: TrainedModel, folder: Path) -> Path:
    """Write the network into this folder as a model of MLflow's flavour `python_function`; return its path.

    Its input is a tensor of images (N, H, W, C) as they are at rest, its output probabilities (N, classes).
    """
    from mlflow import pyfunc
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    images = TensorSpec(model.dtype, (-1, *model.shape), "images")
    found = TensorSpec(np.dtype(model.job.model.dtype), (-1, len(model.classes)), "probabilities")
    pyfunc.save_model(
        path=str(folder / MODEL),
        loader_module=__name__,
        data_path=str(model.kept_in(folder / "run")),
        signature=ModelSignature(inputs=Schema([images]), outputs=Schema([found])),
        pip_requirements=[f"daskcnn=={version('daskcnn')}"],
        metadata={"classes": list(model.classes)},
    )
    return folder / MODEL


class LoadedNetwork:
    """The network as MLflow's `pyfunc.load_model` wraps it."""

    def __init__(self, model: TrainedModel) -> None:
        self.model = model

    def predict(self, images: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Return the probability of each class, (N, classes), of images (N, H, W, C), which may be named `images`."""
        return self.model.predict(images["images"] if isinstance(images, dict) else images)


def _load_pyfunc(path: str) -> LoadedNetwork:
    """Called by MLflow with the run directory that the model holds."""
    return LoadedNetwork(load(path))
