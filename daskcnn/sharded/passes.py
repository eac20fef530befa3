"""One stage's work on one worker: pure, but for the device's scratch memory.

Activations and their gradients come and go as host arrays, for they travel between workers; pieces and what is kept for
the way back stay on the device. A network that diverges gives a score that is not finite, and no warnings, as in
`nn.network`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from daskcnn.arrays import Array, Device
from daskcnn.nn import Context, Descent, Loss, Params, Sequential, State, correct, map_leaves
from daskcnn.nn.layer import Keys
from daskcnn.nn.losses import Targets, mixed_loss
from daskcnn.nn.network import on_device
from daskcnn.nn.score import Score
from daskcnn.sharded.channels import of_channels
from daskcnn.sharded.pieces import Edges, Piece
from daskcnn.sharded.stages import By, Share, Stage

_QUIET = np.errstate(over="ignore", invalid="ignore")


@dataclass(frozen=True)
class ShardResidual:
    """The residual of a shard, for its way back. x: its input; params: of the spread layers; state: its own, new.

    summed: what went into the stage's summed layer, and the layer's weights, for all channels that are held.
    """

    x: Array
    residual: Any
    params: Params
    state: State
    summed: tuple[Array, Params] | None = None


@_QUIET
def shard_forward(
    stage: Stage,
    xs: Sequence[Array],
    piece: Piece,
    share: Share,
    edges: Edges,
    keys: Keys | None,
    device: Device,
    *,
    need_dx: bool,
    inputs: By = "kernels",
) -> tuple[Array, ShardResidual]:
    """This shard's kernels over the whole input, whose channels `xs` hold in turn, and on through the spread layers.

    edges: of the neighbours, for the channels that it holds besides its own. need_dx: whether the way back will be
    asked for it, for the algorithm is the fastest there and back. inputs: what `xs` hold in turn. Returns
    y (…, N, own kernels), or this shard's part (N, units) of what the stage's summed layer makes.

    A shard of samples is the whole stage over its part of the batch, which may be none.
    """
    assert stage.conv is not None
    assert stage.name is not None
    x = device.backend.from_host(_together(xs, inputs))
    if not x.shape[-2]:
        return _of_no_samples(stage, x), ShardResidual(x, None, {}, {})
    params, state = piece.widened(stage, edges, device)
    ctx = Context(device, need_dx=need_dx, channel=share.held.start)
    y, _, _ = stage.conv.forward(params[stage.name], {}, x, ctx)
    residual = None
    if stage.spread is not None:
        ctx = Context(device, training=True, keys=keys, channel=share.held.start)
        y, state, residual = stage.spread.forward(params, state, y, ctx)
    cut, summed = share.within(share.own), None
    own = y if share.alone else y[..., cut]
    if stage.summed is not None:
        name, dense = stage.summed
        summed = y, params[name]
        own, _, _ = dense.forward(piece.params[name], {}, own, Context(device))
    spread = {name: params[name] for name in stage.names if name in params}
    return device.backend.to_host(own), ShardResidual(x, residual, spread, of_channels(stage, state, cut), summed)


@_QUIET
def shard_backward(
    stage: Stage,
    kept: ShardResidual,
    dys: Sequence[Array],
    piece: Piece,
    share: Share,
    keys: Keys | None,
    device: Device,
    *,
    need_dx: bool,
) -> tuple[Array | None, Params]:
    """This shard's part of dx (the shards' parts add up) and its gradients.

    dys: parts of the gradient of its graded channels, or of the summed layer's outputs, which add up.
    """
    assert stage.conv is not None
    assert stage.name is not None
    if not kept.x.shape[-2]:
        return None, map_leaves(device.xp.zeros_like, piece.params)
    dy, spread, summed = device.backend.from_host(_sum(dys)), Params(), Params()
    if stage.summed is not None:
        dy, summed = _unsummed(stage, kept, dy, share, device)
    if stage.spread is not None:
        ctx = Context(device, training=True, keys=keys, channel=share.held.start)
        dy, found = _through_spread(stage.spread, kept, dy, share, ctx)
        spread = of_channels(stage, found, share.within(share.own))
    ctx = Context(device, training=True, need_dx=need_dx, channel=share.start)
    residual = stage.conv.residual(piece.params[stage.name], kept.x, ctx)
    dx: Array | None
    dx, own = stage.conv.backward(piece.params[stage.name], residual, dy, ctx)
    return None if dx is None else device.backend.to_host(dx), {stage.name: own, **spread, **summed}


def _unsummed(stage: Stage, kept: ShardResidual, dy: Array, share: Share, device: Device) -> tuple[Array, Params]:
    """The gradient of the graded channels of what is summed, and of the weights of its own."""
    assert stage.summed is not None
    assert kept.summed is not None
    (name, dense), (x, params), graded = stage.summed, kept.summed, share.within(share.graded)
    weights = of_channels(stage, {name: params}, graded)[name]
    back, grads = dense.backward(weights, x[..., graded], dy, Context(device, training=True))
    assert back is not None, "asked for"
    own = slice(share.start - share.graded.start, share.stop - share.graded.start)
    return back, of_channels(stage, {name: grads}, own)


def _through_spread(
    spread: Sequential, kept: ShardResidual, dy: Array, share: Share, ctx: Context
) -> tuple[Array, Params]:
    """The gradient of the shard's own channels, from that of the graded ones; and of the parameters."""
    if share.alone:
        dx, grads = spread.backward(kept.params, kept.residual, dy, ctx)
        assert dx is not None, "asked for"
        return dx, grads
    own, graded = share.within(share.own), share.within(share.graded)
    held = share.held.stop - share.held.start
    return spread.backward_of(kept.params, kept.residual, dy, ctx, given=graded, of=held, wanted=own)


