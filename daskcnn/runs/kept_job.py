"""The job of an earlier run."""

from __future__ import annotations

from pathlib import Path

from daskcnn.errors import JobError
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import Job
from daskcnn.runs.directory import RunDirectory


def kept_job(run: RunDirectory) -> Job:
    """The job of an earlier run. Raises DataError or JobError where its file is damaged or of another version."""
    try:
        job = resolve(run.job())
    except JobError as error:
        raise JobError([f"{run.path / 'job.json'}: {problem}" for problem in error.problems]) from error
    if Path(job.data.path or "").exists():  # the archive has done its work
        return job.model_copy(update={"data": job.data.model_copy(update={"archive": None})})
    return job
