"""Layers one after the other."""

from __future__ import annotations

from collections import Counter
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
from daskcnn.nn.tree import map_leaves


@dataclass(frozen=True)
class Sequential(Layer):
    """Named layers, each fed by the one before. It is a layer itself, so it nests.

    params, state and gradients are dicts by child name that leave out children without any. The residual is a tuple
    with one entry per child; outside training it is None and nothing is kept. Neighbouring local layers run as one
    chain. Weights before a ReLU (pooling, normalisation and dropout may lie between) start He normal, others Glorot
    uniform. The gradients of `frozen` children are 0. Without `ctx.need_dx` the way back ends at the first child that
    is trained.
    """

    layers: tuple[tuple[str, Layer], ...]
    frozen: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.layers]
        if twice := sorted(name for name, count in Counter(names).items() if count > 1):
            raise ValueError(f"layer names {', '.join(twice)}: given more than once; each layer needs its own")
        if not names:
            raise ValueError("layers=(): a network needs at least one layer")

    def shapes(self, in_shape: Shape) -> Iterator[tuple[str, Layer, Shape]]:
        """Yield every child with its input's shape, in order. Raises ValueError naming the layer that does not fit."""
        for name, layer in self.layers:
            yield name, layer, in_shape
            in_shape = self._out_shape(name, layer, in_shape)

    def out_shape(self, in_shape: Shape) -> Shape:
        """Return the shape of the last layer's output. Raises ValueError naming the layer that does not fit."""
        *_, (name, layer, last) = self.shapes(in_shape)
        return self._out_shape(name, layer, last)

    def numbers(self, in_shape: Shape) -> int:
        """Return the numbers of all children."""
        return sum(layer.numbers(shape) for _, layer, shape in self.shapes(in_shape))

    @staticmethod
    def _out_shape(name: str, layer: Layer, in_shape: Shape) -> Shape:
        try:
            return layer.out_shape(in_shape)
        except ValueError as error:
            raise ValueError(f"layer {name}: {error}") from error

    def init(
        self, rng: np.random.Generator, in_shape: Shape, *, initial: Initializer = glorot_uniform
    ) -> tuple[Params, State, Shape]:
        """Return params and state of all children by name, and the shape of the output."""
        params: Params = {}
        state: State = {}
        for (name, layer, shape), start in zip(self.shapes(in_shape), self._initial(initial), strict=True):
            own, kept, _ = layer.init(rng, shape, initial=start)
            params |= {name: own} if own else {}
            state |= {name: kept} if kept else {}
        return params, state, self.out_shape(in_shape)

    def _initial(self, after: Initializer) -> list[Initializer]:
        """Return for each child the initializer that the layers behind it ask for.

        The network's end asks for `after`.
        """
        behind = accumulate(reversed(self.layers[1:]), lambda a, child: child[1].initial_before(a), initial=after)
        return list(behind)[::-1]

    @property
    def mixes_samples(self) -> bool:
        """Whether any child does."""
        return any(layer.mixes_samples for _, layer in self.layers)

    def initial_before(self, after: Initializer) -> Initializer:
        """Return the initializer that the first child asks for."""
        return self.layers[0][1].initial_before(self._initial(after)[0])

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        """Return (y, new state, residuals). Chains of local layers run block by block."""
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
        """Return the chain of local layers that begins with this child; it is empty if the child is not local."""
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
        """Return the layers alone: chains are found where they are needed."""
        return {"layers": self.layers, "frozen": self.frozen}

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array | None, Params]:
        """Return (dx, gradients). Without `ctx.need_dx` it ends at the first child whose parameters are trained."""
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
            grads |= {name: own} if own and name not in self.frozen else {}
        xp = ctx.device.xp
        return dy if ctx.need_dx else None, {
            n: grads[n] if n in grads else _zeros(own, xp) for n, own in params.items()
        }

    def backward_of(
        self, params: Params, residual: Residual, dy: Array, ctx: Context, *, given: slice, of: int, wanted: slice
    ) -> tuple[Array, Params]:
        """Run `backward` for a dy that has only the channels `given` out of `of` (0 elsewhere).

        Return the channels `wanted` of dx.
        """
        run = residual[0]
        if isinstance(run, _Run) and len(run.chain.links) == len(self.layers):
            return run.chain.backward(run.x, dy, ctx, given=given, wanted=wanted), {}
        whole = ctx.device.xp.zeros((*dy.shape[:-1], of), dy.dtype)
        whole[..., given] = dy
        dx, grads = self.backward(params, residual, whole, ctx)
        assert dx is not None, "asked for"
        return ctx.device.xp.ascontiguousarray(dx[..., wanted]), grads

    def _first_with(self, params: Params) -> int:
        trained = params.keys() - self.frozen
        return next((i for i, (name, _) in enumerate(self.layers) if name in trained), len(self.layers))


@dataclass(frozen=True, slots=True)
class _Run:
    """The residual of children that ran as one chain. It stands at the first child's place; the others have None."""

    chain: Chain
    x: Array


def _zeros(params: Params, xp: Any) -> Params:
    """Return gradients of 0, nested like these parameters, which take no memory."""
    return map_leaves(lambda a: xp.broadcast_to(xp.zeros((), a.dtype), a.shape), params)


def _starts(residuals: tuple[Residual, ...]) -> list[int]:
    """Return where each child, or chain of children, begins."""
    starts, i = [], 0
    while i < len(residuals):
        starts.append(i)
        i += len(residuals[i].chain.links) if isinstance(residuals[i], _Run) else 1
    return starts


def _without_samples(x_shape: Shape) -> Shape:
    return *x_shape[:-2], x_shape[-1]
