"""Facts that a coordinator is told: events of a run, and their times. Plain frozen data.

Every fact has `at`, seconds on the shell's own clock. `life` counts the servers of a run, or the times that the pieces
of a layer-sharded network were placed; `session` counts the times a replica has joined a server. Facts of an earlier
life or session are of no more interest and change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from daskcnn.errors import UserError
from daskcnn.events import CalibratedWorker, Spent
from daskcnn.frozen import frozen
from daskcnn.nn.score import Score
from daskcnn.sharded import WorkerLinks
from daskcnn.training.round_report import RoundReport

Kind: TypeAlias = str
"""A worker's device kind, "cpu" or "gpu"."""


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker is there and may be used: at the start, or at any time of the run."""

    worker: str
    kind: Kind
    at: float


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A worker has measured itself.

    Attributes
    ----------
    seconds : seconds a sample of a whole training step.
    row : what the log says of the worker.
    """

    worker: str
    seconds: float
    row: CalibratedWorker
    at: float


@dataclass(frozen=True, slots=True)
class CalibrationFailed:
    """A worker could not be calibrated: its device is missing, it ran out of memory, it was lost or did not answer."""

    worker: str
    reason: str
    remedy: str
    at: float


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """Workers have left the cluster. None of their tasks will end."""

    workers: tuple[str, ...]
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class ServerReady:
    """The parameter server of this life answers. host: the worker that holds it."""

    life: int
    host: str
    at: float


@dataclass(frozen=True, slots=True)
class ServerGone:
    """The parameter server of this life does not answer any more."""

    life: int
    at: float


@frozen
class Joined:
    """A replica holds the center and counts in the barrier."""

    replica: str
    life: int
    session: int
    at: float


@dataclass(frozen=True, slots=True)
class Progress:
    """A replica's round goes on: a step of a group, a meeting of peers. The stall clock begins anew."""

    replica: str
    life: int
    session: int
    at: float


@frozen
class RoundDone:
    """A replica's round has ended."""

    replica: str
    life: int
    session: int
    report: RoundReport
    at: float


@dataclass(frozen=True, slots=True)
class RoundFailed:
    """A replica's round ended with an error that ends the run, such as a push that is not finite."""

    replica: str
    life: int
    error: UserError
    at: float


@dataclass(frozen=True, slots=True)
class OutOfStep:
    """Dask ran a task twice although no worker is lost: the tasks under way no longer fit together."""

    life: int
    message: str
    at: float


@dataclass(frozen=True, slots=True)
class Waits:
    """The answer to `AskWaiting`.

    Attributes
    ----------
    waiting : replicas that wait for others; they are not to blame.
    stuck : by replica, the workers that it waits for, where that is known; its own members otherwise.
    """

    waiting: frozenset[str]
    at: float
    stuck: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LinksMeasured:
    """The answer to `MeasureLinks`."""

    life: int
    links: WorkerLinks
    at: float


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step of a layer-sharded run has ended. Steps end in order.

    Attributes
    ----------
    number : the step's number in the run, from 0.
    score : loss and right answers of its minibatch.
    lr : its learning rate.
    """

    life: int
    number: int
    score: Score
    lr: float
    at: float


@dataclass(frozen=True, slots=True)
class SegmentStopped:
    """The answer to `StopSegment`. end: the first step that will not run."""

    life: int
    end: int
    at: float


@dataclass(frozen=True, slots=True)
class PiecesCollected:
    """The answer to `Collect`. finite: whether every weight is a finite number."""

    life: int
    step: int
    finite: bool
    at: float


@dataclass(frozen=True, slots=True)
class Counted:
    """The answer to `AskCounters` of this number: what each worker spent and moved since it was last asked."""

    ask: int
    spent: Mapping[str, Spent]
    at: float


@dataclass(frozen=True, slots=True)
class Rescued:
    """The answer to `Rescue`. version: of the last center that a worker still has; None: no worker has one."""

    version: int | None
    at: float


@dataclass(frozen=True, slots=True)
class Judged:
    """The answer to `Judge`. None: a simulation in which nothing is learnt."""

    score: Score | None
    at: float


@dataclass(frozen=True, slots=True)
class Saved:
    """The state of the last `Save` is kept. step: merges that its center has."""

    step: int
    at: float


@dataclass(frozen=True, slots=True)
class SchedulerGone:
    """The scheduler does not answer any more. error: what to tell the user."""

    error: UserError
    at: float


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A signal asks the run to end."""

    signum: int
    at: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""

    at: float


Fact: TypeAlias = (
    WorkerReady
    | Calibrated
    | CalibrationFailed
    | WorkerGone
    | ServerReady
    | ServerGone
    | Joined
    | Progress
    | RoundDone
    | RoundFailed
    | OutOfStep
    | Waits
    | LinksMeasured
    | StepDone
    | SegmentStopped
    | PiecesCollected
    | Counted
    | Rescued
    | Judged
    | Saved
    | SchedulerGone
    | Interrupted
    | Tick
)
