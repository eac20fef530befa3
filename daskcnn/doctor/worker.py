"""Measurements of `daskcnn doctor`: on each worker by itself, of the links between workers, and of their clocks."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

import numpy as np
from distributed import Client, Future
from distributed.system import memory_limit
from distributed.worker import get_data_from_worker
from threadpoolctl import threadpool_info

from daskcnn.arrays import backend, cpu_count, single_threaded_blas
from daskcnn.cluster.link.calls import ANSWER, ask_workers
from daskcnn.cluster.link.members import Member
from daskcnn.doctor.findings import in_short
from daskcnn.errors import ClusterError, DataError, told
from daskcnn.pool import Pool
from daskcnn.store import open_dataset
from daskcnn.store.foreign.array import array_at

LARGE = 8 << 20  # bytes of the payload that bandwidth is measured with
SMALL = 64
TIMES = 3
PATIENCE = 15.0  # seconds for a payload to arrive, and for a worker to make one


@dataclass(frozen=True)
class Way:
    """The way from one worker to another, by name: bytes a second and seconds a message, or why nothing got there."""

    sender: str
    receiver: str
    bandwidth: float = 0.0
    latency: float = 0.0
    problem: str = ""


def measure_ways(client: Client, members: Sequence[Member]) -> list[Way]:
    """Measure every ordered pair of workers: one transfer at a time for each worker, disjoint pairs at once."""
    payloads = _payloads(client, members)
    busy = f"did not begin a task within {PATIENCE:g} s; is it busy?"
    ways = [Way(m.name, "", problem=busy) for m in members if m.address not in payloads]
    for pairs in rounds([m for m in members if m.address in payloads]):
        for these in (pairs, [(b, a) for a, b in pairs]):
            ways += _transfers(client, these, payloads)
    return ways


def rounds(members: Sequence[Member]) -> Iterator[list[tuple[Member, Member]]]:
    """Yield every pair once, in rounds in which no member is twice: a tournament by the circle method."""
    circle: list[Member | None] = [*members, *([None] if len(members) % 2 else [])]
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(a, b) for a, b in pairs if a is not None and b is not None]
        circle[1:] = [circle[-1], *circle[1:-1]]


def _payloads(client: Client, members: Sequence[Member]) -> dict[str, tuple[Future, Future]]:
    """Return a small and a large payload on each worker that makes them in time, by address."""
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
    """Send payloads from each pair's first to its second, all pairs at the same time."""
    orders = {b.address: (a.address, *(f.key for f in payloads[a.address])) for a, b in pairs}
    answers = ask_workers(client, _fetch, orders, orders, within=PATIENCE + ANSWER)
    silence = OSError(f"{PATIENCE + ANSWER:g} s without an answer of the receiver")
    for a, b in pairs:
        if (took := answers.given.get(b.address)) is None:
            yield Way(a.name, b.name, problem=in_short(answers.failed.get(b.address, silence)))
        else:
            yield Way(a.name, b.name, LARGE / max(took[1] - took[0], took[1] / 10), took[0])


async def _fetch(orders: dict[str, tuple[str, str, str]], dask_worker: Any) -> tuple[float, float]:
    """Return the seconds that a small and a large payload took to this worker. A first one makes the connection."""
    sender, small, large = orders[dask_worker.address]

    async def seconds(key: str) -> float:
        begun = time.perf_counter()
        response = await get_data_from_worker(dask_worker.rpc, [key], sender, who=dask_worker.address)
        if response["status"] != "OK":
            raise OSError(f"{sender} answers {response['status']}; is it busy with a job?")
        return time.perf_counter() - begun

    try:
        async with asyncio.timeout(PATIENCE):
            await seconds(small)
            short = median([await seconds(small) for _ in range(TIMES)])
            return short, median([await seconds(large) for _ in range(TIMES)])
    except TimeoutError:
        raise OSError(f"no payload from {sender} within {PATIENCE:g} s") from None


def clock_offsets(client: Client, members: Sequence[Member]) -> dict[str, tuple[float, float]]:
    """Return how many seconds each clock is ahead of this machine's, and the error; none of workers that are silent."""
    found: dict[str, tuple[float, float]] = {}
    for member in members:
        tries = []
        for _ in range(TIMES):
            before = time.time()
            there = ask_workers(client, time.time, [member.address]).given.get(member.address)
            after = time.time()
            if there is None:
                break
            tries.append((there - (before + after) / 2, (after - before) / 2))
        else:
            found[member.name] = min(tries, key=lambda offset: offset[1])
    return found


