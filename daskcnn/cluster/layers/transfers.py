"""Transfers between the tasks of a layer-sharded step: parts of outputs and of gradients, edges of shards.

Dask sends a whole result to each worker that needs it. Where a task has a part for each of several workers, its result
is therefore a claim: the parts lie on its worker's shelf, and a worker that has the claim calls for its own part. With
a task for each part ten workers would need a hundred, and the scheduler handles tasks one after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from distributed import get_worker
from distributed.protocol import to_serialize

from daskcnn.arrays import Array
from daskcnn.cluster.layers.task_context import (
    Claim,
    OutOfStep,
    Packed,
    Shelf,
    StagePart,
    TaskContext,
    TaskResult,
    arrays_of,
    packed,
    unpacked,
    wire_bytes,
)
from daskcnn.cluster.worker.session import session_of
from daskcnn.errors import ClusterError
from daskcnn.sharded.passes import Held, joined, summed_up
from daskcnn.sharded.pieces import Edge, Edges, of_channels
from daskcnn.sharded.plan_parts import ALL, Cut, Taken, WantedEdge
from daskcnn.sharded.stages import Side, Stage

Sources = Sequence[TaskResult]
"""Results that a task takes its inputs from; empty: it takes the batch."""
CALL = "daskcnn_part"
"""The name of the handler that answers a worker's call for its part."""


def received(
    context: TaskContext, sources: Sources, *, gradients_of: int | None = None, alike: bool = False
) -> list[Array]:
    """Return this worker's parts of the sources' outputs, or of the gradients of a stage's outputs.

    The worker's own gradients lie on its shelf. alike: round its own outputs as those that others receive. Raises
    OutOfStep for a part that is missing, or belongs to another step.
    """
    shelf, counters, arrays = context.shelf, context.session.counters, []
    away = [source for source in sources if source.claim and source.maker != context.worker]
    called = _called(context, away, gradients_of)
    for source in sources:
        if gradients_of is not None and source.maker == context.worker:
            arrays.append(shelf.take(("gradient", gradients_of, context.sub), context.step))
            continue
        if source.claim:
            arrays.append(called[source.maker])
        else:
            arrays.append(source.as_sent(context.worker) if alike else source.part(context.worker, gradients_of))
        counters.bytes_down += wire_bytes(arrays[-1], context.wire) if source.arrived else 0
    return arrays


def taken_in(context: TaskContext, taken: Sequence[Taken], sources: Sources) -> dict[int, Held]:
    """Return the outputs of other stages that a task works on, from `sources` or from this worker's shelf."""
    shelf, found, begin = context.shelf, dict[int, Held](), 0
    for each in taken:
        name = "outputs", each.stage, context.sub
        if not each.count:
            found[each.stage] = shelf.get(name, context.step)
            continue
        arrays = received(context, sources[begin : begin + each.count])
        begin += each.count
        found[each.stage] = Held(each.start, joined(arrays, each.by))
        if each.kept:
            shelf.put(name, context.step, found[each.stage])
    return found


def handed_on(
    context: TaskContext,
    part: StagePart,
    gradients: Iterable[tuple[int, Held]],
    edges: Mapping[Side, Edge] | None = None,
) -> TaskResult:
    """Cut gradients of stages' outputs into one contiguous part for each worker; its own goes to its shelf.

    A gradient of a stage that `part.cuts` does not have stays here: a later task of this worker adds its own to it.
    """
    shelf, edges, parts = context.shelf, edges or {}, dict[tuple[int, str], Array]()
    for stage, total in _added_up(context, gradients).items():
        for worker, cut in part.cuts.get(stage, {}).items():
            own = total.array[_from(total.start, cut)]
            if worker in (context.worker, ALL):
                shelf.put(("gradient", stage, context.sub), context.step, own)
            if worker != context.worker:
                parts[stage, worker] = np.ascontiguousarray(own)
        if stage not in part.cuts:
            shelf.put(_left(stage, context), context.step, total)
    sent(context, part.away, [*parts.values()])
    count_up(context, [array for edge in edges.values() for array in arrays_of(edge)])
    if len({worker for _, worker in parts}) < 2:
        return TaskResult(context.worker, parts, edges, context.wire)
    return TaskResult(context.worker, {}, edges, context.wire, claim=_laid_out(context, parts))


