"""Transfers between the tasks of a layer-sharded step: parts of outputs and of gradients, edges of shards.

Dask sends a whole result to each worker that needs it. Where a task has a part for each of several workers, its result
is therefore a claim: the parts lie on its worker's shelf, and a worker that has the claim calls for its own part. The
alternative is a task for each part, which cuts it out. Ten workers would need a hundred such tasks, and the scheduler
handles tasks one after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from distributed import get_worker
from distributed.protocol import to_serialize

from daskcnn.arrays import Array
from daskcnn.cluster.layers.messages import (
    Claim,
    OutOfStep,
    Packed,
    Shelf,
    TaskResult,
    arrays_of,
    packed,
    unpacked,
    wire_bytes,
)
from daskcnn.cluster.layers.task_context import TaskContext, gradient, session_at, shelf_at
from daskcnn.cluster.session.session import session_of
from daskcnn.errors import ClusterError
from daskcnn.sharded import ALL, Cuts, Edge, Edges, Side, Stage, WantedEdge, of_channels

Sources = Sequence[TaskResult]
"""Where a task finds its inputs; empty: in the batch."""
CALL = "daskcnn_part"
"""The name that workers are called by for a part."""


def received(context: TaskContext, sources: Sources, own: Any = None, *, alike: bool = False) -> list[Array]:
    """This worker's parts, and first the one of its own making where there is one on the shelf of this name.

    alike: those of its own making as they arrive elsewhere. Raises OutOfStep, also where a part is missing.
    """
    shelf, counters, arrays = shelf_at(context), session_at(context).counters, []
    called = _called(context, [source for source in sources if source.claim and source.maker != context.worker])
    for source in sources:
        if own is not None and source.maker == context.worker:
            arrays.append(shelf.take(own, context.step))
            continue
        if source.claim:
            arrays.append(called[source.maker])
        else:
            arrays.append(source.as_sent(context.worker) if alike else source.part(context.worker))
        counters.bytes_down += wire_bytes(arrays[-1], context.wire) if source.arrived else 0
    return arrays


def handed_on(
    context: TaskContext,
    stage: int,
    dy: Array | None,
    cuts: Cuts,
    *,
    away: int,
    edges: Mapping[Side, Edge] | None = None,
) -> TaskResult:
    """The gradient of a stage's outputs, in one contiguous part for each; the worker's own goes to its shelf.

    away: to how many other workers each part goes.
    """
    parts = {}
    for worker, cut in cuts.items():
        assert dy is not None, "asked for"
        if worker in (context.worker, ALL):
            shelf_at(context).put(gradient(stage, context), context.step, dy[cut])
        if worker != context.worker:
            parts[worker] = np.ascontiguousarray(dy[cut])
    sent(context, away, [*parts.values()])
    count_up(context, [array for edge in (edges or {}).values() for array in arrays_of(edge)])
    if len(parts) < 2:
        return TaskResult(context.worker, parts, edges, context.wire)
    return TaskResult(context.worker, {}, edges, context.wire, claim=_laid_out(context, stage, parts))


def edges_beside(
    context: TaskContext, stage: Stage, beside: Sequence[TaskResult], wanted: Sequence[WantedEdge]
) -> Edges:
    """The edges beside a shard: a neighbour before it gives channels at its right end."""
    found = [(each.side, _edge(context, stage, source, each)) for source, each in zip(beside, wanted, strict=True)]
    before, after = ([edge for at, edge in found if at == side] for side in ("right", "left"))
    return Edges(before, after)


def _edge(context: TaskContext, stage: Stage, source: TaskResult, wanted: WantedEdge) -> Edge:
    """So many channels at a neighbour's end. It has travelled for the minibatch's first part."""
    edge, count = source.edges[wanted.side], wanted.channels
    if context.sub == 0:
        session_at(context).counters.bytes_down += sum(array.nbytes for array in arrays_of(edge))
    cut = slice(None, count) if wanted.side == "left" else slice(-count, None)
    params, state = (of_channels(stage, tree, cut) for tree in edge)
    return params, state


def sent(context: TaskContext, times: int, arrays: Sequence[Array]) -> None:
    """Count what others get of activations and their gradients."""
    session_at(context).counters.bytes_up += times * sum(wire_bytes(array, context.wire) for array in arrays)


def count_up(context: TaskContext, arrays: Sequence[Array], times: int = 1) -> None:
    """Count what others get of weights and their gradients, which the wire's dtype does not shorten."""
    session_at(context).counters.bytes_up += times * sum(array.nbytes for array in arrays)


# --- parts that are called for ---


def _laid_out(context: TaskContext, stage: int, parts: Mapping[str, Array]) -> Claim:
    """Put everybody's part where it will be called for."""
    shelf, name = shelf_at(context), ("part", stage, context.sub)
    for worker, array in parts.items():
        shelf.put((*name, worker), context.step, packed(array, context.wire))
    worker = get_worker()
    worker.handlers.setdefault(CALL, answer_part)
    return Claim(worker.address, context.run, context.generation, context.step, name)


def _called(context: TaskContext, sources: Sources) -> dict[str, Array]:
    """This worker's parts, by who has made them, called for at the same time."""
    if not sources:
        return {}
    limit = session_at(context).replica.job.cluster.stall_timeout
    worker = get_worker()

    async def call(claim: Claim) -> Packed:
        asked = {"worker": claim.address, "run": claim.run, "generation": claim.generation, "step": claim.step}
        answer = await getattr(worker.rpc(claim.address), CALL)(**asked, name=[*claim.name, context.worker])
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
    """On the event loop of the worker that has laid it out: a part, to whom it is for, once.

    worker : its address, by which its session is found: no task runs here.
    """
    try:
        shelf = session_of(run, worker).kept.find(Shelf)
        if shelf is None or shelf.generation != generation:
            raise OutOfStep(f"step {step}: pieces were placed anew since")
        return {"part": to_serialize(shelf.take(tuple(name), step))}
    except ClusterError as error:
        return {"missing": str(error)}
