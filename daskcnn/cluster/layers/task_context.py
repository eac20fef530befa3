"""A task of a layer-sharded step: its instructions, its result, and its worker's session, shelf and batch.

Dask may copy a result to any worker and forget the first copy, so a result holds only what travels. The rest, a shard
and what is kept for the way back, lies on the worker's shelf, marked with the step it belongs to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from daskcnn.arrays import Array, Device, single_threaded_blas
from daskcnn.cluster.link.calls import OUT_OF_MEMORY, WorkerFailed
from daskcnn.cluster.worker.session import Session, session_of
from daskcnn.errors import ClusterError
from daskcnn.job.tables import Job
from daskcnn.nn import Sequential, StepPace
from daskcnn.nn.vector import leaves
from daskcnn.ps.vectors import cast
from daskcnn.sharded.cutting import stages_of
from daskcnn.sharded.pieces import Edge
from daskcnn.sharded.plan_parts import ALL, Cuts, Taken
from daskcnn.sharded.stages import By, Share, Side, Stage
from daskcnn.store import Batch, BatchPlan, load_batch
from daskcnn.store.loader import presentation_order
from daskcnn.training.replica import Replica

Packed: TypeAlias = tuple[Array, str, float]
"""An array as it travels: in the wire's dtype, the name of its own dtype, the factor that restores it."""
_LARGEST = 2.0**15
"""The largest number of an array is scaled to about this before it is cut to float16, whose range ends above it."""
_MOST = 120
"""Largest exponent of the factor: float32 holds it and its inverse, but no factor for its own smallest numbers."""
HOST = Device()


class OutOfStep(ClusterError):
    """A worker lacks what a task needs, because Dask ran a task again: the run goes back to its last snapshot."""


class Shelf:
    """Keeps values on a worker, by name, with the step that they belong to.

    Parameters
    ----------
    generation : How often the run has placed its pieces. Values of an older generation are never found.
    """

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._things: dict[Any, tuple[int, Any]] = {}

    def put(self, name: Any, step: int, thing: Any) -> None:
        """Keep the value in place of an earlier one of this name."""
        self._things[name] = step, thing

    def has(self, name: Any, step: int) -> bool:
        """Return True if the shelf has a value of this name for this step."""
        return self._things.get(name, (None, None))[0] == step

    def get(self, name: Any, step: int) -> Any:
        """Return the value that was kept for this step. Raises OutOfStep."""
        found, thing = self._things.get(name, (None, None))
        if found != step:
            raise OutOfStep(f"step {step}: {name} is of step {found}; a task was run twice")
        return thing

    def take(self, name: Any, step: int) -> Any:
        """Remove the value that was kept for this step, and return it. Raises OutOfStep."""
        thing = self.get(name, step)
        del self._things[name]
        return thing


@dataclass(frozen=True)
class Claim:
    """A right to parts on the shelf of a worker (its address). Each lies under `name` and the receiver's name."""

    worker: str
    run: str
    generation: int
    step: int
    name: tuple[Any, ...]


@dataclass(slots=True, eq=False)
class TaskResult:
    """The part of a task's result that travels.

    Attributes
    ----------
    parts : Arrays by worker's name or `ALL`; gradients by stage and worker.
    edges : Channels at both ends of a shard, for its neighbours.
    wire : The dtype that parts travel in.
    arrived : True once it came over the wire.
    claim : To parts that are not in it.
    """

    maker: str
    parts: Mapping[Any, Array]
    edges: Mapping[Side, Edge] = field(default_factory=dict)
    wire: str = "float32"
    arrived: bool = False
    claim: Claim | None = None

    def part(self, worker: str, stage: int | None = None) -> Array:
        """Return the part for this worker, of gradients the part of this stage's outputs."""
        found = next((name for name in ((stage, worker), (stage, ALL), worker) if name in self.parts), ALL)
        return self.parts[found]

    def as_sent(self, worker: str) -> Array:
        """Return the part for this worker as other workers receive it: rounded to the wire's dtype."""
        part = self.part(worker)
        return part if self.arrived else unpacked(*packed(part, self.wire))

    def __sizeof__(self) -> int:
        return sum(array.nbytes for array in self.parts.values())

    def __reduce__(self) -> tuple[Any, ...]:
        parts = {worker: packed(array, self.wire) for worker, array in self.parts.items()}
        return _arrived, (self.maker, parts, self.edges, self.wire, self.claim)


