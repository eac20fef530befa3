"""What travels in a layer-sharded step, counted from who has which kernels.

A stage's outputs go from who made them to all workers of the next stage, or to *home* where layers of it that are not
spread put them together, or the loss is behind; what is put together goes from home to the next stage's workers. On the
way back every one of these workers returns its part of the gradient. The first stage's input is loaded by everybody.
Where the last stage's shards send sums, which are few, they send them to each other: everybody has the loss for itself,
and no gradient comes from home.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from daskcnn.conv import ConvSpec
from daskcnn.nn import Shape, leaves
from daskcnn.sharded.stages import Share, Stage, neighbours, shares_of

Kernels: TypeAlias = Sequence[Mapping[str, int]]
"""How many each worker has, stage by stage; without those that have none."""
Way: TypeAlias = Literal["outputs", "gradients", "merged outputs", "merged gradients"]


class Traffic(NamedTuple):
    """Numbers that a worker sends and is sent."""

    up: int
    down: int


class Phase(NamedTuple):
    """Messages of one kind, which go at the same time: numbers a sample that each worker sends and is sent.

    stage: whose outputs they are, or gradients of its outputs; merged: behind what puts them together.
    """

    stage: int
    way: Way
    moved: Mapping[str, Traffic]


def stage_shapes(stages: Sequence[Stage], in_shape: Shape) -> list[Shape]:
    """The shape of each stage's input without N, for the network's."""
    return list(accumulate(stages[:-1], _behind, initial=in_shape))


def _behind(in_shape: Shape, stage: Stage) -> Shape:
    summed = stage.summed and stage.summed[1]
    for layer in (stage.conv, stage.spread, summed, stage.rest):
        in_shape = in_shape if layer is None else layer.out_shape(in_shape)
    return in_shape


def eq2_elements(specs: Sequence[ConvSpec]) -> int:
    """Numbers exchanged in a step by Marques et al., eq. 2.

    Every layer's inputs once, however many workers need them; all kernels, and all outputs, the home's own too; nothing
    of the backward pass.
    """
    return sum(
        spec.H * spec.W * spec.C * spec.N
        + spec.R * spec.S * spec.K * spec.C
        + spec.out_H * spec.out_W * spec.K * spec.N
        for spec in specs
    )


def channel_size(stage: Stage, in_shape: Shape) -> int:
    """Numbers a sample that one kernel's output has as it leaves its shard; 0 where there are none of a kernel's own:
    without a convolution, or where a layer behind it is summed.
    """
    if stage.conv is None or stage.summed is not None:
        return 0
    out = stage.conv.out_shape(in_shape)
    return math.prod((stage.spread.out_shape(out) if stage.spread else out)[:-1])


def sum_size(stage: Stage) -> int:
    """Numbers a sample that each shard sends, and is sent back, however few its kernels: a summed layer's outputs."""
    return stage.summed[1].units if stage.summed else 0


def takers(stages: Sequence[Stage], kernels: Kernels, home: str, i: int) -> set[str]:
    """To whom the outputs of a stage's shards go."""
    if i == len(stages) - 1:
        return set(judges(stages, kernels, home))
    return {home} if stages[i].rest is not None else set(kernels[i + 1])


def judges(stages: Sequence[Stage], kernels: Kernels, home: str) -> list[str]:
    """Who has the loss."""
    return list(kernels[-1]) if judged_by_all(stages, kernels, home) else [home]


def judged_by_all(stages: Sequence[Stage], kernels: Kernels, home: str) -> bool:
    """Whether everybody with kernels of the last stage has the loss itself, for it takes next to nothing; else home."""
    return stages[-1].light and home in kernels[-1]


def phases(stages: Sequence[Stage], in_shapes: Sequence[Shape], kernels: Kernels, home: str) -> Iterator[Phase]:
    """What travels in a step of activations and their gradients. Stages as they are spread for the kernels."""
    for i, (stage, in_shape) in enumerate(zip(stages, in_shapes, strict=True)):
        size, more, to = channel_size(stage, in_shape), sum_size(stage), takers(stages, kernels, home, i)
        shares = _shares(stage, kernels[i])
        made = {w: size * _length(share.own) + more for w, share in shares.items()}
        graded = {w: size * _length(share.graded) + more for w, share in shares.items()}
        to_judge = i == len(stages) - 1 and judged_by_all(stages, kernels, home)  # each has the gradient itself then
        yield from _both_ways(i, _from_all_to_all(made, to), {} if to_judge else _from_all_to_all(graded, to))
        if stage.rest is not None and i + 1 < len(stages):
            whole = _from_all_to_all({home: math.prod(in_shapes[i + 1])}, {*kernels[i + 1]})
            yield from _both_ways(i, whole, whole, merged=True)


