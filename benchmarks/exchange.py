"""How fast weights travel: over the parameter server, and peer to peer.

    python -m benchmarks.exchange [--server] [--asa] [--link] [--size 20000000] [--rounds 9] [--json FILE]
    python -m benchmarks.exchange --link --vectors googlenet alexnet --rounds 1 [--json FILE]

--server: two worker processes push a vector as fast as they can: GB/s of pushes received and merged, on loopback, for
the server in one process and split over two, whose replies bring nothing (downpour) or the center (agwu, sgwu).
--asa: seconds for one meeting of four workers, through one server (allreduce), through one that is split over five
workers, and peer to peer (asa, asa16), in turns.
--link: asa and asa16 over links of 1 Gb/s, each worker in a network namespace of its own behind a token bucket
(`tc tbf`); needs root, `ip` and `tc`. Without a choice, the first two. Exit code 1 where a bar is missed.
--vectors: of as many numbers as these networks have parameters, as in table 3 of Theano-MPI; each is kept by its name.
vgg16 needs more than 24 GB.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, product
from pathlib import Path
from secrets import token_hex
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
from distributed import Client

from benchmarks.network.netns import linked_cluster
from benchmarks.runs import command
from daskcnn.arrays import cpu_count, device_profile
from daskcnn.cluster.link.connect import connect
from daskcnn.cluster.link.members import advertised, present, wait_for_members
from daskcnn.cluster.peers.meeting_tasks import RoundStart
from daskcnn.cluster.peers.pieces import Peers
from daskcnn.cluster.run.context import RunContext
from daskcnn.cluster.run.server_hosts import host_server
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import Cluster, Job, Workers
from daskcnn.nn import OptimizerState
from daskcnn.partition.rounds import Round
from daskcnn.ps import RULES, Snapshot
from daskcnn.ps.bsp import ASA, BSP
from daskcnn.training.round_report import RoundReport

PUSHES = 10  # of each worker in a round of the first part
WARM_UP, MEETINGS = 1, 4  # in a round of the others
SAMPLES = 10_000  # of the run that the workers stand for
WORKERS = 4
QUIET, TRIES = 0.1, 6  # share of the machine that others may take while it is measured, and how often that is tried
RATE = 1.25e8  # bytes a second: 1 Gb/s
VECTORS = {"googlenet": 13_378_280, "alexnet": 60_965_224, "vgg16": 138_357_544}  # Theano-MPI, table 2


# --- what runs on workers: by value, as they do not have this file ---


@dataclass
class VectorReplica:
    """Stands for a replica whose training takes no time: only its vector is exchanged."""

    job: Any
    weights: Any
    frozen: Any = ()
    optimizer: Any = field(default_factory=lambda: OptimizerState(np.zeros((1, 1), np.float32)))

    def __post_init__(self) -> None:
        from daskcnn.arrays import Device

        self.device, self.layout = Device(), SimpleNamespace(dtype=self.weights.dtype)

    def adopt_optimizer(self, state: Any) -> None:
        """There is none."""

    def restart_optimizer(self) -> None:
        """There is none."""

    def host_optimizer(self) -> Any:
        return self.optimizer

    def training(self, ranges: Any, samples: int, *, steps: int, **_: Any) -> Iterator[Any]:
        from daskcnn.nn.score import Score
        from daskcnn.training.replica import Trained

        for step in range(1, steps + 1):
            self.weights[:1024] += 1e-3
            yield Trained(Score(0.0, 0, samples * step // steps), 0.1, 0.0, 0.0)


def open_vector(run: str, job: Any, size: int) -> None:
    """A session of a vector alone."""
    from daskcnn.arrays import keep_freed_memory
    from daskcnn.cluster.worker.session import Session, keep_session
    from daskcnn.ps import Local

    keep_freed_memory()
    weights = np.random.default_rng(0).standard_normal(size, np.float32)
    replica: Any = VectorReplica(job, weights)
    keep_session(run, Session(replica)).kept.put(Local(weights, weights.copy()))


def push_often(at: Any, worker: str, size: int, pushes: int, start: float) -> tuple[float, float]:
    """Push so often, from this time on; returns when the first began and the last was answered."""
    from daskcnn.arrays import keep_freed_memory
    from daskcnn.ps import Join, Push

    keep_freed_memory()
    link = at.link(wire="float32", stopped=lambda: False)
    version, payload = link.call(Join(1, worker, 1)).version, np.full(size, 1e-3, np.float32)
    time.sleep(max(0.0, start - time.time()))
    begun = 0.0
    for seq in range(1, WARM_UP + pushes + 1):
        begun = time.time() if seq == WARM_UP + 1 else begun
        reply = link.call(Push(1, worker, 1, seq, version, payload, 1, 0.5))
        version = reply.version if reply.weights.size else version
    return begun, time.time()


def meet_over_server(run: str, at: Any, worker: str, life: int, meetings: int, start: float) -> float:
    """A worker's part of meetings through the server, from this time on; seconds they took.

    By then all have joined: the server awaits at its barrier those that it knows.
    """
    from daskcnn.cluster.worker.session import session_of
    from daskcnn.ps import RULES, Join, Local, Push

    rule, local = RULES["bsp"](), session_of(run).kept.find(Local)
    link = at.link(wire="float32", stopped=lambda: False)
    reply = link.call(Join(1, worker, life))
    rule.begin(local, reply.weights, reply.version)
    begun = 0.0
    time.sleep(max(0.0, start - time.time()))
    for seq in range(1, WARM_UP + meetings + 1):
        begun = time.perf_counter() if seq == WARM_UP + 1 else begun
        reply = link.call(Push(1, worker, life, seq, local.base_version, rule.payload(local), 64, 1.0))
        rule.adopt(local, reply.weights, reply.version)
    return time.perf_counter() - begun


def begin_vector(peers: Any, name: str, job: Any) -> None:
    """Begin a life of the session's vector."""
    from daskcnn.cluster.peers.meeting_tasks import begin_life
    from daskcnn.cluster.worker.session import session_of

    session = session_of(peers.run)
    session.replica.job = job
    assert isinstance(job.rule, BSP)
    begin_life(peers, name, None, 0, session.replica.weights, ASA.of(job.rule, "float32"))


