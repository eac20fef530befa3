"""A run whose disk is full, or whose directory is gone, is kept whole: in its place, or elsewhere with exit 6."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import daskcnn
from daskcnn.errors import DataError, Interrupted, NotKept
from daskcnn.events import EpochEnded, KernelsSharded, RunResumed, Warned, WorkersCalibrated
from daskcnn.job.resolve import resolve
from daskcnn.launch import training as runner
from daskcnn.launch.prepared_job import prepare_job
from daskcnn.launch.recorder import Listener, Recorder, recorded
from daskcnn.launch.resume import EarlierRun
from daskcnn.nn.score import Score
from daskcnn.runs.checkpoint import latest
from daskcnn.runs.directory import RunDirectory, kept_job
from daskcnn.runs.state import TrainingState, to_state
from tests.tiny_runs import random_state, tiny_job, tiny_run

Full = Callable[[bool], None]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The driver's folder for temporary files, empty."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def disk(stack: ExitStack, folder: Path) -> None:
    """Mount a small disk of its own at the folder."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a disk may not be mounted here")
    stack.callback(lambda: subprocess.run(["umount", "-l", folder], check=False, capture_output=True))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The folder `run.dir`."""
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


@pytest.fixture
def recorder(runs: Path, path: str) -> Iterator[Recorder]:
    with recorder_in(runs, path) as made:
        yield made


@contextmanager
def recorder_in(runs: Path, path: str, **train: Any) -> Iterator[Recorder]:
    raw = tiny_job(path, run={"dir": str(runs)}, train=train)
    prepared = prepare_job(resolve(raw), progress=lambda *_: None, warn=pytest.fail)
    with RunDirectory.open(tiny_run(runs, raw), writable=True) as directory:
        made = Recorder(directory, runner.Silent(), prepared)
        yield made
        made.directory.close()


@pytest.fixture(params=["a real disk", "injected"])
def full(request: pytest.FixtureRequest, runs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Full]:
    """Fills the disk of `run.dir`, or makes room: a small disk that is mounted there, or every fsync there fails."""
    with ExitStack() as stack:
        if request.param == "a real disk":
            disk(stack, runs)
            yield lambda on: _fill(runs / "filler", on)
        else:
            yield lambda on: _refuse(monkeypatch, runs, on)


def _fill(filler: Path, on: bool) -> None:
    if not on:
        filler.unlink()
        return
    with open(filler, "wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(512)):
            pass


def _refuse(monkeypatch: pytest.MonkeyPatch, runs: Path, on: bool) -> None:
    if not on:
        monkeypatch.undo()
        monkeypatch.setattr(tempfile, "tempdir", str(runs.parent / "temporary"))
        return
    fsync = os.fsync

    def refusing(descriptor: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(runs):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refusing)


def finish(recorder: Recorder, status: str = "done") -> dict[str, Any]:
    assert recorder.last is not None
    return recorder.finish(status, recorder.last, 1.0, None)


def whole(place: Path, state: TrainingState, summary: dict[str, Any]) -> list[str]:
    """Assert that the run is there, as evaluating and resuming read it; returns the kinds of its events."""
    run = RunDirectory.open(place)
    job = kept_job(run)
    found = latest(run.checkpoints, warn=pytest.fail)
    assert found is not None
    np.testing.assert_array_equal(to_state(found, job).weights, state.weights)
    assert run.summary() == summary
    assert (summary["run"], summary["checkpoint"]) == (str(place), str(found.path))
    return [event.kind for event in run.events()]


# --- a full disk ---


@pytest.mark.usefixtures("full")
def test_a_disk_with_room_keeps_the_run_in_its_place(recorder: Recorder, runs: Path) -> None:
    state = random_state(recorder.prepared.job)
    recorder.save(state)
    assert whole(runs / "run", state, finish(recorder)) == ["checkpoint", "end"]
    recorder.raise_if_not_kept()


def test_a_full_disk_at_the_end_keeps_the_run_elsewhere(full: Full, runs: Path, path: str, temporary: Path) -> None:
    with recorder_in(runs, path) as recorder:
        recorder.save(random_state(recorder.prepared.job, step=7))
        full(True)
        state = random_state(recorder.prepared.job, seed=1, step=9)
        recorder.save(state)
        recorder.emit(Warned(message="x" * 5000))
        summary = finish(recorder)
        with pytest.raises(NotKept) as caught:
            recorder.raise_if_not_kept()
    assert caught.value.exit_code == 6
    (place,) = temporary.glob("daskcnn-*/run")
    assert caught.value.place == place
    assert str(place) in str(caught.value)
    assert "No space left on device" in str(caught.value)
    kinds = whole(place, state, summary)
    assert kinds[0] == "checkpoint"
    assert kinds[-2:] == ["checkpoint", "end"]
    assert kinds.count("warning") == 2, "what was to be logged, and that the disk was full"
    assert [p.name for p in runs.iterdir() if p.name != "filler"] == ["run"], "what failed half-way is cleaned up"


def test_room_at_the_end_is_enough(full: Full, runs: Path, path: str) -> None:
    with recorder_in(runs, path) as recorder:
        full(True)
        state = random_state(recorder.prepared.job)
        recorder.save(state)
        assert not recorder.kept
        full(False)
        kinds = whole(runs / "run", state, finish(recorder))
        recorder.raise_if_not_kept()
    assert kinds[-2:] == ["checkpoint", "end"]


def test_an_interrupted_run_names_the_place_and_keeps_its_exit_code(
    full: Full, runs: Path, path: str, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recorder_in(runs, path) as recorder:

        class Ending:
            def __init__(self, *_: Any) -> None:
                self.state = random_state(recorder.prepared.job)

            def train(self) -> None:
                recorder.save(self.state)
                raise Interrupted.by(15)

        monkeypatch.setattr(runner, "DataParallel", lambda *_: None)
        monkeypatch.setattr(runner, "Shell", Ending)
        full(True)
        context: Any = SimpleNamespace(job=recorder.prepared.job, close=lambda: None)
        with pytest.raises(Interrupted) as caught:
            runner._train(context, recorder, None, Listener(runner.Silent()))
    (place,) = temporary.glob("daskcnn-*/run")
    assert caught.value.exit_code == 143
    assert f"--resume {place}" in str(caught.value)
    assert "could not be kept where it was asked to be" in str(caught.value)
    assert latest(place / "checkpoints", warn=pytest.fail) is not None


def test_nowhere_to_keep_it_is_said(full: Full, runs: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with recorder_in(runs, path) as recorder:
        full(True)
        recorder.save(random_state(recorder.prepared.job))
        monkeypatch.setattr(tempfile, "tempdir", str(runs / "none"))
        finish(recorder)
        with pytest.raises(NotKept, match="the network is lost") as caught:
            recorder.raise_if_not_kept()
    assert (caught.value.place, caught.value.exit_code) == (None, 6)
    assert str(caught.value).count("No space left on device") >= 2, "each place with its reason"


def test_a_folder_for_temporary_files_without_room_is_not_left(
    full: Full, runs: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recorder_in(runs, path) as recorder:
        full(True)
        recorder.save(random_state(recorder.prepared.job))
        monkeypatch.setattr(tempfile, "tempdir", str(runs))
        finish(recorder)
    assert not list(runs.glob("daskcnn-*"))


# --- weights that are handed back ---


def states_of(recorder: Recorder) -> list[TrainingState]:
    """Three states, of which the second is the best."""
    rights = (5, 15, 10)
    job = recorder.prepared.job
    return [
        random_state(job, seed=n, step=n, validation=Score(1.0, n_right, 20)) for n, n_right in enumerate(rights, 1)
    ]


@pytest.mark.parametrize(
    ("train", "index"),
    [
        ({}, 2),
        ({"early_stopping": 3}, 1),
        ({"restore_best": True}, 1),
        ({"early_stopping": 3, "restore_best": False}, 2),
    ],
)
def test_a_run_hands_back_what_every_door_takes(runs: Path, path: str, train: dict[str, Any], index: int) -> None:
    with recorder_in(runs, path, **train) as recorder:
        states = states_of(recorder)
        for state in states:
            recorder.save(state)
        handed = recorder.hand_back(states[-1])
        summary = finish(recorder)
    np.testing.assert_array_equal(handed.weights, states[index].weights)
    np.testing.assert_array_equal(daskcnn.load(runs / "run").vector, states[index].weights)
    assert summary["checkpoint"] == str(runs / f"run/checkpoints/step-{index + 1:09d}")
    assert summary["validation"]["accuracy"] == states[index].validation.accuracy  # type: ignore[union-attr]
    assert summary["weights"] == ("best" if index == 1 else "last")


def test_the_best_weights_are_kept_elsewhere_too(full: Full, runs: Path, path: str, temporary: Path) -> None:
    """And resuming goes on from the last ones."""
    with recorder_in(runs, path, early_stopping=3) as recorder:
        states = states_of(recorder)
        for state in states[:2]:
            recorder.save(state)
        full(True)
        recorder.save(states[2])
        recorder.emit(Warned(message="x" * 5000))
        recorder.hand_back(states[2])
        summary = finish(recorder)
    (place,) = temporary.glob("daskcnn-*/run")
    np.testing.assert_array_equal(daskcnn.load(place).vector, states[1].weights)
    np.testing.assert_array_equal(daskcnn.load(place, checkpoint="last").vector, states[2].weights)
    assert summary["checkpoint"] == str(place / "checkpoints/step-000000002")


# --- a run that goes on ---


def test_a_damaged_checkpoint_is_told_behind_the_start_of_the_run_that_goes_on(recorder: Recorder, runs: Path) -> None:
    recorder.save(random_state(recorder.prepared.job))
    recorder.save(replace(random_state(recorder.prepared.job), step=9))
    (runs / "run/checkpoints/step-000000009/arrays.safetensors").write_bytes(b"")
    recorder.directory.write_summary({"status": "interrupted"})
    recorder.directory.close()
    with goes_on(recorder, runs) as again:
        kinds = [event.kind for event in again.directory.events()]
        assert kinds[-3:] == ["start", "resume", "warning"]
        (resumed,) = (event for event in again.directory.events() if isinstance(event, RunResumed))
        assert (resumed.step, resumed.best) == (7, 0.2)
        assert again.directory.summary() is None, "that of a run which goes on may be killed"


def test_a_run_that_is_done_keeps_its_summary(recorder: Recorder, runs: Path) -> None:
    recorder.save(random_state(recorder.prepared.job))
    recorder.directory.write_summary({"status": "done"})
    recorder.directory.close()
    with goes_on(recorder, runs) as again:
        assert again.directory.summary() == {"status": "done"}


def damage(run: Path) -> None:
    """Tear the log's first line."""
    log = run / "events.jsonl"
    _, *others = log.read_text().splitlines(keepends=True)
    log.write_text("".join(["{torn\n", *others]))


