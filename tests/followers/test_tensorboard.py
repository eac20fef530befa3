"""What TensorBoard's own reader finds in the event files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from daskcnn.events import EpochEnded, RunResumed
from daskcnn.followers.tensorboard_files import FOLDER, TensorBoardFiles
from tests.followers.runs_followed import AT, a_run, followed

pytest.importorskip("tensorboardX")


def written(tmp_path: Path, path: str, *lives: list[Any]) -> Path:
    """The folder with the files of a run and its resumes."""
    with followed(tmp_path, path, tensorboard=True) as run:
        for events in lives:
            tool = TensorBoardFiles(run)
            tool.write(events)
            tool.close()
        return run.directory() / FOLDER


def read(folder: Path) -> Any:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    return accumulator.EventAccumulator(str(folder)).Reload()


def test_every_life_of_a_run_has_a_file(tmp_path: Path, path: str) -> None:
    folder = written(tmp_path, path, a_run(), a_run())
    assert len(list(folder.glob("events.out.tfevents.*"))) == 2


def test_the_reader_finds_curves_workers_and_the_test(tmp_path: Path, path: str) -> None:
    found = read(written(tmp_path, path, a_run()))
    curves = found.Tags()["scalars"]
    assert {"training/loss", "validation/accuracy", "learning_rate", "samples_per_second", "test/accuracy"} <= {*curves}
    assert {"workers/w1/wait_seconds", "workers/w1/busy_seconds", "workers/w0/staleness"} <= {*curves}
    (loss,) = found.Scalars("training/loss")
    assert (loss.step, loss.value, loss.wall_time) == (1275, pytest.approx(1.234), AT + 5)
    assert found.Scalars("workers/w1/wait_seconds")[0].value == 4.5


def test_the_job_is_text_and_hyper_parameters(tmp_path: Path, path: str) -> None:
    plugin = pytest.importorskip("tensorboard.plugins.hparams.plugin_data_pb2")
    found = read(written(tmp_path, path, a_run()))
    (text,) = found.Tensors("job/text_summary")
    assert b'"strategy": "bsp"' in text.tensor_proto.string_val[0]
    data = plugin.HParamsPluginData()
    data.ParseFromString(found.summary_metadata["_hparams_/session_start_info"].plugin_data.content)
    assert data.session_start_info.hparams["train.epochs"].number_value == 2
    assert data.session_start_info.hparams["train.strategy"].string_value == "bsp"


def test_a_resume_takes_the_place_of_what_came_after_its_checkpoint(tmp_path: Path, path: str) -> None:
    lost = [EpochEnded(epoch=float(i), step=10 * i, loss=9.0, at=AT + i) for i in (1, 2, 3)]
    resumed = [RunResumed(step=10, at=AT + 4), EpochEnded(epoch=2.0, step=20, loss=1.0, at=AT + 5)]
    found = read(written(tmp_path, path, lost, resumed))
    assert [(point.step, point.value) for point in found.Scalars("training/loss")] == [(10, 9.0), (20, 1.0)]
