"""The tasks of a layer-sharded step, as they run on a worker.

A task returns a `TaskResult` of outputs or gradients, which travels. Kernels, residuals for the way back and the
worker's own part of a result stay on its shelf. Every worker loads the minibatch by itself when it needs it: a task
that loads it would cost more than loading does. Arguments `behind` are results of tasks that must have run before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import iadd
from typing import Any

from daskcnn.arrays import Array
from daskcnn.cluster.layers.task_context import StagePart, TaskContext, TaskResult, batch_of, stage_of, working
from daskcnn.cluster.layers.transfers import Sources, count_up, edges_beside, handed_on, received, sent, taken_in
from daskcnn.cluster.worker.session import Counters
from daskcnn.nn import OptimizerState, Params, State, StepPace, labels_for
from daskcnn.nn.score import Score
from daskcnn.sharded import passes
from daskcnn.sharded.pieces import Edge, Piece
from daskcnn.sharded.plan_parts import ALL, WantedEdge
from daskcnn.sharded.stages import Side, Stage
from daskcnn.store import Batch
from daskcnn.training.replica import Replica


def take_counters(context: TaskContext, *behind: Any) -> Counters:
    """Return the counters of this worker since it was last asked."""
    session = context.session
    taken, session.counters = session.counters, Counters()
    return taken


def install(context: TaskContext, part: StagePart, piece: Piece, optimizer: OptimizerState | None = None) -> TaskResult:
    """Move a piece from the host to the memory of this worker's device. Returns the edges of a shard.

    optimizer: state to go on with in place of the piece's own, on the device.
    """
    with working(context) as replica:
        piece = piece.on(part.device(replica))
        piece = replace(piece, optimizer=optimizer or piece.optimizer)
        context.shelf.put(part.piece, context.step, piece)
        return TaskResult(context.worker, {}, edges_of(replica, part, piece))


def collect(context: TaskContext, part: StagePart, *behind: Any) -> Piece:
    """Return the piece that the steps before this one left, on the host."""
    with working(context) as replica:
        piece: Piece = context.shelf.get(part.piece, context.step)
        return piece.on_host(part.device(replica))


def edges_of(replica: Replica, part: StagePart, piece: Piece) -> dict[Side, Edge]:
    """Return the edges of a shard that its neighbours need."""
    stage, share = stage_of(replica, part), part.share
    reach = 2 * stage.reach
    if share is None or not reach:
        return {}
    beside: dict[Side, bool] = {"left": share.start > 0, "right": share.stop < share.total}
    return {side: piece.edge(stage, side, reach, replica.device) for side, wanted in beside.items() if wanted}


# --- shards ---


def shard_fwd(
    context: TaskContext,
    part: StagePart,
    sources: Sources,
    beside: Sequence[TaskResult],
    wanted: Sequence[WantedEdge],
    owed: Sources,
    owed_pace: StepPace,
    *behind: Any,
) -> TaskResult:
    """Apply a shard's kernels to the input of its stage, then the layers that are divided with them.

    wanted: the edge of each of the results `beside`. owed: all workers' gradients of the last step, which a shard of
    samples makes first.
    """
    shelf, batch = context.shelf, batch_of(context)
    own = part.samples(batch)
    held = taken_in(context, part.taken, sources)
    if owed and not shelf.has(part.piece, context.step):
        _step_alike(context, part, owed, owed_pace)
    piece = shelf.get(part.piece, context.step)
    with working(context, part) as replica:
        stage, images = stage_of(replica, part), batch.x[..., own, :]
        xs = [held[source].array for source in stage.inputs] or [images]
        addends = passes.own_addends(stage, part.channels, held, _widths(stage, part), images)
        edges = edges_beside(context, stage, beside, wanted)
        args = stage, xs, piece, part.channels, edges, batch.keys[own], replica.device
        y, kept = passes.shard_forward(*args, need_dx=bool(stage.inputs), addends=addends)
    shelf.put(part.kept(context), context.step, kept)
    sent(context, part.away, [y])
    return TaskResult(context.worker, {ALL: y}, wire=context.wire)


def shard_bwd(context: TaskContext, part: StagePart, sources: Sources, *behind: Any) -> TaskResult:
    """Go back through a shard, and make its step. Returns its part of the gradients, cut for those that need it.

    After the minibatch's last part a shard of samples returns the gradients of its weights instead.
    """
    dys = passes.put_in_place(received(context, sources, gradients_of=part.stage), part.places)
    return _shard_back(context, part, dys)


def head_and_bwd(context: TaskContext, part: StagePart, sources: Sources, *behind: Any) -> TaskResult:
    """Compute the loss, which every worker does for itself from the sums of all shards, and go back from there."""
    merged = replace(part, share=None)
    merged = replace(merged, weighted=context.shelf.has(merged.piece, context.step))
    dy = _judged(context, merged, received(context, sources, alike=True))
    assert dy is not None, "asked for"
    return _shard_back(context, part, [dy])


def _shard_back(context: TaskContext, part: StagePart, dys: Sequence[Array]) -> TaskResult:
    shelf = context.shelf
    kept, piece = shelf.take(part.kept(context), context.step), shelf.get(part.piece, context.step)
    batch = batch_of(context)
    with working(context, part) as replica:
        stage, device = stage_of(replica, part), replica.device
        args = stage, kept, dys, piece, part.channels, batch.keys[part.samples(batch)], device
        dx, grads, more = passes.shard_backward(*args, need_dx=bool(stage.inputs))
        if part.by == "samples":
            vector = _of_minibatch(context, part, passes.gradient_vector(piece, grads, device), iadd)
            if vector is None:
                return TaskResult(context.worker, {})
            # in its own dtype whatever the wire's: a worker's own vector has to be the one that others receive
            count_up(context, [vector], part.away)
            return TaskResult(context.worker, {ALL: vector})
        new = _step(context, part, piece, grads, kept.state, replica)
        edges = edges_of(replica, part, new) if new else {}
        gradients = passes.gradients_of(stage, part.channels, dx, more, _widths(stage, part))
        return handed_on(context, part, gradients, edges)


def _of_minibatch(context: TaskContext, part: StagePart, grads: Any, add: Callable[[Any, Any], Any]) -> Any:
    """Add gradients to those of the minibatch's earlier parts. Returns the sum with the last part, None before it."""
    name = "gradients of", *part.piece
    if context.sub:
        grads = add(context.shelf.take(name, context.step), grads)
    if context.last:
        return grads
    context.shelf.put(name, context.step, grads)
    return None


