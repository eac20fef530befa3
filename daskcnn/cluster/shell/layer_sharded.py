"""Layer-sharded training on a cluster: what a shell carries out for `training.coordinator.layer`.

The driver keeps the snapshot's arrays, and submits the steps of a segment ahead (`layers.step_graph`), each of which
chains to the one before through its shards. Placing the pieces anew also cuts the scheduler's memory of the chain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from distributed import Future

from daskcnn.arrays import Array
from daskcnn.cluster.layers.measurements import measure_links, settings_of
from daskcnn.cluster.layers.step_graph import LayerGraph, MinibatchStep
from daskcnn.cluster.layers.task_context import OutOfStep
from daskcnn.cluster.link.calls import WorkerFailed
from daskcnn.cluster.run.context import RunContext
from daskcnn.cluster.run.exchange import Watch
from daskcnn.cluster.shell.shell import Actions, Shell
from daskcnn.cluster.worker.session import Counters, await_release
from daskcnn.events import Spent
from daskcnn.job.network import at_rest, initial_weights, network_of, optimizer_of, pace_at, rate_of
from daskcnn.nn import OptimizerState
from daskcnn.nn.score import Score
from daskcnn.runs.state import TrainingState
from daskcnn.sharded.balance import ShareSearch, WorkerLinks
from daskcnn.sharded.cutting import stages_of
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.facts import Fact
from daskcnn.training.coordinator.layer import LayerCoordinator
from daskcnn.training.coordinator.layer_records import REPLICA, LayerSnapshot
from daskcnn.training.coordinator.roster import Measured
from daskcnn.training.coordinator.settings import STEPS_AHEAD


class Gathered:
    """Tasks whose results make a fact together."""

    def __init__(self, futures: Mapping[Any, Future], fact: Callable[[dict[Any, Any], float], Fact]) -> None:
        self._keys = {future.key: key for key, future in futures.items()}
        self._futures, self._fact, self._found = futures, fact, dict[Any, Any]()

    def expects(self, future: Future) -> bool:
        """True for a task whose result has not come."""
        key = self._keys.get(future.key)
        return key is not None and key not in self._found

    def take(self, future: Future, result: Any, now: float) -> list[Fact]:
        """Keep a result. Returns the fact once it is the last one."""
        self._found[self._keys[future.key]] = result
        return [self._fact(self._found, now)] if len(self._found) == len(self._futures) else []

    def cancel(self) -> None:
        """Drop the tasks, whose results are of no use. Dask's own cancel would take what hangs on a task with it."""
        self._futures = {}


class Segment:
    """Steps that are submitted ahead, each chained to the one before: from `next` on, and before `end`."""

    def __init__(self, life: int, order: orders.RunSegment, watch: Watch) -> None:
        self.life, self.next, self.end, self.scale, self._watch = life, order.begin, order.end, order.scale, watch
        self._flight: deque[tuple[MinibatchStep, Future]] = deque()
        self._scores: dict[Any, Score] = {}  # of steps behind one whose score has not come

    def submit(self, graph: LayerGraph, step: Callable[[int, float], MinibatchStep]) -> None:
        """Submit what may be ahead of the oldest step under way."""
        while self.next < self.end and len(self._flight) <= STEPS_AHEAD:
            following = step(self.next, self.scale)
            self._flight.append((following, graph.submit(following)))
            self._watch(Segment, self._flight[-1][1])
            self.next += 1

    def expects(self, future: Future) -> bool:
        """True for a step whose score has not come."""
        return future.key not in self._scores and any(future is own for _, own in self._flight)

    def take(self, future: Future, result: Score, now: float) -> list[Fact]:
        """Keep a step's score. Returns the steps that have ended, in order."""
        self._scores[future.key] = result
        found: list[Fact] = []
        while self._flight and self._flight[0][1].key in self._scores:
            step, ended = self._flight.popleft()
            found.append(facts.StepDone(self.life, step.number, self._scores.pop(ended.key), step.pace.lr, now))
        return found

    def cancel(self) -> None:
        """Drop the steps, whose scores are of no use. Dask's own cancel would take what hangs on a task with it."""
        self.end = self.next
        self._flight.clear()


