"""Pieces of a network's weights and momentum: kernel shards, and the layers that stay together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from daskcnn.arrays import Array, Device
from daskcnn.nn import Layout, Params, State, leaves, map_leaves
from daskcnn.nn.optimizer import SGD
from daskcnn.nn.tree import inside
from daskcnn.sharded.channels import of_channels, side_by_side
from daskcnn.sharded.stages import Side, Stage, shares_of

Edge: TypeAlias = tuple[Params, State]
"""Parameters and state of a few channels."""


class Edges(NamedTuple):
    """Edges of the neighbours: those before a shard's own channels and those after, in their order."""

    before: Sequence[Edge] = ()
    after: Sequence[Edge] = ()


@dataclass(frozen=True)
class Piece:
    """Parameters, state and momentum of a kernel shard or of a stage's merged layers, by path; host or device arrays.

    A step makes a new piece: old ones stay what they were, so a step can be taken again.
    """

    params: Params
    state: State
    velocity: Array
    layout: Layout

    @classmethod
    def of(cls, params: Params, state: State, momentum: Params) -> Piece:
        """The piece of these host arrays; `momentum` is nested like `params`."""
        layout = Layout.of(params, state)
        return cls(params, state, layout.flatten(momentum, {}), layout)

    @property
    def momentum(self) -> Params:
        """The momentum of a piece on the host, nested like `params`."""
        return _of_paths(_nested(self.layout, self.velocity), [*self.params])

    def views(self, vector: Array) -> tuple[Params, State]:
        """Parameters and state of the piece as views of a vector (size,), by path."""
        params, state = self.layout.views(vector)
        return _of_paths(params, [*self.params]), _of_paths(state, [*self.state])

    @property
    def nbytes(self) -> int:
        """Bytes of its weights and its momentum."""
        return self.layout.nbytes + self.velocity.nbytes

    def on(self, device: Device) -> Piece:
        """The same piece in the device's memory."""
        return self._moved(device.backend.from_host)

    def on_host(self, device: Device) -> Piece:
        """The same piece in the host's memory."""
        return self._moved(device.backend.to_host)

    def _moved(self, move: Callable[[Array], Array]) -> Piece:
        params, state = map_leaves(move, self.params), map_leaves(move, self.state)
        return Piece(params, state, move(self.velocity), self.layout)

    def edge(self, stage: Stage, side: Side, count: int, device: Device) -> Edge:
        """The first or last channels of a shard, as many as are asked for, or all if it has fewer, on the host."""
        cut = slice(None, count) if side == "left" else slice(-count, None)
        own = (of_channels(stage, tree, cut) for tree in (self.params, self.state))
        return _each(lambda a: np.ascontiguousarray(device.backend.to_host(a)), *own)

    def widened(self, stage: Stage, edges: Edges, device: Device) -> Edge:
        """Parameters and state of a shard and of the channels next to it, which come from the host."""
        if not edges.before and not edges.after:
            return self.params, self.state
        before, after = ([_each(device.backend.from_host, *edge) for edge in side] for side in edges)
        whole = [*before, (self.params, self.state), *after]
        params, state = zip(*whole, strict=True)
        return side_by_side(stage, params, device.xp), side_by_side(stage, state, device.xp)

    def descended(
        self,
        grads: Params,
        state: State,
        optimizer: SGD,
        lr: float,
        device: Device,
        frozen: Collection[str] = (),
    ) -> Piece:
        """The piece after one step of the optimizer; `grads` as backward returns them. Frozen layers stay the same."""
        vector, velocity = device.xp.empty(self.layout.size, self.velocity.dtype), device.xp.empty_like(self.velocity)
        start = 0
        for (name, old), (also, grad) in zip(leaves(self.params), leaves(grads), strict=True):
            assert name == also, "gradients are nested like their parameters"
            at = slice(start, start := start + old.size)
            flat, into = (old.reshape(-1), grad.reshape(-1), self.velocity[at]), (vector[at], velocity[at])
            if name.rpartition("/")[0] in frozen:
                vector[at], velocity[at] = flat[0], flat[2]
                continue
            optimizer.step(*flat, lr, device, out=into)
        params, kept = self.views(vector)
        for (_, own), (_, new) in zip(leaves(kept), leaves(state), strict=True):
            own[...] = new
        return Piece(params, kept, velocity, self.layout)


