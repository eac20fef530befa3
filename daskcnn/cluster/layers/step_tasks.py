"""The tasks of a layer-sharded step, as they run on a worker.

A task returns what travels, a `TaskResult` of outputs or gradients. Kernels, what is kept for the way back and the
worker's own part of what it made stay on its shelf. Every worker loads its own minibatch, the same for all, when it
needs it: a task for that would cost more than loading does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from daskcnn.arrays import Array, Device
from daskcnn.cluster.layers.task_context import (
    Minibatch,
    StagePart,
    TaskContext,
    TaskResult,
    batch_of,
    session_at,
    shelf_at,
    stage_name,
    stage_of,
    working,
)
from daskcnn.cluster.layers.transfers import Sources, count_up, edges_beside, handed_on, received, sent, taken_in
from daskcnn.cluster.worker.session import Counters
from daskcnn.nn import Params, State, StepPace, labels_for
from daskcnn.nn.score import Score
from daskcnn.sharded.passes import (
    Held,
    added,
    descended,
    descended_alike,
    gradient_vector,
    gradients_of,
    loss_of,
    merged_backward,
    merged_forward,
    own_addends,
    put_in_place,
    shard_backward,
    shard_forward,
)
from daskcnn.sharded.pieces import Edge, Piece
from daskcnn.sharded.plan_parts import ALL, Cuts, WantedEdge
from daskcnn.sharded.stages import Side, Stage
from daskcnn.store import Batch
from daskcnn.training.replica import Replica


@dataclass(frozen=True)
class MergedResidual:
    """The residual of a merged stage, for its way back."""

    residual: Any
    state: State


def take_counters(context: TaskContext) -> Counters:
    """The counters of this worker since it was last asked."""
    session = session_at(context)
    taken, session.counters = session.counters, Counters()
    return taken


def install(context: TaskContext, part: StagePart, piece: Piece) -> TaskResult:
    """A piece from the driver, to the memory of this worker's device; the edges of a shard."""
    with working(context) as replica:
        piece = piece.on(part.device(replica))
        shelf_at(context).put(part.piece, context.step, piece)
        return TaskResult(context.worker, {}, edges_of(replica, part, piece))


def collect(context: TaskContext, part: StagePart, *behind: Any) -> Piece:
    """The piece that the steps before this one left, on the host."""
    with working(context) as replica:
        piece: Piece = shelf_at(context).get(part.piece, context.step)
        return piece.on_host(part.device(replica))


def edges_of(replica: Replica, part: StagePart, piece: Piece) -> dict[Side, Edge]:
    """The edges of a shard that its neighbours need."""
    stage = stage_of(replica, part)
    reach = 2 * stage.reach
    if part.share is None or not reach:
        return {}
    wanted: dict[Side, bool] = {"left": part.share.start > 0, "right": part.share.stop < part.share.total}
    sides = [side for side, has_neighbour in wanted.items() if has_neighbour]
    return {side: piece.edge(stage, side, reach, replica.device) for side in sides}


# --- shards ---


def shard_fwd(
    context: TaskContext,
    part: StagePart,
    sources: Sources,
    beside: Sequence[TaskResult],
    wanted: Sequence[WantedEdge],
    of: Minibatch,
    gradients: Sources,
    pace: StepPace,
    *behind: Any,
) -> TaskResult:
    """A shard's kernels over the input of its stage, and through the spread layers.

    wanted: which of the edges in `beside`. gradients: those of all, by which a shard of samples is yet to make its last
    step, at this pace. behind: what has to be done before, the last step's way back.
    """
    shelf, batch = shelf_at(context), batch_of(context, of)
    own = part.samples(batch)
    held = taken_in(context, part.taken, sources)
    if gradients and not shelf.has(part.piece, context.step):
        _step_alike(context, part, gradients, pace)
    piece = shelf.get(part.piece, context.step)
    with working(context, stage_name(context, part)) as replica:
        stage, images = stage_of(replica, part), batch.x[..., own, :]
        xs = [held[source].array for source in stage.inputs] or [images]
        addends = own_addends(stage, part.channels, held, _widths(stage, part), images)
        edges = edges_beside(context, stage, beside, wanted)
        args = stage, xs, piece, part.channels, edges, batch.keys[own], replica.device
        y, kept = shard_forward(*args, need_dx=bool(stage.inputs), addends=addends)
    shelf.put(part.kept(context), context.step, kept)
    sent(context, part.away, [y])
    return TaskResult(context.worker, {ALL: y}, wire=context.wire)


