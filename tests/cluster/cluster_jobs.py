"""Small jobs, and ways to run them on real processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any, Self

import dask
import numpy as np
import pytest
from distributed import Client

from daskcnn.arrays import Device, single_threaded_blas
from daskcnn.cluster.link.connect import connect
from daskcnn.cluster.link.members import present
from daskcnn.cluster.worker.session import THROTTLE
from daskcnn.errors import Diverged
from daskcnn.events import Event
from daskcnn.job.network import training_samples
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import Cluster, Workers
from daskcnn.launch.resume import EarlierRun
from daskcnn.launch.training import Result, train_job
from daskcnn.runs.checkpoint import load
from daskcnn.store import open_dataset
from daskcnn.training.coordinator.facts import RoundDone
from daskcnn.training.coordinator.orders import StartRound
from daskcnn.training.replica import Replica

LAYERS: list[dict[str, Any]] = [
    {"layer": "conv", "kernels": 6, "size": 3, "pad": 1},
    {"layer": "relu"},
    {"layer": "maxpool", "size": 4},
    {"layer": "conv", "kernels": 9, "size": 3, "pad": 1},
    {"layer": "relu"},
    {"layer": "averagepool", "size": 2},
    {"layer": "dense", "units": 10},
]


def small_job(path: str, runs: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """The tables of a job that takes seconds; `sections` are merged over them.

    The clusters made here are complete. Networks that train in seconds are not worth a transfer, or what any shard
    takes: kernels are shared out by speed alone, unless a section says otherwise.
    """
    job: dict[str, Any] = {
        "data": {"path": path, "limit": 900, "validation": 100},
        "model": {"layers": LAYERS},
        # what workers train by does not depend on measured seconds, unless a section says so
        "train": {
            "strategy": "bsp",
            "epochs": 2,
            "batch_size": 32,
            "lr": 0.01,
            "optimizer": "sgd",
            "schedule": "poly",
        },
        "cluster": {"settle": 0.0},
        "run": {"dir": runs},
    }
    for name, keys in sections.items():
        job[name] = job.get(name, {}) | keys
    return sharded_by_speed(job) if job["train"].get("strategy") == "layer" else job


def sharded_by_speed(job: dict[str, Any], **train: Any) -> dict[str, Any]:
    """The same job by strategy `layer`, unless `train` has another; a job of another strategy has no shares."""
    return job | {"train": {"kernel_shares": "speeds"} | job["train"] | {"strategy": "layer"} | train}


class Watch:
    """A display that remembers events as a log has them, and acts on the first of a kind that a condition holds for."""

    def __init__(self, kind: str = "", act: Callable[[], None] | None = None, when: Any = lambda event: True) -> None:
        self.events: list[dict[str, Any]] = []
        self.typed: list[Event] = []
        self._acts = [(kind, act, when)] if act else []

    def then(self, kind: str, act: Callable[[], None]) -> None:
        """Act, after that, on the first event of this kind."""
        self._acts.append((kind, act, lambda event: True))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def handle(self, event: Event) -> None:
        record = event.record()
        self.typed.append(event)
        self.events.append(record)
        if not self._acts:
            return
        kind, act, when = self._acts[0]
        if event.kind == kind and when(record):
            del self._acts[0]
            act()

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]


def allocations_after(watch: Watch, lost: dict[str, Any]) -> list[dict[str, int]]:
    """Who had how many samples from when a worker was lost, the last at the end."""
    later = watch.events[watch.events.index(lost) :]
    return [event["sizes"] for event in later if event["event"] == "allocation"]


@contextmanager
def local_cluster(cpus: int) -> Iterator[Client]:
    """Processes as a job without a scheduler starts them.

    Dask looks for a lost worker's successor when this time is over, and forgets the name if there is none just then: be
    it that the successor has been killed by the next test, and its own is on its way.
    """
    patient = dask.config.set({"distributed.deploy.lost-worker-timeout": "1h"})
    with patient, connect(Cluster(workers=Workers(cpu=cpus))) as client:
        client.wait_for_workers(cpus + 1, timeout=60)
        yield client


def wait_for_all(client: Client, count: int, timeout: float = 60) -> None:
    """Wait until `count` workers answer. The nanny brings back a worker that was killed, under a new address."""
    deadline = time.monotonic() + timeout
    while not len(known := present(client)) == len(client.run(os.getpid, on_error="ignore")) == count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{count} workers do not answer after {timeout:g} s; the scheduler has {[*known]}")
        time.sleep(0.05)


def wait_until(true: Callable[[], bool], timeout: float = 60) -> None:
    """Wait for what other threads and processes do, and tell nobody of."""
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def addresses_of(client: Client) -> dict[str, str]:
    """Workers' addresses by name, as the scheduler has them now: `scheduler_info` would be a cache."""
    return {info["name"]: address for address, info in present(client).items()}


class Listener:
    """Hears the facts of a run and the orders that they led to; acts on the first for which a condition holds."""

    def __init__(self, when: Callable[[Any, list[Any]], bool], act: Callable[[], None]) -> None:
        self._acts = [(when, act)]
        self.heard: list[tuple[Any, list[Any]]] = []

    def then(self, when: Callable[[Any, list[Any]], bool], act: Callable[[], None]) -> Listener:
        """Act, after that, on the first for which this condition holds."""
        self._acts.append((when, act))
        return self

    @property
    def acted(self) -> bool:
        """Whether all acts were done."""
        return not self._acts

    def count(self, kind: type) -> int:
        """Facts and orders of a kind so far."""
        return sum(isinstance(each, kind) for fact, found in self.heard for each in (fact, *found))

    def __call__(self, fact: Any, found: list[Any]) -> None:
        self.heard.append((fact, found))
        if self._acts and self._acts[0][0](fact, found):
            self._acts.pop(0)[1]()


