"""Milliseconds of a meeting of two workers: each pushes behind a barrier, and gets the center back.

    python -m benchmarks.meeting [--bytes 138000 358000 1080000] [--meetings 300] [--tls] [--json FILE]

Two worker processes push to a server in a third, on loopback, by a `bsp` rule, and meet without it, peer to peer
(`asa`). Between two meetings both compute for 0 or 10 ms, so that two cores are busy. Beside it, in the same run: the
sum of two processes' vectors by a third over plain sockets, and gloo's allreduce where PyTorch is installed.
Milliseconds: the fastest tenth, the median of all meetings, and the 95th percentile. Bars, of the medians with busy
cores: 0.8 ms for 138 kB and 1.2 ms for 358 kB, and no more than gloo's; peers 1.5 ms; TLS twice that.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import numpy as np
from distributed import Client, LocalCluster, get_worker
from distributed.security import Security

from daskcnn.arrays import cpu_count, device_profile, keep_freed_memory
from daskcnn.cluster.peers.pieces import Peers
from daskcnn.cluster.server.actor import ServerActor, ServerAt
from daskcnn.ps import RULES, Snapshot
from daskcnn.ps.bsp import ASA, BSP

BARS = {("server", 138_000): 0.8, ("server", 358_000): 1.2, ("peers", 138_000): 1.5, ("peers", 358_000): 1.5}
"""Milliseconds with both cores busy, by kind and bytes."""
GLOO = "gloo's allreduce"
TLS = ", TLS"
WORK = (0.0, 0.010)
"""Seconds that both compute between two meetings."""


class Took(NamedTuple):
    """Milliseconds of a kind of meeting."""

    kind: str
    size: int
    work_ms: float
    fast: float
    median: float
    late: float


def busy(seconds: float) -> None:
    """Compute that long."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def summed(kind: str, size: int, work: float, seconds: Sequence[float]) -> Took:
    """Sum the measurements up."""
    twentieths = quantiles(seconds, n=20)
    found = (twentieths[1], median(seconds), twentieths[-1])
    return Took(kind, size, 1e3 * work, *(round(1e3 * each, 3) for each in found))


# --- over the server ---


def join(at: ServerAt, name: str) -> int:
    """Take part in the barrier. A worker's task."""
    from daskcnn.ps import Join

    keep_freed_memory()  # as a worker of a run does
    return at.link(wire="float32", stopped=lambda: False).call(Join(1, name, 1)).version


def meet(at: ServerAt, name: str, base: int, length: int, meetings: int, work: float) -> list[float]:
    """Meet the other worker that often; return the seconds of each meeting. A worker's task."""
    from daskcnn.ps import Push

    link = at.link(at.stream(name, "float32"), wire="float32", stopped=lambda: False)
    vector, took = np.zeros(length, np.float32), []
    for seq in range(1, meetings + 1):
        busy(work)
        begun = time.perf_counter()
        base = link.call(Push(1, name, 1, seq, base, vector, 64, 1.0)).version
        took.append(time.perf_counter() - begun)
    return took


@contextmanager
def cluster(tls: bool) -> Iterator[Client]:
    """Two workers, and one for the server."""
    security = Security.temporary() if tls else None
    options = {"n_workers": 3, "threads_per_worker": 1, "dashboard_address": None, "security": security}
    with LocalCluster(**options) as local, Client(local) as client:
        client.wait_for_workers(3)
        yield client


