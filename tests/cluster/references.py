"""Plain SGD in this process, which layer sharding has to follow. Runs that train the same are made once a session."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from daskcnn.arrays import Array, Device, single_threaded_blas
from daskcnn.job.network import training_samples
from daskcnn.job.tables import Job
from daskcnn.store import Dataset
from daskcnn.training.replica import Replica
from tests.cluster.cluster_jobs import one_process

SAME: dict[str, tuple[str, ...]] = {
    "train": ("strategy", "kernel_shares", "sub_batches", "first_conv", "replica_size"),
    "cluster": (),
    "run": (),
}
"""Keys that say where and how a job is trained, not what it comes to; none: the whole table."""


@dataclass(frozen=True)
class Reference:
    """Loss of every step, and the weights (size,) at the end."""

    losses: tuple[float, ...]
    weights: Array


def reference(tables: dict[str, Any]) -> Reference:
    """What this job comes to in one process."""
    kept = {
        name: {key: value for key, value in table.items() if key not in SAME.get(name, ())}
        for name, table in tables.items()
        if SAME.get(name) != ()
    }
    return _trained(json.dumps(kept, sort_keys=True))


@cache
def _trained(tables: str) -> Reference:
    losses, replica = one_process(json.loads(tables))
    return Reference(tuple(losses), replica.host_weights())


def trained_in_rounds(job: Job, dataset: Dataset, *, rounded: bool = False) -> np.ndarray:
    """Weights after as many rounds as epochs. rounded: to float32 around each, as on the way to a server and back."""
    replica = Replica(job, dataset, Device(), clock=lambda: 0.0)
    samples, epochs = training_samples(job, dataset), job.train.epochs

    def travel() -> None:
        if rounded:
            replica.adopt(replica.host_weights().astype(np.float32))

    with single_threaded_blas():
        for epoch in range(epochs):
            travel()
            progress = epoch / epochs, (epoch + 1) / epochs
            replica.train(((0, samples),), samples, presentation=epoch, progress=progress)
            travel()
    return np.asarray(replica.host_weights())
