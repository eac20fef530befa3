"""Bi-layered training: groups of workers shard the kernels of a replica each, and an update rule joins the groups.

To the rule, the server and the partitioner a group is one worker, "group-0" and so on. The driver submits a group's
steps and meetings ahead (`group_graph`) and goes on as their results come, all groups' in one queue. A group that loses
a member is lost: its samples go to the others, and who is left of it takes part again when the run is resumed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from distributed import Future

from daskcnn.cluster.data_parallel import DataParallel
from daskcnn.cluster.groups.graph import GroupGraph, RoundStep, round_steps
from daskcnn.cluster.groups.tasks import GroupMeeting, GroupReport
from daskcnn.cluster.layers.balance import fastest
from daskcnn.cluster.layers.messages import OutOfStep
from daskcnn.cluster.link_speeds import measure_links
from daskcnn.cluster.protocol import RoundOrder
from daskcnn.cluster.run_context import RunContext
from daskcnn.errors import ClusterError, Diverged, Lost
from daskcnn.job.network import initial_weights, network_of
from daskcnn.nn.score import Score
from daskcnn.partition.groups import form_groups
from daskcnn.partition.proportional import proportional
from daskcnn.partition.rounds import Round
from daskcnn.ps import UpdateRule
from daskcnn.runs.state import TrainingState
from daskcnn.sharded import stages_of
from daskcnn.training.replica import Stopped

AHEAD = 3  # steps of a group submitted before the oldest has ended
CHAIN = 250  # steps after which the tasks' chain is cut, which the scheduler has to remember


@dataclass
class Group:
    """Some of the run's workers, which have a replica together. seconds: a sample, if all went on at once."""

    name: str
    context: RunContext
    graph: GroupGraph
    seconds: float

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(self.context.alive)

    def row(self) -> dict[str, Any]:
        """Of the log."""
        kinds = [member.kind for member in self.context.alive.values()]
        device = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        speed = {"device": device, "images_per_second": 1 / self.seconds}
        return {"name": self.name, "home": self.graph.home, "members": list(self.members), **speed}


class GroupRound:
    """A round of a group under way. `watch` is given every task whose result the round waits for."""

    def __init__(
        self,
        graph: GroupGraph,
        order: RoundOrder,
        rule: UpdateRule,
        steps: Iterator[RoundStep],
        watch: Callable[[Future], None],
    ) -> None:
        self._graph, self._order, self._rule, self._steps, self._watch = graph, order, rule, steps, watch
        self._made, self._begun = 0, time.monotonic()
        self._score = Score(0.0, 0, 0)  # of the steps that have ended
        self._flight: dict[Any, tuple[RoundStep, Future]] = {}  # by key
        self._met: Future | None = None  # held: others hang on it
        self._settling: Future | None = None
        self._report: Future | None = None
        graph.cut_chain()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._begun

    def expects(self, future: Future) -> bool:
        """Whether it is one of those that the round waits for now."""
        return future.key in self._flight or future is self._settling or future is self._report

    def take(self, future: Future, result: Any) -> GroupReport | None:
        """Go on; the report once the round has ended. Raises Diverged."""
        if future is self._report:
            return result
        if future is self._settling:
            self._settling = None
            self._graph.cut_chain()
        else:
            step, _ = self._flight.pop(future.key)
            self._count(step, result)
        self.advance()
        return None

    def advance(self) -> None:
        """Submit what may be ahead of what has ended."""
        while self._report is None and self._settling is None and len(self._flight) <= AHEAD:
            if self._graph.chained < CHAIN:
                self._submit(next(self._steps))
            elif self._flight:
                return
            else:
                self._settling = self._graph.settle()
                self._watch(self._settling)

    def cancel(self) -> None:
        """Give up all that is under way: nobody wants it any more.

        Dask's own cancel would take what hangs on a task with it, and fails where some of that was never wanted.
        """
        own = [future for _, future in self._flight.values()]
        held = [future for future in (self._met, self._settling, self._report) if future is not None]
        for future in (*own, *held, *self._graph.futures()):
            future.release()

    def _count(self, step: RoundStep, score: Score) -> None:
        if not math.isfinite(score.loss_sum):
            raise Diverged(f"loss = {score.loss}: training diverged at learning rate {step.lr:.3g}; lower train.lr")
        self._score += score

    def _submit(self, step: RoundStep) -> None:
        score = self._graph.submit(step)
        self._flight[score.key] = step, score
        self._watch(score)
        self._made += 1
        if due := self._rule.due(self._made, round_end=step.last):
            meeting = GroupMeeting(self._order, due, step.last, self._score, step.lr)
            self._met = self._graph.meet(meeting, [future for _, future in self._flight.values()])
        if step.last:
            self._report = self._graph.end(self._order)
            self._watch(self._report)


