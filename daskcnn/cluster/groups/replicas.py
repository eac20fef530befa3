"""Replicas that are groups of workers, each of which shards the kernels of one replica (bi-layered training).

To the rule, the server and the partitioner a group is one worker, "group-0" and so on. A group that loses a member is
formed anew while the others go on.

A group's tasks are sharded steps, and between them meetings with the server. A meeting depends on the pieces that the
steps before it leave, and the steps after it depend on what is handed out. So the driver submits steps and meetings
ahead. Home waits for the server where the rule has a barrier.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from distributed import Future

from daskcnn.cluster.groups import group_tasks
from daskcnn.cluster.groups.group_tasks import CutShort, GroupMeeting, SharedNetwork
from daskcnn.cluster.layers import step_tasks
from daskcnn.cluster.layers.measurements import fastest, measure_links
from daskcnn.cluster.layers.step_graph import LayerGraph, MinibatchStep, Result
from daskcnn.cluster.layers.task_context import Minibatch, StagePart
from daskcnn.cluster.link.calls import WorkersLost
from daskcnn.cluster.messages import RoundOrder
from daskcnn.cluster.run.context import RunContext
from daskcnn.cluster.run.exchange import PendingWork, Watch
from daskcnn.cluster.worker.session import Counters
from daskcnn.errors import Diverged
from daskcnn.events import FormedGroup, GroupMember, GroupsFormed, KernelsSharded
from daskcnn.job.network import layout_of, network_of, pace_at, rate_of
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
from daskcnn.training.coordinator.shares import Shares
from daskcnn.training.replica import presentations
from daskcnn.training.round_report import RoundReport


@dataclass(frozen=True)
class RoundStep(MinibatchStep):
    """A step of a group's round.

    Attributes
    ----------
    plan, begin : The pass that the step is part of, and where in its order the minibatch begins.
    meets : True if the group exchanges weights after it.
    """

    plan: BatchPlan
    begin: int
    meets: bool
    last: bool


def round_steps(
    job: Job, round_: Round, *, passes: int, scale: float, exchanges: Collection[int]
) -> Iterator[RoundStep]:
    """Yield the steps that one replica by itself would make of this round, in its order and at its learning rates.

    passes: over its samples, that the rule makes in a round. scale: of the learning rate. exchanges: the steps, counted
    from 1, after which weights are exchanged.
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
    """The tasks of the context's workers. chained: steps since the last task that depends on none before it."""

    def __init__(self, context: RunContext, stages: Sequence[Stage], layout: Layout) -> None:
        super().__init__(context, stages, layout)
        self.shared = SharedNetwork.of(self.plan)
        self.chained = 0

    # --- between steps ---

    def join(self, order: RoundOrder, generation: int) -> Future:
        """Join the server for the group. The future ends when every member has its pieces.

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
        handed: dict[Carried, Result] = {}
        for piece in self._distinct_pieces():
            given = self._part_of(piece), meeting.last, piece.worker != self.home, self.held[piece]
            handed[piece] = self._submit("hand-in", group_tasks.hand_in, *given, worker=piece.worker)
        args = self.shared, meeting, list(scores), *self._by_stage(handed)
        met = self._submit("meet", group_tasks.meet, *args, worker=self.home)
        self._hand_out(met, optimizer=False)
        return self._submitted(met)

    def end(self, order: RoundOrder) -> Future:
        """Return the group's report, once the last meeting's weights are where they belong."""
        self._begin()
        args = order, tuple(self.workers), self._last_at_each("counters", step_tasks.take_counters)
        return self._submitted(self._submit("report", group_tasks.end_round, *args, worker=self.home))

    def settle(self) -> Future:
        """Return a future that ends when nothing is under way any more."""
        self._begin()
        return self._submitted(self._settled())

    def cut_chain(self) -> None:
        """Let the steps that follow depend on new tasks: the scheduler keeps all that a task depends on.

        The group has to be settled.
        """
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
        """Bundle the tasks that follow, first the steps still owed."""
        self._open()
        self._step_owed()

    def _minibatch(self, step: MinibatchStep) -> Minibatch:
        assert isinstance(step, RoundStep), "a group trains in rounds"
        return Minibatch(step.plan, step.begin, step.begin + step.samples)

    def _hand_out(self, behind: Result, *, optimizer: bool) -> None:
        """Let every member go on from the pieces that home has laid out for it in this task."""
        handed = {
            w: self._submit("hand-out", group_tasks.hand_out, w, optimizer, behind, worker=self.home)
            for w in self.workers
        }

        def adopted(part: StagePart, worker: str) -> Result:
            args = part, optimizer, worker != self.home, handed[worker]
            return self._submit("adopt", group_tasks.adopt, *args, worker=worker)

        self._hold(adopted)

    def _settled(self) -> Result:
        each = self._last_at_each("settle", group_tasks.settled)
        return self._submit("settle", group_tasks.settled, each, worker=self.home)

    def _last_at_each(self, label: str, function: Callable[..., Any]) -> list[Result]:
        """Submit a task at every worker, behind its last one with each of its pieces."""
        last = [(piece.worker, ref) for piece, ref in self.held.items() if piece.what != "edges"]
        return [self._submit(label, function, *(ref for v, ref in last if v == w), worker=w) for w in self.workers]


class GroupRound:
    """A round of a group under way. watch: is given every task that it waits for; chain: steps between its cuts."""

    def __init__(
        self, graph: GroupGraph, order: RoundOrder, steps: Iterator[RoundStep], watch: Watch, chain: int
    ) -> None:
        self._graph, self._order, self._steps, self._watch, self._chain = graph, order, steps, watch, chain
        self._begun = time.monotonic()
        self._score = Score(0.0, 0, 0)  # of the steps that have ended
        self._last: RoundStep | None = None  # that was submitted
        self._samples = 0  # of those that were
        self._flight: dict[Any, tuple[RoundStep, Future]] = {}  # by key
        self._met: Future | None = None  # held: others hang on it
        self._settling: Future | None = None
        self._report: Future | None = None
        graph.cut_chain()

    def expects(self, future: Future) -> bool:
        """Return True if the round waits for this task now."""
        return future.key in self._flight or future is self._settling or future is self._report

    def take(self, future: Future, result: Any, now: float) -> list[Fact]:
        """Go on with a step's score, a settled chain, or the report that ends the round. Raises Diverged."""
        order = self._order
        if future is self._report:
            return [RoundDone(order.worker, order.life, order.session, self._reported(*result), now)]
        if future is self._settling:
            self._settling = None
            if self._report is None:
                self._graph.cut_chain()
        else:
            step, _ = self._flight.pop(future.key)
            if not math.isfinite(result.loss_sum):
                reason = f"training diverged at learning rate {step.pace.lr:.3g}"
                raise Diverged(f"loss = {result.loss}", reason, "lower train.lr")
            self._score += result
        self.advance()
        return [Progress(order.worker, order.life, order.session, now)]

    def _reported(self, own: RoundReport, counters: Mapping[str, Counters]) -> RoundReport:
        """Return the group's report. It counts as busy while it neither exchanges, waits nor judges.

        Of a round that ended early, as far as its samples were pushed.
        """
        apart = own.communication + own.wait + own.evaluation
        busy = max(time.monotonic() - self._begun - apart, 1e-9) * own.samples / self._samples
        members = tuple(GroupMember(name=name, **asdict(each)) for name, each in counters.items())
        return own._replace(busy=busy, members=members)

    def advance(self) -> None:
        """Submit steps up to `STEPS_AHEAD` ahead of those that have ended."""
        while self._report is None and self._settling is None and len(self._flight) <= STEPS_AHEAD:
            if self._graph.chained < self._chain:
                self._submit(next(self._steps))
            elif self._flight:
                return
            else:
                self._settling = self._graph.settle()
                self._watch(self._order.worker, self._settling)

    @property
    def home(self) -> str:
        """The worker that makes the round's exchanges."""
        return self._graph.home

    def end_early(self) -> None:
        """Let the round end behind the steps submitted so far."""
        if self._report is None and self._last is not None:
            seconds = self._graph.context.calibrations[self.home].seconds_per_sample
            self._meet(self._last, CutShort(self._last.number + 1, seconds))
            self._end()

    def cancel(self) -> None:
        """Give up all that is under way.

        Dask's own cancel would also cancel the tasks that depend on one. It fails where some results were not wanted.
        """
        own = (future for _, future in self._flight.values())
        for future in (*own, self._met, self._settling, self._report, *self._graph.held.values()):
            if future is not None:
                future.release()

    def _submit(self, step: RoundStep) -> None:
        score = self._graph.submit(step)
        self._flight[score.key] = step, score
        self._last, self._samples = step, self._samples + step.samples
        self._watch(self._order.worker, score)
        if step.meets:
            self._meet(step)
        if step.last:
            self._end()

    def _meet(self, step: RoundStep, early: CutShort | None = None) -> None:
        last = step.last or early is not None
        meeting = GroupMeeting(self._order, last, self._score, step.pace.lr, early)
        self._met = self._graph.meet(meeting, [future for _, future in self._flight.values()])

    def _end(self) -> None:
        self._report = self._graph.end(self._order)
        self._watch(self._order.worker, self._report)


