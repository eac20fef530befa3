"""A third equal worker comes at half of a run: how much faster the rest is than without it, and what the join takes.

    python -m benchmarks.joining --data data/cifar10.zarr [--strategies bsp sgwu agwu] [--epochs 10] [--json FILE]
    python -m benchmarks.joining --data data/cifar10.zarr --strategies layer --model 50:500 --batch 256 --epochs 2

Two one-thread workers train; the third is started with `dask worker` once half of the epochs are done. Each takes four
times as long as its core would (DASKCNN_THROTTLE, --throttle), so that two cores carry three workers, the server, the
loaders and the driver; with 2 they do not. The loops are compiled, and the machine's times are known from a run before.
Rates are epochs a second: before, of the first half; rest, from the moment when the scheduler knows the worker to the
end. A run without it gives the rate that the rest would have had. joined, step: seconds from that moment until it has
samples, or kernels, and until its first round has begun. beside: what the others lose while it is calibrated, as a
share of their rate before. Exit 1 if the rest is less than 1.35 times as fast, with `layer` 1.25 times.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from distributed import Client

from benchmarks.runs import command, machine
from daskcnn.cluster.link.connect import MEMORY, connect
from daskcnn.cluster.worker.session import THROTTLE
from daskcnn.events import EpochEnded, Event, KernelsSharded, RoundEnded, StepsEnded, WorkerJoined
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import Cluster, Workers
from daskcnn.launch.training import train_job

THIRD, BARS = "desk-3", {"layer": 1.25}
BAR = 1.35
"""For the other strategies."""


class Course:
    """Notes when rounds end, and has the third worker started at half of the run."""

    def __init__(self, epochs: int, client: Client, *, joins: bool) -> None:
        self._half, self._client, self._joins = epochs / 2, client, joins
        self.ends: list[tuple[float, float]] = []  # the times of rounds' ends, and the epochs until then
        self.own: list[tuple[float, RoundEnded]] = []  # those of the third worker
        self.started: subprocess.Popen[bytes] | None = None
        self.arrived: float | None = None
        self.joined: float | None = None

    def __enter__(self) -> Self:
        self.begun = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held."""

    def handle(self, event: Event) -> None:
        """Take in an event."""
        now = time.monotonic()
        if isinstance(event, WorkerJoined) and event.worker == THIRD:
            self.joined = now
        if isinstance(event, KernelsSharded) and self.joined is None and any(event.kernels.get(THIRD, {}).values()):
            self.joined = now
        if isinstance(event, RoundEnded | StepsEnded) or (isinstance(event, EpochEnded) and event.workers):
            self.ends.append((now, event.epoch))
            self.own += [(now, event)] if isinstance(event, RoundEnded) and event.worker == THIRD else []
            if self._joins and self.started is None and event.epoch >= self._half:
                self.started = worker(self._client)
        if self.started is not None and self.arrived is None and known(self._client, THIRD):
            self.arrived = now


def worker(client: Client) -> subprocess.Popen[bytes]:
    """Start the third worker as a user would."""
    command = [sys.executable, "-m", "distributed.cli.dask_worker", client.scheduler.address, "--name", THIRD]
    command += ["--nthreads", "1", "--no-nanny", "--no-dashboard", "--resources", "CPU=1"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def known(client: Client, name: str) -> bool:
    """Return True if the scheduler knows a worker of this name."""
    return any(info["name"] == name for info in client.scheduler_info(n_workers=-1)["workers"].values())


def trained(options: argparse.Namespace, strategy: str, client: Client, *, joins: bool) -> Course:
    """Train once."""
    with tempfile.TemporaryDirectory() as runs:
        job = {
            "data": {"path": options.data, **({"limit": options.limit} if options.limit else {})},
            "model": {"name": options.model},
            "train": {"strategy": strategy, "epochs": options.epochs, "batch_size": options.batch, "threads": 1},
            "cluster": {"workers": {"cpu": "2..3"}, "settle": 0.0},
            "run": {"dir": runs, "checkpoint_every": 1000.0, "dashboard": False},
        }
        course = Course(options.epochs, client, joins=joins)
        try:
            train_job(resolve(job), client=client, progress=course)
        finally:
            if course.started is not None:
                course.started.kill()
                course.started.wait()
    return course


def rate(ends: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Return epochs a second between two times, by the rounds that ended before and after, in proportion."""
    return (epoch_at(ends, end) - epoch_at(ends, begin)) / max(end - begin, 1e-9)


def epoch_at(ends: Sequence[tuple[float, float]], at: float) -> float:
    """Return the epochs at a time, in proportion between two rounds' ends."""
    before, after = [each for each in ends if each[0] <= at], [each for each in ends if each[0] > at]
    (t0, e0), (t1, e1) = before[-1] if before else ends[0], after[0] if after else ends[-1]
    return e0 if t1 <= t0 else e0 + (e1 - e0) * (at - t0) / (t1 - t0)


def measured(alone: Course, joint: Course, epochs: int) -> dict[str, Any]:
    """Return the figures of a strategy: a run without the third worker, and one with it."""
    if joint.arrived is None:
        raise SystemExit("the third worker came too late; train for longer (--epochs)")
    (first, _), (last, _), arrived = joint.ends[0], joint.ends[-1], joint.arrived
    half = next(at for at, epoch in alone.ends if epoch >= epochs / 2)
    without, rest = rate(alone.ends, half, alone.ends[-1][0]), rate(joint.ends, arrived, last)
    before, joined = rate(joint.ends, first, arrived), joint.joined
    found = {"without": without, "rest": rest, "speedup": rest / without, "before": before}
    if joined is not None:
        found |= {"joined": joined - arrived, "beside": 1 - rate(joint.ends, arrived, joined) / before}
    if joint.own:
        at, ended = joint.own[0]
        found["step"] = at - arrived - ended.busy - ended.wait - ended.communication - ended.evaluation
    return {key: round(value, 4) for key, value in found.items()}


@contextmanager
def cluster(throttle: float) -> Iterator[Client]:
    """Give two throttled workers and one for the server."""
    os.environ.update({**MEMORY, THROTTLE: f"{throttle:g}"})
    with connect(Cluster(workers=Workers(cpu=2))) as client:
        client.wait_for_workers(3, timeout=60)
        yield client


def main() -> int:
    """Print a line for each strategy, and the verdict."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", default="data/cifar10.zarr", help="the prepared data set")
    options.add_argument("--limit", type=int, help="samples; all by default")
    options.add_argument("--model", default="quick")
    options.add_argument("--strategies", nargs="+", default=["bsp", "sgwu", "agwu"])
    options.add_argument("--epochs", type=int, default=10)
    options.add_argument("--batch", type=int, default=64, help="samples of a step; default %(default)s")
    options.add_argument("--throttle", type=float, default=4.0, help="times slower than the core; default %(default)s")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    given = options.parse_args()
    found: dict[str, dict[str, Any]] = {}
    with cluster(given.throttle) as client:
        for strategy in given.strategies:
            alone, joint = (trained(given, strategy, client, joins=joins) for joins in (False, True))
            found[strategy] = measured(alone, joint, given.epochs)
            print(strategy, found[strategy], flush=True)
            if given.json:
                kept = {"machine": machine(), "command": command()}
                given.json.write_text(json.dumps(kept | {"measured": found}, indent=1) + "\n", encoding="utf-8")
    missed = [strategy for strategy, own in found.items() if own["speedup"] < BARS.get(strategy, BAR)]
    print(f"the rest is as much faster as it should be: {'not by ' + ', '.join(missed) if missed else 'yes'}")
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
