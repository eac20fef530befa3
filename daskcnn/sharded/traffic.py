"""Traffic of a layer-sharded step, weighed from its plan.

A stage's outputs go from their makers to all workers of the stages that read them, or to home where layers of it that
are not divided put them together, or the loss is behind. A worker that adds them to channels of its own needs only
these. Most often it has them: it works on the block's first layer too, or has the same channels of the other path. What
is put together goes from home to the next stage's workers. On the way back each of these workers returns its part of
the gradient. Every worker loads the network's input itself. Where the last stage's shards send sums, which are few,
they send them to each other: every worker computes the loss itself, and no gradient comes from home.

Where a step's sums and concatenations are made, and what travels for them, in words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from daskcnn.sharded.plan_parts import NOTHING, WorkerTraffic
from daskcnn.sharded.stages import Addend, Stage
from daskcnn.sharded.step_plan import StepPlan


def traffic(plan: StepPlan) -> dict[str, WorkerTraffic]:
    """Numbers a sample that each worker sends and receives within a step: activations and their gradients."""
    everyone = [dict.fromkeys((plan.home, *(worker for own in plan.kernels for worker in own)), NOTHING)]
    return added_traffic([*everyone, *(flow.moved for flow in plan.flows)])


def weight_traffic(plan: StepPlan) -> dict[str, WorkerTraffic]:
    """Numbers a step that each worker sends and receives of what the step before has left.

    These are kernels at the edges of shards whose layers reach over, and of a stage by samples all gradients.
    """
    everyone = [{worker: NOTHING for own in plan.kernels for worker in own}]
    return added_traffic([*everyone, *(stage_weight_traffic(plan, i) for i in range(len(plan.stages)))])


def stage_weight_traffic(plan: StepPlan, i: int) -> dict[str, WorkerTraffic]:
    """The same of one stage."""
    if flow := plan.weight_gradients(i):
        return flow.moved
    sizes = plan.edge_sizes(i)
    up, down = dict.fromkeys(sizes, 0), dict.fromkeys(sizes, 0)
    for worker in sizes:
        for edge in plan.edges(i, worker):
            up[edge.neighbour] += sizes[edge.neighbour]
            down[worker] += sizes[edge.neighbour]
    return {worker: WorkerTraffic(up[worker], down[worker]) for worker in sizes}


def step_bytes(plan: StepPlan) -> dict[str, WorkerTraffic]:
    """Bytes that each worker sends and receives in a step, to the byte: task by task."""
    everyone = [dict.fromkeys((plan.home, *(worker for own in plan.kernels for worker in own)), NOTHING)]
    messages = (
        {each.sender: WorkerTraffic(each.nbytes, 0), task.worker: WorkerTraffic(0, each.nbytes)}
        for task in plan.tasks
        for each in task.inputs
        if each.nbytes
    )
    return added_traffic([*everyone, *messages])


def added_traffic(some: Iterable[Mapping[str, WorkerTraffic]]) -> dict[str, WorkerTraffic]:
    """The sum of all that each worker sends and receives."""
    found: dict[str, WorkerTraffic] = {}
    for moved in some:
        for worker, (up, down) in moved.items():
            before = found.get(worker, NOTHING)
            found[worker] = WorkerTraffic(before.up + up, before.down + down)
    return found


def explained(plan: StepPlan) -> Iterator[str]:
    """Yield a sentence for each addition of the plan's stages, and for each input that several stages make."""
    for i, stage in enumerate(plan.stages):
        if len(stage.inputs) > 1:
            by = "every worker of it" if stage.conv else plan.home
            yield f"{stage.label}: {by} puts {_names(plan.stages, stage.inputs)} side by side"
        for addend in stage.addends:
            yield f"{stage.label}: {_addition(plan, i, addend)}"


def _addition(plan: StepPlan, i: int, addend: Addend) -> str:
    travels = sum(_numbers(plan, i, source) for source in addend.inputs)
    cost = f"{travels:,} numbers a sample travel for it" if travels else "nothing travels for it"
    what = _names(plan.stages, addend.inputs) if addend.inputs else "the images"
    return f"{', '.join(plan.kernels[i])} each add their own channels of {what}; {cost}"


def _numbers(plan: StepPlan, i: int, source: int) -> int:
    """Numbers a sample of a stage's outputs that workers are sent for a stage alone, and not for an earlier one."""
    flows = (flow for flow in plan.taken_in(i) if flow.stage == source and source not in plan.stages[i].inputs)
    return sum(moved.down for flow in flows for moved in flow.moved.values())


def _names(stages: Sequence[Stage], numbers: Sequence[int]) -> str:
    return ", ".join(stages[number].label for number in numbers)
