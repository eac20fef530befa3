"""Every event of a run, typed: who writes one constructs it, the log is its JSON, who reads a log parses it.

A log line is one JSON object: "event" names the kind, "at" is the time, the rest are the event's fields. Fields that a
writer does not give are left out. Times are seconds, sizes bytes. The log's "at" is a date and time with its zone, or
seconds in a simulation; a parsed event has it in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeFloat,
    NonNegativeInt,
    ValidationError,
    field_validator,
    model_validator,
)

from daskcnn.errors import DataError, told

_REMEDY = "remove that line to read the rest, or give the log of a run of this version"


class DamagedEvent(DataError):
    """A record of a log is no event, or has a field that is wrong."""


class Fields(BaseModel):
    """Checked, frozen fields. A constructor takes no others; a reader passes over those of another version."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Event(Fields):
    """One event. `kind` names it in the log."""

    kind: ClassVar[str] = ""
    at: float | None = None
    """When it was logged, in seconds of any clock. The log writes it; a constructor leaves it out."""

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

    name: str
    """The kind, as the log names it."""


class Judged(Fields):
    """How good a network is on some samples."""

    accuracy: float | None = None
    """Share of samples classified correctly, 0 to 1; of labels told correctly where a sample has several. None for a
    loss without right answers, such as `reconstruction`."""
    loss: float | None = None
    """Mean loss per sample; all samples count alike."""
    auc: float | None = None
    """Area under the ROC curve of one class against the rest, averaged over the classes or labels, 0 to 1."""


class Spent(Fields):
    """Time and traffic of a worker on its part of a network."""

    name: str
    """The worker."""
    busy: NonNegativeFloat = 0.0
    """Seconds it computed."""
    conv_seconds: dict[str, float] = {}
    """Seconds in each convolution layer, by layer."""
    conv_samples: dict[str, float] = {}
    """Samples that `conv_seconds` were spent on, by layer."""
    bytes_up: NonNegativeInt = 0
    """Bytes it sent."""
    bytes_down: NonNegativeInt = 0
    """Bytes it received."""


# --- the run ---


class RunStarted(Event):
    """A run starts, or is started again by a resume."""

    kind = "start"
    run: str = ""
    """The run directory."""
    strategy: str = ""
    """The update rule, or "layer" for layer sharding (`train.strategy`)."""
    partition: str | None = None
    """The partitioner (`train.partition`)."""
    increments: int | None = None
    """Parts in which samples are allocated (`train.increments`)."""
    replica_size: int | None = None
    """Workers per replica (`train.replica_size`)."""
    rule: dict[str, Any] = {}
    """The options of the update rule."""
    dataset: str | None = None
    """The data set's name."""
    model: str | None = None
    """The network's name, or its number of layers."""
    epochs: float | None = None
    """Epochs to train."""
    batch_size: int | None = None
    """Samples in a minibatch."""
    optimizer: str | None = None
    """The optimizer (`train.optimizer`)."""
    lr: float | None = None
    """The learning rate at the start (`train.lr`)."""
    seed: int | None = None
    """The run's seed."""
    samples: NonNegativeInt | None = None
    """Training samples, without those for validation."""
    validation_samples: NonNegativeInt | None = None
    """Samples held back for validation."""
    parameters: NonNegativeInt | None = None
    """Parameters of the network."""
    wire: str | None = None
    """The dtype in which weights travel."""
    vector_bytes: NonNegativeInt | None = None
    """Bytes of the weights as they travel."""
    simulated: bool = False
    """Whether it is a simulation: seconds are predicted, and nothing is trained."""


class RunResumed(Event):
    """A run goes on from a checkpoint."""

    kind = "resume"
    path: str = ""
    """The checkpoint."""
    step: int
    """The step, or the server's version, that the checkpoint holds."""


class RunEnded(Event):
    """A run has ended."""

    kind = "end"
    status: str
    """"done", "stopped" (by the function that is told the events), "diverged", "interrupted", "lost" or "failed"."""
    seconds: float | None = None
    """Seconds of training, those before a resume included."""
    test: Judged | None = None
    """The trained network on the test samples."""
    reason: str | None = None
    """Why it ended before its last epoch, where it was not an error."""


