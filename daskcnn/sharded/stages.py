"""Stages of a network, and who has which channels of one.

How many numbers the results of a stage have.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import Literal, TypeAlias, TypeVar

import numpy as np

from daskcnn.conv import ConvSpec
from daskcnn.nn import Layer, Sequential, Shape, leaves
from daskcnn.nn.layers.conv import Conv
from daskcnn.nn.layers.dense import Bias, Dense

Side: TypeAlias = Literal["left", "right"]
By: TypeAlias = Literal["kernels", "samples"]
"""What of a stage is divided between its workers."""
Named: TypeAlias = tuple[str, Layer]
W = TypeVar("W", bound=Hashable)
"""What a worker is known by."""

MOST_TWICE = 1.0
"""Channels that are computed twice, beside those of the stage, for its normalising to be spread as well."""


@dataclass(frozen=True)
class Addend:
    """Outputs that the shards of a stage add to their own channels: a residual block's other path, or its input.

    Attributes
    ----------
    inputs
        Stages whose outputs these are, side by side; none: the network's input.
    layers
        The layers that they go through first, each by channel and without parameters; None: there are none.
    before
        How many of the stage's spread layers come before the addition.

    Where these outputs have fewer channels than the stage, the channels behind theirs are zeros.
    """

    inputs: tuple[int, ...]
    layers: Sequential | None
    before: int


@dataclass(frozen=True)
class Stage:
    """A convolution by path (None: there is none), the layers behind it that shards go through with their own channels,
    and those that come where all is put together (None: there are none).

    Stages form a graph: `inputs` are the numbers of the stages whose outputs, side by side, are its input. Without any
    it reads the network's input. A stage without a convolution puts them together for its `rest`. addends: what its
    shards add to their own channels, in the order of the additions.

    lead: layers without parameters in front of the convolution. Every worker computes them for the whole input, which
    others read without them.

    summed: a fully connected layer between the two, by name. Its outputs are sums over its inputs, so a shard adds up
    those of its own channels and sends these sums, which are few; together they are the layer's outputs, but for the
    bias, which is the first of the rest.

    by: what its shards are. By samples each worker has all kernels, which are few, and its part of the minibatch
    (`samples_first`); they add up their gradients and make the same step (Krizhevsky 2014, One weird trick for
    parallelizing convolutional neural networks).
    """

    name: str | None
    conv: Conv | None
    spread: Sequential | None
    rest: Sequential | None
    summed: tuple[str, Dense] | None = None
    by: By = "kernels"
    lead: Sequential | None = None
    inputs: tuple[int, ...] = ()
    addends: tuple[Addend, ...] = ()

    @cached_property
    def consumed(self) -> tuple[int, ...]:
        """The stages whose outputs it works on: its inputs, then those that are only added."""
        return tuple(dict.fromkeys([*self.inputs, *(s for addend in self.addends for s in addend.inputs)]))

    @cached_property
    def sections(self) -> tuple[Sequential | None, ...]:
        """The spread layers between the additions: those before the first, …, those behind the last."""
        layers = self.spread.layers if self.spread else ()
        edges = (0, *(addend.before for addend in self.addends), len(layers))
        return tuple(_sequential(layers[a:b]) for a, b in pairwise(edges))

    @property
    def merged(self) -> bool:
        """Whether its outputs come from where all is put together."""
        return self.conv is None or self.rest is not None

    @property
    def label(self) -> str:
        """What its tasks are called by."""
        return self.name or ("joined" if self.inputs else "input")

    @cached_property
    def reach(self) -> int:
        """On how many channels to each side, that a neighbour may have, an output of the spread layers depends."""
        if self.spread is None or self.by == "samples":
            return 0
        return sum(layer.reach or 0 for _, layer in self.spread.layers)

    @cached_property
    def light(self) -> bool:
        """Whether all that is left where sums are put together is a bias: each worker may as well do that itself."""
        left = self.rest.layers if self.rest else ()
        return self.summed is not None and all(isinstance(layer, Bias) for _, layer in left)

    @property
    def names(self) -> list[str]:
        """The layers that shards go through."""
        return [name for name, _ in self.spread.layers] if self.spread else []

    @property
    def divided(self) -> list[str]:
        """The layers whose parameters are the shards', each those of its channels."""
        ends = self.name, self.summed and self.summed[0]
        return [name for name in (ends[0], *self.names, ends[1]) if name is not None]

    def spread_to(self, layers: int) -> Stage:
        """The same stage with only this many of its spread layers spread, from the first."""
        if self.spread is None or layers >= len(self.spread.layers):
            return self
        spread, behind = self.spread.layers[:layers], self.spread.layers[layers:] + self._behind
        return replace(self, spread=_sequential(spread), rest=_sequential(behind), summed=None)

    @property
    def _behind(self) -> tuple[Named, ...]:
        """The layers behind those that are spread, the summed one whole."""
        rest = self.rest.layers if self.rest else ()
        if self.summed is None:
            return rest
        name, dense = self.summed
        biased = bool(rest) and rest[0][0] == name
        return (name, replace(dense, bias=biased)), *rest[biased:]

    def spread_for(self, kernels: Sequence[int]) -> Stage:
        """The same stage with as many layers spread as pays for shards of these sizes.

        Layers that reach over to other channels need those too: the convolution makes them twice.
        """
        stage = self
        while stage.reach and _twice(kernels, stage.reach) > MOST_TWICE * sum(kernels):
            reaching = [i for i, (_, layer) in enumerate(stage.spread.layers if stage.spread else ()) if layer.reach]
            stage = stage.spread_to(reaching[-1])
        return stage


