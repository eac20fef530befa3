"""How fast workers reach each other, and how far their clocks are apart: measured for `daskcnn doctor`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any
from uuid import uuid4

import numpy as np
from distributed import Client, Future
from distributed.worker import get_data_from_worker

from daskcnn.cluster.link.calls import ANSWER, ask_workers
from daskcnn.cluster.link.members import Member

LARGE = 8 << 20  # bytes of the payload that bandwidth is measured with
SMALL = 64
TIMES = 3
PATIENCE = 15.0  # seconds for a payload to arrive, and for a worker to make one


@dataclass(frozen=True)
class Way:
    """From one worker to another, by name: bytes a second and seconds a message, or why nothing got there."""

    sender: str
    receiver: str
    bandwidth: float = 0.0
    latency: float = 0.0
    problem: str = ""


def measure_ways(client: Client, members: Sequence[Member]) -> list[Way]:
    """Every ordered pair of workers. Each has one transfer at a time, and disjoint pairs theirs side by side."""
    payloads = _payloads(client, members)
    ready = [m for m in members if m.address in payloads]
    busy = [m for m in members if m.address not in payloads]
    ways = [
        Way(m.name, "", problem=f"did not begin a task within {PATIENCE:g} s; is it busy with a job?") for m in busy
    ]
    for pairs in rounds(ready):
        for these in (pairs, [(b, a) for a, b in pairs]):
            ways += _transfers(client, these, payloads)
    return ways


def rounds(members: Sequence[Member]) -> Iterator[list[tuple[Member, Member]]]:
    """Every pair once, in rounds in which none is twice: a tournament by the circle method."""
    circle: list[Member | None] = [*members, *([None] if len(members) % 2 else [])]
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(a, b) for a, b in pairs if a is not None and b is not None]
        circle[1:] = [circle[-1], *circle[1:-1]]


def _payloads(client: Client, members: Sequence[Member]) -> dict[str, tuple[Future, Future]]:
    """A small and a large one on each worker that makes them in time, by address."""
    mark = uuid4().hex

    def payload(member: Member, nbytes: int) -> Future:
        key = f"doctor-payload-{mark}-{member.name}-{nbytes}"
        return client.submit(_payload, nbytes, key=key, workers=[member.address], allow_other_workers=False, pure=False)

    made = {m.address: (payload(m, SMALL), payload(m, LARGE)) for m in members}
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and not all(f.done() for pair in made.values() for f in pair):
        time.sleep(0.02)
    return {address: pair for address, pair in made.items() if all(f.status == "finished" for f in pair)}


def _payload(nbytes: int) -> Any:
    return np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)


def _transfers(
    client: Client, pairs: Sequence[tuple[Member, Member]], payloads: dict[str, tuple[Future, Future]]
) -> Iterator[Way]:
    """Payloads of each pair's first to its second, all pairs at the same time."""
    orders = {b.address: (a.address, *(f.key for f in payloads[a.address])) for a, b in pairs}
    answers = ask_workers(client, _fetch, orders, orders, within=PATIENCE + ANSWER)
    silence = OSError(f"{PATIENCE + ANSWER:g} s without an answer of the receiver")
    for a, b in pairs:
        if (took := answers.given.get(b.address)) is None:
            problem = answers.failed.get(b.address, silence)
            yield Way(a.name, b.name, problem=" ".join(str(problem).split())[:200] or type(problem).__name__)
        else:
            yield Way(a.name, b.name, LARGE / max(took[1] - took[0], took[1] / 10), took[0])


async def _fetch(orders: dict[str, tuple[str, str, str]], dask_worker: Any) -> tuple[float, float]:
    """Seconds that a small and a large payload took to this worker; the first makes the connection."""
    sender, small, large = orders[dask_worker.address]

    async def seconds(key: str) -> float:
        begun = time.perf_counter()
        response = await get_data_from_worker(dask_worker.rpc, [key], sender, who=dask_worker.address)
        if response["status"] != "OK":
            raise OSError(f"{sender} answers {response['status']}; is it busy with a job?")
        return time.perf_counter() - begun

    async def both() -> tuple[float, float]:
        await seconds(small)
        return median([await seconds(small) for _ in range(TIMES)]), median(
            [await seconds(large) for _ in range(TIMES)]
        )

    try:
        return await asyncio.wait_for(both(), PATIENCE)
    except TimeoutError:
        raise OSError(f"no payload from {sender} within {PATIENCE:g} s") from None


def clock_offsets(client: Client, members: Sequence[Member]) -> dict[str, tuple[float, float]]:
    """By worker's name: seconds that its clock is ahead of this machine's, and by how much that may be wrong.

    Workers that do not answer are left out.
    """
    found = {member.name: _clock_offset(client, member) for member in members}
    return {name: offset for name, offset in found.items() if offset is not None}


def _clock_offset(client: Client, member: Member) -> tuple[float, float] | None:
    best = (0.0, float("inf"))
    for _ in range(TIMES):
        before = time.time()
        there = ask_workers(client, time.time, [member.address]).given.get(member.address)
        after = time.time()
        if there is None:
            return None
        best = min(best, (there - (before + after) / 2, (after - before) / 2), key=lambda found: found[1])
    return best
