"""Layers that use the weights of an earlier layer of the same `Sequential`, transposed.

The weights are parameters of the earlier layer alone, their owner. A pass lends them to the tied layer, and the way
back adds the tied layer's gradients to the owner's.

Layers one after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from daskcnn.arrays import Array
from daskcnn.errors import nearest
from daskcnn.nn.layer import Context, Initializer, Layer, LayerError, Params, Shape, Start, State, glorot_uniform
from daskcnn.nn.local import Chain, first_run
from daskcnn.nn.vector import map_leaves

Ties = Mapping[str, str]
"""The owner of each tied layer, by name."""


def ties_of(layers: Sequence[tuple[str, Layer]]) -> Ties:
    """Return who is tied to whom. Raises LayerError for a layer that is tied to none, or to one that cannot be."""
    for name, problem in tie_problems(layers).items():
        raise LayerError(name, problem)
    return {name: layer.tied_to for name, layer in layers if layer.tied_to is not None}


def tie_problems(layers: Sequence[tuple[str, Layer]]) -> Mapping[str, str]:
    """Return what is wrong with ties, by the name of the tied layer."""
    before: dict[str, Layer] = {}
    problems: dict[str, str] = {}
    for name, layer in layers:
        if layer.tied_to is not None and (problem := _problem(name, layer, before, [other for other, _ in layers])):
            problems[name] = f"tied = {layer.tied_to!r}: {problem}"
        before[name] = layer
    return problems


def _problem(name: str, layer: Layer, before: Mapping[str, Layer], names: Collection[str]) -> str | None:
    owner = layer.tied_to
    assert owner is not None
    if owner not in names:
        return f"there is no layer of this name beside it{nearest(owner, before)}"
    if owner not in before:
        return f"comes no earlier than {name}, so each would wait for the other; name a layer before it"
    if type(before[owner]) is not type(layer):
        return f"is a {type(before[owner]).__name__}, whose weights a {type(layer).__name__} cannot use"
    if (first := before[owner].tied_to) is not None:
        return f"has no weights of its own; name {first!r}, which it takes them from"
    return None


def check_tie(ties: Ties, name: str, in_shapes: Mapping[str, Shape], out_shapes: Mapping[str, Shape]) -> None:
    """Raise LayerError for a tied layer that does not go from its owner's outputs back to the owner's inputs."""
    if (owner := ties.get(name)) is None:
        return
    back = (prod(in_shapes[owner]),)
    if in_shapes[name] != out_shapes[owner]:
        wanted = f"{owner} transposed takes {out_shapes[owner]}; put a layer with such outputs before it"
        raise LayerError(name, f"input shape {in_shapes[name]}: {wanted}")
    if out_shapes[name] != back:
        raise LayerError(name, f"units = {out_shapes[name][0]}: {owner} transposed has {back[0]}; set units to it")


def lent(params: Params, ties: Ties) -> Params:
    """Return the parameters with a view of its owner's weights w (…, units) for each tied layer: (units, …)."""
    if not ties:
        return params
    return params | {name: params.get(name, {}) | {"w": _transposed(params[ties[name]]["w"])} for name in ties}


def given_back(grads: Params, ties: Ties) -> Params:
    """Return the gradients with those of lent weights added to their owners', where these have any."""
    for name, owner in ties.items():
        if name not in grads:
            continue
        tied = dict(grads[name])
        lent_w = tied.pop("w")
        grads = {other: own for other, own in grads.items() if other != name} | ({name: tied} if tied else {})
        if owner in grads:
            w = grads[owner]["w"]
            grads[owner] = grads[owner] | {"w": w + _transposed(lent_w).reshape(w.shape)}
    return grads


def _transposed(w: Array) -> Array:
    return w.reshape(-1, w.shape[-1]).T


