"""Channels of what belongs to a shard: parameters, gradients, state, by path.

They lie along the last axis of every array, but for the weights of a stage's summed layer, which have them before its
outputs.

Pieces of a network's weights and of its optimizer's state: kernel shards, and the layers that stay together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from daskcnn.arrays import Array, Device
from daskcnn.nn import Descent, Layout, OptimizerState, Params, State, StepPace, leaves, map_leaves
from daskcnn.nn.vector import inside
from daskcnn.sharded.stages import Side, Stage, shares_of


def of_channels(stage: Stage, tree: dict[str, Any], part: slice) -> dict[str, Any]:
    """Views of these channels, in the same tree."""
    found = {}
    for name, own in tree.items():
        cut = itemgetter((..., part) if _axis(stage, name) == -1 else (..., part, slice(None)))
        found[name] = map_leaves(cut, own)
    return found


def side_by_side(stage: Stage, trees: Sequence[dict[str, Any]], xp: Any) -> dict[str, Any]:
    """Trees of the same layers, their channels in turn."""
    return {name: _joined([tree[name] for tree in trees], _axis(stage, name), xp) for name in trees[0]}


def _joined(parts: Sequence[Any], axis: int, xp: Any) -> Any:
    if isinstance(parts[0], dict):
        return {name: _joined([part[name] for part in parts], axis, xp) for name in parts[0]}
    return xp.concatenate(parts, axis=axis)


def _axis(stage: Stage, layer: str) -> int:
    return -2 if stage.summed and layer == stage.summed[0] else -1


Edge: TypeAlias = tuple[Params, State]
"""Parameters and state of a few channels."""


class Edges(NamedTuple):
    """Edges of the neighbours: those before a shard's own channels and those after, in their order."""

    before: Sequence[Edge] = ()
    after: Sequence[Edge] = ()


@dataclass(frozen=True)
class Piece:
    """Parameters and state of a kernel shard or of a stage's merged layers, by path; host or device arrays.

    A step makes a new piece: old ones stay what they were, so a step can be taken again.

    Attributes
    ----------
    optimizer : the optimizer's state of these parameters
    """

    params: Params
    state: State
    optimizer: OptimizerState
    layout: Layout

    @classmethod
    def of(cls, params: Params, state: State, rows: Params, count: int) -> Piece:
        """The piece of these host arrays; `rows` are those of the optimizer's state, nested as `Layout.rows` does."""
        layout = Layout.of(params, state)
        columns = [row.reshape(len(row), prod(row.shape[1:])) for _, row in leaves(rows)]
        vectors = np.concatenate(columns, axis=1) if columns else np.empty((0, 0), layout.dtype)
        return cls(params, state, OptimizerState(vectors, count), layout)

    @property
    def rows(self) -> Params:
        """The optimizer's state of a piece, nested like `params`."""
        return _of_paths(self.layout.rows(self.optimizer.vectors), [*self.params])

    def views(self, vector: Array) -> tuple[Params, State]:
        """Parameters and state of the piece as views of a vector (size,), by path."""
        params, state = self.layout.views(vector)
        return _of_paths(params, [*self.params]), _of_paths(state, [*self.state])

    @property
    def nbytes(self) -> int:
        """Bytes of its weights and its optimizer's state."""
        return self.layout.nbytes + self.optimizer.nbytes

    def on(self, device: Device) -> Piece:
        """The same piece in the device's memory."""
        return self._moved(device.backend.from_host)

    def on_host(self, device: Device) -> Piece:
        """The same piece in the host's memory."""
        return self._moved(device.backend.to_host)

    def _moved(self, move: Callable[[Array], Array]) -> Piece:
        params, state = map_leaves(move, self.params), map_leaves(move, self.state)
        return Piece(params, state, self.optimizer.moved(move), self.layout)

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

    def descended(self, grads: Params, state: State, descent: Descent, pace: StepPace, device: Device) -> Piece:
        """The piece after one step; `grads` as backward returns them. Frozen layers stay the same."""
        before, places = self.optimizer, self.layout.places()
        vector, vectors = device.xp.empty(self.layout.size, self.layout.dtype), device.xp.empty_like(before.vectors)
        for (path, at), (_, old), (also, grad) in zip(places, leaves(self.params), leaves(grads), strict=True):
            assert path == also, "gradients are nested like their parameters"
            treatment, flat = descent.treatment(path), old.reshape(-1)
            if treatment is None:
                vector[at], vectors[:, at] = flat, before.vectors[:, at]
                continue
            into, rate = (vector[at], vectors[:, at]), pace.lr * treatment.rate
            args = flat, grad.reshape(-1), before.part(at), rate, device
            descent.optimizer.step(*args, progress=pace.progress, decays=treatment.decays, out=into)
        params, kept = self.views(vector)
        for (_, own), (_, new) in zip(leaves(kept), leaves(state), strict=True):
            own[...] = new
        return Piece(params, kept, OptimizerState(vectors, before.count + 1), self.layout)


