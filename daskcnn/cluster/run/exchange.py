"""The two values that a data-parallel run is composed of: its replicas, and the way that merges travel.

Here are the usual ones: a replica is a worker, and merges travel through a parameter server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeAlias

from distributed import Future

from daskcnn.cluster.link.calls import ServerLost, Unanswered, WorkersLost, answer_of_actor, cancel
from daskcnn.cluster.messages import RoundOrder
from daskcnn.cluster.run.context import Dispatch, RunContext
from daskcnn.cluster.run.results import Name
from daskcnn.cluster.run.server_hosts import Hosted, host_server, ready_host
from daskcnn.cluster.worker.tasks import join_run, train_round
from daskcnn.job.network import center_descent_of, layout_of
from daskcnn.nn import OptimizerState
from daskcnn.ps import RuleState, Snapshot, UpdateRule, Vector
from daskcnn.ps.average import exchanged
from daskcnn.ps.gradient_noise import NOISE
from daskcnn.ps.vectors import cut_state
from daskcnn.runs.state import TrainingState
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.lone_optimizer import LoneOptimizer
from daskcnn.training.round_report import RoundReport


class PendingWork(Protocol):
    """Tasks whose results a shell waits for."""

    def expects(self, future: Future) -> bool:
        """Return True if it is one of those that are waited for now."""

    def take(self, future: Future, result: Any, now: float) -> list[facts.Fact]:
        """Go on with a result. Returns what the coordinator is to know. Raises Diverged."""

    def cancel(self) -> None:
        """Give up all that is under way."""


class TaskWork:
    """One task, and the fact that its result stands for."""

    def __init__(self, future: Future, fact: Callable[[Any, float], facts.Fact]) -> None:
        self._future, self._fact = future, fact

    def expects(self, future: Future) -> bool:
        """Return True if this is the task."""
        return future is self._future

    def take(self, future: Future, result: Any, now: float) -> list[facts.Fact]:
        """The fact that the result stands for."""
        return [self._fact(result, now)]

    def cancel(self) -> None:
        """Cancel the task."""
        cancel([self._future])


Watch: TypeAlias = Callable[[Name, Future], None]
"""Has the shell take the result of this replica's task once the task has ended."""
OptimizerStates: TypeAlias = Mapping[str, OptimizerState]
"""By replica."""
Rests: TypeAlias = Mapping[str, Vector]
"""By replica, what its pushes in int8 have lost."""


class Replicas(Protocol):
    """Replicas of one kind: a worker each, or a group of workers each."""

    def join(self, order: RoundOrder) -> Future:
        """Join the server; ends when the replica holds the center."""

    def start(self, order: RoundOrder, watch: Watch) -> PendingWork:
        """Train a round and exchange what comes of it."""

    def stuck(self, replica: str) -> tuple[str, ...]:
        """The workers of the replica that have something to do; all of them where none has."""


class WorkerReplicas:
    """A round is one long task of its worker."""

    def __init__(self, dispatch: Dispatch) -> None:
        self._submit = dispatch.submit

    def join(self, order: RoundOrder) -> Future:
        """Let the worker join the server; ends when it holds the center."""
        return self._submit("join", join_run, order, worker=order.worker)

    def start(self, order: RoundOrder, watch: Watch) -> PendingWork:
        """Submit the worker's round as one task."""
        future = self._submit("round", train_round, order, worker=order.worker)
        watch(order.worker, future)

        def done(report: RoundReport | None, at: float) -> facts.RoundDone:
            if report is None:  # it was stopped: the worker is about to be found lost
                raise WorkersLost([order.worker])
            return facts.RoundDone(order.worker, order.life, order.session, report, at)

        return TaskWork(future, done)

    def stuck(self, replica: str) -> tuple[str, ...]:
        """The worker itself."""
        return (replica,)


CALL = 60.0  # seconds without an answer of the server, at most the stall timeout, after which its hosts are asked
SLOWEST = 1e6  # bytes a second of the slowest way to the driver for which a snapshot is waited


def _patience(stall: float, nbytes: int) -> tuple[float, float]:
    """Seconds from one question to the server's hosts to the next, and in all, for an answer of this size."""
    return min(CALL, stall), stall + nbytes / SLOWEST