COMPUTE = 0.2  # seconds of it, to see how many cores take part
SIDE = 192  # of the matrices that are multiplied: a core's work for less than a millisecond


@dataclass(frozen=True)
class Gpu:
    """A worker's GPU. Workers with the same `bus` share one. memory, free: bytes."""

    name: str
    bus: str
    memory: int
    free: int
    driver: str
    problem: str = ""


@dataclass(frozen=True)
class Seen:
    """The resources of a worker.

    Attributes
    ----------
    cores, memory : that its process may use, control groups considered; bytes
    blas_threads : of each matrix product during training
    got_cores : cores that its threads were given when all computed
    """

    cores: int
    memory: int
    blas: str
    blas_threads: int
    got_cores: float
    gpu: Gpu | None = None
    device_problem: str = ""
    fingerprint: str | None = None
    data_problem: str = ""


def look(kind: str, threads: int, data: str | None) -> Seen:
    """Examine this worker. kind: cpu, gpu or ps; data: the path of a data set that it must see, if any."""
    device = (None, "") if kind != "gpu" else _gpu()
    dataset = (None, "") if data is None or kind == "ps" else _dataset(data)
    with single_threaded_blas():
        libraries = [i for i in threadpool_info() if i["user_api"] == "blas"]
        got = _got_cores(threads if kind == "cpu" else 1)
    blas_threads = max((i["num_threads"] for i in libraries), default=1)
    return Seen(cpu_count(), int(memory_limit()), blas_names(libraries), blas_threads, got, *device, *dataset)


def blas_names(libraries: list[dict[str, Any]]) -> str:
    """Return names, versions and kernels of the libraries that threadpoolctl has found."""
    named = (f"{i['internal_api']} {i.get('version') or ''} {i.get('architecture') or ''}" for i in libraries)
    return ", ".join(map(str.strip, named))


def _got_cores(threads: int) -> float:
    """Return seconds of processor time a second, while the threads multiply matrices as a training step does."""
    a = np.ones((SIDE, SIDE), np.float32)
    begun, spent = time.perf_counter(), time.process_time()
    end = begun + COMPUTE

    def multiply(_: int) -> None:
        while time.perf_counter() < end:
            a @ a

    Pool(threads).map(multiply, range(threads))
    return (time.process_time() - spent) / (time.perf_counter() - begun)


def _gpu() -> tuple[Gpu | None, str]:
    try:
        xp = backend("gpu").xp
    except ClusterError as error:
        return None, str(error)
    runtime, device = xp.cuda.runtime, xp.cuda.Device()
    free, memory = runtime.memGetInfo()
    name = runtime.getDeviceProperties(device.id)["name"].decode()
    version = runtime.driverGetVersion()
    driver = f"driver {_kernel_driver()}, up to CUDA {version // 1000}.{version % 1000 // 10}"
    return Gpu(name, f"{os.uname().nodename} {device.pci_bus_id}", memory, free, driver, _gpu_problem(xp)), ""


def _kernel_driver(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    try:
        found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", file.read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found.group() if found else "of unknown version"


def _gpu_problem(xp: Any) -> str:
    """Return why it cannot multiply or compile a kernel, as with a wrong driver or a read-only folder; else nothing."""
    try:
        a = xp.ones((SIDE, SIDE), xp.float32)
        product = float((a @ a)[0, 0])
        squares = float((xp.arange(8, dtype=xp.float32) ** 2 + 1).sum())
    except Exception as error:  # whatever CUDA, its compiler or the cache's folder say
        return f"{type(error).__name__}: {in_short(error)}"
    return "" if (product, squares) == (SIDE, 148.0) else f"it computes {product} for {SIDE}, {squares} for 148"


def _dataset(path: str) -> tuple[str | None, str]:
    try:
        if (array := array_at(path)) is not None:
            array.read(0)
            return array.digest, ""
        return open_dataset(path).fingerprint, ""
    except DataError as error:
        return None, told(error.value, error.reason, "")
