"""How many tasks a layer-sharded step is, counted from who has which kernels: each is a word with Dask's scheduler."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from daskcnn.sharded.stages import Stage, edges_travel_along, shares_of
from daskcnn.sharded.traffic import Kernels


def step_tasks(stages: Sequence[Stage], kernels: Kernels, home: str, parts: int = 1) -> int:
    """Shards there and back, what is put together, parts cut out for several, edges, the score.

    Stages as they are spread for the kernels; parts of a minibatch that go one behind the other.
    """
    each = sum(_of_a_part(i, stages, kernels, home) for i in range(len(stages)))
    return parts * each + sum(_behind_all(i, stages, kernels, home) for i in range(len(stages))) + 1


def _of_a_part(i: int, stages: Sequence[Stage], kernels: Kernels, home: str) -> int:
    stage, own, last = stages[i], kernels[i], i == len(stages) - 1
    found = 2 * len(own)
    if last and stage.light and home in own:
        pass  # the loss is part of the way back
    elif last or stage.rest is not None:
        found += (1 if last else 2) + (0 if stage.summed else _cut_out([home], own))
    if i > 0:
        found += _cut_out(own, _back_to(i, stages, kernels, home))
    return found


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


def _cut_out(makers: Collection[str], to: Collection[str]) -> int:
    """Tasks that cut out what each gets, where a maker has something for several others."""
    others = (len(to) - (maker in to) for maker in makers)
    return sum(each for each in others if each > 1)
