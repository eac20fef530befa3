"""Messages of a sharded step's tasks to other workers, and the shelf for what they leave on their own.

Dask may copy a result to any worker and forget the first copy, so a result is only what travels. The rest, a
shard and what is kept for the way back, lies on the worker's shelf, marked with the step it belongs to.

A task of a layer-sharded step: its instructions, and its worker's session, shelf and batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from daskcnn.arrays import Array, Device, single_threaded_blas
from daskcnn.cluster.worker.session import Session, session_of
from daskcnn.errors import ClusterError
from daskcnn.job.tables import Job
from daskcnn.nn import Sequential
from daskcnn.ps.vectors import cast
from daskcnn.sharded.cutting import stages_of
from daskcnn.sharded.pieces import Edge
from daskcnn.sharded.plan_parts import ALL, Taken
from daskcnn.sharded.stages import By, Share, Side, Stage
from daskcnn.store import Batch, BatchPlan, load_batch
from daskcnn.store.loader import presentation_order
from daskcnn.training.replica import Replica

Packed: TypeAlias = tuple[Array, str, float]
"""An array as it travels: in the wire's dtype, what it was, the factor that brings it back."""
_LARGEST = 2.0**15
"""What the largest number of an array is brought near to before it is cut to float16: a power of two below its end."""
_MOST = 120
"""Exponent of the factor at most: float32 has it and its inverse, but no factor for numbers near its own least one."""


class OutOfStep(ClusterError):
    """A worker does not have what a task needs, for Dask ran a task again: the run goes back to its last snapshot."""


class Shelf:
    """Keeps values on a worker, by name, with the step that they belong to.

    generation: how often the run has placed its pieces; what tasks of an older one leave behind is not taken.
    """

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._things: dict[Any, tuple[int, Any]] = {}

    def put(self, name: Any, step: int, thing: Any) -> None:
        """In the place of what was there."""
        self._things[name] = step, thing

    def has(self, name: Any, step: int) -> bool:
        """Whether it was put there for this step."""
        return self._things.get(name, (None, None))[0] == step

    def get(self, name: Any, step: int) -> Any:
        """The value that was put there for this step. Raises OutOfStep."""
        found, thing = self._things.get(name, (None, None))
        if found != step:
            raise OutOfStep(f"step {step}: {name} is of step {found}; a task was run twice")
        return thing

    def take(self, name: Any, step: int) -> Any:
        """The same, which leaves the shelf."""
        thing = self.get(name, step)
        del self._things[name]
        return thing


@dataclass(frozen=True)
class Claim:
    """To parts on a worker's shelf, each under this name and that of the worker whom it is for."""

    address: str
    run: str
    generation: int
    step: int
    name: tuple[Any, ...]


class TaskResult:
    """maker: the worker it is from. parts: of the workers of these names, or of `ALL`; of gradients, by stage and
    worker. edges: channels at both ends of a shard, for its neighbours. wire: the dtype that parts travel in. arrived:
    whether it came over the wire. claim: to parts that are not in it.
    """

    __slots__ = ("arrived", "claim", "edges", "maker", "parts", "wire")

    def __init__(
        self,
        maker: str,
        parts: Mapping[Any, Array],
        edges: Mapping[Side, Edge] | None = None,
        wire: str = "float32",
        arrived: bool = False,
        claim: Claim | None = None,
    ) -> None:
        self.maker, self.parts, self.edges = maker, dict(parts), dict(edges or {})
        self.wire, self.arrived, self.claim = wire, arrived, claim

    def part(self, worker: str, stage: int | None = None) -> Array:
        """The part for this worker, of gradients that of this stage's outputs."""
        found = next((name for name in ((stage, worker), (stage, ALL), worker) if name in self.parts), ALL)
        return self.parts[found]

    def as_sent(self, worker: str) -> Array:
        """The same, as it arrives where it has come over the wire: there it may have lost digits."""
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
    """Bytes that an array takes on its way."""
    return int(array.nbytes if wire == "float32" else array.size * np.dtype(wire).itemsize)


def packed(array: Array, wire: str) -> Packed:
    """In the wire's dtype, what it was, and the factor that brings it back. float64 stays what it is on float32."""
    if wire == "float32":
        return array, array.dtype.name, 1.0
    factor = _factor(array)
    return cast(array * array.dtype.type(factor), wire), array.dtype.name, 1 / factor


def unpacked(array: Array, dtype: str, factor: float) -> Array:
    """The array in its own dtype, as `packed` was given it, rounded by the wire's dtype."""
    if array.dtype.name == dtype:
        return array
    whole: Array = cast(array, dtype)
    return whole if factor == 1 else np.multiply(whole, whole.dtype.type(factor), out=whole)


def _factor(array: Array) -> float:
    """The power of two that makes the most of float16's range: gradients are far smaller than its least number."""
    largest = max(float(array.max()), -float(array.min())) if array.size else 0.0
    if not (math.isfinite(largest) and largest > 0):
        return 1.0
    return float(2.0 ** min(_MOST, math.floor(math.log2(_LARGEST) - math.log2(largest))))


def arrays_of(edge: Edge) -> Iterator[Array]:
    """The arrays of a shard's edge."""
    for tree in edge:
        yield from _leaves(tree)


def _leaves(tree: Mapping[str, Any]) -> Iterator[Array]:
    for value in tree.values():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield value


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
