"""The shell of every coordinator: a cluster's happenings become facts, and orders become tasks. It decides nothing.

A strategy is a value that the shell is given: its coordinator, an action for each order that is its own, and the facts
that errors of its tasks stand for. The shell has what every strategy needs: it watches workers, signals and the
scheduler, has workers calibrated, and takes results in the order in which tasks end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

from distributed import Future

from daskcnn.cluster.link.calls import CutOff, NotYet, ServerLost, WorkersLost, cancel, tell
from daskcnn.cluster.link.members import Member
from daskcnn.cluster.run.admission import calibrated, lost_while_calibrated, submit_calibration, unfit
from daskcnn.cluster.run.context import RunContext
from daskcnn.cluster.run.exchange import PendingWork
from daskcnn.cluster.run.results import Name
from daskcnn.cluster.worker.session import forget_run
from daskcnn.errors import Interrupted, Lost
from daskcnn.events import WorkerIgnored
from daskcnn.runs.state import TrainingState
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.facts import Fact
from daskcnn.training.coordinator.orders import Order

BROKEN = (WorkersLost, CutOff, Interrupted, Lost)
"""Exceptions that any call to the cluster may raise in place of its result."""
Heard: TypeAlias = Callable[[Fact, list[Order]], None]
"""Is told every fact and the orders that it led to."""
Actions: TypeAlias = Mapping[type[Order], Callable[[Any], None]]


ASLEEP = 5.0
"""Seconds between two looks from which on this process counts as having been stopped, or its machine asleep."""
AWAKE = 10.0
"""Seconds after that in which no worker counts as silent: what they have said meanwhile is still coming in."""


class Decider(Protocol):
    """A coordinator."""

    def handle(self, fact: Any) -> list[Any]:
        """Take a fact in; return the orders that follow."""


class Strategy(Protocol):
    """A way to train. state: the one that was kept last. life: of the server, or of the pieces that are placed."""

    state: TrainingState
    life: int

    @property
    def coordinator(self) -> Decider:
        """The machine that decides what is done next."""

    def actions(self, shell: Shell) -> Actions:
        """Return an action for every kind of order that the shell does not carry out itself."""

    def ahead(self) -> None:
        """Submit tasks that may be submitted before those under way have ended."""

    def taken(self, fact: Fact) -> None:
        """Take note of a fact that a task's result stands for."""

    def failed(self, name: Any, error: Exception) -> Fact:
        """Return the fact that an error of this worker's or replica's task stands for. Raises it if there is none."""

    def leaves(self, address: str) -> None:
        """Take note that the worker at this address is to end."""

    def close(self) -> None:
        """Give up all that is under way besides the shell's tasks."""


