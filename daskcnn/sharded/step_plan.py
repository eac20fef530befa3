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
    Arrival,
    Carried,
    Cuts,
    Flow,
    Kernels,
    PlannedTask,
    TaskGroup,
    TaskKind,
    WantedEdge,
    What,
)
from daskcnn.sharded.stages import (
    Share,
    Stage,
    added_channels,
    channel_size,
    edges_travel_along,
    kernel_size,
    neighbours,
    rested,
    shard_shape,
    shares_of,
    stage_shapes,
    sum_size,
)
from daskcnn.sharded.task_list import TaskList


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
        return [channel_size(stage, shape) for stage, shape in zip(self.stages, self._sharded, strict=True)]

    @cached_property
    def _sharded(self) -> list[Shape]:
        """The shape of what all shards of each stage make together."""
        return [shard_shape(stage, shape) for stage, shape in zip(self.stages, self.shapes, strict=True)]

    @cached_property
    def _made(self) -> list[Shape]:
        """The shape of each stage's outputs."""
        return [rested(stage, shape) for stage, shape in zip(self.stages, self._sharded, strict=True)]

    @cached_property
    def judged_by_all(self) -> bool:
        """Whether each worker of the last stage computes the loss itself: it takes next to nothing. Else home does."""
        return self.stages[-1].light and self.home in self.kernels[-1]

    @property
    def judges(self) -> list[str]:
        """Workers that compute the loss."""
        return list(self.kernels[-1]) if self.judged_by_all else [self.home]

    # --- who works on whose outputs ---

    @cached_property
    def widths(self) -> dict[int, int]:
        """Channels of each stage's outputs, by its number."""
        return {i: shape[-1] for i, shape in enumerate(self._made)}

    @cached_property
    def value_sizes(self) -> list[int]:
        """Numbers a sample of each stage's outputs."""
        return [math.prod(shape) for shape in self._made]

    def makers(self, i: int) -> Mapping[str, Share] | tuple[str]:
        """Workers that others get a stage's outputs from."""
        return (self.home,) if self.stages[i].merged else self.shares[i]

    def workers(self, i: int) -> Collection[str]:
        """Workers that work on a stage's inputs."""
        return self.kernels[i].keys() if self.stages[i].conv is not None else (self.home,)

    @cached_property
    def uses(self) -> list[dict[str, Use]]:
        """How each worker uses the outputs of each stage. Workers that need none of them are left out."""
        found: list[dict[str, Use]] = [{} for _ in self.stages]
        for i, stage in enumerate(self.stages):
            for worker in self.workers(i):
                for source, channels in self._needed(i, stage, worker):
                    before = found[source].get(worker)
                    found[source][worker] = before.also(i, channels) if before else Use((i,), channels)
        return found

    def _needed(self, i: int, stage: Stage, worker: str) -> Iterator[tuple[int, slice]]:
        """The outputs of other stages that a worker needs for its part of a stage: their stages and channels."""
        for source in stage.inputs:
            yield source, slice(0, self.widths[source])
        for addend in stage.addends:
            for source, channels, _ in added_channels(addend, self.shares[i][worker], self.widths):
                if source not in stage.inputs:
                    yield source, channels

    @cached_property
    def _whole(self) -> list[dict[str, None]]:
        """Workers that get all of each stage's outputs."""
        return [
            {w: None for w, use in uses.items() if use.channels == slice(0, self.widths[i])}
            for i, uses in enumerate(self.uses)
        ]

    def _overlaps(self, i: int, worker: str) -> Iterator[tuple[str, slice]]:
        """The makers of a stage's channels that a worker needs some of, and which of them."""
        need = self.uses[i][worker].channels
        for maker in self.makers(i):
            share = None if self.stages[i].merged or self.stages[i].by == "samples" else self.shares[i][maker]
            own = slice(0, self.widths[i]) if share is None else share.own
            both = slice(max(need.start, own.start), min(need.stop, own.stop))
            if both.start < both.stop:
                yield maker, both

    def reaching(self, i: int, worker: str) -> Iterator[tuple[str, slice]]:
        """The workers that make a stage's gradients of what this one needs some of, and of which channels."""
        wanted = self.shares[i][worker].graded if not self.stages[i].merged else slice(0, self.widths[i])
        for other, use in self.uses[i].items():
            both = slice(max(wanted.start, use.channels.start), min(wanted.stop, use.channels.stop))
            if other not in self._whole[i] and both.start < both.stop:
                yield other, both

    @cached_property
    def takers(self) -> list[Collection[str]]:
        """Workers that each stage's shards send their outputs to. Some who only add them get those of few shards."""
        behind: list[Collection[str]] = [
            (self.home,) if stage.rest is not None else self.uses[i].keys() for i, stage in enumerate(self.stages[:-1])
        ]
        return [*behind, self.kernels[-1].keys() if self.judged_by_all else (self.home,)]

    def takers_of(self, i: int, maker: str) -> set[str]:
        """Workers that a worker's outputs of a stage go to, as they leave the stage."""
        if i == self.last:
            return set(self.takers[i])
        partly = (w for w in self.uses[i] if w not in self._whole[i])
        return {*self._whole[i], *(w for w in partly if maker in dict(self._overlaps(i, w)))}

    def holders(self, i: int) -> list[str]:
        """Workers that have the weights of a stage's undivided layers."""
        return self.judges if i == self.last else [self.home]

    # --- groups of tasks, and what they give each other ---

    @cached_property
    def groups(self) -> tuple[TaskGroup, ...]:
        """The step's tasks by kind and stage, each group behind those that it depends on."""
        groups: list[TaskGroup] = []
        source = self._forward(groups)
        back: dict[int, int] = {}
        for i in reversed(range(len(self.stages))):
            source = self._backward(groups, i, source, back)
        groups.append(TaskGroup(TaskKind.SCORE, self.last, (self.home,), source=self._judging(groups), once=True))
        return tuple(groups)

    def _forward(self, groups: list[TaskGroup]) -> int:
        """Add the way there; the number of the group that gives the last stage's shards what they go back by."""
        made: dict[int, int] = {}
        for i, stage in enumerate(self.stages):
            inputs = [Arrival(flow, made[flow.stage]) for flow in self.taken_in(i)]
            if self.kernels[i]:
                groups.append(TaskGroup(TaskKind.FORWARD, i, self.kernels[i], inputs))
                made[i] = len(groups) - 1
                inputs = [Arrival(self._outputs[i], made[i])]
            if stage.merged and i < self.last:
                groups.append(TaskGroup(TaskKind.MERGE_FORWARD, i, (self.home,), inputs))
                made[i] = len(groups) - 1
        if not self.judged_by_all:
            groups.append(TaskGroup(TaskKind.HEAD, self.last, (self.home,), inputs))
        return len(groups) - 1

    def _backward(self, groups: list[TaskGroup], i: int, source: int, back: dict[int, int]) -> int:
        """Add a stage's way back. back: the group that hands on each stage's gradients of its inputs, so far.

        source: the group that gives the last stage's shards what they go back by.
        """
        inputs = [Arrival(flow, back[number]) for number, flow in self._given_back(i)]
        if i == self.last:
            back[i] = source
            inputs = [Arrival(self._gradients(i), source)]
        elif self.stages[i].merged:
            groups.append(TaskGroup(TaskKind.MERGE_BACKWARD, i, (self.home,), inputs))
            back[i] = len(groups) - 1
            inputs = [Arrival(self._gradients(i), back[i])]
        if self.kernels[i]:
            if i == self.last and self.judged_by_all:
                inputs = [Arrival(self._outputs[i], source)]
                groups.append(TaskGroup(TaskKind.LOSS_AND_BACKWARD, i, self.kernels[i], inputs))
            else:
                groups.append(TaskGroup(TaskKind.BACKWARD, i, self.kernels[i], inputs))
            back[i] = len(groups) - 1
            if apart := self._edges_apart(i):
                groups.append(TaskGroup(TaskKind.TAKE_EDGES, i, apart, source=back[i], once=True))
        return source

    @staticmethod
    def _judging(groups: Sequence[TaskGroup]) -> int:
        kinds = (TaskKind.HEAD, TaskKind.LOSS_AND_BACKWARD)
        return next(i for i, group in enumerate(groups) if group.kind in kinds)

    def taken_in(self, i: int) -> Iterator[Flow]:
        """Outputs of other stages that reach a stage's workers for it: each worker is sent them once."""
        for source in self.stages[i].consumed:
            first = {w: None for w, use in self.uses[source].items() if use.by[0] == i}
            whole = {w: None for w in first if w in self._whole[source]}
            sizes = self._value_sizes(source)
            pairs = {(v, w): sizes[v] for w in first if w not in whole for v, _ in self._overlaps(source, w)}
            what: What = "merged outputs" if self.stages[source].merged else "outputs"
            if first:
                yield Flow(source, what, self.makers(source), whole, sizes, pairs=pairs)

    def _given_back(self, i: int) -> Iterator[tuple[int, Flow]]:
        """Gradients of a stage's outputs: the stage whose workers hand them on, and what they do.

        A worker adds up all that its tasks make of them. The one that got the outputs first hands it on.
        """
        what: What = "merged gradients" if self.stages[i].merged else "gradients"
        partly: dict[str, list[tuple[str, int]]] = {}
        if len(self._whole[i]) < len(self.uses[i]):
            for worker in self.makers(i):
                for other, both in self.reaching(i, worker):
                    size = self.value_sizes[i] // self.widths[i] * (both.stop - both.start)
                    partly.setdefault(other, []).append((worker, size))
        for number in sorted({use.by[0] for use in self.uses[i].values()}):
            whole = {w: None for w in self._whole[i] if self.uses[i][w].by[0] == number}
            senders = [w for w in partly if self.uses[i][w].by[0] == number]
            pairs = {(w, other): size for w in senders for other, size in partly[w]}
            if self.stages[i].merged:
                flow = Flow(i, what, whole, (self.home,), {self.home: self.value_sizes[i]}, True, pairs)
            else:
                flow = self._gradients(i)._replace(senders=whole, pairs=pairs)
            yield number, flow

    @cached_property
    def _outputs(self) -> list[Flow]:
        """Outputs that each stage's shards give those that come next."""
        return [
            Flow(i, "outputs", own, self.takers[i], self._message_sizes(i, own)) for i, own in enumerate(self.kernels)
        ]

    def _value_sizes(self, i: int) -> Mapping[str, int]:
        """Numbers of a stage's outputs as each of their makers sends them."""
        return {self.home: self.value_sizes[i]} if self.stages[i].merged else self._outputs[i].sizes

    def _gradients(self, i: int) -> Flow:
        """Gradients of their outputs that a stage's shards are given, and of those next to their own."""
        own, reach = self.kernels[i], self.stages[i].reach
        sizes = self._message_sizes(i, _graded(own, reach)) if reach else self._outputs[i].sizes
        return Flow(i, "gradients", (self.home,), own, sizes, by_receiver=True)

    def _message_sizes(self, i: int, channels: Mapping[str, int]) -> Mapping[str, int]:
        size, more = self.channel_sizes[i], sum_size(self.stages[i])
        return {w: size * n + more for w, n in channels.items()}

    def _edges_apart(self, i: int) -> list[str]:
        """Workers whose shards' edges take a task of their own: the gradients go to others than the edges."""
        if not self.stages[i].reach or not self.stages[i].consumed:
            return []
        back = {worker: self._handed_to(i, worker) for worker in self.kernels[i]}
        if any(len(takers) > 2 for takers in back.values()):
            return list(self.kernels[i])
        return [w for w in self.kernels[i] if not edges_travel_along(self.shares[i], w, back[w])]

    def _handed_to(self, i: int, worker: str) -> set[str]:
        """Workers that get gradients of what a stage's part works on from this worker."""
        return {other for source in self.handed_on(i, worker) for other in self.gradient_cuts(source, worker, 0)}

    def start_of(self, i: int, worker: str) -> int:
        """Number of the first channel of a stage's outputs that a worker is sent, with all others of its maker."""
        if worker in self._whole[i] or self.stages[i].merged or self.stages[i].by == "samples":
            return 0
        return min(self.shares[i][maker].start for maker, _ in self._overlaps(i, worker))

    def handed_on(self, i: int, worker: str) -> list[int]:
        """The stages whose gradients a worker hands on by its task of this stage."""
        uses = ((source, self.uses[source].get(worker)) for source in self.stages[i].consumed)
        return [source for source, use in uses if use and use.by[0] == i]

    def gradient_cuts(self, i: int, worker: str, part: int) -> Cuts:
        """Which part of the gradient of a stage's outputs, of what a worker has of it, goes to which maker."""
        if worker in self._whole[i]:
            return {self.home: WHOLE} if self.stages[i].merged else self.cuts(i, part)
        each = ((maker, dict(self.reaching(i, maker)).get(worker)) for maker in self.makers(i))
        return {maker: (..., both) for maker, both in each if both}

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
        return (arrival.flow for group in self.groups for arrival in group.inputs)

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
        listed = TaskList(self)
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
        share, passes = self.shares[i][worker], 3 if self.stages[i].inputs else 2
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


@dataclass(frozen=True, slots=True)
class Use:
    """How a worker uses the outputs of a stage: for which stages, the first first, and which of their channels."""

    by: tuple[int, ...]
    channels: slice

    def also(self, stage: int, channels: slice) -> Use:
        """The same with one use more."""
        by = self.by if stage == self.by[-1] else (*self.by, stage)
        start, stop = min(self.channels.start, channels.start), max(self.channels.stop, channels.stop)
        return Use(by, slice(start, stop))
