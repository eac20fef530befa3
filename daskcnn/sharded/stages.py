"""Stages of a network, the workers' shares of a stage's channels, and the sizes of a stage's results."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import Literal, TypeAlias, TypeVar

from daskcnn.conv import ConvSpec
from daskcnn.nn import Layer, Sequential, Shape
from daskcnn.nn.layers.conv import Conv
from daskcnn.nn.layers.dense import Bias, Dense

Side: TypeAlias = Literal["left", "right"]
By: TypeAlias = Literal["kernels", "samples"]
"""The part of a stage that is divided between its workers."""
Named: TypeAlias = tuple[str, Layer]
W = TypeVar("W", bound=Hashable)
"""A worker's name or number."""

MOST_TWICE = 1.0
"""A stage's normalisation is spread if at most this many times the stage's channels are computed twice for it."""


@dataclass(frozen=True)
class Addend:
    """Outputs that the shards of a stage add to their own channels: a residual block's other path, or its input.

    If these outputs have fewer channels than the stage, zeros stand for the channels behind theirs.

    Attributes
    ----------
    inputs : as of a stage
    layers : the layers that they pass first, each by channel and without parameters
    before : the number of the stage's spread layers before the addition
    """

    inputs: tuple[int, ...]
    layers: Sequential | None
    before: int


@dataclass(frozen=True)
class Stage:
    """A convolution and the layers behind it, as they are divided between workers.

    Attributes
    ----------
    name, conv : the convolution and its path. A stage without one only joins its inputs for its `rest`.
    spread : the layers that each shard computes for its own channels
    rest : the layers that are computed where the shards' outputs are joined
    summed
        A fully connected layer between the two, by name. Each shard sends the sums over its own channels, which are
        few. Added up they are the layer's outputs without the bias, which is the first of the rest.
    by
        The kind of shard. By samples each worker has all kernels and its part of the minibatch. The workers add up
        their gradients and make the same step (Krizhevsky 2014, One weird trick for parallelizing convolutional neural
        networks).
    lead : layers without parameters in front of the convolution, which every worker computes for the whole input
    inputs : the numbers of the stages whose outputs, side by side, are its input; none: the network's input
    addends : the outputs that its shards add to their own channels, in the order of the additions
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
        """The stages whose outputs it reads: its inputs, then those that are only added."""
        return tuple(dict.fromkeys([*self.inputs, *(s for addend in self.addends for s in addend.inputs)]))

    @cached_property
    def sections(self) -> tuple[Sequential | None, ...]:
        """The spread layers between the additions, from those before the first to those behind the last."""
        layers = self.spread.layers if self.spread else ()
        edges = (0, *(addend.before for addend in self.addends), len(layers))
        return tuple(_sequential(layers[a:b]) for a, b in pairwise(edges))

    @property
    def merged(self) -> bool:
        """True if its outputs are made where the shards' outputs are joined."""
        return self.conv is None or self.rest is not None

    @property
    def label(self) -> str:
        """The name of its tasks."""
        return self.name or ("joined" if self.inputs else "input")

    @cached_property
    def reach(self) -> int:
        """The number of channels to each side that an output of the spread layers depends on."""
        if self.spread is None or self.by == "samples":
            return 0
        return sum(layer.reach or 0 for _, layer in self.spread.layers)

    @cached_property
    def light(self) -> bool:
        """True if only a bias follows the sums, so that each worker may as well add it itself."""
        rest = self.rest.layers if self.rest else ()
        return self.summed is not None and all(isinstance(layer, Bias) for _, layer in rest)

    @property
    def names(self) -> list[str]:
        """The names of the spread layers."""
        return [name for name, _ in self.spread.layers] if self.spread else []

    @property
    def divided(self) -> list[str]:
        """The layers whose parameters are divided between the shards by channel."""
        return [name for name in (self.name, *self.names, self.summed and self.summed[0]) if name is not None]

    def shard_shape(self, in_shape: Shape) -> Shape:
        """The shape, without N, of the outputs of all shards, joined or summed."""
        for layer in (self.lead, self.conv, self.spread, self.summed and self.summed[1]):
            in_shape = in_shape if layer is None else layer.out_shape(in_shape)
        return in_shape

    def out_shape(self, in_shape: Shape) -> Shape:
        """The shape, without N, of its outputs."""
        sharded = self.shard_shape(in_shape)
        return self.rest.out_shape(sharded) if self.rest else sharded

    def spread_to(self, layers: int) -> Stage:
        """Return the stage with only its first layers spread, this many."""
        if self.spread is None or layers >= len(self.spread.layers):
            return self
        spread, rest = self.spread.layers, self.rest.layers if self.rest else ()
        if self.summed is not None:
            name, dense = self.summed
            biased = bool(rest) and rest[0][0] == name
            rest = (name, replace(dense, bias=biased)), *rest[biased:]
        return replace(self, spread=_sequential(spread[:layers]), rest=_sequential(spread[layers:] + rest), summed=None)

    def spread_for(self, kernels: Sequence[int]) -> Stage:
        """Return the stage with as many layers spread as pays for shards of these sizes.

        A layer that reaches over to other channels needs these too, so more than one worker convolves for them.
        """
        stage = self
        while stage.reach:
            held = sum(share.held.stop - share.held.start for share in shares_of(kernels, stage.reach))
            if held - sum(kernels) <= MOST_TWICE * sum(kernels):
                break
            reaching = [i for i, (_, layer) in enumerate(stage.spread.layers if stage.spread else ()) if layer.reach]
            stage = stage.spread_to(reaching[-1])
        return stage


