"""The base of all events, and the fields that several share. `events` has the events."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt, field_validator

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


ALONE = "alone"
"""The strategy of a worker that trains by itself."""
SURE = 1.2
"""Sharded layers and groups have to be expected to be this many times sooner: not all of their seconds are measured."""
APART = 1.15
"""Local steps have to be expected to be this many times sooner: the samples that they need are measured with other
networks, and after the same epochs they are less accurate."""
SURER = 1.25
"""Factor by which a change has to be better: more than two measurements, each a tenth off, differ."""


def asked_of(needed: float, *, estimated: bool) -> float:
    """Return how many times sooner a strategy has to be expected to be than one that makes the steps of one machine.

    needed: samples that it needs for the progress of one sample there. estimated: not all of its seconds are measured.
    """
    return APART if needed != 1 else SURE if estimated else 1.0


class CalibratedWorker(Fields):
    """A worker, and what it measured of itself."""

    name: Annotated[str, "The worker."]
    address: Annotated[str, "Its Dask address."] = ""
    host: Annotated[str, "Its computer."] = ""
    device: Annotated[str, 'What it trains on: "cpu" or "gpu".'] = ""
    processor: Annotated[str, "The processor's or GPU's name."] = ""
    threads: Annotated[int | None, "Threads it computes with."] = None
    cores: Annotated[PositiveInt | None, "Cores of its computer that it may use."] = None
    memory: Annotated[NonNegativeInt | None, "Bytes of memory of its device."] = None
    images_per_second: Annotated[NonNegativeFloat | None, "Images it trains on per second."] = None
    conv_seconds: Annotated[dict[str, float], "Seconds per sample of each convolution, all kernels, by layer."] = {}
    conv_fixed: Annotated[
        dict[str, float], "The part of `conv_seconds` that does not shrink with a shard, by layer."
    ] = {}
    rest_seconds: Annotated[NonNegativeFloat | None, "Seconds per sample of the layers that are not sharded."] = None
    step_fixed: Annotated[
        NonNegativeFloat | None, "Seconds of a step, however few its samples are; measured where workers share a step."
    ] = None
    largest_step: Annotated[NonNegativeInt | None, "Samples of the largest step that its memory has room for."] = None


class PricedStep(Fields):
    """A strategy that was compared, and its step: the way from one meeting to the next."""

    strategy: Annotated[str, "The strategy; `alone`: a worker by itself."]
    samples: Annotated[dict[str, NonNegativeInt], "Samples of the step, by worker that would take part."]
    every: Annotated[NonNegativeInt | None, "Minibatches of the fastest worker in it, where each makes its own."] = None
    group: Annotated[NonNegativeInt | None, "Workers of each group, whose samples each of them has."] = None
    needed: Annotated[float, "Expected samples for the progress that one sample of a shared step makes."] = 1.0
    estimated: Annotated[bool, "Seconds of sharded layers and of Dask's tasks are not measured."] = False
    compute: Annotated[NonNegativeFloat, "Expected seconds until the slowest of them has computed."]
    exchange: Annotated[NonNegativeFloat, "Expected seconds of their exchange."]
    seconds: Annotated[NonNegativeFloat, "Expected seconds per sample of progress, by which strategies are compared."]


class WorkerGain(Fields):
    """A worker's part in the choice of a strategy."""

    worker: Annotated[str, "The worker."]
    used: Annotated[bool, "It takes part."]
    apart: Annotated[
        bool, "Workers would make steps of their own: for a step read the progress that one shared step makes."
    ] = False
    with_it: Annotated[NonNegativeFloat, "Expected seconds of a step with it."]
    without: Annotated[NonNegativeFloat, "Expected seconds of a step without it."]
    brings: Annotated[float, "Seconds of a step by which it shortens the others' computing."]
    costs: Annotated[float, "Seconds of a step that it adds to the exchange."]

    @property
    def step(self) -> str:
        """The step that its seconds are of, in words."""
        return "the progress of one shared step" if self.apart else "a step"

    @property
    def why_left_out(self) -> str:
        """The reason why it costs more than it brings, with figures."""
        brings = self.brings if abs(self.brings) > _NOTHING else 0.0
        verb, adds = ("saves", " adds") if brings >= 0 else ("adds", "")
        computing = f"it {verb} {step_time(abs(brings))} of computing and{adds}"
        times = f"{step_time(self.with_it)} instead of {step_time(self.without)}"
        return f"with it {self.step} would take {times}: {computing} {step_time(self.costs)} of exchange"


_NOTHING = 1e-9  # seconds


def step_time(seconds: float) -> str:
    """Return the seconds of a step in words: 24.1 ms."""
    return f"{1e3 * seconds:.3g} ms" if abs(seconds) < 1 else f"{seconds:.3g} s"
