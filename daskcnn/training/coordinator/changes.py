"""The part of a data-parallel run's coordinator that chooses strategy and workers, and changes them as the run goes on.

Workers and links are measured before the first life, and again for each worker that comes later or was left out
(`Spared`). After each round of all, what is trained by is compared with what else there is, by what the rounds took
(`Choosing.reconsider`). If all are to train by another rule, or without some of the workers, no round is given out any
more. Once those under way have ended the state is kept, and the life that begins next goes on from it, with momentum,
learning rate and samples as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from daskcnn.events import WorkersAsked
from daskcnn.ps import UpdateRule
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.choosing import REMEDY, Choice, Rest, alike
from daskcnn.training.coordinator.coordinator import Phase
from daskcnn.training.coordinator.departures import Departures
from daskcnn.training.coordinator.records import Kept
from daskcnn.training.coordinator.scaling import WorkerScaling
from daskcnn.training.coordinator.settings import Settings
from daskcnn.training.strategy_change import WayToTrain

# Read with every fact: a member's look-up in its class takes ten times as long as a name of the module.
_TRAINING = Phase.TRAINING


class Changes(Departures):
    """Chooses strategy and workers of a data-parallel run, where the job lets it."""

    def __init__(self, settings: Settings, kept: Kept | None = None, *, logs: bool = True) -> None:
        super().__init__(settings, kept, logs=logs)
        self._scaling = WorkerScaling(settings)

    # --- at the start, and for workers that come ---

    def _leave_out(self, workers: Sequence[str], reason: str, remedy: str, now: float, *, lost: bool = False) -> None:
        again = [worker for worker in workers if worker in self.roster.calibrating]  # in vain
        for worker in again:
            self._choosing.spared.forget(worker)
        super()._leave_out(workers, reason, remedy, now, lost=lost)
        if again and self.phase is _TRAINING:
            self._alive.paused = self._is_short(now)

    def _on_server_probed(self, fact: facts.ServerProbed) -> None:
        """Leave out the workers that cost a step more than they bring: all at the start, or one that came later."""
        if self.phase is not Phase.MEASURING:
            self._judge_newcomer(fact)
        elif fact.workers == tuple(self.roster.alive):  # else they are asked again
            chosen = self._choosing.decide(fact, self.roster, begins=not (self.life or self.kept.step))
            assert chosen.event is not None, "compared"
            self._out.log(chosen.event)
            if chosen.turn is not None:
                self._end("turned", None, chosen.turn)
                return
            for worker, reason in chosen.left_out.items():
                self._spare(worker, reason, fact.at)
            self._turn = Choice(chosen.rule)
            self._begin_life(fact.at)

    def _judge_newcomer(self, fact: facts.ServerProbed) -> None:
        """Take the worker in that came, or was measured again, or leave it out."""
        worker, life = fact.workers[0], self._present
        if len(fact.workers) > 1 or worker not in self.roster.alive or life is None or life.teams.of(worker):
            return  # it is gone, a life has begun with it meanwhile or is about to, or the start's answer comes late
        again = worker in self._choosing.spared.again
        if again and (life.closing or self.phase is not _TRAINING):
            self._leave_out_again(worker)
            return
        chosen = self._choosing.judge(fact, self._way, self.roster, self._rest)
        if worker not in chosen.left_out:
            self._choosing.spared.forget(worker)
            self._take_newcomer(worker, chosen, fact.at)
        elif again:
            self._leave_out_again(worker)
        elif chosen.event is not None:
            self._out.log(chosen.event)
            self._spare(worker, chosen.left_out[worker], fact.at)
            if self.phase is _TRAINING:
                self._go_on_with_enough(fact.at)
                self._go_on_from_reports(fact.at)

    def _spare(self, worker: str, reason: str, now: float) -> None:
        self._choosing.spared.add(worker, self.roster.kind(worker))
        self._leave_out([worker], reason, REMEDY, now)
        if self.settings.asks:
            self._give_back([worker], now)

    def _leave_out_again(self, worker: str) -> None:
        """Leave a worker out as before: its new measurement changes nothing."""
        self._choosing.spared.add(worker, self.roster.kind(worker))
        self.roster.drop(worker)
        self._out.put(orders.Dismiss(worker, for_good=True))

    def _take_newcomer(self, worker: str, chosen: Choice, now: float) -> None:
        """Give the worker samples; where all then train in another way, with the life that begins next."""
        if not alike(chosen.rule, self._rule) or chosen.left_out:
            self._change_to(chosen)
        elif chosen.event is not None:
            self._out.log(chosen.event)
        self._alive.newcomers[worker] = now
        if self.phase is _TRAINING:
            self._go_on_with_enough(now)
            self._let_in(now)
            self._go_on_from_reports(now)  # where the run has paused, and all train in another way from now on

    def _go_on_with_enough(self, now: float) -> None:
        """Give out rounds, unless the run has fewer workers than its least; those that are left out count."""
        self._alive.paused = self._is_short(now)
        self._alive.issue(now)

    def _drop(self, worker: str, reason: str, samples: int = 0, done: int | None = None) -> None:
        if self._turn is not None and worker in self._turn.workers:  # not for one that comes back by this name
            self._turn = None
        super()._drop(worker, reason, samples, done)

    # --- between two rounds of all ---

    @property
    def _rule(self) -> UpdateRule:
        """The rule by which all are to train: that of the life that begins next, if it is known."""
        return self.settings.rule if (turn := self._next_turn) is None else turn.rule

    @property
    def _next_turn(self) -> Choice | None:
        """The way that was chosen for the life that begins next, if those that it was chosen for are there."""
        turn = self._turn
        return turn if turn is not None and turn.workers <= self.roster.alive.keys() else None

    @property
    def _way(self) -> WayToTrain:
        """The way in which all are to train."""
        life, out = self._alive, turn.left_out if (turn := self._next_turn) else {}
        return self._choosing.way(self._rule, {*life.teams.members, *life.newcomers} - out.keys())

    @property
    def _rest(self) -> Rest:
        return Rest(self._records.growth.samples, self._alive.rounds.budget.left)

    def _measure_again(self, now: float) -> None:
        """Measure those again, of the workers that were left out, whose turn it is."""
        if self._choosing.spared.kinds:
            seconds = self._choosing.seconds(self._way, self.roster, self._rest)
            self._choosing.spared.measure_again(seconds, self.roster, self._out, now)

    def _reconsider(self, fact: facts.RoundDone) -> None:
        """Compare strategies anew where this is the last report of a round of all."""
        life, choosing = self._alive, self._choosing
        if not choosing.compares or not life.awaits(fact):
            return
        choosing.take(fact.report, self._records.growth.samples)
        under_way = len(life.sessions.running) > 1 or life.sessions.joining
        if under_way or life.closing or life.newcomers or life.rounds.budget.spent:
            return
        if (change := choosing.reconsider(self._way, self.roster, self._rest)) is not None:
            self._change_to(change)
        else:
            self._measure_again(fact.at)

    def _change_to(self, chosen: Choice) -> None:
        """Give out no round any more; the life that begins next is as it was chosen."""
        before = self._turn.left_out if self._turn else {}
        self._alive.closing, self._turn = True, replace(chosen, left_out={**before, **chosen.left_out})

    def _take_turn(self, now: float) -> None:
        """Train in the way that was chosen for the life that begins now, if those that it was chosen for are there."""
        for worker in [name for name in self._choosing.spared.again if name in self.roster.alive]:
            self._leave_out_again(worker)
        turn, self._turn = self._next_turn, None
        if turn is None:
            return
        if turn.event is not None:
            self._out.log(turn.event)
        for worker, reason in turn.left_out.items():
            if worker in self.roster.alive:
                self._choosing.spared.add(worker, self.roster.kind(worker))
                self._drop(worker, f"left out, {reason}", self._alive.samples_of(worker), 0)
        if self.settings.asks and turn.left_out:
            self._give_back(turn.left_out, now)
        if turn.workers or turn.rule != self.settings.rule:
            self.settings = self._records.settings = replace(self.settings, rule=turn.rule)
            self._out.put(orders.UseRule(turn.rule))

    # --- workers are asked for, and given back ---

    def _scale(self, now: float) -> None:
        """Ask for workers that are worth having, or let one go that is not."""
        life, alive = self._alive, self.roster.alive
        if (
            not self.settings.asks
            or self.phase is not _TRAINING
            or self._done
            or life.closing
            or self.roster.calibrating
        ):
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
            self._take_leave(found.leaver, "the run is about as fast without it", now)

    def _give_back(self, workers: Iterable[str], now: float) -> None:
        """Let the cluster have workers that were left out, as far as the job's least allows."""
        spared = self._choosing.spared
        self._scaling.stop_at(max(len(self.roster.alive), sum(self.settings.least.values())), now)
        self.roster.most = self._scaling.limit
        for worker in workers:
            if len(self.roster.alive) + len(spared.kinds) > sum(self.settings.least.values()):
                spared.forget(worker)
                self._out.put(orders.LetGo(worker))

    @property
    def _done(self) -> bool:
        """True if no round is to come: all presentations are made, or the run stops early."""
        return self._alive.rounds.ended or self.evaluations.stopping