class GroupReplicas:
    """The groups of a run's workers."""

    def __init__(self, context: RunContext, rule: UpdateRule) -> None:
        self._context, self._rule = context, rule
        self._cadence = Cadence(rule, context.job.train.batch_size)
        self._layout = layout_of(context.job, context.dataset)
        self._stages = stages_of(network_of(context.job, context.dataset))
        self._groups: dict[str, GroupGraph] = {}
        self._rows: dict[str, FormedGroup] = {}
        self._generation = 0

    def form(self, order: orders.FormGroups) -> None:
        """Form the groups that are new, and log all. Raises WorkersLost where a worker of them is lost meanwhile.

        Those that could not be formed then are new the next time, too.
        """
        going_on = order.groups.keys() - {*order.changed}
        self._groups = {name: graph for name, graph in self._groups.items() if name in going_on}
        for name, members in order.groups.items():
            if name in self._groups:
                continue
            part = self._context.only(members)
            if order.measure_links:
                part.links = measure_links(part, fastest(part), members)
            speed = sum(1 / self._context.calibrations[member].seconds_per_sample for member in members)
            graph = self._groups[name] = GroupGraph(part, self._stages, self._layout)
            alive = part.workers.alive
            kinds = Counter(member.kind for member in alive.values())
            device = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
            self._rows[name] = FormedGroup(
                name=name, home=graph.home, members=[*alive], device=device, images_per_second=speed
            )
        rows = [self._rows[name] for name in order.groups]
        self._context.emit(GroupsFormed(groups=rows, left_out=list(order.left_out)))
        cuts = [Shares(graph.balance, graph.kernels).event() for graph in self._groups.values()]
        kernels = {w: own for cut in cuts for w, own in cut.kernels.items()}
        divided = {w: own for cut in cuts for w, own in cut.divided.items()}
        self._context.emit(KernelsSharded(home="", kernels=kernels, divided=divided, of=cuts[0].of))

    def join(self, order: RoundOrder) -> Future:
        """Let a group join the server. The future ends when its members hold the center."""
        self._generation += 1
        return self._graph(order.worker).join(order, self._generation)

    def _graph(self, name: str) -> GroupGraph:
        if name not in self._groups:  # it could not be formed, which the coordinator is told
            raise WorkersLost(())
        return self._groups[name]

    def start(self, order: RoundOrder, watch: Watch) -> PendingWork:
        """Submit the first steps of a group's round."""
        job, rule, round_ = self._context.job, self._rule, order.round
        assert round_ is not None, "the order of a round"
        passes, exchanges = rule.passes(job.train.epochs), self._cadence.exchanges(round_)
        steps = round_steps(job, round_, passes=passes, scale=order.scale, exchanges=exchanges)
        work = GroupRound(self._graph(order.worker), order, steps, watch, job.cluster.chain)
        work.advance()
        return work

    def stuck(self, replica: str) -> tuple[str, ...]:
        """Return the members that have tasks to do; all of them where none has."""
        context, group = self._context, self._graph(replica).context
        processing = context.connection.processing()
        members = {name: member for name, member in group.workers.alive.items() if name in context.workers.alive}
        return tuple([name for name, member in members.items() if processing.get(member.address)] or members)
