"""The job of a fit: tables of the estimator, its parameter `job` laid over them, and what that may not hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from daskcnn.errors import JobError
from daskcnn.job.network import reconstructs
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import LAYER, Job
from daskcnn.launch.jobs import JobTables, tables_of
from daskcnn.ps import RULES

_SAMPLES = "the samples of a fit are its X and y; remove it"
_RUN_DIR = "the runs of fits are kept in run_dir; give that"
FIXED = {
    **{f"data.{key}": _SAMPLES for key in ("path", "name", "archive", "order", "images", "labels")},
    **{f"data.{key}": _SAMPLES for key in ("test", "test_images", "test_labels", "layout", "labelling", "seed")},
    "data.nodata": "what stands for no data is a parameter of the estimator; give nodata",
    "run.dir": _RUN_DIR,
}
"""Keys that a fit itself gives, with the reason and the remedy."""
PARAMETERS = {
    "data.validation": "validation_fraction",
    "model.name": "model",
    "model.layers": "model",
    "train.strategy": "strategy",
    "train.epochs": "epochs",
    "train.batch_size": "batch_size",
    "train.lr": "lr",
    "train.optimizer": "optimizer",
    "train.seed": "random_state",
}
"""Keys that a parameter of the estimator stands for."""
_NEVER = 1e9
"""Epochs between two checkpoints of a fit, which is more than it has: it keeps one, at its end."""


def merged(tables: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables with those keys laid over them, table by table."""
    found = dict(tables)
    for key, value in over.items():
        below = found.get(key)
        found[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return found


def laid_over(job: JobTables | None) -> dict[str, Any]:
    """Return the tables of an estimator's `job`; classes keep their labels. Raises JobError for what is no job."""
    return dict(job) if isinstance(job, Mapping) else tables_of(job)


def network_tables(model: str | Sequence[Mapping[str, Any]] | None, classes: int) -> dict[str, Any]:
    """Return the table of an estimator's `model`; a last dense layer without units has one for each class."""
    if isinstance(model, str):
        return {"name": model}
    if model is None:
        return {}
    if isinstance(model, Mapping) or not isinstance(model, Sequence):
        raise JobError([f"model = {model!r:.60}: give the name of a network, or a list of layers"])
    given: list[Any] = [dict(layer) if isinstance(layer, Mapping) else layer for layer in model]
    if given and isinstance(given[-1], dict) and given[-1].get("layer") == "dense":
        given[-1].setdefault("units", classes)
    return {"layers": given}


def seed_of(random_state: Any) -> int:
    """Return the seed that a number, a generator of NumPy or None stands for."""
    if isinstance(random_state, int | np.integer):
        return int(random_state)
    if random_state is None or isinstance(random_state, np.random.Generator):
        return int(np.random.default_rng(random_state).integers(2**31))
    if not hasattr(random_state, "randint"):
        raise ValueError(f"random_state={random_state!r:.60}: give a whole number, a generator of NumPy, or None")
    return int(random_state.randint(2**31 - 1))


def fit_job(
    given: Mapping[str, Any], over: Mapping[str, Any], fixed: Mapping[str, str], *, client: bool, kept: bool
) -> Job:
    """Return the job of a fit. Raises JobError with every problem found.

    Parameters
    ----------
    given : tables of the estimator.
    over : tables that are laid over them.
    fixed : keys that `over` may not have, with the reason and the remedy.
    client : whether the estimator has a client of a cluster.
    kept : whether the runs of fits are kept.
    """
    tables = merged(given, over)
    problems = [f"{key}: {reason}" for key, reason in fixed.items() if _at(over, key) is not None]
    if client and (key := scheduler_in(over)):
        problems.append(f"{key}: the estimator has a client; keep one of the two")
    if not kept and _at(over, "run.tensorboard"):
        problems.append("run.tensorboard: the runs of fits are not kept; give run_dir")
    if problems:
        raise JobError([f"job: {problem}" for problem in problems])
    alone = not client and not scheduler_in(over)
    job = resolve(merged(_usual(tables, alone=alone, kept=kept), tables))
    problems = [*beyond_one_worker(job)] if alone else []
    if reconstructs(job):
        problems.append(f"train.loss = {job.train.loss!r}: a classifier has classes; use daskcnn.train")
    if problems:
        raise JobError(problems)
    return job


def scheduler_in(tables: Mapping[str, Any]) -> str | None:
    """Return the key that names a scheduler; None where none does."""
    return next((key for key in ("cluster.scheduler", "cluster.scheduler_file") if _at(tables, key)), None)


def beyond_one_worker(job: Job) -> Iterator[str]:
    """Yield a line for each demand that the one worker of this process cannot meet."""
    one = "a fit without a client has one CPU worker, in this process; give client, or cluster.scheduler in job"
    if job.cluster.workers.most not in ({}, {"cpu": 1}, {"cpu": 1, "gpu": 0}):
        yield f"cluster.workers = {job.cluster.workers.text}: {one}"
    if job.train.replica_size > 1:
        yield f"train.replica_size = {job.train.replica_size}: {one}"
    if job.rule is not None and job.rule.fewest > 1:
        yield f"train.strategy = {job.train.strategy!r} is for {job.rule.fewest} workers or more: {one}"


def _usual(tables: Mapping[str, Any], *, alone: bool, kept: bool) -> dict[str, dict[str, Any]]:
    """Return what suits a fit where neither the estimator nor its `job` says otherwise.

    alone : whether the fit has one worker, which has all samples. Without `kept` a fit that was cut short is never
    resumed: it keeps its end, and its best weights where it hands those back.
    """
    strategy, patience = _at(tables, "train.strategy"), _at(tables, "train.early_stopping")
    hands_back_best = _at(tables, "train.restore_best")
    best = patience is not None if hands_back_best is None else hands_back_best
    return {
        "data": {"augment": "none"},
        "train": {"partition": "udpa"} if alone and strategy != LAYER and strategy in RULES else {},
        "cluster": {"settle": 0.0},
        "run": {} if kept else {"keep": 1, **({} if best else {"checkpoint_every": _NEVER})},
    }


def _at(tables: Mapping[str, Any], key: str) -> Any:
    """Return the value of `section.key`; None where there is none, or no such table."""
    section, _, name = key.partition(".")
    table = tables.get(section)
    return table.get(name) if isinstance(table, Mapping) else None


def weights_by_name(tables: dict[str, Any], names: Mapping[Any, str]) -> dict[str, Any]:
    """Return the tables with weights of classes by the names that the data set has for the labels of y."""
    weights = _at(tables, "train.class_weights")
    if not isinstance(weights, Mapping):
        return tables
    by_name = {names.get(label, label): weight for label, weight in weights.items()}
    return {**tables, "train": {**tables["train"], "class_weights": by_name}}
