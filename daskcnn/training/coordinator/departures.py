"""The part of a data-parallel run's coordinator that ends rounds early: workers leave, others join, the server moves.

A worker that is to leave ends its round early: it pushes what it has, and reports the samples that it has done. What
is left of its round is presented in later ones. Nobody waits for it at a barrier. Where the server's worker is to
leave, all replicas end their rounds early; then the server's state is kept, and another server goes on from it.

A group of which a worker is to leave ends its round early too. Then it is formed anew without that worker, and joins
anew.

Where the run is to end, by a signal or its time limit, all replicas end their rounds early too. One that does not
report in time is not waited for: its round begins again with a resume.

Behind a barrier a worker that came, or a group that was formed anew, does not wait for the end of a long round. All
rounds end early, and the next ones begin with it. Without a barrier only the round of a group ends early that a worker
fills up. A replica that ends its round early leaves the server's barrier with its last push, so none waits for it; it
joins anew.
"""

from __future__ import annotations

from collections.abc import Iterable

from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.coordinator import Phase
from daskcnn.training.coordinator.records import Kept
from daskcnn.training.coordinator.recovering import Recovering
from daskcnn.training.coordinator.settings import Settings

# Read with every fact: a member's look-up in its class takes ten times as long as a name of the module.
_TRAINING, _ENDED = Phase.TRAINING, Phase.ENDED
FAR = 10.0
"""Seconds for which a worker that came may wait for the end of the others' rounds; so may a run that is to end."""
LONGEST = 30.0
"""Seconds for which a run that is to end waits for longer steps: what asked it to end may not wait any longer."""
UNTOLD = "it was asked to end"
"""Why a worker leaves that has told its worker before the run."""
_BEFORE_THE_END = frozenset({Phase.STARTING, Phase.MEASURING, Phase.TRAINING, Phase.MOVING, Phase.RESCUING})


