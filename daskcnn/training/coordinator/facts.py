"""Facts that a coordinator is told: events of a run, and their times. Plain frozen data.

Every fact has `at`, seconds on the shell's own clock. `life` counts the servers of a run, or the times that the pieces
of a layer-sharded network were placed; `session` counts the times a replica has joined a server. Facts of an earlier
life or session are of no more interest and change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from daskcnn.errors import UserError
from daskcnn.events import CalibratedWorker, Spent
from daskcnn.frozen import Stated, frozen
from daskcnn.nn.score import Score
from daskcnn.sharded.balance import WorkerLink, WorkerLinks
from daskcnn.training.round_report import RoundReport


class Fact(Stated):
    """An event of a run as a coordinator is told it, and its time."""

    __slots__ = ()
    at: float


@dataclass(frozen=True, slots=True)
class WorkerReady(Fact):
    """A worker is there and may be used: at the start, or at any time of the run. kind: "cpu" or "gpu"."""

    worker: str
    kind: str
    at: float


@dataclass(frozen=True, slots=True)
class Calibrated(Fact):
    """A worker has measured itself: seconds a sample of a whole training step, and its row in the log."""

    worker: str
    seconds: float
    row: CalibratedWorker
    at: float


@dataclass(frozen=True, slots=True)
class CalibrationFailed(Fact):
    """A worker could not be calibrated: its device is missing, it ran out of memory, it was lost or did not answer."""

    worker: str
    reason: str
    remedy: str
    at: float


@dataclass(frozen=True, slots=True)
class WorkerGone(Fact):
    """Workers have left the cluster. None of their tasks will end."""

    workers: tuple[str, ...]
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class WorkerLeaving(Fact):
    """Workers are asked to end, and will be gone in a few seconds. Until then they may end a round and report it.

    reason: words that follow on a worker's name, such as "it is shut down".
    """

    workers: tuple[str, ...]
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class WorkersRecalled(Fact):
    """The run may not have these workers any more. It is told so again until it has let them go."""

    workers: tuple[str, ...]
    at: float


@dataclass(frozen=True, slots=True)
class ServerLeaving(Fact):
    """The parameter server of this life is to leave its worker. reason: words that go behind "as"."""

    life: int
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class ServerReady(Fact):
    """The parameter server of this life answers. host: the worker that holds it."""

    life: int
    host: str
    at: float


@dataclass(frozen=True, slots=True)
class ServerGone(Fact):
    """The parameter server of this life does not answer any more."""

    life: int
    at: float


@frozen
class Joined(Fact):
    """A replica holds the center and counts in the barrier."""

    replica: str
    life: int
    session: int
    at: float


@dataclass(frozen=True, slots=True)
class Progress(Fact):
    """A replica's round goes on: a step of a group, a meeting of peers. The stall clock begins anew."""

    replica: str
    life: int
    session: int
    at: float


@frozen
class RoundDone(Fact):
    """A replica's round has ended."""

    replica: str
    life: int
    session: int
    report: RoundReport
    at: float


@dataclass(frozen=True, slots=True)
class RoundDropped(Fact):
    """An answer to `EndRound`: nothing came of the round, as its worker was asked to end before it began."""

    replica: str
    life: int
    session: int
    at: float


@dataclass(frozen=True, slots=True)
class RoundFailed(Fact):
    """A replica's round ended with an error that ends the run, such as a push that is not finite."""

    replica: str
    life: int
    error: UserError
    at: float


@dataclass(frozen=True, slots=True)
class OutOfStep(Fact):
    """Dask ran a task twice although no worker is lost: the tasks under way no longer fit together."""

    life: int
    message: str
    at: float


@dataclass(frozen=True, slots=True)
class ConnectionCut(Fact):
    """The scheduler had dropped the driver, and all tasks under way with it; they are connected again.

    An order that is carried out meanwhile is begun anew, and is answered.
    """

    at: float


@dataclass(frozen=True, slots=True)
class Waits(Fact):
    """The answer to `AskWaiting`.

    waiting: replicas that wait for others; they are not to blame. stuck: the workers that a replica waits for, by
    replica, if that is known; else its own members. silent: workers of a layer-sharded run that the scheduler has not
    heard of meanwhile. heard: seconds since replicas last asked the server, or were answered.
    """

    waiting: frozenset[str]
    at: float
    stuck: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    heard: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LinksMeasured(Fact):
    """The answer to `MeasureLinks`."""

    life: int
    links: WorkerLinks
    at: float


@dataclass(frozen=True, slots=True)
class ServerProbed(Fact):
    """The answer to `ProbeServer`.

    links: of those workers whose link could be measured. nbytes: of the vector that each would send and receive.
    bandwidth, merge, overhead, home: of the server. ahead: of the step. All as in `strategy_prices.StepProblem`.
    """

    workers: tuple[str, ...]
    links: Mapping[str, WorkerLink]
    nbytes: int
    at: float
    bandwidth: float = inf
    merge: float = 0.0
    overhead: float = 0.0
    ahead: float = 0.0
    home: str = ""


@dataclass(frozen=True, slots=True)
class StepDone(Fact):
    """A step of a layer-sharded run has ended. Steps end in order. number: in the run, from 0."""

    life: int
    number: int
    score: Score
    lr: float
    at: float


@dataclass(frozen=True, slots=True)
class SegmentStopped(Fact):
    """The answer to `StopSegment`. end: the first step that will not run."""

    life: int
    end: int
    at: float


@dataclass(frozen=True, slots=True)
class PiecesCollected(Fact):
    """The answer to `Collect`. finite: True if every weight is a finite number."""

    life: int
    step: int
    finite: bool
    at: float


@dataclass(frozen=True, slots=True)
class Counted(Fact):
    """The answer to `AskCounters` of this number: each worker's counters since it was last asked."""

    ask: int
    spent: Mapping[str, Spent]
    at: float


@dataclass(frozen=True, slots=True)
class Rescued(Fact):
    """The answer to `Rescue`. version: of the last center that a worker still has; None: no worker has one."""

    version: int | None
    at: float


@dataclass(frozen=True, slots=True)
class Judged(Fact):
    """The answer to `Judge`. None: a simulation in which nothing is learnt."""

    score: Score | None
    at: float


@dataclass(frozen=True, slots=True)
class NotJudged(Fact):
    """The last `Judge` came to nothing: workers that judged are lost, which is told before."""

    at: float


@dataclass(frozen=True, slots=True)
class Saved(Fact):
    """The state of the last `Save` is kept. step: merges that its center has."""

    step: int
    at: float


@dataclass(frozen=True, slots=True)
class NotKept(Fact):
    """The last `Save` or `Judge` found no center: it was lost with a worker, and there is no server."""

    at: float


@dataclass(frozen=True, slots=True)
class SchedulerGone(Fact):
    """The scheduler does not answer any more. error: for the user."""

    error: UserError
    at: float


@dataclass(frozen=True, slots=True)
class Interrupted(Fact):
    """A signal asks the run to end."""

    signum: int
    at: float


@dataclass(frozen=True, slots=True)
class TimeLimited(Fact):
    """The run is to be kept, and its process at its end, within `seconds` of its begin: at `ends`."""

    seconds: float
    ends: float
    at: float


@dataclass(frozen=True, slots=True)
class Tick(Fact):
    """Time has passed."""

    at: float
