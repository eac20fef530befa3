"""`--resume auto`: the same command given again and again comes to the end of one run, whatever ended it before."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from daskcnn.errors import InUse
from daskcnn.job import resolve as parsing
from daskcnn.job.resolve import resolve
from daskcnn.launch import resume
from daskcnn.runs.directory import RunDirectory
from tests.tiny_runs import tiny_job, tiny_run


def asked(tmp_path: Path, path: str) -> dict[str, Any]:
    job = tiny_job(path)
    return job | {"run": job.get("run", {}) | {"dir": str(tmp_path), "name": "it"}}


def test_nothing_yet_starts_anew(tmp_path: Path, path: str) -> None:
    assert resume.run_to_resume(resolve(asked(tmp_path, path)).run, "auto") is None


def test_a_run_that_was_killed_before_it_began_starts_anew(tmp_path: Path, path: str) -> None:
    run = tmp_path / "it"
    (run / "checkpoints").mkdir(parents=True)
    for file in ("lock", "events.jsonl"):
        (run / file).touch()
    assert resume.run_to_resume(resolve(asked(tmp_path, path)).run, "auto") is None
    assert not run.exists()


def test_a_run_that_another_process_is_beginning_is_left_alone(tmp_path: Path, path: str) -> None:
    run = tmp_path / "it"
    (run / "checkpoints").mkdir(parents=True)
    with RunDirectory(run, writable=True), pytest.raises(InUse, match="being written by process") as told:
        resume.run_to_resume(resolve(asked(tmp_path, path)).run, "auto")
    assert told.value.exit_code == 3, "it may end: worth another try"
    assert run.is_dir()


def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path, path: str) -> None:
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / "thesis.txt").touch()
    assert resume.run_to_resume(resolve(asked(tmp_path, path)).run, "auto") is None
    assert (tmp_path / "it" / "thesis.txt").exists()


def test_a_run_that_is_there_goes_on(tmp_path: Path, path: str) -> None:
    made = tiny_run(tmp_path, tiny_job(path))
    if made != tmp_path / "it":
        shutil.move(made, tmp_path / "it")
    assert resume.run_to_resume(resolve(asked(tmp_path, path)).run, "auto") == tmp_path / "it"


def test_each_job_is_parsed_once_and_the_run_opened_once(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tiny_run(tmp_path, tiny_job(path))
    parsed, opened = Mock(wraps=parsing.parse_job), Mock(wraps=RunDirectory.open)
    monkeypatch.setattr(parsing, "parse_job", parsed)
    monkeypatch.setattr(RunDirectory, "open", opened)
    _, earlier = resume.job_to_run({}, str(made))
    assert earlier is not None
    assert parsed.call_count == 2, "the job that is asked for, and the one that is kept"
    assert opened.call_count == 1