def timed_round(peers: Any, version: int, start: Any) -> tuple[float, int]:
    """A round of the session's vector: its seconds, and the bytes sent in it."""
    from daskcnn.cluster.peers.meeting_tasks import train_round

    begun, report = time.perf_counter(), train_round(peers, version, start)
    assert isinstance(report, RoundReport)
    return time.perf_counter() - begun, report.bytes_up


# --- rounds ---


class Others:
    """How much of the machine processes other than ours take."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self._busy, self._ours = self._now()

    def share(self) -> float:
        """Of all cores, since the beginning."""
        busy, ours = self._now()
        seconds = (time.perf_counter() - self._begun) * cpu_count()
        return max(0.0, busy - self._busy - ours + self._ours) / seconds

    def _now(self) -> tuple[float, float]:
        """Seconds that all cores were busy, and those of this process and its children."""
        times, us = psutil.cpu_times(), psutil.Process()
        ours = [each.cpu_times() for each in (us, *us.children(recursive=True))]
        return times.user + times.nice + times.system, sum(each.user + each.system for each in ours)


def in_turns(works: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, Any]:
    """Medians and spread of what each work gives. What was measured while others were busy is measured again."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    shares: list[float] = []
    for _ in range(rounds):
        for name, work in works.items():
            for _ in range(TRIES):
                others, value = Others(), work()
                if (share := others.share()) <= QUIET:
                    break
            taken[name].append(value)
            shares.append(share)
    table = {name: spread(values) for name, values in taken.items()}
    for name, row in table.items():
        print(f"{name:24} {row['median']:7.3f}  ({row['least']:.3f} to {row['most']:.3f})", flush=True)
    return {"figures": table, "others_share": spread(shares)}