@dataclass(frozen=True)
class Sequential(Layer):
    """Named layers, each fed by the one before. It is a layer itself, so it nests.

    params, state and gradients are dicts by child name that leave out children without any. The residual has one entry
    for each child or chain of children, and is None outside training. Neighbouring local layers run as one chain on
    processors. The gradients of layers inside it whose paths are `frozen` are 0. Without `ctx.need_dx` the way back
    ends at the first child that is trained. Children may use the weights of earlier ones (`nn.sequential`).
    """

    layers: tuple[tuple[str, Layer], ...]
    frozen: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.layers]
        if twice := sorted(name for name, count in Counter(names).items() if count > 1):
            raise ValueError(f"layer names {', '.join(twice)}: given more than once; each layer needs its own")
        if not names:
            raise ValueError("layers=(): a network needs at least one layer")
        ties_of(self.layers)

    @cached_property
    def ties(self) -> Ties:
        """The owner of the weights that a tied child uses, by the child's name."""
        return ties_of(self.layers)

    def children(self, in_shape: Shape) -> Iterator[tuple[str, Layer, Shape]]:
        """Yield every child with its input's shape, in order. Raises LayerError for a layer that does not fit."""
        return ((name, layer, shape) for name, layer, shape, _ in self._shapes(in_shape))

    def _shapes(self, in_shape: Shape) -> Iterator[tuple[str, Layer, Shape, Shape]]:
        """Yield every child with the shapes of its input and of its output."""
        ins: dict[str, Shape] = {}
        outs: dict[str, Shape] = {}
        for name, layer in self.layers:
            ins[name] = in_shape
            try:
                in_shape = outs[name] = layer.out_shape(in_shape)
            except ValueError as error:
                raise LayerError.inside(name, error) from error
            check_tie(self.ties, name, ins, outs)
            yield name, layer, ins[name], in_shape

    def mapped(self, function: Callable[[str, Any], Any]) -> Sequential:
        """Return the same layers in turn, each changed by `function`."""
        return replace(self, layers=tuple((name, function(name, layer)) for name, layer in self.layers))

    def out_shape(self, in_shape: Shape) -> Shape:
        """Return the shape of the last layer's output. Raises LayerError naming the layer that does not fit."""
        *_, (_, _, _, shape) = self._shapes(in_shape)
        return shape

    def numbers(self, in_shape: Shape) -> int:
        """Return the numbers of all children."""
        return sum(layer.numbers(shape) for _, layer, shape in self.children(in_shape))

    def init(self, rng: np.random.Generator, in_shape: Shape, *, initial: Initializer = glorot_uniform) -> Start:
        """Return params and state of all children by name, and the shape of the output."""
        params: Params = {}
        state: State = {}
        for (name, layer, shape), start in zip(self.children(in_shape), self._initial(initial), strict=True):
            own, kept, _ = layer.init(rng, shape, initial=start)
            params |= {name: own} if own else {}
            state |= {name: kept} if kept else {}
        return params, state, self.out_shape(in_shape)

    def _initial(self, after: Initializer) -> list[Initializer]:
        """Return the initializer that the layers behind each child ask for; the network's end asks for `after`."""
        behind = accumulate(reversed(self.layers[1:]), lambda a, child: child[1].initial_before(a), initial=after)
        return list(behind)[::-1]

    @property
    def mixes_samples(self) -> bool:
        """True if any child does."""
        return any(layer.mixes_samples for _, layer in self.layers)

    def initial_before(self, after: Initializer) -> Initializer:
        """Return the initializer that the first child asks for."""
        return self.layers[0][1].initial_before(self._initial(after)[0])

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Any]:
        """Return (y, new state, residuals). Chains run in one go."""
        new_state: State = {}
        residuals: list[Any] = []
        first, given = self._first_with(params), lent(params, self.ties)
        for run in self._runs(ctx):
            own = given.get(run.name, {}), state.get(run.name, {})
            x, kept, residual = run.work.forward(*own, x, run.contexts(ctx, first))
            new_state |= {run.name: kept} if kept else {}
            if ctx.training:
                residuals.append(residual)
            del residual  # it holds the input, which nothing needs during the next layer outside training
        return x, new_state, tuple(residuals) if ctx.training else None

    def outputs(self, params: Params, state: State, x: Array, ctx: Context) -> Iterator[tuple[str, Array]]:
        """Yield the output of every child by name, one after the other. No chains: for looking at a network."""
        given = lent(params, self.ties)
        for name, layer in self.layers:
            x, _, _ = layer.forward(given.get(name, {}), state.get(name, {}), x, ctx.child(name))
            yield name, x

    def backward(self, params: Params, residual: Any, dy: Array, ctx: Context) -> tuple[Array | None, Params]:
        """Return (dx, gradients). Without `ctx.need_dx` it ends at the first child whose parameters are trained."""
        first, given = self._first_with(params), lent(params, self.ties)
        grads: Params = {}
        dx: Any = dy
        for run, kept in zip(reversed(self._runs(ctx)), reversed(residual), strict=True):
            if run.start < first and not ctx.need_dx:
                break
            dx, own = run.work.backward(given.get(run.name, {}), kept, dx, run.contexts(ctx, first))
            grads |= {run.name: own} if own else {}
            if ctx.told is not None and own:
                ctx.told(run.name, own)
        return dx if ctx.need_dx else None, self._complete(given_back(grads, self.ties), params, ctx.device.xp)

    def _complete(self, grads: Params, params: Params, xp: Any) -> Params:
        """Return the gradients, with zeros that take no memory for children that are frozen or were not reached."""
        rest = {name: own for name, own in params.items() if name in self.frozen or name not in grads}
        zeros = map_leaves(lambda a: xp.broadcast_to(xp.zeros((), a.dtype), a.shape), rest)
        return {name: zeros[name] if name in zeros else grads[name] for name in params}

    def _runs(self, ctx: Context) -> tuple[_Run, ...]:
        """Return what runs in one go: chains on processors, single children elsewhere."""
        return self._chains if ctx.device.backend.compiled else self._children

    @cached_property
    def _children(self) -> tuple[_Run, ...]:
        return tuple(_Run(i, (name,), layer) for i, (name, layer) in enumerate(self.layers))

    @cached_property
    def _chains(self) -> tuple[_Run, ...]:
        runs: list[_Run] = []
        start = 0
        while start < len(self.layers):
            names, layers = zip(*self.layers[start:], strict=True)
            work, count = first_run(layers)
            runs.append(_Run(start, names[:count], work))
            start += count
        return tuple(runs)

    def __getstate__(self) -> dict[str, Any]:
        """Return the layers alone: chains are found where they are needed."""
        return {"layers": self.layers, "frozen": self.frozen}

    def backward_of(
        self, params: Params, residual: Any, dy: Array, ctx: Context, *, given: slice, of: int, wanted: slice
    ) -> tuple[Array, Params]:
        """Run `backward` for the channels `given` out of `of` of dy (0 elsewhere); return those `wanted` of dx."""
        run, *others = self._runs(ctx)
        if isinstance(run.work, Chain) and not others:
            args = params.get(run.name, {}), residual[0], dy, run.contexts(ctx, self._first_with(params))
            back, own = run.work.backward(*args, given=given, wanted=wanted)
            assert back is not None, "asked for"
            return back, self._complete({run.name: own}, params, ctx.device.xp)
        whole = ctx.device.xp.zeros((*dy.shape[:-1], of), dy.dtype)
        whole[..., given] = dy
        dx, grads = self.backward(params, residual, whole, ctx)
        assert dx is not None, "asked for"
        return ctx.device.xp.ascontiguousarray(dx[..., wanted]), grads

    def _first_with(self, params: Params) -> int:
        trained = params.keys() - self.frozen
        return next((i for i, (name, _) in enumerate(self.layers) if name in trained), len(self.layers))


@dataclass(frozen=True)
class _Run:
    """A child, or neighbouring children that run as one chain; the number of the first, and their names."""

    start: int
    names: tuple[str, ...]
    work: Layer | Chain

    @property
    def name(self) -> str:
        """The first child's name: no other of a chain has parameters."""
        return self.names[0]

    def contexts(self, ctx: Context, first: int) -> Any:
        """Return what `work` takes: a context for each child of a chain. first: the first trained child's number."""
        found = [ctx.child(name, need_dx=ctx.need_dx or self.start > first) for name in self.names]
        return found if isinstance(self.work, Chain) else found[0]
