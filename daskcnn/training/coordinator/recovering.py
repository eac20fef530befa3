"""The part of a data-parallel run's coordinator that goes on after losses: of workers, of groups, of the last center.

Replicas. A replica is a worker, or a group of workers with a name of its own. A worker that is lost takes its replica
with it; the replica's samples go to the others.

Silence. A replica may take `PATIENCE` times what was expected, and the stall timeout on top. Then the coordinator asks
which replicas wait for others, and when the server heard of each. It gives up those that do not wait and were not heard
of for as long: what is expected is the time of computing, and exchanges may take longer.

Without a server (`Settings.peers`) replicas meet each other. When one is lost the round under way is given up, and a
new life begins from the last center that one of the others has.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from daskcnn.errors import Lost, UserError
from daskcnn.events import WorkerLeft, WorkerLost
from daskcnn.partition.rounds import Rounds
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.choosing import Choice, Choosing
from daskcnn.training.coordinator.coordinator import Coordinating, Phase
from daskcnn.training.coordinator.evaluations import Evaluations
from daskcnn.training.coordinator.life import Life
from daskcnn.training.coordinator.records import Kept, Records
from daskcnn.training.coordinator.settings import Settings

# Read with every fact: a member's look-up in its class takes ten times as long as a name of the module.
_TRAINING, _ENDED = Phase.TRAINING, Phase.ENDED


class Recovering(Coordinating):
    """Has the state of a data-parallel run, and decides how it goes on after losses.

    kept: the state to go on from. logs: give `Log` orders for rounds; a large simulation does without.
    """

    def __init__(self, settings: Settings, kept: Kept | None = None, *, logs: bool = True) -> None:
        super().__init__(settings, "start it again; it is taken when it is there")
        self.settings, self._logs = settings, logs
        self._records = Records(settings, kept or Kept(), self._out)
        self._present: Life | None = None  # the life of that number
        self._moved_from: int | None = None  # merges that the lost server had
        self._choosing, self._anew = Choosing(settings), False  # True once all that were chosen were lost
        self._lacks: Lost | None = None  # the end of a run that cannot go on, once it is kept
        self._turn: Choice | None = None  # of the life that begins next

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

    def _progress(self) -> int:
        return self.kept.step

    def _is_training(self, life: int) -> bool:
        """Return True if rounds are given out in this life."""
        return self.phase is _TRAINING and life == self.life

    @abstractmethod
    def _begin_life(self, now: float) -> None:
        """Start from the state kept last, with the workers that are there."""

    @abstractmethod
    def _restart(self, now: float) -> None:
        """Begin a new life from the state kept last."""

    @abstractmethod
    def _go_on_from_reports(self, now: float) -> None:
        """Go on after reports: go back if the center is ruined, finish if nothing is left to do."""

    def _keep_last(self) -> None:
        """Keep what was trained, as the last worker goes."""
        if not self._records.up_to_date(self._alive.rounds):
            self._records.save(None, self._alive.rounds, self.life, judged=False)

    def _keep_and_stop(self) -> None:
        """Keep the state as it is, whatever else is being kept, and end."""
        self.phase = Phase.STOPPING
        self._records.saving.clear()
        self._records.save(None, self._alive.rounds, self.life, judged=False)

    def _end_stopped(self) -> None:
        """End the run after a signal, or after too long a pause."""
        if self._interrupted is None and self._lacks is not None:
            self._end("lost", self._lacks)
        else:
            self._end("interrupted", self._interrupted)

    def _spared(self) -> Iterable[str]:
        return self._choosing.spared.kinds.values()

    def _stop_short(self, error: Lost) -> None:
        if self.phase is _TRAINING:
            self._lacks = error
            self._stop_at_once()
        else:
            self._give_up(error)

    def _stop_at_once(self) -> None:
        """Keep the center as it is, and end. Rounds under way are begun again by a resume."""
        if self.settings.peers:
            self._rescue()
        else:
            self._keep_and_stop()

    def _await_workers(self) -> None:
        """Go on from the state kept last once enough workers are there."""
        self._present, self._anew, self.phase = None, True, Phase.CALIBRATING

    def _begin_if_calibrated(self, now: float) -> None:
        """Begin the run, or go on, once the state is kept that is being kept: the next life begins from it."""
        if not self._records.saving:
            super()._begin_if_calibrated(now)

    def _is_not_kept(self, now: float) -> None:
        """Go on from the state that was kept before: those that are being kept are lost."""
        self._records.saving.clear()
        if self.kept is not self._records.good:  # a center that was rescued, and is lost now
            self._go_back()
        self._begin_if_calibrated(now)

    def _give_up(self, error: UserError) -> None:
        self._end("lost", error)

    # --- workers go ---

    def _on_worker_gone(self, fact: facts.WorkerGone) -> None:
        spared = [worker for worker in fact.workers if worker in self._choosing.spared.kinds]
        for worker in spared:
            self._choosing.spared.forget(worker)
        keeps = self.settings.peers and self.phase is Phase.CALIBRATING and self._records.saving
        known = all(self.roster.knows(worker) or worker in spared for worker in fact.workers)
        if keeps and not known:  # the last of those that trained had the center
            self._is_not_kept(fact.at)
        self._leave_out_lost(fact)
        self._choosing.spared.recall(fact.workers, self.roster, self._out, fact.at)
        lost, life = [worker for worker in fact.workers if worker in self.roster.alive], self._present
        idle = self.settings.peers and life is not None and all(life.teams.of(worker) is None for worker in lost)
        for worker in lost:
            if worker not in self.roster.alive:  # it was to leave, and went with its group
                continue
            if self._forming:
                self._drop(worker, fact.reason)
            else:
                self._lose_worker(worker, fact.reason)
            if self.phase is _ENDED:
                return
        if self.phase is Phase.CALIBRATING or (lost and not idle):
            self._go_on_without(fact.at)
        elif self.phase is _TRAINING:
            self._alive.paused = self._is_short(fact.at)

    @property
    def _forming(self) -> bool:
        """True if groups are made that have no samples yet: without a worker they are formed anew."""
        return self.phase is Phase.STARTING and self.settings.replica_size > 1

    def _lose_worker(self, worker: str, reason: str, done: int | None = None) -> None:
        """Go on without the worker and its replica. done: as for `_drop`."""
        life = self._present
        replica = life.teams.of(worker) if life else None
        if life is None or replica is None:
            self._drop(worker, reason, done=done)
        elif replica == worker:
            self._take_held(replica)
            self._drop(worker, reason, life.samples_of(worker), done)
            self._lose_replica(replica)
        else:
            self._lose_group(replica, {worker: reason}, done)

    def _lose_group(self, replica: str, workers: Mapping[str, str], done: int | None = None) -> None:
        """Go on without these workers. The group is formed anew of who is left, or of others that are free.

        workers: by name, the reasons. done: as for `_drop`.
        """
        life = self._alive
        self._take_held(replica)
        under_way = replica in life.rounds.running
        leavers = {name: self._leaving[name] for name in life.teams.members[replica] if name in self._leaving}
        for worker, reason in workers.items():
            self._drop(worker, reason, done=done)
        for worker in leavers.keys() - workers.keys():  # none of them goes into the new group
            self._drop(worker, leavers[worker], done=0)
        if self.phase in (_ENDED, Phase.CALIBRATING):
            return
        told = "; ".join(f"{worker}: {reason}" for worker, reason in workers.items())
        if self.phase is _TRAINING and life.reform(replica, self._now):
            names, again = ", ".join(life.teams.members[replica]), "; its round begins again" if under_way else ""
            self._out.warn(f"{replica} ({told}) is formed anew of {names}{again}")
        elif self.phase is not _TRAINING and (rest := life.teams.left(replica)):  # it has no round any more
            life.teams.add(replica, rest)
        else:
            gone: dict[str, Any] = {"worker": replica, "reason": told, "samples_moved": life.samples_of(replica)}
            self._out.log(WorkerLost(**gone) if done is None else WorkerLeft(**gone, samples_done=done))
            self._lose_replica(replica, f"{replica} ({told}): it was the last group of the run")

    def _take_held(self, replica: str) -> None:
        """Take the replica's report that was put off, before the replica is given up: its pushes are merged."""
        if self.phase is _TRAINING and (held := self._alive.sessions.take_held(replica)) is not None:
            self._alive.take(held, self._now)

    def _drop(self, worker: str, reason: str, samples: int = 0, done: int | None = None) -> None:
        if self._present and worker in self._present.newcomers:
            del self._present.newcomers[worker]
        super()._drop(worker, reason, samples, done)

    def _lost_last(self, error: Lost) -> None:
        """Begin anew after the last replica is lost; without any other worker the run ends.

        There may be workers that waited for the end of its round, that were left out, that measure themselves, or that
        come while the run pauses. What the server has is kept first.
        """
        if self.phase in (Phase.TRAINING, Phase.JUDGING) and not self.settings.peers:
            self._keep_last()
        self._call_up_last()
        others = self._least or self.roster.alive or self.roster.calibrating
        if not others or self._interrupted is not None or self.phase in (Phase.CLOSING, Phase.STOPPING):
            self._give_up(error)
            return
        self._out.put(orders.CancelAll())
        self._await_workers()
        self._begin_if_calibrated(self._now)

    def _lose_replica(self, replica: str, last: str = "") -> None:
        """Give the replica's samples to the others."""
        if self.phase in (_ENDED, Phase.CALIBRATING):
            return
        self._alive.lose(replica)
        if self._alive.teams.members:
            self._alive.give_away(replica)
        else:
            self._lost_last(Lost(last or f"{replica}: it was the last of the run"))

    def _go_on_without(self, now: float) -> None:
        """Go on after a loss: peers look for the last center; else rounds that are due now start."""
        if self._forming:
            self._restart(now)
        elif self.phase is Phase.MEASURING:
            self._begin(now)
        elif self.phase in (Phase.TRAINING, Phase.RESCUING) and self.settings.peers:
            self._rescue()
        elif self.phase is Phase.CALIBRATING:
            self._is_short(now)
        elif self.phase is _TRAINING:
            self._go_on_with_the_rest(now)

    def _go_on_with_the_rest(self, now: float) -> None:
        """Start the rounds that are due now, unless too few workers are left."""
        self._alive.paused = self._is_short(now)
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
        self._records.saving.clear()  # a worker was lost that had what was to be kept
        if fact.version is not None:
            self._records.rescued(fact.version, self._alive.rounds, self.life)
        if self._interrupted is None and self._lacks is None:
            if fact.version is None:
                self._go_back()
            elif self._is_short(fact.at):
                self._records.save(None, self._alive.rounds, self.life, judged=False)
            else:
                count = len(self.roster.alive)
                self._out.warn(f"the round is begun again from version {fact.version}, by {count} workers")
            self._begin_life(fact.at)
        elif fact.version is None:
            self._end_stopped()
        else:
            self._keep_and_stop()

    def _go_back(self) -> None:
        """Go back to the state that was saved last: the last center is lost."""
        last = self._records.epoch(self._present.rounds) if self._present else self.kept.epoch
        self._records.restore()
        if last > (epoch := self.kept.epoch):
            self._out.warn(f"no worker is left that has the last weights: back to the state of epoch {epoch:.2f}")

    def _on_not_kept(self, fact: facts.NotKept) -> None:
        """Look for the center with the workers that are left, where the one that was asked for it is lost."""
        if self.phase is Phase.CALIBRATING:
            self._is_not_kept(fact.at)
            return
        self._records.saving.clear()
        if self.phase in (Phase.CLOSING, Phase.JUDGING, Phase.MOVING, Phase.STOPPING):
            self._rescue()

    # --- silence ---

    def _on_tick(self, fact: facts.Tick) -> None:
        now, limit = fact.at, self.settings.stall_timeout
        self._tend_workers(now)
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
        sessions.heard_before(fact.heard, fact.at)
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
        self._choosing.spared.recall([name for stuck in late.values() for name in stuck], self.roster, self._out, now)
        for replica, stuck in late.items():
            if stuck == (replica,):
                self._lose_worker(replica, reason)
            else:
                self._lose_group(replica, dict.fromkeys(stuck, reason))
            if self.phase is _ENDED:
                return
        self._go_on_without(now)
