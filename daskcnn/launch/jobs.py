"""From tables and flags to a result: what `python -m daskcnn.run` and `daskcnn.train` call."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client

from daskcnn.cluster.link.client import given_or_default
from daskcnn.cluster.link.connect import check_scheduler
from daskcnn.cluster.link.scaled import check_scalable
from daskcnn.datasets.own_data import check_kept, with_own_data
from daskcnn.errors import ClusterError, DataError, JobError
from daskcnn.events import EpochEnded, Event
from daskcnn.job.resolve import read_job_file, resolve
from daskcnn.job.tables import Job
from daskcnn.launch.dry_run import planned, readable_plan
from daskcnn.launch.recorder import OnEvent, check_listener
from daskcnn.launch.resume import EarlierRun, job_to_run
from daskcnn.launch.training import Result, Silent, train_job
from daskcnn.markup import as_lines
from daskcnn.runs.directory import RunDirectory
from daskcnn.runs.summary import checked_summary
from daskcnn.show.lines import WARNINGS, describe
from daskcnn.show.renderers.notebook import in_notebook
from daskcnn.show.renderers.terminal import Progress, choose, say, say_warnings, shown
from daskcnn.trained.trained_model import load

JobTables = Job | Mapping[str, Any] | str | Path


def run(raw: dict[str, Any], *, resume: str | None, json_mode: bool, quiet: bool = False) -> dict[str, Any]:
    """Train what the tables say, or go on with a run; returns the summary. Raises UserError.

    json_mode: stdout belongs to the summary. quiet: nothing but warnings is shown besides.
    """
    job, earlier = job_to_run(raw, resume)
    if earlier and (summary := _done(earlier, job)) is not None:
        done = f"{earlier.directory.path}: this run is done; nothing to resume"
        say(f"{done}. --epochs with a larger number trains it longer")
        return summary
    if earlier:
        check_kept(job.data, earlier.directory.path)
    told, display = say_warnings if quiet else say, choose(sys.stdout, json_mode, quiet)
    return train_job(job, resume=earlier, progress=display, handle_signals=True, say=told).summary


def _done(earlier: EarlierRun, job: Job) -> dict[str, Any] | None:
    """Return the summary of a run that has trained to its end; None where there is more to do, by this job."""
    summary = earlier.directory.summary()
    if not summary or summary.get("status") != "done" or earlier.kept.train.epochs != job.train.epochs:
        return None
    return checked_summary(summary, earlier.directory.path / "summary.json")


class Warnings(Silent):
    """A display that shows nothing but warnings, on stderr."""

    def handle(self, event: Event) -> None:
        """Show a warning."""
        if isinstance(event, WARNINGS):
            for line in describe(event):
                say(line)


def progress_from_python() -> Progress:
    """Return the display of a run that Python code starts: live in a notebook, elsewhere warnings alone."""
    return in_notebook() or Warnings()


def train(
    client: Client | None = None,
    job: JobTables | None = None,
    *,
    data: tuple[Any, Any] | None = None,
    on_event: OnEvent | None = None,
    resume: str | Path | None = None,
    init: str | Path | None = None,
) -> Result:
    """Train a job on a Dask cluster and return its history and model.

    Parameters
    ----------
    client : None stands for the default one. Where there is none, the job's own `[cluster]` is connected or started.
    job : tables, a `Job`, or the path of a job file; None for the built-in example.
    data : images and labels to train on, in place of a data set: arrays as `daskcnn.prepare` takes them. They are
        written to the job's `data.path`, or to a folder for temporary files while the run lasts; workers on other
        machines must see it. The job's `data.nodata`, `layout`, `labelling`, `test` and `order` say how, as options of
        `prepare`. A run that goes on is given the arrays again, and reads them as at first.
    on_event : a function that is told every event of the run as it is written (`daskcnn.events`). Where it raises
        `daskcnn.Stop`, the run keeps its state and ends with status "stopped". Any other exception ends the run too,
        and is raised here; the run can be resumed.
    resume : a run directory to go on with, or "auto", as for `daskcnn run --resume`. A run that is done is returned,
        unless the job has more epochs: then it is trained longer.
    init : a run directory or file whose trained weights to start from: the job's `model.from`.

    Raises
    ------
    daskcnn.errors.UserError : the job, its data or the cluster is not usable, or the run ended early.
    KeyboardInterrupt, SystemExit : Ctrl-C, or another signal or the time limit, once the run is kept; it can be
        resumed.

    Examples
    --------
    >>> def look(event):
    ...     if isinstance(event, daskcnn.events.EpochEnded) and event.loss < 10:
    ...         raise daskcnn.Stop
    >>> result = daskcnn.train(client, job, on_event=look)
    >>> result.summary["status"], len(result.history)
    ('stopped', 1)
    """
    client = given_or_default(no_job(client))
    check_listener(on_event)
    raw = tables_of(job)
    _check_pair(data)
    if init is not None:
        if resume is not None:
            raise JobError([f"init = {str(init)!r}: a run that goes on has weights; give resume or init, not both"])
        if isinstance(model := raw.get("model", {}), Mapping):  # what is no table is refused with the job
            raw["model"] = {**model, "from": str(init)}
    with with_own_data(raw, data, client) as (tables, write):
        resolved, earlier = job_to_run(tables, None if resume is None else str(resume), own_data=data is not None)
        if earlier and (summary := _done(earlier, resolved)) is not None:
            return kept_result(earlier.directory, summary)
        if client is None:
            check_scheduler(resolved.cluster)
        check_scalable(resolved.cluster, client)
        resolved = write(resolved, earlier and earlier.kept)
        if earlier:
            check_kept(resolved.data, earlier.directory.path)
        how: Any = {"progress": progress_from_python(), "say": say_warnings}
        return train_job(resolved, client=client, resume=earlier, on_event=on_event, **how)


def kept_result(run: RunDirectory, summary: dict[str, Any]) -> Result:
    """Return a run that has ended, from its folder. Raises DataError where it is damaged."""
    epochs = [event.record() for event in run.events() if isinstance(event, EpochEnded)]
    return Result(run.path, summary, epochs, load(run.path))


def no_job(client: object) -> object:
    """Return the client. Raises ClusterError for a job in its place."""
    if isinstance(client, Job | Mapping) or str(client).endswith((".toml", ".json")):
        reason = "the first argument is a client of Dask"
        raise ClusterError("a job in place of the client", reason, "give the job second, or by name: train(job=…)")
    return client


def tables_of(job: JobTables | None) -> dict[str, Any]:
    """Return a job's tables, as they are given. Raises JobError for what is no job."""
    if isinstance(job, Job):
        return job.model_dump(exclude_unset=True, by_alias=True)
    if isinstance(job, str | Path):
        return read_job_file(job)
    if job is not None and not isinstance(job, Mapping):
        raise JobError([f"job = {job!r:.60}: no job; give its tables, a daskcnn.Job, or the path of a job file"])
    return plain_numbers(dict(job or {}))


