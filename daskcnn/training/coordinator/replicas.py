"""The coordinator of a data-parallel run: who joins, trains, judges and leaves, when to save, when it ends.

Theory of operation. A run goes through *lives*, one for each parameter server. A life begins from the state kept last:
`Rounds` says which replica trains on which samples, replicas join, and rounds are given out until all presentations are
made. `Life` decides that while all goes well, the coordinator how lives begin and end. `Recovering` decides how a run
goes on after losses, `Departures` how workers leave in good order.

Divergence. A loss or a push that is not finite, or a center whose losses are far above those of guessing, takes the
run back to the state that was saved last, once, with a third of the learning rate. The next loss that is not finite
ends it.

A worker that becomes ready in mid-run is calibrated, and takes its share of samples at the next boundary: at once under
an asynchronous rule, between two rounds behind a barrier, which may end early for it. A group that loses a worker is
formed anew of who is left of it, and of workers that are in none; its round begins again, unless the worker leaves in
good order. Workers that come fill up such groups, or make new ones.

Where a run chooses its strategy, workers and links are measured before the first life. `Changes` decides how it goes
on otherwise, which workers it asks its cluster for, and which it gives back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from daskcnn import errors
from daskcnn.events import WorkersCalibrated
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.changes import Changes
from daskcnn.training.coordinator.choosing import Choice
from daskcnn.training.coordinator.coordinator import CUT, Phase
from daskcnn.training.coordinator.facts import Fact
from daskcnn.training.coordinator.life import Life
from daskcnn.training.coordinator.roster import Refusal
from daskcnn.training.coordinator.teams import too_few
from daskcnn.training.judging import JudgedPart

# Read with every fact: a member's look-up in its class takes ten times as long as a name of the module.
_TRAINING, _ENDED = Phase.TRAINING, Phase.ENDED


class Coordinator(Changes):
    """Decides a data-parallel run, as the module's text describes it."""

    def _own_handlers(self) -> dict[type[Fact], Callable[[Any], None]]:
        return {
            facts.WorkerGone: self._on_worker_gone,
            facts.ServerLeaving: self._on_server_leaving,
            facts.RoundDropped: self._on_round_dropped,
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
            facts.NotJudged: self._on_not_judged,
            facts.Saved: self._on_saved,
            facts.NotKept: self._on_not_kept,
            facts.Tick: self._on_tick,
        }

    # --- workers come ---

    def _closed(self) -> Refusal | None:
        ends = self._interrupted is not None or self.phase in (Phase.JUDGING, Phase.STOPPING, Phase.CLOSING)
        return ("the run is about to end", "") if ends else None

    def _on_calibrated(self, fact: facts.Calibrated) -> None:
        late = self.phase is not Phase.CALIBRATING and fact.worker in self.roster.calibrating
        super()._on_calibrated(fact)
        if late:
            self._out.log(WorkersCalibrated(workers=[fact.row]))
            if self.phase is Phase.MEASURING:
                self._begin(fact.at)
            elif self.settings.replica_size > 1:
                self._group_newcomer(fact.worker, fact.at)
            elif (rule := self._choosing.unmeasured(len(self.roster.alive))) is None:
                self._out.put(orders.ProbeServer((fact.worker,)))
            else:
                self._take_newcomer(fact.worker, Choice(rule), fact.at)

    def _group_newcomer(self, worker: str, now: float) -> None:
        """Let the worker fill up a group, or make one with others; else it waits."""
        if self.phase is _TRAINING:
            self._alive.paused = self._is_short(now)
            self._alive.issue(now)
        life, size = self._present, self.settings.replica_size
        if life is None or life.teams.of(worker) is not None:
            return
        if self.phase is _TRAINING and life.teams.lacks_free:
            life.newcomers[worker] = now
            self._let_in(now)
        else:
            self._out.warn(f"worker {worker} waits until a group lacks one, or {size} workers make another group")

    def _begin(self, now: float) -> None:
        if not self.life and (problem := too_few(self.settings, len(self.roster.alive))) is not None:
            self._end("unusable", problem)
        elif (rule := self._choosing.unmeasured(len(self.roster.alive))) is None:
            self.phase = Phase.MEASURING
            self._out.put(orders.ProbeServer(tuple(self.roster.alive)))
        else:
            self._turn = Choice(rule)
            self._begin_life(now)

    # --- a life ---

    def _begin_life(self, now: float) -> None:
        """Start from the state kept last, with the workers that are there."""
        if self._is_short(now):
            self._await_workers()
            return
        self._take_turn(now)
        self.life = max(self.life, self.kept.life) + 1
        self._records.begin_life(now)
        self._present = Life(self.life, self.settings, self.roster, self._records, self._out, logs=self._logs)
        self._records.begun()
        if self.settings.peers:
            self._begin_training(now)
        else:
            self.phase = Phase.STARTING
            moved = self._moved_from is not None or self._moving is not None or self._anew
            self._out.put(orders.StartServer(self.life, moved))

    def _on_server_ready(self, fact: facts.ServerReady) -> None:
        if fact.life != self.life or self.phase is not Phase.STARTING:
            return
        if self._moved_from is not None:
            self._out.warn(
                f"the parameter server's worker is lost; a new server starts on {fact.host} from the checkpoint at "
                f"epoch {self.kept.epoch:.2f}, {self._moved_from} merges are done again"
            )
        elif self._moving is not None:
            self._out.warn(f"the parameter server moves to {fact.host}, as {self._moving}")
        self._moved_from, self._moving, self._host = None, None, fact.host
        self._begin_training(fact.at)

    def _begin_training(self, now: float) -> None:
        self.phase = Phase.TRAINING
        self._alive.paused = self._is_short(now)
        self._alive.issue(now)
        self._measure_again(now)
        self._go_on_from_reports(now)

    def _on_server_gone(self, fact: facts.ServerGone) -> None:
        if fact.life != self.life or self.settings.peers:
            return
        if self._interrupted is not None or self.phase is Phase.STOPPING:  # the state kept last stands
            self._end_stopped()
        elif self.phase is not Phase.CALIBRATING:
            self._note_moved()
            self._records.saving.clear()
            self._restart(fact.at)
        elif self._records.saving:  # it was lost with the last of the workers that trained
            self._note_moved()
            self._is_not_kept(fact.at)

    def _note_moved(self) -> None:
        """Note the merges that are done again. None are, where what was kept is newer than what was last told."""
        self._moved_from = max(0, self._records.version - self.kept.step)

    def _on_out_of_step(self, fact: facts.OutOfStep) -> None:
        if not self._is_training(fact.life):
            return
        peers = self.settings.peers
        if error := self._back_too_often(fact.message, self._records.version if peers else self.kept.step):
            self._stop_short(error)
        elif peers:
            self._out.warn(f"{fact.message}: the round is given up")
            self._rescue()
        else:
            self._go_back_to_kept(fact.message, fact.at)

    def _go_back_to_kept(self, why: str, now: float) -> None:
        self._out.warn(f"{why}: back to the checkpoint at epoch {self.kept.epoch:.2f}")
        self._restart(now)

    def _on_cut(self, fact: facts.ConnectionCut) -> None:
        """Begin the rounds under way again: peers from the last center, others from the state that was kept."""
        super()._on_cut(fact)
        if self.phase is not _TRAINING:
            return
        if self.settings.peers:
            self._rescue()
        else:
            self._go_back_to_kept(CUT, fact.at)

    def _restart(self, now: float) -> None:
        """Begin a new life from the state kept last, unless the run is to end: then that state stands."""
        if self._interrupted is not None:
            self._end_stopped()
            return
        self._out.drop(orders.StartRound)  # a shell starts rounds behind all other orders
        self._out.put(orders.CancelAll())
        self._let_go()
        if self.phase not in (_ENDED, Phase.CALIBRATING):  # the last one has left, and others are awaited
            self._begin_life(now)

    # --- reports of replicas ---

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
        if self.phase is not _TRAINING or life is None or fact.life != life.number:
            return
        if not self._reported_early(fact):
            whole = not self.settings.rule.barrier or life.rounds.running.keys() == {fact.replica}
            if awaited := life.awaits(fact):
                self._scaling.add(fact.report, life.rounds.workers)
            self._reconsider(fact)
            life.round_done(fact, fact.at)
            if whole and awaited:
                self._scale(fact.at)
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
        elif self._alive.over and self._interrupted is not None:
            self._keep_and_stop()
        elif self._alive.over and self._alive.closing and not self._done:
            self._keep_for_the_next()
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
            self._end_stopped()
        elif self.phase is Phase.CLOSING and not self._records.saving:
            self._close()
        elif self.phase is Phase.MOVING and not self._records.saving:
            self._restart(fact.at)
        elif self.phase is Phase.CALIBRATING:
            self._begin_if_calibrated(fact.at)

    # --- the end ---

    def _finish(self) -> None:
        """Judge the last center, keep it, and end: all presentations are made, or the run stops early."""
        if self._records.saving:
            self.phase = Phase.CLOSING
        else:
            self._close()

    def _close(self) -> None:
        if self._records.up_to_date(self._alive.rounds):
            self._end("done", None)
        else:
            self._judge()

    def _judge(self) -> None:
        self.phase = Phase.JUDGING
        lo = self.settings.samples
        self._out.put(orders.Judge(JudgedPart(lo, lo + self.settings.validation)))

    def _on_not_judged(self, fact: facts.NotJudged) -> None:
        """Judge with the workers that are left, unless the last of them was lost."""
        if self.phase is Phase.JUDGING:
            self._judge()

    def _on_judged(self, fact: facts.Judged) -> None:
        if self.phase is Phase.JUDGING:
            self.phase = Phase.CLOSING
            self._records.save(fact.score, self._alive.rounds, self.life)

    def _stop(self) -> None:
        if self.phase in (Phase.CALIBRATING, Phase.MEASURING, Phase.STARTING):
            self._end_stopped()
        elif self.phase is _TRAINING and self._alive.sessions.running:
            self._end_under_way()
        else:
            self._stop_at_once()

    def validate(self) -> None:
        """Assert every invariant that holds between two facts."""
        self.roster.validate()
        assert not any(self.roster.knows(worker) for worker in self.bench.waiting), "it has a place"
        assert self._leaving.keys() <= self.roster.alive.keys()
        if self._present and self.phase is _TRAINING and not self.settings.peers:
            teams, running = self._present.teams, self._present.sessions.running
            assert all(teams.of(worker) in running for worker in self._leaving), "it leaves, and nothing holds it up"
        if self._present and self.phase not in (Phase.ENDED, Phase.CALIBRATING):
            self._present.validate(training=self.phase is _TRAINING)
