"""BSP without a server: replicas exchange their weights peer to peer (`asa`, `asa16`), meeting after meeting.

A meeting of k workers is k tasks of training, k·(k-1) that cut pieces which travel, and k that add up, each pinned to
its worker. The next meeting's training begins with the adoption of the sums, so meetings form a chain, and the driver
submits them ahead. It takes the center from a worker when it judges or saves it. When a worker is lost, the others
begin the round again from the last center that one of them has. Their training since then is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distributed import Future

from daskcnn.arrays import Array
from daskcnn.cluster.peers import meeting_tasks
from daskcnn.cluster.run.context import Dispatch, RunContext
from daskcnn.cluster.run.exchange import OptimizerStates, PendingWork, TaskWork, Watch
from daskcnn.job.network import initial_weights
from daskcnn.nn import OptimizerState
from daskcnn.ps import Snapshot
from daskcnn.runs.state import TrainingState
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.facts import Fact
from daskcnn.training.round_report import RoundReport


@dataclass(frozen=True)
class Meeting:
    """A meeting that was submitted: its tasks by worker, in the order of the names."""

    version: int
    steps: Mapping[str, Future]
    cuts: tuple[Future, ...]
    sums: Mapping[str, Future]

    def cancel(self) -> None:
        """Cancel all tasks of the meeting."""
        for future in (*self.steps.values(), *self.cuts, *self.sums.values()):
            future.cancel()


class PeerGraph:
    """Submits the meetings of one life of a run."""

    def __init__(self, dispatch: Dispatch, peers: meeting_tasks.Peers) -> None:
        self._submit, self.peers = dispatch.submit, peers

    def meet(self, version: int, starts: Mapping[str, meeting_tasks.RoundStart], before: Meeting | None) -> Meeting:
        """Train from the center of this version, adopted from the meeting before, and exchange the results.

        starts: by worker, where a round begins.
        """
        peers, submit, sums = self.peers, self._submit, list(before.sums.values()) if before else []
        steps = {
            name: submit("train", meeting_tasks.train, peers, version, starts.get(name), sums, worker=name)
            for name in peers.names
        }
        cuts = {
            (giver, taker): submit("cut", meeting_tasks.cut, peers, version, taker, steps[giver], worker=giver)
            for taker in peers.names
            for giver in peers.names
            if giver != taker
        }
        added, stepped = {}, list(steps.values())
        for taker in peers.names:
            pieces = [cuts[giver, taker] for giver in peers.names if giver != taker]
            added[taker] = submit("sum", meeting_tasks.add_up, peers, version, stepped, pieces, worker=taker)
        return Meeting(version, steps, tuple(cuts.values()), added)

    def adopt(self, last: Meeting, task: Callable[..., Any] = meeting_tasks.adopt) -> dict[str, Future]:
        """Let all workers adopt the meeting's sums, in tasks that no later task needs the meeting for.

        task: `adopt`, or `end_round`, which reports the round as well.
        """
        args = task, self.peers, last.version + 1, list(last.sums.values())
        return {worker: self._submit("adopt", *args, worker=worker) for worker in self.peers.names}


AHEAD = 2  # meetings submitted before the oldest has ended


class PeerExchange:
    """Lets the replicas meet, and knows which of them have the present center."""

    def __init__(self, context: RunContext, watch: Watch, period: int | None) -> None:
        self._context, self._watch, self._period = context, watch, period
        layout, weights = initial_weights(context.job, context.dataset)
        self._peers = meeting_tasks.Peers(context.name, 0, (), layout.size)
        self._holders: tuple[str, ...] = ()  # of the present center
        self._version = 0
        self._kept: tuple[int, Array] = (0, weights)  # a center that the driver has, and its version
        self._rescued = False
        self._round: PeerRound | None = None

    # --- joining ---

    def join(self, order: orders.Join, state: TrainingState, optimizers: OptimizerStates) -> PendingWork:
        """Give the worker the present center, unless it has it already."""
        if order.life != self._peers.life:
            self._begin_life(order.life, state)
        submit, worker = self._context.dispatch.submit, order.replica
        center = self._context.dispatch.send(self._center(), [worker])
        given = self._peers, worker, optimizers.get(worker), self._version, center
        future = submit("begin", meeting_tasks.begin_life, *given, worker=worker)
        self._watch(worker, future)
        return TaskWork(future, lambda _, at: facts.Joined(worker, order.life, order.session, at))

    def _begin_life(self, life: int, state: TrainingState) -> None:
        """Begin from the rescued center, else from the last saved state."""
        self._context.workers.needs_server = False
        if self._rescued:
            self._center()  # its holders know it by their old life
        else:
            self._version, self._kept = state.step, (state.step, state.weights)
        self._rescued, self._holders = False, ()
        self._peers = replace(self._peers, life=life, names=())

    def _center(self) -> Array:
        """Return the center of the last meeting. Raises WorkersLost."""
        version, center = self._kept
        if version != self._version:
            context, first = self._context, self._holders[0]
            future = context.dispatch.submit("center", meeting_tasks.center_of, self._peers, worker=first)
            center = context.results.gather({first: future}, within=context.job.cluster.stall_timeout)[first]
            self._kept = self._version, center
        return center

    # --- rounds ---

    def rounds(self, started: Sequence[orders.StartRound]) -> Mapping[str, PendingWork]:
        """The meetings of one round of these workers, who all make the same number of steps."""
        names = tuple(sorted(order.round.worker for order in started))
        self._peers, self._holders = replace(self._peers, names=names), names
        graph = PeerGraph(self._context.dispatch, self._peers)
        chain = self._context.job.cluster.chain
        self._round = PeerRound(graph, started, self._version, self._period, chain, self._watch, self._met)
        self._round.advance()
        return dict.fromkeys(names, self._round)

    def _met(self, version: int) -> None:
        """A round has ended with the center of this version."""
        self._version, self._round = version, None

    def leave(self, order: orders.Leave) -> None:
        """A worker that sits out has no place that others wait at."""

    def waiting(self, overdue: Sequence[str]) -> tuple[frozenset[str], dict[str, tuple[str, ...]]]:
        """Return the overdue replicas that wait for others: those that answer and whose part has ended."""
        late = self._round.late() if self._round is not None else ()
        silent = self._context.workers.unheard(self._context.job.cluster.stall_timeout)
        blamed = silent or (late if len(late) < len(self._peers.names) else ())
        return frozenset(overdue) - frozenset(blamed), {}

    # --- the center ---

    def snapshot(self) -> Snapshot:
        """The center of the last meeting. Raises WorkersLost."""
        return Snapshot(self._center(), version=self._version, life=self._peers.life)

    def rescue(self, optimizers: dict[str, OptimizerState]) -> int | None:
        """Ask the workers that are left which center they have. Raises WorkersLost where one does not answer."""
        context = self._context
        left = [worker for worker in self._holders if worker in context.workers.alive]
        args = meeting_tasks.rescue, self._peers
        asked = {worker: context.dispatch.submit("rescue", *args, worker=worker) for worker in left}
        found = context.results.gather(asked, within=context.job.cluster.stall_timeout)
        if not found:
            return None
        optimizers |= {worker: optimizer for worker, (_, optimizer) in found.items()}
        self._version = max(version for version, _ in found.values())
        self._holders = tuple(worker for worker, (version, _) in found.items() if version == self._version)
        self._rescued = True
        return self._version

    def close(self) -> None:
        """Give up the round under way."""
        if self._round is not None:
            self._round.cancel()
            self._round = None


class PeerRound:
    """The meetings of a round, under way for all of its workers.

    chain: meetings after which the chain of tasks is cut. met: is told the version after the last meeting.
    """

    def __init__(
        self,
        graph: PeerGraph,
        started: Sequence[orders.StartRound],
        version: int,
        period: int | None,
        chain: int,
        watch: Watch,
        met: Callable[[int], None],
    ) -> None:
        self._graph, self._watch, self._met, self._version, self._chain = graph, watch, met, version, chain
        self._started = {order.round.worker: order for order in started}
        steps = started[0].round.steps
        self._count = -(-steps // period) if steps and period else 1
        self._made = 0
        self._last: Meeting | None = None
        self._flight: deque[Meeting] = deque()
        self._stepped: dict[Any, meeting_tasks.Stepped] = {}  # by key
        self._waits = dict.fromkeys(self._started, 0.0)
        self._settling: dict[str, Future] = {}
        self._ending: dict[str, Future] = {}
        self._reports: dict[str, RoundReport] = {}

    def expects(self, future: Future) -> bool:
        """Return True if the round waits for this task now."""
        return future.key in self._awaited()

    def _awaited(self) -> dict[Any, str]:
        """Workers by the key of the task that is waited for."""
        steps = (item for meeting in self._flight for item in meeting.steps.items())
        waited = [*steps, *self._settling.items(), *self._ending.items()]
        return {future.key: worker for worker, future in waited if future.key not in self._stepped}

    def late(self) -> tuple[str, ...]:
        """Workers whose part of what is waited for first has not ended."""
        first = self._flight[0].steps if self._flight else self._settling or self._ending
        return tuple(worker for worker, future in first.items() if not future.done())

    def advance(self) -> None:
        """Submit meetings up to `AHEAD` ahead of those that have ended."""
        submitted: Mapping[str, Future]
        while not self._settling and len(self._flight) <= AHEAD:
            last, ended = self._last, self._made == self._count
            if ended or (self._made and self._made % self._chain == 0 and last is not None):
                if self._flight or self._ending or last is None:
                    return
                if ended:
                    submitted = self._ending = self._graph.adopt(last, meeting_tasks.end_round)
                else:  # cut the chain: no later task depends on the meetings so far
                    submitted = self._settling = self._graph.adopt(last)
                    self._last = None
            else:
                submitted = self._meet()
            for worker, future in submitted.items():
                self._watch(worker, future)

    def _meet(self) -> Mapping[str, Future]:
        """Submit the next meeting. Returns its training by worker."""
        starts: dict[str, meeting_tasks.RoundStart] = {}
        if not self._made:
            started = self._started.items()
            starts = {w: meeting_tasks.RoundStart(order.round, order.score, order.scale) for w, order in started}
        self._last = self._graph.meet(self._version + self._made, starts, self._last)
        self._made += 1
        self._flight.append(self._last)
        return self._last.steps

    def take(self, future: Future, result: Any, now: float) -> list[Fact]:
        """Go on with the result of a step, a settled chain or a report."""
        worker = self._awaited()[future.key]
        found: list[Fact] = []
        if worker in self._ending:
            wait = min(result.communication, self._waits[worker])  # for the slowest worker (eq. 8)
            self._reports[worker] = result._replace(wait=wait, communication=result.communication - wait)
            del self._ending[worker]
            return [] if self._ending else self._done(now)
        if worker in self._settling:
            del self._settling[worker]
        else:
            self._stepped[future.key] = result
            found = self._progress(now)
        self.advance()
        return found

    def _progress(self, now: float) -> list[Fact]:
        """Take the meetings whose training has ended, and note how long each worker waited in them."""
        found: list[Fact] = []
        while self._flight and all(each.key in self._stepped for each in self._flight[0].steps.values()):
            steps = self._flight.popleft().steps
            seconds = {worker: self._stepped.pop(each.key).seconds for worker, each in steps.items()}
            for worker, own in seconds.items():
                self._waits[worker] += max(seconds.values()) - own
            found += [facts.Progress(worker, order.life, order.session, now) for worker, order in self._started.items()]
        return found

    def _done(self, now: float) -> list[Fact]:
        self._met(self._version + self._count)
        return [
            facts.RoundDone(worker, order.life, order.session, self._reports[worker], now)
            for worker, order in self._started.items()
        ]

    def cancel(self) -> None:
        """Cancel the meetings under way; training stops at its next step."""
        for meeting in self._flight:
            meeting.cancel()
        self._flight.clear()
