"""Data-parallel training on a cluster: what a shell carries out for `training.coordinator.replicas`.

The kind of replicas (a worker, a group) and the way that merges travel (a server, peers) are values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from daskcnn.cluster.groups.replicas import GroupReplicas
from daskcnn.cluster.layers.task_context import OutOfStep
from daskcnn.cluster.peers.meetings import PeerExchange
from daskcnn.cluster.peers.pieces import OutOfTurn
from daskcnn.cluster.run.context import RunContext
from daskcnn.cluster.run.exchange import Exchange, ServerExchange, WorkerReplicas
from daskcnn.cluster.run.probing import ServerProbes
from daskcnn.cluster.shell.shell import Actions, Shell
from daskcnn.errors import Diverged, PushRefused, UserError
from daskcnn.events import ServerCounted, Warned
from daskcnn.job.network import initial_weights
from daskcnn.nn import OptimizerState
from daskcnn.ps.average import exchanged
from daskcnn.ps.gradient_noise import NOISE
from daskcnn.ps.messages import Code
from daskcnn.runs.state import TrainingState
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.evaluations import guessing_on
from daskcnn.training.coordinator.facts import Fact
from daskcnn.training.coordinator.records import Kept
from daskcnn.training.coordinator.replicas import Coordinator
from daskcnn.training.coordinator.settings import Settings
from daskcnn.training.replica import Stopped


class DataParallel:
    """An update rule and a partitioner over the workers of a context. A `Strategy` of the shell."""

    def __init__(self, context: RunContext, resumed: TrainingState | None) -> None:
        guess = guessing_on(context.job, context.dataset)
        self._settings = Settings.of(context.job, context.samples, guess)
        self.state = resumed or TrainingState(0, 0.0, initial_weights(context.job, context.dataset)[1], {}, {})
        state = self.state
        kept = Kept(state.step, state.epoch, state.book or None, state.validation is not None)
        self.context, self.coordinator, self.life = context, Coordinator(self._settings, kept), 0
        self._optimizers: dict[str, OptimizerState] = dict(state.optimizers)
        self._exchange: Exchange
        self._probes = ServerProbes(context)
        if not (context.workers.members.server_alone or self._settings.peers):
            host = context.workers.members.server.name
            message = f"no worker is set apart for the parameter server (--resources PS=1): {host} holds it as well"
            context.emit(Warned(message=message))

    def actions(self, shell: Shell) -> Actions:
        """Return the actions of this kind of replicas and this way to merge."""
        self._shell = shell
        return {
            **self._compose(),
            orders.ProbeServer: lambda order: shell.tell(self._probes.measure(order.workers, shell.now)),
            orders.Join: self._join,
            orders.StartRound: lambda started: shell.work.update(self._exchange.rounds(started)),
            orders.Leave: self._exchange.leave,
            orders.AskWaiting: self._ask_waiting,
            orders.Restore: lambda order: self._restore(),
            orders.Judge: self._judge,
            orders.Save: self._save,
            orders.CountServer: lambda order: self._count(self._exchange.snapshot()),
        }

    def _compose(self) -> Actions:
        """Choose how merges travel, and between which kind of replicas. Returns the actions of this choice alone."""
        context, rule, shell = self.context, self._settings.rule, self._shell
        if self._settings.peers:
            peers = self._exchange = PeerExchange(context, shell.watch, shell.tell)
            return {orders.Rescue: lambda _: shell.tell(facts.Rescued(peers.rescue(self._optimizers), shell.now))}

        def start_server(order: orders.StartServer) -> None:
            self.life = order.life
            self._restore()
            shell.tell(facts.ServerReady(order.life, server.start(order, self.state), shell.now))

        actions: dict[type[orders.Order], Any] = {orders.StartServer: start_server}
        if self._settings.replica_size > 1:
            groups = GroupReplicas(context, rule)
            server = self._exchange = ServerExchange(context, rule, groups, shell.watch)
            actions[orders.FormGroups] = groups.form
        else:
            server = self._exchange = ServerExchange(context, rule, WorkerReplicas(context.dispatch), shell.watch)
        return actions

    def ahead(self) -> None:
        """Submit nothing: replicas submit their own steps ahead."""

    def close(self) -> None:
        """End the server."""
        self._exchange.close()

    # --- orders ---

    def _join(self, order: orders.Join) -> None:
        self.life = order.life
        self._shell.work[order.replica] = self._exchange.join(order, self.state, self._optimizers)

    def _ask_waiting(self, order: orders.AskWaiting) -> None:
        waiting, stuck = self._exchange.waiting(order.overdue)
        self._shell.tell(facts.Waits(waiting, self._shell.now, stuck))

    def _judge(self, order: orders.Judge) -> None:
        snapshot = self._exchange.snapshot()
        weights, _ = exchanged(snapshot.center, snapshot.state or {})
        score = self.context.scoring.score(weights, "train", order.part)
        self._shell.tell(facts.Judged(score, self._shell.now))

    def _restore(self) -> None:
        """Replicas that join go on with the optimizers of the state that was saved last."""
        self._optimizers = dict(self.state.optimizers)

    def _save(self, order: orders.Save) -> None:
        snapshot = self._exchange.snapshot()
        self._count(snapshot)
        optimizers = worth_keeping(self._optimizers, order.replicas)
        self._optimizers = dict(optimizers)
        weights, rule_state = exchanged(snapshot.center, snapshot.state or {})
        if snapshot.noise:
            rule_state[NOISE] = np.array(snapshot.noise)
        self.state = TrainingState(
            snapshot.version, order.epoch, weights, optimizers, order.book, order.validation, rule_state
        )
        self.context.save(self.state)
        self._shell.tell(facts.Saved(snapshot.version, self._shell.now))

    def _count(self, snapshot: Any) -> None:
        """Log what this server has merged and refused so far."""
        if not self._settings.peers:
            counted = {"merged": snapshot.merged, "repeated": snapshot.repeated, "refused": dict(snapshot.refused)}
            self.context.emit(ServerCounted(server=self.life, **counted))

    # --- results ---

    def taken(self, fact: Fact) -> None:
        """Keep the optimizer's state that a replica reports at the end of its round."""
        if isinstance(fact, facts.RoundDone):
            del self._shell.work[fact.replica]
            if fact.report.optimizer is not None:
                self._optimizers[fact.replica] = fact.report.optimizer

    def failed(self, name: str, error: Exception) -> Fact:
        """Return the fact that an error stands for. Raises WorkersLost where a loss led to it, and mistakes of ours."""
        if isinstance(error, OutOfStep | OutOfTurn | Stopped):
            try:
                self.context.workers.explain(error)
            except (OutOfStep, OutOfTurn) as still:
                return facts.OutOfStep(self.life, str(still), self._shell.now)
        if isinstance(error, PushRefused) and error.code == Code.FINITE:
            error = Diverged(f"push of {error}")
        if isinstance(error, UserError):
            return facts.RoundFailed(name, self.life, error, self._shell.now)
        raise error


def worth_keeping(optimizers: Mapping[str, OptimizerState], replicas: Collection[str]) -> dict[str, OptimizerState]:
    """Return the states of these replicas, behind those of as many lost ones, which may come back; the last ones."""
    gone = [name for name in optimizers if name not in replicas]
    there = [name for name in replicas if name in optimizers]
    return {name: optimizers[name] for name in (*gone[max(0, len(gone) - len(replicas)) :], *there)}