def in_mid_round(client: Client, act: Callable[[], None], *, after: float = 0.1, slow: str = "") -> Listener:
    """Act once, some seconds after the second round began: from then on workers are slow, so that it takes a while.

    slow: what makes them so, if not `SLOW_DOWN`.
    """

    def begins(fact: Any, found: list[Any]) -> bool:
        return listener.count(RoundDone) > 0 and any(isinstance(order, StartRound) for order in found)

    def slowly() -> None:
        client.run(exec, slow or SLOW_DOWN, {})
        Timer(after, act).start()

    listener = Listener(begins, slowly)
    return listener


SLOW_DOWN = """
import sys
module = sys.modules.get("daskcnn.cluster.worker.session")
for session in module._sessions.values() if module else ():
    session.replica.watch._throttle = 20.0
"""
"""On a worker: the steps of its runs take twenty times as long. A function would have this module imported."""
FOUR_SLOW_SECONDS = """
import sys, time
def since(begun, end=time.monotonic() + 4.0):
    # each step is half a second longer for four seconds: the run must see a slow worker that is fast again
    time.sleep(0.5 if time.monotonic() < end else 0.0)
    return time.perf_counter() - begun[0]
module = sys.modules.get("daskcnn.cluster.worker.session")
for session in module._sessions.values() if module else ():
    session.replica.watch.since = since
"""
"""On a worker: for four seconds the steps of its runs take half a second, on whatever machine."""


NO_GRADIENTS = """
import sys
class NoGradients:
    def __init__(self, loss):
        self._loss = loss
    def __getattr__(self, name):
        return getattr(self._loss, name)
    def __call__(self, *args, **how):
        value, dscores = self._loss(*args, **how)
        return value, dscores * float("nan")
module = sys.modules.get("daskcnn.cluster.worker.session")
for session in module._sessions.values() if module else ():
    session.replica.training_loss = NoGradients(session.replica.training_loss)
"""
"""On a worker: from the next step of its runs on gradients are NaN, which no loss shows until the step after."""


def run(
    client: Client, job: dict[str, Any], watch: Watch | None = None, resume: Path | None = None, **more: Any
) -> Result:
    """Train on this cluster."""
    earlier = None if resume is None else EarlierRun.at(resume)
    return train_job(resolve(job), client=client, progress=watch or Watch(), resume=earlier, **more)


def assert_checkpoints_stay_finite(client: Client, job: dict[str, Any]) -> None:
    """Train on this cluster; once a checkpoint is there weights become NaN. The run ends by it, and none has them."""
    watch = Watch("checkpoint", lambda: client.run(exec, NO_GRADIENTS, {}))
    with pytest.raises(Diverged, match=r"lower train\.lr"):
        run(client, job, watch)
    paths = [*Path(job["run"]["dir"]).glob("*/checkpoints/step-*")]
    assert paths
    for path in paths:
        assert all(np.isfinite(array).all() for array in load(path).arrays.values())


def count_seconds() -> None:
    """On a worker: whatever is measured there takes a second, but for its throttle."""
    from daskcnn.cluster.worker import session as worker

    ticks, own = count(0.0), count(0.0)
    clocks = {"perf_counter": lambda: next(ticks), "thread_time": lambda: next(own)}
    vars(worker)["time"] = SimpleNamespace(**clocks, sleep=lambda seconds: None)


def set_throttle(factor: float) -> None:
    """On a worker: it computes slower by this factor, in the runs to come."""
    os.environ[THROTTLE] = str(factor)


@contextmanager
def counted_seconds(client: Client, throttles: dict[str, float]) -> Iterator[None]:
    """Speeds that nothing else on the machine disturbs: every worker counts its seconds; these are throttled."""
    addresses = addresses_of(client)
    client.run(count_seconds)
    for name, factor in throttles.items():
        client.run(set_throttle, factor, workers=[addresses[name]])
    try:
        yield
    finally:
        client.run(measure_seconds)
        client.run(set_throttle, 1.0)


def measure_seconds() -> None:
    """On a worker: it has its clock again."""
    from daskcnn.cluster.worker import session as worker

    vars(worker)["time"] = time


def kill_worker(client: Client, name: str, signum: int = signal.SIGKILL) -> Callable[[], None]:
    """An act that sends a signal to a worker's process, found by the worker's name."""
    (pid,) = client.run(os.getpid, workers=[addresses_of(client)[name]]).values()
    return lambda: os.kill(pid, signum)


def one_process(tables: dict[str, Any]) -> tuple[list[float], Replica]:
    """Loss of every step of plain SGD in this process, and the replica at the end."""
    job = resolve(tables)
    dataset = open_dataset(job.data.path or "", limit=job.data.limit)
    replica = Replica(job, dataset, Device(), clock=time.perf_counter)
    losses: list[float] = []
    step = replica.step

    def noted(*args: Any, **how: Any) -> tuple[float, int | None]:
        found = step(*args, **how)
        losses.append(found[0])
        return found

    # `train` calls it for each minibatch and keeps no losses; `noted` takes what the method takes, unseen by mypy
    replica.step = noted  # type: ignore[method-assign]
    n, epochs = training_samples(job, dataset), job.train.epochs
    with single_threaded_blas():
        for epoch in range(epochs):
            progress = (epoch / epochs, (epoch + 1) / epochs)
            replica.train(((0, n),), n, presentation=epoch, progress=progress)
    return losses, replica
