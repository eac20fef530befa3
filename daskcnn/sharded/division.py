"""A network's cut over the workers of a step: who makes, needs and returns which channels of which stage."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from daskcnn.nn import Shape
from daskcnn.sharded.plan_parts import ALL, WHOLE, Cuts, Flow, Kernels, TaskKind, WantedEdge
from daskcnn.sharded.stages import Share, Stage, added_channels, kernel_size, neighbours, shares_of, stage_shapes


@dataclass(frozen=True)
class Division:
    """A network's stages, divided over workers for a minibatch of this size.

    Attributes
    ----------
    stages : each stage as it is spread for its kernels
    shapes : the shape of each stage's input, without N
    home : the worker that computes the layers that are not divided
    parts, samples : of a minibatch, whose parts are computed one after the other
    itemsize, weight_itemsize : bytes of a number on the wire: of activations and their gradients; of weights and theirs
    weighted : stages whose undivided layers have weights
    placed : true for the first step after the pieces were placed: no gradients of weights are left over
    """

    stages: Sequence[Stage]
    shapes: Sequence[Shape]
    kernels: Kernels
    home: str
    parts: int = 1
    samples: int = 1
    itemsize: int = 4
    weight_itemsize: int = 4
    weighted: frozenset[int] = frozenset()
    placed: bool = False

    @classmethod
    def of(
        cls,
        stages: Sequence[Stage],
        in_shape: Shape,
        kernels: Kernels,
        home: str,
        parts: int = 1,
        samples: int = 1,
        itemsize: int = 4,
        weight_itemsize: int = 4,
    ) -> Self:
        """Divide a network's stages by these kernels, each stage spread as far as pays for its shards."""
        spread = [stage.spread_for(list(own.values())) for stage, own in zip(stages, kernels, strict=True)]
        return cls(spread, stage_shapes(spread, in_shape), kernels, home, parts, samples, itemsize, weight_itemsize)

    # --- the cut ---

    @property
    def last(self) -> int:
        """Number of the last stage."""
        return len(self.stages) - 1

    @cached_property
    def shares(self) -> list[dict[str, Share]]:
        """Each worker's channels of each stage."""
        divided = zip(self.stages, self.kernels, strict=True)
        return [dict(zip(own, shares_of(list(own.values()), stage.reach), strict=True)) for stage, own in divided]

    @cached_property
    def made(self) -> list[int]:
        """Channels of each stage's outputs."""
        return [sum(own.values()) for own in self.kernels]

    @cached_property
    def channel_sizes(self) -> list[int]:
        """Numbers a sample of one channel as it leaves its shard; 0 if there are no shards, or they send sums."""
        sends = [stage.conv is not None and stage.summed is None for stage in self.stages]
        return [math.prod(shape[:-1]) if each else 0 for each, shape in zip(sends, self._sharded, strict=True)]

    @cached_property
    def _sharded(self) -> list[Shape]:
        """The shape of each stage's shards together."""
        return [stage.shard_shape(shape) for stage, shape in zip(self.stages, self.shapes, strict=True)]

    @cached_property
    def _made(self) -> list[Shape]:
        """The shape of each stage's outputs."""
        sharded = zip(self.stages, self._sharded, strict=True)
        return [stage.rest.out_shape(shape) if stage.rest else shape for stage, shape in sharded]

    @cached_property
    def judged_by_all(self) -> bool:
        """True if every worker of the last stage computes the loss, which takes next to nothing; else home does."""
        return self.stages[-1].light and self.home in self.kernels[-1]

    @property
    def judges(self) -> list[str]:
        """Workers that compute the loss."""
        return list(self.kernels[-1]) if self.judged_by_all else [self.home]

    # --- who works on whose outputs ---

    @cached_property
    def widths(self) -> dict[int, int]:
        """Channels of each stage's outputs, by its number."""
        return {i: shape[-1] for i, shape in enumerate(self._made)}

    @cached_property
    def value_sizes(self) -> list[int]:
        """Numbers a sample of each stage's outputs."""
        return [math.prod(shape) for shape in self._made]

    def makers(self, i: int) -> Mapping[str, Share] | tuple[str]:
        """Workers that others get a stage's outputs from."""
        return (self.home,) if self.stages[i].merged else self.shares[i]

    def workers(self, i: int) -> Collection[str]:
        """Workers that work on a stage's inputs."""
        return self.kernels[i].keys() if self.stages[i].conv is not None else (self.home,)

    @cached_property
    def uses(self) -> list[dict[str, Use]]:
        """The use that each worker makes of each stage's outputs. Workers that need none are left out."""
        found: list[dict[str, Use]] = [{} for _ in self.stages]
        for i, stage in enumerate(self.stages):
            for worker in self.workers(i):
                for source, channels in self._needed(i, stage, worker):
                    before = found[source].get(worker)
                    found[source][worker] = before.also(i, channels) if before else Use((i,), channels)
        return found

    def _needed(self, i: int, stage: Stage, worker: str) -> Iterator[tuple[int, slice]]:
        """Yield the stages and channels of the outputs that a worker needs for its part of a stage."""
        for source in stage.inputs:
            yield source, slice(0, self.widths[source])
        for addend in stage.addends:
            for source, channels, _ in added_channels(addend, self.shares[i][worker], self.widths):
                if source not in stage.inputs:
                    yield source, channels

    @cached_property
    def _whole(self) -> list[dict[str, None]]:
        """Workers that get all outputs of each stage, as ordered sets."""
        whole = [slice(0, width) for width in self.widths.values()]
        return [{w: None for w, use in uses.items() if use.channels == whole[i]} for i, uses in enumerate(self.uses)]

    def _overlaps(self, i: int, worker: str) -> Iterator[tuple[str, slice]]:
        """Yield the makers of the channels of a stage that a worker needs, with these channels."""
        need = self.uses[i][worker].channels
        for maker in self.makers(i):
            share = None if self.stages[i].merged or self.stages[i].by == "samples" else self.shares[i][maker]
            own = slice(0, self.widths[i]) if share is None else share.own
            both = slice(max(need.start, own.start), min(need.stop, own.stop))
            if both.start < both.stop:
                yield maker, both

    def reaching(self, i: int, worker: str) -> Iterator[tuple[str, slice]]:
        """Yield the workers that make gradients of a stage's outputs for this one, with their channels."""
        wanted = self.shares[i][worker].graded if not self.stages[i].merged else slice(0, self.widths[i])
        for other, use in self.uses[i].items():
            both = slice(max(wanted.start, use.channels.start), min(wanted.stop, use.channels.stop))
            if other not in self._whole[i] and both.start < both.stop:
                yield other, both

    @cached_property
    def takers(self) -> list[Collection[str]]:
        """Workers that each stage's shards send outputs to. A worker that only adds some channels needs few shards."""
        behind: list[Collection[str]] = [
            (self.home,) if stage.rest is not None else self.uses[i].keys() for i, stage in enumerate(self.stages[:-1])
        ]
        return [*behind, self.kernels[-1].keys() if self.judged_by_all else (self.home,)]

    def takers_of(self, i: int, maker: str) -> set[str]:
        """Workers that get a worker's outputs of a stage, as they leave the stage."""
        if i == self.last:
            return set(self.takers[i])
        partly = (w for w in self.uses[i] if w not in self._whole[i])
        return {*self._whole[i], *(w for w in partly if maker in dict(self._overlaps(i, w)))}

    def holders(self, i: int) -> list[str]:
        """Workers that have the weights of a stage's undivided layers."""
        return self.judges if i == self.last else [self.home]

    def start_of(self, i: int, worker: str) -> int:
        """The first channel of a stage's outputs that a worker is sent, along with all others of their maker."""
        if worker in self._whole[i] or self.stages[i].merged or self.stages[i].by == "samples":
            return 0
        return min(self.shares[i][maker].start for maker, _ in self._overlaps(i, worker))

    def handed_on(self, i: int, worker: str) -> list[int]:
        """The stages whose gradients a worker hands on with its task of this stage."""
        uses = ((source, self.uses[source].get(worker)) for source in self.stages[i].consumed)
        return [source for source, use in uses if use and use.by[0] == i]

    def gradient_cuts(self, i: int, worker: str, part: int) -> Cuts:
        """The part that each maker gets of a worker's gradient of a stage's outputs."""
        if worker in self._whole[i]:
            return {self.home: WHOLE} if self.stages[i].merged else self.cuts(i, part)
        each = ((maker, dict(self.reaching(i, maker)).get(worker)) for maker in self.makers(i))
        return {maker: (..., both) for maker, both in each if both}

    # --- what the previous step left ---

    def weight_gradients(self, i: int) -> Flow | None:
        """Gradients of all weights, which each shard of samples sends to all others. None for shards of kernels."""
        if self.stages[i].by == "kernels":
            return None
        own, size = self.kernels[i], kernel_size(self.stages[i], self.shapes[i]) * self.made[i]
        return Flow(i, "weight gradients", own, own, dict.fromkeys(own, size))

    def edges(self, i: int, worker: str) -> list[WantedEdge]:
        """The edges of its neighbours' shards that a shard needs."""
        return [WantedEdge(*each) for each in neighbours(self.shares[i], worker)] if self.stages[i].reach else []

    def edge_sizes(self, i: int) -> dict[str, int]:
        """The size of an edge of each worker's shard, of as many channels as any neighbour may need."""
        if not (most := 2 * self.stages[i].reach):
            return {}
        each = kernel_size(self.stages[i], self.shapes[i])
        return {worker: min(most, own) * each for worker, own in self.kernels[i].items()}

    def part_samples(self, part: int) -> int:
        """Samples in a part of the minibatch."""
        return self.samples * (part + 1) // self.parts - self.samples * part // self.parts

    def cuts(self, i: int, part: int) -> Cuts:
        """The part of the gradient of a stage's outputs, or of its sums, that each of its workers gets."""
        if self.stages[i].summed is not None:
            return {ALL: WHOLE}
        if self.stages[i].by == "kernels":
            return {worker: (..., share.graded) for worker, share in self.shares[i].items()}
        count = self.part_samples(part)
        return {worker: (..., share.samples(count), slice(None)) for worker, share in self.shares[i].items()}

    def work(self, i: int, worker: str, way: TaskKind | None = None) -> float:
        """A worker's part of the seconds that a stage takes with all kernels, forward and backward, or of one way.

        Channels next to its own are computed forward only. That is one of three passes, or of two if the input needs
        no gradient.
        """
        share, passes = self.shares[i][worker], 3 if self.stages[i].inputs else 2
        own, held = share.stop - share.start, share.held.stop - share.held.start
        there, back = held / passes / share.total, own * (passes - 1) / passes / share.total
        if way is None:
            return there + back
        return there if way is TaskKind.FORWARD else back


@dataclass(frozen=True, slots=True)
class Use:
    """A worker's use of a stage's outputs: the stages that read them, in order, and the channels that they read."""

    by: tuple[int, ...]
    channels: slice

    def also(self, stage: int, channels: slice) -> Use:
        """The use with another reader."""
        start, stop = min(self.channels.start, channels.start), max(self.channels.stop, channels.stop)
        return Use(self.by if stage == self.by[-1] else (*self.by, stage), slice(start, stop))
