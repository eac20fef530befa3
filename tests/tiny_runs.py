"""Data sets and runs small enough to make in a test: no cluster has trained them, but the files are real ones."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from daskcnn.job.network import optimizer_of
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import Job
from daskcnn.launch.prepared_job import fitted
from daskcnn.nn import OptimizerState
from daskcnn.nn.score import Score
from daskcnn.runs.checkpoint import save
from daskcnn.runs.directory import RunDirectory
from daskcnn.runs.state import TrainingState, to_checkpoint
from daskcnn.runs.summary import Evaluated, Summary, Traffic
from daskcnn.store import open_dataset
from daskcnn.store.making.writer import write
from daskcnn.store.manifest import Source, describe

CLASSES = tuple("abcdefghij")
LAYERS: list[dict[str, Any]] = [
    {"layer": "conv", "kernels": 4, "size": 3, "pad": 1},
    {"layer": "batchnorm"},
    {"layer": "relu"},
    {"layer": "maxpool", "size": 4},
    {"layer": "dense", "units": 10},
]


def tiny_data(
    folder: Path, *, name: str = "synthetic", train: int = 120, test: int = 60, shape: tuple[int, int, int] = (8, 8, 3)
) -> str:
    """The path of a store of random images, in chunks of 50, that says it is the data set `name`."""
    rng = np.random.default_rng(1)

    def part(count: int) -> tuple[Any, Any]:
        return rng.integers(0, 256, (count, *shape), dtype=np.uint8), (np.arange(count) % 10).astype(np.uint8)

    source = Source(name, CLASSES, part(train), part(test), {})
    path = str(folder / f"{name}.zarr")
    write(source, describe(source, chunk=50, order="shuffled", seed=0), path, lambda _: None)
    return path


def tiny_job(path: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """The tables of a job on such a store; `sections` are merged over them."""
    data = {"path": path, "validation": 20}
    train = {"strategy": "bsp", "epochs": 2, "optimizer": "sgd", "lr": 0.02, "batch_size": 128, "schedule": "poly"}
    job: dict[str, Any] = {"data": data, "model": {"layers": LAYERS}, "train": train}
    for name, keys in sections.items():
        job[name] = job.get(name, {}) | keys
    return job


def random_state(job: Job, *, seed: int = 0, step: int = 7, validation: Score | None = None) -> TrainingState:
    """A state of the job's network with random weights and the optimizer's state of two workers."""
    prepared = fitted(job, open_dataset(str(job.data.path)))
    layout = prepared.layout
    rng = np.random.default_rng(seed)
    weights = rng.uniform(0.1, 1, layout.size).astype(layout.dtype)
    shape = len(optimizer_of(job).vectors), layout.parameter_size
    optimizers = {w: OptimizerState(rng.standard_normal(shape).astype(layout.dtype), 5) for w in ("w0", "w1")}
    return TrainingState(step, 1.5, weights, optimizers, _book(prepared.samples), validation)


def _book(samples: int) -> dict[str, Any]:
    """What the coordinator of a data-parallel run keeps: two workers have half of the samples each."""
    half, names = samples // 2, ("w0", "w1")
    workers = [
        {"name": name, "ranges": [list(ends)], "granted": 1}
        for name, ends in zip(names, ((0, half), (half, samples)), strict=True)
    ]
    return {
        "rounds": {
            "allocation": {"total": samples, "workers": workers, "free": []},
            "seconds": dict.fromkeys(names, 0.01),
            "numbers": dict.fromkeys(names, 1),
            "left": samples,
        },
        "server_epoch": 1,
        "best": 0.2,
        "worse": 1,
    }


def tiny_run(folder: Path, raw: dict[str, Any], *states: TrainingState, status: str | None = None) -> Path:
    """A run directory with a checkpoint for each state, and with a summary where a status is given."""
    job = resolve(raw)
    dataset = open_dataset(str(job.data.path))
    layout = fitted(job, dataset).layout
    with RunDirectory.create(folder, "run", strategy="sgwu", now=datetime(2026, 11, 20, tzinfo=UTC)) as run:
        run.write_job(job.model_dump(mode="json"))
        for state in states:
            save(run.checkpoints, to_checkpoint(state, layout, dataset, 12.5, optimizer_of(job).vectors))
        if status:
            run.write_summary(_summary(run.path, status))
    return run.path


def _summary(path: Path, status: str) -> dict[str, Any]:
    return Summary(
        run=str(path),
        status=status,
        strategy="sgwu",
        epochs=2,
        seconds=10.0,
        images_per_second=20.0,
        test=Evaluated(accuracy=0.5, loss=1.0),
        validation=None,
        bytes=Traffic(up=1, down=2),
        workers=[],
        checkpoint=None,
    ).model_dump()
