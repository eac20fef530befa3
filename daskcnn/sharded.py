"""A network cut for layer sharding: every convolution's kernels spread over workers, all between them merged.

The network becomes *stages*: a convolution (its kernels in shards) and the layers behind it, up to the next
convolution, which run where the shards' outputs are merged. The functions here are one stage's work on one worker,
pure but for the device's scratch memory; `cluster` sends them about (Marques et al.; thesis, ch. 4). Activations and
their gradients come and go as host arrays, for they travel between workers; pieces and residuals stay on the device.
A network that diverges gives a score that is not finite, and no warnings, as in `nn.network`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from daskcnn.arrays import Array, Device
from daskcnn.nn import Context, Layer, Layout, Loss, Params, Sequential, State, correct, map_leaves
from daskcnn.nn.layer import Keys
from daskcnn.nn.layers.conv import Conv
from daskcnn.nn.optimizer import SGD
from daskcnn.replica import Score

_QUIET = np.errstate(over="ignore", invalid="ignore")


@dataclass(frozen=True)
class Stage:
    """A convolution by name (None: the network starts without one) and the layers behind it (None: there are none)."""

    name: str | None
    conv: Conv | None
    rest: Sequential | None


@dataclass(frozen=True)
class Piece:
    """Parameters, state and momentum of a kernel shard or of a stage's merged layers; host or device arrays.

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
        return _nested(self.layout, self.velocity)

    def on(self, device: Device) -> Piece:
        """The same piece in the device's memory."""
        return self._moved(device.backend.from_host)

    def on_host(self, device: Device) -> Piece:
        """The same piece in the host's memory."""
        return self._moved(device.backend.to_host)

    def _moved(self, move: Callable[[Array], Array]) -> Piece:
        params, state = map_leaves(move, self.params), map_leaves(move, self.state)
        return Piece(params, state, move(self.velocity), self.layout)

    def descended(self, grads: Params, state: State, optimizer: SGD, lr: float, device: Device) -> Piece:
        """The piece after one step of the optimizer; `grads` as backward returns them."""
        xp = device.xp
        vector = self.layout.flatten(self.params, state, xp=xp)
        velocity = self.velocity.copy()
        size = self.layout.parameter_size
        optimizer.step(vector[:size], self.layout.flatten(grads, {}, xp=xp), velocity, lr, device)
        return Piece(*self.layout.views(vector), velocity, self.layout)


def stages_of(model: Sequential) -> tuple[Stage, ...]:
    """The network in stages. Convolutions inside composite layers stay whole: they belong to a merged part."""
    cuts = [i for i, (_, layer) in enumerate(model.layers) if isinstance(layer, Conv)]
    edges = [*([0] if not cuts or cuts[0] > 0 else []), *cuts, len(model.layers)]
    return tuple(_stage(model.layers[a:b]) for a, b in pairwise(edges))


def _stage(layers: Sequence[tuple[str, Layer]]) -> Stage:
    name, first = layers[0]
    if isinstance(first, Conv):
        return Stage(name, first, Sequential(tuple(layers[1:])) if layers[1:] else None)
    return Stage(None, None, Sequential(tuple(layers)))


def shard_slices(kernels: Sequence[int]) -> list[slice]:
    """Where each shard's kernels lie on the last axis, from how many it has."""
    return [slice(a, b) for a, b in pairwise(accumulate(kernels, initial=0))]


def cut_pieces(
    stages: Sequence[Stage], layout: Layout, weights: Array, velocity: Array, kernels: Sequence[Sequence[int]]
) -> tuple[list[list[Piece]], list[Piece | None]]:
    """Kernel shards (per stage, per worker) and merged pieces (per stage) of flat weights and momentum.

    `kernels` says, per stage, how many each worker gets; weights (size,), velocity (parameter_size,).
    """
    params, state = layout.views(weights)
    momentum = _nested(layout, velocity)
    shards = [
        [_shard(params[s.name], momentum[s.name], cut) for cut in shard_slices(k)] if s.name else []
        for s, k in zip(stages, kernels, strict=True)
    ]
    return shards, [_merged(s.rest, params, state, momentum) for s in stages]


def _nested(layout: Layout, velocity: Array) -> Params:
    """Momentum (parameter_size,), nested like the parameters of the layout."""
    without_state = np.zeros(layout.size - layout.parameter_size, layout.dtype)
    return layout.views(np.concatenate([velocity, without_state]))[0]


def _shard(params: Params, momentum: Params, cut: slice) -> Piece:
    own, moving = (map_leaves(lambda a: np.ascontiguousarray(a[..., cut]), tree) for tree in (params, momentum))
    return Piece.of(own, {}, moving)


