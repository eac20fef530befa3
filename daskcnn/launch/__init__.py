"""From tables and flags to a result: what the command line and `daskcnn.train` call."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

from distributed import Client, default_client

from daskcnn.errors import DataError, JobError
from daskcnn.job.tables import Cluster, Job, read_job_file
from daskcnn.launch.resolve import kept_job, prepare_job, readable_plan, resolve
from daskcnn.launch.training import Result, display, shown, train_job
from daskcnn.runs.directory import RunDirectory, find_latest
from daskcnn.show.summary import format_summary

__all__ = ["Result", "dry_run", "format_summary", "run", "train"]


def say(message: str) -> None:
    """A line on stderr."""
    print(message, file=sys.stderr, flush=True)


def run(raw: dict[str, Any], *, resume: str | None, json_mode: bool) -> dict[str, Any]:
    """Train what the tables say, or go on with a run; returns the summary. Raises UserError."""
    job, path = _job(raw, resume)
    if path is not None and (summary := RunDirectory.open(path).summary()) and summary["status"] == "done":
        say(f"{path}: this run is done; nothing to resume")
        return summary
    result = train_job(job, resume=path, progress=display(json_mode), handle_signals=True, say=say)
    return result.summary


def dry_run(raw: dict[str, Any], *, resume: str | None) -> tuple[dict[str, Any], str]:
    """The resolved job, and what it would do in words. Makes the data set if it is not there; starts nothing."""
    job, _ = _job(raw, resume)
    prepared = prepare_job(job, progress=shown(say), warn=lambda message: say(f"warning: {message}"))
    return job.model_dump(mode="json"), readable_plan(prepared)


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


def _job(raw: dict[str, Any], resume: str | None) -> tuple[Job, Path | None]:
    """The job, and the run to go on with if any. A resumed run keeps its job but for where it runs and its data lie."""
    path = _run_to_resume(raw, resume)
    if path is None:
        return resolve(raw), None
    if resume != "auto" and (others := sorted(_keys(raw))):
        raise JobError(
            [
                f"{key}: a resumed run keeps its job, only [cluster] and data.path may change; remove it"
                for key in others
            ]
        )
    kept, asked = kept_job(RunDirectory.open(path)), resolve(raw)
    for key in sorted(_keys(raw)):
        _say_if_ignored(key, kept, asked, path)
    data = kept.data.model_copy(update={"path": asked.data.path}) if "path" in raw.get("data", {}) else kept.data
    return kept.model_copy(update={"data": data, "cluster": _moved(kept.cluster, asked.cluster)}), path


def _say_if_ignored(key: str, kept: Job, asked: Job, path: Path) -> None:
    """A run that goes on keeps its job, whatever has become of the job file."""
    own, other = (reduce(getattr, key.split("."), job) for job in (kept, asked))
    if own != other:
        say(f"warning: {key} = {other}: ignored, the run {path} keeps {own}; another run.name starts anew")


def _keys(raw: Mapping[str, Any]) -> set[str]:
    """The keys that are given, but for those that may change when a run is resumed."""
    keys = {f"{section}.{key}" for section, table in raw.items() if section != "cluster" for key in table}
    return keys - {"data.path"}


def _moved(kept: Cluster, asked: Cluster) -> Cluster:
    """The cluster to resume on: the run's own, with the keys that are asked for; one scheduler replaces another."""
    given = {key: getattr(asked, key) for key in asked.model_fields_set}
    if given.keys() & {"scheduler", "scheduler_file"}:
        given = {"scheduler": None, "scheduler_file": None} | given
    return kept.model_copy(update=given)


def _run_to_resume(raw: Mapping[str, Any], resume: str | None) -> Path | None:
    """The run's folder; None to start a new one, for `auto` too where there is none yet."""
    if resume is None:
        return None
    if resume != "auto":
        path = Path(resume)
        if not (path / "job.json").is_file():
            raise DataError(path, "no run there", "give the folder that a run printed, or --resume auto")
        return path
    settings = resolve(raw).run
    if settings.name is None:
        return find_latest(settings.dir)
    named = Path(settings.dir) / settings.name
    if (named / "job.json").is_file():
        return named
    _clear_unbegun(named)
    return None


def _clear_unbegun(run: Path) -> None:
    """Remove the folder of a run that was killed before it wrote its job: its name is to be had again."""
    if (run / "lock").is_file() and not any((run / "checkpoints").glob("*")):
        with RunDirectory(run, writable=True):  # nobody is about to begin it
            shutil.rmtree(run)
        say(f"{run}: this run was stopped before it began; it starts anew")
