"""Merges that travel through a parameter server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from daskcnn.cluster.link.calls import answer_of_actor
from daskcnn.cluster.link.lost import ServerLost
from daskcnn.cluster.messages import RoundOrder
from daskcnn.cluster.run.context import RunContext
from daskcnn.cluster.run.exchange import OptimizerStates, Replicas, Watch
from daskcnn.cluster.run.server_hosts import Hosted, host_server
from daskcnn.cluster.run.work import PendingWork, TaskWork
from daskcnn.nn import OptimizerState
from daskcnn.ps import Snapshot, UpdateRule
from daskcnn.runs.state import TrainingState
from daskcnn.training.coordinator import facts, orders

CALL = 60.0  # seconds the driver waits for the server to answer


class ServerExchange:
    """A run's server, one after the other, and the replicas that talk to it."""

    def __init__(self, context: RunContext, rule: UpdateRule, replicas: Replicas, watch: Watch) -> None:
        self._context, self._rule, self._replicas, self._watch = context, rule, replicas, watch
        self._hosted: Hosted | None = None

    def start(self, order: orders.StartServer, state: TrainingState) -> str:
        """Start a server from this state; returns its host. Raises ServerLost, WorkersLost."""
        context = self._context
        context.workers.needs_server = True
        if order.moved:
            context.workers.new_host()
        rule_state = dict(state.rule_state) or None
        snapshot = Snapshot(state.weights, version=state.step, epoch=order.life - 1, state=rule_state)
        self._hosted = host_server(context, self._rule, snapshot, epoch=order.life)
        context.workers.hosts = self._hosted.hosts
        return context.workers.members.server.name

    def form(self, order: orders.FormGroups) -> None:
        """Make groups of workers. Raises WorkersLost."""
        self._replicas.form(order)

    def join(self, order: orders.Join, state: TrainingState, optimizers: OptimizerStates) -> PendingWork:
        """Let a replica begin a session with the server."""
        sent = replace(self._order(order.replica, order), optimizer=optimizers.get(order.replica))
        future = self._replicas.join(sent)
        future.add_done_callback(lambda done: self._watch(order.replica, done))
        return TaskWork(future, lambda _, at: facts.Joined(order.replica, order.life, order.session, at))

    def rounds(self, started: Sequence[orders.StartRound]) -> Mapping[str, PendingWork]:
        """Start these rounds; returns what is under way, by replica."""
        found = {}
        for order in started:
            joined = self._order(order.round.worker, order)
            sent = replace(joined, round=order.round, score=order.score, scale=order.scale)
            found[order.round.worker] = self._replicas.start(sent, self._watch)
        return found

    def _order(self, replica: str, order: orders.Join | orders.StartRound) -> RoundOrder:
        assert self._hosted is not None, "started"
        return RoundOrder(self._context.name, order.life, replica, order.session, self._hosted.at)

    def leave(self, order: orders.Leave) -> None:
        """Free a replica's place at the server's barrier. Raises ServerLost."""
        self._call("leave", order.replica, order.session)

    def waiting(self, overdue: Sequence[str]) -> tuple[frozenset[str], dict[str, tuple[str, ...]]]:
        """Replicas that wait at the server, and the workers that an overdue replica waits for. Raises ServerLost."""
        waiting = frozenset(self._call("waiting"))
        return waiting, {replica: self._replicas.stuck(replica) for replica in overdue if replica not in waiting}

    def snapshot(self) -> Snapshot:
        """The server's center and rule state. Raises ServerLost."""
        snapshot: Snapshot = self._call("snapshot")
        return snapshot

    def rescue(self, optimizers: dict[str, OptimizerState]) -> int | None:
        """Fail: the server has the center."""
        raise AssertionError("a run with a server goes on from its snapshot")

    def close(self) -> None:
        """The server goes with its futures."""
        if self._hosted is not None:
            self._hosted.close()
            self._hosted = None

    def _call(self, method: str, *args: Any) -> Any:
        """Ask the server. Raises ServerLost where it does not answer."""
        if self._hosted is None:
            raise ServerLost
        try:
            answer = getattr(self._hosted.handle, method)(*args)
            return answer_of_actor(answer, within=CALL, check=self._context.connection.heed)
        except (OSError, RuntimeError) as error:
            raise ServerLost from error
