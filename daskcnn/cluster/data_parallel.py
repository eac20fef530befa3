"""Data-parallel training: a replica on every worker, rounds of training, and a parameter server that merges them.

The driver hands out rounds (`partition.rounds`), one long task each, and looks round while they run. Workers talk to
the server (`cluster.actor`) themselves. Whoever is lost is taken out of the server's barrier and the allocation; when
the server's host is lost, a new server goes on from the last saved state as the next epoch.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from distributed import Future

from daskcnn.cluster.layers.messages import OutOfStep
from daskcnn.cluster.protocol import RoundOrder, RoundReport
from daskcnn.cluster.run_context import LOOK, NotYet, RunContext, ServerLost, WorkersLost
from daskcnn.cluster.server.hosts import Hosted, host_server
from daskcnn.cluster.session.tasks import join_run, train_round
from daskcnn.errors import ClusterError, Diverged, Interrupted, PushRefused
from daskcnn.job.network import initial_weights
from daskcnn.nn.score import Score
from daskcnn.partition import PARTITIONERS
from daskcnn.partition.allocation import Allocation
from daskcnn.partition.rounds import Round, Rounds
from daskcnn.ps import Snapshot, UpdateRule
from daskcnn.runs.state import TrainingState

PATIENCE = 5.0  # a round may take so many times what was expected, and stall_timeout on top
CALL = 60.0  # seconds the driver waits for the server to answer


@dataclass(frozen=True)
class Running:
    """A round under way: its task, or tasks that are cancelled like one; when it began, or last went on; how many
    seconds it should take from there.
    """

    work: Any
    begun: float
    expected: float


class Interval:
    """What was reported since the last look at the center."""

    def __init__(self) -> None:
        self.trained, self.center, self.begun = Score(0.0, 0, 0), Score(0.0, 0, 0), time.monotonic()

    def add(self, report: RoundReport) -> None:
        right = round(report.accuracy * report.samples)
        self.trained += Score(report.loss * report.samples, right, report.samples)
        if report.center is not None:
            self.center += report.center


class DataParallel:
    """Drives one run of an update rule and a partitioner over the workers of a context."""

    serverless: ClassVar[bool] = False
    learners: ClassVar[str] = "workers"  # what has a replica

    def __init__(self, context: RunContext, resumed: TrainingState | None) -> None:
        self.context, self.job = context, context.job
        assert self.job.rule is not None, "strategy layer has a driver of its own"
        self.rule: UpdateRule = self.job.rule
        if (there := self._replicas()) < (fewest := self.rule.fewest):
            strategy = self.job.train.strategy
            raise ClusterError(
                f"train.strategy = {strategy!r} is for {fewest} {self.learners} or more, and there are {there}; "
                "start more, or choose sgwu or agwu"
            )
        self.state = resumed or TrainingState(0, 0.0, initial_weights(self.job, context.dataset)[1], {}, {})
        self.best, self.worse = 0.0, 0  # validation accuracy, and looks at the center since
        self._epoch = 0
        self._actor: Any = None
        self._hosted: Hosted | None = None
        self._running: dict[str, Running] = {}
        self._told: Allocation | None = None  # what was logged last
        if not (context.members.server_alone or self.serverless):
            host = context.members.server.name
            message = f"no worker is set apart for the parameter server (--resources PS=1): {host} holds it as well"
            context.emit({"event": "warning", "message": message})

    def _replicas(self) -> int:
        """How many there are."""
        return len(self.context.alive)

    def train(self) -> TrainingState:
        """Train to the end and return the last state.

        Raises Diverged, Lost, or Interrupted once the state at that moment is saved.
        """
        while True:
            try:
                self._begin()
                self._run()
                return self._final()
            except ServerLost:
                self._move_server()
            except WorkersLost as lost:  # before their first round
                for worker in lost.names:
                    self.context.lose(worker, "connection lost")
            except OutOfStep as repeated:
                message = f"{repeated}: back to the checkpoint at epoch {self.state.epoch:.2f}"
                self.context.emit({"event": "warning", "message": message})
            except Interrupted:
                self._save_interrupted()
                raise
            except Diverged:
                self._count_refusals()
                raise
            finally:
                self._cancel_all()

    # --- starting from a state ---

    def _begin(self) -> None:
        """A server of a new epoch and rounds that go on from the present state."""
        book = self.state.book
        self.context.needs_server = True
        self._epoch = max(self._epoch, int(book.get("server_epoch", 0))) + 1
        self.best, self.worse = float(book.get("best", 0.0)), int(book.get("worse", 0))
        self._reports: queue.SimpleQueue[tuple[str, Future]] = queue.SimpleQueue()
        self._sessions: dict[str, int] = {}
        self._joined: set[str] = set()
        self._velocities = dict(self.state.velocities)
        self._version, self._interval = self.state.step, Interval()
        self._mark = math.floor(self.state.epoch) + 1  # the next whole epoch
        self.rounds = self._rounds()
        self._start_server()

    def _rounds(self) -> Rounds:
        train, seconds = self.job.train, self._calibrated()
        assert train.partition is not None, "resolved before the run"
        partitioner = PARTITIONERS[train.partition](train.increments or 1)
        rounds = Rounds(
            partitioner,
            self.context.samples,
            seconds,
            epochs=train.epochs,
            barrier=self.rule.barrier,
            passes=self.rule.passes(train.epochs),
            swaps=self.rule.swaps,
            batch_size=train.batch_size if self.rule.barrier and self.rule.period else None,
        )
        if self.state.book:
            rounds.restore(self.state.book["rounds"], tuple(seconds))
        return rounds

    def _calibrated(self) -> dict[str, float]:
        return {name: self.context.calibrations[name].seconds_per_sample for name in self.context.alive}

    def _start_server(self) -> None:
        state = self.state
        snapshot = Snapshot(
            state.weights, version=state.step, epoch=self._epoch - 1, state=dict(state.rule_state) or None
        )
        self._hosted = host_server(self.context, self.rule, snapshot, epoch=self._epoch)
        self._server, self._actor = self._hosted.at, self._hosted.handle
        self.context.hosts = self._hosted.hosts

    def _move_server(self) -> None:
        """The host, or one of them, is gone: another worker takes its place, from the last saved state."""
        self._actor = None
        lost = self._version - self.state.step
        server = self.context.new_host()
        self.context.emit(
            {
                "event": "warning",
                "message": f"the parameter server's worker is lost; a new server starts on {server.name} from the "
                f"checkpoint at epoch {self.state.epoch:.2f}, {lost} merges are done again",
            }
        )

    def _snapshot(self) -> Snapshot:
        """Center and state, as they are now. Raises ServerLost."""
        snapshot: Snapshot = self._call("snapshot")
        return snapshot

    def _save_interrupted(self) -> None:
        if self._actor is not None:
            with suppress(ServerLost):  # then the last saved state stands
                self._save()

    def _count_refusals(self) -> None:
        with suppress(ServerLost):  # the push that was refused is to be on record
            self._count(self._snapshot())

    # --- the rounds ---

    def _run(self) -> None:
        while True:
            try:
                self._issue()
                if not self._running:
                    return
                self.context.look_round()
                self._check_stalls()
                self._take_report()
            except WorkersLost as lost:
                self._lose(lost.names, "connection lost")

    def _issue(self) -> None:
        """Start the rounds that are due; their workers join first, all others leave the barrier."""
        due = [r for r in self._due() if r.worker not in self._running]
        if due or not self.rule.barrier:  # behind a barrier, who has ended a round before the others is in the next
            for idle in self._joined - self.rounds.running.keys():  # nobody is to wait for them
                self._leave(idle)
        self._join([r.worker for r in due if r.worker not in self._joined])
        scored = self._to_score(due)
        for round_ in due:
            self._start(round_, scored.get(round_.worker))

    def _due(self) -> list[Round]:
        """All rounds under way, those among them that are due now."""
        if not self._stopping_early():
            self.rounds.due()
        if self.rounds.allocation is not self._told:  # handed out, or left by a worker that is lost
            self._told = self.rounds.allocation
            self.context.emit({"event": "allocation", "sizes": self._told.sizes()})
        return list(self.rounds.running.values())

    def _join(self, workers: list[str]) -> None:
        """All of them before the first of their rounds starts: a barrier counts who has joined."""
        for worker in workers:
            self._sessions[worker] = self._sessions.get(worker, 0) + 1
        orders = {worker: replace(self._order(worker), velocity=self._velocities.get(worker)) for worker in workers}
        joins = {worker: self._submit_join(order) for worker, order in orders.items()}
        try:
            self.context.gather(joins, within=self.job.cluster.stall_timeout)
        finally:
            for join in joins.values():  # those that have ended by now are only forgotten
                join.cancel()
        self._joined |= set(workers)

    def _submit_join(self, order: RoundOrder) -> Future:
        return self.context.submit("join", join_run, order, worker=order.worker)

    def _order(self, worker: str) -> RoundOrder:
        return RoundOrder(self.context.name, self._epoch, worker, self._sessions[worker], self._server)

    def _to_score(self, due: list[Round]) -> dict[str, tuple[int, int]]:
        """Who judges which part of the validation samples: behind a barrier everybody, else one each epoch."""
        lo, hi = self.context.samples, len(self.context.dataset.train)
        if self.rule.barrier:
            parts = {name: (a, b) for name, a, b in self._parts(lo, hi)}
            return parts if parts.keys() <= {r.worker for r in due} else {r.worker: (lo, hi) for r in due[:1]}
        issued = 1 - self.rounds.budget.left / self.rounds.presentations
        if due and issued * self.job.train.epochs >= self._mark:
            self._mark = math.floor(issued * self.job.train.epochs) + 1
            return {due[-1].worker: (lo, hi)}
        return {}

    def _parts(self, lo: int, hi: int) -> Iterable[tuple[str, int, int]]:
        """lo…hi cut over those who judge the center, by their speed."""
        return self.context.parts(lo, hi)

    def _start(self, round_: Round, score: tuple[int, int] | None) -> None:
        replicas, reports = len(self.rounds.running), self._reports
        order = replace(self._order(round_.worker), round=round_, score=score, replicas=replicas)

        def watch(future: Future) -> None:
            future.add_done_callback(lambda done: reports.put((order.worker, done)))

        work, expected = self._work(order, round_, watch)
        self._running[round_.worker] = Running(work, time.monotonic(), expected)

    def _work(self, order: RoundOrder, round_: Round, watch: Callable[[Future], None]) -> tuple[Any, float]:
        """Start the round; seconds until something is to be heard of it. `watch` queues what a task comes to."""
        future = self.context.submit("round", train_round, order, worker=round_.worker)
        watch(future)
        return future, round_.samples * self.rounds.seconds[round_.worker]

    def _take_report(self) -> None:
        try:
            worker, future = self._reports.get(timeout=LOOK)
        except queue.Empty:
            return
        if not self._expects(worker, future):
            return  # of a worker that was given up
        try:
            result = self._result(worker, future)
        except NotYet:
            self._reports.put((worker, future))
            return
        except WorkersLost:
            self._reports.put((worker, future))  # it is only put off, unless it is of one of those
            raise
        self._take(worker, future, result)

    def _expects(self, worker: str, future: Future) -> bool:
        """Whether this is what is waited for."""
        running = self._running.get(worker)
        return running is not None and running.work is future

    def _take(self, worker: str, future: Future, report: Any) -> None:
        """The worker's round has ended."""
        del self._running[worker]
        self.rounds.finished(worker, report.busy / report.samples)
        self._record(report)

    def _result(self, worker: str, future: Future) -> Any:
        """Raises WorkersLost where the worker died with the task, Diverged where its push was not finite."""
        report = self._fetch(future)
        if report is None:
            raise WorkersLost([worker])
        return report

    def _fetch(self, future: Future) -> Any:
        try:
            return self.context.fetch(future)
        except PushRefused as error:
            if "NaN" in str(error):
                raise Diverged(f"push of {error}") from error
            raise

    def _check_stalls(self) -> None:
        """Give up workers that are overdue and not waiting for others."""
        limit = self.job.cluster.stall_timeout + PATIENCE * max(r.expected for r in self._running.values())
        now = time.monotonic()
        overdue = {worker for worker, running in self._running.items() if now - running.begun > limit}
        if overdue and (late := overdue - set(self._call("waiting"))):
            self._lose(late, f"no report for {limit:.0f} s")
            # the others may have waited for them until now
            self._running = {w: replace(running, begun=now) for w, running in self._running.items()}

    # --- who is gone ---

    def _lose(self, workers: Iterable[str], reason: str) -> None:
        for worker in workers:
            if running := self._running.pop(worker, None):
                running.work.cancel()
            samples = self.rounds.allocation.size(worker)
            self.context.lose(worker, reason, samples)
            self.rounds.lost(worker)
            if worker in self._sessions:  # it may have joined without our knowing
                self._leave(worker)

    def _leave(self, worker: str) -> None:
        self._joined.discard(worker)
        self._call("leave", worker, self._sessions[worker])

    def _call(self, method: str, *args: Any) -> Any:
        """Ask the server. Raises ServerLost where it does not answer."""
        try:
            return getattr(self._actor, method)(*args).result(timeout=CALL)
        except (OSError, RuntimeError) as error:
            raise ServerLost from error

    def _cancel_all(self) -> None:
        """Tasks stop at their next step once cancelled; the server goes with its future."""
        for running in self._running.values():
            running.work.cancel()
        self._running.clear()
        if self._hosted is not None:
            self._hosted.close()
            self._hosted = None

    # --- what is recorded and kept ---

    def _record(self, report: RoundReport, **more: Any) -> None:
        """`more` is logged with it."""
        self._version = max(self._version, report.version)
        self._velocities[report.worker] = report.velocity
        self._interval.add(report)
        self.context.emit(report.event(self._epochs_done()) | more)
        round_ended = not self.rounds.running if self.rule.barrier else report.center is not None
        if round_ended and self._interval.center.samples:
            self._look_at_center(report.lr)

    def _epochs_done(self) -> float:
        return self.rounds.done / self.context.samples

    def _look_at_center(self, lr: float) -> None:
        """At the end of a synchronous round, or once an epoch: the center's score, and a checkpoint if due."""
        interval, self._interval = self._interval, Interval()
        seconds, center, epoch = time.monotonic() - interval.begun, interval.center, self._epochs_done()
        self.context.emit(
            {
                "event": "epoch",
                "epoch": epoch,
                "epochs": self.job.train.epochs,
                "step": self._version,
                "loss": interval.trained.loss,
                "accuracy": interval.trained.accuracy,
                "validation": {"loss": center.loss, "accuracy": center.accuracy},
                "samples_per_second": interval.trained.samples / seconds,
                "lr": lr,
                "seconds": seconds,
            }
        )
        better = center.accuracy > self.best
        self.best, self.worse = max(self.best, center.accuracy), 0 if better else self.worse + 1
        if better or self.rounds.ended or epoch - self.state.epoch >= self.job.run.checkpoint_every:
            self._save(center)

    def _stopping_early(self) -> bool:
        patience = self.job.train.early_stopping
        return patience is not None and self.worse >= patience

    def _save(self, validation: Score | None = None) -> None:
        snapshot = self._snapshot()
        self._count(snapshot)
        book = {"rounds": self.rounds.to_dict(), "server_epoch": self._epoch, "best": self.best, "worse": self.worse}
        velocities = {w: v for w, v in self._velocities.items() if w in self.rounds.workers}
        self.state = TrainingState(
            snapshot.version,
            self._epochs_done(),
            snapshot.center,
            velocities,
            book,
            validation,
            snapshot.state or {},
        )
        self.context.save(self.state)

    def _count(self, snapshot: Snapshot) -> None:
        """Log what this server has merged and refused so far."""
        counted = {"merged": snapshot.merged, "repeated": snapshot.repeated, "refused": dict(snapshot.refused)}
        self.context.emit({"event": "server", "server": self._epoch, **counted})

    def _final(self) -> TrainingState:
        """The state at the end, its center judged; kept already where the last look at the center was at the end."""
        if self.state.validation is None or self.state.epoch < self._epochs_done():
            lo, hi = self.context.samples, len(self.context.dataset.train)
            self._save(self.context.score(self._snapshot().center, "train", lo, hi))
        return self.state