class CheckpointWritten(Event):
    """A checkpoint was written."""

    kind = "checkpoint"
    path: str = ""
    """The checkpoint."""
    step: int
    """The step, or the server's version, that it holds."""


# --- workers ---


class CalibratedWorker(Fields):
    """A worker, and what it measured of itself."""

    name: str
    """The worker."""
    address: str = ""
    """Its Dask address."""
    host: str = ""
    """Its computer."""
    device: str = ""
    """What it trains on: "cpu" or "gpu"."""
    processor: str = ""
    """The processor's or GPU's name."""
    threads: int | None = None
    """Threads it computes with."""
    memory: NonNegativeInt | None = None
    """Bytes of memory of its device."""
    images_per_second: NonNegativeFloat | None = None
    """Images it trains on per second."""
    conv_seconds: dict[str, float] = {}
    """Seconds per sample of each convolution layer with all its kernels, by layer."""
    conv_fixed: dict[str, float] = {}
    """Of `conv_seconds`, the part that a shard of kernels takes however few they are, by layer."""
    rest_seconds: NonNegativeFloat | None = None
    """Seconds per sample of the layers that stay at home in a layer-sharded step; none: not measured."""


class Calibrating(Event):
    """A worker is measuring itself; logged every few seconds where that takes longer."""

    kind = "calibrating"
    worker: str
    """The worker."""
    doing: str
    """What it is measuring, or compiling."""
    done: NonNegativeInt = 0
    """Parts of that which are done."""
    of: NonNegativeInt = 0
    """Parts that it has; 0: it has none."""


class WorkersCalibrated(Event):
    """The workers have measured themselves; training begins."""

    kind = "calibration"
    workers: tuple[CalibratedWorker, ...]
    """A row per worker."""


class LinkSpeed(Fields):
    """A worker's link to home, the slower way."""

    name: str
    """The worker."""
    bandwidth: NonNegativeFloat | None = None
    """Bytes per second; none: without limit."""
    latency: NonNegativeFloat = 0.0
    """Seconds per message."""
    handover: NonNegativeFloat = 0.0
    """Seconds that a step needs in addition to go on there after a task elsewhere."""


class LinkSpeeds(Event):
    """The links between the workers of a sharded network were measured."""

    kind = "links"
    home: str = ""
    """The worker to which the links lead."""
    task: NonNegativeFloat = 0.0
    """Seconds of the scheduler per task."""
    workers: tuple[LinkSpeed, ...]
    """A row per worker."""


class FormedGroup(Fields):
    """A group of workers that share one replica."""

    name: str
    """The group."""
    home: str = ""
    """The member that holds the layers that are not sharded."""
    members: tuple[str, ...] = ()
    """Its workers."""
    device: str = ""
    """What its members train on, counted."""
    images_per_second: NonNegativeFloat | None = None
    """Images that its members train on per second together, by their calibration."""


class GroupsFormed(Event):
    """Workers were grouped; from here on each group has rounds as a worker has."""

    kind = "groups"
    groups: tuple[FormedGroup, ...]
    """A row per group."""
    left_out: tuple[str, ...] = ()
    """Workers in no group."""


class KernelsSharded(Event):
    """The layers' kernels were cut over the workers."""

    kind = "shards"
    home: str = ""
    """The worker that holds the layers that are not sharded; empty for groups, each of which has its own."""
    kernels: dict[str, dict[str, int]]
    """Size of each shard, by worker and layer."""
    divided: dict[str, dict[str, str]] = {}
    """What a layer was divided by, "kernels" or "samples", by worker and layer; "kernels" where it is missing."""
    of: dict[str, int] = {}
    """Kernels of each layer; shares of samples count in as many parts."""
    eq2: int | None = None
    """Numbers that a step would exchange by Marques et al., eq. 2."""