class Shell:
    """Drives one run of a strategy over the workers of a context. work: tasks under way, by replica or kind."""

    def __init__(self, context: RunContext, strategy: Strategy, heard: Heard | None = None) -> None:
        self.context, self.strategy, self._heard = context, strategy, heard
        self.end: orders.End | None = None
        self.work: dict[Name, PendingWork] = {}
        self._facts: deque[Fact] = deque()
        there = *context.workers.members.workers, *context.workers.spare.values()  # left over by a run that has turned
        self._candidates = {member.name: member for member in there}
        self._calibrating: dict[str, Future] = {}
        self._looked = self._awake = self.now
        self._cuts = context.connection.cuts  # that were told
        self._actions: Actions = {
            orders.Calibrate: self._calibrate,
            orders.Dismiss: self.dismiss,
            orders.AskWorkers: lambda order: context.workers.ask(order.number),
            orders.LetGo: lambda order: context.workers.give_back(self._candidates[order.worker]),
            orders.Cancel: lambda order: self.give_up(order.replica),
            orders.CancelAll: lambda order: self._cancel_all(),
            orders.IgnoreSignals: lambda order: context.connection.ignore_signals(),
            orders.Log: lambda order: context.emit(order.event),
            orders.End: self._end,
            **strategy.actions(self),
        }

    @property
    def state(self) -> TrainingState:
        """The state that was kept last."""
        return self.strategy.state

    @property
    def turn(self) -> orders.Turn | None:
        """The kind of run that goes on in place of this one, which has ended before it trained."""
        return None if self.end is None else self.end.turn

    @property
    def now(self) -> float:
        """Seconds on this process's clock."""
        return time.monotonic()

    def train(self) -> TrainingState:
        """Train to the end and return the last state.

        Raises Diverged, Lost, ClusterError or Interrupted where the run ends early; what was to be saved is saved.
        """
        self.context.workers.alive.clear()  # until they are calibrated
        if (ends := self.context.ends) is not None:
            self.tell(facts.TimeLimited(self.context.job.run.time_limit or 0.0, ends, self.now))
        for name, member in self._candidates.items():
            self.tell(facts.WorkerReady(name, member.kind, self.now))
        try:
            while self.end is None:
                self.look()
                with self.losses_told():
                    self.strategy.ahead()
                if not self._facts:
                    self._take_result()
                while self._facts and self.end is None:
                    fact = self._facts.popleft()
                    found = self.strategy.coordinator.handle(fact)
                    if self._heard is not None:
                        self._heard(fact, found)
                    self._carry_out(found)
                    if isinstance(fact, facts.WorkerReady):
                        self._free_unused(fact.worker)
        finally:
            self._cancel_all()
            for worker in [*self._calibrating]:
                self._give_up_calibrating(worker)
        if self.end.error is not None:
            raise self.end.error
        return self.state

    # --- facts ---

    def tell(self, fact: Fact) -> None:
        """Queue a fact; the coordinator is told it in its turn."""
        self._facts.append(fact)

    def tell_leaving(self, address: str) -> None:
        """Tell that the worker of the run at this address is to end, if it is one."""
        for name, member in self.context.workers.alive.items():
            if member.address == address:
                self.tell(facts.WorkerLeaving((name,), self.context.workers.leaving[address], self.now))

    def tell_lost(self, names: Iterable[str]) -> None:
        """Tell that workers are lost; of those that measure themselves, that they failed to."""
        calibrating = [name for name in names if name in self._calibrating]
        self._facts += [lost_while_calibrated(self.context, name, self.now) for name in calibrating]
        if gone := tuple(name for name in names if name not in calibrating):
            self.tell(facts.WorkerGone(gone, "connection lost", self.now))

    def look(self) -> None:
        """Look at workers, signals and the scheduler, if the last look is a moment ago; time passes with it.

        The time in which this process did not run is not the workers' silence.
        """
        workers, before = self.context.workers, self._looked
        self._looked = self.now
        if self._looked - before > ASLEEP:
            self._awake = self._looked + AWAKE
        with self.losses_told():
            if workers.look_round() and self.now >= self._awake:
                self.tell(facts.Tick(self.now))
        while workers.leavers:
            with self.losses_told():
                self.strategy.leaves(workers.leavers.pop(0))
        if workers.left:
            gone, workers.left = tuple(workers.left), []
            self.tell(facts.WorkerGone(gone, "connection lost", self.now))
        if recalled := workers.recalled():
            self.tell(facts.WorkersRecalled(recalled, self.now))
        for member in workers.came():
            self._candidates[member.name] = workers.spare[member.name] = member
            self.tell(facts.WorkerReady(member.name, member.kind, self.now))
        while workers.new_hosts:
            with self.losses_told():
                self._take_host(workers.new_hosts.pop(0))

    def _take_host(self, member: Member) -> None:
        """Let the server go to a worker that is set apart for it, if it is fit. A reproducible run's need not move."""
        if (why := unfit(self.context, member)) is not None:
            reason, remedy = why
            self.context.emit(WorkerIgnored(address=member.address, reason=reason, remedy=remedy))
        elif self.context.workers.add_host(member) and not self.context.job.train.reproducible:
            self.tell(facts.ServerLeaving(self.strategy.life, "that one is set apart for it", self.now))

    @contextmanager
    def losses_told(self) -> Iterator[None]:
        """Turn losses that are found meanwhile into facts."""
        try:
            yield
        except ServerLost:
            self.tell(facts.ServerGone(self.strategy.life, self.now))
        except CutOff:
            pass  # as it is told in any case
        except WorkersLost as lost:
            self.tell_lost(lost.names)
        except Interrupted as signal:  # told once: the coordinator ends what is under way then
            self.context.connection.ignore_signals()
            self.tell(facts.Interrupted(signal.signum, self.now))
        except Lost as gone:
            self.tell(facts.SchedulerGone(gone, self.now))
        self._tell_cut()

    def _tell_cut(self) -> None:
        """Tell that the connection was cut, if it was: the loss of a worker or of the server may have been found."""
        if self._cuts != self.context.connection.cuts:
            self._cuts = self.context.connection.cuts
            self.tell(facts.ConnectionCut(self.now))

    # --- orders ---

    def _carry_out(self, found: list[Order]) -> None:
        """Do what was ordered, in turn. Rounds that are ordered together start together: peers meet each other.

        They start behind all else, but for the order to end one of them early.
        """
        started = [order for order in found if isinstance(order, orders.StartRound)]
        begun, ends = {order.round.worker for order in started}, list[orders.EndRound]()
        for order in found:
            if isinstance(order, orders.EndRound) and order.replica in begun:
                ends.append(order)
            elif not isinstance(order, orders.StartRound):
                self._act(order)
        if started and self.end is None:
            with self.losses_told():
                self._actions[orders.StartRound](started)
            for order in ends:
                self._act(order)

    def _act(self, order: Order) -> None:
        """Carry out an order. It is begun anew where the connection is cut meanwhile."""
        with self.losses_told():
            while True:
                try:
                    self._actions[type(order)](order)
                except CutOff:
                    self._tell_cut()
                else:
                    return

    def _free_unused(self, worker: str) -> None:
        """Let other runs have a worker that is of no use now, if this run has a hold on it since it was here before."""
        if worker not in self.context.workers.alive:
            self.context.workers.spare[worker] = self._candidates[worker]
            with self.losses_told():
                self.context.workers.free(self._candidates[worker])

    def _calibrate(self, order: orders.Calibrate) -> None:
        self._give_up_calibrating(order.worker)
        for known in (self.context.workers.spare, self.context.workers.let_go):
            known.pop(order.worker, None)
        if not self.context.workers.take(self._candidates[order.worker]):
            self.tell(facts.CalibrationFailed(order.worker, "another run has taken it meanwhile", "", self.now))
            return
        self.context.workers.alive[order.worker] = member = self._candidates[order.worker]
        if member not in self.context.workers.members.workers and (why := unfit(self.context, member)) is not None:
            self.tell(facts.CalibrationFailed(order.worker, *why, self.now))
            return
        self._calibrating[order.worker] = future = submit_calibration(self.context, order.worker)
        self.watch(order.worker, future)

    def dismiss(self, order: orders.Dismiss) -> None:
        """Let a worker go, and give up what it does. One that stays is free for others, and may be used again."""
        workers = self.context.workers
        self._give_up_calibrating(order.worker)
        self.give_up(order.worker)
        self.context.calibrations.pop(order.worker, None)  # it measures itself anew if it comes back
        if (member := workers.alive.get(order.worker)) is None:
            return
        leaves = member.address in workers.leaving
        if order.for_good or leaves:
            self.ask(member.address, forget_run, self.context.sessions.get(member.address, 0))
        del workers.alive[order.worker]
        if order.for_good and not leaves:
            workers.let_go[order.worker] = member
        workers.free(member)
        if not order.for_good:
            workers.expect(member)

    def ask(self, address: str, function: Callable[..., Any], *args: Any) -> None:
        """Have the worker at this address call this beside its tasks; its answer is not waited for. Raises Lost."""
        with self.context.connection.reached():
            tell(self.context.dispatch.client, address, function, self.context.name, *args)

    def _give_up_calibrating(self, worker: str) -> None:
        if (future := self._calibrating.pop(worker, None)) is not None:
            cancel([future])

    def give_up(self, name: Name) -> None:
        """Stop waiting for what is under way under this name."""
        if (work := self.work.pop(name, None)) is not None:
            work.cancel()

    def _cancel_all(self) -> None:
        """Tasks stop at their next step once they are cancelled. Workers that measure themselves go on with that."""
        for name in [*self.work]:
            self.give_up(name)
        self.strategy.close()

    def _end(self, order: orders.End) -> None:
        self.end = order

    # --- results ---

    def watch(self, name: Name, future: Future) -> None:
        """Take the task's result once it has ended, one way or another. May be called on any thread."""
        future.add_done_callback(lambda done: self.context.results.ended.put((name, done)))

    def _take_result(self) -> None:
        """Wait a moment for a task to end. Its result, or its error, becomes facts."""
        if (ended := self.context.results.next_ended()) is None:
            return
        name, future = ended
        work = self.work.get(name)
        with self.losses_told():
            try:
                if isinstance(name, str) and self._calibrating.get(name) is future:
                    self.tell(calibrated(self.context, name, future, self.now))
                    del self._calibrating[name]
                elif work is not None and work.expects(future):
                    self._take(name, work, future)
            except NotYet:
                self.context.results.ended.put(ended)
            except (ServerLost, *BROKEN):
                self.context.results.ended.put(ended)  # it is put off, unless it is of what was lost
                raise

    def _take(self, name: Name, work: PendingWork, future: Future) -> None:
        try:
            found = work.take(future, self.context.results.fetch(future), self.now)
        except (NotYet, ServerLost, *BROKEN):
            raise
        except Exception as error:
            found = [self.strategy.failed(name, error)]
        for fact in found:
            self.strategy.taken(fact)
            self.tell(fact)
