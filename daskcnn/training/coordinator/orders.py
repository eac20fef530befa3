"""Orders of a coordinator. Plain frozen data; a shell carries the orders out in turn and answers with facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from daskcnn.errors import UserError
from daskcnn.events import Event, Warned
from daskcnn.frozen import Stated, frozen
from daskcnn.nn.score import Score
from daskcnn.partition.rounds import Round
from daskcnn.ps import UpdateRule
from daskcnn.training.coordinator.shares import Shares
from daskcnn.training.judging import JudgedPart

Status: TypeAlias = Literal["done", "diverged", "interrupted", "lost", "failed", "unusable", "turned"]


class Order(Stated):
    """Work that a coordinator gives to a shell."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Calibrate(Order):
    """Check that the worker fits the run and let it measure itself. Answer: `Calibrated` or `CalibrationFailed`."""

    worker: str


@dataclass(frozen=True, slots=True)
class IgnoreSignals(Order):
    """Let no signal interrupt what follows: the run ends already, and is being kept."""


@dataclass(frozen=True, slots=True)
class FormGroups(Order):
    """Make these groups of workers, by the name of the replica that each has.

    left_out: workers in none. measure_links: measure the links between a group's members first. changed: the groups to
    make; the others go on as they are.
    """

    groups: Mapping[str, tuple[str, ...]]
    left_out: tuple[str, ...]
    measure_links: bool
    changed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UseRule(Order):
    """Train by this rule from the life on that begins next. Comes where the run chooses its strategy."""

    rule: UpdateRule


@dataclass(frozen=True, slots=True)
class StartServer(Order):
    """Start a parameter server of this life from the state kept last. Answer: `ServerReady` or `ServerGone`.

    moved: the one before it was lost with its host, or its host leaves.
    """

    life: int
    moved: bool


@dataclass(frozen=True, slots=True)
class Join(Order):
    """Let the replica begin a session: it takes the center and counts in the barrier. Answer: `Joined`."""

    replica: str
    life: int
    session: int


@frozen
class StartRound(Order):
    """Let the replica train a round. Answer: `RoundDone`.

    score: validation samples on which it judges the center afterwards, if any. q: those on which it judges its own
    weights before a push, if the rule wants that. scale: factor of the learning rate.
    """

    life: int
    session: int
    round: Round
    score: JudgedPart | None
    q: JudgedPart | None
    scale: float


@dataclass(frozen=True, slots=True)
class EndRound(Order):
    """Let the replica end its round behind the step at hand, push what it has, and leave the server.

    number: of the round. Answer: `RoundDone` with a report of the samples that it has done, `RoundDropped`, or
    `WorkerGone`.
    """

    replica: str
    life: int
    session: int
    number: int


@dataclass(frozen=True, slots=True)
class Leave(Order):
    """Free the replica's place at the server's barrier: it is gone or has no round now."""

    replica: str
    life: int
    session: int


@dataclass(frozen=True, slots=True)
class Cancel(Order):
    """Give up what this replica has under way."""

    replica: str


@dataclass(frozen=True, slots=True)
class CancelAll(Order):
    """Give up all that is under way, and the server with it."""


@dataclass(frozen=True, slots=True)
class Dismiss(Order):
    """Let the worker go: it is no longer part of the run. for_good: it is of no use if it gives a sign of life."""

    worker: str
    for_good: bool = False


@dataclass(frozen=True, slots=True)
class AskWorkers(Order):
    """Ask the cluster for this number of workers of the run in all."""

    number: int


@dataclass(frozen=True, slots=True)
class LetGo(Order):
    """Give a worker back to the cluster, which may end it. It was dismissed from the run."""

    worker: str