class SamplesAllocated(Event):
    """Samples were allocated to the workers."""

    kind = "allocation"
    sizes: dict[str, NonNegativeInt]
    """Samples of each worker, or group."""


class WorkerJoined(Event):
    """A worker came in while the run was going on."""

    kind = "worker-joined"
    worker: str
    """The worker."""
    samples: NonNegativeInt = 0
    """Samples that it took over."""


class WorkerLeftOut(Event):
    """A worker was left out before it trained."""

    kind = "worker-left-out"
    worker: str
    """The worker."""
    reason: str
    """Why."""
    remedy: str = ""
    """What to do about it."""


class WorkerIgnored(Event):
    """A worker came too late to take part."""

    kind = "worker-ignored"
    address: str
    """Its Dask address."""


class WorkerLost(Event):
    """A worker, or a group, was lost; training goes on without it."""

    kind = "worker-lost"
    worker: str
    """The worker or group."""
    reason: str = ""
    """Why."""
    samples_moved: int = 0
    """Samples that went to the others."""


# --- training ---


class RoundNumbers(Fields):
    """Measurements of a worker in a round, from the weights that it gets to the push that ends it."""

    worker: str
    """The worker or group."""
    round: NonNegativeInt
    """The worker's round, from 0."""
    samples: NonNegativeInt
    """Samples it trained on."""
    busy: NonNegativeFloat
    """Seconds it loaded and computed."""
    load: NonNegativeFloat = 0.0
    """Of `busy`, the seconds it waited for data."""
    wait: NonNegativeFloat
    """Seconds it waited for the other workers."""
    communication: NonNegativeFloat
    """Seconds of exchanges, without `wait`."""
    evaluation: NonNegativeFloat = 0.0
    """Seconds it judged weights on validation samples."""
    bytes_up: NonNegativeInt
    """Bytes it sent."""
    bytes_down: NonNegativeInt
    """Bytes it received."""
    pushes: NonNegativeInt = 1
    """Its pushes."""
    base_version: int | None = None
    """The server's version that its last push was trained from."""
    version: int | None = None
    """The server's version after its last push."""
    staleness: int | None = None
    """The largest staleness of its pushes: versions merged between base and push."""
    gamma: float | None = None
    """The attenuation γ of its last push, 0 to 1."""
    q: float | None = None
    """The accuracy Q that weighed its last push, 0 to 1; of a loss without accuracy 1 / (1 + loss)."""
    accuracy: float | None = None
    """Share of its training samples classified correctly, 0 to 1."""
    loss: float | None = None
    """Mean loss per training sample."""
    lr: float | None = None
    """The learning rate of its last step."""


class GroupMember(Spent):
    """Time and traffic of a worker in a round of its group."""


class RoundEnded(Event, RoundNumbers):
    """A worker, or a group, has ended a round."""

    kind = "round"
    epoch: float
    """Epochs that the run has trained so far."""
    samples_per_second: NonNegativeFloat | None = None
    """Samples per busy second."""
    members: tuple[GroupMember, ...] = ()
    """A row per worker of a group."""


class StepWorker(Fields):
    """A worker's shards."""

    name: str
    """The worker."""
    kernels: dict[str, int] = {}
    """Size of each shard, by layer."""
    conv_seconds: float | None = None
    """Seconds in convolution layers."""


class StepsEnded(Event):
    """Steps of a layer-sharded run have ended; logged every few steps."""

    kind = "steps"
    step: int
    """Steps that the run has trained so far."""
    epoch: float
    """Epochs that the run has trained so far."""
    loss: float | None = None
    """Mean loss per sample of the last step."""
    lr: float | None = None
    """The learning rate of the last step."""
    seconds_per_step: NonNegativeFloat
    """Seconds of a step, the mean since the last such event."""
    workers: tuple[StepWorker, ...] = ()
    """A row per worker."""


