"""The events of a log, checked and typed: what a report is made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, ValidationError, field_validator

from daskcnn.errors import DataError

_REMEDY = "remove that line to read the rest, or give the log of a run of this version"


class Logged(BaseModel):
    """One event. at: seconds of any clock, or the log's date and time, which are turned into seconds.

    A field that a log of another version lacks is None or its default; fields that a report has no use for are left.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())
    kind: ClassVar[str]
    at: float | None = None

    @field_validator("at", mode="before")
    @classmethod
    def _seconds(cls, at: Any) -> Any:
        return datetime.fromisoformat(at).timestamp() if isinstance(at, str) else at


class Start(Logged):
    """What is run. vector_bytes: the weights as they travel, in bytes."""

    kind = "start"
    run: str = ""
    strategy: str = ""
    partition: str | None = None
    increments: int | None = None
    rule: dict[str, Any] = {}
    dataset: str | None = None
    model: str | None = None
    samples: NonNegativeInt | None = None
    validation_samples: NonNegativeInt | None = None
    parameters: NonNegativeInt | None = None
    epochs: float | None = None
    batch_size: int | None = None
    seed: int | None = None
    wire: str | None = None
    vector_bytes: NonNegativeInt | None = None


class Calibrated(BaseModel):
    name: str
    device: str = ""


class Grouped(Calibrated):
    members: list[str] = []


class Calibration(Logged):
    kind = "calibration"
    workers: list[Calibrated]


class Groups(Logged):
    """Workers that train together: from here on it is groups that have rounds. left_out: who is in none."""

    kind = "groups"
    groups: list[Grouped]
    left_out: list[str] = []


class Member(BaseModel):
    """What a worker did in a round of its group."""

    name: str
    conv_seconds: dict[str, float] = {}


class Round(Logged):
    """A worker's round, as `training.reports.RoundReport` says it, or a group's; seconds, bytes."""

    kind = "round"
    worker: str
    round: NonNegativeInt
    epoch: float
    samples: NonNegativeInt
    loss: float | None = None
    accuracy: float | None = None
    busy: NonNegativeFloat
    load: NonNegativeFloat = 0.0
    wait: NonNegativeFloat
    communication: NonNegativeFloat
    evaluation: NonNegativeFloat = 0.0
    bytes_up: NonNegativeInt
    bytes_down: NonNegativeInt
    pushes: NonNegativeInt = 1
    version: int | None = None
    base_version: int | None = None
    staleness: int | None = None
    gamma: float | None = None
    q: float | None = None
    members: list[Member] = []


class Judged(BaseModel):
    """A network's score on some samples. auc: one class against the rest, the mean over the classes."""

    accuracy: float | None = None
    loss: float | None = None
    auc: float | None = None


class Part(BaseModel):
    """What a worker did in an epoch of a layer-sharded run."""

    name: str
    samples: NonNegativeInt
    busy: NonNegativeFloat
    wait: NonNegativeFloat
    bytes_up: NonNegativeInt
    bytes_down: NonNegativeInt
    conv_seconds: dict[str, float] = {}


class Epoch(Logged):
    """A look at the center."""

    kind = "epoch"
    epoch: float
    step: int
    loss: float | None = None
    accuracy: float | None = None
    validation: Judged | None = None
    seconds: NonNegativeFloat = 0.0
    workers: list[Part] = []


class Shards(Logged):
    """Who has which kernels. eq2: numbers that a step would exchange by Marques et al., eq. 2.

    divided: what each worker's shards are, "kernels" where nothing is said; of one of samples `kernels` counts its part
    in as many as the layer has. of: how many that is.
    """

    kind = "shards"
    kernels: dict[str, dict[str, int]]
    divided: dict[str, dict[str, str]] = {}
    of: dict[str, int] = {}
    eq2: int | None = None


class Server(Logged):
    """What the parameter server counted so far. server: which one of the run."""

    kind = "server"
    server: int
    merged: NonNegativeInt
    repeated: NonNegativeInt
    refused: dict[str, int]


class Checkpoint(Logged):
    kind = "checkpoint"
    step: int


class Trouble(Logged):
    """Something out of the ordinary, for people to read."""


class Resume(Trouble):
    kind = "resume"
    step: int
    path: str = ""


class WorkerLost(Trouble):
    kind = "worker-lost"
    worker: str
    reason: str = ""
    samples_moved: int = 0


class WorkerIgnored(Trouble):
    kind = "worker-ignored"
    address: str


class Warned(Trouble):
    kind = "warning"
    message: str


class End(Logged):
    kind = "end"
    status: str
    seconds: float | None = None
    test: Judged | None = None


_KINDS: dict[str, type[Logged]] = {
    model.kind: model
    for model in (
        *(Start, Calibration, Groups, Round, Epoch, Shards, Server),
        *(Checkpoint, Resume, WorkerLost, WorkerIgnored, Warned, End),
    )
}


def checked(events: Iterable[Mapping[str, Any]]) -> Iterator[Logged]:
    """The events that a report is made of, in order; other kinds are passed over.

    Raises DataError naming the line of an event that is damaged, what is wrong with it and what to do.
    """
    for line, event in enumerate(events, start=1):
        kind = event.get("event")
        if not isinstance(kind, str):
            raise DataError(f"line {line}: says of no event what it is (event = {kind!r}); {_REMEDY}")
        if (model := _KINDS.get(kind)) is None:
            continue
        try:
            yield model.model_validate(event)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            key, found = ".".join(map(str, problem["loc"])), f"{problem['input']!r:.60}"
            reason = problem["msg"].removeprefix("Value error, ")
            told = f"{key} = {found}: {reason[0].lower()}{reason[1:]}"
            raise DataError(f"line {line} ({kind}): {told}; {_REMEDY}") from error
