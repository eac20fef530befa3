"""One stage's forward and backward pass on one worker. Nothing but the device's scratch memory changes.

Activations and their gradients are host arrays, as they travel between workers. Pieces and residuals stay on the
device. A network that diverges gives a score that is not finite, and no warnings, as in `nn.network`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from daskcnn.arrays import Array, Device
from daskcnn.nn import Context, Descent, Layer, Loss, Params, State, StepPace, correct, map_leaves
from daskcnn.nn.layer import Keys
from daskcnn.nn.layers.conv import Conv
from daskcnn.nn.layers.parallel import added as added_arrays
from daskcnn.nn.local import LocalLayer, ScalingLayer
from daskcnn.nn.losses import Targets, mixed_loss
from daskcnn.nn.network import on_device
from daskcnn.nn.score import Score
from daskcnn.sharded.pieces import Edges, Piece, of_channels
from daskcnn.sharded.stages import Addend, By, Share, Stage, added_channels

_QUIET = np.errstate(over="ignore", invalid="ignore")


@dataclass(frozen=True)
class ShardResidual:
    """The residual of a shard.

    Attributes
    ----------
    x : the convolution's input
    residuals : of the sections of spread layers
    params : of the spread layers
    summed : the input of the stage's summed layer, and the layer's weights, for all channels that are held
    lead : the residual of the layers in front of the convolution
    addends : the residual of each addend's layers, with the number of its channels
    """

    x: Array
    residuals: Sequence[Any]
    params: Params
    state: State
    summed: tuple[Array, Params] | None = None
    lead: Any = None
    addends: Sequence[tuple[Any, int]] = ()


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
    addends: Sequence[Array | None] = (),
) -> tuple[Array, ShardResidual]:
    """Compute a shard: its kernels over the whole input, then the spread layers.

    A shard of samples is the whole stage over its part of the batch, which may be empty. xs: the input's channels, in
    turn. need_dx: true if the backward pass needs dx; the algorithm is the fastest for both passes. addends: of each,
    the channels for this shard's own; None: there are none. Returns y (…, N, own kernels), or this shard's part
    (N, units) of the summed layer's outputs, and the residual.
    """
    assert stage.conv is not None
    assert stage.name is not None
    x = device.backend.from_host(joined(xs))
    if not x.shape[-2]:
        height, width, _, channels = x.shape
        *sides, kernels = stage.shard_shape((height, width, channels))
        return np.empty((*sides, 0, kernels), x.dtype), ShardResidual(x, (), {}, {})
    params, state = piece.widened(stage, edges, device)
    ctx, lead = Context(device, training=True, keys=keys), None
    if stage.lead is not None:
        x, _, lead = stage.lead.forward({}, {}, x, ctx)
    ctx = Context(device, need_dx=need_dx, channel=share.held.start)
    y, _, _ = stage.conv.forward(params[stage.name], {}, x, ctx)
    ctx = Context(device, training=True, keys=keys, channel=share.held.start)
    y, new, residuals, sums = _spread_forward(stage, params, state, y, addends, ctx)
    cut, summed = share.within(share.own), None
    own = y if share.alone else y[..., cut]
    if stage.summed is not None:
        name, dense = stage.summed
        summed = y, params[name]
        own, _, _ = dense.forward(piece.params[name], {}, own, Context(device))
    spread = {name: params[name] for name in stage.names if name in params}
    kept = ShardResidual(x, residuals, spread, of_channels(stage, new, cut), summed, lead, sums)
    return device.backend.to_host(own), kept


def _spread_forward(
    stage: Stage, params: Params, state: State, y: Array, addends: Sequence[Array | None], ctx: Context
) -> tuple[Array, State, list[Any], list[tuple[Any, int]]]:
    """The spread layers with the additions between. Returns y, the new state, and the residuals of both."""
    new: State = {}
    residuals: list[Any] = []
    sums: list[tuple[Any, int]] = []
    last: Layer | None = stage.conv
    for section, addend, given in zip_longest(stage.sections, stage.addends, addends):
        residual = None
        if section is not None:
            y, own, residual = section.forward(params, state, y, ctx)
            new, last = new | own, section.layers[-1][1]
        residuals.append(residual)
        if addend is not None:
            y, kept = _with_addend(addend, given, y, last, ctx)
            sums.append(kept)
            last = None
    return y, new, residuals, sums


def _with_addend(
    addend: Addend, given: Array | None, y: Array, last: Layer | None, ctx: Context
) -> tuple[Array, tuple[Any, int]]:
    """Add an addend's channels to the first ones of y. last: the layer that made y; None: an addition did."""
    if given is None:
        return y, (None, 0)
    device, residual = ctx.device, None
    z = device.backend.from_host(given)
    if addend.layers is not None:
        z, _, residual = addend.layers.forward({}, {}, z, ctx)
    count = z.shape[-1]
    if count < y.shape[-1]:
        part, z = z, device.xp.zeros(y.shape, y.dtype)
        z[..., :count] = part
    fresh = last is None or isinstance(last, Conv | LocalLayer | ScalingLayer)  # these keep only their input
    return added_arrays([y, z], z if fresh else y, device), (residual, count)


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
) -> tuple[Array | None, Params, list[Array | None]]:
    """Return this shard's part of dx, its gradients, and those of its addends' channels. The parts of dx add up.

    dys: terms of the gradient of its graded channels, or of the summed layer's outputs.
    """
    assert stage.conv is not None
    assert stage.name is not None
    if not kept.x.shape[-2]:
        return None, map_leaves(device.xp.zeros_like, piece.params), []
    dy, summed = device.backend.from_host(_sum(dys)), Params()
    if stage.summed is not None:
        dy, summed = _unsummed(stage, kept, dy, share, device)
    ctx = Context(device, training=True, keys=keys, channel=share.held.start)
    dy, found, more = _through_spread(stage, kept, dy, share, ctx)
    spread = of_channels(stage, found, share.within(share.own)) if found else Params()
    ctx = Context(device, training=True, need_dx=need_dx, channel=share.start)
    residual = stage.conv.residual(piece.params[stage.name], kept.x, ctx)
    dx, own = stage.conv.backward(piece.params[stage.name], residual, dy, ctx)
    if dx is not None and stage.lead is not None:
        dx, _ = stage.lead.backward({}, kept.lead, dx, Context(device, training=True, keys=keys))
    parts = [None if part is None else device.backend.to_host(part) for part in more]
    return None if dx is None else device.backend.to_host(dx), {stage.name: own, **spread, **summed}, parts


