"""What `daskcnn evaluate --keep` found of a run's network, kept in its directory as `evaluation.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from daskcnn.documents import Bounds, read_json
from daskcnn.errors import DataError
from daskcnn.runs.files import write_json

NAME = "evaluation.json"
_BOUNDS = Bounds(size=32 << 20, values=2_000_000, tables=70_000)
"""A confusion matrix of a thousand classes, or the figures of 65,536."""
_REMEDY = "remove it, or run daskcnn evaluate --keep again"


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
    found = read_json(path, remedy=_REMEDY, bounds=_BOUNDS)
    try:
        return KeptEvaluation.model_validate(found).model_dump()
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"])) or "fields"
        raise DataError(path, f"{where}: {problem['msg'].removeprefix('Value error, ')}", _REMEDY) from error