def _arrived(
    maker: str, parts: dict[Any, Packed], edges: dict[Side, Edge], wire: str, claim: Claim | None
) -> TaskResult:
    whole = {worker: unpacked(*part) for worker, part in parts.items()}
    return TaskResult(maker, whole, edges, wire, arrived=True, claim=claim)


def wire_bytes(array: Array, wire: str) -> int:
    """Return the bytes that an array takes on the wire."""
    return int(array.nbytes if wire == "float32" else array.size * np.dtype(wire).itemsize)


def packed(array: Array, wire: str) -> Packed:
    """Return the array in the wire's dtype, the name of its own dtype, and the factor that restores it.

    The wire float32 leaves every array as it is, float64 too.
    """
    if wire == "float32":
        return array, array.dtype.name, 1.0
    factor, largest = 1.0, max(float(array.max()), -float(array.min())) if array.size else 0.0
    if math.isfinite(largest) and largest > 0:  # gradients lie far below float16's smallest number
        factor = 2.0 ** min(_MOST, math.floor(math.log2(_LARGEST) - math.log2(largest)))
    return cast(array * array.dtype.type(factor), wire), array.dtype.name, 1 / factor


def unpacked(array: Array, dtype: str, factor: float) -> Array:
    """Return the array that `packed` was given, rounded to the wire's dtype."""
    if array.dtype.name == dtype:
        return array
    whole: Array = cast(array, dtype)
    return whole if factor == 1 else np.multiply(whole, whole.dtype.type(factor), out=whole)


def arrays_of(edge: Edge) -> Iterator[Array]:
    """Return the arrays of a shard's edge."""
    return (array for tree in edge for _, array in leaves(tree))


# --- instructions ---


@dataclass(frozen=True)
class Minibatch:
    """The samples at places begin…end of a plan's order."""

    plan: BatchPlan
    begin: int
    end: int


@dataclass(frozen=True)
class TaskContext:
    """The instructions that tasks of one step share.

    Attributes
    ----------
    generation : How often the run has placed its pieces.
    wire : The dtype that activations and gradients travel in.
    minibatch, pace : Of the step; None and 0 for tasks between steps.
    sub : Number of the minibatch's part, one of `subs`.
    """

    run: str
    worker: str
    generation: int
    step: int
    wire: str
    minibatch: Minibatch | None = None
    pace: StepPace = field(default=StepPace(0.0))
    sub: int = 0
    subs: int = 1

    @property
    def last(self) -> bool:
        """True if this part of the minibatch is its last: then the gradients are complete."""
        return self.sub == self.subs - 1

    @property
    def samples(self) -> int:
        """Samples of the whole minibatch."""
        return self.of_step.end - self.of_step.begin

    @property
    def of_step(self) -> Minibatch:
        """The step's minibatch."""
        assert self.minibatch is not None, "a task of a step"
        return self.minibatch

    @property
    def session(self) -> Session:
        """This worker's session of the run."""
        return session_of(self.run)

    @property
    def shelf(self) -> Shelf:
        """This worker's shelf for the pieces that were placed last. Raises OutOfStep for a task of older pieces."""
        kept = self.session.kept
        shelf = kept.find(Shelf)
        if shelf is None or shelf.generation < self.generation:
            shelf = kept.put(Shelf(self.generation))
        if shelf.generation > self.generation:
            raise OutOfStep(f"step {self.step}: belongs to pieces that were placed anew since")
        return shelf


