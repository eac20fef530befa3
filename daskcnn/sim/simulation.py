"""Data-parallel training in simulated time: the driver of `cluster.data_parallel`, over the same server and rounds.

Nothing of the method is written here a second time: `ParameterServer`, `UpdateRule`, `Rounds` and the partitioners are
those of the cluster. What is here is time: how long a step, an exchange, a merge, a round's beginning take. Events are
those of a run's log, their times counted from the run's beginning.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from daskcnn.nn.score import Score
from daskcnn.partition.proportional import proportional
from daskcnn.partition.rounds import Round, Rounds
from daskcnn.ps import ParameterServer, Snapshot
from daskcnn.ps.bsp import BSP
from daskcnn.sim.agenda import Agenda
from daskcnn.sim.cluster import Cluster, Worker
from daskcnn.sim.host import EPOCH, Host, PeerToPeer
from daskcnn.sim.learners import Learner, TimingOnly
from daskcnn.sim.replica import SimulatedReplica
from daskcnn.sim.workload import Workload
from daskcnn.training.cadence import Cadence
from daskcnn.training.reports import RoundReport

Event = dict[str, Any]


class Simulation:
    """One run. `emit` takes its events, if a log is wanted; `learner` makes each worker's arithmetic, none by default.

    about: what the first event says besides: run, dataset, model. Raises ValueError where the rule needs more workers.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        *,
        seed: int = 0,
        learner: Callable[[], Learner] = TimingOnly,
        emit: Callable[[Event], None] | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self._about = {"run": "simulated", "seed": seed, **(about or {})}
        self.workload, self.cluster, self.rule = workload, cluster, workload.rule
        self.members = cluster.members()
        if len(self.members) < self.rule.fewest:
            raise ValueError(
                f"train.strategy = {workload.strategy!r} is for {self.rule.fewest} workers or more, and there "
                f"are {len(self.members)}; add one, or choose sgwu or agwu"
            )
        self._emit, self._agenda = emit, Agenda()
        self._interval, self._mark, self._best, self._worse = _Interval(0.0), 1, 0.0, 0
        self._joined: dict[str, None] = {}  # an ordered set
        self._joining: set[str] = set()
        self._held: list[RoundReport] = []  # came while the driver waited for others to join
        self._version = 0
        self.rounds = self._rounds()
        learners = [learner() for _ in self.members]
        self.server = ParameterServer(self.rule, learners[0].weights, epoch=EPOCH)
        self._host = self._made_host()
        cadence = Cadence(self.rule, workload.batch_size, workload.judged)
        self.replicas = {
            member.name: SimulatedReplica(
                member,
                member.speed.pace(np.random.default_rng([seed, index])),
                own,
                workload,
                cadence,
                self._host,
                self._agenda,
            )
            for index, (member, own) in enumerate(zip(self.members, learners, strict=True))
        }

    def _rounds(self) -> Rounds:
        workload = self.workload
        return Rounds(
            workload.partitioner,
            workload.samples,
            {member.name: member.seconds for member in self.members},
            epochs=workload.epochs,
            barrier=self.rule.barrier,
            passes=self.rule.passes(workload.epochs),
            swaps=self.rule.swaps,
            batch_size=workload.batch_size if workload.meets_within_rounds else None,
        )

    def _made_host(self) -> Host:
        workload, cluster = self.workload, self.cluster
        kind = PeerToPeer if isinstance(self.rule, BSP) and self.rule.exchange != "allreduce" else Host
        split = cluster.server.split(workload.shards)
        return kind(self.server, self._agenda, split, cluster.costs, wire=workload.wire, nbytes=workload.nbytes)

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        return self._agenda.now

    def run(self) -> Snapshot:
        """To the end; returns what the server holds then. Raises Diverged."""
        self._log(self._start_event())
        self._log({"event": "calibration", "workers": [_calibrated(member) for member in self.members]})
        self._issue(())
        with _seldom_collected():
            self._agenda.run()
        assert self.rounds.ended or self._stopping_early(), "nobody goes on"
        snapshot = self.server.snapshot()
        self._log({"event": "server", "server": EPOCH, **_counted(snapshot)})
        self._log({"event": "end", "status": "done"})
        return snapshot

    # --- the rounds ---

    def _issue(self, ended: Iterable[str]) -> None:
        """Start the rounds that are due; workers that ended one and have none now sit out, others join first."""
        before = self.rounds.allocation
        due = [] if self._stopping_early() else self.rounds.due()
        if self.rounds.allocation is not before:
            self._log({"event": "allocation", "sizes": self.rounds.allocation.sizes()})
        self._sit_out(ended, due)
        strangers = [round_.worker for round_ in due if round_.worker not in self._joined]
        if strangers:
            self._joining = set(strangers)
            for worker in strangers:
                self.replicas[worker].join(lambda worker: self._has_joined(worker, due))
        elif due:
            self._start(due)

    def _sit_out(self, ended: Iterable[str], due: list[Round]) -> None:
        """Nobody is to wait for those who have no round: behind a barrier once the others' is due, else at once."""
        if self.rule.barrier:
            ended = tuple(self._joined) if due else ()
        for worker in ended:
            if worker not in self.rounds.running:
                del self._joined[worker]
                self._host.leave(self.replicas[worker])

    def _has_joined(self, worker: str, due: list[Round]) -> None:
        """Once all have, the rounds start, and the driver takes the reports that came meanwhile."""
        self._joining.discard(worker)
        self._joined[worker] = None
        if not self._joining:
            self._start(due)
            held, self._held = self._held, []
            for report in held:
                self._take(report)

    def _start(self, due: list[Round]) -> None:
        scored, replicas = self._to_score(due), len(self.rounds.running)
        costs = self.cluster.costs
        at = self._agenda.now + costs.dispatch + (0.0 if self.rounds.done else costs.start)
        if isinstance(self._host, PeerToPeer):
            self._host.peers = [self.replicas[worker] for worker in self.rounds.running]
        for round_ in due:
            start = self.replicas[round_.worker].start
            if at > self._agenda.now:
                self._agenda.at(at, start, round_, scored.get(round_.worker), replicas, self._take)
            else:
                start(round_, scored.get(round_.worker), replicas, self._take)

    def _to_score(self, due: list[Round]) -> dict[str, tuple[int, int]]:
        """Who judges which part of the validation samples: behind a barrier everybody, else one each epoch."""
        lo, hi = self.workload.samples, self.workload.samples + self.workload.validation
        if self.rule.barrier:
            parts = self._parts(lo, hi)
            return parts if parts.keys() <= {r.worker for r in due} else {r.worker: (lo, hi) for r in due[:1]}
        issued = 1 - self.rounds.budget.left / self.rounds.presentations
        if issued * self.workload.epochs >= self._mark:
            self._mark = math.floor(issued * self.workload.epochs) + 1
            return {due[-1].worker: (lo, hi)}
        return {}

    def _parts(self, lo: int, hi: int) -> dict[str, tuple[int, int]]:
        """lo…hi cut over the workers in proportion to their nominal speed."""
        parts = {}
        sizes = proportional(hi - lo, [1 / member.seconds for member in self.members])
        for member, size in zip(self.members, sizes, strict=True):
            if size:
                parts[member.name] = (lo, lo + size)
            lo += size
        return parts

    def _take(self, report: RoundReport) -> None:
        """A round has ended."""
        if self._joining:
            self._held.append(report)
            return
        worker = report.round.worker
        self.rounds.finished(worker, report.busy / report.round.samples)
        self._record(report)
        self._issue((worker,))

    # --- what is recorded ---

    def _record(self, report: RoundReport) -> None:
        self._version = max(self._version, report.version)
        self._interval.add(report)
        if self._emit is not None:
            self._log(report.event(self._epochs_done()))
        round_ended = not self.rounds.running if self.rule.barrier else report.judged > 0
        if round_ended and self._interval.judged:
            self._look_at_center(report.lr)

    def _epochs_done(self) -> float:
        return self.rounds.done / self.workload.samples

    def _look_at_center(self, lr: float | None) -> None:
        interval, self._interval = self._interval, _Interval(self._agenda.now)
        seconds = self._agenda.now - interval.begun
        self._log(
            {
                "event": "epoch",
                "epoch": self._epochs_done(),
                "epochs": self.workload.epochs,
                "step": self._version,
                **_result(interval.trained),
                "validation": _result(interval.center),
                "samples_per_second": interval.samples / seconds if seconds else 0.0,
                "lr": lr,
                "seconds": seconds,
            }
        )
        if interval.center.samples:
            better = interval.center.accuracy > self._best
            self._best, self._worse = max(self._best, interval.center.accuracy), 0 if better else self._worse + 1

    def _stopping_early(self) -> bool:
        patience = self.workload.patience
        return patience is not None and self._worse >= patience

    def _start_event(self) -> Event:
        workload = self.workload
        return {
            "event": "start",
            **self._about,
            "strategy": workload.strategy,
            "partition": workload.partition,
            "increments": workload.partitioner.increments,
            "rule": workload.rule.model_dump(exclude_defaults=True),
            "epochs": workload.epochs,
            "batch_size": workload.batch_size,
            "samples": workload.samples,
            "validation_samples": workload.validation,
            "parameters": workload.numbers,
            "wire": workload.wire,
            "vector_bytes": workload.nbytes,
        }

    def _log(self, event: Event) -> None:
        if self._emit is not None:
            event["at"] = self._agenda.now
            self._emit(event)


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """The garbage collector looks at what comes and goes, seldom, and not at thousands of replicas each time."""
    usual = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


class _Interval:
    """What was reported since the last look at the center."""

    def __init__(self, begun: float) -> None:
        self.begun, self.samples, self.judged = begun, 0, 0
        self.trained, self.center = Score(0.0, 0, 0), Score(0.0, 0, 0)

    def add(self, report: RoundReport) -> None:
        self.samples += report.round.samples
        self.judged += report.judged
        if report.score is not None:
            self.trained += report.score
        if report.center is not None:
            self.center += report.center


def _result(score: Score) -> Event:
    return {"loss": score.loss, "accuracy": score.accuracy} if score.samples else {"loss": None, "accuracy": None}


def _counted(snapshot: Snapshot) -> Event:
    return {"merged": snapshot.merged, "repeated": snapshot.repeated, "refused": dict(snapshot.refused)}


def _calibrated(member: Worker) -> Event:
    return {
        "name": member.name,
        "address": "simulated",
        "host": "simulated",
        "device": member.kind,
        "processor": f"simulated {member.kind}",
        "threads": member.threads,
        "memory": 0,
        "images_per_second": member.images_per_second,
        "conv_seconds": member.conv_seconds or {},
    }