def _each(function: Callable[[Array], Array], params: Params, state: State) -> Edge:
    return map_leaves(function, params), map_leaves(function, state)


def cut_pieces(
    stages: Sequence[Stage],
    layout: Layout,
    weights: Array,
    optimizer: OptimizerState,
    kernels: Sequence[Sequence[int]],
) -> tuple[list[list[Piece]], list[Piece | None]]:
    """Kernel shards (per stage, per worker) and merged pieces (per stage) of flat weights and their optimizer's state.

    `kernels` says, per stage, how many each worker gets, of a stage by samples all; weights (size,).
    """
    params, state = layout.views(weights)
    whole = _Whole(params, state, layout.rows(optimizer.vectors), optimizer.count)
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


class _Whole(NamedTuple):
    """Parameters, state, rows of the optimizer's state and its steps so far, of the network or of a part of it."""

    params: Params
    state: State
    rows: Params
    steps: int

    def part(self, cut: Callable[[dict[str, Any]], dict[str, Any]]) -> Piece:
        """The piece of what `cut` leaves of each tree."""
        return Piece.of(cut(self.params), cut(self.state), cut(self.rows), self.steps)


def _shard(stage: Stage, whole: _Whole, cut: slice) -> Piece:
    return whole.part(lambda tree: map_leaves(np.ascontiguousarray, of_channels(stage, _divided(stage, tree), cut)))


def _divided(stage: Stage, tree: dict[str, Any]) -> dict[str, Any]:
    """The parts that are divided between the shards."""
    own = _of_paths(tree, stage.divided)
    if stage.summed and (name := stage.summed[0]) in own:
        own[name] = {"w": own[name]["w"]}
    return own


def _merged(stage: Stage, whole: _Whole) -> Piece | None:
    weighted = _together(stage, whole.params) or _together(stage, whole.state)
    return whole.part(lambda tree: _together(stage, tree)) if weighted else None


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
) -> tuple[Array, OptimizerState]:
    """The inverse of `cut_pieces`: flat weights (size,) and the optimizer's state."""
    states = [piece.optimizer for piece in (*chain(*shards), *merged) if piece is not None]
    weights = np.empty(layout.size, layout.dtype)
    vectors = np.zeros((max(len(each.vectors) for each in states), layout.parameter_size), layout.dtype)
    (params, state), rows = layout.views(weights), layout.rows(vectors)
    for stage, own, piece in zip(stages, shards, merged, strict=True):
        if stage.name:
            shards_of = own if stage.by == "kernels" else own[:1]  # else all have the same
            for whole, parts in (
                (params, [s.params for s in shards_of]),
                (state, [s.state for s in shards_of]),
                (rows, [s.rows for s in shards_of]),
            ):
                _put_back(whole, side_by_side(stage, parts, np))
        if piece is not None:
            _put_back(params, piece.params)
            _put_back(state, piece.state)
            _put_back(rows, piece.rows)
    return weights, OptimizerState(vectors, max(each.count for each in states))


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
