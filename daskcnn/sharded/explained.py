"""Where a step's sums and concatenations are made, and what travels for them, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from daskcnn.sharded.stages import Addend, Stage
from daskcnn.sharded.step_plan import StepPlan


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