class ServerExchange:
    """A run's server, one after the other, and the replicas that talk to it."""

    def __init__(self, context: RunContext, rule: UpdateRule, replicas: Replicas, watch: Watch) -> None:
        self._context, self._rule, self._replicas, self._watch = context, rule, replicas, watch
        self._known = rule if context.job.rule != rule else None
        self._hosted: Hosted | None = None
        self._lone = LoneOptimizer(None)
        self._readied = ready_host(context) if context.workers.members.server_alone else None

    def start(self, order: orders.StartServer, state: TrainingState) -> str:
        """Start a server from this state; returns its host. Raises ServerLost, WorkersLost."""
        context = self._context
        context.workers.needs_server, context.workers.hosts = True, frozenset()  # those of the one before may be gone
        if order.moved or context.workers.server_recalled:
            context.workers.new_host()
        center, rule_state = exchanged(state.weights, dict(state.rule_state))
        noise = tuple(map(float, rule_state.pop(NOISE, ())))
        kept: dict[str, Any] = {"state": rule_state or None, "noise": noise}
        snapshot = Snapshot(center, version=state.step, life=order.life - 1, **kept)
        self._hosted = host_server(context, self._rule, snapshot, life=order.life)
        job, merges = context.job, self._rule.merges_gradients
        self._lone = LoneOptimizer(center_descent_of(job, layout_of(job, context.dataset)) if merges else None)
        context.workers.hosts = self._hosted.hosts
        return context.workers.members.server.name

    def join(self, order: orders.Join, state: TrainingState, optimizers: OptimizerStates, rests: Rests) -> PendingWork:
        """Let a replica begin a session with the server."""
        own: dict[str, Any] = {"optimizer": optimizers.get(order.replica), "rest": rests.get(order.replica)}
        sent = replace(self._order(order.replica, order), **own)
        future = self._replicas.join(sent)
        self._watch(order.replica, future)
        return TaskWork(future, lambda _, at: facts.Joined(order.replica, order.life, order.session, at))

    def rounds(self, started: Sequence[orders.StartRound]) -> Mapping[str, PendingWork]:
        """Start these rounds; returns what is under way, by replica."""
        found = {}
        for order in started:
            joined = self._order(order.round.worker, order)
            begun = self._lone.starting(order, self.snapshot, self._go_on_with)
            sent = replace(joined, round=order.round, score=order.score, q=order.q, scale=order.scale, optimizer=begun)
            found[order.round.worker] = self._replicas.start(sent, self._watch)
        return found

    def _order(self, replica: str, order: orders.Join | orders.StartRound) -> RoundOrder:
        assert self._hosted is not None, "started"
        return RoundOrder(self._context.name, order.life, replica, order.session, self._hosted.at, rule=self._known)

    def own_optimizer(self, done: facts.RoundDone) -> OptimizerState | None:
        """Return the state that a replica keeps; None where it is the server's, which a worker that is alone had."""
        return None if self._lone.reported(done) else done.report.optimizer

    def leave(self, order: orders.Leave) -> None:
        """Free a replica's place at the server's barrier. Raises ServerLost."""
        self._call("leave", order.replica, order.session)

    def waiting(self, overdue: Sequence[str]) -> facts.Waits:
        """Replicas that wait at the server, and the workers that an overdue replica waits for. Raises ServerLost."""
        if self._hosted is not None:  # nobody gets past a range whose host hangs
            self._context.workers.require_answers(self._hosted.hosts)
        waiting, heard = self._call("waiting")
        stuck = {replica: self._replicas.stuck(replica) for replica in overdue if replica not in waiting}
        return facts.Waits(frozenset(waiting), time.monotonic(), stuck, heard=heard)

    def snapshot(self) -> Snapshot:
        """The server's center and rule state. Raises ServerLost."""
        snapshot: Snapshot = self._call("snapshot")
        return replace(snapshot, state=self._lone.added_to(snapshot.state or {}))

    def _go_on_with(self, state: RuleState) -> None:
        """Let the server go on with these vectors of its state, between two rounds. Raises ServerLost."""
        if (hosted := self._hosted) is None or not hosted.ranges:
            self._call("go_on_with", state)
            return
        self._call("snapshot")  # behind it all ranges have made the merges so far
        for own, at in zip(hosted.ranges, hosted.at.ranges, strict=True):
            self._answer(hosted, partial(own.go_on_with, cut_state(state, at.lo, at.hi)), at.hi - at.lo)

    def close(self) -> None:
        """The server goes with its futures."""
        self._context.workers.needs_server = False
        if self._hosted is not None:
            self._hosted.close()
            self._hosted = None

    def _call(self, method: str, *args: Any) -> Any:
        """Ask the server. Raises ServerLost where it does not answer, or a host of it."""
        if (hosted := self._hosted) is None:
            raise ServerLost
        numbers = hosted.at.length if method in ("snapshot", "go_on_with") else 0
        return self._answer(hosted, partial(hosted.ask, method, *args), numbers)

    def _answer(self, hosted: Hosted, ask: Callable[[], Any], numbers: int) -> Any:
        """Ask a part of the server, and wait for its answer. Raises as `_call`.

        numbers: of the vectors that travel. They take their time over a slow link: the hosts answer meanwhile.
        """
        context = self._context
        turn, left = _patience(context.job.cluster.stall_timeout, 8 * numbers)  # the rule keeps as much as the center
        try:
            answer = ask()
            while True:
                try:
                    return answer_of_actor(answer, within=turn, check=self._heed)
                except Unanswered:
                    if (left := left - turn) <= 0:
                        raise
                context.workers.require_answers(hosted.hosts)
        except (OSError, RuntimeError) as error:
            raise ServerLost from error

    def _heed(self) -> None:
        """Raise Interrupted after a signal, ServerLost where the scheduler had dropped the client and the server."""
        self._context.connection.heed()
        if self._context.connection.was_cut:
            raise ServerLost