def test_a_damaged_log_is_told_before_workers_are_asked_for(
    runs: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "connect", lambda *_, **__: pytest.fail("workers are asked for"))
    with recorder_in(runs, path, strategy="auto") as recorder:
        recorder.warn("one")
        recorder.warn("two")
    damage(runs / "run")
    with pytest.raises(DataError, match=r"events\.jsonl: line 1 is no JSON object"):
        daskcnn.train(resume=runs / "run")
    with RunDirectory.open(runs / "run", writable=True):
        pass  # another process may have it


def test_a_log_that_is_damaged_meanwhile_costs_the_summary_its_workers_alone(recorder: Recorder, runs: Path) -> None:
    recorder.warn("one")
    recorder.save(random_state(recorder.prepared.job))
    damage(recorder.directory.path)
    summary = finish(recorder)
    recorder.raise_if_not_kept()
    assert (summary["status"], summary["workers"]) == ("done", [])
    assert recorder.directory.summary() == summary
    *_, warning, end = (runs / "run/events.jsonl").read_text().splitlines()
    assert "no figures of the workers" in warning
    assert '"event": "end"' in end


def test_the_summary_of_a_sharded_run_names_the_workers_without_kernels(recorder: Recorder) -> None:
    state = random_state(recorder.prepared.job)
    recorder.save(state)
    for kernels in ({"w0": {"conv1": 0}, "w1": {"conv1": 8}}, {"w0": {"conv1": 8}, "w1": {"conv1": 0}}):
        recorder.emit(KernelsSharded(home="w0", kernels=kernels))
    assert recorder.finish("done", state, 1.0, None)["no_kernels"] == ["w1"]


