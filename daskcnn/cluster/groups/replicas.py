"""A group's tasks: sharded steps over its members, and between them the meetings of the update rule.

All of it hangs together: a meeting on the pieces that the steps before it leave, the steps after it on what is handed
out. So the driver submits steps and meetings ahead, and home waits for the server where a rule has a barrier.

Replicas that are groups of workers, which shard the kernels of a replica each (bi-layered training).

To the rule, the server and the partitioner a group is one worker, "group-0" and so on. A group that loses a member is
lost: its samples go to the others, and the workers that are left of it take part again when groups are formed anew.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from distributed import Future

from daskcnn.cluster.groups import group_tasks
from daskcnn.cluster.groups.group_tasks import GroupMeeting, GroupReport, SharedNetwork
from daskcnn.cluster.layers.measurements import fastest, measure_links
from daskcnn.cluster.layers.step_graph import LayerGraph, MinibatchStep, Result
from daskcnn.cluster.layers.task_context import Minibatch, StagePart
from daskcnn.cluster.messages import RoundOrder
from daskcnn.cluster.run.context import RunContext
from daskcnn.cluster.run.exchange import PendingWork, Watch
from daskcnn.errors import Diverged
from daskcnn.events import FormedGroup, GroupMember, GroupsFormed, KernelsSharded
from daskcnn.job.network import initial_weights, network_of, pace_at, rate_of
from daskcnn.job.tables import Job
from daskcnn.nn import Layout
from daskcnn.nn.score import Score
from daskcnn.partition.rounds import Round
from daskcnn.ps import UpdateRule
from daskcnn.sharded.cutting import stages_of
from daskcnn.sharded.plan_parts import Carried
from daskcnn.sharded.stages import Stage
from daskcnn.store import BatchPlan
from daskcnn.store.loader import batch_edges
from daskcnn.training.cadence import Cadence
from daskcnn.training.coordinator import orders
from daskcnn.training.coordinator.facts import Fact, Progress, RoundDone
from daskcnn.training.coordinator.settings import STEPS_AHEAD
from daskcnn.training.replica import presentations
from daskcnn.training.round_report import RoundReport


@dataclass(frozen=True)
class RoundStep(MinibatchStep):
    """A step of a group's round. plan: of the pass that it is part of; begin: where in its order the minibatch begins.

    meets: whether the group exchanges weights behind it. last: of the round.
    """

    plan: BatchPlan
    begin: int
    meets: bool
    last: bool


def round_steps(
    job: Job, round_: Round, *, passes: int, scale: float, exchanges: Collection[int]
) -> Iterator[RoundStep]:
    """The steps that one replica by itself would make of this round, in its order and at its learning rates.

    Parameters
    ----------
    passes : passes over its samples that the rule makes in a round.
    scale : factor of the learning rate.
    exchanges : the steps, counted from 1, after which weights are exchanged.
    """
    rate, done, (begun, end) = rate_of(job.train.schedule), 0, round_.progress
    first, number = round_.number * passes, 0
    for plan in presentations(job, round_.ranges, round_.samples, first, round_.steps):
        for position, (lo, hi) in enumerate(batch_edges(plan, plan.limit or 0)):
            progress = begun + (end - begun) * done / round_.samples
            pace = pace_at(job.train, rate, progress, scale)
            done += hi - lo
            last, meets = done == round_.samples, number + 1 in exchanges
            yield RoundStep(number, plan.presentation, position, pace, hi - lo, plan, lo, meets, last)
            number += 1


class GroupGraph(LayerGraph):
    """The tasks of one group of workers, which are those of the context. chained: steps since the last task that hangs
    on none before it.
    """

    def __init__(self, context: RunContext, stages: Sequence[Stage], layout: Layout) -> None:
        super().__init__(context, stages, layout)
        self.shared = SharedNetwork.of(self.plan)
        self.chained = 0

    # --- between steps ---

    def join(self, order: RoundOrder, generation: int) -> Future:
        """Join the server for the group and give every member its pieces; ends when all of them have theirs.

        generation: higher than all that these workers have seen in the run.
        """
        self.generation, self._step, self._owed = generation, 0, {}
        self._begin()
        joined = self._submit("join", group_tasks.join_group, self.shared, order, worker=self.home)
        self._hand_out(joined, optimizer=True)
        return self._submitted(self._settled())

    def meet(self, meeting: GroupMeeting, scores: Sequence[Future]) -> Future:
        """Submit a meeting behind the steps so far. scores: of those that `meeting` does not count yet."""
        self._begin()
        optimizer = meeting.last
        handed = {piece: self._hand_in(piece, optimizer) for piece in self._distinct_pieces()}
        shards = [[handed[Carried("shard", i, worker)] for worker in own] for i, own in enumerate(self.kernels)]
        merged = [handed.get(Carried("merged", i, self.home)) for i in range(len(self.stages))]
        args = self.shared, meeting, list(scores), shards, merged
        met = self._submit("meet", group_tasks.meet, *args, worker=self.home)
        self._hand_out(met, optimizer=False)
        return self._submitted(met)

    def end(self, order: RoundOrder) -> Future:
        """The group's report, once the last meeting's weights are where they belong."""
        self._begin()
        counted = [self._submit("counters", group_tasks.counted, *self._last_of(w), worker=w) for w in self.workers]
        args = order, tuple(self.workers), counted
        return self._submitted(self._submit("report", group_tasks.end_round, *args, worker=self.home))

    def settle(self) -> Future:
        """Ends when nothing is under way any more."""
        self._begin()
        return self._submitted(self._settled())

    def cut_chain(self) -> None:
        """Steps that follow hang on new tasks, as the scheduler keeps all that a task hangs on. Once settled."""
        self._begin()
        self.chained = 0
        self._hold(lambda part, worker: self._submit("stay", group_tasks.stay, part, worker=worker))
        self._submitted(next(iter(self.held.values())))

    def submit(self, step: MinibatchStep) -> Future:
        """Submit a step behind what was submitted before. Returns the future of its score."""
        self.chained += 1
        return super().submit(step)

    # --- parts of those ---

    def _begin(self) -> None:
        """Bundle what is submitted from here on, first the steps still owed."""
        self._open()
        self._step_owed()

    def _minibatch(self, step: MinibatchStep) -> Minibatch:
        assert isinstance(step, RoundStep), "a group trains in rounds"
        return Minibatch(step.plan, step.begin, step.begin + step.samples)

    def _hand_in(self, piece: Carried, optimizer: bool) -> Result:
        args = self._part_of(piece), optimizer, piece.worker != self.home, self.held[piece]
        return self._submit("hand-in", group_tasks.hand_in, *args, worker=piece.worker)

    def _hand_out(self, behind: Result, *, optimizer: bool) -> None:
        """Every member goes on from what home has laid out for it behind this task."""
        handed = {
            w: self._submit("hand-out", group_tasks.hand_out, w, optimizer, behind, worker=self.home)
            for w in self.workers
        }

        def adopted(part: StagePart, worker: str) -> Result:
            args = part, optimizer, worker != self.home, handed[worker]
            return self._submit("adopt", group_tasks.adopt, *args, worker=worker)

        self._hold(adopted)

    def _settled(self) -> Result:
        each = [self._submit("settle", group_tasks.settled, *self._last_of(w), worker=w) for w in self.workers]
        return self._submit("settle", group_tasks.settled, each, worker=self.home)

    def _last_of(self, worker: str) -> list[Result]:
        """The worker's last task with each of its pieces."""
        return [ref for piece, ref in self.held.items() if piece.worker == worker and piece.what != "edges"]