def shard_bwd(
    context: TaskContext,
    part: StagePart,
    sources: Sources,
    of: Minibatch,
    pace: StepPace,
    cuts: Mapping[int, Cuts],
    *behind: Any,
) -> TaskResult:
    """A shard's part of the gradients, cut for those that need it, and its step.

    A shard of samples hands on the gradients of its weights after the minibatch's last part, for everybody's step.
    """
    dys = put_in_place(received(context, sources, gradients_of=part.stage), part.places)
    return _shard_back(context, part, dys, of, pace, cuts)


def head_and_bwd(
    context: TaskContext,
    part: StagePart,
    sources: Sources,
    of: Minibatch,
    pace: StepPace,
    cuts: Mapping[int, Cuts],
    *behind: Any,
) -> TaskResult:
    """The loss of what all shards' sums come to, which every worker has for itself, and back from there."""
    weighted = shelf_at(context).has(part.merged.piece, context.step)
    ys = received(context, sources, alike=True)
    dy = _judged(context, replace(part.merged, weighted=weighted), ys, of, pace)
    assert dy is not None, "asked for"
    return _shard_back(context, part, [dy], of, pace, cuts)


def _shard_back(
    context: TaskContext, part: StagePart, dys: Sequence[Array], of: Minibatch, pace: StepPace, cuts: Mapping[int, Cuts]
) -> TaskResult:
    shelf = shelf_at(context)
    kept, piece = shelf.take(part.kept(context), context.step), shelf.get(part.piece, context.step)
    batch = batch_of(context, of)
    with working(context, stage_name(context, part)) as replica:
        stage, device = stage_of(replica, part), replica.device
        keys = batch.keys[part.samples(batch)]
        args = stage, kept, dys, piece, part.channels, keys, device
        dx, grads, more = shard_backward(*args, need_dx=bool(stage.inputs))
        if part.by == "samples":
            return _to_add(context, part, piece, grads, device)
        new = _step(context, part, piece, grads, kept.state, replica, pace)
        edges = edges_of(replica, part, new) if new else {}
        gradients = gradients_of(stage, part.channels, dx, more, _widths(stage, part))
        return handed_on(context, gradients, cuts, away=part.away, edges=edges)


def _to_add(context: TaskContext, part: StagePart, piece: Piece, grads: Params, device: Device) -> TaskResult:
    """The whole minibatch's gradients by this worker's samples; nothing before its last part.

    Not even float16 on the wire shortens them: the worker's own would be others than those that arrive.
    """
    vector = gradient_vector(piece, grads, device)
    shelf, name = shelf_at(context), ("gradients of", *part.piece)
    if context.sub:
        vector += shelf.take(name, context.step)
    if not context.last:
        shelf.put(name, context.step, vector)
        return TaskResult(context.worker, {})
    count_up(context, [vector], part.away)
    return TaskResult(context.worker, {ALL: vector})


def shard_step(context: TaskContext, part: StagePart, sources: Sources, pace: StepPace) -> TaskResult:
    """The step of a shard of samples that no way there follows just yet."""
    _step_alike(context, part, sources, pace)
    return TaskResult(context.worker, {})


def _step_alike(context: TaskContext, part: StagePart, sources: Sources, pace: StepPace) -> None:
    """The step before this one's, by the gradients of all: the same one everywhere."""
    shelf, vectors = shelf_at(context), [source.part(context.worker) for source in sources]
    piece = shelf.get(part.piece, context.step - 1)
    with working(context) as replica:
        new = descended_alike(piece, vectors, replica.descent, pace, replica.device)
    shelf.put(part.piece, context.step, new)
    arrived = (vector.nbytes for vector, source in zip(vectors, sources, strict=True) if source.arrived)
    session_at(context).counters.bytes_down += sum(arrived)


def _step(
    context: TaskContext, part: StagePart, piece: Piece, grads: Params, state: State, replica: Replica, pace: StepPace
) -> Piece | None:
    """Add the gradients up; with the minibatch's last ones the piece makes its step, and is the next step's."""
    shelf, name = shelf_at(context), ("gradients of", *part.piece)
    if context.sub:
        grads = added(shelf.take(name, context.step), grads)
    if not context.last:
        shelf.put(name, context.step, grads)
        return None
    new = descended(piece, grads, state, replica.descent, pace, part.device(replica))
    shelf.put(part.piece, context.step + 1, new)
    return new


def take_edges(context: TaskContext, source: TaskResult) -> TaskResult:
    """A shard's edges, without what else is in the result."""
    return TaskResult(context.worker, {}, source.edges)


# --- where all is put together ---