def shard_step(context: TaskContext, part: StagePart, sources: Sources, pace: StepPace) -> TaskResult:
    """Make the step that a shard of samples still owes when no forward pass follows."""
    _step_alike(context, part, sources, pace)
    return TaskResult(context.worker, {})


def _step_alike(context: TaskContext, part: StagePart, sources: Sources, pace: StepPace) -> None:
    """Make the step before this one by all workers' gradients: it is the same on each of them."""
    shelf, vectors = context.shelf, [source.part(context.worker) for source in sources]
    piece = shelf.get(part.piece, context.step - 1)
    with working(context) as replica:
        new = passes.descended_alike(piece, vectors, replica.descent, pace, replica.device)
    shelf.put(part.piece, context.step, new)
    arrived = (vector.nbytes for vector, source in zip(vectors, sources, strict=True) if source.arrived)
    context.session.counters.bytes_down += sum(arrived)


def _step(
    context: TaskContext, part: StagePart, piece: Piece, grads: Params, state: State, replica: Replica
) -> Piece | None:
    """Make the piece's step with the minibatch's last part. Returns the piece of the next step, None before."""
    if (grads := _of_minibatch(context, part, grads, passes.added)) is None:
        return None
    new = passes.descended(piece, grads, state, replica.descent, context.pace, part.device(replica))
    context.shelf.put(part.piece, context.step + 1, new)
    return new


def take_edges(context: TaskContext, source: TaskResult) -> TaskResult:
    """Return a shard's edges without the rest of the result."""
    return TaskResult(context.worker, {}, source.edges)


# --- merged layers ---


def merge_fwd(context: TaskContext, part: StagePart, sources: Sources, *behind: Any) -> TaskResult:
    """Join the shards' outputs, or take the batch, and apply the stage's merged layers."""
    shelf, batch = context.shelf, batch_of(context)
    ys = _put_together(context, part, sources, batch)
    with working(context) as replica:
        stage = stage_of(replica, part)
        x, residual, state = passes.merged_forward(stage, ys, _piece(context, part), batch.keys, replica.device)
    shelf.put(part.kept(context), context.step, (residual, state))
    sent(context, part.away, [x])
    return TaskResult(context.worker, {ALL: x}, wire=context.wire)


