"""The base of all events, and the fields that several share. `events` has the events."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, field_validator

from daskcnn.errors import DataError


class DamagedEvent(DataError):
    """A record of a log is no event, or has a field that is wrong."""


class Fields(BaseModel):
    """Checked, frozen fields. A constructor takes no others; a reader passes over those of another version."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Event(Fields):
    """One event. `kind` names it in the log."""

    kind: ClassVar[str] = ""
    at: Annotated[float | None, "Seconds, of any clock, at which it was logged; set by the log."] = None

    @field_validator("at", mode="before")
    @classmethod
    def _seconds(cls, at: Any) -> Any:
        return datetime.fromisoformat(at).timestamp() if isinstance(at, str) else at

    def record(self) -> dict[str, Any]:
        """The JSON object of the log: its kind, its time if it has one, and the fields that were given."""
        fields = self.model_dump(mode="json", exclude_unset=True)
        if self.at is None:
            fields.pop("at", None)
        return {"event": self.kind, **fields}

    def logged(self, at: float) -> Self:
        """The same event with its time, in seconds."""
        return self.model_copy(update={"at": at})


class UnknownEvent(Event):
    """An event of a kind that this version does not know; readers pass over it."""

    name: Annotated[str, "The kind, as the log names it."]


class Judged(Fields):
    """The quality of a network on some samples."""

    accuracy: Annotated[float | None, "Share of right classes or labels, 0 to 1; none for `reconstruction`."] = None
    loss: Annotated[float | None, "Mean loss per sample; all samples count alike."] = None
    auc: Annotated[float | None, "Area under the ROC curve, the mean over classes or labels, 0 to 1."] = None
    samples: Annotated[NonNegativeInt | None, "Samples it was judged on, where they are a part of those set apart."] = (
        None
    )
    error: Annotated[
        NonNegativeFloat | None, "Standard error of `accuracy` as that of all of them; none without part."
    ] = None
    metrics: Annotated[dict[str, float | None], "Means of the job's metrics (`train.metrics`), by name."] = {}


class Spent(Fields):
    """Time and traffic of a worker on its part of a network."""

    name: Annotated[str, "The worker."]
    busy: Annotated[NonNegativeFloat, "Seconds it computed."] = 0.0
    conv_seconds: Annotated[dict[str, float], "Seconds in each convolution layer, by layer."] = {}
    conv_samples: Annotated[dict[str, float], "Samples that `conv_seconds` were spent on, by layer."] = {}
    bytes_up: Annotated[NonNegativeInt, "Bytes it sent."] = 0
    bytes_down: Annotated[NonNegativeInt, "Bytes it received."] = 0