def merge_fwd(context: TaskContext, part: StagePart, sources: Sources, of: Minibatch, *behind: Any) -> TaskResult:
    """The shards' outputs put together, through the stage's other layers; the batch where it has no shards."""
    shelf, batch = shelf_at(context), batch_of(context, of)
    ys = _put_together(context, part, sources, batch)
    with working(context) as replica:
        stage = stage_of(replica, part)
        x, residual, state = merged_forward(stage, ys, _piece(context, part), batch.keys, replica.device)
    shelf.put(part.kept(context), context.step, MergedResidual(residual, state))
    sent(context, part.away, [x])
    return TaskResult(context.worker, {ALL: x}, wire=context.wire)


def _put_together(context: TaskContext, part: StagePart, sources: Sources, batch: Batch) -> Sequence[Array]:
    """What a stage's layers at home work on: outputs of its shards, or of other stages, or the batch."""
    stage = stage_of(session_at(context).replica, part)
    if stage.conv is not None:
        return received(context, sources)
    held = taken_in(context, part.taken, sources)
    return [held[source].array for source in stage.inputs] or [batch.x]


def _of_shards(context: TaskContext, part: StagePart, dy: Array | None) -> list[tuple[int, Held]]:
    """The gradient of what was put together, by the stages whose outputs it was: the part's own, or others."""
    stage = stage_of(session_at(context).replica, part)
    if stage.conv is None:
        return [*gradients_of(stage, None, dy, (), _widths(stage, part))]
    assert dy is not None, "asked for"
    return [(part.stage, Held(0, dy))]


def _widths(stage: Stage, part: StagePart) -> dict[int, int]:
    return dict(zip(stage.consumed, part.widths, strict=True))


def head(
    context: TaskContext,
    part: StagePart,
    sources: Sources,
    of: Minibatch,
    pace: StepPace,
    cuts: Mapping[int, Cuts],
    *behind: Any,
) -> TaskResult:
    """The last stage, the loss, and back to what the shards get."""
    ys = _put_together(context, part, sources, batch_of(context, of))
    dy = _judged(context, part, ys, of, pace)
    return handed_on(context, _of_shards(context, part, dy), cuts, away=part.away)


def _judged(context: TaskContext, part: StagePart, ys: Sequence[Array], of: Minibatch, pace: StepPace) -> Array | None:
    """Through what is left of the last stage, to the loss and back; the gradient of its outputs. Keeps the score."""
    shelf, batch = shelf_at(context), batch_of(context, of)
    with working(context) as replica:
        stage, device = stage_of(replica, part), part.device(replica)
        piece = _piece(context, part)
        scores, residual, state = merged_forward(stage, ys, piece, batch.keys, device)
        of_minibatch, weights = len(batch.labels) / context.samples, replica.sample_weights(batch)
        labels = labels_for(replica.training_loss, batch.x, batch.labels)
        targets = labels, device, of_minibatch, weights, replica.partners(batch)
        dscores, score = loss_of(replica.training_loss, scores, *targets)
        dy, grads = merged_backward(stage, residual, [dscores], piece, batch.keys, device, need_dx=_is_fed(stage))
        if piece is not None:
            _step(context, part, piece, grads, state, replica, pace)
    shelf.put("score", context.step, score + shelf.take("score", context.step) if context.sub else score)
    return dy


def merge_bwd(
    context: TaskContext,
    part: StagePart,
    sources: Sources,
    of: Minibatch,
    pace: StepPace,
    cuts: Mapping[int, Cuts],
    *behind: Any,
) -> TaskResult:
    """The shards' parts of the gradient added up, and back through the stage's other layers."""
    dxs = put_in_place(received(context, sources, gradients_of=part.stage), part.places)
    batch = batch_of(context, of)
    merged = shelf_at(context).take(part.kept(context), context.step)
    with working(context) as replica:
        stage, piece = stage_of(replica, part), _piece(context, part)
        args = stage, merged.residual, dxs, piece, batch.keys, replica.device
        dy, grads = merged_backward(*args, need_dx=_is_fed(stage))
        if piece is not None:
            _step(context, part, piece, grads, merged.state, replica, pace)
    return handed_on(context, _of_shards(context, part, dy), cuts, away=part.away)


def _is_fed(stage: Stage) -> bool:
    """Whether what is put together are outputs of shards, which ask for its gradient."""
    return stage.conv is not None or bool(stage.inputs)


def take_score(context: TaskContext, head: TaskResult) -> Score:
    """The batch's score."""
    score: Score = shelf_at(context).take("score", context.step)
    return score


def _piece(context: TaskContext, part: StagePart) -> Piece | None:
    """The weights of a merged stage's layers, if they have any."""
    piece: Piece | None = shelf_at(context).get(part.piece, context.step) if part.weighted else None
    return piece
