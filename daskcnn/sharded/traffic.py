"""Traffic of a layer-sharded step: sums over its plan, in numbers and in words.

A stage's outputs go from their makers to all workers of the stages that read them, through home if layers that are not
divided, or the loss, follow. A worker that adds outputs to its own channels needs only these channels, and most often
has them. Backward each of these workers returns its part of the gradient. Every worker loads the network's input
itself. If the last stage's shards send sums, which are few, they send them to each other: every worker computes the
loss, and no gradient comes from home.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from daskcnn.sharded.plan_parts import NOTHING, WorkerTraffic
from daskcnn.sharded.stages import Addend, Stage
from daskcnn.sharded.step_plan import StepPlan


def traffic(plan: StepPlan) -> dict[str, WorkerTraffic]:
    """Numbers a sample that each worker sends and receives within a step: activations and their gradients."""
    everyone = dict.fromkeys((plan.home, *chain(*plan.kernels)), NOTHING)
    return added_traffic([everyone, *(flow.moved for flow in plan.flows)])


def weight_traffic(plan: StepPlan) -> dict[str, WorkerTraffic]:
    """Numbers a step that each worker sends and receives of the previous step's weights and their gradients.

    These are the edges of shards whose layers reach over, and all gradients of a stage by samples.
    """
    everyone = dict.fromkeys(chain(*plan.kernels), NOTHING)
    return added_traffic([everyone, *(stage_weight_traffic(plan, i) for i in range(len(plan.stages)))])


def stage_weight_traffic(plan: StepPlan, i: int) -> dict[str, WorkerTraffic]:
    """The weight traffic of one stage."""
    if flow := plan.weight_gradients(i):
        return flow.moved
    sizes = plan.edge_sizes(i)
    up, down = dict.fromkeys(sizes, 0), dict.fromkeys(sizes, 0)
    for worker in sizes:
        for edge in plan.edges(i, worker):
            up[edge.neighbour] += sizes[edge.neighbour]
            down[worker] += sizes[edge.neighbour]
    return {worker: WorkerTraffic(up[worker], down[worker]) for worker in sizes}


def added_traffic(some: Iterable[Mapping[str, WorkerTraffic]]) -> dict[str, WorkerTraffic]:
    """The sum of each worker's traffic."""
    found: dict[str, WorkerTraffic] = {}
    for moved in some:
        for worker, (up, down) in moved.items():
            before = found.get(worker, NOTHING)
            found[worker] = WorkerTraffic(before.up + up, before.down + down)
    return found


def explained(plan: StepPlan) -> Iterator[str]:
    """Yield a sentence for each addition in the plan, and for each input that several stages make."""
    for i, stage in enumerate(plan.stages):
        if len(stage.inputs) > 1:
            by = "every worker of it" if stage.conv else plan.home
            yield f"{stage.label}: {by} puts {_names(plan.stages, stage.inputs)} side by side"
        for addend in stage.addends:
            yield f"{stage.label}: {_addition(plan, i, addend)}"


def _addition(plan: StepPlan, i: int, addend: Addend) -> str:
    # messages for this stage alone, not for an earlier one
    flows = (f for f in plan.taken_in(i) if f.stage in addend.inputs and f.stage not in plan.stages[i].inputs)
    travels = sum(moved.down for flow in flows for moved in flow.moved.values())
    cost = f"{travels:,} numbers a sample travel for it" if travels else "nothing travels for it"
    what = _names(plan.stages, addend.inputs) if addend.inputs else "the images"
    return f"{', '.join(plan.kernels[i])} each add their own channels of {what}; {cost}"


def _names(stages: Sequence[Stage], numbers: Sequence[int]) -> str:
    return ", ".join(stages[number].label for number in numbers)