def _together(parts: Sequence[Array], by: By = "kernels") -> Array:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1 if by == "kernels" else -2)


def _of_no_samples(stage: Stage, x: Array) -> Array:
    """The stage's output for a batch of no samples, on the host."""
    assert stage.conv is not None
    height, width, _, channels = x.shape
    out = stage.conv.out_shape((height, width, channels))
    *sides, kernels = stage.spread.out_shape(out) if stage.spread else out
    return np.empty((*sides, 0, kernels), x.dtype)


def _sum(parts: Sequence[Array]) -> Array:
    """The parts added up, in their order."""
    if len(parts) == 1:
        return parts[0]
    total = np.add(parts[0], parts[1])
    for part in parts[2:]:
        total += part
    return total


@_QUIET
def merged_forward(
    stage: Stage, ys: Sequence[Array], piece: Piece | None, keys: Keys | None, device: Device
) -> tuple[Array, Any, State]:
    """Outputs of the shards, side by side or summed, through the layers that are not spread.

    Returns what follows, the residual and the new state.
    """
    x = _sum(ys) if stage.summed else _together(ys)
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
    keys: Keys | None,
    device: Device,
    *,
    need_dx: bool = True,
) -> tuple[Array | None, Params]:
    """The shards' parts of the gradient added up and taken back through the layers that are not spread; theirs."""
    dy = _sum(dxs)
    if stage.rest is None:
        return dy, {}
    params = piece.params if piece else {}
    ctx = Context(device, training=True, keys=keys, need_dx=need_dx)
    dx, grads = stage.rest.backward(params, residual, device.backend.from_host(dy), ctx)
    return None if dx is None else device.backend.to_host(dx), grads


@_QUIET
def descended(piece: Piece, grads: Params, state: State, descent: Descent, lr: float, device: Device) -> Piece:
    """The piece after one step, which leaves the frozen layers as they are."""
    return piece.descended(grads, state, descent, lr, device)


@_QUIET
def descended_alike(piece: Piece, parts: Sequence[Array], descent: Descent, lr: float, device: Device) -> Piece:
    """The piece after one step by gradients (parameter_size,) of all shards of samples, which add up.

    Each of them makes this step for itself. Its parts come in the same order everywhere, and every operation on them is
    one that IEEE 754 rounds alike, so the pieces stay the same to the bit, on devices of all kinds.
    """
    total = _sum(parts)
    if (statistics := piece.layout.size - total.size) > 0:  # of fixed normalising: they have no gradients
        total = np.concatenate([total, np.zeros(statistics, total.dtype)])
    grads, _ = piece.layout.views(device.backend.from_host(total.copy() if total is parts[0] else total))
    return piece.descended(grads, piece.state, descent, lr, device)


def gradient_vector(piece: Piece, grads: Params, device: Device) -> Array:
    """Gradients (parameter_size,) on the host, to be added to others'."""
    return device.backend.to_host(piece.layout.flatten(grads, {}, xp=device.xp))


def added(grads: Params, more: Params) -> Params:
    """Gradients of two parts of a batch."""
    return {k: added(v, more[k]) if isinstance(v, dict) else v + more[k] for k, v in grads.items()}


@_QUIET
def loss_of(
    loss: Loss,
    scores: Array,
    labels: Array,
    device: Device,
    part: float = 1.0,
    weights: Array | None = None,
    partners: Targets | None = None,
) -> tuple[Array, Score]:
    """The gradient of the scores, and the batch's score. part: how much of the whole minibatch the batch is.

    labels, and weights (N,) of the samples, are as `Loss` has them. partners: labels and weights that the samples have
    besides.
    """
    backend = device.backend
    own, targets = backend.from_host(scores), on_device((labels, weights), backend)
    value, dscores = mixed_loss(loss, own, targets, partners and on_device(partners, backend), backend.xp)
    right = correct(own, targets[0])
    score = Score.of_batch(backend.scalar(value), None if right is None else int(backend.scalar(right)), labels)
    return backend.to_host(dscores if part == 1 else dscores * dscores.dtype.type(part)), score