def _unsummed(stage: Stage, kept: ShardResidual, dy: Array, share: Share, device: Device) -> tuple[Array, Params]:
    """The gradient of the summed layer's graded inputs, and of the weights of the shard's own."""
    assert stage.summed is not None
    assert kept.summed is not None
    (name, dense), (x, params), graded = stage.summed, kept.summed, share.within(share.graded)
    weights = of_channels(stage, {name: params}, graded)[name]
    back, grads = dense.backward(weights, x[..., graded], dy, Context(device, training=True))
    assert back is not None, "asked for"
    own = slice(share.start - share.graded.start, share.stop - share.graded.start)
    return back, of_channels(stage, {name: grads}, own)


def _through_spread(
    stage: Stage, kept: ShardResidual, dy: Array, share: Share, ctx: Context
) -> tuple[Array, Params, list[Array | None]]:
    """Gradients of the shard's own channels, of its parameters and of its addends, by that of the graded channels."""
    if not share.alone and stage.spread is not None:
        own, graded = share.within(share.own), share.within(share.graded)
        held = share.held.stop - share.held.start
        args = kept.params, kept.residuals[0], dy, ctx
        return *stage.spread.backward_of(*args, given=graded, of=held, wanted=own), []
    grads = Params()
    more: list[Array | None] = []
    for i, section in reversed([*enumerate(stage.sections)]):
        if section is not None:
            params = {name: kept.params[name] for name, _ in section.layers if name in kept.params}
            back, found = section.backward(params, kept.residuals[i], dy, ctx)
            assert back is not None, "asked for"
            dy, grads = back, found | grads
        if i > 0:
            layers, (residual, count) = stage.addends[i - 1].layers, kept.addends[i - 1]
            added_dy = dy[..., :count] if count else None
            if added_dy is not None and layers is not None:
                added_dy, _ = layers.backward({}, residual, ctx.device.xp.ascontiguousarray(added_dy), ctx)
            more.append(added_dy)
    return dy, grads, more[::-1]


def joined(parts: Sequence[Array], by: By = "kernels") -> Array:
    """Join parts of a map by their channels, or by their samples."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1 if by == "kernels" else -2)


def _sum(parts: Sequence[Array]) -> Array:
    """Add up the parts in their order."""
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
    """Join the shards' outputs and compute the rest of the stage. Returns its output, the residual, the new state."""
    x = _sum(ys) if stage.summed else joined(ys)
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
    """Add up the shards' parts of the gradient. Return that of the rest's input, and those of its parameters."""
    dy = _sum(dxs)
    if stage.rest is None:
        return dy, {}
    params = piece.params if piece else {}
    ctx = Context(device, training=True, keys=keys, need_dx=need_dx)
    dx, grads = stage.rest.backward(params, residual, device.backend.from_host(dy), ctx)
    return None if dx is None else device.backend.to_host(dx), grads


@_QUIET
def descended(piece: Piece, grads: Params, state: State, descent: Descent, pace: StepPace, device: Device) -> Piece:
    """Return the piece after one step. Frozen layers stay the same."""
    return piece.descended(grads, state, descent, pace, device)


