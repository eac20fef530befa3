"""The tasks of a layer-sharded step, as they run on a worker.

A task takes what others returned: whole results on the worker that made them, and only the array that travels
elsewhere (`take_…` tasks cut it out where it lies). So residuals and kernels never leave their worker.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from daskcnn.arrays import Array, single_threaded_blas
from daskcnn.cluster.worker import Counters, Session, session_of
from daskcnn.config import Job
from daskcnn.nn import State
from daskcnn.replica import Replica, Score, training_samples
from daskcnn.sharded import (
    Piece,
    Stage,
    conv_backward,
    conv_forward,
    loss_of,
    merged_backward,
    merged_forward,
    shard_slices,
    stages_of,
)
from daskcnn.store import Batch, BatchPlan, load_batch
from daskcnn.store.loader import presentation_order


@dataclass(frozen=True)
class Where:
    """Which run's session on the worker, and whether stages are merged there."""

    run: str
    home: bool


@dataclass(frozen=True)
class Merged:
    """Of a merged stage: its output, and what its backward pass needs."""

    x: Array
    residual: Any
    state: State


@dataclass(frozen=True)
class ConvBack:
    """Of a shard's backward pass: its part of dx, and the shard after its step."""

    dx: Array | None
    piece: Piece


@dataclass(frozen=True)
class MergedBack:
    """Of a merged stage's backward pass: dy for every shard, the piece after its step, at the end a score."""

    dys: list[Array]
    piece: Piece | None
    score: Score | None = None


def take_counters(where: Where) -> Counters:
    """What this worker spent and moved since it was last asked."""
    session = _session(where)
    taken, session.counters = session.counters, Counters()
    return taken


def _session(where: Where) -> Session:
    return session_of(where.run)


@contextmanager
def _working(where: Where, conv: str | None = None) -> Iterator[Replica]:
    """The worker's replica, with one BLAS thread, its seconds counted."""
    session = _session(where)
    replica, counters = session.replica, session.counters
    begun = time.perf_counter()
    with single_threaded_blas():
        yield replica
        replica.device.backend.synchronize()
    seconds = replica.slowed(time.perf_counter() - begun)
    counters.busy += seconds
    if conv is not None:
        counters.conv_seconds[conv] = counters.conv_seconds.get(conv, 0.0) + seconds


def _stage(replica: Replica, index: int) -> Stage:
    return stages_of(replica.model)[index]


def _x_of(source: Batch | Merged | Array) -> Array:
    return source.x if isinstance(source, Batch | Merged) else source


def _piece_of(source: Any) -> Any:
    return source.piece if isinstance(source, ConvBack | MergedBack) else source


def install(where: Where, piece: Piece | None) -> Piece | None:
    """A piece from the driver, in the memory of this worker's device."""
    with _working(where) as replica:
        return piece and piece.on(replica.device)


def collect(where: Where, source: Any) -> Piece | None:
    """The piece that a step left, on the host."""
    with _working(where) as replica:
        piece: Piece | None = _piece_of(source)
        return piece and piece.on_host(replica.device)


def load(where: Where, presentation: int, step: int) -> Batch:
    """The batch of this step of a pass over all training samples."""
    with _working(where) as replica:
        job = replica.job
        plan = batch_plan(job, training_samples(job, replica.dataset), presentation)
        indices = _order(_session(where), plan)[step * plan.batch_size : (step + 1) * plan.batch_size]
        return load_batch(replica.dataset, replica.dataset.train, plan, job.model.dtype, indices)


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


def conv_fwd(where: Where, stage: int, source: Batch | Merged | Array, shard: Any) -> Array:
    """A shard's kernels over the input of its stage."""
    with _working(where, _name(where, stage)) as replica:
        x = _x_of(source)
        y = conv_forward(_stage(replica, stage), x, _piece_of(shard), replica.device)
    _moved(where, up=y, down=x)
    return y


def conv_bwd(
    where: Where, stage: int, index: int, source: Batch | Merged | Array, dy: Any, shard: Any, lr: float, need_dx: bool
) -> ConvBack:
    """A shard's part of the gradients, and its step."""
    with _working(where, _name(where, stage)) as replica:
        own = dy.dys[index] if isinstance(dy, MergedBack) else dy
        step = replica.optimizer, lr, replica.device
        dx, piece = conv_backward(_stage(replica, stage), _x_of(source), own, _piece_of(shard), *step, need_dx=need_dx)
    _moved(where, up=dx, down=own)
    return ConvBack(dx, piece)


def merge_fwd(where: Where, stage: int, ys: Sequence[Array], piece: Any, batch: Batch) -> Merged:
    """The shards' outputs put together, through the stage's other layers."""
    with _working(where) as replica:
        found = merged_forward(_stage(replica, stage), ys, _piece_of(piece), batch.keys, replica.device)
        return Merged(*found)


def head(
    where: Where, stage: int, ys: Sequence[Array], piece: Any, batch: Batch, kernels: Sequence[int], lr: float
) -> MergedBack:
    """The last stage, the loss, and back through the stage."""
    with _working(where) as replica:
        last, own = _stage(replica, stage), _piece_of(piece)
        scores, residual, state = merged_forward(last, ys, own, batch.keys, replica.device)
        dscores, score = loss_of(replica.loss, scores, batch.labels, replica.device)
        step = replica.optimizer, lr, replica.device
        dy, new = merged_backward(last, residual, [dscores], own, state, batch.keys, *step, need_dx=bool(kernels))
        return MergedBack(_cut(dy, kernels), new, score)


def merge_bwd(
    where: Where,
    stage: int,
    merged: Merged,
    parts: Sequence[Any],
    piece: Any,
    batch: Batch,
    kernels: Sequence[int],
    lr: float,
) -> MergedBack:
    """The shards' parts of the gradient added up, and back through the stage's other layers."""
    with _working(where) as replica:
        dxs: list[Any] = [part.dx if isinstance(part, ConvBack) else part for part in parts]
        step = replica.optimizer, lr, replica.device
        dy, new = merged_backward(
            _stage(replica, stage),
            merged.residual,
            dxs,
            _piece_of(piece),
            merged.state,
            batch.keys,
            *step,
            need_dx=bool(kernels),
        )
        return MergedBack(_cut(dy, kernels), new)


def take_input(source: Batch | Merged | Array) -> Array:
    return _x_of(source)


def take_x(merged: Merged) -> Array:
    return merged.x


def take_dx(back: ConvBack) -> Array | None:
    return back.dx


def take_dy(back: MergedBack, index: int) -> Array:
    return back.dys[index]


def take_score(back: MergedBack) -> Score | None:
    return back.score


def _cut(dy: Array | None, kernels: Sequence[int]) -> list[Array]:
    """dy in one contiguous part a shard."""
    return [] if dy is None else [np.ascontiguousarray(dy[..., cut]) for cut in shard_slices(kernels)]


def _name(where: Where, stage: int) -> str | None:
    return _stage(_session(where).replica, stage).name


def _moved(where: Where, *, up: Array | None, down: Array) -> None:
    """Count what crossed the network: nothing did on the worker where stages are merged."""
    if not where.home:
        counters = _session(where).counters
        counters.bytes_up += 0 if up is None else up.nbytes
        counters.bytes_down += down.nbytes