def _both_ways(i: int, outputs: dict[str, Traffic], gradients: dict[str, Traffic], merged: bool = False) -> list[Phase]:
    """Gradients as they would go the way of the outputs: they go back. Nothing where nothing travels."""
    back = {w: Traffic(down, up) for w, (up, down) in gradients.items()}
    ways: tuple[Way, Way] = ("merged outputs", "merged gradients") if merged else ("outputs", "gradients")
    return [Phase(i, way, moved) for way, moved in zip(ways, (outputs, back), strict=True) if moved]


def _from_all_to_all(made: Mapping[str, int], to: Collection[str]) -> dict[str, Traffic]:
    """Everything that is made goes to each of these but its maker; without who neither sends nor gets anything."""
    total = sum(made.values())
    moved = {
        w: Traffic(made.get(w, 0) * (len(to) - (w in to)), total - made.get(w, 0) if w in to else 0)
        for w in {**made, **dict.fromkeys(to)}
    }
    return {w: own for w, own in moved.items() if any(own)}


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def traffic(stages: Sequence[Stage], in_shapes: Sequence[Shape], kernels: Kernels, home: str) -> dict[str, Traffic]:
    """Numbers a sample that each worker sends up and gets down: activations and their gradients, both ways.

    stages as they are spread for the kernels (`Stage.spread_for`), in_shapes as `stage_shapes` has them.
    """
    found = {worker: Traffic(0, 0) for own in kernels for worker in own} | {home: Traffic(0, 0)}
    for phase in phases(stages, in_shapes, kernels, home):
        for worker, (up, down) in phase.moved.items():
            found[worker] = Traffic(found[worker].up + up, found[worker].down + down)
    return found


def weight_traffic(stages: Sequence[Stage], in_shapes: Sequence[Shape], kernels: Kernels) -> dict[str, Traffic]:
    """Numbers a step: kernels and what goes with them that neighbours need, of stages with layers that reach over; all
    gradients, of a stage by samples.
    """
    found = {worker: Traffic(0, 0) for own in kernels for worker in own}
    for stage, in_shape, own in zip(stages, in_shapes, kernels, strict=True):
        each = _numbers_of_a_kernel(stage, in_shape) if stage.reach or stage.by == "samples" else 0
        if stage.by == "samples":
            moved = each * sum(own.values()) * (len(own) - 1)
            found |= {w: Traffic(found[w].up + moved, found[w].down + moved) for w in own}
        elif stage.reach:
            shares = _shares(stage, own)
            for worker in own:
                for other, _, _ in neighbours(shares, worker):
                    _add(found, other, worker, each * min(2 * stage.reach, own[other]))
    return found


def _add(found: dict[str, Traffic], sender: str, receiver: str, numbers: int) -> None:
    found[sender] = found[sender]._replace(up=found[sender].up + numbers)
    found[receiver] = found[receiver]._replace(down=found[receiver].down + numbers)


def _shares(stage: Stage, kernels: Mapping[str, int]) -> dict[str, Share]:
    return dict(zip(kernels, shares_of(list(kernels.values()), stage.reach), strict=True))


@cache
def _numbers_of_a_kernel(stage: Stage, in_shape: Shape) -> int:
    """Parameters and state of one kernel and of its channel in the spread layers."""
    assert stage.conv is not None, "asked for stages with kernels"
    rng = np.random.default_rng(0)  # of what is drawn only the size counts
    params, state, shape = replace(stage.conv, kernels=1).init(rng, in_shape)
    more = list(stage.spread.init(rng, shape)[:2]) if stage.spread else []
    if stage.summed is not None:
        more.append(stage.summed[1].init(rng, stage.spread.out_shape(shape) if stage.spread else shape)[0])
    return sum(leaf.size for tree in (params, state, *more) for _, leaf in leaves(tree))
