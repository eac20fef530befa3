"""From tables and flags to a result: what `python -m daskcnn.run` and `daskcnn.train` call."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distributed import Client, default_client

from daskcnn.job.resolve import resolve
from daskcnn.job.sources import read_job_file
from daskcnn.job.tables import Job
from daskcnn.launch.resume import job_to_run
from daskcnn.launch.training import Result, display, train_job
from daskcnn.runs.directory import RunDirectory
from daskcnn.runs.summary import checked_summary
from daskcnn.show.stderr import say


def run(raw: dict[str, Any], *, resume: str | None, json_mode: bool) -> dict[str, Any]:
    """Train what the tables say, or go on with a run; returns the summary. Raises UserError."""
    job, path = job_to_run(raw, resume)
    if path is not None and (summary := RunDirectory.open(path).summary()) and summary.get("status") == "done":
        checked = checked_summary(summary, path / "summary.json")
        say(f"{path}: this run is done; nothing to resume")
        return checked
    result = train_job(job, resume=path, progress=display(json_mode), handle_signals=True, say=say)
    return result.summary


def train(client: Client | None = None, job: Job | Mapping[str, Any] | str | Path | None = None) -> Result:
    """Train a job on a Dask cluster and return its history and model.

    client: None stands for the default one; where there is none, the job's own `[cluster]` is connected or started.
    job: tables, a `Job`, or the path of a job file; None for the built-in example. Raises `daskcnn.errors.UserError`.
    """
    if isinstance(job, Job):
        raw: Mapping[str, Any] = job.model_dump(exclude_unset=True)
    else:
        raw = read_job_file(job) if isinstance(job, str | Path) else job or {}
    return train_job(resolve(raw), client=client or _default_client())


def _default_client() -> Client | None:
    try:
        return default_client()
    except ValueError:
        return None
