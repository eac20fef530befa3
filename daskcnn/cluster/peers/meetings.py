"""BSP without a server: replicas exchange their weights peer to peer (`asa`, `asa16`), meeting after meeting.

A round is one task of each worker, which all run at the same time and meet in it (`meeting_tasks`). The driver takes
the center from a worker when it judges or saves it. When a worker is lost, the others begin the round again from the
last center that one of them has. Their training since then is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from secrets import token_hex
from typing import Any

from distributed import Future

from daskcnn.arrays import Array
from daskcnn.cluster.link.calls import WorkersLost, ask_workers, cancel
from daskcnn.cluster.peers import meeting_tasks
from daskcnn.cluster.peers.pieces import Peers
from daskcnn.cluster.run.context import RunContext
from daskcnn.cluster.run.exchange import OptimizerStates, PendingWork, Rests, TaskWork, Watch
from daskcnn.job.network import layout_of
from daskcnn.nn import OptimizerState
from daskcnn.ps import Snapshot, UpdateRule
from daskcnn.ps.bsp import ASA
from daskcnn.runs.state import TrainingState
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.facts import Fact
from daskcnn.training.round_report import RoundReport


class PeerExchange:
    """Lets the replicas meet, and knows which of them have the present center. state: it begins from.

    rescued: True if the next life begins from the present center, else from the state that was saved last.
    """

    def __init__(
        self, context: RunContext, rule: UpdateRule, state: TrainingState, watch: Watch, tell: Callable[[Fact], None]
    ) -> None:
        self._context, self._watch, self._tell = context, watch, tell
        # a rule that is not the job's own is that of a worker alone, whose weights do not travel
        wire = context.job.cluster.wire if rule == context.job.rule else context.job.model.dtype
        self._asa = ASA.of(rule, wire)
        self._peers = Peers(context.name, 0, (), layout_of(context.job, context.dataset).size)
        self._holders: tuple[str, ...] = ()  # of the present center
        self._version = state.step
        self._kept: tuple[int, Array] = (state.step, state.weights)  # a center that the driver has, and its version
        self.rescued = False
        self._round: PeerRound | None = None

    # --- joining ---

    def join(self, order: orders.Join, state: TrainingState, optimizers: OptimizerStates, rests: Rests) -> PendingWork:
        """Give the worker the present center, unless it has it already."""
        if order.life != self._peers.life:
            self._begin_life(order.life, state)
        submit, worker = self._context.dispatch.submit, order.replica
        center = self._context.dispatch.send(self._center(), worker)
        given = self._peers, worker, optimizers.get(worker), self._version, center, self._asa
        future = submit("begin", meeting_tasks.begin_life, *given, worker=worker)
        self._watch(worker, future)
        return TaskWork(future, lambda _, at: facts.Joined(worker, order.life, order.session, at))

    def _begin_life(self, life: int, state: TrainingState) -> None:
        """Begin from the rescued center, else from the last saved state."""
        self._context.workers.needs_server = False
        if self.rescued:
            self._center()  # its holders know it by their old life
        else:
            self._version, self._kept = state.step, (state.step, state.weights)
        self.rescued, self._holders = False, ()
        self._peers = replace(self._peers, life=life, names=(), addresses=(), secret=token_hex(16))

    def _center(self) -> Array:
        """Return the center of the last meeting. Raises WorkersLost."""
        version, center = self._kept
        if version != self._version:
            context = self._context
            first = next((name for name in self._holders if name in context.workers.alive), None)
            if first is None:
                raise WorkersLost(self._holders)
            future = context.dispatch.submit("center", meeting_tasks.center_of, self._peers, worker=first)
            center = context.results.gather({first: future}, within=context.job.cluster.stall_timeout)[first]
            self._kept = self._version, center
        return center

    # --- rounds ---

    def rounds(self, started: Sequence[orders.StartRound]) -> Mapping[str, PendingWork]:
        """The meetings of one round of these workers, who all make the same number of steps."""
        names = tuple(sorted(order.round.worker for order in started))
        addresses = tuple(self._context.workers.alive[name].address for name in names)
        self._peers, self._holders = replace(self._peers, names=names, addresses=addresses), names
        tasks = {}
        for order in started:
            start, worker = (
                meeting_tasks.RoundStart(order.round, order.session, order.score, order.scale),
                order.round.worker,
            )
            given = self._peers, self._version, start
            tasks[worker] = self._context.dispatch.submit("round", meeting_tasks.train_round, *given, worker=worker)
            self._watch(worker, tasks[worker])
        self._round = PeerRound(started, tasks, self._version, self._met)
        return dict.fromkeys(names, self._round)

    def _met(self, version: int) -> None:
        """A round has ended with the center of this version."""
        self._version, self._round = version, None

    def own_optimizer(self, done: facts.RoundDone) -> OptimizerState | None:
        """Return the worker's own state."""
        return done.report.optimizer

    def leave(self, order: orders.Leave) -> None:
        """A worker that sits out has no place that others wait at."""

    def waiting(self, overdue: Sequence[str]) -> facts.Waits:
        """Return the overdue replicas that wait for others: those that say so, or have made their round.

        Where they have met since the workers were asked last, the round goes on: that is told first.
        """
        alive, round_ = self._context.workers.alive, self._round
        if round_ is None:
            return facts.Waits(frozenset(overdue), time.monotonic())
        late = {alive[name].address: name for name in round_.late() if name in alive}
        client, heed = self._context.dispatch.client, self._context.connection.heed
        asked = ask_workers(client, meeting_tasks.at_meeting, late, self._context.name, check=heed)
        if round_.goes_on(max((version for _, version in asked.given.values()), default=0)):
            for fact in round_.progress(time.monotonic()):
                self._tell(fact)
        silent = [late[address] for address in (*asked.silent, *asked.failed)]
        at_work = [late[address] for address, (waits, _) in asked.given.items() if not waits]
        return facts.Waits(frozenset(overdue) - frozenset(silent or at_work), time.monotonic())

    # --- the center ---

    def snapshot(self) -> Snapshot:
        """The center of the last meeting. Raises WorkersLost."""
        return Snapshot(self._center(), version=self._version, life=self._peers.life)

    def rescue(self, optimizers: dict[str, OptimizerState]) -> int | None:
        """Ask the workers that are left which center they have; else it is the one that the driver has.

        Returns its version, None where the last one is lost. Raises WorkersLost where a worker does not answer.
        """
        context = self._context
        left = [worker for worker in self._holders if worker in context.workers.alive]
        args = meeting_tasks.rescue, self._peers
        asked = {worker: context.dispatch.submit("rescue", *args, worker=worker) for worker in left}
        found = context.results.gather(asked, within=context.job.cluster.stall_timeout)
        if not found:
            self.rescued = self._kept[0] == self._version
            return self._version if self.rescued else None
        optimizers |= {worker: optimizer for worker, (_, optimizer) in found.items()}
        self._version = max(version for version, _ in found.values())
        self._holders = tuple(worker for worker, (version, _) in found.items() if version == self._version)
        self.rescued = True
        return self._version

    def close(self) -> None:
        """Give up the round under way."""
        if self._round is not None:
            self._round.cancel()
            self._round = None