@dataclass
class Group:
    """Some of the run's workers, which have a replica together. seconds: a sample, if all went on at once."""

    name: str
    context: RunContext
    graph: GroupGraph
    seconds: float

    @property
    def members(self) -> tuple[str, ...]:
        """The workers of the group that are left."""
        return tuple(self.context.workers.alive)

    def row(self) -> FormedGroup:
        """The group as the log has it."""
        kinds = [member.kind for member in self.context.workers.alive.values()]
        device = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
        return FormedGroup(
            name=self.name,
            home=self.graph.home,
            members=list(self.members),
            device=device,
            images_per_second=1 / self.seconds,
        )


class GroupRound:
    """A round of a group under way.

    watch : is given every task whose result the round waits for.
    chain : steps after which the chain of tasks is cut.
    """

    def __init__(
        self,
        graph: GroupGraph,
        order: RoundOrder,
        steps: Iterator[RoundStep],
        watch: Watch,
        chain: int,
    ) -> None:
        self._graph, self._order, self._steps, self._watch = graph, order, steps, watch
        self._chain = chain
        self._begun = time.monotonic()
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

    def take(self, future: Future, result: Any, now: float) -> list[Fact]:
        """Go on with a step, or the report that ends the round. Raises Diverged."""
        order = self._order
        if future is self._report:
            return [RoundDone(order.worker, order.epoch, order.session, self._reported(result), now)]
        if future is self._settling:
            self._settling = None
            self._graph.cut_chain()
        else:
            step, _ = self._flight.pop(future.key)
            self._count(step, result)
        self.advance()
        return [Progress(order.worker, order.epoch, order.session, now)]

    def _reported(self, found: GroupReport) -> RoundReport:
        """The group's report: it is busy for as long as it neither exchanges, waits nor judges."""
        own = found.report
        apart = own.communication + own.wait + own.evaluation
        members = tuple(GroupMember(name=name, **asdict(each)) for name, each in found.members.items())
        return own._replace(busy=max(self.seconds - apart, 1e-9), members=members)

    def advance(self) -> None:
        """Submit what may be ahead of what has ended."""
        while self._report is None and self._settling is None and len(self._flight) <= STEPS_AHEAD:
            if self._graph.chained < self._chain:
                self._submit(next(self._steps))
            elif self._flight:
                return
            else:
                self._settling = self._graph.settle()
                self._watch(self._order.worker, self._settling)

    def cancel(self) -> None:
        """Give up all that is under way.

        Dask's own cancel would take what hangs on a task with it, and fails where some of that was never wanted.
        """
        own = [future for _, future in self._flight.values()]
        held = [future for future in (self._met, self._settling, self._report) if future is not None]
        for future in (*own, *held, *self._graph.futures()):
            future.release()

    def _count(self, step: RoundStep, score: Score) -> None:
        if not math.isfinite(score.loss_sum):
            reason = f"training diverged at learning rate {step.pace.lr:.3g}"
            raise Diverged(f"loss = {score.loss}", reason, "lower train.lr")
        self._score += score

    def _submit(self, step: RoundStep) -> None:
        score = self._graph.submit(step)
        self._flight[score.key] = step, score
        self._watch(self._order.worker, score)
        if step.meets:
            meeting = GroupMeeting(self._order, step.last, self._score, step.pace.lr)
            self._met = self._graph.meet(meeting, [future for _, future in self._flight.values()])
        if step.last:
            self._report = self._graph.end(self._order)
            self._watch(self._order.worker, self._report)


