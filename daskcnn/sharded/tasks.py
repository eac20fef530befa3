"""How many tasks a layer-sharded step is, counted from who has which kernels: each is a word with Dask's scheduler."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from daskcnn.sharded.stages import Stage, edges_travel_along, shares_of
from daskcnn.sharded.traffic import Kernels, judged_by_all


def step_tasks(stages: Sequence[Stage], kernels: Kernels, home: str, parts: int = 1) -> int:
    """Shards there and back, what is put together, edges, the score.

    Stages as they are spread for the kernels; parts of a minibatch that go one behind the other.
    """
    each = sum(_of_a_part(i, stages, kernels, home) for i in range(len(stages)))
    return parts * each + sum(_behind_all(i, stages, kernels, home) for i in range(len(stages))) + 1


def _of_a_part(i: int, stages: Sequence[Stage], kernels: Kernels, home: str) -> int:
    stage, shards, last = stages[i], 2 * len(kernels[i]), i == len(stages) - 1
    if last:  # the head, where it is not part of the way back
        return shards + (0 if judged_by_all(stages, kernels, home) else 1)
    return shards + (2 if stage.rest is not None else 0)


def _behind_all(i: int, stages: Sequence[Stage], kernels: Kernels, home: str) -> int:
    """Once a step, behind the last part's gradients."""
    stage, own = stages[i], kernels[i]
    if i == 0 or not stage.reach:
        return 0
    shares = dict(zip(own, shares_of(list(own.values()), stage.reach), strict=True))
    back = _back_to(i, stages, kernels, home)
    return sum(not edges_travel_along(shares, worker, back) for worker in own)


def _back_to(i: int, stages: Sequence[Stage], kernels: Kernels, home: str) -> Collection[str]:
    """Who gets parts of the gradient of a stage's input."""
    return kernels[i - 1] if stages[i - 1].rest is None else [home]
