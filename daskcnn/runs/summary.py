"""Results of a run, as files of its directory: its summary, and what `daskcnn evaluate --keep` found of its network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from daskcnn.documents import Bounds, first_problem, jsonable, read_json, write_json
from daskcnn.errors import DataError
from daskcnn.files import output_file

_REMEDY = "remove it, and resume the run to have it written again"
CheckpointTaken = Literal["last", "best"]
"""A `job.tables.CheckpointChoice`, whose module is slow to import."""
Known = Annotated[float | None, BeforeValidator(jsonable)]  # None if it was not measured, or is not finite


class _SummaryFields(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, from_attributes=True)


class Evaluated(_SummaryFields):
    """The quality of the network on some samples."""

    accuracy: Known
    loss: Known
    auc: Known = None
    metrics: dict[str, Known] = {}


class Traffic(_SummaryFields):
    """Bytes of all workers."""

    up: int
    down: int


class WorkerSummary(_SummaryFields):
    """A worker's totals, in seconds and samples. present: seconds that it took part; an older summary has none."""

    name: str
    device: str
    samples: int
    busy: float
    wait: float
    communication: float
    evaluation: float = 0.0
    present: float = 0.0


class AloneSummary(_SummaryFields):
    """The run's time to its best evaluation, and its fastest worker's by itself, as `show.alone` has it."""

    worker: str
    epoch: float
    accuracy: float | None
    seconds: float
    alone: float
    at_most: bool


class Summary(_SummaryFields):
    """The summary as `summary.json` and `--json` have it. epochs, seconds: of the training done.

    test, validation: None if the network was not evaluated on them. reason: why the run ended before its last epoch.
    weights, weights_epoch: those that the run hands back, "last" or "best", and the epoch that they are of. test,
    validation and checkpoint are theirs. no_kernels: workers of a network over all of them that have no part of it.
    """

    run: str
    status: str
    strategy: str
    epochs: float
    seconds: float
    images_per_second: float | None
    test: Evaluated | None
    validation: Evaluated | None
    bytes: Traffic
    workers: list[WorkerSummary]
    checkpoint: str | None
    reason: str | None = None
    weights: CheckpointTaken = "last"
    weights_epoch: float | None = None
    alone: AloneSummary | None = None
    no_kernels: list[str] = []


def checked_summary(summary: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a summary that was read from this file. Raises DataError if it is no `Summary`."""
    try:
        Summary.model_validate(summary)
    except ValidationError as error:
        raise DataError(path, first_problem(error), _REMEDY) from error
    return summary


NAME = "evaluation.json"
_BOUNDS = Bounds(size=32 << 20, values=2_000_000, tables=70_000)
"""A confusion matrix of a thousand classes, or the figures of 65,536."""
_KEPT_REMEDY = "leave --keep out, or make the folder writable"
_EVALUATION_REMEDY = "remove it, or run daskcnn evaluate --keep again"


class ClassFigures(BaseModel):
    """The figures of one class, or label."""

    model_config = ConfigDict(extra="ignore", serialize_by_alias=True)
    name: str = Field(alias="class")
    samples: NonNegativeInt
    precision: float | None
    recall: float | None
    auc: float | None


class KeptEvaluation(BaseModel):
    """The fields of an evaluation that a report shows, as `trained.evaluate` defines them."""

    model_config = ConfigDict(extra="ignore", serialize_by_alias=True)
    checkpoint: str
    choice: CheckpointTaken | None = None
    epoch: float | None = None
    data: str
    samples: NonNegativeInt
    labels: Literal["classes", "several", "image"]
    accuracy: float | None
    loss: float | None
    auc: float | None
    auc_samples: NonNegativeInt
    top5: float | None
    metrics: dict[str, float | None] = {}
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


def check_keeping(run: Path) -> None:
    """Raise DataError where the result of an evaluation cannot be kept."""
    output_file(run / NAME, _KEPT_REMEDY)


def keep_evaluation(run: Path, result: Mapping[str, Any]) -> None:
    """Write the result into the run directory, in place of an older one. Raises DataError."""
    try:
        write_json(run / NAME, result)
    except OSError as error:
        raise DataError(run / NAME, error.strerror or error, _KEPT_REMEDY) from error


def kept_evaluation(run: Path) -> dict[str, Any] | None:
    """Return the result that is kept in a run directory, or None. Raises DataError if it is damaged."""
    path = run / NAME
    if not path.exists():
        return None
    found = read_json(path, remedy=_EVALUATION_REMEDY, bounds=_BOUNDS)
    try:
        return KeptEvaluation.model_validate(found).model_dump()
    except ValidationError as error:
        raise DataError(path, first_problem(error), _EVALUATION_REMEDY) from error
