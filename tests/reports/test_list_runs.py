"""`daskcnn runs` and `daskcnn logs`: what is there to see of runs that ended, broke off, go on or are damaged."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from daskcnn.cli import main as daskcnn
from daskcnn.events import (
    CalibratedWorker,
    EpochEnded,
    Event,
    Judged,
    RunEnded,
    RunResumed,
    RunStarted,
    WorkerLost,
    WorkersCalibrated,
)
from daskcnn.reports import report as listing
from daskcnn.reports.report import list_runs, log_lines
from daskcnn.runs.directory import RunDirectory, is_written
from daskcnn.runs.summary import Summary

EVENTS: list[tuple[float, Event]] = [
    (100.0, RunStarted(run="x", strategy="agwu", epochs=3, samples=10, validation_samples=5, parameters=7)),
    (130.0, EpochEnded(epoch=1.0, epochs=3, step=4, loss=1.5, validation=Judged(accuracy=0.25, loss=2.0))),
]


def make(root: Path, name: str, events: list[tuple[float, Event]] = EVENTS) -> RunDirectory:
    """A run that its driver still writes, and has since before these events."""
    directory = RunDirectory.create(root, name, strategy="agwu", now=datetime(2026, 11, 20, tzinfo=UTC))
    (directory.path / "lock").write_text(f"process 1 on here since {datetime.fromtimestamp(0.0, UTC).isoformat()}\n")
    directory.write_job({"train": {"strategy": "agwu"}})
    for at, event in events:
        directory.log(event, datetime.fromtimestamp(at, UTC))
    os.utime(directory.path / "job.json", (len(list(root.iterdir())), 10.0 + len(list(root.iterdir()))))
    return directory


def summary(run: Path, **changes: Any) -> dict[str, Any]:
    parts: dict[str, Any] = {"run": str(run), "status": "done", "strategy": "agwu", "epochs": 3.0, "seconds": 61.0}
    parts |= {"images_per_second": 0.5, "test": {"accuracy": 0.5, "loss": 1.0, "auc": None}, "validation": None}
    parts |= {"bytes": {"up": 1, "down": 1}, "workers": [], "checkpoint": None, **changes}
    return Summary(**parts).model_dump()


def test_each_run_has_its_state_accuracy_and_duration(tmp_path: Path) -> None:
    done, killed, damaged = (make(tmp_path, name) for name in ("done", "killed", "damaged"))
    done.write_summary(summary(done.path))
    for each in (done, killed, damaged):
        each.close()
    (damaged.path / "summary.json").write_text("[]")
    (tmp_path / "no run").mkdir()
    with make(tmp_path, "going-on"):
        rows = list_runs(str(tmp_path))
        shown = CliRunner().invoke(daskcnn, ["runs", str(tmp_path)])
    assert [Path(row.run).name for row in rows] == ["done", "killed", "damaged", "going-on"]
    assert [row.state for row in rows] == ["done", "broken off", "damaged", "running"]
    assert [(row.test, row.validation) for row in rows] == [(0.5, None), (None, 0.25), (None, None), (None, 0.25)]
    assert [row.seconds for row in rows][:3] == [61.0, 30.0, None]
    assert (shown.exit_code, len(shown.stdout.splitlines())) == (0, 5)
    assert "test accuracy  validation accuracy  " in shown.stdout.splitlines()[0]
    assert shown.stdout.splitlines()[1].split()[1:] == ["done", "agwu", "3", "50.0", "%", "-", "1", "min", "01", "s"]


def test_a_run_that_was_interrupted_has_the_accuracy_of_its_last_evaluation(tmp_path: Path) -> None:
    """Its summary has none, as it ended between two."""
    with make(tmp_path, "it") as stopped:
        stopped.write_summary(summary(stopped.path, status="interrupted", test=None))
    (row,) = list_runs(str(tmp_path))
    assert (row.state, row.epochs, row.validation) == ("interrupted", 3.0, 0.25)


def test_a_resumed_run_that_calibrates_has_the_epoch_and_the_seconds_of_its_checkpoint(tmp_path: Path) -> None:
    again = [(500.0, RunStarted(run="x", epochs=3)), (501.0, RunResumed(step=4, epoch=1.0))]
    events = [*EVENTS, (160.0, EpochEnded(epoch=2.0, step=8)), *again]
    with make(tmp_path, "it", events):
        (row,) = list_runs(str(tmp_path))
    assert (row.state, row.epochs, row.validation, row.seconds) == ("running", 1.0, 0.25, 30.0)


def test_a_run_that_goes_on_has_its_workers(tmp_path: Path) -> None:
    calibrated = WorkersCalibrated(workers=[_calibrated("desk-2"), _calibrated("desk-1")])
    events = [*EVENTS[:1], (101.0, calibrated), (120.0, WorkerLost(worker="desk-2")), *EVENTS[1:]]
    with make(tmp_path, "it", events):
        (row,) = list_runs(str(tmp_path))
        heading, line = CliRunner().invoke(daskcnn, ["runs", str(tmp_path)]).stdout.splitlines()
    assert row.workers == ("desk-1",)
    assert (heading.endswith("  workers"), line.endswith("  desk-1")) == (True, True)
    (ended,) = list_runs(str(tmp_path))
    assert ended.workers == ()


def _calibrated(name: str) -> CalibratedWorker:
    return CalibratedWorker(name=name, device="cpu", threads=1, images_per_second=1.0)


def test_a_resumed_run_is_running_whatever_its_last_summary_says(tmp_path: Path) -> None:
    with make(tmp_path, "it") as run:
        run.write_summary(summary(run.path, status="interrupted"))
        assert list_runs(str(tmp_path))[0].state == "running"
    assert list_runs(str(tmp_path))[0].state == "interrupted"


@pytest.mark.parametrize("ended", [[], [(140.0, RunEnded(status="interrupted", seconds=41.0))]])
def test_a_resumed_run_waits_until_it_has_started(tmp_path: Path, ended: list[tuple[float, Event]]) -> None:
    """How it ended before, its workers then, and the time since are of an earlier life."""
    calibrated = WorkersCalibrated(workers=[_calibrated("desk-1")])
    make(tmp_path, "it", [EVENTS[0], (101.0, calibrated), EVENTS[1], *ended]).close()
    with RunDirectory.open(tmp_path / "it", writable=True) as again:
        (row,) = list_runs(str(tmp_path))
        assert (row.state, row.workers, row.seconds) == ("waiting", (), 41.0 if ended else 29.0)
        again.log(RunStarted(run="x", epochs=3))
        again.log(RunResumed(step=4, epoch=1.0))
        (row,) = list_runs(str(tmp_path))
        assert (row.state, row.workers, row.seconds) == ("running", (), 29.0)
        shutil.rmtree(again.path)
        again.restore()
        assert list_runs(str(tmp_path))[0].state == "running", "its lock is as old as before"


def test_looking_at_a_run_does_not_lock_it(tmp_path: Path) -> None:
    run = make(tmp_path, "it")
    run.close()
    assert not is_written(run.path)
    with RunDirectory.open(run.path, writable=True):
        assert is_written(run.path)


def test_who_looks_at_a_run_in_this_moment_keeps_no_writer_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(tmp_path, "it")
    run.close()
    with open(run.path / "lock", "rb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH | fcntl.LOCK_NB)  # as `is_written` does
        monkeypatch.setattr(time, "sleep", lambda seconds: looking.close())  # between two tries
        with RunDirectory.open(run.path, writable=True):
            assert is_written(run.path)


def test_a_folder_without_runs_and_one_that_is_not_there(tmp_path: Path) -> None:
    shown = CliRunner().invoke(daskcnn, ["runs", str(tmp_path)])
    assert (shown.exit_code, shown.stdout) == (0, f"{tmp_path}: no runs here\n")
    assert json.loads(CliRunner().invoke(daskcnn, ["runs", str(tmp_path), "--json"]).stdout) == []
    refused = CliRunner().invoke(daskcnn, ["runs", str(tmp_path / "none")])
    assert refused.exit_code == 2
    assert "no such folder" in refused.stderr


def test_a_log_has_the_time_of_each_line(tmp_path: Path) -> None:
    make(tmp_path, "it").close()
    lines = list(log_lines(str(tmp_path / "it"), follow=False))
    assert lines == list(log_lines(str(tmp_path / "it/events.jsonl"), follow=False))
    assert [line[:19] for line in lines] == [f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M:%S}" for at, _ in EVENTS]
    assert "epoch 1/3" in lines[1]


def test_a_simulation_that_is_kept_is_done_and_its_log_has_seconds(tmp_path: Path) -> None:
    started, epoch = (event for _, event in EVENTS)
    simulated = started.model_copy(update={"simulated": True})
    make(tmp_path, "it", [(0.0, simulated), (12.5, epoch), (12.5, RunEnded(status="done", seconds=12.5))]).close()
    assert list_runs(str(tmp_path))[0].state == "done, a simulation"
    lines = list(log_lines(str(tmp_path / "it"), follow=False))
    assert lines[1].startswith("     12.50 s  epoch 1/3")


def test_following_a_log_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that are written between the last look and the end are not missed; half a line is waited for."""
    run, turns = make(tmp_path, "it"), iter(range(9))
    log = run.path / "events.jsonl"

    def pause(_: float) -> None:
        match next(turns):
            case 0:
                run.log(WorkerLost(worker="desk-1", reason="killed"))
                with open(log, "a", encoding="utf-8") as torn:
                    torn.write('{"event": "end", ')
            case 1:
                with open(log, "a", encoding="utf-8") as rest:
                    rest.write('"status": "done", "at": 200.0}\n')
                run.close()

    monkeypatch.setattr(listing, "_pause", pause)
    lines = [line[21:] for line in log_lines(str(run.path), follow=True)]
    assert lines[-2:] == ["warning: worker desk-1 lost: killed", "end: done"]
    assert next(turns) == 2, "it ended as soon as nobody wrote the run any more"


def test_a_log_that_is_not_there_is_refused(tmp_path: Path) -> None:
    refused = CliRunner().invoke(daskcnn, ["logs", str(tmp_path)])
    assert refused.exit_code == 2
    assert "not a run directory" in refused.stderr
