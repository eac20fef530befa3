"""`--resume auto`: the same command given again and again comes to the end of one run, whatever ended it before."""

from __future__ import annotations

import errno
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from daskcnn.errors import InUse, JobError
from daskcnn.job import resolve as parsing
from daskcnn.job.resolve import resolve
from daskcnn.launch import resume
from daskcnn.launch.prepared_job import prepare_job
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


def test_a_file_system_that_removes_no_open_files_does_not_keep_it_from_that(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS renames files that are open, and their folder is not empty then."""

    def refuse(folder: Path, *, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(folder))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    run = tmp_path / "it"
    (run / "checkpoints").mkdir(parents=True)
    (run / "lock").touch()
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


@pytest.mark.parametrize("way", ["auto", "path"])
def test_a_job_whose_steps_may_grow_goes_on_with_its_own_job_file(tmp_path: Path, path: str, way: str) -> None:
    """The data set chose the samples of the first steps; 64 stood in the message, which nobody had written."""
    job = asked(tmp_path, path)
    job["train"] = {"epochs": 2, "strategy": "bsp", "batch_size": "auto"}
    made = kept_as(tmp_path / "it", job)
    longer = job | {"train": job["train"] | {"epochs": 5}}
    going_on, earlier = resume.job_to_run(longer, "auto" if way == "auto" else str(made))
    assert earlier is not None
    assert (going_on.train.epochs, going_on.train.largest_batch) == (5, "memory")
    other = job | {"train": job["train"] | {"batch_size": 64, "largest_batch": 512}}
    with pytest.raises(JobError, match=r"train\.largest_batch = 512: the run .* has memory"):
        resume.job_to_run(other, str(made))


def test_a_run_is_made_shorter_than_its_usual_increments(tmp_path: Path, path: str) -> None:
    job = asked(tmp_path, path)
    job["train"] = {"epochs": 10, "strategy": "sgwu"}
    made = kept_as(tmp_path / "it", job)
    going_on, _ = resume.job_to_run(job | {"train": {"epochs": 2, "strategy": "sgwu"}}, str(made))
    assert (going_on.train.epochs, going_on.train.increments) == (2, 3)


def test_a_run_that_is_made_longer_gives_no_more_increments(tmp_path: Path, path: str) -> None:
    """Its checkpoint says that every sample is given."""
    job = asked(tmp_path, path)
    job["train"] = {"epochs": 1, "strategy": "sgwu"}
    made = kept_as(tmp_path / "it", job)
    going_on, _ = resume.job_to_run(job | {"train": {"epochs": 10, "strategy": "sgwu"}}, str(made))
    assert (going_on.train.epochs, going_on.train.increments) == (10, 1)


def kept_as(run: Path, job: dict[str, Any]) -> Path:
    """A run of this job that has not trained yet, with every default that its data set brings."""
    prepared = prepare_job(resolve(job), progress=lambda *_: None, warn=pytest.fail)
    with RunDirectory.create(run.parent, run.name, strategy="x", now=datetime.now(UTC)) as made:
        made.write_job(prepared.job.model_dump(mode="json"))
    return run
