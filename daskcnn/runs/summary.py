"""The summary of a run, for programs: how it ended, what it did, and with which workers.

What `daskcnn evaluate --keep` found of a run's network, kept in its directory as `evaluation.json`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from daskcnn.documents import Bounds, jsonable, read_json, write_json
from daskcnn.errors import DataError
from daskcnn.events import EpochEnded, EpochWorker, Event, GroupsFormed, RoundEnded, WorkersCalibrated

Parts = Mapping[str, Any]
_REMEDY = "remove it, and resume the run to have it written again"
_WORKER_FIELDS = ("name", "device", "samples", "busy", "wait", "communication", "evaluation")


class _SummaryFields(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Result(_SummaryFields):
    accuracy: float | None
    loss: float | None
    auc: float | None = None


class _Traffic(_SummaryFields):
    up: float
    down: float


class _Worker(_SummaryFields):
    name: str
    device: str
    samples: float
    busy: float
    wait: float
    communication: float
    evaluation: float = 0.0


class _Summary(_SummaryFields):
    run: str
    status: str
    strategy: str
    epochs: float
    seconds: float
    images_per_second: float | None
    test: _Result | None
    validation: _Result | None
    bytes: _Traffic
    workers: list[_Worker]
    checkpoint: str | None
    reason: str | None = None


def checked_summary(summary: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a summary that was read from this file. Raises DataError where it is none of `build_summary`'s."""
    try:
        _Summary.model_validate(summary)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(path, f"{where} = {first['input']!r:.60}: {first['msg']}", _REMEDY) from error
    return summary


def build_summary(
    *,
    run: str | Path,
    status: str,
    strategy: str,
    epochs: float,
    seconds: float,
    samples: int,
    test: Parts | None,
    validation: Parts | None,
    bytes_up: int,
    bytes_down: int,
    workers: Sequence[Parts],
    checkpoint: str | Path | None,
    reason: str | None = None,
) -> dict[str, Any]:
    """The summary as `summary.json` and `--json` have it.

    `epochs` and `seconds` are those of the training done, `samples` the presentations in them; `test` and
    `validation` hold accuracy, loss and AUC, None where none was taken; `workers` hold the fields of `worker_totals`.
    reason: why it ended before its last epoch.
    """
    return jsonable(
        {
            "run": str(run),
            "status": status,
            "strategy": strategy,
            "epochs": epochs,
            "seconds": seconds,
            "images_per_second": samples / seconds if seconds > 0 else None,
            "test": test,
            "validation": validation,
            "bytes": {"up": bytes_up, "down": bytes_down},
            "workers": [{key: worker[key] for key in _WORKER_FIELDS} for worker in workers],
            "checkpoint": None if checkpoint is None else str(checkpoint),
            "reason": reason,
        }
    )


def worker_totals(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Each worker's device, samples trained on, seconds of each kind, and bytes, over the run.

    Taken from the events of a log, over a resume too: calibrations, and rounds or, where kernels are sharded, epochs;
    there all workers train on every sample, and communication counts as waiting.
    """
    totals: dict[str, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, WorkersCalibrated):
            for worker in event.workers:
                _total(totals, worker.name)["device"] = worker.device
        elif isinstance(event, GroupsFormed):  # which take the place of their members
            for group in event.groups:
                for member in group.members:
                    totals.pop(member, None)
                _total(totals, group.name)["device"] = group.device
        elif isinstance(event, RoundEnded):
            _add(_total(totals, event.worker), event)
        elif isinstance(event, EpochEnded):
            for part in event.workers:
                _add(_total(totals, part.name), part)
    return list(totals.values())


def _add(total: dict[str, Any], parts: RoundEnded | EpochWorker) -> None:
    for key in ("samples", "busy", "wait", "communication", "bytes_up", "bytes_down"):
        total[key] += getattr(parts, key)
    total["evaluation"] += parts.evaluation if isinstance(parts, RoundEnded) else 0.0


def _total(totals: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    zeros = {"samples": 0, "bytes_up": 0, "bytes_down": 0}
    seconds = dict.fromkeys(("busy", "wait", "communication", "evaluation"), 0.0)
    return totals.setdefault(name, {"name": name, "device": "", **zeros, **seconds})


NAME = "evaluation.json"
_BOUNDS = Bounds(size=32 << 20, values=2_000_000, tables=70_000)
"""A confusion matrix of a thousand classes, or the figures of 65,536."""
_EVALUATION_REMEDY = "remove it, or run daskcnn evaluate --keep again"


class ClassFigures(BaseModel):
    """How well one class, or label, is told."""

    model_config = ConfigDict(extra="ignore", serialize_by_alias=True)
    name: str = Field(alias="class")
    samples: NonNegativeInt
    precision: float | None
    recall: float | None
    auc: float | None


class KeptEvaluation(BaseModel):
    """The fields of an evaluation that a report shows; `trained.evaluate` says what they mean."""

    model_config = ConfigDict(extra="ignore", serialize_by_alias=True)
    checkpoint: str
    data: str
    samples: NonNegativeInt
    labels: Literal["classes", "several", "image"]
    accuracy: float | None
    loss: float | None
    auc: float | None
    auc_samples: NonNegativeInt
    top5: float | None
    views: str = "none"
    classes: tuple[ClassFigures, ...]
    confusion: tuple[tuple[NonNegativeInt, ...], ...] | None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.accuracy is None and self.labels != "image":
            raise ValueError(f"there is no accuracy, and labels = {self.labels!r} have one")
        n = len(self.classes)
        if self.confusion is not None and [len(row) for row in self.confusion] != [n] * n:
            raise ValueError(f"confusion has not {n} rows of {n} numbers")
        return self


def keep_evaluation(run: Path, result: Mapping[str, Any]) -> None:
    """Write the result into the run directory, in place of an older one. Raises DataError."""
    try:
        write_json(run / NAME, result)
    except OSError as error:
        raise DataError(run / NAME, error.strerror or error, "leave --keep out, or make the folder writable") from error


def kept_evaluation(run: Path) -> dict[str, Any] | None:
    """The result that is kept in a run directory; None where there is none. Raises DataError where it is damaged."""
    path = run / NAME
    if not path.exists():
        return None
    found = read_json(path, remedy=_EVALUATION_REMEDY, bounds=_BOUNDS)
    try:
        return KeptEvaluation.model_validate(found).model_dump()
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"])) or "fields"
        raise DataError(path, f"{where}: {problem['msg'].removeprefix('Value error, ')}", _EVALUATION_REMEDY) from error
