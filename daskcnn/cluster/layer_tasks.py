"""The tasks of a layer-sharded step, as they run on a worker.

A task returns what travels, a `Parcel` of outputs or gradients; kernels, what is kept for the way back and the worker's
own part of what it made stay on its shelf. Every worker loads its own minibatch, the same for all, when it needs it: a
task of its own would cost more than it takes to load.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from daskcnn.arrays import Array, Device, single_threaded_blas
from daskcnn.cluster.parcel import ALL, OutOfStep, Parcel, Shelf, arrays_of, wire_bytes
from daskcnn.cluster.worker import Counters, Session, session_of
from daskcnn.config import Job
from daskcnn.nn import Params, State
from daskcnn.replica import Replica, Score
from daskcnn.sharded import (
    By,
    Edge,
    Edges,
    Piece,
    Share,
    Side,
    Stage,
    added,
    descended,
    descended_alike,
    gradient_vector,
    loss_of,
    merged_backward,
    merged_forward,
    of_channels,
    shard_backward,
    shard_forward,
    stages_of,
)
from daskcnn.store import Batch, BatchPlan, load_batch
from daskcnn.store.loader import presentation_order

HOST = Device()
Cuts = Mapping[str, tuple[Any, ...]]
"""Which part of the numbers (…, N, C) goes to which worker; under `ALL`, to each that needs any."""
Sources = Sequence[Parcel]
"""Where a task finds its inputs; empty: in the batch."""


@dataclass(frozen=True)
class Where:
    """Which run's session, which worker of it and which step; the dtype that activations and gradients travel in.

    generation: how often the run has placed its pieces. sub: which of the minibatch's `subs` parts; samples: of all.
    """

    run: str
    worker: str
    generation: int
    step: int
    wire: str
    sub: int = 0
    subs: int = 1
    samples: int = 0

    @property
    def last(self) -> bool:
        """Whether the gradients are those of the whole minibatch then."""
        return self.sub == self.subs - 1


@dataclass(frozen=True)
class Part:
    """Which stage, how many of its layers are spread, and which channels; None where all are put together.

    away: other workers that need what is made. weighted: whether layers where all are put together have weights. by:
    what is divided, channels or samples; inputs: what its inputs come divided by. by_all: whether each of its workers
    puts all together for itself.
    """

    stage: int
    spread: int
    share: Share | None = None
    away: int = 0
    weighted: bool = False
    by: By = "kernels"
    inputs: By = "kernels"
    by_all: bool = False

    @property
    def merged(self) -> Part:
        """What of a shard's stage its worker does for itself where all is put together."""
        return replace(self, share=None)

    def device(self, replica: Replica) -> Device:
        """Where its weights are. What everybody does for itself is done in the same way everywhere: on the host."""
        return HOST if self.by_all and self.share is None else replica.device

    def samples(self, batch: Batch) -> slice:
        """Which of the batch a shard works on."""
        return _share(self).samples(len(batch.labels)) if self.by == "samples" else slice(None)

    @property
    def channels(self) -> Share:
        """Which channels a shard works on."""
        return _share(self).whole if self.by == "samples" else _share(self)

    @property
    def piece(self) -> tuple[str, int]:
        """The name of its weights on the shelf."""
        return "merged" if self.share is None else "shard", self.stage

    def kept(self, where: Where) -> tuple[str, int, int]:
        """Of what is kept for the way back."""
        return f"kept of {self.piece[0]}", self.stage, where.sub


def gradient(stage: int, where: Where) -> tuple[str, int, int]:
    """The name of the worker's own part of what goes back into a stage."""
    return "gradient", stage, where.sub


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


def session_at(where: Where) -> Session:
    return session_of(where.run)


def shelf_at(where: Where) -> Shelf:
    """This worker's, as of the pieces that were placed last."""
    session = session_at(where)
    if session.shelf is None or session.shelf.generation < where.generation:
        session.shelf = Shelf(where.generation)
    if session.shelf.generation > where.generation:
        raise OutOfStep(f"step {where.step}: belongs to pieces that were placed anew since")
    shelf: Shelf = session.shelf
    return shelf


@contextmanager
def working(where: Where, conv: str | None = None) -> Iterator[Replica]:
    """The worker's replica, with one BLAS thread, its seconds counted."""
    session = session_at(where)
    replica, counters = session.replica, session.counters
    begun = time.perf_counter()
    with single_threaded_blas():
        yield replica
        replica.device.backend.synchronize()
    seconds = replica.slowed(time.perf_counter() - begun)
    counters.busy += seconds
    if conv is not None:
        counters.conv_seconds[conv] = counters.conv_seconds.get(conv, 0.0) + seconds
        one_way = where.samples / where.subs / 2
        counters.conv_samples[conv] = counters.conv_samples.get(conv, 0.0) + one_way


def _stage(replica: Replica, part: Part) -> Stage:
    return replace(stages_of(replica.model)[part.stage].spread_to(part.spread), by=part.by)


