"""The coordinator of a data-parallel run: who joins, trains, judges and leaves, when to save, when it ends.

Theory of operation. A run goes through *lives*, one for each parameter server. A life begins from the state kept last:
`Rounds` says which replica trains on which samples, replicas join, and rounds are given out until all presentations are
made. What a shell finds out comes in as facts, with the time; what is to be done goes out as orders. Nothing here does
I/O, looks at a clock, or holds weights.

Replicas. A replica is a worker, or a group of workers with a name of its own. A worker that is lost takes its replica
with it; the replica's samples go to the others.

Joining. All replicas whose rounds are due together join before the first of these rounds starts, because a barrier
counts the replicas that have joined. Reports that come meanwhile are put off.

Silence. A replica may take `PATIENCE` times what was expected, and the stall timeout on top. Then the coordinator asks
who waits for whom, and gives up the replicas that wait for nobody.

Without a server (`Settings.peers`) replicas meet each other. When one is lost the round under way is given up, and a
new life begins from the last center that one of the others has.

A worker that becomes ready in mid-run is calibrated, and takes its share of samples at the next boundary: at once under
an asynchronous rule, between two rounds behind a barrier. Groups take new workers when a life begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from daskcnn import errors
from daskcnn.errors import ClusterError, Lost, UserError
from daskcnn.events import (
    Event,
    SamplesAllocated,
    Warned,
    WorkerIgnored,
    WorkerJoined,
    WorkerLeftOut,
    WorkerLost,
    WorkersCalibrated,
)
from daskcnn.nn.score import Score
from daskcnn.partition.allocation import Allocation
from daskcnn.partition.groups import form_groups
from daskcnn.partition.proportional import proportional
from daskcnn.partition.rounds import Round, Rounds
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.facts import Fact
from daskcnn.training.coordinator.looks import Looks
from daskcnn.training.coordinator.orders import Order
from daskcnn.training.coordinator.roster import Measured, Roster
from daskcnn.training.coordinator.settings import STEPS_AHEAD, Settings

PATIENCE = 5.0
"""A round may take so many times what was expected, and the stall timeout on top."""


class Phase(Enum):
    """What the run does now."""

    CALIBRATING = auto()
    STARTING = auto()  # the server
    TRAINING = auto()
    RESCUING = auto()  # peers: the last center is looked for
    JUDGING = auto()  # the last center
    STOPPING = auto()  # the last state is kept after a signal
    CLOSING = auto()  # the last state is kept at the end
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class Kept:
    """The state that a life begins from: what a checkpoint, or the last `Save`, knows of the coordinator.

    Attributes
    ----------
    step, epoch : merges, and presentations a sample.
    book : rounds, server epoch, best and worse looks; empty before the first save.
    judged : whether its center was scored.
    """

    step: int = 0
    epoch: float = 0.0
    book: Mapping[str, Any] | None = None
    judged: bool = False


@dataclass(frozen=True, slots=True)
class Running:
    """A round under way: since when it was last heard of, and within how many seconds it should be heard of again."""

    round: Round
    session: int
    heard: float
    expected: float


class Coordinator:
    """Decides a data-parallel run. See the module's text for how it works.

    Parameters
    ----------
    settings : the job's numbers, rule and partitioner.
    kept : the state to go on from.
    logs : whether `Log` orders for rounds are wanted; a large simulation does without.
    """

    def __init__(self, settings: Settings, kept: Kept | None = None, *, logs: bool = True) -> None:
        self.settings, self._logs = settings, logs
        self.rule = settings.rule
        self.roster = Roster(settings.wanted)
        self.kept = kept or Kept()
        self.phase = Phase.CALIBRATING
        self.life = 0
        self.version = self.kept.step
        self.rounds: Rounds | None = None
        self.looks = self._looks(0.0)
        self.members: dict[str, tuple[str, ...]] = {}  # the workers of every replica
        self._judges: dict[str, float] = {}  # seconds a sample of the worker that judges for a replica
        self._sessions: dict[str, int] = {}
        self._joined: dict[str, None] = {}  # an ordered set
        self._joining: dict[str, float] = {}  # since when
        self._due: list[Round] = []  # they start once all who join have joined
        self._held: list[facts.RoundDone] = []  # put off until then
        self._running: dict[str, Running] = {}
        self._scored: set[str] = set()  # replicas that judge the center after their round
        self._newcomers: list[str] = []  # calibrated in mid-run, without samples yet
        self._told: Allocation | None = None  # what was logged last
        self._asked = False  # who waits for whom
        self._saving: list[Kept] = []
        self._moved_from: int | None = None  # merges that the lost server had
        self._now = 0.0
        self._interrupted: errors.Interrupted | None = None
        self._out: list[Order] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            facts.WorkerReady: self._on_worker_ready,
            facts.Calibrated: self._on_calibrated,
            facts.CalibrationFailed: self._on_calibration_failed,
            facts.WorkerGone: self._on_worker_gone,
            facts.ServerReady: self._on_server_ready,
            facts.ServerGone: self._on_server_gone,
            facts.Joined: self._on_joined,
            facts.Progress: self._on_progress,
            facts.RoundDone: self._on_round_done,
            facts.RoundFailed: self._on_round_failed,
            facts.OutOfStep: self._on_out_of_step,
            facts.Waits: self._on_waits,
            facts.Rescued: self._on_rescued,
            facts.Judged: self._on_judged,
            facts.Saved: self._on_saved,
            facts.SchedulerGone: self._on_scheduler_gone,
            facts.Interrupted: self._on_interrupted,
            facts.Tick: self._on_tick,
        }

    def handle(self, fact: Fact) -> list[Order]:
        """Take a fact in; returns what is to be done now, in order."""
        if self.phase is Phase.ENDED:
            return []
        self._out, self._now = [], fact.at
        self._handlers[type(fact)](fact)
        return self._out

    @property
    def ended(self) -> bool:
        """Whether the last order was `End`."""
        return self.phase is Phase.ENDED

    @property
    def epoch(self) -> float:
        """Presentations a sample so far."""
        return self.rounds.done / self.settings.samples if self.rounds else self.kept.epoch

    # --- workers come ---

    def _on_worker_ready(self, fact: facts.WorkerReady) -> None:
        if not self.roster.wants(fact.worker, fact.kind) or self.phase in (
            Phase.JUDGING,
            Phase.STOPPING,
            Phase.CLOSING,
        ):
            if fact.worker not in self.roster.alive and fact.worker not in self.roster.calibrating:
                self._log(WorkerIgnored(address=fact.worker))
            return
        self.roster.calibrate(fact.worker, fact.kind, fact.at)
        self._out.append(orders.Calibrate(fact.worker))

    def _on_calibrated(self, fact: facts.Calibrated) -> None:
        if fact.worker not in self.roster.calibrating:
            return
        self.roster.calibrated(fact.worker, Measured(fact.seconds, fact.row))
        if self.phase is Phase.CALIBRATING:
            self._begin_if_calibrated()
            return
        self._log(WorkersCalibrated(workers=[fact.row]))
        if self.settings.replica_size == 1:
            self._newcomers.append(fact.worker)
            if self.phase is Phase.TRAINING:
                self._issue(())

    def _on_calibration_failed(self, fact: facts.CalibrationFailed) -> None:
        if fact.worker in self.roster.calibrating:
            self._leave_out(fact.worker, fact.reason, fact.remedy)

    def _leave_out(self, worker: str, reason: str, remedy: str) -> None:
        """Go on without a worker that was not calibrated."""
        self.roster.drop(worker)
        self._log(WorkerLeftOut(worker=worker, reason=reason, remedy=remedy))
        self._out.append(orders.Dismiss(worker))
        if self.phase is Phase.CALIBRATING:
            self._begin_if_calibrated()

    def _begin_if_calibrated(self) -> None:
        """Begin the first life once every worker has measured itself or was left out."""
        if self.roster.calibrating:
            return
        if not self.roster.alive:
            self._end("unusable", ClusterError("no worker is usable; see the warnings above"))
            return
        self._log(WorkersCalibrated(workers=[measured.row for measured in self.roster.alive.values()]))
        if (problem := self._too_few()) is not None:
            self._end("unusable", problem)
        else:
            self._begin_life()

    def _too_few(self) -> ClusterError | None:
        size, there, strategy = self.settings.replica_size, len(self.roster.alive), self.settings.strategy
        if there < size:
            return ClusterError(
                f"train.replica_size = {size}: there are {there} workers; lower it, or start more workers"
            )
        learners, replicas = ("groups", there // size) if size > 1 else ("workers", there)
        if replicas < (fewest := self.rule.fewest):
            return ClusterError(
                f"train.strategy = {strategy!r} is for {fewest} {learners} or more, and there are {replicas}; "
                "start more, or choose sgwu or agwu"
            )
        return None

    # --- a life ---

    def _begin_life(self) -> None:
        """Start from the state kept last, with the workers that are there."""
        book = self.kept.book or {}
        self.life = max(self.life, int(book.get("server_epoch", 0))) + 1
        self.version = self.kept.step
        self._forget_life()
        if self.settings.replica_size > 1 and not self._form_groups():
            return
        if self.settings.replica_size == 1:
            self.members = {worker: (worker,) for worker in self.roster.alive}
            self._judges = self.roster.seconds
        self.rounds, self._told = self._first_rounds(), None
        self.looks = self._looks(self._now)
        if self.settings.peers:
            self._begin_training()
        else:
            self.phase = Phase.STARTING
            self._out.append(orders.StartServer(self.life, self._moved_from is not None))

    def _forget_life(self) -> None:
        self._sessions, self._newcomers, self._asked = {}, [], False
        self._joined.clear()
        self._joining.clear()
        self._running.clear()
        self._due, self._held, self._saving = [], [], []
        self._scored = set()

    def _form_groups(self) -> bool:
        """A replica on every group of workers; False where there are too few."""
        size, seconds = self.settings.replica_size, self.roster.seconds
        if len(seconds) < size:
            self._end("lost", Lost(f"{len(seconds)} workers are left, and train.replica_size = {size}"))
            return False
        formed = form_groups(seconds, size)
        self.members = {f"group-{i}": members for i, members in enumerate(formed.groups)}
        self._judges = {name: min(seconds[worker] for worker in own) for name, own in self.members.items()}
        self._out.append(orders.FormGroups(dict(self.members), formed.left_out))
        if formed.left_out:
            names = ", ".join(formed.left_out)
            self._warn(
                f"{names}: left out, the slowest; train.replica_size = {size} does not divide {len(seconds)} workers"
            )
        return True

    def _first_rounds(self) -> Rounds:
        settings, rule = self.settings, self.rule
        seconds = self._replica_seconds()
        rounds = Rounds(
            settings.partitioner,
            settings.samples,
            seconds,
            epochs=settings.epochs,
            barrier=rule.barrier,
            passes=rule.passes(settings.epochs),
            swaps=rule.swaps,
            batch_size=settings.batch_size if settings.meets_within_rounds else None,
        )
        if self.kept.book:
            rounds.restore(self.kept.book["rounds"], tuple(seconds))
        return rounds

    def _replica_seconds(self) -> dict[str, float]:
        """Seconds a sample of every replica, if the members of a group went on at once."""
        each = self.roster.seconds
        if self.settings.replica_size == 1:
            return each
        return {name: 1 / sum(1 / each[worker] for worker in own) for name, own in self.members.items()}

    def _looks(self, now: float) -> Looks:
        book = self.kept.book or {}
        best, worse = float(book.get("best", 0.0)), int(book.get("worse", 0))
        return Looks(patience=self.settings.patience, epoch=self.kept.epoch, best=best, worse=worse, now=now)

    def _on_server_ready(self, fact: facts.ServerReady) -> None:
        if fact.life != self.life or self.phase is not Phase.STARTING:
            return
        if self._moved_from is not None:
            self._warn(
                f"the parameter server's worker is lost; a new server starts on {fact.host} from the checkpoint at "
                f"epoch {self.kept.epoch:.2f}, {self._moved_from} merges are done again"
            )
            self._moved_from = None
        self._begin_training()

    def _begin_training(self) -> None:
        self.phase = Phase.TRAINING
        self._issue(())

    def _on_server_gone(self, fact: facts.ServerGone) -> None:
        if fact.life != self.life or self.settings.peers:
            return
        if self.phase is Phase.STOPPING:  # the state kept last stands
            self._end_interrupted()
        elif self.phase is not Phase.CALIBRATING:
            self._moved_from = self.version - self.kept.step
            self._restart()

    def _on_out_of_step(self, fact: facts.OutOfStep) -> None:
        if fact.life == self.life and self.phase is Phase.TRAINING:
            self._warn(f"{fact.message}: back to the checkpoint at epoch {self.kept.epoch:.2f}")
            self._restart()

    def _restart(self) -> None:
        """A new life from the state kept last."""
        self._out.append(orders.CancelAll())
        self._begin_life()

    # --- rounds ---

    def _issue(self, ended: tuple[str, ...]) -> None:
        """Start the rounds that are due; their replicas join first, replicas without a round leave the barrier.

        ended: replicas whose round has ended just now.
        """
        rounds = self.rounds
        assert rounds is not None
        if self._newcomers and not (self.rule.barrier and rounds.running):
            self._admit()
        due = [] if self.looks.stopping else rounds.due()
        if rounds.allocation is not self._told:  # given out, or left by a replica that is lost
            self._told = rounds.allocation
            if self._logs:
                self._log(SamplesAllocated(sizes=rounds.allocation.sizes()))
        self._sit_out(ended, due)
        strangers = [round_.worker for round_ in due if round_.worker not in self._joined]
        if strangers:
            self._due += due
            for replica in strangers:
                self._join(replica)
        elif due:
            self._start(due)
        elif not self._running and not self._joining:
            self._finish()

    def _sit_out(self, ended: tuple[str, ...], due: list[Round]) -> None:
        """Nobody is to wait for replicas without a round: behind a barrier once the others' is due, else at once."""
        rounds = self.rounds
        assert rounds is not None
        if self.rule.barrier:
            ended = tuple(self._joined) if due else ()
        for replica in ended:
            if replica not in rounds.running and replica in self._joined:
                self._leave(replica)

    def _admit(self) -> None:
        """Workers that came in mid-run take their share of the samples from the others."""
        assert self.rounds is not None
        for worker in self._newcomers:
            seconds = self.roster.alive[worker].seconds
            self.rounds.join(worker, seconds)
            self.members[worker], self._judges[worker] = (worker,), seconds
            self._log(WorkerJoined(worker=worker, samples=self.rounds.allocation.size(worker)))
        self._newcomers = []

    def _join(self, replica: str) -> None:
        self._sessions[replica] = session = self._sessions.get(replica, 0) + 1
        self._joining[replica] = self._now
        self._out.append(orders.Join(replica, self.life, session))

    def _on_joined(self, fact: facts.Joined) -> None:
        replica = fact.replica
        if fact.life != self.life or replica not in self._joining or fact.session != self._sessions[replica]:
            return
        del self._joining[replica]
        self._joined[replica] = None
        if not self._joining:
            self._all_joined()

    def _all_joined(self) -> None:
        """The rounds start, and the reports that came meanwhile are taken."""
        due, self._due = self._due, []
        held, self._held = self._held, []
        if due:
            self._start(due)
        for report in held:
            self._on_round_done(report)
        if not due and not held:
            self._issue(())

    def _start(self, due: list[Round]) -> None:
        rounds = self.rounds
        assert rounds is not None
        scored, replicas = self._to_score(due), len(rounds.running)
        self._scored.update(scored)
        for round_ in due:
            replica = round_.worker
            session = self._sessions[replica]
            self._running[replica] = Running(round_, session, self._now, self._expected(round_))
            self._out.append(orders.StartRound(self.life, session, round_, scored.get(replica), replicas))

    def _expected(self, round_: Round) -> float:
        """Seconds within which the round should be heard of."""
        assert self.rounds is not None
        each = self.rounds.seconds[round_.worker]
        if self.settings.replica_size > 1:
            return (STEPS_AHEAD + 1) * self.settings.batch_size * each
        meetings = 1
        if self.settings.peers and round_.steps and self.rule.period:
            meetings = -(-round_.steps // self.rule.period)
        return round_.samples * each / meetings

    def _to_score(self, due: list[Round]) -> dict[str, tuple[int, int]]:
        """Which replica judges which validation samples: behind a barrier all of them, else one each epoch."""
        rounds, settings = self.rounds, self.settings
        assert rounds is not None
        lo, hi = settings.samples, settings.samples + settings.validation
        if self.rule.barrier:
            parts = self._parts(lo, hi)
            return parts if parts.keys() <= {r.worker for r in due} else {due[0].worker: (lo, hi)}
        issued = 1 - rounds.budget.left / rounds.presentations
        return {due[-1].worker: (lo, hi)} if self.looks.due(issued * settings.epochs) else {}

    def _parts(self, lo: int, hi: int) -> dict[str, tuple[int, int]]:
        """Samples lo…hi cut over the replicas in proportion to the speed of the workers that judge for them."""
        parts = {}
        sizes = proportional(hi - lo, [1 / seconds for seconds in self._judges.values()])
        for replica, size in zip(self._judges, sizes, strict=True):
            if size:
                parts[replica] = (lo, lo + size)
            lo += size
        return parts

    def _on_progress(self, fact: facts.Progress) -> None:
        running = self._running.get(fact.replica)
        if fact.life == self.life and running is not None and running.session == fact.session:
            self._running[fact.replica] = replace(running, heard=fact.at)

    def _on_round_done(self, fact: facts.RoundDone) -> None:
        replica, report = fact.replica, fact.report
        running = self._running.get(replica)
        if fact.life != self.life or running is None or fact.session != running.session:
            return  # a replica that was given up, or a report that came twice
        if self.phase is not Phase.TRAINING or report.number != running.round.number:
            return
        if self._joining:
            self._held.append(fact)
            return
        del self._running[replica]
        rounds = self.rounds
        assert rounds is not None
        rounds.finished(replica, report.busy / report.samples)
        self._record(fact)
        self._issue((replica,))

    def _on_round_failed(self, fact: facts.RoundFailed) -> None:
        if fact.life == self.life and fact.replica in self._running:
            if not self.settings.peers:
                self._out.append(orders.CountServer())  # the push that was refused is to be on record
            self._end("diverged" if isinstance(fact.error, errors.Diverged) else "failed", fact.error)

    # --- what is recorded and kept ---

    def _record(self, fact: facts.RoundDone) -> None:
        report, rounds = fact.report, self.rounds
        assert rounds is not None
        self.version = max(self.version, report.version)
        judged = fact.replica in self._scored
        self._scored.discard(fact.replica)
        self.looks.add(report, judged=judged)
        if self._logs:
            self._log(report.event(self.epoch))
        round_ended = not rounds.running if self.rule.barrier else judged
        if round_ended and self.looks.judged:
            self._look(report.lr)

    def _look(self, lr: float | None) -> None:
        """The end of a synchronous round, or of an epoch: the center's score, and a checkpoint if due."""
        look, better = self.looks.look(self._now)
        epochs = self.settings.epochs
        self._log(look.event(epoch=self.epoch, epochs=epochs, step=self.version, lr=lr))
        assert self.rounds is not None
        if better or self.rounds.ended or self.epoch - self.kept.epoch >= self.settings.checkpoint_every:
            self._save(look.center)

    def _save(self, validation: Score | None, *, judged: bool = True) -> None:
        self._saving.append(Kept(0, self.epoch, self._book(), judged))
        kept = self._saving[-1]
        assert self.rounds is not None
        assert kept.book is not None
        self._out.append(orders.Save(kept.epoch, kept.book, self.rounds.workers, validation))

    def _book(self) -> dict[str, Any]:
        assert self.rounds is not None
        looks = self.looks
        return {
            "rounds": self.rounds.to_dict(),
            "server_epoch": self.life,
            "best": looks.best,
            "worse": looks.worse,
        }

    def _on_saved(self, fact: facts.Saved) -> None:
        if not self._saving:
            return
        self.kept = replace(self._saving.pop(0), step=fact.step)
        if self.phase is Phase.STOPPING:
            self._end_interrupted()
        elif self.phase is Phase.CLOSING and not self._saving:
            self._close()

    # --- the end ---

    def _finish(self) -> None:
        """All presentations are made, or the run stops early: judge the last center, keep it, and end."""
        if self._saving:
            self.phase = Phase.CLOSING
        else:
            self._close()

    def _close(self) -> None:
        if self.kept.judged and self.kept.epoch >= self.epoch:
            self._end("done", None)
        else:
            self.phase = Phase.JUDGING
            lo = self.settings.samples
            self._out.append(orders.Judge(lo, lo + self.settings.validation))

    def _on_judged(self, fact: facts.Judged) -> None:
        if self.phase is Phase.JUDGING:
            self.phase = Phase.CLOSING
            self._save(fact.score)

    def _end(self, status: orders.Status, error: UserError | None) -> None:
        if self._interrupted is not None and status == "lost":  # nothing more can be kept
            status, error = "interrupted", self._interrupted
        self._out += [orders.CancelAll(), orders.End(status, error)]
        self.phase = Phase.ENDED

    def _on_interrupted(self, fact: facts.Interrupted) -> None:
        self._interrupted = errors.Interrupted(f"interrupted by signal {fact.signum}", fact.signum)
        if self.phase in (Phase.CALIBRATING, Phase.STARTING):
            self._end_interrupted()
        elif self.settings.peers:
            self._rescue()
        elif self.phase is not Phase.STOPPING:
            self.phase = Phase.STOPPING
            self._saving.clear()
            self._save(None, judged=False)

    def _end_interrupted(self) -> None:
        self._end("interrupted", self._interrupted)

    def _on_scheduler_gone(self, fact: facts.SchedulerGone) -> None:
        self._end("lost", fact.error)

    # --- workers go ---

    def _on_worker_gone(self, fact: facts.WorkerGone) -> None:
        for worker in fact.workers:
            if worker in self.roster.calibrating:
                self._leave_out(worker, fact.reason, "start it again; it is taken when it is there")
            elif worker in self.roster.alive and self._forming:
                self._drop(worker, fact.reason, 0)
            elif worker in self.roster.alive:
                self._lose_worker(worker, fact.reason)
            if self.phase is Phase.ENDED:
                return
        self._go_on_without()

    @property
    def _forming(self) -> bool:
        """Whether groups are made that have no samples yet: without a worker they are formed anew."""
        return self.phase is Phase.STARTING and self.settings.replica_size > 1

    def _lose_worker(self, worker: str, reason: str) -> None:
        """The worker is gone, and its replica with it."""
        replica = next((name for name, own in self.members.items() if worker in own), None)
        if replica is None or replica == worker:
            self._drop(worker, reason, self._samples_of(worker))
        else:
            self._lose_group(replica, f"{worker}: {reason}", (worker,))
            return
        if replica is not None:
            self._lose_replica(replica)

    def _lose_group(self, replica: str, reason: str, workers: Iterable[str]) -> None:
        """Go on without the group, and without these of its workers at all."""
        for worker in workers:
            self._drop(worker, reason, 0)
        if self.phase is not Phase.ENDED:
            self._log(WorkerLost(worker=replica, reason=reason, samples_moved=self._samples_of(replica)))
            self._lose_replica(replica, f"{replica} ({reason}): it was the last group of the run")

    def _samples_of(self, replica: str) -> int:
        rounds = self.rounds
        return rounds.allocation.size(replica) if rounds and replica in rounds.seconds else 0

    def _drop(self, worker: str, reason: str, samples: int) -> None:
        """The run goes on without the worker; it ends where that was the last."""
        row = self.roster.alive[worker].row
        self.roster.drop(worker)
        if worker in self._newcomers:
            self._newcomers.remove(worker)
        self._log(WorkerLost(worker=worker, reason=reason, samples_moved=samples))
        self._out.append(orders.Dismiss(worker))
        if not self.roster.alive and self.phase is not Phase.ENDED:
            self._end("lost", Lost(f"worker {worker} ({row.address}): {reason}, and it was the last of the run"))

    def _lose_replica(self, replica: str, last: str = "") -> None:
        """The replica's samples go to the others."""
        if self.phase is Phase.ENDED:
            return
        del self.members[replica], self._judges[replica]
        joining, running = self._joining.pop(replica, None), self._running.pop(replica, None)
        if joining is not None or running is not None:
            self._out.append(orders.Cancel(replica))
        self._joined.pop(replica, None)
        self._scored.discard(replica)
        self._due = [round_ for round_ in self._due if round_.worker != replica]
        if not self.members:
            self._end("lost", Lost(last or f"{replica}: it was the last of the run"))
            return
        assert self.rounds is not None
        if replica in self.rounds.seconds:
            self.rounds.lost(replica)
        if replica in self._sessions and not self.settings.peers:  # it may have joined without our knowing
            self._leave(replica)

    def _leave(self, replica: str) -> None:
        self._joined.pop(replica, None)
        self._out.append(orders.Leave(replica, self.life, self._sessions[replica]))

    def _go_on_without(self) -> None:
        """Behind a loss: peers look for the last center; else rounds that are due now start."""
        if self._forming:
            self._restart()
        elif self.phase in (Phase.TRAINING, Phase.RESCUING) and self.settings.peers:
            self._rescue()
        elif self.phase is Phase.TRAINING and not self._joining:
            if self._due or self._held:
                self._all_joined()
            else:
                self._issue(())

    # --- peers without a server ---

    def _rescue(self) -> None:
        """Give up the round under way, and look for the last center that a worker has."""
        self.phase = Phase.RESCUING
        self._out += [orders.CancelAll(), orders.Rescue()]

    def _on_rescued(self, fact: facts.Rescued) -> None:
        if self.phase is not Phase.RESCUING:
            return
        if fact.version is not None:
            self.version = fact.version
            self.kept = Kept(fact.version, self.epoch, self._book(), judged=False)
        if self._interrupted is None:
            if fact.version is not None:
                count = len(self.roster.alive)
                self._warn(f"the round is begun again from version {fact.version}, by {count} workers")
            self._begin_life()
        elif fact.version is None:
            self._end_interrupted()
        else:
            self.phase = Phase.STOPPING
            self._save(None, judged=False)

    # --- silence ---

    def _on_tick(self, fact: facts.Tick) -> None:
        limit = self.settings.stall_timeout
        for worker in self.roster.overdue(fact.at, limit):
            remedy = "is it busy with another job? Give each its own workers, or raise cluster.stall_timeout"
            self._leave_out(worker, f"not calibrated within {limit:g} s", remedy)
        if self.phase is not Phase.TRAINING:
            return
        if late := [replica for replica, since in self._joining.items() if fact.at - since > limit]:
            self._lose_silent({replica: self.members[replica] for replica in late}, limit)
        elif not self._asked and (overdue := self._overdue(fact.at)):
            self._asked = True
            self._out.append(orders.AskWaiting(tuple(overdue)))

    def _limit(self) -> float:
        """Seconds without a sign of life after which a replica is overdue."""
        longest = max((running.expected for running in self._running.values()), default=0.0)
        return self.settings.stall_timeout + PATIENCE * longest

    def _overdue(self, now: float) -> list[str]:
        limit = self._limit()
        return [replica for replica, running in self._running.items() if now - running.heard > limit]

    def _on_waits(self, fact: facts.Waits) -> None:
        if not self._asked or self.phase is not Phase.TRAINING:
            return
        self._asked, limit = False, self._limit()
        overdue = self._overdue(fact.at)
        late = {replica: fact.stuck.get(replica, self.members[replica]) for replica in overdue}
        late = {replica: stuck for replica, stuck in late.items() if replica not in fact.waiting}
        if late:
            # the others may have waited for them until now
            self._running = {name: replace(running, heard=fact.at) for name, running in self._running.items()}
            self._lose_silent(late, limit)
        elif self.settings.peers and overdue:
            self._end("lost", Lost(f"no progress for {limit:.0f} s, waiting for {', '.join(overdue)}"))

    def _lose_silent(self, late: Mapping[str, tuple[str, ...]], limit: float) -> None:
        """Go on without the replicas that give no sign of life. late: which of their workers are to blame."""
        reason = f"no report for {limit:.0f} s"
        for replica, stuck in late.items():
            if stuck == (replica,):
                self._lose_worker(replica, reason)
            else:
                self._lose_group(replica, f"{reason}, waiting for {', '.join(stuck)}", stuck)
            if self.phase is Phase.ENDED:
                return
        self._go_on_without()

    # --- parts of all that ---

    def _log(self, event: Event) -> None:
        self._out.append(orders.Log(event))

    def _warn(self, message: str) -> None:
        self._log(Warned(message=message))

    def validate(self) -> None:
        """Assert every invariant that holds between two facts."""
        self.roster.validate()
        if self.rounds is None or self.phase in (Phase.ENDED, Phase.CALIBRATING):
            return
        rounds = self.rounds
        rounds.allocation.check()
        assert rounds.seconds.keys() == rounds.allocation.ranges.keys() == self.members.keys()
        assert all(worker in self.roster.alive for own in self.members.values() for worker in own)
        started = {round_.worker for round_ in self._due} | self._running.keys()
        assert rounds.running.keys() == started, f"{rounds.running.keys()} are under way, {started} were started"
        assert self._running.keys() <= self._joined.keys(), "a round of a replica that has not joined"
        assert not self._joined.keys() & self._joining.keys()
        assert self._joined.keys() | self._joining.keys() <= self.members.keys()
        under_way = sum(round_.samples for round_ in rounds.running.values())
        assert rounds.done + under_way + rounds.budget.left == rounds.presentations
        if self.phase is Phase.TRAINING:
            assert self._running or self._joining, "nobody goes on"
            assert bool(self._due) == bool(self._joining), f"{self._due} wait for {self._joining}"
            assert not self._held or self._joining, "a report waits for nobody"