def _each(function: Callable[[Array], Array], params: Params, state: State) -> Edge:
    return map_leaves(function, params), map_leaves(function, state)


def cut_pieces(
    stages: Sequence[Stage], layout: Layout, weights: Array, velocity: Array, kernels: Sequence[Sequence[int]]
) -> tuple[list[list[Piece]], list[Piece | None]]:
    """Kernel shards (per stage, per worker) and merged pieces (per stage) of flat weights and momentum.

    `kernels` says, per stage, how many each worker gets, of a stage by samples all; weights (size,), velocity
    (parameter_size,).
    """
    params, state = layout.views(weights)
    whole = params, state, _nested(layout, velocity)
    shards = [
        [_shard(stage, whole, share.own if stage.by == "kernels" else slice(None)) for share in shares_of(own)]
        if stage.name
        else []
        for stage, own in zip(stages, kernels, strict=True)
    ]
    return shards, [_merged(stage, whole) for stage in stages]


def weighted_stages(stages: Sequence[Stage], layout: Layout) -> frozenset[int]:
    """Stages whose undivided layers have parameters or state, those that `cut_pieces` makes merged pieces of."""
    trees = layout.views(np.empty(layout.size, layout.dtype))
    return frozenset(i for i, stage in enumerate(stages) if any(_together(stage, tree) for tree in trees))


_Trees = tuple[Params, State, Params]
"""Parameters, state, momentum."""


def _nested(layout: Layout, velocity: Array) -> Params:
    """Momentum (parameter_size,), nested like the parameters of the layout."""
    without_state = np.zeros(layout.size - layout.parameter_size, layout.dtype)
    return layout.views(np.concatenate([velocity, without_state]))[0]


def _shard(stage: Stage, whole: _Trees, cut: slice) -> Piece:
    params, state, momentum = (
        map_leaves(np.ascontiguousarray, of_channels(stage, _divided(stage, tree), cut)) for tree in whole
    )
    return Piece.of(params, state, momentum)


def _divided(stage: Stage, tree: dict[str, Any]) -> dict[str, Any]:
    """The parts that are divided between the shards."""
    own = _of_paths(tree, stage.divided)
    if stage.summed and (name := stage.summed[0]) in own:
        own[name] = {"w": own[name]["w"]}
    return own


def _merged(stage: Stage, whole: _Trees) -> Piece | None:
    params, state, momentum = (_together(stage, tree) for tree in whole)
    return Piece.of(params, state, momentum) if params or state else None


def _together(stage: Stage, tree: dict[str, Any]) -> dict[str, Any]:
    """The parts that stay whole."""
    own = _of_paths(tree, [path for path, _ in (stage.rest.layers if stage.rest else ())])
    if stage.summed and (name := stage.summed[0]) in own:
        own[name] = {"b": own[name]["b"]}
    return own


def _of_paths(tree: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """The parts of these layers, where there are any, by path."""
    return {path: own for path in paths if (own := inside(tree, path))}


def join_pieces(
    stages: Sequence[Stage], layout: Layout, shards: Sequence[Sequence[Piece]], merged: Sequence[Piece | None]
) -> tuple[Array, Array]:
    """The inverse of `cut_pieces`: flat weights (size,) and momentum (parameter_size,)."""
    weights, velocity = np.empty(layout.size, layout.dtype), np.zeros(layout.size, layout.dtype)
    params, state = layout.views(weights)
    momentum, _ = layout.views(velocity)
    for stage, own, piece in zip(stages, shards, merged, strict=True):
        if stage.name:
            shards_of = own if stage.by == "kernels" else own[:1]  # else all have the same
            for whole, parts in (
                (params, [s.params for s in shards_of]),
                (state, [s.state for s in shards_of]),
                (momentum, [s.momentum for s in shards_of]),
            ):
                _put_back(whole, side_by_side(stage, parts, np))
        if piece is not None:
            _put_back(params, piece.params)
            _put_back(state, piece.state)
            _put_back(momentum, piece.momentum)
    return weights, velocity[: layout.parameter_size]


def _put_back(whole: dict[str, Any], parts: dict[str, Any]) -> None:
    """Parts by path, to where they belong."""
    for path, part in parts.items():
        _copy_into(inside(whole, path), part)


def _copy_into(whole: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        if isinstance(value, dict):
            _copy_into(whole[name], value)
        else:
            whole[name][...] = value
