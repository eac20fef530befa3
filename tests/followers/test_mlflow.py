"""What a store of MLflow holds of a run. A real store is slow to make: `make test-all` has those tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daskcnn.errors import installing
from daskcnn.followers.mlflow_run import EXPERIMENT, KEPT_ID, MLflowRun
from daskcnn.trained.trained_model import load
from tests.followers.runs_followed import a_run, events, followed


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of a new store in a file."""
    pytest.importorskip("mlflow", reason="MLflow is not installed: pip install 'daskcnn[mlflow]'")
    pytest.importorskip("sqlalchemy", reason="SQLAlchemy is not installed: pip install 'daskcnn[mlflow]'")
    monkeypatch.chdir(tmp_path)  # beside which MLflow keeps artifacts
    monkeypatch.delenv(EXPERIMENT, raising=False)
    return f"sqlite:///{tmp_path}/mlflow.db"


def log(tmp_path: Path, path: str, store: str, *lives: list[Any]) -> Path:
    """The directory of a run that was logged, with its resumes."""
    with followed(tmp_path, path, mlflow=store) as run:
        (run.directory() / "events.jsonl").write_text('{"event": "start", "run": "run", "strategy": "sgwu"}\n')
        for life in lives:
            tool = MLflowRun(run)
            tool.write(life)
            tool.finish()
        return run.directory()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MLflow's dependencies warn of each other
def test_parameters_metrics_tags_files_and_the_network(tmp_path: Path, path: str, store: str) -> None:
    from mlflow import MlflowClient, pyfunc, set_tracking_uri

    kept = log(tmp_path, path, store, a_run())
    client = MlflowClient(tracking_uri=store)
    identity = (kept / KEPT_ID).read_text().strip()
    run = client.get_run(identity)
    assert run.info.status == "FINISHED"
    assert run.data.params["train.epochs"] == "2"
    assert run.data.tags["daskcnn.strategy"] == "sgwu"
    assert run.data.metrics["test/accuracy"] == 0.5
    (loss,) = client.get_metric_history(identity, "training/loss")
    assert (loss.step, loss.value) == (1275, 1.234)
    assert {"job.json", "report.txt", "summary.json", "model"} <= {a.path for a in client.list_artifacts(identity)}

    set_tracking_uri(store)
    model = pyfunc.load_model(f"runs:/{identity}/model")
    images = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), dtype=np.uint8)
    np.testing.assert_array_equal(model.predict(images), load(kept).predict(images))
    with pytest.raises(Exception, match=r"shape|dtype"):
        model.predict(np.zeros((3, 9, 9, 3), np.uint8))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_resume_goes_on_with_the_run_of_mlflow(tmp_path: Path, path: str, store: str) -> None:
    from mlflow import MlflowClient

    failed = events({"event": "end", "status": "failed"})
    kept = log(tmp_path, path, store, failed, a_run())
    client = MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("daskcnn")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_id, run.info.status) == ((kept / KEPT_ID).read_text().strip(), "FINISHED")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", "nonsense://x"])
def test_a_store_that_does_not_answer_is_refused(store: str, uri: str) -> None:
    (problem,) = MLflowRun.problems(uri)
    assert problem.startswith(f"run.mlflow = {uri!r}: no store of MLflow answers")
    assert "mlflow server" in problem
    assert not list(MLflowRun.problems(store))


def test_without_the_package_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setattr("daskcnn.followers.tool.find_spec", lambda name: None)
    (problem,) = MLflowRun.problems("http://127.0.0.1:9")
    assert installing("mlflow") in problem
