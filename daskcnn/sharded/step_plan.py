"""One step of layer sharding as a value: its tasks, what each is given of other tasks' results, what each computes.

`StepPlan` is the only description of a step. What is done with a step are folds over it: `cluster.layers` submits its
tasks, `StepPlan.task_count` counts them, `traffic` weighs what travels, `balance` and `sim.sharded_step` time it.

Tasks of one kind and stage form a group with one task a worker, and what one group gives another is a flow. The plan
makes groups and flows of the cut. `StepPlan.tasks` spells them out, one task after the other. Folds that need sums
only go over the groups: the share search times thousands of plans.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from daskcnn.nn import Shape
from daskcnn.sharded.plan_parts import (
    ALL,
    WHOLE,
    Carried,
    Cuts,
    Flow,
    Kernels,
    PlannedTask,
    TaskGroup,
    TaskInput,
    TaskKind,
    WantedEdge,
)
from daskcnn.sharded.sizes import channel_size, kernel_size, stage_shapes, sum_size
from daskcnn.sharded.stages import Share, Stage, edges_travel_along, neighbours, shares_of


@dataclass(frozen=True)
class StepPlan:
    """A step of a network over these workers.

    Attributes
    ----------
    stages
        Each stage as it is spread for its kernels (`StepPlan.of`).
    shapes
        Of each stage's input, without N.
    home
        Worker that computes the layers that are not divided.
    parts
        Parts of a minibatch that go one behind the other.
    samples
        Samples of a minibatch.
    itemsize, weight_itemsize
        Bytes of a number as it travels, of activations and their gradients, and of weights and theirs.
    weighted
        Stages whose undivided layers have weights.
    placed
        Whether the step is the first behind the placing of its pieces: no gradients of weights are left over.
    """

    stages: Sequence[Stage]
    shapes: Sequence[Shape]
    kernels: Kernels
    home: str
    parts: int = 1
    samples: int = 1
    itemsize: int = 4
    weight_itemsize: int = 4
    weighted: frozenset[int] = frozenset()
    placed: bool = False

    @classmethod
    def of(
        cls,
        stages: Sequence[Stage],
        in_shape: Shape,
        kernels: Kernels,
        home: str,
        *,
        parts: int = 1,
        samples: int = 1,
        itemsize: int = 4,
        weight_itemsize: int = 4,
    ) -> StepPlan:
        """The plan of a network's stages over these kernels, each stage spread as far as pays for its shards."""
        spread = [stage.spread_for(list(own.values())) for stage, own in zip(stages, kernels, strict=True)]
        return cls(spread, stage_shapes(spread, in_shape), kernels, home, parts, samples, itemsize, weight_itemsize)

    # --- the cut ---

    @property
    def last(self) -> int:
        """Number of the last stage."""
        return len(self.stages) - 1

    @cached_property
    def shares(self) -> list[dict[str, Share]]:
        """Each worker's channels of each stage."""
        return [
            dict(zip(own, shares_of(list(own.values()), stage.reach), strict=True))
            for stage, own in zip(self.stages, self.kernels, strict=True)
        ]

    @cached_property
    def made(self) -> list[int]:
        """Channels of each stage's outputs."""
        return [sum(own.values()) for own in self.kernels]

    @cached_property
    def channel_sizes(self) -> list[int]:
        """Numbers a sample of one channel of each stage's outputs."""
        return [channel_size(stage, shape) for stage, shape in zip(self.stages, self.shapes, strict=True)]

    @cached_property
    def judged_by_all(self) -> bool:
        """Whether each worker of the last stage computes the loss itself: it takes next to nothing. Else home does."""
        return self.stages[-1].light and self.home in self.kernels[-1]

    @property
    def judges(self) -> list[str]:
        """Workers that compute the loss."""
        return list(self.kernels[-1]) if self.judged_by_all else [self.home]

    @cached_property
    def takers(self) -> list[Collection[str]]:
        """Workers that each stage's outputs go to."""
        behind: list[Collection[str]] = [
            (self.home,) if stage.rest is not None else self.kernels[i + 1].keys()
            for i, stage in enumerate(self.stages[:-1])
        ]
        return [*behind, self.kernels[-1].keys() if self.judged_by_all else (self.home,)]

    def holders(self, i: int) -> list[str]:
        """Workers that have the weights of a stage's undivided layers."""
        return self.judges if i == self.last else [self.home]

    # --- groups of tasks, and what they give each other ---

    @cached_property
    def groups(self) -> tuple[TaskGroup, ...]:
        """The step's tasks by kind and stage, each group behind those that it depends on."""
        groups: list[TaskGroup] = []
        source = self._forward(groups)
        for i in reversed(range(len(self.stages))):
            source = self._backward(groups, i, source)
        groups.append(TaskGroup(TaskKind.SCORE, self.last, (self.home,), source=self._judging(groups), once=True))
        return tuple(groups)

    def _forward(self, groups: list[TaskGroup]) -> int | None:
        """Add the way there; the number of the group that gives the last stage's shards what they go back by."""
        source: int | None = None
        inputs: Flow | None = None
        for i, stage in enumerate(self.stages):
            if self.kernels[i]:
                groups.append(TaskGroup(TaskKind.FORWARD, i, self.kernels[i], inputs, source))
                source, inputs = len(groups) - 1, self._outputs[i]
            if stage.rest is not None and i < self.last:
                groups.append(TaskGroup(TaskKind.MERGE_FORWARD, i, (self.home,), inputs, source))
                size = {self.home: math.prod(self.shapes[i + 1])}
                source, inputs = len(groups) - 1, Flow(i, "merged outputs", (self.home,), self.kernels[i + 1], size)
        if not self.judged_by_all:
            groups.append(TaskGroup(TaskKind.HEAD, self.last, (self.home,), inputs, source))
            source = len(groups) - 1
        return source

    def _backward(self, groups: list[TaskGroup], i: int, source: int | None) -> int | None:
        """Add a stage's way back, and that of the undivided layers before it; the number of the group that hands on."""
        if self.kernels[i]:
            if i == self.last and self.judged_by_all:
                groups.append(TaskGroup(TaskKind.LOSS_AND_BACKWARD, i, self.kernels[i], self._outputs[i], source))
            else:
                groups.append(TaskGroup(TaskKind.BACKWARD, i, self.kernels[i], self._gradients(i), source))
            source = len(groups) - 1
            if apart := self._edges_apart(i):
                groups.append(TaskGroup(TaskKind.TAKE_EDGES, i, apart, source=source, once=True))
        if i > 0 and self.stages[i - 1].rest is not None:
            size = {self.home: math.prod(self.shapes[i])}
            inputs = Flow(i - 1, "merged gradients", self.kernels[i], (self.home,), size, by_receiver=True)
            groups.append(TaskGroup(TaskKind.MERGE_BACKWARD, i - 1, (self.home,), inputs, source))
            source = len(groups) - 1
        return source

    @staticmethod
    def _judging(groups: Sequence[TaskGroup]) -> int:
        kinds = (TaskKind.HEAD, TaskKind.LOSS_AND_BACKWARD)
        return next(i for i, group in enumerate(groups) if group.kind in kinds)

    @cached_property
    def _outputs(self) -> list[Flow]:
        """Outputs that each stage's shards give those that come next."""
        return [
            Flow(i, "outputs", own, self.takers[i], self._message_sizes(i, own)) for i, own in enumerate(self.kernels)
        ]

    def _gradients(self, i: int) -> Flow:
        """Gradients of their outputs that a stage's shards are given, and of those next to their own."""
        own, reach = self.kernels[i], self.stages[i].reach
        sizes = self._message_sizes(i, _graded(own, reach)) if reach else self._outputs[i].sizes
        return Flow(i, "gradients", self.takers[i], own, sizes, by_receiver=True)

    def _message_sizes(self, i: int, channels: Mapping[str, int]) -> Mapping[str, int]:
        size, more = self.channel_sizes[i], sum_size(self.stages[i])
        return {w: size * n + more for w, n in channels.items()}

    def _edges_apart(self, i: int) -> list[str]:
        """Workers whose shards' edges take a task of their own: the gradients go to others than the edges."""
        if i == 0 or not self.stages[i].reach:
            return []
        back = self.kernels[i - 1] if self.stages[i - 1].rest is None else (self.home,)
        if len(back) > 2:
            return list(self.kernels[i])
        return [w for w in self.kernels[i] if not edges_travel_along(self.shares[i], w, back)]

    # --- what the step before has left ---

    def weight_gradients(self, i: int) -> Flow | None:
        """Gradients of all weights, which every shard by samples gives all others. None for shards by kernels."""
        if self.stages[i].by == "kernels":
            return None
        own, size = self.kernels[i], kernel_size(self.stages[i], self.shapes[i]) * self.made[i]
        return Flow(i, "weight gradients", own, own, dict.fromkeys(own, size))

    def edges(self, i: int, worker: str) -> list[WantedEdge]:
        """Edges that a shard is given of its neighbours' shards."""
        if not self.stages[i].reach:
            return []
        return [WantedEdge(*each) for each in neighbours(self.shares[i], worker)]

    def edge_sizes(self, i: int) -> dict[str, int]:
        """Numbers of an edge of each worker's shard: of as many channels as any neighbour may need."""
        most = 2 * self.stages[i].reach
        if not most:
            return {}
        each = kernel_size(self.stages[i], self.shapes[i])
        return {worker: min(most, own) * each for worker, own in self.kernels[i].items()}

    # --- the plan task by task ---

    @property
    def flows(self) -> Iterator[Flow]:
        """Flows within a step; the step waits for each of them."""
        return (group.inputs for group in self.groups if group.inputs is not None)

    @property
    def task_count(self) -> int:
        """Tasks of a step."""
        return sum(len(group.workers) * (1 if group.once else self.parts) for group in self.groups)

    @cached_property
    def tasks(self) -> tuple[PlannedTask, ...]:
        """All tasks, each behind those that it depends on."""
        return tuple(self._spelled_out[0])

    @cached_property
    def carried(self) -> Mapping[Carried, int]:
        """Values that the step leaves for the next one, and the task that has each."""
        return self._spelled_out[1]

    @cached_property
    def _spelled_out(self) -> tuple[list[PlannedTask], dict[Carried, int]]:
        listed = _Listed(self)
        for part in range(self.parts):
            for number, group in enumerate(self.groups):
                if not group.once or part == self.parts - 1:
                    listed.add(number, group, part)
        return listed.tasks, listed.latest

    def part_samples(self, part: int) -> int:
        """Samples of a part of the minibatch."""
        return self.samples * (part + 1) // self.parts - self.samples * part // self.parts

    def cuts(self, i: int, part: int) -> Cuts:
        """Which part of the gradient of a stage's outputs, or of its sums, each of its workers is given."""
        if self.stages[i].summed is not None:
            return {ALL: WHOLE}
        if self.stages[i].by == "kernels":
            return {worker: (..., share.graded) for worker, share in self.shares[i].items()}
        count = self.part_samples(part)
        return {worker: (..., share.samples(count), slice(None)) for worker, share in self.shares[i].items()}

    def work(self, i: int, worker: str, way: TaskKind | None = None) -> float:
        """Part of a stage's seconds for all kernels, forward and backward, that a worker's shard takes, or of one way.

        Channels next to its own are computed on the way there only. That is one of three passes, or of two where the
        input needs no gradient.
        """
        share, passes = self.shares[i][worker], 2 if i == 0 else 3
        own, held = share.stop - share.start, share.held.stop - share.held.start
        there, back = held / passes / share.total, own * (passes - 1) / passes / share.total
        if way is None:
            return there + back
        return there if way is TaskKind.FORWARD else back