class Grouped(DataParallel):
    """Drives one run of an update rule and a partitioner over groups of the workers of a context."""

    learners: ClassVar[str] = "groups"

    def __init__(self, context: RunContext, resumed: TrainingState | None) -> None:
        self.size = context.job.train.replica_size
        if (there := len(context.alive)) < self.size:
            raise ClusterError(f"train.replica_size = {self.size}: there are {there} workers; lower it, or start more")
        super().__init__(context, resumed)
        self.layout, _ = initial_weights(self.job, context.dataset)
        self.stages = stages_of(network_of(self.job, context.dataset))
        self.groups: dict[str, Group] = {}
        self._generation = 0

    def _replicas(self) -> int:
        return len(self.context.alive) // self.size

    # --- forming groups ---

    def _begin(self) -> None:
        """Groups of those who are there, and all else as with workers."""
        if not self._replicas():
            raise Lost(f"{len(self.context.alive)} workers are left, and train.replica_size = {self.size}")
        formed = form_groups(super()._calibrated(), self.size)
        self.groups = {f"group-{i}": self._group(f"group-{i}", members) for i, members in enumerate(formed.groups)}
        rows = [group.row() for group in self.groups.values()]
        self.context.emit({"event": "groups", "groups": rows, "left_out": list(formed.left_out)})
        if formed.left_out:
            names, count = ", ".join(formed.left_out), len(self.context.alive)
            message = (
                f"{names}: left out, the slowest; train.replica_size = {self.size} does not divide {count} workers"
            )
            self.context.emit({"event": "warning", "message": message})
        kernels = {w: own for group in self.groups.values() for w, own in group.graph.by_worker().items()}
        divided = {w: own for group in self.groups.values() for w, own in group.graph.divided().items()}
        of = next(group.graph.of() for group in self.groups.values())
        self.context.emit({"event": "shards", "home": "", "kernels": kernels, "divided": divided, "of": of})
        super()._begin()

    def _group(self, name: str, members: tuple[str, ...]) -> Group:
        part = self.context.within(members)
        part.links = measure_links(part, fastest(part))
        seconds = 1 / sum(1 / self.context.calibrations[member].seconds_per_sample for member in members)
        return Group(name, part, GroupGraph(part, self.stages, self.layout), seconds)

    def _calibrated(self) -> dict[str, float]:
        return {name: group.seconds for name, group in self.groups.items()}

    # --- the rounds ---

    def _submit_join(self, order: RoundOrder) -> Future:
        self._generation += 1
        return self.groups[order.worker].graph.join(order, self._generation)

    def _parts(self, lo: int, hi: int) -> Iterable[tuple[str, int, int]]:
        """lo…hi cut over the groups' homes in proportion to their speed: they judge the center."""
        homes = {name: self.context.calibrations[group.graph.home] for name, group in self.groups.items()}
        begin = lo
        for name, size in zip(
            homes, proportional(hi - lo, [1 / own.seconds_per_sample for own in homes.values()]), strict=True
        ):
            if size:
                yield name, begin, begin + size
            begin += size

    def _work(self, order: RoundOrder, round_: Round, watch: Callable[[Future], None]) -> tuple[Any, float]:
        train, rule, graph = self.job.train, self.rule, self.groups[round_.worker].graph
        passes, scale = rule.passes(train.epochs), rule.rate(order.replicas)
        work = GroupRound(graph, order, rule, round_steps(self.job, round_, passes=passes, scale=scale), watch)
        work.advance()
        return work, (AHEAD + 1) * train.batch_size * self.rounds.seconds[round_.worker]

    def _expects(self, worker: str, future: Future) -> bool:
        running = self._running.get(worker)
        return running is not None and running.work.expects(future)

    def _result(self, worker: str, future: Future) -> Any:
        """Raises OutOfStep where a task was run twice though nobody is lost."""
        try:
            return self._fetch(future)
        except (OutOfStep, Stopped) as error:
            self.context.explain(error)

    def _take(self, worker: str, future: Future, report: Any) -> None:
        """A step of the group's round, or all of it, has ended."""
        running = self._running[worker]
        found = running.work.take(future, report)
        self._running[worker] = replace(running, begun=time.monotonic())
        if found is None:
            return
        del self._running[worker]
        own = found.report
        apart = own.communication + own.wait + own.evaluation
        own = replace(own, busy=max(running.work.seconds - apart, 1e-9))
        self.rounds.finished(worker, own.busy / own.samples)
        self._record(own, members=[{"name": name, **asdict(each)} for name, each in found.members.items()])

    # --- who is gone ---

    def _lose(self, workers: Iterable[str], reason: str) -> None:
        """Of a worker its group is lost too; of a group the workers that it waits for."""
        for name in workers:
            if name in self.groups:
                stuck = self._stuck(self.groups[name])
                self._lose_group(name, f"{reason}, waiting for {', '.join(stuck)}", stuck)
            elif name in self.context.alive:
                own = next((group.name for group in self.groups.values() if name in group.members), None)
                if own is None:
                    self.context.lose(name, reason)
                else:
                    self._lose_group(own, f"{name}: {reason}", [name])

    def _stuck(self, group: Group) -> list[str]:
        """Members that have tasks to do; all of them where none has."""
        processing = self.context.client.processing()
        members = {name: member for name, member in group.context.alive.items() if name in self.context.alive}
        return [name for name, member in members.items() if processing.get(member.address)] or list(members)

    def _lose_group(self, name: str, reason: str, members: Iterable[str]) -> None:
        """Go on without the group, and without these of its members at all."""
        if running := self._running.pop(name, None):
            running.work.cancel()
        del self.groups[name]
        for member in members:
            self.context.lose(member, reason)
        samples = self.rounds.allocation.size(name)
        self.context.emit({"event": "worker-lost", "worker": name, "reason": reason, "samples_moved": samples})
        if not self.groups:
            raise Lost(f"{name} ({reason}): it was the last group of the run")
        self.rounds.lost(name)
        if name in self._sessions:
            self._leave(name)
