"""Layer-sharded training in simulated time, on a cluster that changes meanwhile: a shell of its coordinator.

A step takes the time of its plan (`sharded_step`), in which each worker computes at its pace. A snapshot takes as long
as the weights and as many numbers of the optimizer need to the driver and back, whose link is the server's. Judging
takes all workers' time together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from daskcnn.events import CalibratedWorker, EpochEnded, Event, RunEnded, RunStarted, Spent, StepsEnded
from daskcnn.job.tables import Job
from daskcnn.nn.score import Score
from daskcnn.sharded.balance import ShareSearch, WorkerLinks
from daskcnn.sim.cluster import SimulatedCluster
from daskcnn.sim.host import Agenda
from daskcnn.sim.papers_costs import ShardedStep
from daskcnn.sim.sharded_step import Direct
from daskcnn.sim.speeds import Slowest
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.facts import Fact
from daskcnn.training.coordinator.layer import LayerCoordinator
from daskcnn.training.coordinator.roster import Measured
from daskcnn.training.coordinator.settings import STEPS_AHEAD, LayerSettings
from daskcnn.training.coordinator.shares import Shares


class ShardedSimulation:
    """One run.

    sharding: the network over all workers that there are at some time. samples: trained on. nbytes: of the weights.
    seed: of the workers' varying speeds. about: further fields of the first event.
    """

    def __init__(
        self,
        sharding: Direct,
        cluster: SimulatedCluster,
        job: Job,
        samples: int,
        nbytes: int,
        *,
        seed: int = 0,
        emit: Callable[[Event], None],
        about: Mapping[str, Any],
    ) -> None:
        self._sharding, self._about, self._emit = sharding, about, emit
        self._members = {member.name: member for member in sharding.workers}
        settings = LayerSettings.of(job, samples, self._balance, 0)
        self._settings, self._nbytes = replace(settings, wanted={}, least={}, lowers=False), 2 * nbytes
        self._driver = cluster.server.bandwidth or math.inf
        self._agenda = Agenda()
        self.coordinator = LayerCoordinator(self._settings)
        self.end: orders.End | None = None
        self._facts: list[Fact] = []
        self._turn = 0  # of what is under way; an earlier one is given up
        self._life = self._done = self._last = 0  # the life that is placed, steps that have ended, the segment's end
        self._paces = {
            member.name: member.speed.pace(np.random.default_rng([seed, index]))
            for index, member in enumerate(sharding.workers)
        }
        self._shares: Shares | None = None
        self._step: ShardedStep | None = None
        self._names, self._home = tuple[str, ...](), 0  # of the step's workers
        # since the counters were read: steps, and the sum of how many times as long each worker computed in them
        self._spent, self._times = 0, defaultdict[str, float](float)
        self._over = cache(self._made)
        self._carry_out: dict[type, Callable[[Any], None]] = {
            orders.Calibrate: self._calibrate,
            orders.MeasureLinks: lambda order: self._tell(facts.LinksMeasured(order.life, WorkerLinks(), self.now)),
            orders.Place: self._place,
            orders.RunSegment: self._run_segment,
            orders.StopSegment: self._stop_segment,
            orders.Collect: lambda order: self._after(
                self._moved(), lambda: facts.PiecesCollected(order.life, order.step, True, self.now)
            ),
            orders.Judge: self._judge,
            orders.AskCounters: self._count,
            orders.CancelAll: lambda order: self._cancel_all(),
            **dict.fromkeys((orders.Keep, orders.Save, orders.Restore, orders.Dismiss), lambda order: None),
            orders.Log: lambda order: self._log(order.event),
            orders.End: self._end,
        }

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        return self._agenda.now

    def run(self) -> None:
        """Run to the end. Raises ClusterError where no worker is usable, and Lost where none is left."""
        settings = self._settings
        of_job = {"epochs": settings.epochs, "batch_size": settings.batch_size, "samples": settings.samples}
        start = {"run": "simulated", "strategy": "layer", "simulated": True, **of_job}
        self._log(RunStarted(**start | dict(self._about)))
        for member in self._members.values():
            ready = facts.WorkerReady(member.name, member.kind, member.arrives)
            if member.arrives:
                self._agenda.at(member.arrives, self._tell_all, [ready])
            else:
                self._tell(ready)
            if member.leaves is not None:
                leaving = facts.WorkerLeaving((member.name,), "it leaves", member.leaves)
                self._agenda.at(member.leaves, self._tell_all, [leaving])
            if member.dies is not None:
                self._agenda.at(member.dies, self._tell_all, [facts.WorkerGone((member.name,), "it dies", member.dies)])
        self._tell_all()
        self._agenda.run()
        assert self.end is not None, "nobody goes on"
        if self.end.error is not None:
            raise self.end.error
        self._log(RunEnded(status=self.end.status))

    # --- facts ---

    def _tell(self, fact: Fact) -> None:
        """Queue a fact that an order leads to at once, until all orders are carried out."""
        self._facts.append(fact)

    def _tell_all(self, found: Iterable[Fact] = ()) -> None:
        self._facts += found
        while self._facts and self.end is None:
            for order in self.coordinator.handle(self._facts.pop(0)):
                self._carry_out[type(order)](order)

    def _after(self, seconds: float, fact: Callable[[], Fact]) -> None:
        """Tell a fact after these seconds, if no order to give up came before."""
        self._agenda.at(self.now + seconds, self._tell_in_turn, self._turn, fact)

    def _tell_in_turn(self, turn: int, fact: Callable[[], Fact]) -> None:
        if turn == self._turn:
            self._tell_all([fact()])

    def _cancel_all(self) -> None:
        self._turn += 1
        self._life = 0

    # --- orders ---

    def _calibrate(self, order: orders.Calibrate) -> None:
        member, batch = self._members[order.worker], self._settings.batch_size
        names, each = self._sharding.names, self._sharding.conv_seconds(member)
        row = CalibratedWorker(
            name=member.name,
            address="simulated",
            host="simulated",
            device=member.kind,
            threads=member.threads,
            images_per_second=member.rate(batch),
            conv_seconds={name: seconds / batch for name, seconds in zip(names, each, strict=True)},
        )
        self._tell(facts.Calibrated(member.name, member.step(batch) / batch, row, self.now))

    def _balance(self, home: str, workers: Mapping[str, Measured], links: WorkerLinks) -> ShareSearch:
        search = self._over(home, tuple(workers)).balance()
        return search.measured({name: own.row.conv_seconds for name, own in workers.items()})

    def _made(self, home: str, workers: tuple[str, ...]) -> Direct:
        return replace(self._sharding, workers=tuple(self._members[name] for name in workers), at=home)

    def _place(self, order: orders.Place) -> None:
        self._life, self._done = order.life, order.step
        if order.shares is not self._shares:
            self._shares, search = order.shares, order.shares.balance
            self._names = tuple(search.compute)
            placed = self._over(search.home, self._names).cut(search.stages, order.shares.kernels)
            self._step, self._home = placed.step(), placed.home

    def _run_segment(self, order: orders.RunSegment) -> None:
        self._last = order.end
        self._agenda.at(self.now + self._moved(), self._next_step, self._turn)

    def _next_step(self, turn: int) -> None:
        if turn == self._turn and self._done < self._last:
            step, begun = self._step, self.now
            assert step is not None, "placed"
            spent = zip(self._names, step.busy, strict=True)
            times = [(self._paces[name].end(begun, s) - begun) / s if s else 1.0 for name, s in spent]
            self._agenda.at(begun + step.slowed(self._home, times), self._step_ended, turn, times)

    def _step_ended(self, turn: int, times: Sequence[float]) -> None:
        if turn != self._turn:
            return
        for name, own in zip(self._names, times, strict=True):
            self._times[name] += own
        settings = self._settings
        position = self._done % settings.steps_per_epoch
        samples = min(settings.batch_size, settings.samples - position * settings.batch_size)
        ended = facts.StepDone(self._life, self._done, Score(0.0, 0, samples), 0.0, self.now)
        self._done, self._spent = self._done + 1, self._spent + 1
        self._tell_all([ended, facts.Tick(self.now)])
        self._next_step(turn)

    def _stop_segment(self, order: orders.StopSegment) -> None:
        self._last = min(self._last, self._done + STEPS_AHEAD + 1)
        self._tell(facts.SegmentStopped(order.life, self._last, self.now))

    def _moved(self) -> float:
        """Return the seconds of a snapshot's way to the driver, or back."""
        there = [self._members[name] for name in self.coordinator.roster.alive]
        together = sum(member.bandwidth or math.inf for member in there)
        return self._nbytes / min(self._driver, together) + max(member.latency for member in there)

    def _judge(self, order: orders.Judge) -> None:
        there = self.coordinator.roster.alive
        seconds = order.part.samples / sum(1 / self._members[name].judging for name in there)
        ends = Slowest([self._paces[name] for name in there]).end(self.now, seconds)
        self._after(ends - self.now, lambda: facts.Judged(None, self.now))

    def _count(self, order: orders.AskCounters) -> None:
        step, steps, layers = self._step, self._spent, self._sharding.names
        assert step is not None, "placed"
        samples, spent = dict.fromkeys(layers, float(steps * self._settings.batch_size)), dict[str, Spent]()
        for name, busy, up, down, *taken in zip(self._names, step.busy, step.up, step.down, *step.taken, strict=True):
            times = self._times[name]
            spent[name] = Spent(
                name=name,
                busy=times * busy,
                conv_seconds={layer: times * own for layer, own in zip(layers, taken, strict=True)},
                conv_samples=samples,
                bytes_up=steps * up,
                bytes_down=steps * down,
            )
        self._spent = 0
        self._times.clear()
        self._tell(facts.Counted(order.ask, spent, self.now))

    def _end(self, order: orders.End) -> None:
        self.end = order
        self._agenda.clear()

    def _log(self, event: Event) -> None:
        if isinstance(event, EpochEnded | StepsEnded):  # nothing is learnt
            event = event.model_copy(update=dict.fromkeys(("loss", "accuracy", "lr"), None))
        self._emit(event.logged(self.now))