@contextmanager
def goes_on(recorder: Recorder, runs: Path) -> Iterator[Recorder]:
    """The recorder of a run that goes on with the same job."""
    earlier = EarlierRun(RunDirectory.open(runs / "run", writable=True), recorder.prepared.job)
    with recorded(recorder.prepared, earlier, runner.Silent(), 2) as (again, _):
        yield again


# --- a run directory that is gone ---


def test_a_removed_directory_is_written_anew_at_once(recorder: Recorder, runs: Path) -> None:
    state = random_state(recorder.prepared.job)
    recorder.save(state)
    recorder.emit(EpochEnded(epoch=1.0, step=1))
    shutil.rmtree(runs)
    recorder.emit(EpochEnded(epoch=2.0, step=1))
    log = RunDirectory.open(runs / "run").events()
    assert [e.kind for e in log] == ["checkpoint", "epoch", "epoch", "warning", "checkpoint"]
    told = log[3]
    assert isinstance(told, Warned)
    assert "gone (was it removed?), and written anew" in told.message
    whole(runs / "run", state, finish(recorder))
    recorder.raise_if_not_kept()
    with pytest.raises(Exception, match="being written by"):
        RunDirectory.open(runs / "run", writable=True)


def test_a_resumed_run_whose_directory_is_removed_has_its_state_still(recorder: Recorder, runs: Path) -> None:
    state = random_state(recorder.prepared.job)
    recorder.last = state
    shutil.rmtree(runs / "run")
    recorder.emit(EpochEnded(epoch=2.0, step=1))
    whole(runs / "run", state, finish(recorder))