class GroupReplicas:
    """Groups of the run's workers. A group's steps and meetings are submitted ahead of what has ended."""

    def __init__(self, context: RunContext, rule: UpdateRule) -> None:
        self._context, self._rule = context, rule
        self._cadence = Cadence(rule, context.job.train.batch_size)
        self._layout, _ = initial_weights(context.job, context.dataset)
        self._stages = stages_of(network_of(context.job, context.dataset))
        self._groups: dict[str, Group] = {}
        self._generation = 0

    def form(self, order: orders.FormGroups) -> None:
        """Make the groups and log them. Raises WorkersLost where one of their workers goes meanwhile."""
        self._groups = {name: self._group(name, members, order.measure_links) for name, members in order.groups.items()}
        rows = [group.row() for group in self._groups.values()]
        self._context.emit(GroupsFormed(groups=rows, left_out=list(order.left_out)))
        graphs = [group.graph for group in self._groups.values()]
        kernels = {w: own for graph in graphs for w, own in graph.by_worker().items()}
        divided = {w: own for graph in graphs for w, own in graph.divided().items()}
        self._context.emit(KernelsSharded(home="", kernels=kernels, divided=divided, of=graphs[0].of()))

    def _group(self, name: str, members: tuple[str, ...], measure: bool) -> Group:
        part = self._context.only(members)
        if measure:
            part.links = measure_links(part, fastest(part))
        seconds = 1 / sum(1 / self._context.calibrations[member].seconds_per_sample for member in members)
        return Group(name, part, GroupGraph(part, self._stages, self._layout), seconds)

    def join(self, order: RoundOrder) -> Future:
        """Let a group join the server; ends when its members hold the center."""
        self._generation += 1
        return self._groups[order.worker].graph.join(order, self._generation)

    def start(self, order: RoundOrder, watch: Watch) -> PendingWork:
        """Submit the first steps of a group's round."""
        job, rule, round_ = self._context.job, self._rule, order.round
        assert round_ is not None, "the order of a round"
        passes, exchanges = rule.passes(job.train.epochs), self._cadence.exchanges(round_)
        steps = round_steps(job, round_, passes=passes, scale=order.scale, exchanges=exchanges)
        work = GroupRound(self._groups[order.worker].graph, order, steps, watch, job.cluster.chain)
        work.advance()
        return work

    def stuck(self, replica: str) -> tuple[str, ...]:
        """Members that have tasks to do; all of them where none has."""
        context, group = self._context, self._groups[replica].context
        processing = context.connection.processing()
        members = {name: member for name, member in group.workers.alive.items() if name in context.workers.alive}
        return tuple([name for name, member in members.items() if processing.get(member.address)] or members)
