"""Files of version 0.1.0 stay readable: a data set, and runs with their logs, jobs, checkpoints and summaries."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from daskcnn.cli import main
from daskcnn.events import EpochEnded, GroupsFormed, RoundEnded, RunEnded, RunStarted, WorkersCalibrated
from daskcnn.reports.report import compare, report, reports
from daskcnn.runs.checkpoint import latest
from daskcnn.runs.directory import RunDirectory, kept_job
from daskcnn.runs.state import to_state
from daskcnn.show.renderers.run_text import format_report
from daskcnn.store import open_dataset, verify
from daskcnn.trained.evaluate import evaluate

FIXTURES = Path(__file__).parent / "fixtures" / "version-0.1.0"
RUNS = ("sgwu", "agwu", "layer", "group")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, which is also the working directory: the jobs' paths are relative."""
    copy = tmp_path / "kept"
    shutil.copytree(FIXTURES, copy)
    monkeypatch.chdir(copy)
    return copy


def command(*args: object) -> Result:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize("run", RUNS)
def test_every_event_is_known_and_says_what_it_said(run: str) -> None:
    events = RunDirectory.open(run).events()
    records = [json.loads(line) for line in Path(run, "events.jsonl").read_text().splitlines()]
    assert len(events) == len(records) > 8
    for event, record in zip(events, records, strict=True):
        assert event.at is not None
        assert {**event.record(), "at": record["at"]} == record


@pytest.mark.parametrize("run", RUNS)
def test_a_run_is_reported(run: str) -> None:
    found = report(run)
    summary = json.loads(Path(run, "summary.json").read_text())
    assert (found.status, found.epoch, found.start.run) == ("done", 2.0, run)
    assert found.test is not None
    assert found.test.accuracy == summary["test"]["accuracy"]
    assert found.test.auc is None
    for worker, expected in zip(found.workers, summary["workers"], strict=True):
        assert (worker.name, worker.device) == (expected["name"], expected["device"])
        assert worker.busy == pytest.approx(expected["busy"])
    assert f"{run.replace('group', 'sgwu')}" in format_report(found)
    assert command("report", run, "--rounds").stdout.count("\n") > 10


def test_runs_are_compared() -> None:
    found = compare(reports(RUNS), targets=[0.1])
    assert found.runs == RUNS
    (time,) = (line for line in found.lines if line.label == "time")
    assert all(isinstance(value, float) and value > 0 for value in time.values)


def test_layers_have_their_breakdown_and_groups_their_members() -> None:
    assert report("layer").breakdown.keys() == {"cpu-0", "cpu-1"}
    rounds = [event for event in RunDirectory.open("group").events() if isinstance(event, RoundEnded)]
    (formed,) = [event for event in RunDirectory.open("group").events() if isinstance(event, GroupsFormed)]
    members = {group.name: set(group.members) for group in formed.groups}
    assert {len(those) for those in members.values()} == {2}
    assert all(event.members and {m.name for m in event.members} <= members[event.worker] for event in rounds)
    assert all(member.busy > 0 for event in rounds for member in event.members)


@pytest.mark.parametrize("run", ["sgwu", "agwu", "layer"])
def test_a_run_is_simulated_again(run: str) -> None:
    found = json.loads(command("simulate", run, "--json").stdout)
    assert found["report"]["epoch"] == 2.0
    assert found["report"]["seconds"] > 0


@pytest.mark.parametrize("run", RUNS)
def test_a_run_would_be_resumed_from_its_checkpoint(run: str) -> None:
    directory = RunDirectory.open(run, writable=True)
    job, checkpoint = kept_job(directory), latest(directory.checkpoints, warn=pytest.fail)
    events = directory.events()
    directory.close()
    assert checkpoint is not None
    state = to_state(checkpoint, job)
    assert (state.epoch, state.step) == (2.0, checkpoint.step)
    assert np.isfinite(state.weights).all()
    assert state.optimizers
    assert state.validation is not None
    assert state.validation.samples == 20
    (summary,) = [event for event in events if isinstance(event, RunEnded)]
    assert summary.status == "done"


@pytest.mark.parametrize("run", RUNS)
def test_a_run_s_network_is_as_good_as_it_was(run: str) -> None:
    (end,) = [event for event in RunDirectory.open(run).events() if isinstance(event, RunEnded)]
    found = evaluate(run, checkpoint="last", path=None, say=pytest.fail)
    assert end.test is not None
    assert found["accuracy"] == pytest.approx(end.test.accuracy)
    assert found["loss"] == pytest.approx(end.test.loss, rel=1e-4)


def test_the_data_set_is_whole() -> None:
    dataset = open_dataset("data/synthetic.zarr")
    verify(dataset)
    assert (len(dataset.train), len(dataset.test)) == (120, 60)


def test_the_logs_tell_a_run_from_its_start_to_its_end() -> None:
    for run in RUNS:
        kinds = [type(event) for event in RunDirectory.open(run).events()]
        assert kinds[:2] == [RunStarted, WorkersCalibrated]
        assert EpochEnded in kinds
        assert kinds[-1] is RunEnded