@dataclass(frozen=True, slots=True)
class AskWaiting(Order):
    """Find out who waits for others, and for whom the overdue replicas wait. Answer: `Waits`."""

    overdue: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MeasureLinks(Order):
    """Measure these workers' links to home, which may be one of them: its link is then taken to be as good as the best.

    Answer: `LinksMeasured`, or `WorkerGone` of a worker out of reach.
    """

    life: int
    home: str
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProbeServer(Order):
    """Measure what a meeting would cost these workers. Answer: `ServerProbed`, or `WorkerGone` of one out of reach."""

    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Place(Order):
    """Send every piece of the snapshot to the worker that trains it from this step on."""

    life: int
    step: int
    shares: Shares


@dataclass(frozen=True, slots=True)
class RunSegment(Order):
    """Train the steps begin…end on the pieces that were placed, some of them submitted ahead. Answers: `StepDone`.

    scale: factor of the learning rate.
    """

    life: int
    begin: int
    end: int
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class StopSegment(Order):
    """Submit no further step; those under way end. Answer: `SegmentStopped`."""

    life: int


@dataclass(frozen=True, slots=True)
class Collect(Order):
    """Gather the pieces as this step has left them. Answer: `PiecesCollected`."""

    life: int
    step: int


@dataclass(frozen=True, slots=True)
class Keep(Order):
    """Make the pieces collected last the snapshot. `Judge` scores it, `Save` writes it, `Place` begins from it.

    step, epoch: steps, and presentations a sample, so far. book, validation: as in `Save`.
    """

    step: int
    epoch: float
    book: Mapping[str, Any]
    validation: Score | None


@dataclass(frozen=True, slots=True)
class Restore(Order):
    """Go on from the state that was saved last, or that the run began with, optimizers' included."""


@dataclass(frozen=True, slots=True)
class AskCounters(Order):
    """Read every worker's counters between two tasks of steps. Answer: `Counted` of the same number."""

    ask: int


@dataclass(frozen=True, slots=True)
class Rescue(Order):
    """Find the last center that one of the workers has, and go on from it. Answer: `Rescued`."""


@dataclass(frozen=True, slots=True)
class Judge(Order):
    """Score the center on these validation samples. Answer: `Judged`, `NotJudged` or `NotKept`."""

    part: JudgedPart


@dataclass(frozen=True, slots=True)
class Save(Order):
    """Write the server's state, or the snapshot, with this book. Answer: `Saved`, or `ServerGone`.

    Attributes
    ----------
    epoch : Presentations a sample so far.
    book : The coordinator's state for a resumed run, as JSON can keep it.
    replicas : Replicas whose optimizer's state is kept.
    validation : The center's score; None: not judged.
    """

    epoch: float
    book: Mapping[str, Any]
    replicas: tuple[str, ...]
    validation: Score | None


@dataclass(frozen=True, slots=True)
class CountServer(Order):
    """Log the server's counts of merged and refused pushes."""


@dataclass(frozen=True, slots=True)
class Log(Order):
    """Record an event of the run."""

    event: Event


@dataclass(frozen=True, slots=True)
class Turn:
    """Another kind of run that goes on in place of one that has not trained yet. size: workers of a replica."""

    strategy: str
    size: int


@dataclass(frozen=True, slots=True)
class End(Order):
    """End the run. error: for the user; None if the run is done. turn: what goes on instead. No order follows."""

    status: Status
    error: UserError | None = None
    turn: Turn | None = None


class Outbox:
    """The orders that follow from one fact."""

    def __init__(self) -> None:
        self._orders: list[Order] = []

    def renew(self) -> list[Order]:
        """Begin anew. Returns the list that all orders come into from now on."""
        self._orders = []
        return self._orders

    def put(self, order: Order) -> None:
        """Add an order."""
        self._orders.append(order)

    def drop(self, kind: type) -> None:
        """Take back the orders of this kind that were put since the fact."""
        self._orders[:] = [order for order in self._orders if not isinstance(order, kind)]

    def log(self, event: Event) -> None:
        """Add the order to log an event."""
        self._orders.append(Log(event))

    def warn(self, message: str) -> None:
        """Add the order to log a warning."""
        self.log(Warned(message=message))