def over_server(client: Client, kind: str, sizes: Sequence[int], meetings: int) -> Iterator[Took]:
    """Meet through the server."""
    host, *two = sorted(client.scheduler_info(n_workers=-1)["workers"])
    for work in WORK:
        for size in sizes:
            length, secret = size // 4, os.urandom(8).hex()
            options = {"life": 1, "wire": "float32", "secret": secret}
            snapshot = Snapshot(np.zeros(length, np.float32))
            key: Any = f"server-{secret}"
            held = client.submit(ServerActor, RULES["bsp"](), snapshot, **options, actor=True, workers=[host], key=key)
            held.result()
            at = ServerAt(host, key, (), secret, length)
            names = dict(zip("ab", two, strict=True))
            joined = [client.submit(join, at, name, workers=[own], pure=False) for name, own in names.items()]
            bases = client.gather(joined)
            tasks = [
                client.submit(meet, at, name, base, length, meetings, work, workers=[own], pure=False)
                for (name, own), base in zip(names.items(), bases, strict=True)
            ]
            yield summed(kind, size, work, client.gather(tasks)[0][meetings // 10 :])
            held.cancel()


# --- peer to peer ---


def come(peers: Any, name: str) -> None:
    """Let the other worker send its pieces. A worker's task."""
    from daskcnn.cluster.peers.pieces import PieceExchange

    keep_freed_memory()
    worker: Any = get_worker()
    worker.pieces = PieceExchange(peers, name, ASA.of(BSP(exchange="asa"), "float32"))


def meet_as_peers(peers: Any, meetings: int, work: float) -> list[float]:
    """Meet the other worker that often; return the seconds of each meeting. A worker's task."""
    worker: Any = get_worker()
    pieces = worker.pieces
    pieces.know(peers)
    lo, hi = peers.spans()[pieces.name]
    vector, took = np.zeros(peers.size, np.float32), []
    for version in range(meetings):
        busy(work)
        begun = time.perf_counter()
        sums = pieces.exchange(vector, vector[lo:hi], 64, version, lambda: False)
        for name, (a, b) in peers.spans().items():
            vector[a:b] = sums[name].weights
        took.append(time.perf_counter() - begun)
    pieces.close()
    return took


def over_peers(client: Client, kind: str, sizes: Sequence[int], meetings: int) -> Iterator[Took]:
    """Meet peer to peer."""
    two = sorted(client.scheduler_info(n_workers=-1)["workers"])[1:]
    for work in WORK:
        for size in sizes:
            peers = Peers("benchmark", 1, ("a", "b"), size // 4, os.urandom(8).hex(), tuple(two))
            own = list(zip(peers.names, two, strict=True))
            client.gather([client.submit(come, peers, name, workers=[at], pure=False) for name, at in own])
            told = [client.submit(meet_as_peers, peers, meetings, work, workers=[at], pure=False) for _, at in own]
            yield summed(kind, size, work, client.gather(told)[0][meetings // 10 :])


# --- plain sockets, and gloo ---


def receive(end: socket.socket, vector: Any) -> None:
    """Fill the vector."""
    view = memoryview(vector).cast("B")
    while len(view):
        view = view[end.recv_into(view) :]


def add_up(listening: socket.socket, sizes: Sequence[int], meetings: int) -> None:
    """Add up the vectors of two ends, meeting after meeting."""
    ends = [listening.accept()[0] for _ in range(2)]
    for end in ends:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for size in [size for _ in WORK for size in sizes]:
        parts = [np.zeros(size // 4, np.float32) for _ in ends]
        for _ in range(meetings):
            for end, part in zip(ends, parts, strict=True):
                receive(end, part)
            mean = (parts[0] + parts[1]) / 2
            for end in ends:
                end.sendall(mean.view(np.uint8).data)


def meet_plainly(port: int, sizes: Sequence[int], meetings: int, told: Any) -> None:
    """Meet at the process that adds up."""
    end = socket.create_connection(("127.0.0.1", port))
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for work in WORK:
        for size in sizes:
            vector, took = np.zeros(size // 4, np.float32), []
            for _ in range(meetings):
                busy(work)
                begun = time.perf_counter()
                end.sendall(vector.view(np.uint8).data)
                receive(end, vector)
                took.append(time.perf_counter() - begun)
            told.put(summed("plain sockets", size, work, took[meetings // 10 :]))


def meet_by_gloo(rank: int, port: int, sizes: Sequence[int], meetings: int, told: Any) -> None:
    """Meet by PyTorch's allreduce."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    for work in WORK:
        for size in sizes:
            vector, took = torch.zeros(size // 4), []
            for _ in range(meetings):
                busy(work)
                begun = time.perf_counter()
                distributed.all_reduce(vector)
                took.append(time.perf_counter() - begun)
            if rank == 0:
                told.put(summed(GLOO, size, work, took[meetings // 10 :]))
    distributed.destroy_process_group()


def beside(sizes: Sequence[int], meetings: int) -> list[Took]:
    """Measure plain sockets, and gloo where it is there."""
    spawning = multiprocessing.get_context("spawn")
    told: Any = spawning.Queue()
    found: list[Took] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        adding = multiprocessing.get_context("fork").Process(target=add_up, args=(listening, sizes, meetings))
        adding.start()
        ends: list[Any] = [spawning.Process(target=meet_plainly, args=(port, sizes, meetings, told)) for _ in range(2)]
        for each in ends:
            each.start()
        found += [told.get() for _ in range(2 * len(WORK) * len(sizes))][::2]
        for each in (*ends, adding):
            each.join()
    if find_spec("torch"):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        ends = [spawning.Process(target=meet_by_gloo, args=(rank, port, sizes, meetings, told)) for rank in range(2)]
        for each in ends:
            each.start()
        found += [told.get() for _ in range(len(WORK) * len(sizes))]
        for each in ends:
            each.join()
    return found


def bar_of(took: Took, found: Sequence[Took]) -> float | None:
    """Return the most that the median may be; None: any number of milliseconds."""
    if not took.work_ms:
        return None
    if took.kind.endswith(TLS):
        plain = took.kind.removesuffix(TLS)
        return next(2 * each.median for each in found if (each.kind, each.size, each.work_ms) == (plain, *took[1:3]))
    bars = [BARS[took.kind, took.size]] if (took.kind, took.size) in BARS else []
    if took.kind == "server":
        bars += [each.median for each in found if (each.kind, each.size, each.work_ms) == (GLOO, *took[1:3])]
    return min(bars, default=None)


def main() -> int:
    """Measure, print, and say whether a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, nargs="+", default=[138_000, 358_000, 1_080_000])
    parser.add_argument("--meetings", type=int, default=300)
    parser.add_argument("--tls", action="store_true", help="measure over TLS too")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    found = beside(args.bytes, args.meetings)
    for tls in (False, True)[: 1 + args.tls]:
        with cluster(tls) as client:
            found += over_server(client, "server" + TLS * tls, args.bytes, args.meetings)
            found += over_peers(client, "peers" + TLS * tls, args.bytes, args.meetings)
    missed = False
    for each in found:
        bar = bar_of(each, found)
        missed |= bar is not None and each.median > bar
        said = "" if bar is None else f"  bar {bar:.2f}"
        line = f"{each.kind:18} {each.size:9,} bytes, {each.work_ms:2.0f} ms of work"
        print(f"{line}: {each.fast:6.2f} {each.median:6.2f} ms, 95 % within {each.late:6.2f}{said}")
    if args.json:
        machine = {"processor": device_profile("cpu", 1).name, "cores": cpu_count()}
        rows = [each._asdict() for each in found]
        args.json.write_text(
            json.dumps({"machine": machine, "command": "benchmarks/meeting.py", "results": rows}, indent=1)
        )
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
