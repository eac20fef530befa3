"""What travels between the tasks of a layer-sharded step: parts of outputs and of gradients, edges of shards.

Dask sends a result to whoever needs it, all of it. So where a task has a part for each of several workers, its result
is but a claim: the parts lie on its worker's shelf, and who has the claim calls for its own, from worker to worker. A
task for every part, which cuts it out, would be a hundred for ten workers, with the scheduler one after the other.
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
    ALL,
    Claim,
    OutOfStep,
    Packed,
    Parcel,
    Shelf,
    arrays_of,
    packed,
    unpacked,
    wire_bytes,
)
from daskcnn.cluster.layers.task_context import Where, gradient, session_at, shelf_at
from daskcnn.cluster.session.session import session_of
from daskcnn.errors import ClusterError
from daskcnn.sharded import Edge, Edges, Side, Stage, of_channels

Cuts = Mapping[str, tuple[Any, ...]]
"""Which part of the numbers (…, N, C) goes to which worker; under `ALL`, to each that needs any."""
Sources = Sequence[Parcel]
"""Where a task finds its inputs; empty: in the batch."""
CALL = "daskcnn_part"
"""The name that workers are called by for a part."""


def received(where: Where, sources: Sources, own: Any = None, *, alike: bool = False) -> list[Array]:
    """This worker's parts, and first the one of its own making where there is one on the shelf of this name.

    alike: those of its own making as they arrive elsewhere. Raises OutOfStep, also where a part is not to be had.
    """
    shelf, counters, arrays = shelf_at(where), session_at(where).counters, []
    called = _called(where, [source for source in sources if source.claim and source.maker != where.worker])
    for source in sources:
        if own is not None and source.maker == where.worker:
            arrays.append(shelf.take(own, where.step))
            continue
        if source.claim:
            arrays.append(called[source.maker])
        else:
            arrays.append(source.as_sent(where.worker) if alike else source.part(where.worker))
        counters.bytes_down += wire_bytes(arrays[-1], where.wire) if source.arrived else 0
    return arrays


def handed_on(
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
    sent(where, away, [*parts.values(), *(a for edge in (edges or {}).values() for a in arrays_of(edge))])
    if len(parts) < 2:
        return Parcel(where.worker, parts, edges, where.wire)
    return Parcel(where.worker, {}, edges, where.wire, claim=_laid_out(where, stage, parts))


def edges_beside(where: Where, stage: Stage, beside: Sequence[Parcel], ends: Sequence[tuple[Side, int]]) -> Edges:
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


def sent(where: Where, times: int, arrays: Sequence[Array]) -> None:
    """Count what others get."""
    session_at(where).counters.bytes_up += times * sum(wire_bytes(array, where.wire) for array in arrays)


# --- parts that are called for ---


def _laid_out(where: Where, stage: int, parts: Mapping[str, Array]) -> Claim:
    """Put everybody's part where it will be called for."""
    shelf, name = shelf_at(where), ("part", stage, where.sub)
    for worker, array in parts.items():
        shelf.put((*name, worker), where.step, packed(array, where.wire))
    worker = get_worker()
    worker.handlers.setdefault(CALL, _answer)
    return Claim(worker.address, where.run, where.generation, where.step, name)


def _called(where: Where, sources: Sources) -> dict[str, Array]:
    """This worker's parts, by who has made them, called for at the same time."""
    if not sources:
        return {}
    limit = session_at(where).replica.job.cluster.stall_timeout
    worker = get_worker()

    async def call(claim: Claim) -> Packed:
        asked = {"run": claim.run, "generation": claim.generation, "step": claim.step}
        answer = await getattr(worker.rpc(claim.address), CALL)(**asked, name=[*claim.name, where.worker])
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
        raise OutOfStep(f"step {where.step}: {where.worker} gets no parts from {names}: {error!r}") from error
    return {source.maker: unpacked(*part) for source, part in zip(sources, found, strict=True)}


async def _answer(run: str, generation: int, step: int, name: list[Any]) -> dict[str, Any]:
    """On the event loop of the worker that has laid it out: a part, to whom it is for, once."""
    try:
        shelf = session_of(run).kept.find(Shelf)
        if shelf is None or shelf.generation != generation:
            raise OutOfStep(f"step {step}: pieces were placed anew since")
        return {"part": to_serialize(shelf.take(tuple(name), step))}
    except ClusterError as error:
        return {"missing": str(error)}