def spread(values: Sequence[float]) -> dict[str, float]:
    return {name: round(of(values), 3) for name, of in (("median", median), ("least", min), ("most", max))}


# --- the server ---


def job_of(workers: int, shards: int) -> Job:
    """The job of a run without data. shards: ranges of its server."""
    model = {"name": "quick"}  # without running statistics, which an asynchronous server looks for
    return resolve(
        {"train": {"strategy": "bsp"}, "model": model, "cluster": {"workers": {"cpu": workers}, "ps_shards": shards}}
    )


def context_of(client: Client, workers: int, shards: int = 1) -> RunContext:
    """Surroundings of a run of so many workers; others of the cluster are set apart for the server."""
    job = job_of(workers, shards)
    members = wait_for_members(client, job.cluster.workers, 60.0)
    used = {members.server.address, *(m.address for m in members.workers)}
    spare = [m for m in advertised(present(client)) if m.address not in used]
    members = replace(members, servers=tuple(spare[: shards - 1]))
    none: Any = None
    dataset: Any = SimpleNamespace(train=range(SAMPLES), shape=(32, 32, 3), classes=range(10))
    return RunContext.of(client, f"exchange-{time.time_ns():x}", job, dataset, members, emit=none, save=none)


def server_rate(client: Client, rule: str, shards: int, size: int) -> float:
    """GB/s of payloads received and merged, from two workers."""
    context = context_of(client, 2, shards)
    server = host_server(context, RULES[rule](), Snapshot(np.zeros(size, np.float32)), life=1)
    start = time.time() + 1.0
    pushed = client.gather(
        [
            context.dispatch.submit("push", push_often, server.at, name, size, PUSHES, start, worker=name)
            for name in context.workers.alive
        ]
    )
    server.close()
    seconds = max(end for _, end in pushed) - min(begun for begun, _ in pushed)
    return 2 * PUSHES * size * 4 / 1e9 / seconds


def server_part(size: int, rounds: int) -> dict[str, Any]:
    """GB/s by rule and processes. The bar: 1 GB/s."""
    with connect(Cluster(workers=Workers(cpu=3))) as client:
        client.wait_for_workers(4, timeout=60)
        found = in_turns(
            {
                f"{rule}, ps_shards = {shards}": partial(server_rate, client, rule, shards, size)
                for rule in ("downpour", "agwu", "sgwu")
                for shards in (1, 2)
            },
            rounds,
        )
    return {**found, "unit": "GB/s", "bar_met": found["figures"]["downpour, ps_shards = 1"]["median"] >= 1.0}


# --- through the server, and peer to peer ---


def allreduce_seconds(context: RunContext, at: Any, life: int) -> float:
    """Seconds for one meeting through the server."""
    start = time.time() + 1.0
    futures = [
        context.dispatch.submit("meet", meet_over_server, context.name, at, name, life, MEETINGS, start, worker=name)
        for name in context.workers.alive
    ]
    return float(max(context.connection.client.gather(futures))) / MEETINGS


def peer_seconds(context: RunContext, exchange: str, life: int, size: int) -> float:
    """Seconds for one meeting peer to peer, of several in a round."""
    names = tuple(sorted(context.workers.alive))
    rule = RULES["bsp"].model_validate({"exchange": exchange})
    addresses = tuple(context.workers.alive[name].address for name in names)
    peers = Peers(context.name, life, names, size, token_hex(16), addresses)
    job = context.job.model_copy(update={"rule": rule})
    context.connection.client.gather(
        [context.dispatch.submit("begin", begin_vector, peers, name, job, worker=name) for name in names]
    )
    seconds, moved = 0.0, dict.fromkeys(names, 0)
    for session, (version, steps) in enumerate(((0, WARM_UP), (WARM_UP, MEETINGS)), 1):
        round_ = Round("", 0, ((0, 64 * steps),), 64 * steps, (0.0, 1.0), steps=steps)
        starts = {name: RoundStart(replace(round_, worker=name), session, None, 1.0) for name in names}
        tasks = [context.dispatch.submit("round", timed_round, peers, version, starts[n], worker=n) for n in names]
        for name, (took, up) in zip(names, context.connection.client.gather(tasks), strict=True):
            seconds, moved[name] = took / steps, moved[name] + up
    nominal = 2 * (WORKERS - 1) / WORKERS * size * (2 if exchange == "asa16" else 4) * (WARM_UP + MEETINGS)
    assert all(abs(each - nominal) < 1e-3 * nominal for each in moved.values()), (moved, nominal)
    return seconds


