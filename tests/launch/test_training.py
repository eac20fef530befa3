"""What surrounds training: signals, the run's place, checkpoints that cannot be written."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daskcnn.cluster.link.signals import HEEDED, Signals
from daskcnn.errors import DataError, Diverged, Interrupted, Lost, UserError
from daskcnn.events import CheckpointWritten, Warned
from daskcnn.job.resolve import resolve
from daskcnn.launch import recorder as recorder_module
from daskcnn.launch import training as runner
from daskcnn.launch.prepared_job import prepare_job
from daskcnn.launch.recorder import Listener, Recorder
from daskcnn.launch.resume import check_same_data, job_to_run
from daskcnn.launch.training import check_place, train_job
from daskcnn.runs.checkpoint import latest
from daskcnn.runs.directory import RunDirectory
from daskcnn.show.renderers.terminal import PlainProgress, choose, shown
from tests.tiny_runs import random_state, tiny_data, tiny_job, tiny_run

# --- signals ---


@pytest.mark.parametrize("signum", HEEDED)
def test_before_training_a_signal_interrupts_at_once(signum: signal.Signals) -> None:
    before = signal.getsignal(signum)
    with pytest.raises(Interrupted, match=rf"\({signum.name}\) before training") as caught, Signals().installed():
        signal.raise_signal(signum)
    assert caught.value.exit_code == 128 + signum
    assert signal.getsignal(signum) == before


def test_during_training_the_first_signal_is_remembered_and_the_second_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    signals = Signals()
    signals.polled = True
    with signals.installed():
        signal.raise_signal(signal.SIGTERM)
        assert (signals.first, ended) == (signal.SIGTERM, [])
        signal.raise_signal(signal.SIGINT)
    assert ended == [130]


@pytest.mark.parametrize(
    "came", [(signal.SIGHUP, signal.SIGHUP), (signal.SIGXCPU,) * 9, (signal.SIGUSR1, signal.SIGTERM)]
)
def test_signals_that_come_again_by_themselves_do_not_end_the_save(
    monkeypatch: pytest.MonkeyPatch, came: tuple[signal.Signals, ...]
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    signals = Signals()
    signals.polled = True
    with signals.installed():
        for signum in came:
            signal.raise_signal(signum)
    assert (signals.first, ended) == (came[0], [])


@pytest.mark.parametrize("of_command", [True, False])
def test_a_signal_that_is_ignored_stays_so(of_command: bool) -> None:
    """As `nohup` has it for SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals(of_command=of_command).installed() as signals:
            signal.raise_signal(signal.SIGHUP)
        assert signals.first is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_before_training_the_time_limit_ends_the_run_as_a_request_to_end() -> None:
    Signals(limit=1000.0).check()
    with pytest.raises(Interrupted, match=r"run\.time_limit = 1e-09 s\) before training") as caught:
        Signals(limit=1e-9).check()
    assert caught.value.exit_code == 143