class Departures(Recovering):
    """Lets workers of a data-parallel run leave in good order."""

    def __init__(self, settings: Settings, kept: Kept | None = None, *, logs: bool = True) -> None:
        super().__init__(settings, kept, logs=logs)
        self._given_back = set[str]()  # of replicas that end their rounds early, those that the cluster gets back
        self._moving: str | None = None  # why the server is to leave its worker
        self._host = ""  # the server's worker
        self._keep_by = 0.0  # the time when a run that is to end is kept, whatever is still under way

    def _drop(self, worker: str, reason: str, samples: int = 0, done: int | None = None) -> None:
        self._leaving.pop(worker, None)
        super()._drop(worker, reason, samples, done)
        if worker in self._given_back:
            self._given_back.remove(worker)
            self._out.put(orders.LetGo(worker))

    def _on_worker_leaving(self, fact: facts.WorkerLeaving) -> None:
        """Let workers leave: those with a round under way once it has ended, and the others now."""
        for worker in fact.workers:
            if worker in self.roster.calibrating or (worker in self.roster.alive and self.phase is Phase.CALIBRATING):
                self._leave_out([worker], fact.reason, "", fact.at)
            elif worker in self.roster.alive and worker not in self._leaving and self.phase in _BEFORE_THE_END:
                self._take_leave(worker, fact.reason, fact.at)
            if self.phase is _ENDED:
                return

    def _recall(self, fact: facts.WorkerLeaving) -> None:
        """Go on without workers that another run is to have, and without the server on one of them."""
        super()._recall(fact)
        if self._host in fact.workers:
            self._on_server_leaving(facts.ServerLeaving(self.life, f"its worker leaves: {fact.reason}", fact.at))

    def _take_leave(self, worker: str, reason: str, now: float) -> None:
        """Have the worker's replica end its round; without one it goes at once. Peers end their rounds together."""
        life = self._present
        replica = life.teams.of(worker) if life else None
        if self.phase is Phase.RESCUING:  # it may be the only one that has the last center
            self._leaving[worker] = reason
        elif self._forming:
            self._drop(worker, reason, done=0)
            self._go_on_without(now)
        elif life is not None and replica is not None and replica in life.sessions.running:
            self._leaving[worker] = reason
            if (held := life.sessions.take_held(replica)) is not None:
                self._reported_early(held)
            else:
                self._end_all_rounds() if self.settings.peers else self._end_rounds([replica])
        elif replica in (None, worker):
            self._depart(worker, reason, 0, now)
        else:
            self._lose_worker(worker, reason, done=0)
            self._go_on_without(now)

    def _end_rounds(self, replicas: Iterable[str]) -> None:
        life = self._alive
        for replica in replicas:
            running = life.sessions.running[replica]
            running.ends_early = True
            self._out.put(orders.EndRound(replica, life.number, running.session, running.round.number))

    def _reported_early(self, fact: facts.RoundDone) -> bool:
        """Take the report of a replica of which workers leave, and let these go; return False for any other."""
        life, replica, report = self._alive, fact.replica, fact.report
        cut = report.cut is not None
        if not (self._leaving or cut) or not life.awaits(fact):
            return False
        if cut and replica in self.roster.alive and not life.sessions.running[replica].ends_early:
            self._leaving.setdefault(replica, UNTOLD)
        leavers = {worker: self._leaving[worker] for worker in life.teams.members[replica] if worker in self._leaving}
        if not leavers:
            return False
        life.take(fact, fact.at)
        if replica in leavers:
            self._depart(replica, leavers[replica], report.samples, fact.at)
        else:
            self._lose_group(replica, leavers, report.samples)
            self._go_on_without(fact.at)
        return True

    def _on_round_dropped(self, fact: facts.RoundDropped) -> None:
        """Let a worker go that leaves before its round has begun."""
        running = self._alive.sessions.running.get(fact.replica) if self._is_training(fact.life) else None
        if running is not None and running.session == fact.session:
            self._depart(fact.replica, self._leaving.get(fact.replica, UNTOLD), 0, fact.at)

    def _depart(self, worker: str, reason: str, done: int, now: float) -> None:
        """Go on without a worker that leaves. done: the samples of its last round."""
        self._choosing.spared.recall([worker], self.roster, self._out, now)
        life = self._present
        if life and self.settings.peers and self.phase is _TRAINING and life.teams.members.keys() == {worker}:
            self._keep_last()  # before it goes: it alone has the center
        replica = life.teams.of(worker) if life else None
        self._drop(worker, reason, life.samples_of(worker) if life else 0, done)
        if replica is not None:
            self._lose_replica(replica)
        if self.phase is _TRAINING:
            self._go_on_with_the_rest(now)
        elif self.phase is Phase.MEASURING:
            self._begin(now)

    def _on_rescued(self, fact: facts.Rescued) -> None:
        """Let those go that are to leave, behind the joins of the next life: one may alone have the last center."""
        leaving = self._leaving.copy() if self.phase is Phase.RESCUING else {}
        super()._on_rescued(fact)
        for worker, reason in leaving.items():
            self._leaving.pop(worker, None)
            self._on_worker_leaving(facts.WorkerLeaving((worker,), reason, fact.at))

    def _let_go(self) -> None:
        """Begin no life with workers that leave."""
        self._choosing.spared.recall(self._leaving, self.roster, self._out, self._now)
        for worker, reason in [*self._leaving.items()]:
            self._drop(worker, reason, self._alive.samples_of(worker), 0)

    # --- rounds end early for others ---

    def _end_all_rounds(self) -> None:
        self._end_with(self._alive.sessions.running)

    def _end_with(self, replicas: Iterable[str]) -> None:
        """Have these replicas end their rounds, as far as they were not told to."""
        running = self._alive.sessions.running
        self._end_rounds([replica for replica in replicas if not running[replica].ends_early])

    def _go_on_without(self, now: float) -> None:
        super()._go_on_without(now)
        if self.phase is _TRAINING:
            self._let_in(now)

    def _on_tick(self, fact: facts.Tick) -> None:
        super()._on_tick(fact)
        if self.phase is _TRAINING and self._interrupted is None:
            self._let_in(fact.at)
        elif self.phase is _TRAINING and fact.at >= self._keep_by:
            self._stop_at_once()

    def _let_in(self, now: float) -> None:
        """Let newcomers in, if the end of the rounds that they wait for is far.

        A worker waits for others that measure themselves.
        """
        life = self._alive
        if not life.newcomers or life.paused or life.sessions.joining or self.settings.rule.swaps:
            return  # of a rule that swaps the job counts the rounds
        if not (waited_for := life.waited_for()):
            return
        soon = self.roster.calibrating or life.seconds_left(waited_for, now) <= FAR
        if not soon or now - min(life.newcomers.values()) > FAR:
            self._end_with(waited_for)

    # --- the run is to end ---

    @property
    def _before_save(self) -> float:
        """Seconds within which rounds under way should end: that of a step, and its push, of each replica."""
        if self.phase is not _TRAINING or not self._alive.sessions.running:
            return 0.0
        return min(LONGEST, max(FAR, 2 * self._alive.step_seconds))

    def _end_under_way(self) -> None:
        """Have all replicas end their rounds: a resume goes on with the samples that they have not presented."""
        self._keep_by = self._now + self._before_save
        self._alive.closing = True
        self._end_all_rounds()

    # --- the server's worker leaves ---

    def _on_server_leaving(self, fact: facts.ServerLeaving) -> None:
        """Have all replicas end their rounds, so that the server's state is whole when it is kept."""
        if fact.life == self.life and self.phase is _TRAINING and not self.settings.peers and self._moving is None:
            self._moving = fact.reason
            self._alive.closing = True
            self._end_all_rounds()
            self._go_on_from_reports(fact.at)  # while the run pauses no round is under way

    def _keep_for_the_next(self) -> None:
        """Keep the state for the next life: no round is under way."""
        self.phase = Phase.MOVING
        self._records.save(None, self._alive.rounds, self.life, judged=False)
