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
formed anew of who is left of it, and of workers that are in none; its round begins again. Workers that come fill up
such groups, or make new ones.

Where a run chooses its strategy, workers and links are measured before the first life, and again for each worker that
comes later. Where kernels are to be sharded the run ends before its first life, and one of that kind begins in its
place. If all then train by another rule, no round is given out any more; once those under way have ended the
state is kept, and the life that begins next goes on from it by that rule.

A run that may ask its cluster for workers looks after each round at what another one would bring, and whether one that
is there brings enough. One that does not leaves as if it was asked to end, and the cluster gets it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from daskcnn import errors
from daskcnn.events import WorkersAsked, WorkersCalibrated
from daskcnn.ps import UpdateRule
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.choosing import REMEDY, alike
from daskcnn.training.coordinator.coordinator import Phase
from daskcnn.training.coordinator.departures import Departures
from daskcnn.training.coordinator.facts import Fact
from daskcnn.training.coordinator.life import Life
from daskcnn.training.coordinator.records import Kept
from daskcnn.training.coordinator.roster import Refusal
from daskcnn.training.coordinator.scaling import WorkerScaling
from daskcnn.training.coordinator.settings import Settings
from daskcnn.training.coordinator.teams import too_few
from daskcnn.training.judging import JudgedPart

# Read with every fact: a member's look-up in its class takes ten times as long as a name of the module.
_TRAINING, _ENDED = Phase.TRAINING, Phase.ENDED


