"""Going on with an earlier run: which one, and with which job."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from secrets import token_hex
from typing import Any, Self

import numpy as np

from daskcnn.errors import DataError, JobError
from daskcnn.events import StrategyChosen
from daskcnn.job.checks import contradictions, most_increments
from daskcnn.job.prepared import Prepared
from daskcnn.job.resolve import changed, resolve
from daskcnn.job.tables import LAYER, Cluster, Job, Run
from daskcnn.runs.checkpoint import Checkpoint, latest
from daskcnn.runs.directory import RunDirectory, find_latest, kept_job, near, without_archive
from daskcnn.runs.state import check_of, facts_of, parse_record, replicas_of
from daskcnn.show.renderers.terminal import say
from daskcnn.training.coordinator.layer_records import REPLICA

_PLACES = ("path", "archive", "images", "labels", "test_images", "test_labels", "labelling")
"""Keys of `[data]` that may change when a run is resumed."""
_ONE_OF = (("scheduler", "scheduler_file"), ("only", "only_from"))
"""Keys of `[cluster]` of which a new one replaces the others."""
_LONGEST = 160
"""Letters of a value in a message."""
_ALIKE = 1e-6
"""Largest relative difference of the statistics of the same images: sums over other chunks round otherwise."""
_IMPORTS = "run.imports"
_TIME_LIMIT = "run.time_limit"
_EPOCHS = "train.epochs"
"""The key that may change when a run is resumed by its folder: epochs in all, more than were trained."""
_CHOSEN = ("train.strategy", "train.partition", "train.increments", "train.replica_size")
"""Keys that a run has decided by itself, where its strategy was `auto` and kernels are sharded."""


@dataclass(frozen=True)
class EarlierRun:
    """A run to go on with, and the job that its directory keeps."""

    directory: RunDirectory
    kept: Job

    @classmethod
    def at(cls, path: Path) -> Self:
        """Open a run to read. Raises DataError or JobError where it is no run, or is damaged."""
        directory = RunDirectory.open(path)
        return cls(directory, kept_job(directory))


def begins(earlier: EarlierRun | None) -> bool:
    """Return True if training starts anew: there is no run to go on with, or it has kept no weights."""
    return earlier is None or not any(earlier.directory.checkpoints.glob("step-*"))


def job_to_run(raw: dict[str, Any], resume: str | None, *, own_data: bool = False) -> tuple[Job, EarlierRun | None]:
    """Return the job, and the run to go on with if any.

    A resumed run keeps its job, but for `[cluster]`, the places of its data, its time limit, and its epochs. Every
    other key that is given has to be as the run has it. `auto` keeps the job whatever is given, but for more epochs of
    the same job. Strategy `auto` is that of a run that has chosen for itself. Raises JobError for keys of `[cluster]`
    that the kept job contradicts, too.

    own_data : whether `[data]` is that of arrays, of which the path alone counts for a resumed run.
    """
    asked = resolve(raw)
    path = run_to_resume(asked.run, resume)
    if path is None:
        return asked, None
    earlier = EarlierRun.at(path)
    kept = earlier.kept
    keys = {f"{section}.{key}" for section, table in raw.items() if section != "cluster" for key in table}
    keys = {key for key in keys if not (own_data and key.startswith("data."))} - {f"data.{key}" for key in _PLACES}
    keys -= {_IMPORTS, _TIME_LIMIT}  # modules are imported, and the run keeps its own
    if raw.get("train", {}).get("batch_size") == "auto":  # the data set chose the samples of the first steps
        keys = keys - {"train.batch_size"} | {"train.largest_batch"}
    others = {key: values for key in sorted(keys) if (values := _differing(key, kept, asked))}
    if _chooses(asked) and not _chooses(kept) and _has_chosen(earlier):
        others = {key: values for key, values in others.items() if key not in _CHOSEN}
    epochs = others.pop(_EPOCHS, None)
    if epochs and (resume != "auto" or (asked.train.epochs > kept.train.epochs and not others)):
        kept = _of_epochs(earlier, asked.train.epochs)
    elif epochs:
        others[_EPOCHS] = epochs
    if others and resume != "auto":
        may = f"only {_EPOCHS}, {_TIME_LIMIT}, [cluster] and the data's places (data.path, data.images, …) may change"
        raise JobError(
            [f"{key} = {_short(new)}: the run {path} has {_short(own)}; {may}" for key, (own, new) in others.items()]
        )
    for key, (own, new) in others.items():  # whatever has become of the job file
        kept_here = f"ignored, the run {path} keeps {_short(own)}; another run.name starts anew"
        say(f"warning: {key} = {_short(new)}: {kept_here}")
    data = kept.data.model_copy(update={key: getattr(asked.data, key) for key in _PLACES if key in raw.get("data", {})})
    run = kept.run if asked.run.time_limit is None else kept.run.model_copy(update={"time_limit": asked.run.time_limit})
    job = kept.model_copy(update={"cluster": _cluster_of(kept, asked), "run": run})
    if problems := [*contradictions(job, ())]:
        raise JobError([f"{problem}; the run {path} keeps the rest of its job" for problem in problems])
    return without_archive(job.model_copy(update={"data": data})), earlier


def _cluster_of(kept: Job, asked: Job) -> Cluster:
    """Return the machines of a run that goes on: its own, and over them the keys that are given."""
    given = {key: getattr(asked.cluster, key) for key in asked.cluster.model_fields_set}
    for keys in _ONE_OF:
        if given.keys() & {*keys}:
            given = dict.fromkeys(keys) | given
    if given.keys() & {"workers", "scheduler", "scheduler_file"}:  # not the cluster or the range that it was told of
        given = {"adapt": False} | given
    return kept.cluster.model_copy(update=given)


def _chooses(job: Job) -> bool:
    return job.rule is not None and job.rule.chooses_workers


def _has_chosen(earlier: EarlierRun) -> bool:
    return any(isinstance(event, StrategyChosen) for event in earlier.directory.events())


def _of_epochs(earlier: EarlierRun, epochs: int) -> Job:
    """Return the job with this number of epochs in all. Raises JobError if they are trained already, or misfit."""
    kept, path = earlier.kept, earlier.directory.path
    found = latest(earlier.directory.checkpoints, warn=say, check=check_of(kept))
    done = 0.0 if found is None else parse_record(found.state, found.path).epoch
    if epochs <= done:
        reason = f"the run has trained {done:.4g} epochs already; give more, or use its checkpoint {path} as it is"
        raise JobError([f"{_EPOCHS} = {epochs}: {reason}"])
    given = kept.train.increments  # a longer run has no more of them: all samples may be given already
    return resolve(changed(kept, epochs=epochs, increments=given and min(given, most_increments(epochs))))


def _differing(key: str, kept: Job, asked: Job) -> tuple[Any, Any] | None:
    """Return a key's values in the run and in the new job; None if they are the same."""

    def value(table: Any, name: str) -> Any:  # None where there is no such key, as rules have their own
        return getattr(table, name, getattr(table, f"{name}_", None))

    own, other = (reduce(value, key.split("."), job) for job in (kept, asked))
    return (own, other) if own != other else None


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def run_to_resume(settings: Run, resume: str | None) -> Path | None:
    """Return the run's folder; None to start a new one, for `auto` too where there is none yet."""
    if resume is None:
        return None
    if resume != "auto":
        path = Path(resume)
        if not (path / "job.json").is_file():
            remedy = f"give the folder that a run printed, or --resume auto{near(path)}"
            raise DataError(path, "no run there", remedy)
        return path
    if settings.name is None:
        return find_latest(settings.dir)
    named = Path(settings.dir) / settings.name
    if (named / "job.json").is_file():
        return named
    if (named / "lock").is_file() and not any((named / "checkpoints").glob("*")):  # killed before it wrote its job
        unused = named.with_name(f".{named.name}-{token_hex(4)}")
        with RunDirectory(named, writable=True):  # no other process is about to begin it
            named.rename(unused)
        shutil.rmtree(unused, ignore_errors=True)  # NFS refuses that while files of it are open
        say(f"{named}: this run was stopped before it began; it starts anew")
    return None


