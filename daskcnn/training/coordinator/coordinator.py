"""The part of a coordinator that every strategy has: calibrating, leaving workers out, a signal, and the end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from daskcnn import errors
from daskcnn.errors import ClusterError, Lost, UserError
from daskcnn.events import WorkerLost
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.calibration import CalibrationPhase
from daskcnn.training.coordinator.facts import Fact
from daskcnn.training.coordinator.orders import Order, Outbox
from daskcnn.training.coordinator.roster import Roster
from daskcnn.training.coordinator.settings import LayerSettings, Settings


class Phase(Enum):
    """Phases of a run, in the order in which they may come."""

    CALIBRATING = auto()
    STARTING = auto()  # the server
    TRAINING = auto()  # rounds of replicas
    RESCUING = auto()  # peers: the last center is looked for
    MEASURING = auto()  # layer sharding: links
    STEPPING = auto()  # layer sharding: a segment of steps
    COLLECTING = auto()  # layer sharding: the pieces, behind a segment
    JUDGING = auto()  # the last center, or the snapshot at an epoch's end
    COUNTING = auto()  # layer sharding: the epoch's cost to each worker
    STOPPING = auto()  # the last state is kept after a signal
    CLOSING = auto()  # the last state is kept at the end
    ENDED = auto()


_ENDED = Phase.ENDED  # asked for with every fact: a member's look-up in its class takes ten times as long


class Coordinating(ABC):
    """Takes facts in, gives orders out, and begins with calibration. A subclass decides how its strategy trains.

    Parameters
    ----------
    remedy : words on what helps after a worker was lost before the run began.
    """

    def __init__(self, settings: Settings | LayerSettings, remedy: str = "start it again") -> None:
        self.roster, self._out = Roster(settings.wanted), Outbox()
        self.calibration = CalibrationPhase(self.roster, settings.stall_timeout, remedy)
        self.phase = Phase.CALIBRATING
        self.life = 0
        self._interrupted: errors.Interrupted | None = None
        self._handlers: dict[type[Fact], Callable[[Any], None]] = {
            facts.WorkerReady: self._on_worker_ready,
            facts.Calibrated: self._on_calibrated,
            facts.CalibrationFailed: self._on_calibration_failed,
            facts.SchedulerGone: lambda fact: self._give_up(fact.error),
            facts.Interrupted: self._on_interrupted,
            **self._own_handlers(),
        }

    @abstractmethod
    def _own_handlers(self) -> dict[type[Fact], Callable[[Any], None]]:
        """Return handlers of the facts that this strategy decides by itself."""

    @abstractmethod
    def _takes_workers(self) -> bool:
        """True if a worker that becomes ready is of use now."""

    @abstractmethod
    def _begin(self, now: float) -> None:
        """Begin to train: every worker has measured itself or was left out."""

    @abstractmethod
    def _stop(self) -> None:
        """End the run after the first signal; what was trained is kept."""

    @abstractmethod
    def _give_up(self, error: UserError) -> None:
        """End a run that cannot train any more."""

    def handle(self, fact: Fact) -> list[Order]:
        """Take a fact in; return what is to be done now, in order."""
        if self.phase is _ENDED:
            return []
        found = self._out.renew()
        self._handlers[type(fact)](fact)
        return found

    @property
    def ended(self) -> bool:
        """True once the last order was `End`."""
        return self.phase is _ENDED

    # --- workers come ---

    def _on_worker_ready(self, fact: facts.WorkerReady) -> None:
        self._out.extend(self.calibration.ready(fact) if self._takes_workers() else self.calibration.ignored(fact))

    def _on_calibrated(self, fact: facts.Calibrated) -> None:
        if self.calibration.calibrated(fact):
            self._begin_if_calibrated(fact.at)

    def _on_calibration_failed(self, fact: facts.CalibrationFailed) -> None:
        self._leave_out(self.calibration.failed(fact), fact.at)

    def _leave_out(self, left_out: list[Order], now: float) -> None:
        """Go on without workers that were not calibrated, if these are orders to leave some out."""
        self._out.extend(left_out)
        if left_out and self.phase is Phase.CALIBRATING:
            self._begin_if_calibrated(now)

    def _begin_if_calibrated(self, now: float) -> None:
        if not self.calibration.over:
            return
        try:
            self._out.extend(self.calibration.begin())
        except ClusterError as error:
            self._end("unusable", error)
        else:
            self._begin(now)

    # --- workers go ---

    def _drop(self, worker: str, reason: str, samples: int = 0) -> None:
        """Go on without the worker; the run ends where that was the last. samples: those that move to others."""
        address = self.roster.alive[worker].row.address
        self.roster.drop(worker)
        self._out.log(WorkerLost(worker=worker, reason=reason, samples_moved=samples))
        self._out.put(orders.Dismiss(worker))
        if not self.roster.alive and self.phase is not _ENDED:
            self._give_up(Lost(f"worker {worker} ({address}): {reason}, and it was the last of the run"))

    # --- the end ---

    def _on_interrupted(self, fact: facts.Interrupted) -> None:
        if self._interrupted is None:
            self._interrupted = errors.Interrupted(f"interrupted by signal {fact.signum}", fact.signum)
            self._stop()

    def _end(self, status: orders.Status, error: UserError | None) -> None:
        if self._interrupted is not None and status == "lost":  # nothing more can be kept
            status, error = "interrupted", self._interrupted
        self._out.put(orders.CancelAll())
        self._out.put(orders.End(status, error))
        self.phase = Phase.ENDED