def plain_numbers(value: Any) -> Any:
    """Return the tables with numbers of NumPy as numbers, paths as texts. A class's number may stand for its name."""
    if isinstance(value, Mapping):
        numbers = int | np.integer
        return {str(key) if isinstance(key, numbers) else key: plain_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_numbers(inner) for inner in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if isinstance(value, np.generic) else value


def _check_pair(data: Any) -> None:
    if data is not None and not (isinstance(data, tuple | list) and len(data) == 2):
        raise DataError("data", f"{type(data).__name__} instead of a pair", "give (images, labels)")


@dataclass(frozen=True)
class DryRun:
    """A job with every default filled in, and what it would do: the text of `daskcnn run --dry-run`."""

    job: Job
    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return as_lines("What the job would do", self.text)


def dry_run(job: JobTables | None = None, *, data: tuple[Any, Any] | None = None) -> DryRun:
    """Say what a job would do. Nothing is trained, downloaded or kept.

    Parameters
    ----------
    job : tables, a `Job`, or the path of a job file; None for the built-in example.
    data : images and labels that the job would be trained on, as for `train`; they are written to a temporary folder
        meanwhile.

    Examples
    --------
    >>> print(daskcnn.dry_run(job))  # doctest: +ELLIPSIS
    data      ...
    """
    _check_pair(data)
    client, raw = given_or_default(None), dict(tables_of(job))
    path = None
    if data is not None and isinstance(section := raw.get("data"), Mapping):  # they are not kept at their place yet
        raw["data"] = {key: value for key, value in section.items() if key != "path"}
        path = section.get("path")
    with with_own_data(raw, data, client) as (tables, write):
        resolved = resolve(tables)
        if client is None:
            check_scheduler(resolved.cluster)
        check_scalable(resolved.cluster, client)
        write(resolved)
        prepared, told = planned(resolved, progress=shown(lambda _: None))
        if path is not None:
            at_path = prepared.job.data.model_copy(update={"path": str(path)})
            dataset = replace(prepared.dataset, path=str(path))
            prepared = replace(prepared, job=prepared.job.model_copy(update={"data": at_path}), dataset=dataset)
        return DryRun(prepared.job, readable_plan(prepared, told))
