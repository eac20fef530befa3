"""One step of layer sharding as a value: its tasks, what each is given of other tasks' results, what each computes.

`StepPlan` is the only description of a step. Everything done with a step is a fold over it: `cluster.layers` submits
its tasks, `StepPlan.task_count` counts them, `traffic` weighs what travels, `balance` and `sim.sharded_step` time it.

Tasks of one kind and stage form a group with one task a worker. What one group gives another is a flow. Both follow
from the cut (`Division`). Folds that need only sums go over groups, as the share search times thousands of plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from daskcnn.sharded.division import Division
from daskcnn.sharded.plan_parts import Arrival, Carried, Flow, PlannedTask, TaskGroup, TaskKind, What
from daskcnn.sharded.stages import edges_travel_along, sum_size
from daskcnn.sharded.task_list import TaskList


@dataclass(frozen=True)
class StepPlan(Division):
    """A step of a network over these workers: groups of tasks, and the flows between them."""

    @cached_property
    def groups(self) -> tuple[TaskGroup, ...]:
        """The step's tasks by kind and stage, each group behind those that it depends on."""
        groups: list[TaskGroup] = []
        source = self._forward(groups)
        back: dict[int, int] = {}
        for i in reversed(range(len(self.stages))):
            self._backward(groups, i, source, back)
        judging = (TaskKind.HEAD, TaskKind.LOSS_AND_BACKWARD)
        judged = next(number for number, group in enumerate(groups) if group.kind in judging)
        groups.append(TaskGroup(TaskKind.SCORE, self.last, (self.home,), source=judged, once=True))
        return tuple(groups)

    def _forward(self, groups: list[TaskGroup]) -> int:
        """Add the groups of the forward pass. Return the number of the last one, where the backward pass begins."""
        made: dict[int, int] = {}
        for i, stage in enumerate(self.stages):
            inputs = [Arrival(flow, made[flow.stage]) for flow in self.taken_in(i)]
            if self.kernels[i]:
                groups.append(TaskGroup(TaskKind.FORWARD, i, self.kernels[i], inputs))
                inputs = [Arrival(self._outputs[i], len(groups) - 1)]
            if stage.merged and i < self.last:
                groups.append(TaskGroup(TaskKind.MERGE_FORWARD, i, (self.home,), inputs))
            made[i] = len(groups) - 1
        if not self.judged_by_all:
            groups.append(TaskGroup(TaskKind.HEAD, self.last, (self.home,), inputs))
        return len(groups) - 1

    def _backward(self, groups: list[TaskGroup], i: int, source: int, back: dict[int, int]) -> None:
        """Add a stage's groups of the backward pass.

        source: the group where the backward pass begins. back: for each later stage, the group that hands on the
        gradients of its inputs.
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
            kind = TaskKind.BACKWARD
            if i == self.last and self.judged_by_all:
                kind, inputs = TaskKind.LOSS_AND_BACKWARD, [Arrival(self._outputs[i], source)]
            groups.append(TaskGroup(kind, i, self.kernels[i], inputs))
            back[i] = len(groups) - 1
            if apart := self._edges_apart(i):
                groups.append(TaskGroup(TaskKind.TAKE_EDGES, i, apart, source=back[i], once=True))

    def taken_in(self, i: int) -> Iterator[Flow]:
        """Yield the outputs of other stages that are sent for this stage. Each worker is sent them once."""
        for source in self.stages[i].consumed:
            first = {w: None for w, use in self.uses[source].items() if use.by[0] == i}
            whole = {w: None for w in first if w in self._whole[source]}
            merged = self.stages[source].merged
            sizes = {self.home: self.value_sizes[source]} if merged else self._outputs[source].sizes
            pairs = {(v, w): sizes[v] for w in first if w not in whole for v, _ in self._overlaps(source, w)}
            what: What = "merged outputs" if merged else "outputs"
            if first:
                yield Flow(source, what, self.makers(source), whole, sizes, pairs=pairs)

    def _given_back(self, i: int) -> Iterator[tuple[int, Flow]]:
        """Yield the flows of gradients of a stage's outputs, each with the stage whose tasks send it.

        A worker adds up the gradients that its tasks make. The task that got the outputs first sends the sum.
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
        """The outputs that each stage's shards send to the next tasks."""
        sizes = (self._message_sizes(i, own) for i, own in enumerate(self.kernels))
        return [Flow(i, "outputs", self.kernels[i], self.takers[i], each) for i, each in enumerate(sizes)]

    def _gradients(self, i: int) -> Flow:
        """The gradients that a stage's shards get of their outputs and of the channels next to these."""
        sizes = self._outputs[i].sizes
        if self.stages[i].reach:
            graded = {w: share.graded for w, share in self.shares[i].items()}
            sizes = self._message_sizes(i, {w: part.stop - part.start for w, part in graded.items()})
        return Flow(i, "gradients", (self.home,), self.kernels[i], sizes, by_receiver=True)

    def _message_sizes(self, i: int, channels: Mapping[str, int]) -> Mapping[str, int]:
        size, more = self.channel_sizes[i], sum_size(self.stages[i])
        return {w: size * n + more for w, n in channels.items()}

    def _edges_apart(self, i: int) -> list[str]:
        """Workers that need a task of its own to send their shards' edges, as their gradients go to other workers."""
        if not self.stages[i].reach or not self.stages[i].consumed:
            return []
        own = self.kernels[i]
        back = {
            w: {other for source in self.handed_on(i, w) for other in self.gradient_cuts(source, w, 0)} for w in own
        }
        if any(len(takers) > 2 for takers in back.values()):
            return list(own)
        return [w for w in own if not edges_travel_along(self.shares[i], w, back[w])]

    @property
    def flows(self) -> Iterator[Flow]:
        """The flows within a step, which waits for each of them."""
        return (arrival.flow for group in self.groups for arrival in group.inputs)

    @property
    def task_count(self) -> int:
        """The number of tasks of a step."""
        return sum(len(group.workers) * (1 if group.once else self.parts) for group in self.groups)

    @property
    def tasks(self) -> Sequence[PlannedTask]:
        """All tasks, each behind those that it depends on."""
        return self._listed.tasks

    @property
    def carried(self) -> Mapping[Carried, int]:
        """The values that the step leaves for the next one, with the task that has each."""
        return self._listed.latest

    @cached_property
    def _listed(self) -> TaskList:
        listed = TaskList(self)
        for part in range(self.parts):
            for number, group in enumerate(self.groups):
                if not group.once or part == self.parts - 1:
                    listed.add(number, group, part)
        return listed