def head(context: TaskContext, part: StagePart, sources: Sources, *behind: Any) -> TaskResult:
    """Apply the last stage's merged layers, compute the loss, and go back. Returns the gradients for the shards."""
    dy = _judged(context, part, _put_together(context, part, sources, batch_of(context)))
    return handed_on(context, part, _of_shards(context, part, dy))


def merge_bwd(context: TaskContext, part: StagePart, sources: Sources, *behind: Any) -> TaskResult:
    """Add up the shards' parts of the gradient, and go back through the stage's merged layers."""
    dxs = passes.put_in_place(received(context, sources, gradients_of=part.stage), part.places)
    batch = batch_of(context)
    residual, state = context.shelf.take(part.kept(context), context.step)
    with working(context) as replica:
        stage, piece = stage_of(replica, part), _piece(context, part)
        args = stage, residual, dxs, piece, batch.keys, replica.device
        dy, grads = passes.merged_backward(*args, need_dx=_is_fed(stage))
        if piece is not None:
            _step(context, part, piece, grads, state, replica)
    return handed_on(context, part, _of_shards(context, part, dy))


def take_score(context: TaskContext, head: TaskResult) -> Score:
    """Return the minibatch's score."""
    score: Score = context.shelf.take(("score", context.step), context.step)
    return score


def _put_together(context: TaskContext, part: StagePart, sources: Sources, batch: Batch) -> Sequence[Array]:
    """Return the inputs of a stage's merged layers: outputs of its shards, or of other stages, or the batch."""
    stage = stage_of(context.session.replica, part)
    if stage.conv is not None:
        return received(context, sources)
    held = taken_in(context, part.taken, sources)
    return [held[source].array for source in stage.inputs] or [batch.x]


def _judged(context: TaskContext, part: StagePart, ys: Sequence[Array]) -> Array | None:
    """Apply the last stage's merged layers, compute the loss, and go back. Returns the gradient; keeps the score."""
    shelf, batch = context.shelf, batch_of(context)
    with working(context) as replica:
        stage, device, piece = stage_of(replica, part), part.device(replica), _piece(context, part)
        scores, residual, state = passes.merged_forward(stage, ys, piece, batch.keys, device)
        of_minibatch, weights = len(batch.labels) / context.samples, replica.sample_weights(batch)
        labels = labels_for(replica.training_loss, batch.x, batch.labels)
        targets = labels, device, of_minibatch, weights, replica.partners(batch)
        dscores, score = passes.loss_of(replica.training_loss, scores, *targets)
        args = stage, residual, [dscores], piece, batch.keys, device
        dy, grads = passes.merged_backward(*args, need_dx=_is_fed(stage))
        if piece is not None:
            _step(context, part, piece, grads, state, replica)
    name = "score", context.step  # the next step's may be there before this one is taken
    shelf.put(name, context.step, score + shelf.take(name, context.step) if context.sub else score)
    return dy


def _of_shards(context: TaskContext, part: StagePart, dy: Array | None) -> list[tuple[int, passes.Held]]:
    """Return the gradient of the merged layers' inputs by stages: the part's own, or those that the inputs are of."""
    stage = stage_of(context.session.replica, part)
    if stage.conv is None:
        return [*passes.gradients_of(stage, None, dy, (), _widths(stage, part))]
    assert dy is not None, "asked for"
    return [(part.stage, passes.Held(0, dy))]


def _is_fed(stage: Stage) -> bool:
    """Return True if the merged layers' inputs are outputs of shards, which ask for their gradient."""
    return stage.conv is not None or bool(stage.inputs)


def _widths(stage: Stage, part: StagePart) -> dict[int, int]:
    return dict(zip(stage.consumed, part.widths, strict=True))


def _piece(context: TaskContext, part: StagePart) -> Piece | None:
    """Return the weights of a stage's merged layers, if they have any."""
    piece: Piece | None = context.shelf.get(part.piece, context.step) if part.weighted else None
    return piece
