"""Going on with an earlier run: which one, and with which job."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from daskcnn.errors import DataError, JobError
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import Cluster, Job
from daskcnn.runs.checkpoint import latest
from daskcnn.runs.directory import RunDirectory, find_latest, kept_job, near
from daskcnn.runs.state import check_of, parse_record
from daskcnn.show.renderers.terminal import say

_PLACES = ("path", "images", "labels", "test_images", "test_labels")
"""Keys of `[data]` that may change when a run is resumed."""
_LONGEST = 160
"""Letters of a value in a message."""
_EPOCHS = "train.epochs"
"""The key that may change when a run is resumed by its folder: epochs in all, more than were trained."""


def has_checkpoint(run: Path | None) -> bool:
    """Return True if there is a run to go on with, and it has kept its weights."""
    return run is not None and any((run / "checkpoints").glob("step-*"))


def job_to_run(raw: dict[str, Any], resume: str | None) -> tuple[Job, Path | None]:
    """The job, and the run to go on with if any.

    A resumed run keeps its job but for where it runs and its data lie, and for its epochs. What is given beside them
    has to be what the run has. `auto` keeps the job whatever is given, but for more epochs of the same job.
    """
    path = run_to_resume(raw, resume)
    if path is None:
        return resolve(raw), None
    kept, asked = kept_job(RunDirectory.open(path)), resolve(raw)
    others = {key: values for key in sorted(_keys(raw)) if (values := _differing(key, kept, asked))}
    epochs = others.pop(_EPOCHS, None)
    if epochs and (resume != "auto" or (asked.train.epochs > kept.train.epochs and not others)):
        kept = _of_epochs(kept, asked.train.epochs, path)
    elif epochs:
        others[_EPOCHS] = epochs
    if others and resume != "auto":
        may = f"only {_EPOCHS}, [cluster] and data.path may change"
        raise JobError(
            [f"{key} = {_short(new)}: the run {path} has {_short(own)}; {may}" for key, (own, new) in others.items()]
        )
    for key, (own, new) in others.items():  # whatever has become of the job file
        kept_here = f"ignored, the run {path} keeps {_short(own)}; another run.name starts anew"
        say(f"warning: {key} = {_short(new)}: {kept_here}")
    data = kept.data.model_copy(update={key: getattr(asked.data, key) for key in _PLACES if key in raw.get("data", {})})
    return kept.model_copy(update={"data": data, "cluster": _moved(kept.cluster, asked.cluster)}), path


def epochs_of(run: RunDirectory) -> int:
    """The epochs that a run was to train when it went on last."""
    return kept_job(run).train.epochs


def _of_epochs(kept: Job, epochs: int, path: Path) -> Job:
    """The run's job with this number of epochs in all. Raises JobError where they are trained already, or misfit."""
    if epochs == kept.train.epochs:
        return kept
    found = latest(RunDirectory.open(path).checkpoints, warn=say, check=check_of(kept))
    done = 0.0 if found is None else parse_record(found.state, found.path).epoch
    if epochs <= done:
        reason = f"the run has trained {done:.4g} epochs already; give more, or use its checkpoint {path} as it is"
        raise JobError([f"{_EPOCHS} = {epochs}: {reason}"])
    tables = kept.model_dump(mode="json")
    schedule = tables["train"]["schedule"]
    if schedule["warmup"] >= epochs:  # of a run that is cut short: it may be a default
        schedule = {**schedule, "warmup": epochs / 4}
    return resolve({**tables, "train": {**tables["train"], "epochs": epochs, "schedule": schedule}})


def _differing(key: str, kept: Job, asked: Job) -> tuple[Any, Any] | None:
    """The values of this key in the run and in the new job; None if they are the same."""
    section, *names = key.split(".")
    own, other = (_value(getattr(job, section), names) for job in (kept, asked))
    return (own, other) if own != other else None


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _value(table: Any, names: Sequence[str]) -> Any:
    """The value of the key; None if there is no such key, as rules have their own."""
    return reduce(lambda inner, name: getattr(inner, name, getattr(inner, f"{name}_", None)), names, table)


def _keys(raw: Mapping[str, Any]) -> set[str]:
    """The keys that are given, but for those that may change when a run is resumed."""
    keys = {f"{section}.{key}" for section, table in raw.items() if section != "cluster" for key in table}
    return keys - {f"data.{key}" for key in _PLACES}


def _moved(kept: Cluster, asked: Cluster) -> Cluster:
    """The cluster to resume on: the run's own, with the keys that are asked for; one scheduler replaces another."""
    given = {key: getattr(asked, key) for key in asked.model_fields_set}
    if given.keys() & {"scheduler", "scheduler_file"}:
        given = {"scheduler": None, "scheduler_file": None} | given
    return kept.model_copy(update=given)


def run_to_resume(raw: Mapping[str, Any], resume: str | None) -> Path | None:
    """The run's folder; None to start a new one, for `auto` too where there is none yet."""
    if resume is None:
        return None
    if resume != "auto":
        path = Path(resume)
        if not (path / "job.json").is_file():
            remedy = f"give the folder that a run printed, or --resume auto{near(path)}"
            raise DataError(path, "no run there", remedy)
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