def _merged(rest: Sequential | None, params: Params, state: State, momentum: Params) -> Piece | None:
    names = [name for name, _ in rest.layers] if rest else []
    own, kept, moving = ({n: tree[n] for n in names if n in tree} for tree in (params, state, momentum))
    return Piece.of(own, kept, moving) if own or kept else None


def join_pieces(
    stages: Sequence[Stage], layout: Layout, shards: Sequence[Sequence[Piece]], merged: Sequence[Piece | None]
) -> tuple[Array, Array]:
    """The inverse of `cut_pieces`: flat weights (size,) and momentum (parameter_size,)."""
    weights, velocity = np.empty(layout.size, layout.dtype), np.zeros(layout.size, layout.dtype)
    params, state = layout.views(weights)
    momentum, _ = layout.views(velocity)
    for stage, own, piece in zip(stages, shards, merged, strict=True):
        if stage.name:
            _put(params[stage.name], [s.params for s in own])
            _put(momentum[stage.name], [s.momentum for s in own])
        if piece is not None:
            _copy_into(params, piece.params)
            _copy_into(state, piece.state)
            _copy_into(momentum, piece.momentum)
    return weights, velocity[: layout.parameter_size]


def _put(whole: Params, parts: Sequence[Params]) -> None:
    for name, array in whole.items():
        array[...] = np.concatenate([part[name] for part in parts], axis=-1)


def _copy_into(whole: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        if isinstance(value, dict):
            _copy_into(whole[name], value)
        else:
            whole[name][...] = value


@_QUIET
def conv_forward(stage: Stage, x: Array, shard: Piece, device: Device) -> Array:
    """This shard's kernels over the whole input: (out_H, out_W, N, own kernels), on the host."""
    assert stage.conv is not None
    y, _, _ = stage.conv.forward(shard.params, {}, device.backend.from_host(x), Context(device))
    return device.backend.to_host(y)


@_QUIET
def conv_backward(
    stage: Stage, x: Array, dy: Array, shard: Piece, optimizer: SGD, lr: float, device: Device, *, need_dx: bool
) -> tuple[Array | None, Piece]:
    """This shard's part of dx (the shards' parts add up) and the shard after its step; dy holds its kernels only."""
    assert stage.conv is not None
    backend = device.backend
    ctx = Context(device, training=True, need_dx=need_dx)
    residual = stage.conv.residual(shard.params, backend.from_host(x), ctx)
    dx, grads = stage.conv.backward(shard.params, residual, backend.from_host(dy), ctx)
    return None if dx is None else backend.to_host(dx), shard.descended(grads, {}, optimizer, lr, device)


@_QUIET
def merged_forward(
    stage: Stage, ys: Sequence[Array], piece: Piece | None, keys: Keys | None, device: Device
) -> tuple[Array, Any, State]:
    """Outputs of the shards, side by side, through the stage's other layers: (x of the next stage, residual, state)."""
    x = ys[0] if len(ys) == 1 else np.concatenate(ys, axis=-1)
    if stage.rest is None:
        return x, None, {}
    params, state = (piece.params, piece.state) if piece else ({}, {})
    ctx = Context(device, training=True, keys=keys)
    y, new_state, residual = stage.rest.forward(params, state, device.backend.from_host(x), ctx)
    return device.backend.to_host(y), residual, new_state


@_QUIET
def merged_backward(
    stage: Stage,
    residual: Any,
    dxs: Sequence[Array],
    piece: Piece | None,
    new_state: State,
    keys: Keys | None,
    optimizer: SGD,
    lr: float,
    device: Device,
    *,
    need_dx: bool = True,
) -> tuple[Array | None, Piece | None]:
    """The shards' parts of the gradient added up and taken back through the stage's other layers; their step."""
    dy = sum(dxs[1:], start=dxs[0])
    if stage.rest is None:
        return dy, piece
    params = piece.params if piece else {}
    ctx = Context(device, training=True, keys=keys, need_dx=need_dx)
    dx, grads = stage.rest.backward(params, residual, device.backend.from_host(dy), ctx)
    back = None if dx is None else device.backend.to_host(dx)
    return back, piece and piece.descended(grads, new_state, optimizer, lr, device)


@_QUIET
def loss_of(loss: Loss, scores: Array, labels: Array, device: Device) -> tuple[Array, Score]:
    """The gradient of the scores, and the batch's score."""
    backend, n = device.backend, len(labels)
    own, targets = backend.from_host(scores), backend.from_host(labels)
    value, dscores = loss(own, targets, backend.xp)
    score = Score(backend.scalar(value) * n, int(backend.scalar(correct(own, targets))), n)
    return backend.to_host(dscores), score