@dataclass(frozen=True)
class StagePart:
    """The part of a stage that a task computes, where its inputs are and where its results go.

    Attributes
    ----------
    spread : How many of the stage's layers are divided.
    share : The channels of a shard; None for the merged layers.
    weighted : True if the merged layers have weights.
    by_all : True if each worker computes the merged layers for itself.
    widths : Channels of the outputs of each stage that any part of this one works on.
    places : Where the channels of each gradient lie among those that the task asks for; None: they are all of them.
    away, taken, cuts : As in `PlannedTask`.
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
    cuts: Mapping[int, Cuts] = field(default_factory=dict)

    def device(self, replica: Replica) -> Device:
        """Return where the weights are. Layers that every worker computes for itself are on the host, alike for all."""
        return HOST if self.by_all and self.share is None else replica.device

    def samples(self, batch: Batch) -> slice:
        """Return the samples of the batch that a shard works on."""
        return self.share.samples(len(batch.labels)) if self.share and self.by == "samples" else slice(None)

    @property
    def channels(self) -> Share:
        """The channels that a shard works on."""
        assert self.share is not None, "a shard has channels"
        return self.share.whole if self.by == "samples" else self.share

    @property
    def piece(self) -> tuple[str, int]:
        """The shelf's name of the weights."""
        return "merged" if self.share is None else "shard", self.stage

    def kept(self, context: TaskContext) -> tuple[str, int, int]:
        """Return the shelf's name of the residual that is kept for the way back."""
        return f"kept of {self.piece[0]}", self.stage, context.sub


@contextmanager
def working(context: TaskContext, conv: StagePart | None = None) -> Iterator[Replica]:
    """Give the worker's replica, with one BLAS thread; count the seconds, for a convolution's part under its name."""
    session = context.session
    replica, counters = session.replica, session.counters
    begun = replica.watch.begin()
    try:
        with single_threaded_blas():
            yield replica
            replica.device.backend.synchronize()
    except MemoryError as error:  # of a GPU too
        raise WorkerFailed(context.worker, OUT_OF_MEMORY) from error
    seconds = replica.watch.since(begun)
    counters.busy += seconds
    if conv is not None and (name := stage_of(replica, conv).name) is not None:
        counters.conv_seconds[name] = counters.conv_seconds.get(name, 0.0) + seconds
        one_way = context.samples / context.subs / 2
        counters.conv_samples[name] = counters.conv_samples.get(name, 0.0) + one_way


def stage_of(replica: Replica, part: StagePart) -> Stage:
    """Return the stage that the part belongs to, divided as the plan has it."""
    known = _cuts.get(replica)
    if known is None or known[0] is not replica.model:
        known = _cuts[replica] = replica.model, stages_of(replica.model), {}
    _, stages, spread = known
    key = part.stage, part.spread, part.by
    if key not in spread:
        spread[key] = replace(stages[part.stage].spread_to(part.spread), by=part.by)
    return spread[key]


_cuts: WeakKeyDictionary[Replica, tuple[Sequential, tuple[Stage, ...], dict[Any, Stage]]] = WeakKeyDictionary()
"""A replica's network, its stages, and those that tasks have asked for: cutting takes as long as a small task."""


def batch_of(context: TaskContext) -> Batch:
    """Return the task's part of the minibatch. The first of the worker's tasks that needs it loads it."""
    shelf, name, of = context.shelf, ("batch", context.sub), context.of_step
    if not shelf.has(name, context.step):
        with working(context) as replica:
            session, dataset = context.session, replica.dataset
            if session.order is None or session.order[0] != of.plan:  # kept until the next pass
                session.order = of.plan, presentation_order(dataset, dataset.train, of.plan)
            indices = session.order[1][of.begin : of.end]
            lo, hi = (len(indices) * part // context.subs for part in (context.sub, context.sub + 1))
            batch = load_batch(dataset, dataset.train, of.plan, replica.job.model.dtype, indices[lo:hi])
        shelf.put(name, context.step, batch)
    found: Batch = shelf.get(name, context.step)
    return found


def batch_plan(job: Job, samples: int, presentation: int) -> BatchPlan:
    """Return the plan of all training samples, in the order that one replica alone would see them."""
    train = job.train
    return BatchPlan(((0, samples),), train.batch_size, train.seed, presentation, augment=job.data.augment or "none")