def check_same_data(checkpoint: Checkpoint, prepared: Prepared) -> None:
    """Raise DataError where the checkpoint is of other data than those of the job, or lacks what going on needs."""
    found, dataset = facts_of(checkpoint), prepared.dataset
    if (found.classes, found.shape) != (dataset.classes, dataset.shape):
        raise DataError(dataset.path, f"other classes or shapes than {checkpoint.path} was trained on", "give its data")
    of_both = ((getattr(found, name), getattr(dataset, name)) for name in ("mean", "deviation"))
    if not all(np.allclose(*pair, rtol=_ALIKE) for pair in of_both):
        reason = f"images with another mean or deviation than {checkpoint.path} was trained on"
        raise DataError(dataset.path, reason, "give its data")
    record, remedy = parse_record(checkpoint.state, checkpoint.path), "take another checkpoint of the run"
    allocation = record.allocation
    if allocation is not None and allocation.total != prepared.samples:
        reason = f"{prepared.samples:,} samples to train on, {checkpoint.path} was trained on {allocation.total:,}"
        raise DataError(dataset.path, reason, "give its data")
    if prepared.job.train.strategy == LAYER:
        if REPLICA not in replicas_of(checkpoint):
            raise DataError(checkpoint.path, "no optimizer's state of a layer-sharded run", remedy)
    elif allocation is None and checkpoint.state["book"]:
        raise DataError(checkpoint.path, "its state does not say who has which samples", remedy)
