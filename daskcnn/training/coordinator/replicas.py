"""The coordinator of a data-parallel run: who joins, trains, judges and leaves, when to save, when it ends.

Theory of operation. A run goes through *lives*, one for each parameter server. A life begins from the state kept last:
`Rounds` says which replica trains on which samples, replicas join, and rounds are given out until all presentations are
made. `Life` decides that while all goes well. The coordinator decides how lives begin and end, and how a run goes on
after losses.

Replicas. A replica is a worker, or a group of workers with a name of its own. A worker that is lost takes its replica
with it; the replica's samples go to the others.

Silence. A replica may take `PATIENCE` times what was expected, and the stall timeout on top. Then the coordinator asks
which replicas wait for others, and gives up those that do not.

Divergence. A loss or a push that is not finite, or a center whose losses are far above those of guessing, takes the
run back to the state that was saved last, once, with a third of the learning rate. The next loss that is not finite
ends it.

Without a server (`Settings.peers`) replicas meet each other. When one is lost the round under way is given up, and a
new life begins from the last center that one of the others has.

A worker that becomes ready in mid-run is calibrated, and takes its share of samples at the next boundary: at once under
an asynchronous rule, between two rounds behind a barrier. Groups take new workers when a life begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from daskcnn import errors
from daskcnn.errors import Lost, UserError
from daskcnn.events import WorkerLost, WorkersCalibrated
from daskcnn.partition.rounds import Rounds
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.choosing import REMEDY, Choosing
from daskcnn.training.coordinator.coordinator import Coordinating, Phase
from daskcnn.training.coordinator.evaluations import Evaluations
from daskcnn.training.coordinator.facts import Fact
from daskcnn.training.coordinator.life import Life, too_few
from daskcnn.training.coordinator.records import Kept, Records
from daskcnn.training.coordinator.roster import Refusal
from daskcnn.training.coordinator.settings import Settings
from daskcnn.training.judging import JudgedPart

# Read with every fact: a member's look-up in its class takes ten times as long as a name of the module.
_TRAINING, _ENDED = Phase.TRAINING, Phase.ENDED


class Coordinator(Coordinating):
    """Decides a data-parallel run, as the module's text describes it.

    kept: the state to go on from. logs: give `Log` orders for rounds; a large simulation does without.
    """

    def __init__(self, settings: Settings, kept: Kept | None = None, *, logs: bool = True) -> None:
        super().__init__(settings, "start it again; it is taken when it is there")
        self.settings, self._logs = settings, logs
        self._records = Records(settings, kept or Kept(), self._out)
        self._present: Life | None = None  # the life of that number
        self._moved_from: int | None = None  # merges that the lost server had
        self._choosing, self._anew = Choosing(settings), False  # True once all that were chosen were lost

    def _own_handlers(self) -> dict[type[Fact], Callable[[Any], None]]:
        return {
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
            facts.ServerProbed: self._on_server_probed,
            facts.Judged: self._on_judged,
            facts.Saved: self._on_saved,
            facts.Tick: self._on_tick,
        }

    @property
    def rounds(self) -> Rounds | None:
        """The rounds of the present life; None before the first."""
        return self._present.rounds if self._present else None

    @property
    def kept(self) -> Kept:
        """The state kept last."""
        return self._records.kept

    @property
    def evaluations(self) -> Evaluations:
        """The evaluations of the center in the present life."""
        return self._records.evaluations

    @property
    def _alive(self) -> Life:
        """The present life, once there is one."""
        assert self._present is not None, "begun"
        return self._present

    # --- workers come ---

    def _closed(self) -> Refusal | None:
        return ("the run is about to end", "") if self.phase in (Phase.JUDGING, Phase.STOPPING, Phase.CLOSING) else None

    def _on_calibrated(self, fact: facts.Calibrated) -> None:
        late = self.phase is not Phase.CALIBRATING and fact.worker in self.roster.calibrating
        super()._on_calibrated(fact)
        if late:
            self._out.log(WorkersCalibrated(workers=[fact.row]))
            if self.phase is Phase.MEASURING:
                self._begin(fact.at)
            elif self.settings.replica_size > 1:
                self._out.warn(f"worker {fact.worker} waits: groups are formed at a run's start; stop it and resume it")
            elif self.settings.chooses_workers:
                self._out.put(orders.ProbeServer((fact.worker,)))
            else:
                self._take_newcomer(fact.worker, fact.at)

    def _take_newcomer(self, worker: str, now: float) -> None:
        self._alive.newcomers.append(worker)
        if self.phase is _TRAINING:
            self._alive.issue(now)

    def _begin(self, now: float) -> None:
        if (problem := too_few(self.settings, len(self.roster.alive))) is not None:
            self._end("unusable", problem)
        elif self.settings.chooses_workers and len(self.roster.alive) > 1:
            self.phase = Phase.MEASURING
            self._out.put(orders.ProbeServer(tuple(self.roster.alive)))
        else:
            self._begin_life(now)

    # --- workers are chosen ---

    def _on_server_probed(self, fact: facts.ServerProbed) -> None:
        """Leave out the workers that cost a step more than they bring: all at the start, or one that came later."""
        late = self.phase is not Phase.MEASURING
        there, life = tuple(self.roster.alive), self._present
        if late and (life is None or fact.workers[0] not in there or life.teams.of(fact.workers[0])):
            return  # it is gone, or a life has begun with it meanwhile, or is about to
        if not late and fact.workers != there:
            return  # they are asked again
        chosen, left_out = self._choosing.decide(fact, self.roster)
        self._out.log(chosen)
        for worker, reason in left_out.items():
            self._leave_out([worker], reason, REMEDY, fact.at)
        if not late:
            self._begin_life(fact.at)
        elif not left_out:
            self._take_newcomer(fact.workers[0], fact.at)

    # --- a life ---

    def _begin_life(self, now: float) -> None:
        """Start from the state kept last, with the workers that are there."""
        size, there = self.settings.replica_size, len(self.roster.alive)
        if there < size:
            self._end("lost", Lost(f"{there} workers are left, and train.replica_size = {size}"))
            return
        self.life = max(self.life, self.kept.life) + 1
        self._records.begin_life(now)
        self._present = Life(self.life, self.settings, self.roster, self._records, self._out, logs=self._logs)
        if self.settings.peers:
            self._begin_training(now)
        else:
            self.phase = Phase.STARTING
            self._out.put(orders.StartServer(self.life, self._moved_from is not None or self._anew))

    def _on_server_ready(self, fact: facts.ServerReady) -> None:
        if fact.life != self.life or self.phase is not Phase.STARTING:
            return
        if self._moved_from is not None:
            self._out.warn(
                f"the parameter server's worker is lost; a new server starts on {fact.host} from the checkpoint at "
                f"epoch {self.kept.epoch:.2f}, {self._moved_from} merges are done again"
            )
            self._moved_from = None
        self._begin_training(fact.at)

    def _begin_training(self, now: float) -> None:
        self.phase = Phase.TRAINING
        self._alive.issue(now)
        if self._alive.over:
            self._finish()

    def _on_server_gone(self, fact: facts.ServerGone) -> None:
        if fact.life != self.life or self.settings.peers:
            return
        if self.phase is Phase.STOPPING:  # the state kept last stands
            self._end_interrupted()
        elif self.phase is not Phase.CALIBRATING:
            self._moved_from = self._records.version - self.kept.step
            self._restart(fact.at)

    def _on_out_of_step(self, fact: facts.OutOfStep) -> None:
        if self._is_training(fact.life):
            self._out.warn(f"{fact.message}: back to the checkpoint at epoch {self.kept.epoch:.2f}")
            self._restart(fact.at)

    def _restart(self, now: float) -> None:
        """Begin a new life from the state kept last."""
        self._out.drop(orders.StartRound)  # a shell starts rounds behind all other orders
        self._out.put(orders.CancelAll())
        self._begin_life(now)

    # --- reports of replicas ---

    def _is_training(self, life: int) -> bool:
        """Return True if rounds are given out in this life."""
        return self.phase is _TRAINING and life == self.life

    def _on_joined(self, fact: facts.Joined) -> None:
        if self._is_training(fact.life):
            sessions = self._alive.sessions
            if sessions.has_joined(fact.replica, fact.session) and not sessions.joining:
                self._alive.all_joined(fact.at)
            self._go_on_from_reports(fact.at)

    def _on_progress(self, fact: facts.Progress) -> None:
        if self._is_training(fact.life):
            self._alive.sessions.heard(fact.replica, fact.session, fact.at)

    def _on_round_done(self, fact: facts.RoundDone) -> None:
        life = self._present
        if self.phase is _TRAINING and life is not None and fact.life == life.number:
            life.round_done(fact, fact.at)
            self._go_on_from_reports(fact.at)

    def _on_round_failed(self, fact: facts.RoundFailed) -> None:
        if self._present and fact.life == self.life and fact.replica in self._present.sessions.running:
            if not self.settings.peers:
                self._out.put(orders.CountServer())  # the push that was refused is to be on record
            if isinstance(fact.error, errors.Diverged):
                self._diverged(fact.error, fact.at)
            else:
                self._end("failed", fact.error)

    def _go_on_from_reports(self, now: float) -> None:
        """Go on after reports: go back if the center is ruined, finish if nothing is left to do."""
        if self._records.ruined is not None:
            self._diverged(self._records.ruined, now)
        elif self._alive.over:
            self._finish()

    def _diverged(self, error: errors.Diverged, now: float) -> None:
        """Go back to the state kept last, once; then end."""
        divergence = self._records.divergence
        if self.phase is _TRAINING and divergence.goes_back():
            self._records.restore()
            self._out.warn(divergence.warning(error, f"the state of epoch {self.kept.epoch:.2f}"))
            self._restart(now)
        else:
            self._end("diverged", divergence.last(error))

    def _on_saved(self, fact: facts.Saved) -> None:
        if not self._records.saving:
            return
        self._records.saved(fact.step)
        if self.phase is Phase.STOPPING:
            self._end_interrupted()
        elif self.phase is Phase.CLOSING and not self._records.saving:
            self._close()

    # --- the end ---

    def _finish(self) -> None:
        """Judge the last center, keep it, and end: all presentations are made, or the run stops early."""
        if self._records.saving:
            self.phase = Phase.CLOSING
        else:
            self._close()

    def _close(self) -> None:
        if self.kept.judged and self.kept.epoch >= self._records.epoch(self._alive.rounds):
            self._end("done", None)
        else:
            self.phase = Phase.JUDGING
            lo = self.settings.samples
            self._out.put(orders.Judge(JudgedPart(lo, lo + self.settings.validation)))

    def _on_judged(self, fact: facts.Judged) -> None:
        if self.phase is Phase.JUDGING:
            self.phase = Phase.CLOSING
            self._records.save(fact.score, self._alive.rounds, self.life)

    def _stop(self) -> None:
        if self.phase in (Phase.CALIBRATING, Phase.MEASURING, Phase.STARTING):
            self._end_interrupted()
        elif self.settings.peers:
            self._rescue()
        else:
            self._keep_and_stop()

    def _keep_and_stop(self) -> None:
        """Keep the state as it is, whatever else is being kept, and end."""
        self.phase = Phase.STOPPING
        self._records.saving.clear()
        self._records.save(None, self._alive.rounds, self.life, judged=False)

    def _end_interrupted(self) -> None:
        self._end("interrupted", self._interrupted)

    def _give_up(self, error: UserError) -> None:
        self._end("lost", error)

    # --- workers go ---

    def _on_worker_gone(self, fact: facts.WorkerGone) -> None:
        self._leave_out_lost(fact)
        self._choosing.recall(fact.workers, self.roster, self._out, fact.at)
        for worker in fact.workers:
            if worker in self.roster.alive and self._forming:
                self._drop(worker, fact.reason)
            elif worker in self.roster.alive:
                self._lose_worker(worker, fact.reason)
            if self.phase is _ENDED:
                return
        self._go_on_without(fact.at)

    @property
    def _forming(self) -> bool:
        """True if groups are made that have no samples yet: without a worker they are formed anew."""
        return self.phase is Phase.STARTING and self.settings.replica_size > 1

    def _lose_worker(self, worker: str, reason: str) -> None:
        """Go on without the worker and its replica."""
        life = self._present
        replica = life.teams.of(worker) if life else None
        if life is None or replica is None:
            self._drop(worker, reason)
        elif replica == worker:
            self._drop(worker, reason, life.samples_of(worker))
            self._lose_replica(replica)
        else:
            self._lose_group(replica, f"{worker}: {reason}", (worker,))

    def _lose_group(self, replica: str, reason: str, workers: Iterable[str]) -> None:
        """Go on without the group, and without these of its workers at all."""
        for worker in workers:
            self._drop(worker, reason)
        if self.phase is not _ENDED:
            self._out.log(WorkerLost(worker=replica, reason=reason, samples_moved=self._alive.samples_of(replica)))
            self._lose_replica(replica, f"{replica} ({reason}): it was the last group of the run")

    def _drop(self, worker: str, reason: str, samples: int = 0) -> None:
        if self._present and worker in self._present.newcomers:
            self._present.newcomers.remove(worker)
        super()._drop(worker, reason, samples)

    def _lost_last(self, error: Lost) -> None:
        """Begin anew with workers that were left out, from the state kept last; without any the run ends."""
        if self.settings.chooses_workers and self.roster.calibrating:
            self._out.put(orders.CancelAll())
            self._present, self._anew, self.phase = None, True, Phase.CALIBRATING
        else:
            self._give_up(error)

    def _lose_replica(self, replica: str, last: str = "") -> None:
        """Give the replica's samples to the others."""
        if self.phase in (_ENDED, Phase.CALIBRATING):
            return
        self._alive.lose(replica)
        if self._alive.teams.members:
            self._alive.give_away(replica)
        else:
            self._end("lost", Lost(last or f"{replica}: it was the last of the run"))

    def _go_on_without(self, now: float) -> None:
        """Go on after a loss: peers look for the last center; else rounds that are due now start."""
        if self._forming:
            self._restart(now)
        elif self.phase is Phase.MEASURING:
            self._begin(now)
        elif self.phase in (Phase.TRAINING, Phase.RESCUING) and self.settings.peers:
            self._rescue()
        elif self.phase is _TRAINING:
            self._alive.go_on_without(now)
            self._go_on_from_reports(now)

    # --- peers without a server ---

    def _rescue(self) -> None:
        """Give up the round under way, and look for the last center that a worker has."""
        self.phase = Phase.RESCUING
        self._out.put(orders.CancelAll())
        self._out.put(orders.Rescue())

    def _on_rescued(self, fact: facts.Rescued) -> None:
        if self.phase is not Phase.RESCUING:
            return
        if fact.version is not None:
            self._records.rescued(fact.version, self._alive.rounds, self.life)
        if self._interrupted is None:
            if fact.version is not None:
                count = len(self.roster.alive)
                self._out.warn(f"the round is begun again from version {fact.version}, by {count} workers")
            self._begin_life(fact.at)
        elif fact.version is None:
            self._end_interrupted()
        else:
            self._keep_and_stop()

    # --- silence ---

    def _on_tick(self, fact: facts.Tick) -> None:
        now, limit = fact.at, self.settings.stall_timeout
        self._leave_out_overdue(now)
        if self.phase is not _TRAINING:
            return
        sessions, members = self._alive.sessions, self._alive.teams.members
        if late := [replica for replica, since in sessions.joining.items() if now - since > limit]:
            self._lose_silent({replica: members[replica] for replica in late}, limit, now)
        elif not sessions.asked and (overdue := sessions.silent(now, sessions.limit(limit))):
            sessions.asked = True
            self._out.put(orders.AskWaiting(tuple(overdue)))

    def _on_waits(self, fact: facts.Waits) -> None:
        if self.phase is not _TRAINING or not self._alive.sessions.asked:
            return
        sessions, members = self._alive.sessions, self._alive.teams.members
        sessions.asked, limit = False, sessions.limit(self.settings.stall_timeout)
        overdue = sessions.silent(fact.at, limit)
        late = {name: fact.stuck.get(name, members[name]) for name in overdue if name not in fact.waiting}
        if late:
            for running in sessions.running.values():  # the others may have waited for them until now
                running.heard = fact.at
            self._lose_silent(late, limit, fact.at)
        elif self.settings.peers and overdue:
            self._end("lost", Lost(f"no progress for {limit:.0f} s, waiting for {', '.join(overdue)}"))

    def _lose_silent(self, late: Mapping[str, tuple[str, ...]], limit: float, now: float) -> None:
        """Go on without the replicas that give no sign of life. late: those of their workers that are to blame."""
        reason = f"no report for {limit:.0f} s"
        self._choosing.recall([name for stuck in late.values() for name in stuck], self.roster, self._out, now)
        for replica, stuck in late.items():
            if stuck == (replica,):
                self._lose_worker(replica, reason)
            else:
                self._lose_group(replica, f"{reason}, waiting for {', '.join(stuck)}", stuck)
            if self.phase is _ENDED:
                return
        self._go_on_without(now)

    def validate(self) -> None:
        """Assert every invariant that holds between two facts."""
        self.roster.validate()
        if self._present and self.phase not in (Phase.ENDED, Phase.CALIBRATING):
            self._present.validate(training=self.phase is _TRAINING)