@_QUIET
def descended_alike(piece: Piece, parts: Sequence[Array], descent: Descent, pace: StepPace, device: Device) -> Piece:
    """Return the piece after one step by the sum of the gradients (parameter_size,) of all shards of samples.

    Every worker makes this step. The gradients are added in the same order everywhere, and IEEE 754 defines how each
    operation rounds, so the pieces stay the same to the bit on all kinds of devices.
    """
    total = _sum(parts)
    if (statistics := piece.layout.size - total.size) > 0:  # of fixed normalisation; they have no gradients
        total = np.concatenate([total, np.zeros(statistics, total.dtype)])
    grads, _ = piece.views(device.backend.from_host(total.copy() if total is parts[0] else total))
    return piece.descended(grads, piece.state, descent, pace, device)


def gradient_vector(piece: Piece, grads: Params, device: Device) -> Array:
    """Gradients as a vector (parameter_size,) on the host."""
    return device.backend.to_host(piece.layout.flatten(grads, {}, xp=device.xp))


def added(grads: Params, more: Params) -> Params:
    """The sum of the gradients of two parts of a batch."""
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
    """Return the gradient of the scores, and the batch's score.

    labels, weights (N,): as `Loss` has them. partners: the samples' second ones. part: the batch's of the minibatch.
    """
    backend = device.backend
    own, targets = backend.from_host(scores), on_device((labels, weights), backend)
    value, dscores = mixed_loss(loss, own, targets, partners and on_device(partners, backend), backend.xp)
    right = correct(own, targets[0], backend.xp)
    score = Score.of_batch(backend.scalar(value), None if right is None else int(backend.scalar(right)), labels)
    return backend.to_host(dscores if part == 1 else dscores * dscores.dtype.type(part)), score


class Held(NamedTuple):
    """Channels of a stage's outputs, or of their gradient, on one worker. start: the first; own: may be written to."""

    start: int
    array: Array
    own: bool = False

    @property
    def stop(self) -> int:
        """The number of the channel behind the last."""
        return self.start + int(self.array.shape[-1])

    def channels(self, part: slice) -> Array:
        """The channels of these numbers."""
        return self.array[..., part.start - self.start : part.stop - self.start]


def own_addends(
    stage: Stage, share: Share, held: Mapping[int, Held], widths: Mapping[int, int], images: Array
) -> list[Array | None]:
    """The channels of each of a stage's addends for a share's own channels; None for none. widths: of the stages."""
    found: list[Array | None] = []
    for addend in stage.addends:
        parts = [held[source].channels(part) for source, part, _ in added_channels(addend, share, widths)]
        if not addend.inputs and share.start < images.shape[-1]:
            parts = [images[..., share.own]]
        found.append(np.ascontiguousarray(joined(parts)) if parts else None)
    return found


def gradients_of(
    stage: Stage, share: Share | None, dx: Array | None, more: Sequence[Array | None], widths: Mapping[int, int]
) -> Iterator[tuple[int, Held]]:
    """Yield the gradients of the outputs that a stage reads, by those of its input and of its addends."""
    start = 0
    for source in stage.inputs if dx is not None else ():
        assert dx is not None, "asked for"
        yield source, Held(0, dx[..., start : start + widths[source]], own=True)
        start += widths[source]
    for addend, dy in zip(stage.addends, more, strict=False):
        assert share is not None, "only shards add"
        for source, part, place in added_channels(addend, share, widths):
            assert dy is not None, "there are such channels"
            yield source, Held(part.start, dy[..., place])


def summed_up(parts: Sequence[Held]) -> Held:
    """The sum of parts of a gradient; 0 for channels of no part. An own part with all channels is written to."""
    if len(parts) == 1:
        return parts[0]
    start, stop = min(part.start for part in parts), max(part.stop for part in parts)
    whole = next((part for part in parts if part.own and (part.start, part.stop) == (start, stop)), None)
    if whole is None:
        first = parts[0].array
        whole = Held(start, np.zeros((*first.shape[:-1], stop - start), first.dtype), own=True)
    for part in parts:
        if part is not whole:
            at = whole.channels(slice(part.start, part.stop))
            at += part.array
    return whole


def put_in_place(parts: Sequence[Array], places: Sequence[slice | None]) -> Sequence[Array]:
    """Return terms of a gradient with all of its channels. places: of each part; None: it has all channels."""
    if all(place is None for place in places):
        return parts
    stop = max(part.shape[-1] if place is None else place.stop for part, place in zip(parts, places, strict=True))
    total = np.zeros((*parts[0].shape[:-1], stop), parts[0].dtype)
    for part, place in zip(parts, places, strict=True):
        at = total if place is None else total[..., place]
        at += part
    return [total]