class Coordinator(Departures):
    """Decides a data-parallel run, as the module's text describes it."""

    def __init__(self, settings: Settings, kept: Kept | None = None, *, logs: bool = True) -> None:
        super().__init__(settings, kept, logs=logs)
        self._scaling = WorkerScaling(settings)

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
            facts.Saved: self._on_saved,
            facts.Tick: self._on_tick,
        }

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
                self._group_newcomer(fact.worker, fact.at)
            elif (rule := self._choosing.unmeasured(len(self.roster.alive))) is None:
                self._out.put(orders.ProbeServer((fact.worker,)))
            else:
                self._take_newcomer(fact.worker, rule, fact.at)

    def _take_newcomer(self, worker: str, rule: UpdateRule, now: float) -> None:
        """Give the worker samples; where all then train by another rule, with the life that begins next."""
        if not alike(rule, self.settings.rule):
            self._alive.closing, self._turn = True, rule
        self._alive.newcomers[worker] = now
        if self.phase is _TRAINING:
            self._alive.paused = self._is_short(now)
            self._alive.issue(now)
            self._let_in(now)

    def _group_newcomer(self, worker: str, now: float) -> None:
        """Let the worker fill up a group, or make one with others; else it waits."""
        if self.phase is _TRAINING:
            self._alive.paused = self._is_short(now)
            self._alive.issue(now)
        if self._present and self._present.teams.of(worker) is None:
            size = self.settings.replica_size
            self._out.warn(f"worker {worker} waits until a group lacks one, or {size} workers make another group")

    def _begin(self, now: float) -> None:
        if not self.life and (problem := too_few(self.settings, len(self.roster.alive))) is not None:
            self._end("unusable", problem)
        elif (rule := self._choosing.unmeasured(len(self.roster.alive))) is None:
            self.phase = Phase.MEASURING
            self._out.put(orders.ProbeServer(tuple(self.roster.alive)))
        else:
            self._turn = rule
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
        chosen = self._choosing.decide(fact, self.roster, begins=not (late or self.life or self.kept.step))
        self._out.log(chosen.event)
        if chosen.turn is not None:
            self._end("turned", None, chosen.turn)
            return
        for worker, reason in chosen.left_out.items():
            self._leave_out([worker], reason, REMEDY, fact.at)
        if self.settings.asks and chosen.left_out:
            self._give_back(chosen.left_out, fact.at)
        if not late:
            self._turn = chosen.rule
            self._begin_life(fact.at)
        elif not chosen.left_out:
            self._take_newcomer(fact.workers[0], chosen.rule, fact.at)

    # --- workers are asked for, and given back ---

    def _scale(self, now: float) -> None:
        """Ask for workers that are worth having, or let one go that is not."""
        life, alive = self._alive, self.roster.alive
        if not self.settings.asks or self.phase is not _TRAINING or self._done or self.roster.calibrating:
            return
        found = self._scaling.decide(
            alive,
            now,
            barrier=self.settings.rule.barrier,
            step=self._records.growth.samples if self.settings.shares_steps else None,
            left=life.rounds.presentations - life.rounds.done,
            stays={self._host},
        )
        self.roster.most = self._scaling.limit
        if found is None:
            return
        if found.leaver is None:
            self._out.log(WorkersAsked(workers=len(alive), wanted=found.wanted, gain=found.gain))
            self._out.put(orders.AskWorkers(found.wanted))
        else:
            self._given_back.add(found.leaver)
            self._take_leave(found.leaver, "the run is about as fast without it", now, recalled=False)

    def _give_back(self, workers: Iterable[str], now: float) -> None:
        """Let the cluster have workers that were left out, as far as the job's least allows."""
        spared = self._choosing.spared
        self._scaling.stop_at(len(self.roster.alive), now)
        self.roster.most = self._scaling.limit
        for worker in workers:
            if len(self.roster.alive) + len(spared) > sum(self.settings.least.values()):
                del spared[worker]
                self._out.put(orders.LetGo(worker))

    # --- a life ---

    def _begin_life(self, now: float) -> None:
        """Start from the state kept last, with the workers that are there."""
        if self._is_short(now):
            self._await_workers()
            return
        self._take_turn()
        self.life = max(self.life, self.kept.life) + 1
        self._records.begin_life(now)
        self._present = Life(self.life, self.settings, self.roster, self._records, self._out, logs=self._logs)
        if self.settings.peers:
            self._begin_training(now)
        else:
            self.phase = Phase.STARTING
            moved = self._moved_from is not None or self._moving is not None or self._anew
            self._out.put(orders.StartServer(self.life, moved))

    def _take_turn(self) -> None:
        """Train by the rule that was chosen for the life that begins now."""
        if self._turn is not None and self._turn != self.settings.rule:
            self.settings = self._records.settings = replace(self.settings, rule=self._turn)
            self._out.put(orders.UseRule(self._turn))
        self._turn = None

    def _on_server_ready(self, fact: facts.ServerReady) -> None:
        if fact.life != self.life or self.phase is not Phase.STARTING:
            return
        if self._moved_from is not None:
            self._out.warn(
                f"the parameter server's worker is lost; a new server starts on {fact.host} from the checkpoint at "
                f"epoch {self.kept.epoch:.2f}, {self._moved_from} merges are done again"
            )
        elif self._moving is not None:
            self._out.warn(f"the parameter server moves to {fact.host}, as its worker leaves: {self._moving}")
        self._moved_from, self._moving, self._host = None, None, fact.host
        self._begin_training(fact.at)

    def _begin_training(self, now: float) -> None:
        self.phase = Phase.TRAINING
        self._alive.paused = self._is_short(now)
        self._alive.issue(now)
        self._go_on_from_reports(now)

    def _on_server_gone(self, fact: facts.ServerGone) -> None:
        if fact.life != self.life or self.settings.peers:
            return
        if self.phase is Phase.STOPPING:  # the state kept last stands
            self._end_stopped()
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
        self._let_go()
        if self.phase is not _ENDED:
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
            if life.awaits(fact):
                self._scaling.add(fact.report, life.rounds.workers)
            life.round_done(fact, fact.at)
            if whole:
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
        elif self._alive.over and self._alive.closing and not self._done:
            self._keep_for_the_next()
        elif self._alive.over:
            self._finish()

    @property
    def _done(self) -> bool:
        """True if no round is to come: all presentations are made, or the run stops early."""
        return self._alive.rounds.ended or self.evaluations.stopping

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
            self.phase = Phase.JUDGING
            lo = self.settings.samples
            self._out.put(orders.Judge(JudgedPart(lo, lo + self.settings.validation)))

    def _on_judged(self, fact: facts.Judged) -> None:
        if self.phase is Phase.JUDGING:
            self.phase = Phase.CLOSING
            self._records.save(fact.score, self._alive.rounds, self.life)

    def _stop(self) -> None:
        if self.phase in (Phase.CALIBRATING, Phase.MEASURING, Phase.STARTING):
            self._end_stopped()
        elif self.settings.peers:
            self._rescue()
        else:
            self._keep_and_stop()

    def validate(self) -> None:
        """Assert every invariant that holds between two facts."""
        self.roster.validate()
        assert not any(self.roster.knows(worker) for worker in self.bench.waiting), "it has a place"
        if self._present and self.phase not in (Phase.ENDED, Phase.CALIBRATING):
            self._present.validate(training=self.phase is _TRAINING)
