"""Data-parallel training on a cluster: what a shell carries out for `training.coordinator.replicas`.

The kind of replicas (a worker, a group) and the way that merges travel (a server, peers) are values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from daskcnn.cluster.groups.replicas import GroupReplicas, GroupRound
from daskcnn.cluster.layers.task_context import OutOfStep
from daskcnn.cluster.link.calls import OUT_OF_MEMORY, ServerLost, WorkerFailed, WorkersLost
from daskcnn.cluster.link.streams import Refused
from daskcnn.cluster.peers.meetings import PeerExchange
from daskcnn.cluster.peers.pieces import OutOfTurn
from daskcnn.cluster.run.context import RunContext
from daskcnn.cluster.run.early_ends import EarlyEnds
from daskcnn.cluster.run.exchange import PendingWork, ServerExchange, WorkerReplicas
from daskcnn.cluster.run.probing import ServerProbes
from daskcnn.cluster.shell.shell import Actions, Shell
from daskcnn.cluster.worker.session import ask_to_end, await_release
from daskcnn.errors import Diverged, Lost, PushRefused, UserError
from daskcnn.events import ServerCounted, Warned
from daskcnn.job.network import initial_weights, layout_of
from daskcnn.nn import Layout, OptimizerState
from daskcnn.ps import Snapshot, Vector
from daskcnn.ps.average import exchanged
from daskcnn.ps.gradient_noise import NOISE
from daskcnn.ps.messages import Code
from daskcnn.runs.state import TrainingState, for_rule
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.evaluations import guessing_on
from daskcnn.training.coordinator.facts import Fact
from daskcnn.training.coordinator.records import Kept
from daskcnn.training.coordinator.replicas import Coordinator
from daskcnn.training.coordinator.settings import Settings
from daskcnn.training.replica import Stopped
from daskcnn.training.sharded_prices import ShardedPrices

T = TypeVar("T")


class DataParallel:
    """An update rule and a partitioner over the workers of a context. A `Strategy` of the shell."""

    def __init__(self, context: RunContext, resumed: TrainingState | None) -> None:
        guess = guessing_on(context.job, context.dataset)
        self._settings = replace(Settings.of(context.job, context.samples, guess), asks=context.asks)
        if self._settings.chooses_workers:
            self._settings = replace(self._settings, sharded=ShardedPrices.of(context.job, context.dataset))
        self.state = resumed or TrainingState(0, 0.0, initial_weights(context.job, context.dataset)[1], {}, {})
        state = self.state
        kept = Kept(state.step, state.epoch, state.book or None, state.validation is not None)
        self.context, self.coordinator, self.life = context, Coordinator(self._settings, kept), 0
        self._optimizers: dict[str, OptimizerState] = dict(state.optimizers)
        self._rests: dict[str, Vector] = dict(state.rests)
        self._exchange: ServerExchange | PeerExchange
        self._groups: GroupReplicas
        self._probes, self._warned = ServerProbes(context), False
        self._early, self._ending = EarlyEnds(context), dict[str, PendingWork | None]()  # the work that is to end early

    def actions(self, shell: Shell) -> Actions:
        """Return the actions of this kind of replicas and this way to merge."""
        self._shell = shell
        self._exchange = self._composed()
        return {
            orders.UseRule: self._use,
            orders.StartServer: self._start_server,
            orders.FormGroups: lambda order: self._groups.form(order),
            orders.Rescue: self._rescue,
            orders.ProbeServer: self._probe,
            orders.Join: self._join,
            orders.StartRound: self._start_rounds,
            orders.Leave: lambda order: self._exchange.leave(order),
            orders.EndRound: self._end_round,
            orders.AskWaiting: self._ask_waiting,
            orders.Restore: lambda order: self._go_back(),
            orders.Judge: self._judge,
            orders.Save: self._save,
            orders.CountServer: lambda order: self._count(self._exchange.snapshot()),
        }

    def _composed(self) -> ServerExchange | PeerExchange:
        """Choose how merges travel, and between which kind of replicas."""
        context, rule, shell = self.context, self._settings.rule, self._shell
        if self._settings.peers:
            return PeerExchange(context, rule, self.state, shell.watch, shell.tell)
        if self._settings.replica_size > 1:
            self._groups = GroupReplicas(context, rule)
            return ServerExchange(context, rule, self._groups, shell.watch)
        return ServerExchange(context, rule, WorkerReplicas(context.dispatch), shell.watch)

    def ahead(self) -> None:
        """Take the reports of rounds that have ended early. Replicas submit their own steps ahead."""
        work = self._shell.work
        for order, report in self._early.taken():
            asked = self._ending.pop(order.replica, None)
            if report is None or asked is None or work.get(order.replica) is not asked:
                continue
            self._shell.give_up(order.replica)
            of_round = order.replica, order.life, order.session
            if report == "not begun":
                self._shell.tell(facts.RoundDropped(*of_round, self._shell.now))
            else:
                fact = facts.RoundDone(*of_round, report, self._shell.now)
                self._keep_of(fact)
                self._shell.tell(fact)

    def _end_round(self, order: orders.EndRound) -> None:
        work = self._shell.work.get(order.replica)
        if not (self._settings.peers or isinstance(work, GroupRound)):
            self._ending[order.replica] = work
            self._early.ask(order)
            return
        worker = order.replica  # peers come to the end of their round together
        if isinstance(work, GroupRound):
            work.end_early()
            worker = work.home
        if (member := self.context.workers.alive.get(worker)) is not None:
            self._shell.ask(member.address, ask_to_end, (order.life, order.session, order.number))

    def leaves(self, address: str) -> None:
        """Tell that a worker, or the server, is to leave."""
        workers = self.context.workers
        if workers.serves(address):
            reason = f"its worker leaves: {workers.leaving[address]}"
            self._shell.tell(facts.ServerLeaving(self.life, reason, self._shell.now))
        if self._settings.replica_size > 1:  # tasks of its group come first
            self._shell.ask(address, await_release)
        self._shell.tell_leaving(address)

    def close(self) -> None:
        """End the server."""
        self._exchange.close()

    @property
    def _layout(self) -> Layout:
        return layout_of(self.context.job, self.context.dataset)

    # --- orders ---

    def _use(self, order: orders.UseRule) -> None:
        """Let replicas and merges be those of this rule, which may keep the optimizer's state at another place."""
        self._exchange.close()
        self._settings = replace(self._settings, rule=order.rule)
        self.state = for_rule(self.state, order.rule, self.context.job, self._layout, self.context.workers.alive)
        self._restore()
        self._exchange = self._composed()

    def _probe(self, order: orders.ProbeServer) -> None:
        """Have the ways to the server measured. Where somebody is lost meanwhile they stay unknown, and it goes on."""
        found = self._probes.unmeasured(order.workers, self._shell.now)
        with self._shell.losses_told():
            found = self._probes.measure(order.workers, self._shell.now, training=self.life > 0)
        self._shell.tell(found)

    def _start_server(self, order: orders.StartServer) -> None:
        assert isinstance(self._exchange, ServerExchange)
        members = self.context.workers.members
        if not (members.server_alone or self._warned):
            self._warned, how = True, "no worker is set apart for the parameter server (--resources PS=1)"
            if members.full:
                how = f"the servers of other jobs leave no room for this one's on {', '.join(members.full)}"
            self.context.emit(Warned(message=f"{how}: {members.server.name} holds it as well"))
        self.life = order.life
        if (rule := self._settings.rule).merges_gradients and self.state.optimizers:  # of a run of version 0.1.0
            self.state = for_rule(self.state, rule, self.context.job, self._layout, ())
        self._restore()
        try:
            host = self._exchange.start(order, self.state)
        except WorkersLost as lost:  # whichever it is, the server has not started
            self._shell.tell(facts.WorkerGone(lost.names, "connection lost", self._shell.now))
            raise ServerLost from lost
        self._shell.tell(facts.ServerReady(order.life, host, self._shell.now))
        self.context.workers.retire_refused()

    def _rescue(self, _: orders.Rescue) -> None:
        assert isinstance(self._exchange, PeerExchange)
        self._shell.tell(facts.Rescued(self._exchange.rescue(self._optimizers), self._shell.now))

    def _join(self, order: orders.Join) -> None:
        self.life = order.life
        self._shell.work[order.replica] = self._exchange.join(order, self.state, self._optimizers, self._rests)

    def _start_rounds(self, started: Sequence[orders.StartRound]) -> None:
        for order in started:  # until its report says what is left, none of it may be pushed twice
            self._rests.pop(order.round.worker, None)
        self._shell.work.update(self._exchange.rounds(started))

    def _ask_waiting(self, order: orders.AskWaiting) -> None:
        self._shell.tell(self._exchange.waiting(order.overdue))

    def _snapshot(self) -> Snapshot | None:
        """Return the center; None, and told, where it is lost with a worker."""
        try:
            return self._exchange.snapshot()
        except WorkersLost as lost:
            if not self._settings.peers:
                raise
            self._shell.tell_lost(lost.names)
            self._shell.tell(facts.NotKept(self._shell.now))
            return None

    def _judge(self, order: orders.Judge) -> None:
        if (snapshot := self._snapshot()) is None:
            return
        weights, _ = exchanged(snapshot.center, snapshot.state or {})
        try:
            score = self.context.scoring.try_score(weights, "train", order.part)
        except WorkersLost as lost:
            self._shell.tell_lost(lost.names)
            self._shell.tell(facts.NotJudged(self._shell.now))
        else:
            self._shell.tell(facts.Judged(score, self._shell.now))

    def _restore(self) -> None:
        """Replicas that join go on with the optimizers, and the rests, of the state that was saved last."""
        self._optimizers, self._rests = dict(self.state.optimizers), dict(self.state.rests)

    def _go_back(self) -> None:
        self._restore()
        if isinstance(self._exchange, PeerExchange):
            self._exchange.rescued = False

    def _save(self, order: orders.Save) -> None:
        if (snapshot := self._snapshot()) is None:
            return
        self._count(snapshot)
        optimizers = worth_keeping(self._optimizers, order.replicas)
        rests = worth_keeping(self._rests, order.replicas)
        self._optimizers = dict(optimizers)
        weights, rule_state = exchanged(snapshot.center, snapshot.state or {})
        if snapshot.noise:
            rule_state[NOISE] = np.array(snapshot.noise)
        self.state = TrainingState(
            snapshot.version, order.epoch, weights, optimizers, order.book, order.validation, rule_state, rests
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
        """Keep the optimizer's state, and what its pushes have lost, that a replica reports at the end of its round."""
        if isinstance(fact, facts.RoundDone):
            del self._shell.work[fact.replica]
            self._keep_of(fact)

    def _keep_of(self, fact: facts.RoundDone) -> None:
        if (own := self._exchange.own_optimizer(fact)) is not None:
            self._optimizers[fact.replica] = own
        if fact.report.rest is not None:
            self._rests[fact.replica] = fact.report.rest

    def failed(self, name: str, error: Exception) -> Fact:
        """Return the fact that an error stands for. Raises WorkersLost where a loss led to it, and mistakes of ours."""
        if isinstance(error, OutOfStep | OutOfTurn | Stopped):
            try:
                self.context.workers.explain(error)
            except (OutOfStep, OutOfTurn, Stopped) as still:
                return facts.OutOfStep(self.life, str(still) or "a task was stopped", self._shell.now)
        if (failed := self._failed_worker(name, error)) is not None:
            return facts.WorkerGone((failed.name,), failed.reason, self._shell.now)
        if isinstance(error, PushRefused):
            error = self._refused(error)
        if isinstance(error, UserError):
            return facts.RoundFailed(name, self.life, error, self._shell.now)
        raise error

    def _refused(self, error: PushRefused) -> Exception:
        """Return what a refusal of the server is to people, if it is their error and none of ours."""
        rule, told = self._settings.rule, f"at the push of {error}"
        if error.code == Code.FINITE:
            return Diverged(f"push of {error}")
        if error.code == Code.MEMORY:
            if self._settings.peers:
                return Lost("a worker that adds up pieces", f"out of memory {told}", "lower train.batch_size")
            hosts = ", ".join(sorted(self.context.workers.hosts))
            remedy = "resume it with the server on a host with more memory, or in several parts (cluster.ps_shards)"
            return Lost(f"parameter server at {hosts}", f"out of memory {told}", remedy)
        if error.code == Code.FAILED and not type(rule).__module__.startswith("daskcnn."):
            return UserError(f"rule {type(rule).__name__}", f"it raised an error in a merge, {told}")
        return error

    def _failed_worker(self, name: str, error: Exception) -> WorkerFailed | None:
        """Return the worker that cannot go on, if an error says so.

        Raises ServerLost where the server is silent, or gone from its worker.
        """
        if isinstance(error, WorkerFailed):
            return error
        if name not in self.context.workers.alive:
            return None
        if isinstance(error, MemoryError):
            return WorkerFailed(name, OUT_OF_MEMORY)
        if not isinstance(error, OSError):
            return None
        hosts = self.context.workers.hosts
        self.context.workers.require_answers(hosts)
        if hosts and isinstance(error, Refused):
            raise ServerLost from error
        if not (hosts and isinstance(error, ConnectionError)):
            return WorkerFailed(name, f"its round ended with {type(error).__name__}: {error}")
        way = "is the way there blocked, by a firewall or a NetworkPolicy?"
        return WorkerFailed(name, f"it does not reach the parameter server at {', '.join(sorted(hosts))}; {way}")


def worth_keeping(optimizers: Mapping[str, T], replicas: Collection[str]) -> dict[str, T]:
    """Return the states of these replicas, behind those of as many lost ones, which may come back; the last ones."""
    gone = [name for name in optimizers if name not in replicas]
    there = [name for name in replicas if name in optimizers]
    return {name: optimizers[name] for name in (*gone[max(0, len(gone) - len(replicas)) :], *there)}