def _graded(own: Mapping[str, int], reach: int) -> dict[str, int]:
    """Channels that each worker is given gradients of (`Share.graded`)."""
    ends = list(accumulate(own.values()))
    total = ends[-1]
    named = zip(own.items(), ends, strict=True)
    return {w: min(total, end + reach) - max(0, end - n - reach) for (w, n), end in named}


BACKWARD = (TaskKind.BACKWARD, TaskKind.LOSS_AND_BACKWARD)
"""Tasks on a shard's way back: the shard makes its step there."""


class _Listed:
    """The tasks of a plan as they are listed. latest: which task has the weights and edges of each worker by then."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.tasks: list[PlannedTask] = []
        self.latest: dict[Carried, int] = {}
        self._numbers: dict[tuple[int, int, str], int] = {}  # by group, part, worker
        self._judged: int | None = None
        self._merged: dict[int, int] = {}  # of each stage, the task on the way there

    def add(self, number: int, group: TaskGroup, part: int) -> None:
        """The group's tasks for a part of the minibatch."""
        for worker in group.workers:
            task = self._task(group, part, worker)
            self._numbers[number, part, worker] = len(self.tasks)
            self._remember(task, len(self.tasks))
            self.tasks.append(task)

    def _task(self, group: TaskGroup, part: int, worker: str) -> PlannedTask:
        plan, kind, i = self.plan, group.kind, group.stage
        divided = kind is TaskKind.FORWARD or kind in BACKWARD
        cuts = self._cuts(kind, i, part)
        return PlannedTask(
            kind,
            kind.label(plan.stages[i]),
            i,
            worker,
            part,
            (
                *self._inputs(group, part, worker),
                *self._before(group, part, worker),
                *self._behind(group, part, worker),
            ),
            plan.shares[i][worker] if divided else None,
            cuts,
            self._away(kind, i, worker, cuts),
            plan.work(i, worker, kind) * plan.part_samples(part) / plan.samples if divided else 0.0,
        )

    # --- what a task is given ---

    def _inputs(self, group: TaskGroup, part: int, worker: str) -> Iterator[TaskInput]:
        """Inputs from other tasks of the same part."""
        flow, plan = group.inputs, self.plan
        if flow is None:
            return
        assert group.source is not None, "a flow comes from a group"
        cuts = plan.cuts(flow.stage, part) if flow.what == "gradients" else {}
        cut = cuts.get(worker, cuts.get(ALL, WHOLE))
        for sender in flow.senders:
            nbytes = plan.itemsize * self._numbers_of(flow, sender, worker, part)
            yield TaskInput(self._numbers[group.source, part, sender], sender, flow.what, cut, nbytes=nbytes)

    def _numbers_of(self, flow: Flow, sender: str, receiver: str, part: int) -> int:
        """Numbers of a message: of a stage by samples those of whole samples, which a flow has only on average."""
        plan, i, count = self.plan, flow.stage, self.plan.part_samples(part)
        if plan.stages[i].by == "kernels" or sender == receiver:
            return count * flow.numbers(sender, receiver)
        samples = plan.shares[i][receiver if flow.by_receiver else sender].samples(count)
        return int(samples.stop - samples.start) * plan.made[i] * plan.channel_sizes[i]

    def _before(self, group: TaskGroup, part: int, worker: str) -> Iterator[TaskInput]:
        """Inputs from the step before: what shards need of each other to be whole. It travels once a step."""
        plan, i = self.plan, group.stage
        if group.kind is not TaskKind.FORWARD:
            return
        itemsize = plan.weight_itemsize if part == 0 else 0
        sizes = plan.edge_sizes(i)
        for edge in plan.edges(i, worker):
            source, nbytes = Carried("edges", i, edge.neighbour), itemsize * sizes[edge.neighbour]
            yield TaskInput(source, edge.neighbour, "edges", edge=edge, nbytes=nbytes)
        if not plan.placed and (flow := plan.weight_gradients(i)):
            for sender in flow.senders:
                nbytes = itemsize * flow.numbers(sender, worker)
                yield TaskInput(Carried("shard", i, sender), sender, "weight gradients", nbytes=nbytes)

    def _behind(self, group: TaskGroup, part: int, worker: str) -> Iterator[TaskInput]:
        """Tasks of its own worker that a task only waits for."""
        kind, i = group.kind, group.stage
        shard, merged = Carried("shard", i, worker), Carried("merged", i, worker)
        sources: list[int | Carried] = []
        if kind is TaskKind.FORWARD:
            sources = [shard]
        elif kind is TaskKind.MERGE_FORWARD:
            sources = [merged] if i in self.plan.weighted else []
        elif kind is TaskKind.HEAD and self._judged is not None:
            sources = [self._judged]
        elif kind in (TaskKind.TAKE_EDGES, TaskKind.SCORE):
            assert group.source is not None, "made of a group's result"
            sources = [self._numbers[group.source, part, worker]]
        else:
            sources = [self.latest.get(shard, shard)] if kind in BACKWARD else []
            sources += [self._merged[i]] if kind is TaskKind.MERGE_BACKWARD else []
            if kind is not TaskKind.BACKWARD and i in self.plan.weighted:
                sources.append(self.latest.get(merged, merged))
        return (TaskInput(source, worker) for source in sources)

    # --- what it makes ---

    def _cuts(self, kind: TaskKind, i: int, part: int) -> Cuts | None:
        plan = self.plan
        if kind in (TaskKind.HEAD, TaskKind.MERGE_BACKWARD):
            return plan.cuts(i, part) if plan.kernels[i] else {}
        if kind not in BACKWARD or i == 0:
            return None
        return {plan.home: WHOLE} if plan.stages[i - 1].rest is not None else plan.cuts(i - 1, part)

    def _away(self, kind: TaskKind, i: int, worker: str, cuts: Cuts | None) -> int:
        plan = self.plan
        if kind is TaskKind.FORWARD:
            return len({*plan.takers[i]} - {worker})
        if kind is TaskKind.MERGE_FORWARD:
            return len({*plan.kernels[i + 1]} - {worker})
        if kind is TaskKind.BACKWARD and plan.stages[i].by == "samples":
            return len(plan.kernels[i]) - 1
        if cuts and ALL in cuts:
            return len({*plan.kernels[i]} - {worker})
        return 1 if cuts else 0

    def _remember(self, task: PlannedTask, number: int) -> None:
        """Remember what the task leaves for those behind it."""
        kind, i, worker = task.kind, task.stage, task.worker
        if kind is TaskKind.MERGE_FORWARD:
            self._merged[i] = number
        if kind is TaskKind.HEAD:
            self._judged = number
        if kind in BACKWARD:
            self.latest[Carried("shard", i, worker)] = number
        if kind in (*BACKWARD, TaskKind.TAKE_EDGES) and self.plan.stages[i].reach:
            self.latest[Carried("edges", i, worker)] = number
        if kind in (TaskKind.HEAD, TaskKind.LOSS_AND_BACKWARD, TaskKind.MERGE_BACKWARD) and i in self.plan.weighted:
            self.latest[Carried("merged", i, worker)] = number