class EpochWorker(Spent):
    """Time and traffic of a worker in an epoch of a layer-sharded run."""

    samples: NonNegativeInt
    """Samples of the epoch, which all workers share."""
    wait: NonNegativeFloat
    """Seconds it did not compute."""
    communication: NonNegativeFloat = 0.0
    """Seconds of exchanges; 0 where they count as waiting."""


class EpochEnded(Event):
    """The center was judged on the validation samples: after a synchronous round, or once an epoch."""

    kind = "epoch"
    epoch: float
    """Epochs that the run has trained so far."""
    epochs: float | None = None
    """Epochs to train."""
    step: int
    """Steps, or merges of the server, so far."""
    loss: float | None = None
    """Mean loss per training sample since the last such event."""
    accuracy: float | None = None
    """Share of training samples classified correctly since the last such event, 0 to 1."""
    validation: Judged | None = None
    """The center on the validation samples."""
    samples_per_second: NonNegativeFloat | None = None
    """Samples trained on per second since the last such event."""
    lr: float | None = None
    """The learning rate of the last step."""
    seconds: NonNegativeFloat = 0.0
    """Seconds since the last such event."""
    workers: tuple[EpochWorker, ...] = ()
    """A row per worker of a layer-sharded run."""


class ServerCounted(Event):
    """Counts of a parameter server so far."""

    kind = "server"
    server: int
    """The server's number in the run, from 1."""
    merged: NonNegativeInt
    """Pushes merged."""
    repeated: NonNegativeInt
    """Pushes that came again and were not merged twice."""
    refused: dict[str, int]
    """Pushes refused, by reason."""


class Warned(Event):
    """Something out of the ordinary, for people to read: value, reason and remedy, or a message."""

    kind = "warning"
    value: str = ""
    """What the warning is about."""
    reason: str = ""
    """What is out of the ordinary."""
    remedy: str = ""
    """What to do about it."""
    message: str = ""
    """The whole warning, where it has no parts."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not (self.reason or self.message):
            raise ValueError("field required: message, or reason")
        return self

    @property
    def text(self) -> str:
        """The warning in one line or a few: "value: reason; remedy", or the message."""
        return self.message or told(self.value, self.reason, self.remedy)


EVENTS: dict[str, type[Event]] = {
    model.kind: model
    for model in (
        *(RunStarted, RunResumed, Calibrating, WorkersCalibrated, LinkSpeeds, GroupsFormed, KernelsSharded),
        SamplesAllocated,
        *(RoundEnded, StepsEnded, EpochEnded, ServerCounted, CheckpointWritten, Warned),
        *(WorkerLost, WorkerIgnored, WorkerJoined, WorkerLeftOut, RunEnded),
    )
}
"""Every event by its kind, in the order in which a reader meets them."""


def parse(record: Mapping[str, Any], where: str = "event") -> Event:
    """The event of a log's record; an `UnknownEvent` for a kind that this version does not know.

    Raises DamagedEvent naming where the record stands, the field that is wrong, what is wrong with it and what to do.
    """
    fields = dict(record)
    kind = fields.pop("event", None)
    if not isinstance(kind, str):
        raise DamagedEvent(where, f"says of no event what it is (event = {kind!r})", _REMEDY)
    if (model := EVENTS.get(kind)) is None:
        return UnknownEvent(name=kind)
    try:
        return model.model_validate(fields, extra="ignore")
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key, found = ".".join(map(str, problem["loc"])) or "fields", f"{problem['input']!r:.60}"
        reason = problem["msg"].removeprefix("Value error, ")
        raise DamagedEvent(f"{where} ({kind}): {key} = {found}", f"{reason[0].lower()}{reason[1:]}", _REMEDY) from error


def parsed(records: Iterable[Mapping[str, Any]], first: int = 1) -> Iterator[Event]:
    """The events of a log, in order; kinds that this version does not know are left out. first: number of the
    first line.

    Raises DamagedEvent naming the line of a damaged event, the field, what is wrong with it and what to do.
    """
    for line, record in enumerate(records, start=first):
        event = parse(record, f"line {line}")
        if not isinstance(event, UnknownEvent):
            yield event
