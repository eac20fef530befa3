"""Small jobs, and ways to run them on real processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from distributed import Client

from daskcnn.arrays import Device, single_threaded_blas
from daskcnn.cluster.connect import connect
from daskcnn.config import Cluster, Workers
from daskcnn.launch import runner
from daskcnn.launch.resolve import resolve
from daskcnn.launch.runner import Result, train_job
from daskcnn.replica import Replica, training_samples
from daskcnn.store import open_dataset

runner.SETTLE = 0.0  # the clusters made here are complete

LAYERS = [
    {"layer": "conv", "kernels": 6, "size": 3, "pad": 1},
    {"layer": "relu"},
    {"layer": "maxpool", "size": 4},
    {"layer": "conv", "kernels": 9, "size": 3, "pad": 1},
    {"layer": "relu"},
    {"layer": "averagepool", "size": 2},
    {"layer": "dense", "units": 10},
]


def small_job(path: str, runs: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """The tables of a job that takes seconds; `sections` are merged over them."""
    job: dict[str, Any] = {
        "data": {"path": path, "limit": 900, "validation": 100},
        "model": {"layers": LAYERS},
        "train": {"epochs": 2, "batch_size": 32, "lr": 0.01},
        "run": {"dir": runs},
    }
    for name, keys in sections.items():
        job[name] = job.get(name, {}) | keys
    return job


class Watch:
    """A display that remembers events, and acts on the first of a kind that a condition holds for."""

    def __init__(self, kind: str = "", act: Callable[[], None] | None = None, when: Any = lambda event: True) -> None:
        self.events: list[dict[str, Any]] = []
        self._kind, self._act, self._when = kind, act, when

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def handle(self, event: Any) -> None:
        self.events.append(dict(event))
        if self._act and event["event"] == self._kind and self._when(event):
            act, self._act = self._act, None
            act()

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]


@contextmanager
def local_cluster(cpus: int) -> Iterator[Client]:
    """Processes as a job without a scheduler starts them."""
    with connect(Cluster(workers=Workers(cpu=cpus))) as client:
        client.wait_for_workers(cpus + 1, timeout=60)
        yield client


def run(client: Client, job: dict[str, Any], watch: Watch | None = None, **more: Any) -> Result:
    """Train on this cluster."""
    return train_job(resolve(job), client=client, progress=watch or Watch(), **more)


def kill_worker(client: Client, name: str, signum: int = signal.SIGKILL) -> Callable[[], None]:
    """An act that sends a signal to a worker's process, found by the worker's name."""
    pids = client.run(os.getpid)
    by_name = {info["name"]: address for address, info in client.scheduler_info(n_workers=-1)["workers"].items()}
    return lambda: os.kill(pids[by_name[name]], signum)


def one_process(tables: dict[str, Any]) -> tuple[list[float], Replica]:
    """Loss of every step of plain SGD in this process, and the replica at the end."""
    job = resolve(tables)
    dataset = open_dataset(job.data.path or "", limit=job.data.limit)
    replica = Replica(job, dataset, Device(), clock=time.perf_counter)
    losses: list[float] = []
    step = replica.step
    replica.step = lambda *args: losses.append((out := step(*args))[0]) or out  # type: ignore[method-assign,func-returns-value]
    n, epochs = training_samples(job, dataset), job.train.epochs
    with single_threaded_blas():
        for epoch in range(epochs):
            progress = (epoch / epochs, (epoch + 1) / epochs)
            replica.train(((0, n),), n, presentation=epoch, progress=progress)
    return losses, replica
