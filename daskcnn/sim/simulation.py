"""Data-parallel training in simulated time: a shell of the coordinator, as `cluster.shell` is one.

The coordinator, the server, the rules, the partitioners and a replica's side of an exchange are those of the cluster.
Only the time of steps, exchanges, merges and the beginnings of rounds is simulated. Events are those of a run's log.
Their times count from the beginning of the run.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from daskcnn.events import CalibratedWorker, Event, FormedGroup, GroupsFormed, RunEnded, RunStarted, ServerCounted
from daskcnn.partition.rounds import Rounds
from daskcnn.partition.step_shares import StepShares
from daskcnn.ps import ParameterServer, RuleState, Snapshot, Vector
from daskcnn.ps.average import exchanged
from daskcnn.sim.cluster import SimulatedCluster, Worker, step_problem
from daskcnn.sim.host import LIFE, Agenda, Host, PeerToPeer
from daskcnn.sim.learners import Learner, TimingOnly, turned_to
from daskcnn.sim.replica import SimulatedReplica
from daskcnn.sim.speeds import Pace, Slowest, slowness
from daskcnn.sim.workload import Workload
from daskcnn.training.cadence import Cadence
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.departures import FAR
from daskcnn.training.coordinator.facts import Fact
from daskcnn.training.coordinator.orders import Order
from daskcnn.training.coordinator.replicas import Coordinator
from daskcnn.training.lone_optimizer import LoneOptimizer

GRACE = 6.0
"""Seconds that a worker has, from the moment when it is asked to leave, to push what it has."""
_OF_STAGES = ("conv_seconds", "conv_fixed", "rest_seconds")


class Simulation:
    """One run.

    seed: of the workers' varying speeds. learner: makes the arithmetic of each worker; none by default. emit: takes the
    run's events, if a log is wanted. about: further fields of the first event, such as run, dataset and model.
    group_step: the seconds of a step of these workers as a group, with its home first; for a workload of groups.
    staged: the workers' calibrations with each stage's seconds, where sharded kernels are priced.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: SimulatedCluster,
        *,
        seed: int = 0,
        learner: Callable[[], Learner] = TimingOnly,
        emit: Callable[[Event], None] | None = None,
        about: Mapping[str, Any] | None = None,
        group_step: Callable[[Sequence[Worker]], float] | None = None,
        staged: Mapping[str, CalibratedWorker] | None = None,
    ) -> None:
        self._about = {"run": "simulated", "seed": seed, **(about or {})}
        self.workload, self.cluster, self.rule = workload, cluster, workload.rule
        self.members = cluster.members()
        self._emit, self._agenda = emit, Agenda()
        self._learners = [learner() for _ in self.members]
        self._paces = [
            member.speed.pace(np.random.default_rng([seed, index])) for index, member in enumerate(self.members)
        ]
        self._known = {member.name: (member, index) for index, member in enumerate(self.members)}
        self._group_step, self._staged = group_step, staged or {}
        self._compose(self._learners[0].weights)
        self.coordinator = Coordinator(workload, logs=emit is not None)
        self.end: orders.End | None = None
        self._starting = True
        self._facts: deque[Fact] = deque()
        self._carry_out: dict[type, Callable[[Any], None]] = {
            orders.Calibrate: self._calibrate,
            orders.UseRule: self._use,
            orders.StartServer: lambda order: self._tell(facts.ServerReady(order.life, "simulated", self.now)),
            orders.ProbeServer: self._probe,
            orders.FormGroups: self._form_groups,
            orders.Join: self._join,
            orders.StartRound: self._start_round,
            orders.EndRound: lambda order: self.replicas[order.replica].end_early(order),
            orders.AskWaiting: lambda order: self._tell(facts.Waits(frozenset(order.overdue), self.now)),  # none hangs
            orders.Leave: lambda order: self._host.leave(self.replicas[order.replica]),
            orders.Save: lambda order: self._tell(facts.Saved(self.server.snapshot().version, self.now)),
            orders.Judge: self._judge,
            orders.Restore: lambda order: None,
            orders.Dismiss: lambda order: None,  # it is idle, or gone
            orders.Cancel: lambda order: self._host.lose(self.replicas[order.replica]),
            orders.CancelAll: lambda order: self._cancel_all(),
            orders.Rescue: lambda order: self._tell(facts.Rescued(self.server.snapshot().version, self.now)),
            orders.Log: lambda order: self._log(order.event),
            orders.End: self._end,
        }

    def _compose(self, center: Vector, version: int = 0, state: RuleState | None = None) -> None:
        """Make the server, from this center and what it keeps besides, and the workers' sides, for the present rule."""
        workload, one = self.workload, self._learners[0]
        # a run that is only timed has a vector of one number, which is not coded
        codes = workload.coded and center.size == workload.numbers
        steps = one.steps if self.rule.merges_gradients else None
        self._lone = LoneOptimizer(steps)
        of_center: dict[str, Any] = {
            "kept": one.frozen,
            "steps": steps,
            "ema": workload.ema,
            "besides": one.besides,
            "wire": "float32" if workload.way.coded and not codes else workload.wire,
        }
        fixed = {member.name: member.step_fixed / member.seconds for member in self.members}
        sharing = StepShares(fixed) if workload.resizes_steps else None
        how: dict[str, Any] = {"version": version, "state": state, "life": LIFE, "sharing": sharing, **of_center}
        self.server = ParameterServer(self.rule, center, **how)
        self._host = self._made_host()
        cadence = Cadence(self.rule, workload.batch_size, workload.validation)

        def made(member: Worker, index: int, pace: Pace | None = None) -> SimulatedReplica:
            how = pace or self._paces[index], self._learners[index]
            return SimulatedReplica(member, *how, workload, cadence, self._host, self._agenda)

        self._made = made
        alone = self._known.values() if workload.replica_size == 1 else ()
        self.replicas = {member.name: made(member, index) for member, index in alone}

    def _made_host(self) -> Host:
        workload, cluster = self.workload, self.cluster
        kind = PeerToPeer if workload.rule.serverless else Host
        split = cluster.server.split(workload.shards)
        return kind(self.server, self._agenda, split, cluster.costs, way=workload.way, numbers=workload.numbers)

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        return self._agenda.now

    def run(self) -> Snapshot:
        """Run to the end, or until another kind of run is to go on. Returns the server's last snapshot.

        Raises Diverged, ClusterError for too few workers, and Lost where none is left.
        """
        self._log(self._start_event())
        for member in self.members:
            if member.arrives:
                self._agenda.at(member.arrives, self._arrives, member)
            else:
                self._facts.append(facts.WorkerReady(member.name, member.kind, 0.0))
            if (end := member.dies or member.leaves) is not None:
                self._agenda.at(end, self._dies if member.dies else self._leaves, member)
        self._tell_all()
        with _seldom_collected():
            self._agenda.run()
        assert self.end is not None, "nobody goes on"
        if self.end.error is not None:
            raise self.end.error
        snapshot = self._snapshot()
        if self.end.turn is not None:
            return snapshot
        counted = {"merged": snapshot.merged, "repeated": snapshot.repeated, "refused": dict(snapshot.refused)}
        self._log(ServerCounted(server=LIFE, **counted))
        self._log(RunEnded(status=self.end.status))
        return snapshot

    def play(self, recorded: Iterable[Fact]) -> list[list[Order]]:
        """Play the facts of a recorded run, each at its time, as this simulation's agenda.

        The coordinator decides and events are logged as in `run`; times count from the first fact. No other order is
        carried out, as the recorded facts are the answers. With another workload than the recorded run's, the orders
        are valid up to the first one that the recorded run did not give. Returns the orders that each fact led to.
        """
        found: list[list[Order]] = []

        def decide(fact: Fact) -> None:
            found.append(self.coordinator.handle(fact))
            for order in found[-1]:
                if isinstance(order, orders.Log | orders.End):
                    self._carry_out[type(order)](order)

        self._log(self._start_event())
        begun: float | None = None
        for fact in recorded:
            begun = fact.at if begun is None else begun
            self._agenda.at(fact.at - begun, decide, fact)
        self._agenda.run()
        if self.end is not None:
            self._log(RunEnded(status=self.end.status))
        return found

    # --- workers come and go ---

    def _arrives(self, member: Worker) -> None:
        """Let a worker come. While it may wait for the others, the coordinator hears that time passes."""
        self._tell_now(facts.WorkerReady(member.name, member.kind, self.now))
        for seconds in range(1, round(FAR) + 2):
            self._agenda.at(self.now + seconds, self._tick)

    def _tick(self) -> None:
        self._tell_now(facts.Tick(self.now))

    def _leaves(self, member: Worker) -> None:
        """Ask a worker to leave: it ends its round behind the step at hand, and is gone after its time of grace."""
        self._tell_now(facts.WorkerLeaving((member.name,), "it leaves", self.now))
        self._agenda.at(self.now + GRACE, self._goes, member, "it leaves")

    def _dies(self, member: Worker) -> None:
        self._goes(member, "it dies")

    def _goes(self, member: Worker, reason: str) -> None:
        if member.name in self.replicas:
            self._host.lose(self.replicas[member.name])
        self._tell_now(facts.WorkerGone((member.name,), reason, self.now))

    def _cancel_all(self) -> None:
        for replica in self.replicas.values():
            self._agenda.forget(replica)

    @property
    def rounds(self) -> Rounds:
        """The rounds of the run, once it has begun."""
        assert self.coordinator.rounds is not None
        return self.coordinator.rounds

    # --- facts ---

    def _tell(self, fact: Fact) -> None:
        """Queue a fact that an order leads to at once, until all orders are carried out."""
        self._facts.append(fact)

    def _tell_now(self, fact: Fact) -> None:
        """Tell a fact at its time of the agenda, and carry out the orders that follow."""
        for order in self.coordinator.handle(fact):
            self._carry_out[type(order)](order)
        if self._facts:
            self._tell_all()

    def _tell_all(self) -> None:
        while self._facts:
            for order in self.coordinator.handle(self._facts.popleft()):
                self._carry_out[type(order)](order)

    # --- orders ---

    def _calibrate(self, order: orders.Calibrate) -> None:
        (member, index), batch = self._known[order.worker], self.workload.batch_size
        member = member.times_as_fast(1 / slowness(self._paces[index], self.now))
        seconds = member.seconds + member.step_fixed / batch
        row = CalibratedWorker(
            name=member.name,
            address="simulated",
            host="simulated",
            device=member.kind,
            processor=f"simulated {member.kind}",
            threads=member.threads,
            memory=0,
            images_per_second=member.rate(batch),
            step_fixed=member.step_fixed,
            conv_seconds=member.conv_seconds or {},
        )
        if (staged := self._staged.get(member.name)) is not None:
            row = row.model_copy(update={each: getattr(staged, each) for each in _OF_STAGES})
        self._tell(facts.Calibrated(member.name, seconds, row, self.now))

    def _use(self, order: orders.UseRule) -> None:
        """Go on from the present center by another rule, with what server and optimizers hold."""
        snapshot, self.rule = self._snapshot(), order.rule
        self.workload = replace(self.workload, rule=order.rule)
        state = turned_to(order.rule, {name: self._learners[i] for name, (_, i) in self._known.items()}, snapshot)
        self._compose(snapshot.center, snapshot.version, state)

    def _form_groups(self, order: orders.FormGroups) -> None:
        """Make a replica of each group that is new, which is as fast as its sharded step, at its fastest worker."""
        assert self._group_step is not None, "a workload of groups"
        batch, rows = self.workload.batch_size, list[FormedGroup]()
        for name, own in order.groups.items():
            members = sorted((self._known[each][0] for each in own), key=lambda member: member.step(batch))
            home, seconds = members[0], self._group_step(members)
            if name in order.changed:
                kept = {"name": name, "images_per_second": batch / seconds, "step_fixed": 0.0}
                kept["evaluations_per_second"] = 1 / home.judging
                pace = Slowest([self._paces[self._known[each][1]] for each in own])
                replica = self._made(home.model_copy(update=kept), self._known[home.name][1], pace)
                replica.session = self.replicas[name].session if name in self.replicas else 0
                self.replicas[name] = replica
            speed = batch / seconds
            rows.append(FormedGroup(name=name, home=home.name, members=own, device=home.kind, images_per_second=speed))
        self._log(GroupsFormed(groups=rows, left_out=order.left_out))

    def _probe(self, order: orders.ProbeServer) -> None:
        members, work = [self.replicas[name].member for name in order.workers], self.workload
        problem = step_problem(members, work.batch_size, work.nbytes, self.cluster, work.shards)
        links = {own.name: own.link for own in problem.workers}
        how: dict[str, Any] = {name: getattr(problem, name) for name in ("bandwidth", "merge", "overhead")}
        self._tell(facts.ServerProbed(order.workers, links, work.nbytes, self.now, **how))

    def _join(self, order: orders.Join) -> None:
        replica, life, session = order.replica, order.life, order.session
        self.replicas[replica].join(lambda name: self._tell_now(facts.Joined(name, life, session, self._agenda.now)))

    def _start_round(self, order: orders.StartRound) -> None:
        """Start a round after the dispatch; a first round also waits for the run's start."""
        host, costs = self._host, self.cluster.costs
        if isinstance(host, PeerToPeer) and len(host.peers) != len(self.rounds.running):
            before, host.peers = host.peers, [self.replicas[worker] for worker in self.rounds.running]
            for each in before:
                if each.name not in self.rounds.running:
                    host.leave(each)
        if self._starting:  # once a round has ended, nothing is to be made any more
            self._starting = not self.rounds.done
        start, agenda = self.replicas[order.round.worker].start, self._agenda
        given = order, self._round_done, self._lone.starting(order, self.server.snapshot, self.server.go_on_with)
        at = agenda.now + costs.dispatch + (costs.start if self._starting else 0.0)
        if at > agenda.now:
            agenda.at(at, start, *given)
        else:
            start(*given)

    def _round_done(self, done: facts.RoundDone) -> None:
        self._lone.reported(done)
        self._tell_now(done)

    def _snapshot(self) -> Snapshot:
        """Return the server's snapshot, with the optimizer's state of a worker that is alone."""
        snapshot = self.server.snapshot()
        return replace(snapshot, state=self._lone.added_to(snapshot.state or {}))

    def _judge(self, order: orders.Judge) -> None:
        learner, snapshot = next(iter(self.replicas.values())).learner, self.server.snapshot()
        weights, _ = exchanged(snapshot.center, snapshot.state or {})
        self._tell(facts.Judged(learner.judge(order.part, weights), self.now))

    def _end(self, order: orders.End) -> None:
        self.end = order
        self._agenda.clear()

    # --- records ---

    def _start_event(self) -> RunStarted:
        workload = self.workload
        return RunStarted(
            **self._about,
            strategy=workload.strategy,
            partition=workload.partition,
            increments=workload.partitioner.increments,
            rule=workload.rule.model_dump(exclude_defaults=True),
            epochs=workload.epochs,
            batch_size=workload.batch_size,
            samples=workload.samples,
            validation_samples=workload.validation,
            parameters=workload.numbers,
            wire=workload.wire,
            vector_bytes=workload.nbytes,
            simulated=True,
        )

    def _log(self, event: Event) -> None:
        if self._emit is not None:
            self._emit(event.logged(self._agenda.now))


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Collect garbage seldom, and leave out the thousands of replicas that stay."""
    usual = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()
