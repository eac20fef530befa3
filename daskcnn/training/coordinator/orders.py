"""Orders of a coordinator. Plain frozen data; a shell carries the orders out in turn and answers with facts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from daskcnn.errors import UserError
from daskcnn.events import Event, Warned
from daskcnn.frozen import Stated, frozen
from daskcnn.nn.score import Score
from daskcnn.partition.rounds import Round
from daskcnn.training.coordinator.shares import Shares

Status: TypeAlias = Literal["done", "diverged", "interrupted", "lost", "failed", "unusable"]


class Order(Stated):
    """Work that a coordinator gives to a shell."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Calibrate(Order):
    """Check that the worker fits the run and let it measure itself. Answer: `Calibrated` or `CalibrationFailed`."""

    worker: str


@dataclass(frozen=True, slots=True)
class FormGroups(Order):
    """Make these groups of workers, by the name of the replica that each has.

    left_out: workers in none. measure_links: whether the links between a group's members are measured first.
    """

    groups: Mapping[str, tuple[str, ...]]
    left_out: tuple[str, ...]
    measure_links: bool


@dataclass(frozen=True, slots=True)
class StartServer(Order):
    """Start a parameter server of this life from the state kept last. Answer: `ServerReady` or `ServerGone`.

    moved: the one before it was lost with its host.
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

    Attributes
    ----------
    score : validation samples on which it judges the center afterwards; None: none.
    scale : factor of the learning rate.
    """

    life: int
    session: int
    round: Round
    score: tuple[int, int] | None
    scale: float


@dataclass(frozen=True, slots=True)
class Leave(Order):
    """The replica frees its place at the server's barrier: it is gone or has no round now."""

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
    """The worker is no longer part of the run."""

    worker: str


@dataclass(frozen=True, slots=True)
class AskWaiting(Order):
    """Find out who waits for others, and for whom the overdue replicas wait. Answer: `Waits`."""

    overdue: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MeasureLinks(Order):
    """Measure every worker's link to home. Answer: `LinksMeasured`, or `WorkerGone` of a worker out of reach."""

    life: int
    home: str


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
    """The pieces collected last become the snapshot. `Judge` scores it, `Save` writes it, `Place` begins from it.

    Attributes
    ----------
    step, epoch : steps, and presentations a sample, so far.
    book : what a resumed run needs of the coordinator, as JSON can keep it.
    validation : the snapshot's score; None: not judged.
    """

    step: int
    epoch: float
    book: Mapping[str, Any]
    validation: Score | None


@dataclass(frozen=True, slots=True)
class Restore(Order):
    """The state to go on from, optimizers' included, is the one that was saved last, or that the run began with."""


@dataclass(frozen=True, slots=True)
class AskCounters(Order):
    """Ask every worker what it spent and moved, between two tasks of steps. Answer: `Counted` of the same number."""

    ask: int


@dataclass(frozen=True, slots=True)
class Rescue(Order):
    """Find the last center that one of the workers has, and go on from it. Answer: `Rescued`."""


@dataclass(frozen=True, slots=True)
class Judge(Order):
    """Score the center on the training part's samples lo…hi. Answer: `Judged`."""

    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class Save(Order):
    """Write the server's state, or the snapshot, with this book. Answer: `Saved`, or `ServerGone`.

    Attributes
    ----------
    epoch : presentations a sample so far.
    book : what a resumed run needs of the coordinator, as JSON can keep it.
    replicas : whose optimizer's state is kept.
    validation : the center's score; None: not judged.
    """

    epoch: float
    book: Mapping[str, Any]
    replicas: tuple[str, ...]
    validation: Score | None


@dataclass(frozen=True, slots=True)
class CountServer(Order):
    """Log what the server has merged and refused so far."""


@dataclass(frozen=True, slots=True)
class Log(Order):
    """Record an event of the run."""

    event: Event


@dataclass(frozen=True, slots=True)
class End(Order):
    """The run is over. error: what to tell the user; None where it is done. No order follows."""

    status: Status
    error: UserError | None = None


class Outbox:
    """The orders that follow from one fact."""

    def __init__(self) -> None:
        self._orders: list[Order] = []

    def renew(self) -> list[Order]:
        """Begin anew. Returns the list that all orders come into from now on."""
        self._orders = []
        return self._orders

    def put(self, order: Order) -> None:
        """This is to be done next."""
        self._orders.append(order)

    def extend(self, following: Iterable[Order]) -> None:
        """These are to be done next, in turn."""
        self._orders.extend(following)

    def drop(self, kind: type) -> None:
        """Orders of this kind that were put since the fact are not to be done."""
        self._orders[:] = [order for order in self._orders if not isinstance(order, kind)]

    def log(self, event: Event) -> None:
        """This is to be recorded."""
        self._orders.append(Log(event))

    def warn(self, message: str) -> None:
        """This is to be recorded as a warning."""
        self.log(Warned(message=message))
