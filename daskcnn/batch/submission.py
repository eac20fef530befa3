"""A job on its way into a queue, on the submitter's side: its tables with whole paths, and its modules' sources."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import tomli_w

from daskcnn.batch.asking import Ask, user_name
from daskcnn.errors import JobError
from daskcnn.job.own_members import interactive_names
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import Job
from daskcnn.modules import own_modules
from daskcnn.store import DATASETS

_SQLITE = "sqlite:///"
_PLACES = ("path", "archive", "images", "labels", "test_images", "test_labels")


def message_of(
    raw: Mapping[str, Any],
    *,
    priority: int = 0,
    after: Sequence[int] = (),
    hold: bool = False,
    sweep: str = "",
    stop: str = "",
) -> dict[str, Any]:
    """Return a job as the service takes it.

    The queue says which scheduler, workers and run it has; the tables that are sent say nothing of them. What is
    submitted counts: a file that is changed later changes nothing. Data are looked for in this folder. A built-in data
    set that the service does not see at its usual path here is made at that of the service's folder.
    Raises JobError for a job that cannot be run, and DataError for modules that are missing here or too large.
    """
    job = resolve(raw)
    asked = job.cluster.workers
    if names := interactive_names(job):
        own = ", ".join(names)
        raise JobError([f"{own}: added by a notebook or a script; put it into a module, and name it in run.imports"])
    return {
        "token": uuid4().hex,
        "user": user_name(),
        "content": _content(raw, job),
        "makes_data": job.data.name in DATASETS,
        "usual_path": raw.get("data", {}).get("path") is None,
        "folder": str(Path(job.run.dir).absolute()) if "dir" in job.run.model_fields_set else "",
        "name": job.run.name or "",
        "priority": priority,
        "after": [*after],
        "workers": {kind: [asked.given[kind], most] for kind, most in asked.most.items() if most},
        "only": job.cluster.only or [],
        "sweep": sweep,
        "stop": stop,
        "modules": _sources(job),
        "held": hold,
    }


def _content(raw: Mapping[str, Any], job: Job) -> dict[str, Any]:
    tables = {section: dict(table) for section, table in raw.items()}
    left_out = {"cluster": ("scheduler", "scheduler_file", "workers", "only", "only_from"), "run": ("name", "dir")}
    for section, keys in left_out.items():
        tables[section] = {key: value for key, value in tables.get(section, {}).items() if key not in keys}
    if job.run.imports:
        tables["run"]["imports"] = job.run.imports
    if job.run.mlflow is not None:
        tables["run"]["mlflow"] = _whole(job.run.mlflow)
    data = tables.get("data", {})
    places = {key: getattr(job.data, key) for key in _PLACES if key == "path" or data.get(key) is not None}
    tables["data"] = data | places
    if job.model.from_ is not None:
        tables["model"]["from"] = job.model.from_
    content = _without_nothing(tables)
    try:
        tomli_w.dumps(content)
    except (TypeError, ValueError) as error:
        raise JobError([f"the job cannot be sent ({error}); write it with numbers, texts, lists and tables"]) from error
    return content


def _whole(uri: str) -> str:
    """Return a URI of MLflow whose file does not depend on the folder that the driver works in."""
    path = uri.removeprefix(_SQLITE)
    return uri if path == uri or path[:1] in ("", ":", "/") else f"{_SQLITE}{Path(path).absolute()}"


def _without_nothing(value: Any) -> Any:
    """Return the tables without keys whose value is None: TOML has no such value, and the default is meant."""
    if isinstance(value, Mapping):
        return {str(key): _without_nothing(inner) for key, inner in value.items() if inner is not None}
    return [_without_nothing(inner) for inner in value] if isinstance(value, list | tuple) else value


def _sources(job: Job) -> list[tuple[str, str]]:
    modules = own_modules(job.run.imports or ())
    return [(path, source.decode()) for module in modules for path, source in module.files.items()]


TRIES, PAUSE = 3, 2.0
"""Attempts to have a submission acknowledged, and seconds between them."""


def send(ask: Ask, jobs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Queue jobs, all or none, and return the service's answer, once they are on its disk.

    A submission that is not acknowledged is sent again: by its token the service knows what it has. Raises UserError.
    """
    from daskcnn.batch.desk import Unacknowledged  # brings Dask, which the way to a spool does without

    for left in range(TRIES - 1, -1, -1):
        try:
            answer: dict[str, Any] = ask("submit", jobs=[*jobs])
            return answer
        except Unacknowledged:
            if not left:
                raise
            time.sleep(PAUSE)
    raise AssertionError("it has returned or raised")