def _added_up(context: TaskContext, gradients: Iterable[tuple[int, Held]]) -> dict[int, Held]:
    """Add the gradients up by stage, with those that earlier tasks of this worker have left."""
    shelf, found = context.shelf, dict[int, list[Held]]()
    for stage, part in gradients:
        found.setdefault(stage, []).append(part)
    for stage, parts in found.items():
        if shelf.has(name := _left(stage, context), context.step):
            parts.append(shelf.take(name, context.step))
    return {stage: summed_up(parts) for stage, parts in found.items()}


def _left(stage: int, context: TaskContext) -> tuple[str, int, int]:
    """Return the shelf's name of the sum that this worker's tasks have made of a gradient so far."""
    return "part of gradient", stage, context.sub


def _from(start: int, cut: Cut) -> Cut:
    """Return the cut for an array whose first channel has this number."""
    last = cut[-1]
    return (*cut[:-1], slice(last.start - start, last.stop - start)) if start and isinstance(last, slice) else cut


def edges_beside(
    context: TaskContext, stage: Stage, beside: Sequence[TaskResult], wanted: Sequence[WantedEdge]
) -> Edges:
    """Return the edges beside a shard. A neighbour before it gives the channels at its right end."""
    found: dict[Side, list[Edge]] = {"right": [], "left": []}
    for source, (_, side, count) in zip(beside, wanted, strict=True):
        edge = source.edges[side]
        if context.sub == 0:  # it has travelled with the minibatch's first part
            context.session.counters.bytes_down += sum(array.nbytes for array in arrays_of(edge))
        cut = slice(None, count) if side == "left" else slice(-count, None)
        params, state = (of_channels(stage, tree, cut) for tree in edge)
        found[side].append((params, state))
    return Edges(*found.values())


def sent(context: TaskContext, times: int, arrays: Sequence[Array]) -> None:
    """Count the bytes of activations and their gradients that others receive."""
    context.session.counters.bytes_up += times * sum(wire_bytes(array, context.wire) for array in arrays)


def count_up(context: TaskContext, arrays: Sequence[Array], times: int = 1) -> None:
    """Count the bytes of weights and their gradients that others receive. The wire's dtype does not shorten them."""
    context.session.counters.bytes_up += times * sum(array.nbytes for array in arrays)


# --- parts that are called for ---


def _laid_out(context: TaskContext, parts: Mapping[tuple[int, str], Array]) -> Claim:
    """Put every worker's part on the shelf, from which it will be called for."""
    shelf, name = context.shelf, ("part", context.sub)
    for (stage, worker), array in parts.items():
        shelf.put((*name, stage, worker), context.step, packed(array, context.wire))
    worker = get_worker()
    worker.handlers.setdefault(CALL, answer_part)
    return Claim(worker.address, context.run, context.generation, context.step, name)


def _called(context: TaskContext, sources: Sources, stage: int | None) -> dict[str, Array]:
    """Call for this worker's parts of a stage's gradient, all at the same time. Returns them by maker."""
    if not sources:
        return {}
    limit = context.session.replica.job.cluster.stall_timeout
    worker = get_worker()

    async def call(claim: Claim) -> Packed:
        asked = asdict(claim) | {"name": [*claim.name, stage, context.worker]}
        answer = await getattr(worker.rpc(claim.worker), CALL)(**asked)
        if "missing" in answer:
            raise OutOfStep(answer["missing"])
        found: Packed = answer["part"]
        return found

    async def together() -> list[Packed]:
        calls = [call(source.claim) for source in sources if source.claim]
        return await asyncio.wait_for(asyncio.gather(*calls), limit)

    try:
        found = asyncio.run_coroutine_threadsafe(together(), worker.loop.asyncio_loop).result()
    except (OSError, TimeoutError) as error:
        names = ", ".join(source.maker for source in sources)
        raise OutOfStep(f"step {context.step}: {context.worker} gets no parts from {names}: {error!r}") from error
    return {source.maker: unpacked(*part) for source, part in zip(sources, found, strict=True)}


async def answer_part(worker: str, run: str, generation: int, step: int, name: list[Any]) -> dict[str, Any]:
    """Give a part to the worker that it is for, once. Runs on the event loop of the worker that has laid it out.

    worker: that worker's address, by which its session is found: no task runs here.
    """
    try:
        shelf = session_of(run, worker).kept.find(Shelf)
        if shelf is None or shelf.generation != generation:
            raise OutOfStep(f"step {step}: pieces were placed anew since")
        return {"part": to_serialize(shelf.take(tuple(name), step))}
    except ClusterError as error:
        return {"missing": str(error)}
