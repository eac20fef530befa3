"""The tasks of a layer-sharded step, as they run on a worker.

A task returns what travels, a `Parcel` of outputs or gradients; kernels, what is kept for the way back and the worker's
own part of what it made stay on its shelf. Every worker loads its own minibatch, the same for all, when it needs it: a
task of its own would cost more than it takes to load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from daskcnn.arrays import Array, Device
from daskcnn.cluster.layers.messages import ALL, Parcel
from daskcnn.cluster.layers.task_context import (
    Minibatch,
    Part,
    Where,
    batch_of,
    gradient,
    session_at,
    shelf_at,
    stage_name,
    stage_of,
    working,
)
from daskcnn.cluster.layers.transfers import Cuts, Sources, edges_beside, handed_on, received, sent
from daskcnn.cluster.session.session import Counters
from daskcnn.nn import Params, State
from daskcnn.nn.score import Score
from daskcnn.sharded import (
    Edge,
    Piece,
    Side,
    added,
    descended,
    descended_alike,
    gradient_vector,
    loss_of,
    merged_backward,
    merged_forward,
    shard_backward,
    shard_forward,
)
from daskcnn.training.replica import Replica


@dataclass(frozen=True)
class Merged:
    """Of a merged stage: what its way back needs."""

    residual: Any
    state: State


def take_counters(where: Where) -> Counters:
    """What this worker spent and moved since it was last asked."""
    session = session_at(where)
    taken, session.counters = session.counters, Counters()
    return taken


def install(where: Where, part: Part, piece: Piece) -> Parcel:
    """A piece from the driver, to the memory of this worker's device; the edges of a shard."""
    with working(where) as replica:
        piece = piece.on(part.device(replica))
        shelf_at(where).put(part.piece, where.step, piece)
        return Parcel(where.worker, {}, edges_of(replica, part, piece))


def collect(where: Where, part: Part, *behind: Any) -> Piece:
    """The piece that the steps before this one left, on the host."""
    with working(where) as replica:
        piece: Piece = shelf_at(where).get(part.piece, where.step)
        return piece.on_host(part.device(replica))


def edges_of(replica: Replica, part: Part, piece: Piece) -> dict[Side, Edge]:
    """What a shard's neighbours need of it."""
    stage = stage_of(replica, part)
    reach = 2 * stage.reach
    if part.share is None or not reach:
        return {}
    wanted: dict[Side, bool] = {"left": part.share.start > 0, "right": part.share.stop < part.share.total}
    sides = [side for side, has_neighbour in wanted.items() if has_neighbour]
    return {side: piece.edge(stage, side, reach, replica.device) for side in sides}


# --- shards ---

Ends = Sequence[tuple[Side, int]]
"""Of the neighbours whose channels a shard needs besides its own: at which end of theirs they are, and how many."""


def shard_fwd(
    where: Where,
    part: Part,
    sources: Sources,
    beside: Sequence[Parcel],
    ends: Ends,
    of: Minibatch,
    gradients: Sources,
    lr: float,
    *behind: Any,
) -> Parcel:
    """A shard's kernels over the input of its stage, and through the spread layers.

    gradients: those of all, by which a shard of samples is yet to make its last step, at the rate lr. behind: what has
    to be done before, the last step's way back.
    """
    shelf, batch = shelf_at(where), batch_of(where, of)
    own = part.samples(batch)
    xs = received(where, sources) if sources else [batch.x[..., own, :]]
    if gradients and not shelf.has(part.piece, where.step):
        _step_alike(where, part, gradients, lr)
    piece = shelf.get(part.piece, where.step)
    with working(where, stage_name(where, part)) as replica:
        stage = stage_of(replica, part)
        edges = edges_beside(where, stage, beside, ends)
        args = stage, xs, piece, part.channels, edges, batch.keys[own], replica.device
        y, kept = shard_forward(*args, need_dx=part.stage > 0, inputs=part.inputs)
    shelf.put(part.kept(where), where.step, kept)
    sent(where, part.away, [y])
    return Parcel(where.worker, {ALL: y}, wire=where.wire)


def shard_bwd(
    where: Where, part: Part, sources: Sources, of: Minibatch, lr: float, cuts: Cuts | None, *behind: Any
) -> Parcel:
    """A shard's part of the gradients, cut for those who need it (None: nobody does), and its step.

    A shard of samples hands on the gradients of its weights after the minibatch's last part, for everybody's step.
    """
    return _shard_back(where, part, received(where, sources, gradient(part.stage, where)), of, lr, cuts)


def head_and_bwd(
    where: Where, part: Part, sources: Sources, of: Minibatch, lr: float, cuts: Cuts | None, *behind: Any
) -> Parcel:
    """The loss of what all shards' sums come to, which every worker has for itself, and back from there."""
    weighted = shelf_at(where).has(part.merged.piece, where.step)
    ys = received(where, sources, alike=True)
    dy = _judged(where, replace(part.merged, weighted=weighted), ys, of, lr)
    assert dy is not None, "asked for"
    return _shard_back(where, part, [dy], of, lr, cuts)


def _shard_back(where: Where, part: Part, dys: Sequence[Array], of: Minibatch, lr: float, cuts: Cuts | None) -> Parcel:
    shelf = shelf_at(where)
    kept, piece = shelf.take(part.kept(where), where.step), shelf.get(part.piece, where.step)
    batch = batch_of(where, of)
    with working(where, stage_name(where, part)) as replica:
        stage, device = stage_of(replica, part), replica.device
        keys = batch.keys[part.samples(batch)]
        dx, grads = shard_backward(stage, kept, dys, piece, part.channels, keys, device, need_dx=cuts is not None)
        if part.by == "samples":
            return _to_add(where, part, piece, grads, device)
        new = _step(where, part, piece, grads, kept.state, replica, lr)
        edges = edges_of(replica, part, new) if new else {}
    return handed_on(where, part.stage - 1, dx, cuts or {}, edges=edges)