def _name(where: Where, part: Part) -> str | None:
    return stages_of(session_at(where).replica.model)[part.stage].name


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
    stage = _stage(replica, part)
    reach = 2 * stage.reach
    if part.share is None or not reach:
        return {}
    wanted: dict[Side, bool] = {"left": part.share.start > 0, "right": part.share.stop < part.share.total}
    sides = [side for side, has_neighbour in wanted.items() if has_neighbour]
    return {side: piece.edge(stage, side, reach, replica.device) for side in sides}


# --- the batch ---


@dataclass(frozen=True)
class Minibatch:
    """The samples at places begin…end of a plan's order."""

    plan: BatchPlan
    begin: int
    end: int


def batch_of(where: Where, of: Minibatch) -> Batch:
    """A step's part of its minibatch, loaded by the first of the worker's tasks that needs it."""
    shelf, name = shelf_at(where), ("batch", where.sub)
    if not shelf.has(name, where.step):
        with working(where) as replica:
            indices = _order(session_at(where), of.plan)[of.begin : of.end]
            lo, hi = (len(indices) * part // where.subs for part in (where.sub, where.sub + 1))
            dtype = replica.job.model.dtype
            batch = load_batch(replica.dataset, replica.dataset.train, of.plan, dtype, indices[lo:hi])
        shelf.put(name, where.step, batch)
    found: Batch = shelf.get(name, where.step)
    return found


def batch_plan(job: Job, samples: int, presentation: int) -> BatchPlan:
    """All training samples, in the order that one replica alone would see them."""
    train = job.train
    return BatchPlan(((0, samples),), train.batch_size, train.seed, presentation, augment=job.data.augment or "none")


def _order(session: Session, plan: BatchPlan) -> Array:
    """The order of this pass, kept until the next one."""
    if session.order is None or session.order[0] != plan:
        dataset = session.replica.dataset
        session.order = plan, presentation_order(dataset, dataset.train, plan)
    return session.order[1]


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
    xs = _received(where, sources) if sources else [batch.x[..., own, :]]
    if gradients and not shelf.has(part.piece, where.step):
        _step_alike(where, part, gradients, lr)
    piece = shelf.get(part.piece, where.step)
    with working(where, _name(where, part)) as replica:
        stage = _stage(replica, part)
        edges = _edges_beside(where, stage, beside, ends)
        args = stage, xs, piece, part.channels, edges, batch.keys[own], replica.device
        y, kept = shard_forward(*args, need_dx=part.stage > 0, inputs=part.inputs)
    shelf.put(part.kept(where), where.step, kept)
    _sent(where, part.away, [y])
    return Parcel(where.worker, {ALL: y}, wire=where.wire)


def shard_bwd(
    where: Where, part: Part, sources: Sources, of: Minibatch, lr: float, cuts: Cuts | None, *behind: Any
) -> Parcel:
    """A shard's part of the gradients, cut for those who need it (None: nobody does), and its step.

    A shard of samples hands on the gradients of its weights after the minibatch's last part, for everybody's step.
    """
    return _shard_back(where, part, _received(where, sources, gradient(part.stage, where)), of, lr, cuts)


def head_and_bwd(
    where: Where, part: Part, sources: Sources, of: Minibatch, lr: float, cuts: Cuts | None, *behind: Any
) -> Parcel:
    """The loss of what all shards' sums come to, which every worker has for itself, and back from there."""
    weighted = shelf_at(where).has(part.merged.piece, where.step)
    ys = _received(where, sources, alike=True)
    dy = _judged(where, replace(part.merged, weighted=weighted), ys, of, lr)
    assert dy is not None, "asked for"
    return _shard_back(where, part, [dy], of, lr, cuts)


def _shard_back(where: Where, part: Part, dys: Sequence[Array], of: Minibatch, lr: float, cuts: Cuts | None) -> Parcel:
    shelf = shelf_at(where)
    kept, piece = shelf.take(part.kept(where), where.step), shelf.get(part.piece, where.step)
    batch = batch_of(where, of)
    with working(where, _name(where, part)) as replica:
        stage, device = _stage(replica, part), replica.device
        keys = batch.keys[part.samples(batch)]
        dx, grads = shard_backward(stage, kept, dys, piece, part.channels, keys, device, need_dx=cuts is not None)
        if part.by == "samples":
            return _to_add(where, part, piece, grads, device)
        new = _step(where, part, piece, grads, kept.state, replica, lr)
        edges = edges_of(replica, part, new) if new else {}
    return _handed_on(where, part.stage - 1, dx, cuts or {}, edges=edges)


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


def _share(part: Part) -> Share:
    assert part.share is not None, "a shard has channels"
    return part.share


def take(where: Where, source: Parcel, worker: str) -> Parcel:
    """One worker's part, where several would else be sent to each of them."""
    return source.only(worker)


def take_edges(where: Where, source: Parcel) -> Parcel:
    """A shard's edges, without what else is in the parcel."""
    return Parcel(where.worker, {}, source.edges)


# --- where all is put together ---


def merge_fwd(where: Where, part: Part, sources: Sources, of: Minibatch, *behind: Any) -> Parcel:
    """The shards' outputs put together, through the stage's other layers; the batch where it has no shards."""
    shelf, batch = shelf_at(where), batch_of(where, of)
    ys = _received(where, sources) if sources else [batch.x]
    with working(where) as replica:
        stage = _stage(replica, part)
        x, residual, state = merged_forward(stage, ys, _piece(where, part), batch.keys, replica.device)
    shelf.put(part.kept(where), where.step, Merged(residual, state))
    _sent(where, part.away, [x])
    return Parcel(where.worker, {ALL: x}, wire=where.wire)


def head(where: Where, part: Part, sources: Sources, of: Minibatch, lr: float, cuts: Cuts, *behind: Any) -> Parcel:
    """The last stage, the loss, and back to what the shards get."""
    ys = _received(where, sources) if sources else [batch_of(where, of).x]
    dy = _judged(where, part, ys, of, lr, need_dy=bool(cuts))
    return _handed_on(where, part.stage, dy, cuts, away=part.away)


def _judged(
    where: Where, part: Part, ys: Sequence[Array], of: Minibatch, lr: float, *, need_dy: bool = True
) -> Array | None:
    """Through what is left of the last stage, to the loss and back; the gradient of its outputs. Keeps the score."""
    shelf, batch = shelf_at(where), batch_of(where, of)
    with working(where) as replica:
        stage, device = _stage(replica, part), part.device(replica)
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
    dxs, batch = _received(where, sources, gradient(part.stage, where)), batch_of(where, of)
    merged = shelf_at(where).take(part.kept(where), where.step)
    with working(where) as replica:
        stage, piece = _stage(replica, part), _piece(where, part)
        args = stage, merged.residual, dxs, piece, batch.keys, replica.device
        dy, grads = merged_backward(*args, need_dx=bool(cuts))
        if piece is not None:
            _step(where, part, piece, grads, merged.state, replica, lr)
    return _handed_on(where, part.stage, dy, cuts)


def take_score(where: Where, head: Parcel) -> Score:
    """The batch's score."""
    score: Score = shelf_at(where).take("score", where.step)
    return score


def _piece(where: Where, part: Part) -> Piece | None:
    """The weights of a merged stage's layers, if they have any."""
    piece: Piece | None = shelf_at(where).get(part.piece, where.step) if part.weighted else None
    return piece


# --- what travels ---


def _received(where: Where, sources: Sources, own: Any = None, *, alike: bool = False) -> list[Array]:
    """This worker's parts, and first the one of its own making where there is one on the shelf of this name.

    alike: those of its own making as they arrive elsewhere.
    """
    shelf, arrays = shelf_at(where), []
    for source in sources:
        if own is not None and source.maker == where.worker:
            arrays.append(shelf.take(own, where.step))
        else:
            arrays.append(source.as_sent(where.worker) if alike else source.part(where.worker))
            counted = wire_bytes(arrays[-1], where.wire) if source.arrived else 0
            session_at(where).counters.bytes_down += counted
    return arrays


def _handed_on(
    where: Where,
    stage: int,
    dy: Array | None,
    cuts: Cuts,
    *,
    away: int = 1,
    edges: Mapping[Side, Edge] | None = None,
) -> Parcel:
    """The gradient of a stage's outputs, in one contiguous part for each; the worker's own goes to its shelf.

    away: to how many other workers each part goes.
    """
    parts = {}
    for worker, cut in cuts.items():
        assert dy is not None, "asked for"
        if worker in (where.worker, ALL):
            shelf_at(where).put(gradient(stage, where), where.step, dy[cut])
        if worker != where.worker:
            parts[worker] = np.ascontiguousarray(dy[cut])
    _sent(where, away, [*parts.values(), *(a for edge in (edges or {}).values() for a in arrays_of(edge))])
    return Parcel(where.worker, parts, edges, where.wire)


def _edges_beside(where: Where, stage: Stage, beside: Sequence[Parcel], ends: Ends) -> Edges:
    """Of a shard's neighbours: those before it give channels at their right end."""
    found = [
        (side, _edge(where, stage, source, side, count)) for source, (side, count) in zip(beside, ends, strict=True)
    ]
    before, after = ([edge for at, edge in found if at == side] for side in ("right", "left"))
    return Edges(before, after)


def _edge(where: Where, stage: Stage, source: Parcel, side: Side, count: int) -> Edge:
    """So many channels at a neighbour's end."""
    edge = source.edges[side]
    session_at(where).counters.bytes_down += sum(array.nbytes for array in arrays_of(edge))
    cut = slice(None, count) if side == "left" else slice(-count, None)
    params, state = (of_channels(stage, tree, cut) for tree in edge)
    return params, state


def _sent(where: Where, times: int, arrays: Sequence[Array]) -> None:
    """Count what others get."""
    session_at(where).counters.bytes_up += times * sum(wire_bytes(array, where.wire) for array in arrays)