def samples_first(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Return the network with its first convolution divided by samples.

    Only the first one suits: it has few weights, large maps and an input that every worker can load. Samples divide
    even the work that shards of kernels repeat. Raises ValueError if it cannot be divided by samples.
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
    """Yield the parts of an addend for a share's own channels: a stage, its channels, and their place in the share.

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
    """A worker's channels start…stop of `total`, or as large a part of the samples.

    reach: the stage's. An output depends on inputs up to `reach` channels away, an input's gradient on outputs as far
    away. So the worker computes the convolution's outputs for the channels up to twice `reach` away (`held`), and gets
    gradients of those up to `reach` away (`graded`).
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
        """The channels whose gradients the worker gets."""
        return self._widened(self.reach)

    @property
    def held(self) -> slice:
        """The channels that the worker computes."""
        return self._widened(2 * self.reach)

    @property
    def whole(self) -> Share:
        """The share of all channels, of a stage that is divided by samples."""
        return Share(0, self.total, self.total)

    def samples(self, count: int) -> slice:
        """The worker's samples out of this many, of a stage that is divided by samples."""
        return slice(*(count * edge // self.total for edge in (self.start, self.stop)))

    @property
    def alone(self) -> bool:
        """True if the worker needs no channels of its neighbours."""
        return self.held == self.own

    def within(self, part: slice) -> slice:
        """The place of these channels among those that are held."""
        return slice(part.start - self.held.start, part.stop - self.held.start)

    def _widened(self, by: int) -> slice:
        return slice(max(0, self.start - by), min(self.total, self.stop + by))


def shares_of(kernels: Sequence[int], reach: int = 0) -> list[Share]:
    """The workers' shares of a stage, by the number of kernels of each."""
    total = sum(kernels)
    return [Share(a, b, total, reach) for a, b in pairwise(accumulate(kernels, initial=0))]


def neighbours(shares: Mapping[W, Share], worker: W) -> Iterator[tuple[W, Side, int]]:
    """Yield the neighbours whose channels a worker holds, in order, with the end of their shard and the count."""
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
    """True if a shard's edges can travel with its gradients, which go to these workers, and reach no other worker."""
    others = {*takers} - {worker}
    wanted_by = {other for other, _, _ in neighbours(shares, worker)}  # whose channels it holds hold its own
    return not others or (len(others) == 1 and wanted_by <= others)


def stage_shapes(stages: Sequence[Stage], in_shape: Shape) -> list[Shape]:
    """The shape of each stage's input, without N, from that of the network's."""
    shapes: list[Shape] = []
    made: list[Shape] = []
    for stage in stages:
        read = [made[i] for i in stage.inputs]
        shapes.append((*read[0][:-1], sum(shape[-1] for shape in read)) if read else in_shape)
        made.append(stage.out_shape(shapes[-1]))
    return shapes


def sum_size(stage: Stage) -> int:
    """Numbers a sample that each shard of a stage with a summed layer sends, whatever its size."""
    return stage.summed[1].units if stage.summed else 0


@cache
def kernel_size(stage: Stage, in_shape: Shape) -> int:
    """Numbers of parameters and state of one kernel and of its channel in the spread layers."""
    assert stage.conv is not None, "asked for stages with kernels"
    fewest = stage.conv.groups  # the layer may have no fewer kernels
    numbers = 0
    for layer in (stage.lead, replace(stage.conv, kernels=fewest), stage.spread, stage.summed and stage.summed[1]):
        if layer is not None:
            numbers, in_shape = numbers + layer.numbers(in_shape), layer.out_shape(in_shape)
    return numbers // fewest


def eq2_elements(specs: Sequence[ConvSpec]) -> int:
    """Numbers exchanged in a step by Marques et al., eq. 2, which counts home's own too, and nothing backward."""
    return sum(math.prod(spec.x_shape) + math.prod(spec.w_shape) + math.prod(spec.y_shape) for spec in specs)
