"""The tasks of a step's plan one by one: the inputs of each, and the receivers of its result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from daskcnn.sharded.division import Division
from daskcnn.sharded.plan_parts import ALL, Carried, Cuts, Flow, PlannedTask, Taken, TaskGroup, TaskInput, TaskKind

BACKWARD = (TaskKind.BACKWARD, TaskKind.LOSS_AND_BACKWARD)
"""The tasks in which a shard goes backward and makes its step."""


class TaskList:
    """The tasks of a plan in order. latest: the last task so far that has each worker's weights and edges."""

    def __init__(self, plan: Division) -> None:
        self.plan = plan
        self.tasks: list[PlannedTask] = []
        self.latest: dict[Carried, int] = {}
        self._numbers: dict[tuple[int, int, str], int] = {}  # by group, part, worker
        self._judged: int | None = None
        self._merged: dict[int, int] = {}  # by stage: the task that merges it in the forward pass
        self._there: dict[tuple[int, int, str], int] = {}  # by stage, part, worker: the task that works on its inputs,
        self._back: dict[tuple[int, int, str], int] = {}  # and the one that makes their gradients

    def add(self, number: int, group: TaskGroup, part: int) -> None:
        """Add a group's tasks for a part of the minibatch."""
        for worker in group.workers:
            task = self._task(group, part, worker)
            self._numbers[number, part, worker] = len(self.tasks)
            self._remember(task, len(self.tasks))
            self.tasks.append(task)

    def _task(self, group: TaskGroup, part: int, worker: str) -> PlannedTask:
        plan, kind, i = self.plan, group.kind, group.stage
        divided = kind is TaskKind.FORWARD or kind in BACKWARD
        cuts = self._cuts(kind, i, worker, part)
        inputs = (inputs(group, part, worker) for inputs in (self._inputs, self._before, self._behind))
        return PlannedTask(
            kind,
            kind.label(plan.stages[i]),
            i,
            worker,
            part,
            tuple(chain.from_iterable(inputs)),
            plan.shares[i][worker] if divided else None,
            cuts,
            tuple(self._taken(group, worker)),
            self._away(kind, i, worker, cuts),
            plan.work(i, worker, kind) * plan.part_samples(part) / plan.samples if divided else 0.0,
        )

    # --- inputs ---

    def _inputs(self, group: TaskGroup, part: int, worker: str) -> Iterator[TaskInput]:
        """Yield the inputs from other tasks of the same part."""
        plan = self.plan
        for flow, source in group.inputs:
            i, cuts = flow.stage, plan.cuts(flow.stage, part) if flow.what == "gradients" else {}
            for sender in flow.senders_to(worker):
                cut = cuts.get(worker, cuts.get(ALL, (...,)))
                place: slice | None = None
                if flow.what in ("gradients", "merged gradients") and (sender, worker) in flow.pairs:
                    both = dict(plan.reaching(i, worker))[sender]
                    first = 0 if plan.stages[i].merged else plan.shares[i][worker].graded.start
                    cut, place = (..., both), slice(both.start - first, both.stop - first)
                nbytes = plan.itemsize * self._numbers_of(flow, sender, worker, part)
                yield TaskInput(self._numbers[source, part, sender], sender, flow.what, cut, place, nbytes=nbytes)

    def _taken(self, group: TaskGroup, worker: str) -> Iterator[Taken]:
        """Yield the other stages' outputs that the task works on."""
        plan, i = self.plan, group.stage
        if group.kind not in self._consuming(i):
            return
        brought = {flow.stage: len(flow.senders_to(worker)) for flow, _ in group.inputs}
        for source in plan.stages[i].consumed:
            use = plan.uses[source].get(worker)
            if use is not None and i in use.by:
                count, start = brought.get(source, 0), plan.start_of(source, worker)
                yield Taken(source, count, start, len(use.by) > 1, plan.stages[source].by)

    def _consuming(self, i: int) -> tuple[TaskKind, ...]:
        """Kinds of tasks that work on the outputs of a stage's inputs."""
        return (TaskKind.FORWARD,) if self.plan.kernels[i] else (TaskKind.MERGE_FORWARD, TaskKind.HEAD)

    def _numbers_of(self, flow: Flow, sender: str, receiver: str, part: int) -> int:
        """Numbers of a message. A stage by samples sends whole samples; its flow has their average size."""
        plan, i, count = self.plan, flow.stage, self.plan.part_samples(part)
        if plan.stages[i].by == "kernels" or sender == receiver or plan.stages[i].merged:
            return count * flow.numbers(sender, receiver)
        samples = plan.shares[i][receiver if flow.by_receiver else sender].samples(count)
        return int(samples.stop - samples.start) * plan.made[i] * plan.channel_sizes[i]

    def _before(self, group: TaskGroup, part: int, worker: str) -> Iterator[TaskInput]:
        """Yield the inputs from the previous step, which complete a shard. They travel once a step."""
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
        """Yield the tasks of its own worker that a task only waits for."""
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
        sources += self._beside(kind, i, part, worker)
        return (TaskInput(source, worker) for source in dict.fromkeys(sources))

    def _beside(self, kind: TaskKind, i: int, part: int, worker: str) -> Iterator[int]:
        """Yield the tasks of its own worker that got the same outputs before, or give it their part of the gradient."""
        there, uses = kind in self._consuming(i), self.plan.uses
        for source in self.plan.stages[i].consumed:
            use = uses[source].get(worker)
            if use is None or i not in use.by:
                continue
            if there and i != use.by[0]:
                yield self._there[use.by[0], part, worker]
            if kind in self._handing_on(i) and i == use.by[0]:
                yield from (self._back[other, part, worker] for other in use.by[1:])

    def _handing_on(self, i: int) -> tuple[TaskKind, ...]:
        """Kinds of tasks that make gradients of a stage's inputs."""
        return BACKWARD if self.plan.kernels[i] else (TaskKind.MERGE_BACKWARD, TaskKind.HEAD)

    # --- results ---

    def _cuts(self, kind: TaskKind, i: int, worker: str, part: int) -> dict[int, Cuts]:
        plan, cuts = self.plan, dict[int, Cuts]()
        if kind in (TaskKind.HEAD, TaskKind.MERGE_BACKWARD) and plan.kernels[i]:
            cuts[i] = plan.cuts(i, part)
        if kind in self._handing_on(i):
            cuts |= {source: plan.gradient_cuts(source, worker, part) for source in plan.handed_on(i, worker)}
        return cuts

    def _away(self, kind: TaskKind, i: int, worker: str, cuts: Mapping[int, Cuts]) -> int:
        plan = self.plan
        if kind is TaskKind.FORWARD and plan.stages[i].rest is not None and i < plan.last:
            return len({plan.home} - {worker})
        if kind in (TaskKind.FORWARD, TaskKind.MERGE_FORWARD):
            return len(plan.takers_of(i, worker) - {worker})
        if kind in BACKWARD and plan.stages[i].by == "samples":
            return len(plan.kernels[i]) - 1
        if any(ALL in own for own in cuts.values()):
            return len({*plan.kernels[i]} - {worker})
        return 1 if cuts else 0

    def _remember(self, task: PlannedTask, number: int) -> None:
        """Remember the task's results for later tasks."""
        kind, i, worker = task.kind, task.stage, task.worker
        if kind is TaskKind.MERGE_FORWARD:
            self._merged[i] = number
        if kind in self._consuming(i):
            self._there[i, task.part, worker] = number
        if kind in self._handing_on(i):
            self._back[i, task.part, worker] = number
        if kind is TaskKind.HEAD:
            self._judged = number
        if kind in BACKWARD:
            self.latest[Carried("shard", i, worker)] = number
        if kind in (*BACKWARD, TaskKind.TAKE_EDGES) and self.plan.stages[i].reach:
            self.latest[Carried("edges", i, worker)] = number
        if kind in (TaskKind.HEAD, TaskKind.LOSS_AND_BACKWARD, TaskKind.MERGE_BACKWARD) and i in self.plan.weighted:
            self.latest[Carried("merged", i, worker)] = number