def meetings(client: Client, size: int, rounds: int) -> dict[str, Any]:
    """Seconds a meeting of four workers, by kind; a server that is split lies on its own worker and theirs."""
    context, lives = context_of(client, WORKERS), count(1)
    names, zeros = list(context.workers.alive), Snapshot(np.zeros(size, np.float32))
    client.gather(
        [context.dispatch.submit("open", open_vector, context.name, context.job, size, worker=w) for w in names]
    )
    servers = {}
    for shards in (1, WORKERS + 1):
        context.job = job_of(WORKERS, shards)
        servers[shards] = host_server(context, RULES["bsp"].model_validate({"combine": "average"}), zeros, life=1)
    works: dict[str, Callable[[], float]] = {
        "allreduce": lambda: allreduce_seconds(context, servers[1].at, next(lives)),
        f"allreduce, ps_shards = {WORKERS + 1}": lambda: allreduce_seconds(
            context, servers[WORKERS + 1].at, next(lives)
        ),
        "asa": lambda: peer_seconds(context, "asa", next(lives), size),
        "asa16": lambda: peer_seconds(context, "asa16", next(lives), size),
    }
    for work in works.values():
        work()
    found = in_turns(works, rounds)
    for server in servers.values():
        server.close()
    return {**found, "unit": "s a meeting"}


def asa_part(size: int, rounds: int) -> dict[str, Any]:
    """On loopback. The bar: asa below allreduce."""
    with connect(Cluster(workers=Workers(cpu=WORKERS))) as client:
        client.wait_for_workers(WORKERS + 1, timeout=60)
        found = meetings(client, size, rounds)
    figures = found["figures"]
    return {**found, "bar_met": figures["asa"]["median"] < figures["allreduce"]["median"]}


def link_part(size: int, rounds: int) -> dict[str, Any]:
    """Over links of 1 Gb/s each way. The bar: asa16 below asa."""
    with linked_cluster(WORKERS, RATE) as client:
        found = meetings(client, size, rounds)
    figures = found["figures"]
    return {
        **found,
        "link": f"{8 * RATE / 1e9:g} Gb/s",
        "bar_met": figures["asa16"]["median"] < figures["asa"]["median"],
    }


# --- results ---

PARTS = {"server": server_part, "asa": asa_part, "link": link_part}


def main() -> int:
    """Exit code 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, part in PARTS.items():
        parser.add_argument(f"--{name}", action="store_true", help=part.__doc__)
    parser.add_argument("--size", type=int, default=20_000_000, help="numbers of the vector, float32")
    parser.add_argument("--vectors", nargs="+", choices=VECTORS, default=(), help="in place of --size")
    parser.add_argument("--rounds", type=int, default=9, help="rounds that all kinds are measured in, in turns")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the results to this file")
    options = parser.parse_args()
    chosen = [name for name in PARTS if getattr(options, name)] or ["server", "asa"]
    kept = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    sizes = {f" {vector}": VECTORS[vector] for vector in options.vectors} or {"": options.size}
    met = []
    for name, (vector, size) in product(chosen, sizes.items()):
        found = PARTS[name](size, options.rounds)
        met.append(found["bar_met"])
        kept[name + vector] = {
            "command": command(),
            "processor": device_profile("cpu", cpu_count()).name,
            "cores": cpu_count(),
            "rounds": options.rounds,
            "numbers": size,
            **found,
        }
        if options.json:
            options.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
