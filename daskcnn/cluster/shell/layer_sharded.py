"""Layer-sharded training on a cluster: the coordinator's orders become tasks, tasks' results become facts.

What happens next is decided in `daskcnn.training.coordinator.layer`. The driver keeps the snapshot's arrays, submits
the steps of a segment ahead (`layers.graph`), each of which chains to the one before through its shards, and takes
results as they come. Placing the pieces anew also cuts the scheduler's memory of the chain.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from distributed import Future

from daskcnn.arrays import Array
from daskcnn.cluster.layers.measurements import measure_links, settings_of
from daskcnn.cluster.layers.step_graph import LayerGraph, MinibatchStep
from daskcnn.cluster.layers.task_context import OutOfStep
from daskcnn.cluster.link.calls import NotYet
from daskcnn.cluster.link.members import Member
from daskcnn.cluster.run.admission import calibrated, submit_calibration
from daskcnn.cluster.run.context import RunContext
from daskcnn.cluster.run.workers import LOOK
from daskcnn.cluster.shell.shell import BROKEN, Heard, facts_of, look_round
from daskcnn.cluster.worker.session import Counters
from daskcnn.errors import UserError
from daskcnn.events import Spent
from daskcnn.job.network import at_rest, initial_weights, network_of, optimizer_of, pace_at, rate_of
from daskcnn.nn import OptimizerState
from daskcnn.nn.score import Score
from daskcnn.runs.state import TrainingState
from daskcnn.sharded import ShareSearch, WorkerLinks, stages_of
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.facts import Fact
from daskcnn.training.coordinator.layer import LayerCoordinator
from daskcnn.training.coordinator.layer_records import REPLICA, LayerSnapshot
from daskcnn.training.coordinator.orders import Order
from daskcnn.training.coordinator.roster import Measured
from daskcnn.training.coordinator.settings import STEPS_AHEAD


@dataclass
class Awaited:
    """Tasks whose results make a fact together. found: the results that have come."""

    futures: Mapping[Any, Future]
    fact: Callable[[dict[Any, Any], float], Fact]
    found: dict[Any, Any] = field(default_factory=dict)

    @property
    def left(self) -> list[Future]:
        """The tasks whose results have not come."""
        return [future for key, future in self.futures.items() if key not in self.found]


class LayerSharded:
    """Carries out one run of plain SGD over the workers of a context.

    Attributes
    ----------
    state : the snapshot.
    """

    def __init__(self, context: RunContext, resumed: TrainingState | None, heard: Heard | None = None) -> None:
        self.context, self.job, self._heard = context, context.job, heard
        self.layout, weights = initial_weights(self.job, context.dataset)
        self.stages = stages_of(network_of(self.job, context.dataset))
        still = at_rest(self.job, self.layout, weights)
        self.state = self._saved = resumed or TrainingState(0, 0.0, weights, {REPLICA: still}, {})
        settings = settings_of(self.job, context.dataset)
        self.settings, self._balancing = replace(settings, balancing=self.balance), settings.balancing
        snapshot = LayerSnapshot(self.state.step, self.state.epoch, self.state.book, self.state.validation)
        self.coordinator = LayerCoordinator(self.settings, snapshot)
        self._optimizer = optimizer_of(self.job)
        self._rate = rate_of(self.job.train.schedule)
        self._facts: deque[Fact] = deque()
        self._error: UserError | None = None
        self._graph: LayerGraph | None = None
        self._life = 0  # whose pieces are placed
        self._candidates: dict[str, Member] = {}
        self._calibrating: dict[str, Future] = {}
        self._flight: deque[tuple[MinibatchStep, Future]] = deque()
        self._next = self._end = 0  # the next step to submit, and the first that is not
        self._scale = 1.0  # of the learning rate
        self._awaited: list[Awaited] = []
        self._collected: tuple[Array, OptimizerState] = weights, still
        self._orders: dict[type, Callable[[Any], None]] = {
            orders.Calibrate: self._calibrate,
            orders.MeasureLinks: self._measure_links,
            orders.Place: self._place,
            orders.RunSegment: self._run_segment,
            orders.StopSegment: self._stop_segment,
            orders.Collect: self._collect,
            orders.Keep: self._keep,
            orders.Judge: self._judge,
            orders.Save: self._save,
            orders.Restore: self._restore,
            orders.AskCounters: self._ask_counters,
            orders.AskWaiting: self._ask_waiting,
            orders.Dismiss: self._dismiss,
            orders.CancelAll: self._cancel_all,
            orders.Log: self._log,
            orders.End: self._finish,
        }

    def balance(self, home: str, workers: Mapping[str, Measured], links: WorkerLinks) -> ShareSearch:
        """The search for the best shares. The context's calibrations are brought up to date by these measurements."""
        known = self.context.calibrations
        for name, own in workers.items():
            conv, fixed = dict(own.row.conv_seconds), dict(own.row.conv_fixed)
            known[name] = replace(known[name], seconds_per_sample=own.seconds, conv_seconds=conv, conv_fixed=fixed)
        return self._balancing(home, workers, links)

    def train(self) -> TrainingState:
        """Train to the end and return the last state.

        Raises
        ------
        Diverged, Lost, Interrupted, ClusterError : the run has ended early; what was to be saved is saved.
        """
        now = time.monotonic()
        self._candidates = dict(self.context.workers.alive)
        self.context.workers.alive.clear()  # until they are calibrated
        self._facts += [facts.WorkerReady(name, member.kind, now) for name, member in self._candidates.items()]
        while not self.coordinator.ended:
            if not self._facts:
                self._follow()
            fact = self._facts.popleft()
            found = self.coordinator.handle(fact)
            if self._heard is not None:
                self._heard(fact, found)
            for order in found:
                self._carry_out(order)
        if self._error is not None:
            raise self._error
        return self.state

    # --- facts ---

    def _follow(self) -> None:
        """Wait for a moment, until something happens; what has happened is queued."""
        self._facts += look_round(self.context, time.monotonic())
        if self._facts:
            return
        try:
            self._submit()
            self._take_results()
            if not self._facts:
                self._wait()
        except OutOfStep as repeated:
            self._facts.append(facts.OutOfStep(self._life, str(repeated), time.monotonic()))
        except BROKEN as broken:
            self._facts += facts_of(self.context, broken, time.monotonic())
        except NotYet:
            pass
        self._facts.append(facts.Tick(time.monotonic()))

    def _submit(self) -> None:
        """Submit what may be ahead of the oldest step under way."""
        while self._next < self._end and len(self._flight) <= STEPS_AHEAD:
            assert self._graph is not None
            step = self._step(self._next)
            self._flight.append((step, self._graph.submit(step)))
            self._next += 1

    def _step(self, number: int) -> MinibatchStep:
        samples, train = self.context.samples, self.job.train
        presentation, position = divmod(number, self.settings.steps_per_epoch)
        begin, size = position * train.batch_size, train.batch_size
        presented = presentation * samples + begin  # the rate follows samples: an epoch's last minibatch may be smaller
        progress = presented / (samples * train.epochs)
        pace = pace_at(train, self._rate, progress, self._scale)
        return MinibatchStep(number, presentation, position, pace, min(size, samples - begin))

    def _take_results(self) -> None:
        """The oldest step's score, and all that is complete besides. Raises NotYet, and what tasks raise."""
        self._take_calibrations()
        while self._flight and self._flight[0][1].done():
            step, future = self._flight[0]
            score = self.context.results.fetch(future)
            self._flight.popleft()
            self._facts.append(facts.StepDone(self._life, step.number, score, step.pace.lr, time.monotonic()))
        for awaited in list(self._awaited):
            if all(future.done() for future in awaited.left):
                for key, future in awaited.futures.items():
                    if key not in awaited.found:
                        awaited.found[key] = self.context.results.fetch(future)
                self._awaited.remove(awaited)
                self._facts.append(awaited.fact(awaited.found, time.monotonic()))

    def _take_calibrations(self) -> None:
        for worker, future in list(self._calibrating.items()):
            if future.done():
                self._facts.append(calibrated(self.context, worker, future, time.monotonic()))
                del self._calibrating[worker]

    def _wait(self) -> None:
        waiting = [*self._calibrating.values(), *[future for _, future in list(self._flight)[:1]]]
        waiting += [future for awaited in self._awaited for future in awaited.left if not future.done()]
        if waiting:
            self.context.results.turn(waiting)
        else:
            time.sleep(LOOK)  # nothing is under way: the stall clock ends that

    # --- orders ---

    def _carry_out(self, order: Order) -> None:
        try:
            self._orders[type(order)](order)
        except BROKEN as broken:
            self._facts += facts_of(self.context, broken, time.monotonic())

    def _calibrate(self, order: orders.Calibrate) -> None:
        self.context.workers.alive[order.worker] = self._candidates[order.worker]
        self._calibrating[order.worker] = submit_calibration(self.context, order.worker)

    def _measure_links(self, order: orders.MeasureLinks) -> None:
        self.context.links = measure_links(self.context, order.home)
        self._facts.append(facts.LinksMeasured(order.life, self.context.links, time.monotonic()))

    def _place(self, order: orders.Place) -> None:
        graph, balance = self._graph, order.shares.balance
        if graph is None or graph.balance is not balance:
            graph = self._graph = LayerGraph(self.context, self.stages, self.layout, balance=balance)
        graph.generation = order.life - 1  # of what a placing that failed half-way has left
        trained = self._optimizer.exchanged(self.state.weights, self.state.optimizers[REPLICA])
        graph.place(*trained, order.step)
        self._life = order.life

    def _run_segment(self, order: orders.RunSegment) -> None:
        if order.life == self._life:  # else the pieces could not be placed, and the coordinator is told why
            self._next, self._end, self._scale = order.begin, order.end, order.scale

    def _stop_segment(self, order: orders.StopSegment) -> None:
        now = time.monotonic()
        if order.life == self._life:
            self._end = self._next
            self._facts.append(facts.SegmentStopped(order.life, self._end, now))
        else:
            self._facts.append(facts.OutOfStep(order.life, "the pieces were not placed", now))

    def _collect(self, order: orders.Collect) -> None:
        graph = self._graph
        assert graph is not None

        def collected(pieces: dict[Any, Any], at: float) -> Fact:
            self._collected = self._optimizer.exchanged(*graph.joined(pieces))
            return facts.PiecesCollected(order.life, order.step, bool(np.isfinite(self._collected[0]).all()), at)

        self._awaited.append(Awaited(graph.pieces(), collected))

    def _keep(self, order: orders.Keep) -> None:
        weights, optimizer = self._collected
        optimizers = {REPLICA: optimizer}
        self.state = TrainingState(order.step, order.epoch, weights, optimizers, order.book, order.validation)

    def _judge(self, order: orders.Judge) -> None:
        futures = self.context.scoring.submit(self.state.weights, "train", order.lo, order.hi)
        self._awaited.append(
            Awaited(futures, lambda found, at: facts.Judged(sum(found.values(), Score(0.0, 0, 0)), at))
        )

    def _save(self, order: orders.Save) -> None:
        self.context.save(self.state)
        self._saved = self.state
        self._facts.append(facts.Saved(self.state.step, time.monotonic()))

    def _restore(self, order: orders.Restore) -> None:
        self.state = self._saved

    def _ask_counters(self, order: orders.AskCounters) -> None:
        graph = self._graph
        assert graph is not None

        def counted(found: dict[str, Counters], at: float) -> Fact:
            return facts.Counted(order.ask, {w: Spent(name=w, **asdict(own)) for w, own in found.items()}, at)

        self._awaited.append(
            Awaited({worker: graph.counters(worker) for worker in self.context.workers.alive}, counted)
        )

    def _ask_waiting(self, order: orders.AskWaiting) -> None:
        """Workers that the scheduler has not heard of meanwhile, else those with tasks: they wait for others' data."""
        processing = self.context.connection.processing()
        busy = [name for name, member in self.context.workers.alive.items() if processing.get(member.address)]
        stuck = tuple(self.context.workers.unheard(self.settings.stall_timeout / 2) or busy)
        self._facts.append(facts.Waits(frozenset(), time.monotonic(), {REPLICA: stuck}))

    def _dismiss(self, order: orders.Dismiss) -> None:
        self._calibrating.pop(order.worker, None)
        self.context.workers.alive.pop(order.worker, None)

    def _cancel_all(self, order: orders.CancelAll) -> None:
        """Nobody wants what is under way any more; Dask's own cancel would take what hangs on a task with it."""
        self._flight.clear()
        self._awaited.clear()
        self._graph, self._life, self._next, self._end = None, 0, 0, 0

    def _log(self, order: orders.Log) -> None:
        self.context.emit(order.event)

    def _finish(self, order: orders.End) -> None:
        self._error = order.error