def _to_add(where: Where, part: Part, piece: Piece, grads: Params, device: Device) -> Parcel:
    """The whole minibatch's gradients by this worker's samples; nothing before its last part.

    Not even float16 on the wire shortens them: the worker's own would be others than those that arrive.
    """
    vector = gradient_vector(piece, grads, device)
    shelf, name = shelf_at(where), ("gradients of", *part.piece)
    if where.sub:
        vector += shelf.take(name, where.step)
    if not where.last:
        shelf.put(name, where.step, vector)
        return Parcel(where.worker, {})
    session_at(where).counters.bytes_up += part.away * vector.nbytes
    return Parcel(where.worker, {ALL: vector})


def shard_step(where: Where, part: Part, sources: Sources, lr: float) -> Parcel:
    """The step of a shard of samples that no way there follows just yet."""
    _step_alike(where, part, sources, lr)
    return Parcel(where.worker, {})


def _step_alike(where: Where, part: Part, sources: Sources, lr: float) -> None:
    """The step before this one's, by the gradients of all: the same one everywhere."""
    shelf, vectors = shelf_at(where), [source.part(where.worker) for source in sources]
    piece = shelf.get(part.piece, where.step - 1)
    with working(where) as replica:
        new = descended_alike(piece, vectors, replica.optimizer, lr, replica.device)
    shelf.put(part.piece, where.step, new)
    arrived = (vector.nbytes for vector, source in zip(vectors, sources, strict=True) if source.arrived)
    session_at(where).counters.bytes_down += sum(arrived)


def _step(
    where: Where, part: Part, piece: Piece, grads: Params, state: State, replica: Replica, lr: float
) -> Piece | None:
    """Add the gradients up; with the minibatch's last ones the piece makes its step, and is the next step's."""
    shelf, name = shelf_at(where), ("gradients of", *part.piece)
    if where.sub:
        grads = added(shelf.take(name, where.step), grads)
    if not where.last:
        shelf.put(name, where.step, grads)
        return None
    new = descended(piece, grads, state, replica.optimizer, lr, part.device(replica))
    shelf.put(part.piece, where.step + 1, new)
    return new


def take_edges(where: Where, source: Parcel) -> Parcel:
    """A shard's edges, without what else is in the parcel."""
    return Parcel(where.worker, {}, source.edges)


# --- where all is put together ---


def merge_fwd(where: Where, part: Part, sources: Sources, of: Minibatch, *behind: Any) -> Parcel:
    """The shards' outputs put together, through the stage's other layers; the batch where it has no shards."""
    shelf, batch = shelf_at(where), batch_of(where, of)
    ys = received(where, sources) if sources else [batch.x]
    with working(where) as replica:
        stage = stage_of(replica, part)
        x, residual, state = merged_forward(stage, ys, _piece(where, part), batch.keys, replica.device)
    shelf.put(part.kept(where), where.step, Merged(residual, state))
    sent(where, part.away, [x])
    return Parcel(where.worker, {ALL: x}, wire=where.wire)


def head(where: Where, part: Part, sources: Sources, of: Minibatch, lr: float, cuts: Cuts, *behind: Any) -> Parcel:
    """The last stage, the loss, and back to what the shards get."""
    ys = received(where, sources) if sources else [batch_of(where, of).x]
    dy = _judged(where, part, ys, of, lr, need_dy=bool(cuts))
    return handed_on(where, part.stage, dy, cuts, away=part.away)


def _judged(
    where: Where, part: Part, ys: Sequence[Array], of: Minibatch, lr: float, *, need_dy: bool = True
) -> Array | None:
    """Through what is left of the last stage, to the loss and back; the gradient of its outputs. Keeps the score."""
    shelf, batch = shelf_at(where), batch_of(where, of)
    with working(where) as replica:
        stage, device = stage_of(replica, part), part.device(replica)
        piece = _piece(where, part)
        scores, residual, state = merged_forward(stage, ys, piece, batch.keys, device)
        dscores, score = loss_of(replica.loss, scores, batch.labels, device, len(batch.labels) / where.samples)
        dy, grads = merged_backward(stage, residual, [dscores], piece, batch.keys, device, need_dx=need_dy)
        if piece is not None:
            _step(where, part, piece, grads, state, replica, lr)
    shelf.put("score", where.step, score + shelf.take("score", where.step) if where.sub else score)
    return dy


def merge_bwd(where: Where, part: Part, sources: Sources, of: Minibatch, lr: float, cuts: Cuts, *behind: Any) -> Parcel:
    """The shards' parts of the gradient added up, and back through the stage's other layers."""
    dxs, batch = received(where, sources, gradient(part.stage, where)), batch_of(where, of)
    merged = shelf_at(where).take(part.kept(where), where.step)
    with working(where) as replica:
        stage, piece = stage_of(replica, part), _piece(where, part)
        args = stage, merged.residual, dxs, piece, batch.keys, replica.device
        dy, grads = merged_backward(*args, need_dx=bool(cuts))
        if piece is not None:
            _step(where, part, piece, grads, merged.state, replica, lr)
    return handed_on(where, part.stage, dy, cuts)


def take_score(where: Where, head: Parcel) -> Score:
    """The batch's score."""
    score: Score = shelf_at(where).take("score", where.step)
    return score


def _piece(where: Where, part: Part) -> Piece | None:
    """The weights of a merged stage's layers, if they have any."""
    piece: Piece | None = shelf_at(where).get(part.piece, where.step) if part.weighted else None
    return piece
