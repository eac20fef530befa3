"""Data-parallel training on a cluster: the shell of `training.coordinator.replicas`.

What a replica is made of (a worker, a group) and how merges travel (a server, peers) are values that it is given.
"""

from __future__ import annotations

from typing import Any

from distributed import Future

from daskcnn.cluster.groups.replicas import GroupReplicas
from daskcnn.cluster.layers.task_context import OutOfStep
from daskcnn.cluster.link.calls import NotYet, ServerLost, WorkersLost
from daskcnn.cluster.link.members import unique_names
from daskcnn.cluster.peers.meeting_tasks import OutOfTurn
from daskcnn.cluster.peers.meetings import PeerExchange
from daskcnn.cluster.run.admission import calibrated, submit_calibration
from daskcnn.cluster.run.context import RunContext
from daskcnn.cluster.run.exchange import Exchange, PendingWork, ServerExchange, TaskWork, WorkerReplicas
from daskcnn.cluster.shell.shell import Heard, Shell
from daskcnn.errors import Diverged, Interrupted, Lost, PushRefused, UserError
from daskcnn.events import ServerCounted, Warned
from daskcnn.job.network import initial_weights
from daskcnn.nn import OptimizerState
from daskcnn.ps.messages import Code
from daskcnn.runs.state import TrainingState
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.evaluations import guessing_on
from daskcnn.training.coordinator.orders import Order
from daskcnn.training.coordinator.records import Kept
from daskcnn.training.coordinator.replicas import Coordinator
from daskcnn.training.coordinator.settings import Settings
from daskcnn.training.replica import Stopped


