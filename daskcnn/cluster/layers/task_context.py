"""A task of a layer-sharded step: its instructions, and its worker's session, shelf and batch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from daskcnn.arrays import Array, Device, single_threaded_blas
from daskcnn.cluster.layers.messages import OutOfStep, Shelf
from daskcnn.cluster.worker.session import Session, session_of
from daskcnn.job.tables import Job
from daskcnn.nn import Sequential
from daskcnn.sharded import By, Share, Stage, Taken, stages_of
from daskcnn.store import Batch, BatchPlan, load_batch
from daskcnn.store.loader import presentation_order
from daskcnn.training.replica import Replica

HOST = Device()


@dataclass(frozen=True)
class TaskContext:
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
class StagePart:
    """Which stage, how many of its layers are spread, and which channels; None where all are put together.

    away: other workers that need what is made. weighted: whether layers where all are put together have weights. by:
    what is divided, channels or samples. by_all: whether each of its workers puts all together for itself. taken: the
    outputs of other stages that it works on; widths: channels of the outputs of each stage that any of its parts works
    on. places: where the channels of each gradient that it is given lie among those it asks for; None: they are all.
    """

    stage: int
    spread: int
    share: Share | None = None
    away: int = 0
    weighted: bool = False
    by: By = "kernels"
    by_all: bool = False
    taken: tuple[Taken, ...] = ()
    widths: tuple[int, ...] = ()
    places: tuple[slice | None, ...] = ()

    @property
    def merged(self) -> StagePart:
        """The part of a shard's stage that its worker does for itself where all is put together."""
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

    def kept(self, context: TaskContext) -> tuple[str, int, int]:
        """The shelf's name of the residual that is kept for the way back."""
        return f"kept of {self.piece[0]}", self.stage, context.sub


def _share(part: StagePart) -> Share:
    assert part.share is not None, "a shard has channels"
    return part.share


def gradient(stage: int, context: TaskContext) -> tuple[str, int, int]:
    """The name of the worker's own part of what goes back into a stage."""
    return "gradient", stage, context.sub


def session_at(context: TaskContext) -> Session:
    """This worker's session of the task's run."""
    return session_of(context.run)


def shelf_at(context: TaskContext) -> Shelf:
    """This worker's, as of the pieces that were placed last."""
    kept = session_at(context).kept
    shelf = kept.find(Shelf)
    if shelf is None or shelf.generation < context.generation:
        shelf = kept.put(Shelf(context.generation))
    if shelf.generation > context.generation:
        raise OutOfStep(f"step {context.step}: belongs to pieces that were placed anew since")
    return shelf


@contextmanager
def working(context: TaskContext, conv: str | None = None) -> Iterator[Replica]:
    """The worker's replica, with one BLAS thread, its seconds counted."""
    session = session_at(context)
    replica, counters = session.replica, session.counters
    begun = time.perf_counter()
    with single_threaded_blas():
        yield replica
        replica.device.backend.synchronize()
    seconds = replica.watch.slowed(time.perf_counter() - begun)
    counters.busy += seconds
    if conv is not None:
        counters.conv_seconds[conv] = counters.conv_seconds.get(conv, 0.0) + seconds
        one_way = context.samples / context.subs / 2
        counters.conv_samples[conv] = counters.conv_samples.get(conv, 0.0) + one_way


def stage_of(replica: Replica, part: StagePart) -> Stage:
    """The stage that the part belongs to, divided as the plan has it."""
    known = _cuts.get(replica)
    if known is None or known.model is not replica.model:
        known = _cuts[replica] = _StagesHere(replica.model, stages_of(replica.model), {})
    key = part.stage, part.spread, part.by
    if key not in known.spread:
        known.spread[key] = replace(known.stages[part.stage].spread_to(part.spread), by=part.by)
    return known.spread[key]


@dataclass(frozen=True)
class _StagesHere:
    """A network's stages, and those that tasks have asked for by number, how far they are spread, and `by`."""

    model: Sequential
    stages: tuple[Stage, ...]
    spread: dict[tuple[int, int, By], Stage]


_cuts: WeakKeyDictionary[Replica, _StagesHere] = WeakKeyDictionary()  # cutting takes as long as a small task


def stage_name(context: TaskContext, part: StagePart) -> str | None:
    """The name of the part's stage; None for one without a convolution."""
    return stage_of(session_at(context).replica, part).name


# --- the batch ---


@dataclass(frozen=True)
class Minibatch:
    """The samples at places begin…end of a plan's order."""

    plan: BatchPlan
    begin: int
    end: int


def batch_of(context: TaskContext, of: Minibatch) -> Batch:
    """A step's part of its minibatch, loaded by the first of the worker's tasks that needs it."""
    shelf, name = shelf_at(context), ("batch", context.sub)
    if not shelf.has(name, context.step):
        with working(context) as replica:
            indices = _order(session_at(context), of.plan)[of.begin : of.end]
            lo, hi = (len(indices) * part // context.subs for part in (context.sub, context.sub + 1))
            dtype = replica.job.model.dtype
            batch = load_batch(replica.dataset, replica.dataset.train, of.plan, dtype, indices[lo:hi])
        shelf.put(name, context.step, batch)
    found: Batch = shelf.get(name, context.step)
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