def _twice(kernels: Sequence[int], reach: int) -> int:
    """Channels that more than one worker computes, counted as often as they are computed again."""
    return sum(share.held.stop - share.held.start - (share.stop - share.start) for share in shares_of(kernels, reach))


def samples_first(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The same network with its first convolution divided by samples.

    Only the first: it has few weights, large maps and an input that every worker can load. What the kernels of a shard
    do not shorten, the columns of the whole input and channels that are computed twice, is divided then. Raises
    ValueError where it cannot be.
    """
    first = stages[0]
    if first.conv is None or len(stages) < 2 or first.rest is not None or first.summed is not None:
        raise ValueError("only where a convolution comes first, and another behind layers that go by channel")
    readers = [stage for stage in stages if 0 in stage.consumed]
    if first.addends or len(readers) != 1 or readers[0].consumed != (0,) or readers[0].conv is None:
        raise ValueError("only where a single convolution reads the first one's outputs, and nothing adds them")
    if names := [name for name, layer in (first.spread.layers if first.spread else ()) if layer.mixes_samples]:
        raise ValueError(f"{', '.join(names)} takes the mean of a whole minibatch")
    return replace(first, by="samples"), *stages[1:]


def _sequential(layers: tuple[Named, ...]) -> Sequential | None:
    return Sequential(layers) if layers else None


def added_channels(addend: Addend, share: Share, widths: Mapping[int, int]) -> Iterator[tuple[int, slice, slice]]:
    """What of an addend goes to a share's own channels: of which stage, which of its channels, and to which place.

    widths: channels of each stage's outputs.
    """
    base = 0
    for stage in addend.inputs:
        start, stop = max(share.start, base), min(share.stop, base + widths[stage])
        if start < stop:
            yield stage, slice(start - base, stop - base), slice(start - share.start, stop - share.start)
        base += widths[stage]


@dataclass(frozen=True)
class Share:
    """Channels start…stop of `total` belong to a worker, or as large a part of the samples; `reach` is the stage's.

    An output depends on inputs up to `reach` channels away, and an input's gradient on outputs as far away, each of
    which depends on inputs again. So the worker computes the convolution's outputs up to twice that away (`held`) and
    is given gradients up to once that (`graded`); what it makes of them is right for its own.
    """

    start: int
    stop: int
    total: int
    reach: int = 0

    @property
    def own(self) -> slice:
        """The channels that belong to the worker."""
        return slice(self.start, self.stop)

    @property
    def graded(self) -> slice:
        """The channels whose gradients the worker is given."""
        return self._widened(self.reach)

    @property
    def held(self) -> slice:
        """The channels that the worker computes."""
        return self._widened(2 * self.reach)

    @property
    def whole(self) -> Share:
        """All channels, for one whose stage is divided by samples."""
        return Share(0, self.total, self.total)

    def samples(self, count: int) -> slice:
        """The samples, out of this many, that go with it where a stage is divided by samples."""
        return slice(*(count * edge // self.total for edge in (self.start, self.stop)))

    @property
    def alone(self) -> bool:
        """Whether it needs nothing of its neighbours."""
        return self.held == self.own

    def within(self, part: slice) -> slice:
        """Where a part lies among the channels that are held."""
        return slice(part.start - self.held.start, part.stop - self.held.start)

    def _widened(self, by: int) -> slice:
        return slice(max(0, self.start - by), min(self.total, self.stop + by))


def shares_of(kernels: Sequence[int], reach: int = 0) -> list[Share]:
    """Everybody's channels, one after the other, from how many each has."""
    total = sum(kernels)
    return [Share(a, b, total, reach) for a, b in pairwise(accumulate(kernels, initial=0))]


def neighbours(shares: Mapping[W, Share], worker: W) -> Iterator[tuple[W, Side, int]]:
    """Neighbours whose channels a worker holds besides its own, in order: at which end of theirs, and how many."""
    held, others = shares[worker].held, list(shares)
    at = others.index(worker)
    begin = next((i for i in range(at, 0, -1) if shares[others[i - 1]].stop <= held.start), 0)
    for other in others[begin:at]:
        if (count := shares[other].stop - max(shares[other].start, held.start)) > 0:
            yield other, "right", count
    for other in others[at + 1 :]:
        if shares[other].start >= held.stop:
            return
        if (count := min(shares[other].stop, held.stop) - shares[other].start) > 0:
            yield other, "left", count


def edges_travel_along(shares: Mapping[W, Share], worker: W, takers: Collection[W]) -> bool:
    """Whether a shard's edges can be sent with its gradients, which go to these workers, without sending too much."""
    others = {*takers} - {worker}
    wanted_by = {other for other, _, _ in neighbours(shares, worker)}  # whose channels it holds hold its own
    return not others or (len(others) == 1 and wanted_by <= others)


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