class DataParallel(Shell):
    """Drives one run of an update rule and a partitioner over the workers of a context.

    Attributes
    ----------
    state : the state that was kept last.
    """

    def __init__(self, context: RunContext, resumed: TrainingState | None, heard: Heard | None = None) -> None:
        guess = guessing_on(context.job, context.dataset)
        settings = Settings.of(context.job, context.samples, guess)
        self.state = resumed or TrainingState(0, 0.0, initial_weights(context.job, context.dataset)[1], {}, {})
        state = self.state
        kept = Kept(state.step, state.epoch, state.book or None, state.validation is not None)
        super().__init__(context, Coordinator(settings, kept), heard)
        self._settings = settings
        self._exchange = self._composed()
        self._optimizers: dict[str, OptimizerState] = dict(state.optimizers)
        self._joining_life = 0
        self._candidates = {member.name: member for member in context.workers.members.workers}
        context.workers.takes_newcomers = True
        context.workers.alive.clear()  # until they are calibrated
        self._carry_out = {
            orders.Calibrate: self._calibrate,
            orders.FormGroups: self._form_groups,
            orders.StartServer: self._start_server,
            orders.Join: self._join,
            orders.Leave: self._exchange.leave,
            orders.Cancel: lambda order: self.give_up(order.replica),
            orders.CancelAll: lambda order: self._cancel_all(),
            orders.Dismiss: self._dismiss,
            orders.AskWaiting: self._ask_waiting,
            orders.Rescue: self._rescue,
            orders.Restore: lambda order: self._restore(),
            orders.Judge: self._judge,
            orders.Save: self._save,
            orders.CountServer: lambda order: self._count_server(),
            orders.Log: lambda order: context.emit(order.event),
            orders.End: self._end,
        }

    def _composed(self) -> Exchange:
        """How merges travel in this run, and between what kind of replicas."""
        context, rule = self.context, self._settings.rule
        if self._settings.peers:
            return PeerExchange(context, self.watch, rule.period)
        replicas = GroupReplicas(context, rule) if self._settings.replica_size > 1 else WorkerReplicas(context.dispatch)
        return ServerExchange(context, rule, replicas, self.watch)

    def train(self) -> TrainingState:
        """Train to the end and return the last state.

        Raises Diverged, Lost, ClusterError, or Interrupted once the state at that moment is saved.
        """
        if not (self.context.workers.members.server_alone or self._settings.peers):
            host = self.context.workers.members.server.name
            message = f"no worker is set apart for the parameter server (--resources PS=1): {host} holds it as well"
            self.context.emit(Warned(message=message))
        for name, member in self._candidates.items():
            self.tell(facts.WorkerReady(name, member.kind, self.now))
        try:
            end = self.run()
        finally:
            self._cancel_all()
        if end.error is not None:
            raise end.error
        return self.state

    # --- workers ---

    def _look(self) -> None:
        super()._look()
        while self.context.workers.newcomers:
            member = self.context.workers.newcomers.pop()
            (name,) = unique_names([member.name], [member.kind], self._candidates)
            self._candidates[name] = member.named(name)
            self.tell(facts.WorkerReady(name, member.kind, self.now))

    def _calibrate(self, order: orders.Calibrate) -> None:
        worker = order.worker
        self.context.workers.alive[worker] = self._candidates[worker]
        future = submit_calibration(self.context, worker)
        future.add_done_callback(lambda done: self.watch(worker, done))
        self._work[worker] = TaskWork(future, lambda fact, at: fact)

    def _dismiss(self, order: orders.Dismiss) -> None:
        self.give_up(order.worker)
        self.context.workers.alive.pop(order.worker, None)

    # --- replicas ---

    def _form_groups(self, order: orders.FormGroups) -> None:
        assert isinstance(self._exchange, ServerExchange)
        self._exchange.form(order)

    def _start_server(self, order: orders.StartServer) -> None:
        self.life = order.life
        self._optimizers = dict(self.state.optimizers)
        host = self._exchange.start(order, self.state)
        self.tell(facts.ServerReady(order.life, host, self.now))

    def _join(self, order: orders.Join) -> None:
        self.life = order.life
        self._work[order.replica] = self._exchange.join(order, self.state, self._optimizers)

    def carry_out(self, found: list[Order]) -> None:
        """Rounds that are ordered together start together: peers meet each other."""
        started = [order for order in found if isinstance(order, orders.StartRound)]
        super().carry_out([order for order in found if not isinstance(order, orders.StartRound)])
        if started and self.end is None:
            self._work.update(self._exchange.rounds(started))

    def _cancel_all(self) -> None:
        """Tasks stop at their next step once cancelled; the server goes with them."""
        calibrating = {name: work for name, work in self._work.items() if self._is_calibration(name)}
        for name in self._work.keys() - calibrating.keys():
            self.give_up(name)
        self._exchange.close()

    def _is_calibration(self, name: str) -> bool:
        return self.end is None and name in self.context.workers.alive and name not in self.context.calibrations

    # --- results ---

    def fetch(self, name: str, future: Future) -> Any:
        """The result of a task; a worker that was lost with it, or a mistake of the user's, becomes a fact."""
        if self._is_calibration(name):
            found = calibrated(self.context, name, future, self.now)
            del self._work[name]
            return found
        try:
            return super().fetch(name, future)
        except (WorkersLost, ServerLost, NotYet, Interrupted, Lost):
            raise
        except (OutOfStep, OutOfTurn, Stopped) as error:
            return self._unexplained(error)
        except Exception as error:
            return self._failed(name, error)

    def _unexplained(self, error: Exception) -> Exception:
        """An error that a loss leads to, unless nobody is lost."""
        try:
            self.context.workers.explain(error)
        except OutOfStep as still:
            return still

    def _failed(self, name: str, error: Exception) -> Exception:
        """The error, as something to go on with. Raises it where it is none of the user's."""
        if isinstance(error, PushRefused | UserError):
            return error
        raise error

    def take(self, name: str, work: PendingWork, future: Future, result: Any) -> None:
        """Go on with a result, or with the error that came in its place."""
        if isinstance(result, Exception):
            self.tell(self._fact_of(name, result))
            return
        try:
            found = work.take(future, result, self.now)
        except Diverged as error:
            found = [facts.RoundFailed(name, self.life, error, self.now)]
        for fact in found:
            if isinstance(fact, facts.RoundDone):
                del self._work[fact.replica]
                if fact.report.optimizer is not None:
                    self._optimizers[fact.replica] = fact.report.optimizer
            self.tell(fact)

    def _fact_of(self, name: str, error: Exception) -> facts.Fact:
        if isinstance(error, OutOfStep):
            return facts.OutOfStep(self.life, str(error), self.now)
        if isinstance(error, PushRefused):
            error = _refusal(error)
        assert isinstance(error, UserError)
        return facts.RoundFailed(name, self.life, error, self.now)

    # --- answers ---

    def _ask_waiting(self, order: orders.AskWaiting) -> None:
        waiting, stuck = self._exchange.waiting(order.overdue)
        self.tell(facts.Waits(waiting, self.now, stuck))

    def _rescue(self, order: orders.Rescue) -> None:
        self.tell(facts.Rescued(self._exchange.rescue(self._optimizers), self.now))

    def _judge(self, order: orders.Judge) -> None:
        score = self.context.scoring.score(self._exchange.snapshot().center, "train", order.lo, order.hi)
        self.tell(facts.Judged(score, self.now))

    def _restore(self) -> None:
        """Replicas that join go on with the optimizers of the state that was saved last."""
        self._optimizers = dict(self.state.optimizers)

    def _save(self, order: orders.Save) -> None:
        snapshot = self._exchange.snapshot()
        self._count(snapshot)
        optimizers = {name: self._optimizers[name] for name in order.replicas if name in self._optimizers}
        state = snapshot.state or {}
        self.state = TrainingState(
            snapshot.version, order.epoch, snapshot.center, optimizers, order.book, order.validation, state
        )
        self.context.save(self.state)
        self.tell(facts.Saved(snapshot.version, self.now))

    def _count_server(self) -> None:
        self._count(self._exchange.snapshot())

    def _count(self, snapshot: Any) -> None:
        """Log what this server has merged and refused so far."""
        if not self._settings.peers:
            counted = {"merged": snapshot.merged, "repeated": snapshot.repeated, "refused": dict(snapshot.refused)}
            self.context.emit(ServerCounted(server=self.life, **counted))

    def _end(self, order: orders.End) -> None:
        self.end = order


def _refusal(error: PushRefused) -> UserError:
    """The user's error that a refused push stands for. Raises the refusal where it is a mistake of ours."""
    if error.code == Code.FINITE:
        return Diverged(f"push of {error}")
    raise error
