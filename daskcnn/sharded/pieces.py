"""Pieces of a network's weights and of its optimizer's state: kernel shards, and layers that are not divided.

Parameters, gradients and state are trees by path. A shard's channels lie along the last axis of every array. Only the
weights of a stage's summed layer have them along the axis before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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
    """The same tree with views of these channels."""
    cuts = {-1: itemgetter((..., part)), -2: itemgetter((..., part, slice(None)))}
    return {name: map_leaves(cuts[_axis(stage, name)], own) for name, own in tree.items()}


def side_by_side(stage: Stage, trees: Sequence[dict[str, Any]], xp: Any) -> dict[str, Any]:
    """One tree of the same layers, with the channels of all trees in turn."""
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
    """Parameters, state and optimizer's state of a kernel shard or of a stage's merged layers, on host or device.

    A step makes a new piece and leaves the old one as it was, so a step can be taken again.
    """

    params: Params
    state: State
    optimizer: OptimizerState
    layout: Layout

    @classmethod
    def of(cls, params: Params, state: State, rows: Params, count: int) -> Piece:
        """Make a piece of host arrays. rows: of the optimizer's state, nested as by `Layout.rows`."""
        layout = Layout.of(params, state)
        columns = [row.reshape(len(row), prod(row.shape[1:])) for _, row in leaves(rows)]
        vectors = np.concatenate(columns, axis=1) if columns else np.empty((0, 0), layout.dtype)
        return cls(params, state, OptimizerState(vectors, count), layout)

    @property
    def rows(self) -> Params:
        """The optimizer's state, nested like `params`."""
        return _of_paths(self.layout.rows(self.optimizer.vectors), [*self.params])

    def views(self, vector: Array) -> tuple[Params, State]:
        """Parameters and state by path, as views of a vector (size,)."""
        params, state = self.layout.views(vector)
        return _of_paths(params, [*self.params]), _of_paths(state, [*self.state])

    @property
    def nbytes(self) -> int:
        """Bytes of its weights and its optimizer's state."""
        return self.layout.nbytes + self.optimizer.nbytes

    def on(self, device: Device) -> Piece:
        """The piece in the device's memory."""
        return self._moved(device.backend.from_host)

    def on_host(self, device: Device) -> Piece:
        """The piece in the host's memory."""
        return self._moved(device.backend.to_host)

    def _moved(self, move: Callable[[Array], Array]) -> Piece:
        params, state = map_leaves(move, self.params), map_leaves(move, self.state)
        return Piece(params, state, self.optimizer.moved(move), self.layout)

    def edge(self, stage: Stage, side: Side, count: int, device: Device) -> Edge:
        """The first or last channels of a shard on the host: `count` of them, or all if it has fewer."""
        cut = slice(None, count) if side == "left" else slice(-count, None)
        own = (of_channels(stage, tree, cut) for tree in (self.params, self.state))
        return _each(lambda a: np.ascontiguousarray(device.backend.to_host(a)), *own)

    def widened(self, stage: Stage, edges: Edges, device: Device) -> Edge:
        """Parameters and state of a shard and of its neighbours' edges, which come from the host."""
        if not edges.before and not edges.after:
            return self.params, self.state
        before, after = ([_each(device.backend.from_host, *edge) for edge in side] for side in edges)
        whole = [*before, (self.params, self.state), *after]
        params, state = zip(*whole, strict=True)
        return side_by_side(stage, params, device.xp), side_by_side(stage, state, device.xp)

    def descended(self, grads: Params, state: State, descent: Descent, pace: StepPace, device: Device) -> Piece:
        """Return the piece after one step. Frozen layers stay the same."""
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
    stages: Sequence[Stage], layout: Layout, weights: Array, optimizer: OptimizerState, kernels: Sequence[Sequence[int]]
) -> tuple[list[list[Piece]], list[Piece | None]]:
    """Cut flat weights (size,) and their optimizer's state into kernel shards and merged pieces.

    kernels: of each stage, the number that each worker gets. Every worker gets all kernels of a stage by samples.
    Returns the shards by stage and worker, and the merged piece of each stage.
    """
    (params, state), rows = layout.views(weights), layout.rows(optimizer.vectors)

    def part(of: Callable[[dict[str, Any]], dict[str, Any]]) -> Piece:
        return Piece.of(of(params), of(state), of(rows), optimizer.count)

    def cut(stage: Stage, channels: slice, tree: dict[str, Any]) -> dict[str, Any]:
        divided = _of_stage(stage, tree, stage.divided, "w")
        return map_leaves(np.ascontiguousarray, of_channels(stage, divided, channels))

    shards: list[list[Piece]] = [[] for _ in stages]
    for found, stage, own in zip(shards, stages, kernels, strict=True):
        cuts = [share.own if stage.by == "kernels" else slice(None) for share in shares_of(own)]
        found += [part(partial(cut, stage, each)) for each in cuts] if stage.name else []
    weighted = weighted_stages(stages, layout)
    return shards, [part(partial(_together, stage)) if i in weighted else None for i, stage in enumerate(stages)]


def weighted_stages(stages: Sequence[Stage], layout: Layout) -> frozenset[int]:
    """The stages whose undivided layers have parameters or state: those with a merged piece."""
    trees = layout.views(np.empty(layout.size, layout.dtype))
    return frozenset(i for i, stage in enumerate(stages) if any(_together(stage, tree) for tree in trees))


def _together(stage: Stage, tree: dict[str, Any]) -> dict[str, Any]:
    """The parts that stay whole."""
    return _of_stage(stage, tree, [path for path, _ in (stage.rest.layers if stage.rest else ())], "b")


def _of_stage(stage: Stage, tree: dict[str, Any], paths: Sequence[str], of_summed: str) -> dict[str, Any]:
    """The parts of these layers; of the summed layer only one parameter, `of_summed`."""
    own = _of_paths(tree, paths)
    if stage.summed and (name := stage.summed[0]) in own:
        own[name] = {of_summed: own[name][of_summed]}
    return own


def _of_paths(tree: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """The parts of those of these layers that have any, by path."""
    return {path: own for path in paths if (own := inside(tree, path))}


def join_pieces(
    stages: Sequence[Stage], layout: Layout, shards: Sequence[Sequence[Piece]], merged: Sequence[Piece | None]
) -> tuple[Array, OptimizerState]:
    """Invert `cut_pieces`: return flat weights (size,) and the optimizer's state."""
    states = [piece.optimizer for piece in (*chain(*shards), *merged) if piece is not None]
    weights = np.empty(layout.size, layout.dtype)
    vectors = np.zeros((max(len(each.vectors) for each in states), layout.parameter_size), layout.dtype)
    whole = *layout.views(weights), layout.rows(vectors)
    for stage, own, piece in zip(stages, shards, merged, strict=True):
        found: list[Sequence[dict[str, Any]]] = [(piece.params, piece.state, piece.rows)] if piece is not None else []
        if stage.name:
            distinct = own if stage.by == "kernels" else own[:1]  # by samples all are alike
            parts = zip(*((shard.params, shard.state, shard.rows) for shard in distinct), strict=True)
            found.append(tuple(side_by_side(stage, trees, np) for trees in parts))
        for trees in found:
            for tree, part in zip(whole, trees, strict=True):
                _put_back(tree, part)
    return weights, OptimizerState(vectors, max(each.count for each in states))


def _put_back(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Copy a tree by path to its place."""
    for path, value in part.items():
        if isinstance(value, dict):
            _put_back(inside(whole, path), value)
        else:
            whole[path][...] = value