class PeerRound:
    """A round, under way for all of its workers. version: it begins from. met: is told that after the last meeting."""

    def __init__(
        self,
        started: Sequence[orders.StartRound],
        tasks: Mapping[str, Future],
        version: int,
        met: Callable[[int], None],
    ) -> None:
        self._started = {order.round.worker: order for order in started}
        self._tasks, self._version, self._met = dict(tasks), version, met
        self._reports: dict[str, RoundReport] = {}

    def expects(self, future: Future) -> bool:
        """Return True if the round waits for this task."""
        return any(future is task for worker, task in self._tasks.items() if worker not in self._reports)

    def late(self) -> tuple[str, ...]:
        """Workers whose tasks have not ended."""
        return tuple(worker for worker, task in self._tasks.items() if not task.done())

    def goes_on(self, version: int) -> bool:
        """Return True if a worker has come to this version, and none had when this was asked before."""
        before, self._version = self._version, max(version, self._version)
        return self._version > before

    def progress(self, now: float) -> list[Fact]:
        """The fact that the round goes on, for each worker."""
        return [facts.Progress(worker, order.life, order.session, now) for worker, order in self._started.items()]

    def take(self, future: Future, result: Any, now: float) -> list[Fact]:
        """Take a report. All of them are told together: a worker that is lost before leaves a round to be repeated."""
        worker = next(worker for worker, task in self._tasks.items() if task is future)
        if result is None:  # it was stopped: a worker is about to be found lost
            raise WorkersLost([worker])
        self._reports[worker] = result
        if len(self._reports) < len(self._tasks):
            return []
        self._met(result.version)
        return [
            facts.RoundDone(worker, order.life, order.session, self._reports[worker], now)
            for worker, order in self._started.items()
        ]

    def cancel(self) -> None:
        """Cancel the tasks: training stops at its next step, and a wait for others ends."""
        cancel(self._tasks.values())