@pytest.mark.parametrize(("signum", "end"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_in_python_code_a_signal_ends_in_python_s_own_way(
    signum: signal.Signals, end: type[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    """No `except Exception` of a loop over runs takes it, and the process goes on if it likes to."""
    before = signal.getsignal(signum)
    signals = Signals(of_command=False)

    def run() -> None:
        with signals.installed():
            signals.polled = True
            signal.raise_signal(signum)
            assert signals.first == signum, "it is remembered"
            with pytest.raises(end):  # of a second one
                signal.raise_signal(signum)
            signals.check()

    with pytest.raises(end):
        run()
    assert signal.getsignal(signum) == before
    assert ("(SIGTERM) before training began" in capsys.readouterr().err) == (signum == signal.SIGTERM)


def test_in_python_code_other_handlers_of_signals_stay() -> None:
    told: list[int] = []
    before = signal.signal(signal.SIGINT, lambda signum, _: told.append(signum))
    try:
        with Signals(of_command=False).installed() as signals:
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (told, signals.first) == ([signal.SIGINT], None)


def test_a_handler_that_importing_dask_jobqueue_sets_is_nobody_s() -> None:
    def handler(*_: object) -> None:
        raise SystemExit

    handler.__module__ = "dask_jobqueue.runner"
    before = signal.signal(signal.SIGINT, handler)
    try:
        with Signals(of_command=False).installed() as signals:
            signals.polled = True
            signal.raise_signal(signal.SIGINT)
        assert signals.first == signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, before)


# --- where a run is kept ---


def job_at(folder: Path, name: str | None = None) -> Any:
    return resolve({"run": {"dir": str(folder)} | ({"name": name} if name else {})})


def test_a_place_that_will_do_is_left_as_it_is(tmp_path: Path) -> None:
    check_place(job_at(tmp_path / "a" / "b", "new"))
    assert not (tmp_path / "a").exists()


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(DataError, match=r"exists already; choose another run\.name"):
        check_place(job_at(tmp_path, "taken"))


def test_a_file_where_the_runs_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file: no folder that may be written; set run.dir"):
        check_place(job_at(tmp_path / "file" / "runs"))


def test_a_folder_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(DataError, match=r"no folder that may be written; set run.dir"):
        check_place(job_at(tmp_path))


def test_a_run_that_another_process_writes(tmp_path: Path, path: str) -> None:
    raw = tiny_job(path)
    run = tiny_run(tmp_path, raw)
    job, earlier = job_to_run({}, str(run))
    with RunDirectory.open(run, writable=True), pytest.raises(DataError, match=f"process {os.getpid()}"):
        train_job(job, resume=earlier)


# --- writing ---


@pytest.fixture
def recorder(tmp_path: Path, path: str) -> Iterator[Recorder]:
    raw = tiny_job(path)
    prepared = prepare_job(resolve(raw), progress=lambda *_: None, warn=pytest.fail)
    with RunDirectory.open(tiny_run(tmp_path, raw), writable=True) as directory:
        yield Recorder(directory, runner.Silent(), prepared)


def test_a_checkpoint_is_written_and_logged(recorder: Recorder) -> None:
    recorder.save(random_state(recorder.prepared.job))
    found = latest(recorder.directory.checkpoints, warn=pytest.fail)
    assert found is not None
    assert found.path == recorder.checkpoint
    (event,) = recorder.directory.events()
    assert event == CheckpointWritten(at=event.at, step=7, path=str(found.path))


def test_a_full_disk_is_a_warning(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder.save(random_state(recorder.prepared.job))
    before = recorder.checkpoint

    def full(*_: Any, **__: Any) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(recorder_module, "save", full)
    recorder.save(random_state(recorder.prepared.job, step=9))
    assert recorder.checkpoint == before
    event = recorder.directory.events()[-1]
    assert isinstance(event, Warned)
    assert "step 9 not written" in event.text
    assert "No space left" in event.text


def test_seconds_go_on_after_a_resume(recorder: Recorder) -> None:
    recorder.seconds_before = 100.0
    assert 100.0 <= recorder.seconds < 200.0


@pytest.mark.parametrize("error", [Diverged("loss = nan"), Lost("gone"), Interrupted("signal 15", 15)])
def test_an_early_end_names_the_checkpoint_and_how_to_go_on(recorder: Recorder, error: UserError) -> None:
    assert "no checkpoint was written yet" in str(runner._with_remedy(error, recorder))
    recorder.save(random_state(recorder.prepared.job))
    told = runner._with_remedy(error, recorder)
    assert (type(told), told.exit_code) == (type(error), error.exit_code)
    assert f"last good checkpoint: {recorder.checkpoint}" in str(told)
    resume = f"python -m daskcnn.run --resume {recorder.directory.path}"
    in_python = f"daskcnn.train(resume='{recorder.directory.path}')"
    assert (resume in str(told)) == (in_python in str(told)) == (not isinstance(error, Diverged))


@pytest.mark.parametrize(
    ("error", "status"),
    [(Diverged("loss = nan"), "diverged"), (Lost("gone"), "lost"), (Interrupted("", 15), "interrupted")],
)
def test_a_clean_up_that_fails_hides_no_early_end(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, error: UserError, status: str
) -> None:
    class Ending:
        def __init__(self, *_: Any) -> None:
            self.state = random_state(recorder.prepared.job)

        def train(self) -> None:
            raise error

    def close() -> None:
        raise OSError("the scheduler is gone")

    monkeypatch.setattr(runner, "DataParallel", lambda *_: None)
    monkeypatch.setattr(runner, "Shell", Ending)
    context: Any = SimpleNamespace(job=recorder.prepared.job, close=close)
    with pytest.raises(type(error), match="no checkpoint was written yet"):
        runner._train(context, recorder, None, Listener(runner.Silent()))
    summary = recorder.directory.summary()
    assert summary is not None
    assert (summary["status"], summary["epochs"], summary["test"]) == (status, 1.5, None)


def test_another_data_set_than_the_checkpoint_was_trained_on(recorder: Recorder, tmp_path: Path) -> None:
    recorder.save(random_state(recorder.prepared.job))
    checkpoint = latest(recorder.directory.checkpoints, warn=pytest.fail)
    assert checkpoint is not None
    check_same_data(checkpoint, recorder.prepared)
    other = tiny_job(tiny_data(tmp_path, shape=(16, 16, 3)))
    prepared = prepare_job(resolve(other), progress=lambda *_: None, warn=pytest.fail)
    with pytest.raises(DataError, match="other classes or shapes than"):
        check_same_data(checkpoint, prepared)


# --- what is shown ---


def test_progress_is_told_by_tenths() -> None:
    said: list[str] = []
    progress = shown(said.append)
    for done in range(101):
        progress("download", done, 100)
    progress("check", 0, 0)
    progress("check", 0, 0)
    assert said == [f"data: download {10 * i} %" for i in range(11)] + ["data: check"]


def test_json_leaves_stdout_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for json_mode in (True, False):
        progress = choose(sys.stdout, json_mode)
        assert isinstance(progress, PlainProgress)
        progress.handle(Warned(message="hear"))
        out, err = capsys.readouterr()
        assert ("hear" in err, "hear" in out) == (json_mode, not json_mode)
