from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daskcnn import documents
from daskcnn.errors import DataError
from daskcnn.events import EpochEnded, RunEnded, Warned
from daskcnn.runs.directory import RunDirectory, find_latest
from tests.special_files import folder_of_a_user

NOW = datetime(2026, 11, 20, 20, 15, 3).astimezone()


def run(root: Path, name: str | None = None, **kwargs: Any) -> RunDirectory:
    directory = RunDirectory.create(root, name, strategy="sgwu", now=NOW, **kwargs)
    try:
        directory.write_job({"train": {"lr": 0.1}})
    except DataError:
        directory.close()
        raise
    return directory


def test_a_run_without_a_name_is_called_by_its_time_and_strategy(tmp_path: Path) -> None:
    with run(tmp_path / "runs") as a, run(tmp_path / "runs") as b, run(tmp_path / "runs") as c:
        assert [r.path.name for r in (a, b, c)] == [f"2026-11-20T20-15-03-sgwu{end}" for end in ("", "-2", "-3")]
        assert a.checkpoints.is_dir()


def test_that_time_is_the_local_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of its log have it too."""
    try:
        with monkeypatch.context() as patch:
            patch.setenv("TZ", "UTC-9")
            time.tzset()
            with RunDirectory.create(tmp_path, strategy="sgwu", now=datetime(2026, 11, 20, 20, tzinfo=UTC)) as made:
                assert made.path.name == "2026-11-21T05-00-00-sgwu"
    finally:
        time.tzset()


def test_a_name_that_is_taken_is_refused_with_both_remedies(tmp_path: Path) -> None:
    run(tmp_path, "mine").close()
    with pytest.raises(DataError, match=r"mine: exists already; .*--resume .*mine.* --name"):
        run(tmp_path, "mine")


def test_a_name_taken_by_something_else_is_not_offered_for_resuming(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(DataError, match=r"exists already; remove it, or choose another name") as caught:
        run(tmp_path, "mine")
    assert "--resume" not in str(caught.value)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/tmp", "../up", "a\0b", "a\nb", "\x1b[31m"])
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    root = tmp_path / "runs"
    with pytest.raises(DataError, match="not a file name"):
        run(root, name)
    assert list(root.iterdir()) == []


def test_a_root_that_cannot_be_written_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file.*run\.dir \(--run-dir\)"):
        run(tmp_path / "file" / "runs")


@pytest.mark.parametrize("call", ["mkdir", "fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_start_that_cannot_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(DataError, match=os.strerror(code)):
        run(tmp_path)


def test_a_read_only_run_is_not_resumed() -> None:
    with folder_of_a_user() as folder:
        run(folder, "mine").close()
        RunDirectory.open(folder / "mine", writable=True).close()
        (folder / "mine" / "lock").chmod(0o400)
        with pytest.raises(DataError, match="Permission denied"):
            RunDirectory.open(folder / "mine", writable=True)


@pytest.mark.parametrize("path", ["missing", "empty"])
def test_what_is_no_run_is_not_opened(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=f"{path}: not a run directory"):
        RunDirectory.open(tmp_path / path)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    with run(tmp_path, "mine") as directory:
        assert directory.summary() is None
        directory.write_summary({"status": "done", "loss": math.nan, "seconds": np.float32(2)})
        directory.write_environment(["run.py", "--name", "x"])
    directory = RunDirectory.open(tmp_path / "mine")
    assert directory.job() == {"train": {"lr": 0.1}}
    assert directory.summary() == {"status": "done", "loss": None, "seconds": 2.0}
    environment = json.loads((tmp_path / "mine" / "environment.json").read_text())
    assert environment["command"] == ["run.py", "--name", "x"]
    assert environment["packages"]["numpy"] == np.__version__
    assert environment["cpu"]["memory"] > 0
    assert sorted(p.name for p in directory.path.iterdir()) == [
        "checkpoints",
        "environment.json",
        "events.jsonl",
        "job.json",
        "lock",
        "summary.json",
    ]


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 10_000])
def test_a_damaged_job_is_named(tmp_path: Path, text: str) -> None:
    run(tmp_path, "mine").close()
    (tmp_path / "mine" / "job.json").write_text(text)
    with pytest.raises(DataError, match=r"job\.json: not"):
        RunDirectory.open(tmp_path / "mine").job()


def test_a_file_that_cannot_be_replaced_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "summary.json"
    documents.write_json(path, {"a": 1})
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        documents.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


# --- one driver a run ---


def test_a_second_driver_is_refused_and_told_who_has_the_run(tmp_path: Path) -> None:
    with run(tmp_path, "mine") as first:
        for _ in range(2):
            with pytest.raises(DataError, match=f"being written by process {os.getpid()} on .*; stop that one"):
                RunDirectory.open(first.path, writable=True)
        assert RunDirectory.open(first.path).job(), "reading needs no lock"
    RunDirectory.open(first.path, writable=True).close()


def test_a_killed_driver_leaves_no_lock(tmp_path: Path) -> None:
    run(tmp_path, "mine").close()
    program = (
        "import os, signal, sys; from daskcnn.events import RunEnded; from daskcnn.runs.directory import RunDirectory;"
        "r = RunDirectory.open(sys.argv[1], writable=True); r.log(RunEnded(status='x'));"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    killed = subprocess.run([sys.executable, "-c", program, tmp_path / "mine"], env=env, timeout=60, check=False)
    assert killed.returncode == -9
    with RunDirectory.open(tmp_path / "mine", writable=True) as again:
        assert [e.record()["status"] for e in again.events()] == ["x"]


# --- the latest ---


def test_the_latest_run_is_the_one_last_written(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "missing") is None
    (tmp_path / "no run").mkdir(parents=True)
    assert find_latest(tmp_path) is None
    for name, written in (("b", 300), ("a", 500), ("c", 400)):
        run(tmp_path, name).close()
        os.utime(tmp_path / name / "events.jsonl", (written, written))
    assert find_latest(tmp_path) == tmp_path / "a"
    (tmp_path / "a" / "job.json").unlink()
    assert find_latest(tmp_path) == tmp_path / "c"


# --- the event log in the directory ---


def test_events_are_logged_with_their_time_and_read_while_the_run_goes_on(tmp_path: Path) -> None:
    with run(tmp_path, "mine") as directory:
        directory.log(EpochEnded(epoch=1.0, step=3, loss=math.inf), NOW)
        directory.log(RunEnded(status="done"))
        directory.log(RunEnded(status="done", at=2.5), NOW)
        first, second, third = RunDirectory.open(directory.path).events()
        line = (directory.path / "events.jsonl").read_text().splitlines()[0]
    assert json.loads(line) == {
        "event": "epoch",
        "at": "2026-11-20T20:15:03.000+00:00",
        "epoch": 1.0,
        "step": 3,
        "loss": None,
    }
    assert first == EpochEnded(at=NOW.timestamp(), epoch=1.0, step=3)
    assert second.at is not None
    assert second.at > NOW.replace(year=2020).timestamp()
    assert third.at == 2.5, "a simulation's own"


def test_logging_to_a_run_opened_for_reading_is_a_bug(tmp_path: Path) -> None:
    run(tmp_path, "mine").close()
    with pytest.raises(RuntimeError, match="opened for reading"):
        RunDirectory.open(tmp_path / "mine").log(RunEnded(status="x"))


def test_a_full_disk_is_told_once_and_ends_nothing(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    signal = pytest.importorskip("signal")
    warnings: list[str] = []

    def warn(message: str) -> None:
        warnings.append(message)
        directory.log(Warned(message=message))  # as a driver does

    directory = run(tmp_path, "mine", warn=warn)
    directory.log(Warned(message="first"))
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        for _ in range(3):
            directory.log(Warned(message="x" * 200))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    directory.log(Warned(message="last"))
    assert len(warnings) == 1
    assert "events.jsonl: File too large" in warnings[0]
    directory.close()
    kept = [event.record()["message"][:5] for event in RunDirectory.open(directory.path).events()]
    lost = "x" * 5
    assert kept == ["first", lost, warnings[0][:5], lost, lost, "last"], "nothing is lost once there is room"
