"""Two watches of a coordinator: over workers that measure themselves before they train, and over silence."""

from __future__ import annotations

from daskcnn.errors import ClusterError
from daskcnn.events import WorkerIgnored, WorkerLeftOut, WorkersCalibrated
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.orders import Order
from daskcnn.training.coordinator.roster import Measured, Roster


class CalibrationPhase:
    """Takes facts about workers that do not train yet, and keeps the roster.

    Parameters
    ----------
    roster : the workers of the run.
    limit : seconds within which a worker has to measure itself.
    remedy : what helps after a worker was lost, in words.

    Attributes
    ----------
    begun : whether the run has begun with the workers that there were.
    """

    def __init__(self, roster: Roster, limit: float, remedy: str = "start it again") -> None:
        self.roster, self._limit, self._remedy = roster, limit, remedy
        self.begun = False

    @property
    def over(self) -> bool:
        """Whether every worker has measured itself or was left out."""
        return not self.roster.calibrating

    def begin(self) -> list[Order]:
        """The run begins with the workers that have measured themselves.

        Raises ClusterError where there is none.
        """
        self.begun = True
        if not self.roster.alive:
            raise ClusterError("no worker is usable; see the warnings above")
        rows = [measured.row for measured in self.roster.alive.values()]
        return [orders.Log(WorkersCalibrated(workers=rows))]

    def ready(self, fact: facts.WorkerReady) -> list[Order]:
        """A worker measures itself, if the run wants it."""
        if self.roster.wants(fact.worker, fact.kind):
            self.roster.calibrate(fact.worker, fact.kind, fact.at)
            return [orders.Calibrate(fact.worker)]
        return self.ignored(fact)

    def ignored(self, fact: facts.WorkerReady) -> list[Order]:
        """The log mentions a worker that the run does not take."""
        if fact.worker in self.roster.alive or fact.worker in self.roster.calibrating:
            return []
        return [orders.Log(WorkerIgnored(address=fact.worker))]

    def calibrated(self, fact: facts.Calibrated) -> bool:
        """A worker has measured itself; returns whether the run waited for it."""
        if fact.worker not in self.roster.calibrating:
            return False
        self.roster.calibrated(fact.worker, Measured(fact.seconds, fact.row))
        return True

    def failed(self, fact: facts.CalibrationFailed) -> list[Order]:
        """The run goes on without a worker that could not measure itself."""
        if fact.worker not in self.roster.calibrating:
            return []
        return self._leave_out(fact.worker, fact.reason, fact.remedy)

    def gone(self, fact: facts.WorkerGone) -> list[Order]:
        """The run goes on without workers that were lost meanwhile: before it begins, measured or not."""
        known = {*self.roster.calibrating, *(() if self.begun else self.roster.alive)}
        out = [self._leave_out(worker, fact.reason, self._remedy) for worker in fact.workers if worker in known]
        return [order for part in out for order in part]

    def overdue(self, now: float) -> list[Order]:
        """The run goes on without workers that do not answer."""
        remedy = "is it busy with another job? Give each its own workers, or raise cluster.stall_timeout"
        reason = f"not calibrated within {self._limit:g} s"
        out = [self._leave_out(worker, reason, remedy) for worker in self.roster.overdue(now, self._limit)]
        return [order for part in out for order in part]

    def _leave_out(self, worker: str, reason: str, remedy: str) -> list[Order]:
        self.roster.drop(worker)
        event = WorkerLeftOut(worker=worker, reason=reason, remedy=remedy)
        return [orders.Log(event), orders.Dismiss(worker)]


class Silence:
    """The clock. It begins with the first tick after `restart`, for carrying orders out takes its time as well.

    Attributes
    ----------
    asked : whether it was asked for whom the run waits, and the answer is to come.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self.asked = False

    def restart(self) -> None:
        """The shell has something new to carry out."""
        self._since, self.asked = None, False

    def heard(self, now: float) -> None:
        """A result has come."""
        self._since = now

    def longer(self, now: float, limit: float) -> bool:
        """Whether nothing was heard for longer than `limit` seconds."""
        return self._since is not None and now - self._since > limit

    def overdue(self, now: float, limit: float) -> bool:
        """At a tick: whether it is time to ask for whom the run waits, which is asked once."""
        if self._since is None:
            self._since = now
        if self.asked or not self.longer(now, limit):
            return False
        self.asked = True
        return True