class LayerSharded:
    """Kernels sharded over the workers of a context. A `Strategy` of the shell; its state is the snapshot."""

    def __init__(self, context: RunContext, resumed: TrainingState | None) -> None:
        self.context, self.job = context, context.job
        self.layout, weights = initial_weights(self.job, context.dataset)
        self.stages = stages_of(network_of(self.job, context.dataset))
        still = at_rest(self.job, self.layout, weights)
        self.state = self._saved = resumed or TrainingState(0, 0.0, weights, {REPLICA: still}, {})
        settings = settings_of(self.job, context.dataset)
        self.settings, self._balancing = replace(settings, balancing=self.balance), settings.balancing
        snapshot = LayerSnapshot(self.state.step, self.state.epoch, self.state.book, self.state.validation)
        self.coordinator = LayerCoordinator(self.settings, snapshot)
        self._optimizer, self._rate = optimizer_of(self.job), rate_of(self.job.train.schedule)
        self.life = 0  # whose pieces are placed
        self._graph: LayerGraph | None = None
        self._collected: tuple[Array, OptimizerState] = self.state.weights, self.state.optimizers[REPLICA]

    def actions(self, shell: Shell) -> Actions:
        """Return the actions of layer sharding."""
        self._shell = shell
        return {
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
        }

    def balance(self, home: str, workers: Mapping[str, Measured], links: WorkerLinks) -> ShareSearch:
        """The search for the best shares. The context's calibrations are brought up to date by these measurements."""
        known = self.context.calibrations
        for name, own in workers.items():
            conv, fixed = dict(own.row.conv_seconds), dict(own.row.conv_fixed)
            known[name] = replace(known[name], seconds_per_sample=own.seconds, conv_seconds=conv, conv_fixed=fixed)
        return self._balancing(home, workers, links)

    def ahead(self) -> None:
        """Submit the segment's next steps."""
        if isinstance(segment := self._shell.work.get(Segment), Segment):
            segment.submit(self._placed, self._step)

    def taken(self, fact: Fact) -> None:
        """Drop what has made its fact."""
        if isinstance(fact, facts.PiecesCollected | facts.Judged | facts.Counted):
            del self._shell.work[type(fact)]

    def failed(self, name: Any, error: Exception) -> Fact:
        """Return the fact that tasks are out of step, or that a worker cannot go on. Raises any other error."""
        if isinstance(error, OutOfStep):
            return facts.OutOfStep(self.life, str(error), self._shell.now)
        if isinstance(error, WorkerFailed):
            return facts.WorkerGone((error.name,), error.reason, self._shell.now)
        raise error

    def leaves(self, address: str) -> None:
        """Tell that a worker is to leave. It waits until its kernels are in a snapshot."""
        self._shell.ask(address, await_release)
        self._shell.tell_leaving(address)

    def close(self) -> None:
        """Forget which pieces are placed."""
        self._graph, self.life = None, 0

    # --- orders ---

    @property
    def _placed(self) -> LayerGraph:
        assert self._graph is not None, "placed"
        return self._graph

    def _step(self, number: int, scale: float) -> MinibatchStep:
        samples, train = self.context.samples, self.job.train
        presentation, position = divmod(number, self.settings.steps_per_epoch)
        begin, size = position * train.batch_size, train.batch_size
        presented = presentation * samples + begin  # the rate follows samples: an epoch's last minibatch may be smaller
        pace = pace_at(train, self._rate, presented / (samples * train.epochs), scale)
        return MinibatchStep(number, presentation, position, pace, min(size, samples - begin))

    def _gather(
        self, kind: type[Fact], futures: Mapping[Any, Future], fact: Callable[[dict[Any, Any], float], Fact]
    ) -> None:
        """Wait for these results, which make a fact of this kind."""
        if not futures:
            self._shell.tell(fact({}, self._shell.now))
            return
        self._shell.work[kind] = Gathered(futures, fact)
        for future in futures.values():
            self._shell.watch(kind, future)

    def _measure_links(self, order: orders.MeasureLinks) -> None:
        links = measure_links(self.context, order.home, order.workers)
        self._shell.tell(facts.LinksMeasured(order.life, links, self._shell.now))

    def _place(self, order: orders.Place) -> None:
        graph, balance = self._graph, order.shares.balance
        if graph is None or graph.balance is not balance:
            graph = self._graph = LayerGraph(self.context, self.stages, self.layout, balance=balance)
        graph.generation = order.life - 1  # of what a placing that failed half-way has left
        trained = self._optimizer.exchanged(self.state.weights, self.state.optimizers[REPLICA])
        graph.place(*trained, order.step)
        self.life = order.life

    def _run_segment(self, order: orders.RunSegment) -> None:
        if order.life == self.life:  # else the pieces could not be placed, and the coordinator is told why
            self._shell.work[Segment] = Segment(self.life, order, self._shell.watch)

    def _stop_segment(self, order: orders.StopSegment) -> None:
        segment = self._shell.work.get(Segment)
        if order.life == self.life and isinstance(segment, Segment):
            segment.end = segment.next
            self._shell.tell(facts.SegmentStopped(order.life, segment.end, self._shell.now))
        else:
            self._shell.tell(facts.OutOfStep(order.life, "the pieces were not placed", self._shell.now))

    def _collect(self, order: orders.Collect) -> None:
        graph = self._placed

        def collected(pieces: dict[Any, Any], at: float) -> Fact:
            self._collected = self._optimizer.exchanged(*graph.joined(pieces))
            return facts.PiecesCollected(order.life, order.step, bool(np.isfinite(self._collected[0]).all()), at)

        self._gather(facts.PiecesCollected, graph.pieces(), collected)

    def _keep(self, order: orders.Keep) -> None:
        weights, optimizer = self._collected
        optimizers = {REPLICA: optimizer}
        self.state = TrainingState(order.step, order.epoch, weights, optimizers, order.book, order.validation)

    def _judge(self, order: orders.Judge) -> None:
        futures = self.context.scoring.submit(self.state.weights, "train", order.part)
        nothing = Score(0.0, 0, 0)
        self._gather(facts.Judged, futures, lambda found, at: facts.Judged(sum(found.values(), nothing), at))

    def _save(self, order: orders.Save) -> None:
        self.context.save(self.state)
        self._saved = self.state
        self._shell.tell(facts.Saved(self.state.step, self._shell.now))

    def _restore(self, order: orders.Restore) -> None:
        self.state = self._saved
        self._collected = self.state.weights, self.state.optimizers[REPLICA]

    def _ask_counters(self, order: orders.AskCounters) -> None:
        def counted(found: dict[str, Counters], at: float) -> Fact:
            return facts.Counted(order.ask, {w: Spent(name=w, **asdict(own)) for w, own in found.items()}, at)

        placed = self._placed.balance.compute  # those that came since have made no step
        asked = {w: self._placed.counters(w) for w in self.coordinator.roster.alive if w in placed}
        self._gather(facts.Counted, asked, counted)

    def _ask_waiting(self, order: orders.AskWaiting) -> None:
        """Find workers that the scheduler has not heard of meanwhile, and those with tasks: these wait for others."""
        processing = self.context.connection.processing()
        alive = self.coordinator.roster.alive  # without those that measure themselves
        busy = [name for name in alive if processing.get(self.context.workers.alive[name].address)]
        silent = tuple(self.context.workers.unheard(self.settings.stall_timeout / 2))
        self._shell.tell(facts.Waits(frozenset(), self._shell.now, {REPLICA: silent or tuple(busy)}, silent))
