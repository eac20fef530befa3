"""The part of a coordinator that every strategy has: calibrating, leaving workers out, pauses, a signal, the end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from typing import Any

from daskcnn import errors
from daskcnn.errors import ClusterError, Lost, UserError
from daskcnn.events import (
    RunContinued,
    RunPaused,
    WorkerIgnored,
    WorkerLeft,
    WorkerLeftOut,
    WorkerLost,
    WorkersCalibrated,
)
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.bench import Bench
from daskcnn.training.coordinator.facts import Fact
from daskcnn.training.coordinator.orders import Order, Outbox
from daskcnn.training.coordinator.roster import Measured, Refusal, Roster
from daskcnn.training.coordinator.settings import RunSettings
from daskcnn.training.coordinator.time_limit import TimeLimit


class Phase(Enum):
    """Phases of a run, in the order in which they may come."""

    CALIBRATING = auto()
    STARTING = auto()  # the server
    TRAINING = auto()  # rounds of replicas
    MOVING = auto()  # the last state is kept for another server
    RESCUING = auto()  # peers: the last center is looked for
    MEASURING = auto()  # layer sharding, and where workers are chosen: links
    STEPPING = auto()  # layer sharding: a segment of steps
    COLLECTING = auto()  # layer sharding: the pieces, behind a segment
    JUDGING = auto()  # the last center, or the snapshot at an epoch's end
    COUNTING = auto()  # layer sharding: the epoch's cost to each worker
    STOPPING = auto()  # the last state is kept after a signal
    CLOSING = auto()  # the last state is kept at the end
    ENDED = auto()


RECALLED = "another job is to have it"
CUT = "the connection to the scheduler was cut"
_ENDED = Phase.ENDED  # read with every fact: a member's look-up in its class takes ten times as long
IN_VAIN = 4
"""Times in a row that a run lacks workers and has come no farther, from which on losses count."""
GO_BACK = 5
"""A run ends if tasks out of step take it back to the same step this many times on end."""
_TURNING = frozenset({Phase.STARTING, Phase.MOVING, Phase.RESCUING})  # another phase follows at once


class Coordinating(ABC):
    """Takes facts in, gives orders out, and begins with calibration. A subclass decides how its strategy trains.

    remedy: words for a worker that was lost before the run began.
    """

    def __init__(self, settings: RunSettings, remedy: str = "start it again") -> None:
        self.roster, self.bench, self._out = Roster(settings.wanted), Bench(), Outbox()
        self._now = 0.0  # of the last fact
        self._calibration_limit, self._remedy = settings.stall_timeout, remedy
        self._least, self._wait = settings.least, settings.wait
        self._kept_workers = settings.least or settings.wanted  # it gives up none of these
        self._leaving: dict[str, str] = {}  # why, of workers that are to leave as soon as what they do has ended
        self._paused: float | None = None  # the time since when too few workers are there
        self._lacked_at, self._in_vain = -1, 0  # how far the run was then; how often in a row it was no farther
        self._gone_back: deque[int] = deque(maxlen=GO_BACK)  # the steps that tasks out of step took it back to, last
        self.phase = Phase.CALIBRATING
        self.life = 0
        self._interrupted: errors.Interrupted | None = None
        self._time_limit: TimeLimit | None = None
        self._unfit: dict[str, list[str]] = {}  # workers that were left out, by the reason and the remedy
        self._handlers: dict[type[Fact], Callable[[Any], None]] = {
            facts.WorkerReady: self._on_worker_ready,
            facts.Calibrated: self._on_calibrated,
            facts.CalibrationFailed: self._on_calibration_failed,
            facts.WorkerLeaving: self._on_worker_leaving,
            facts.WorkersRecalled: self._on_workers_recalled,
            facts.ConnectionCut: self._on_cut,
            facts.SchedulerGone: lambda fact: self._give_up(fact.error),
            facts.Interrupted: lambda fact: self._interrupt(errors.Interrupted.by(fact.signum)),
            facts.TimeLimited: self._on_time_limited,
            **self._own_handlers(),
        }

    @abstractmethod
    def _own_handlers(self) -> dict[type[Fact], Callable[[Any], None]]:
        """Return handlers of the facts that this strategy decides by itself."""

    @abstractmethod
    def _closed(self) -> Refusal | None:
        """Return the refusal of any worker that becomes ready now; None if it is of use."""

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
        """Take a fact in; return the orders that follow, in turn."""
        if self.phase is _ENDED:
            return []
        found, self._now = self._out.renew(), fact.at
        self._handlers[type(fact)](fact)
        if self._time_limit is not None:
            self._keep_to(self._time_limit, fact, found)
        return found

    @property
    def ended(self) -> bool:
        """True once the last order was `End`."""
        return self.phase is _ENDED

    # --- workers come ---

    def _on_worker_ready(self, fact: facts.WorkerReady) -> None:
        """Have the worker measure itself, at once or as soon as it has a place."""
        if self.roster.knows(fact.worker):
            return
        closed, barred, full = self._closed(), self._barred(fact.worker, fact.at), self.roster.full(fact.kind)
        if (refusal := closed or barred or full) is None:
            self._let_measure(fact.worker, fact.kind, fact.at)
            return
        if closed is None:
            self.bench.waiting[fact.worker] = fact.kind
        if refusal is not full or not self._least:  # those beyond a range are a reserve, and no surprise
            reason, remedy = refusal
            self._out.log(WorkerIgnored(address=fact.worker, reason=reason, remedy=remedy))

    def _let_measure(self, worker: str, kind: str, now: float) -> None:
        self.bench.came(worker, now)
        self.roster.calibrate(worker, kind, now)
        self._out.put(orders.Calibrate(worker))

    def _call_up(self, now: float) -> None:
        """Have workers measure themselves that waited for a place, or were left out for a while."""
        for worker, kind in [*self.bench.waiting.items()]:
            if not (self._closed() or self._barred(worker, now) or self.roster.full(kind)):
                self._let_measure(worker, kind, now)

    def _barred(self, worker: str, now: float) -> Refusal | None:
        """Return the refusal of a worker that is lost again and again. A run that lacks workers refuses none.

        It lacks them while it pauses, or once it has lost all that trained. If it has come no farther several times,
        it leaves workers out all the same: one that is lost wherever it begins would be taken for ever.
        """
        lacks = self._paused is not None or (self.life and not self.roster.alive)
        return None if lacks and self._in_vain < IN_VAIN else self.bench.barred(worker, now)

    def _note_lack(self) -> None:
        """Note how far the run has come as it begins to lack workers."""
        self._in_vain = 0 if self._progress() > self._lacked_at else self._in_vain + 1
        self._lacked_at = max(self._progress(), self._lacked_at)

    def _call_up_last(self) -> None:
        """Have those measure themselves that wait, as the last that trained is lost; a run that pauses does it then."""
        if not self._least:
            self._note_lack()
            self._call_up(self._now)

    @abstractmethod
    def _progress(self) -> int:
        """Return how far the run has come; it goes back after losses."""

    def _on_calibrated(self, fact: facts.Calibrated) -> None:
        if fact.worker in self.roster.calibrating:
            self.roster.calibrated(fact.worker, Measured(fact.seconds, fact.row))
            self._begin_if_calibrated(fact.at)

    def _on_calibration_failed(self, fact: facts.CalibrationFailed) -> None:
        if fact.worker in self.roster.calibrating:
            self._leave_out([fact.worker], fact.reason, fact.remedy, fact.at)

    def _on_cut(self, fact: facts.ConnectionCut) -> None:
        """Have those measure themselves anew that were at it."""
        for worker in self.roster.calibrating:
            self.roster.calibrating[worker] = fact.at
            self._out.put(orders.Calibrate(worker))

    def _leave_out_lost(self, fact: facts.WorkerGone) -> None:
        """Go on without workers that were lost while they measured themselves, or before the run began."""
        known = {*self.roster.calibrating, *(self.roster.alive if self.phase is Phase.CALIBRATING else ())}
        for worker in fact.workers:
            self.bench.waiting.pop(worker, None)
        lost = [worker for worker in fact.workers if worker in known]
        self._leave_out(lost, fact.reason, self._remedy, fact.at, lost=True)

    def _on_worker_leaving(self, fact: facts.WorkerLeaving) -> None:
        """Go on without workers that are to leave while they measure themselves; others go on until they are gone."""
        calibrating = [worker for worker in fact.workers if worker in self.roster.calibrating]
        self._leave_out(calibrating, fact.reason, "", fact.at)

    def _on_workers_recalled(self, fact: facts.WorkersRecalled) -> None:
        """Let those go without which the job has its least. The others are recalled again."""
        if self.phase in _TURNING:
            return
        known = self.roster.alive.keys() | (self.roster.calibrating if self.phase is Phase.CALIBRATING else {}).keys()
        counted = known - self._leaving.keys()
        there, may_go = Counter(map(self.roster.kind, counted)), list[str]()
        for worker in fact.workers:
            if worker in counted:
                kind = self.roster.kind(worker)
                if there[kind] <= self._kept_workers.get(kind, 0) or there.total() == 1:
                    continue
                there[kind] -= 1
            elif worker not in self.roster.calibrating:
                continue
            may_go.append(worker)
        if may_go:
            self._recall(facts.WorkerLeaving(tuple(may_go), RECALLED, fact.at))

    def _recall(self, fact: facts.WorkerLeaving) -> None:
        """Go on without workers that another run is to have."""
        self._on_worker_leaving(fact)

    def _tend_workers(self, now: float) -> None:
        """Look after workers as time passes."""
        self._leave_out_overdue(now)
        self._end_long_pause(now)
        if self.phase is not _ENDED and self.bench.waiting:
            self._call_up(now)

    def _leave_out_overdue(self, now: float) -> None:
        """Go on without workers that do not answer."""
        limit = self._calibration_limit
        remedy = "is it busy with other tasks, such as predictions? Let them end, or raise cluster.stall_timeout"
        self._leave_out(self.roster.overdue(now, limit), f"not calibrated within {limit:g} s", remedy, now, lost=True)

    def _leave_out(self, workers: Sequence[str], reason: str, remedy: str, now: float, *, lost: bool = False) -> None:
        """Go on without workers that were not calibrated. lost: they may come back."""
        for worker in workers:
            if lost:
                self.bench.lost(worker, now)
            self._leaving.pop(worker, None)
            self.roster.drop(worker)
            self._unfit.setdefault(errors.told("", reason, remedy), []).append(worker)
            self._out.log(WorkerLeftOut(worker=worker, reason=reason, remedy=remedy))
            self._out.put(orders.Dismiss(worker, for_good=not lost))
        if workers:
            self._begin_if_calibrated(now)

    def _begin_if_calibrated(self, now: float) -> None:
        """Begin the run, if it has not begun, with the workers that have measured themselves."""
        if self.phase is not Phase.CALIBRATING:
            return
        if not self.roster.alive:
            self._call_up(now)
        if self.roster.calibrating:
            return
        waits = self._least and (self.life or not self._unfit)  # those that were measured are lost
        if not self.roster.alive and not waits:
            lines = [f"  {', '.join(workers)}: {reason}" for reason, workers in self._unfit.items()]
            error = ClusterError("\n".join(["no worker is usable:", *lines]))
            if self.life:
                self._give_up(Lost(str(error)))
            else:
                self._end("unusable", error)
            return
        if self._is_short(now):
            return
        self._out.log(WorkersCalibrated(workers=[measured.row for measured in self.roster.alive.values()]))
        self._begin(now)

    # --- too few are there ---

    def _spared(self) -> Iterable[str]:
        """Return the kinds of workers that are there and left out, because the run is faster without them."""
        return ()

    def _is_short(self, now: float) -> bool:
        """Return True if fewer workers are there than the job's least: the run pauses, unless it is to end anyway."""
        missing = self.roster.missing(self._least, self._spared())
        if missing and self._paused is None and self._interrupted is None:
            self._paused = now
            self._note_lack()
            self._out.log(RunPaused(workers=len(self.roster.alive), missing=missing, wait=self._wait))
        elif not missing and self._paused is not None:
            self._out.log(RunContinued(workers=len(self.roster.alive), seconds=now - self._paused))
            self._paused = None
        return bool(missing)

    def _end_long_pause(self, now: float) -> None:
        """End the run if it has paused for too long. Workers that measure themselves are waited for."""
        if self._paused is None or self.phase not in (Phase.CALIBRATING, Phase.TRAINING):
            return
        if self.roster.calibrating or now - self._paused <= self._wait:
            return
        least = " and ".join(f"{number} {kind}" for kind, number in self._least.items())
        there = f"{len(self.roster.alive)} {'left' if self.life else 'usable'}"
        told = f"at least {least} (cluster.workers)", f"{there}, and no other came within {self._wait:g} s"
        remedy = "start more workers, wait longer (--wait), or ask for fewer"
        if self.life:
            self._stop_short(Lost(*told, remedy))
        else:
            self._end("unusable", ClusterError(*told, remedy))

    def _stop_short(self, error: Lost) -> None:
        """End a run that has paused for too long; what was trained is kept."""
        self._give_up(error)

    # --- workers go ---

    def _drop(self, worker: str, reason: str, samples: int = 0, done: int | None = None) -> None:
        """Go on without the worker; the run ends if that was the last.

        samples: those that move to others. done: those of its last round, if it leaves in good order.
        """
        address = self.roster.alive[worker].row.address
        if done is None:
            self.bench.lost(worker, self._now)
        self.roster.drop(worker)
        gone: dict[str, Any] = {"worker": worker, "reason": reason, "samples_moved": samples}
        self._out.log(WorkerLost(**gone) if done is None else WorkerLeft(**gone, samples_done=done))
        self._out.put(orders.Dismiss(worker, for_good=done is not None))
        if not self.roster.alive and self.phase is not _ENDED:
            self._lost_last(Lost(f"worker {worker} ({address}): {reason}, and it was the last of the run"))

    def _lost_last(self, error: Lost) -> None:
        """Go on after the last worker is lost, or end the run."""
        self._give_up(error)

    def _back_too_often(self, message: str, step: int) -> Lost | None:
        """Note that tasks out of step take the run back to this step. Returns the error that ends it after too many."""
        self._gone_back.append(step)
        if self._gone_back.count(step) < GO_BACK:
            return None
        remedy = "do all workers reach each other? `daskcnn doctor --scheduler ADDRESS` tries their links"
        return Lost(f"{message}, for the {GO_BACK}th time behind step {step}: {remedy}")

    # --- the end ---

    def _interrupt(self, error: errors.Interrupted) -> None:
        if self._interrupted is None:
            self._interrupted = error
            self._stop()

    def _on_time_limited(self, fact: facts.TimeLimited) -> None:
        self._time_limit = TimeLimit(fact.seconds, fact.ends)

    @property
    def _before_save(self) -> float:
        """Seconds until the state could be kept, if the run were to end now."""
        return 0.0

    def _keep_to(self, limit: TimeLimit, fact: Fact, found: list[Order]) -> None:
        """End the run if it must be kept now to be done within the limit."""
        limit.note(fact, found)
        if limit.near(fact.at, self._before_save) and self._interrupted is None and self.phase is not _ENDED:
            self._out.put(orders.IgnoreSignals())
            self._interrupt(errors.Interrupted.at_limit(limit.seconds))

    def _end(self, status: orders.Status, error: UserError | None, turn: orders.Turn | None = None) -> None:
        if self._interrupted is not None and status == "lost":  # nothing more can be kept
            status, error = "interrupted", self._interrupted
        self._out.put(orders.CancelAll())
        self._out.put(orders.End(status, error, turn))
        self.phase = Phase.ENDED
