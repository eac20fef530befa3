"""Layers one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from daskcnn.arrays import Array
from daskcnn.nn.initial import Initializer, glorot_uniform
from daskcnn.nn.layer import Context, Layer, Params, Residual, Shape, State
from daskcnn.nn.local import Chain


@dataclass(frozen=True)
class Sequential(Layer):
    """Named layers, each fed by the one before; a layer itself, so it nests.

    params, state and gradients are dicts by child name that leave out children without any; the residual is a tuple,
    one entry a child, and None outside training, where nothing is kept. Local layers next to each other run as one
    chain, whatever the shapes at hand make local. Weights before a ReLU (pooling, normalising
    and dropout in between allowed) start He normal, others Glorot uniform.
    """

    layers: tuple[tuple[str, Layer], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.layers]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"layer names {', '.join(twice)}: given more than once; each layer needs its own")
        if not names:
            raise ValueError("layers=(): a network needs at least one layer")

    def shapes(self, in_shape: Shape) -> Iterator[tuple[str, Layer, Shape]]:
        """Every child with its input's shape, in order. Raises ValueError, naming the layer, where one does not fit."""
        for name, layer in self.layers:
            yield name, layer, in_shape
            in_shape = self._out_shape(name, layer, in_shape)

    def out_shape(self, in_shape: Shape) -> Shape:
        *_, (name, layer, last) = self.shapes(in_shape)
        return self._out_shape(name, layer, last)

    @staticmethod
    def _out_shape(name: str, layer: Layer, in_shape: Shape) -> Shape:
        try:
            return layer.out_shape(in_shape)
        except ValueError as error:
            raise ValueError(f"layer {name}: {error}") from error

    def init(
        self, rng: np.random.Generator, in_shape: Shape, *, initial: Initializer = glorot_uniform
    ) -> tuple[Params, State, Shape]:
        params: Params = {}
        state: State = {}
        for (name, layer, shape), start in zip(self.shapes(in_shape), self._initial(initial), strict=True):
            own, kept, _ = layer.init(rng, shape, initial=start)
            params |= {name: own} if own else {}
            state |= {name: kept} if kept else {}
        return params, state, self.out_shape(in_shape)

    def _initial(self, after: Initializer) -> list[Initializer]:
        """For each child the initializer that those behind it ask for, the network's end asking for `after`."""
        behind = accumulate(reversed(self.layers[1:]), lambda a, child: child[1].initial_before(a), initial=after)
        return list(behind)[::-1]

    @property
    def mixes_samples(self) -> bool:
        """Whether any child does."""
        return any(layer.mixes_samples for _, layer in self.layers)

    def initial_before(self, after: Initializer) -> Initializer:
        return self.layers[0][1].initial_before(self._initial(after)[0])

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        new_state: State = {}
        residuals: list[Residual] = []
        first = self._first_with(params)
        while len(residuals) < len(self.layers):
            name, layer = self.layers[len(residuals)]
            chain = self._chain(len(residuals), _without_samples(x.shape), ctx)
            if chain.links:
                residuals += [_Run(chain, x) if ctx.training else None, *[None] * (len(chain.links) - 1)]
                x = chain.forward(x, ctx)
            else:
                child = ctx.child(name, need_dx=ctx.need_dx or len(residuals) > first)
                x, kept, residual = layer.forward(params.get(name, {}), state.get(name, {}), x, child)
                new_state |= {name: kept} if kept else {}
                residuals.append(residual)
        return x, new_state, tuple(residuals) if ctx.training else None

    def _chain(self, start: int, in_shape: Shape, ctx: Context) -> Chain:
        """The local layers that begin with this child, empty if it is none."""
        place = start, in_shape, ctx.salt
        chain = self._chains.get(place)
        if chain is None:
            chain = Chain.of(((layer, ctx.child(name).salt) for name, layer in self.layers[start:]), in_shape)
            self._chains[place] = chain
        return chain

    @cached_property
    def _chains(self) -> dict[tuple[int, Shape, int], Chain]:
        """The chains by first child, its input's shape and the network's salt: found once, not by each minibatch."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """The layers alone: chains are found where they are needed."""
        return {"layers": self.layers}

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array | None, Params]:
        """Without `ctx.need_dx` it stops at the first child that has parameters."""
        first = 0 if ctx.need_dx else self._first_with(params)
        grads: Params = {}
        for i in reversed(_starts(residual)):
            if i < first:
                break
            if isinstance(residual[i], _Run):
                dy = residual[i].chain.backward(residual[i].x, dy, ctx)
                continue
            name, layer = self.layers[i]
            child = ctx.child(name, need_dx=ctx.need_dx or i > first)
            dy, own = layer.backward(params.get(name, {}), residual[i], dy, child)
            grads |= {name: own} if own else {}
        return dy if ctx.need_dx else None, {name: grads[name] for name in params}

    def backward_of(
        self, params: Params, residual: Residual, dy: Array, ctx: Context, *, given: slice, of: int, wanted: slice
    ) -> tuple[Array, Params]:
        """`backward` where dy has these channels of so many, and is 0 elsewhere, and dx is wanted of those."""
        run = residual[0]
        if isinstance(run, _Run) and len(run.chain.links) == len(self.layers):
            return run.chain.backward(run.x, dy, ctx, given=given, wanted=wanted), {}
        whole = ctx.device.xp.zeros((*dy.shape[:-1], of), dy.dtype)
        whole[..., given] = dy
        dx, grads = self.backward(params, residual, whole, ctx)
        assert dx is not None, "asked for"
        return ctx.device.xp.ascontiguousarray(dx[..., wanted]), grads

    def _first_with(self, params: Params) -> int:
        return next((i for i, (name, _) in enumerate(self.layers) if name in params), len(self.layers))


@dataclass(frozen=True, slots=True)
class _Run:
    """The residual of children that ran as one chain: at the first's place; the others have None."""

    chain: Chain
    x: Array


def _starts(residuals: tuple[Residual, ...]) -> list[int]:
    """Where a child, or a chain of them, begins."""
    starts, i = [], 0
    while i < len(residuals):
        starts.append(i)
        i += len(residuals[i].chain.links) if isinstance(residuals[i], _Run) else 1
    return starts


def _without_samples(x_shape: Shape) -> Shape:
    return *x_shape[:-2], x_shape[-1]