def test_removed_checkpoints_are_written_again_at_the_end(recorder: Recorder, runs: Path) -> None:
    state = random_state(recorder.prepared.job)
    recorder.save(state)
    shutil.rmtree(runs / "run" / "checkpoints")
    whole(runs / "run", state, finish(recorder))
    recorder.raise_if_not_kept()


def test_a_directory_that_cannot_be_written_anew_is_told_once_and_kept_beside_it(
    recorder: Recorder, runs: Path
) -> None:
    state = random_state(recorder.prepared.job)
    recorder.save(state)
    shutil.rmtree(runs / "run")
    (runs / "run").write_text("in the way")
    for epoch in (1.0, 2.0):
        recorder.emit(EpochEnded(epoch=epoch, step=1))
    kinds = whole(runs / "run-2", state, finish(recorder))
    assert kinds == ["checkpoint", "epoch", "warning", "epoch", "checkpoint", "end"]
    with pytest.raises(NotKept, match="run-2"):
        recorder.raise_if_not_kept()


def test_an_unmounted_disk_is_told_at_once_and_its_place_left_empty(runs: Path, path: str, temporary: Path) -> None:
    with ExitStack() as stack:
        disk(stack, runs)
        with recorder_in(runs, path) as recorder:
            state = random_state(recorder.prepared.job)
            recorder.save(state)
            recorder.emit(EpochEnded(epoch=1.0, step=1))
            subprocess.run(["umount", "-l", runs], check=True)
            recorder.emit(EpochEnded(epoch=2.0, step=1))
            told = recorder.directory.events()[-1]
            assert isinstance(told, Warned)
            assert "its disk is not mounted" in told.message
            summary = finish(recorder)
            with pytest.raises(NotKept):
                recorder.raise_if_not_kept()
    (place,) = temporary.glob("daskcnn-*/run")
    assert whole(place, state, summary) == ["checkpoint", "epoch", "epoch", "warning", "checkpoint", "end"]
    assert list(runs.iterdir()) == [], "what is written there would be hidden once the disk is back"


def test_a_clock_that_is_set_is_logged_once(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of training go by another one: a report would have an hour that the run did not take."""
    now = time.time
    recorder.warn("before")
    monkeypatch.setattr(time, "time", lambda: now() + 3600.0)
    recorder.warn("behind")
    recorder.warn("and on")
    logged = recorder.directory.events()
    assert [event.kind for event in logged] == ["warning", "clock", "warning", "warning"]
    assert logged[1].seconds == pytest.approx(3600.0, abs=60.0)  # type: ignore[attr-defined] # of a clock event


def test_seconds_of_training_count_from_when_the_workers_are_calibrated(recorder: Recorder) -> None:
    """A worker that comes during the run is calibrated too, and changes nothing."""
    recorder.begun -= 1000
    recorder.emit(WorkersCalibrated(workers=[]))
    assert recorder.seconds < 1000
    recorder.begun -= 1000
    recorder.emit(WorkersCalibrated(workers=[]))
    assert recorder.seconds >= 1000
