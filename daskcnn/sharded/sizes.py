"""How many numbers the results of a stage have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from daskcnn.conv import ConvSpec
from daskcnn.nn import Shape, leaves
from daskcnn.sharded.stages import Stage


def stage_shapes(stages: Sequence[Stage], in_shape: Shape) -> list[Shape]:
    """The shape of each stage's input without N, for the network's."""
    shapes: list[Shape] = []
    made: list[Shape] = []
    for stage in stages:
        shapes.append(_side_by_side([made[i] for i in stage.inputs]) if stage.inputs else in_shape)
        made.append(shape_behind(stage, shapes[-1]))
    return shapes


def _side_by_side(shapes: Sequence[Shape]) -> Shape:
    return *shapes[0][:-1], sum(shape[-1] for shape in shapes)


def shard_shape(stage: Stage, in_shape: Shape) -> Shape:
    """The shape, without N, of what all shards of a stage make together, side by side or summed."""
    for layer in (stage.lead, stage.conv, stage.spread, stage.summed and stage.summed[1]):
        in_shape = in_shape if layer is None else layer.out_shape(in_shape)
    return in_shape


def shape_behind(stage: Stage, in_shape: Shape) -> Shape:
    """The shape, without N, of a stage's outputs."""
    return rested(stage, shard_shape(stage, in_shape))


def rested(stage: Stage, sharded: Shape) -> Shape:
    """The same, from the shape of what its shards make together."""
    return stage.rest.out_shape(sharded) if stage.rest else sharded


def channel_size(stage: Stage, sharded: Shape) -> int:
    """Numbers a sample that one kernel's output has as it leaves its shard, whose shape all together is this.

    It is 0 for a stage without a convolution, and for one with a summed layer: its shards send sums instead.
    """
    if stage.conv is None or stage.summed is not None:
        return 0
    return math.prod(sharded[:-1])


def sum_size(stage: Stage) -> int:
    """Numbers a sample that each shard of a stage with a summed layer sends, however few its kernels."""
    return stage.summed[1].units if stage.summed else 0


@cache
def kernel_size(stage: Stage, in_shape: Shape) -> int:
    """Parameters and state of one kernel and of its channel in the spread layers.

    They are those of the fewest kernels that the layer may have, divided by these.
    """
    assert stage.conv is not None, "asked for stages with kernels"
    rng = np.random.default_rng(0)  # only the size of what is drawn counts
    fewest = stage.conv.groups
    led = stage.lead.out_shape(in_shape) if stage.lead else in_shape
    params, state, shape = replace(stage.conv, kernels=fewest).init(rng, led)
    more = list(stage.spread.init(rng, shape)[:2]) if stage.spread else []
    if stage.summed is not None:
        more.append(stage.summed[1].init(rng, stage.spread.out_shape(shape) if stage.spread else shape)[0])
    return sum(leaf.size for tree in (params, state, *more) for _, leaf in leaves(tree)) // fewest


def eq2_elements(specs: Sequence[ConvSpec]) -> int:
    """Numbers exchanged in a step by Marques et al., eq. 2.

    It counts every layer's inputs once, however many workers need them, all kernels, and all outputs, those that home
    makes included. It counts nothing of the backward pass.
    """
    return sum(math.prod(spec.x_shape) + math.prod(spec.w_shape) + math.prod(spec.y_shape) for spec in specs)
