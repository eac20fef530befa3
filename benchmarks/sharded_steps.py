"""Steps of layer sharding, as a run of `strategy = "layer"` makes them, and of one worker by itself."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
from distributed import Client, Future, wait

from daskcnn.arrays import single_threaded_blas
from daskcnn.cluster.layers.step_graph import LayerGraph, MinibatchStep
from daskcnn.cluster.layers.task_context import TaskContext, batch_plan
from daskcnn.cluster.link.members import wait_for_members
from daskcnn.cluster.run.admission import calibrated, calibration_row, submit_calibration
from daskcnn.cluster.run.context import RunContext
from daskcnn.cluster.shell.layer_sharded import LayerSharded
from daskcnn.cluster.worker.session import Counters, session_of
from daskcnn.datasets.job_dataset import find_dataset
from daskcnn.events import Spent
from daskcnn.job.network import training_samples
from daskcnn.job.resolve import resolve
from daskcnn.launch.prepared_job import fitted
from daskcnn.nn import StepPace
from daskcnn.sharded.balance import WorkerLinks
from daskcnn.store import load_batch
from daskcnn.training.coordinator.layer_records import REPLICA
from daskcnn.training.coordinator.roster import Measured
from daskcnn.training.coordinator.settings import STEPS_AHEAD
from daskcnn.training.coordinator.shares import REPORTS, WORTH_ANYWAY, Shares, ShareWatch

MODELS = ("50:500", "150:800", "300:1000", "500:1500")
BATCHES = (64, 128, 256, 512, 1024)
WARM = 3
"""Steps of every part of a round that are not counted."""


def _silent(stage: str, done: int, total: int) -> None:
    return None


@contextmanager
def opened(
    client: Client,
    data: str,
    model: str,
    batch: int,
    wire: str,
    *,
    workers: int = 2,
    gpus: int = 0,
    parts: int = 1,
    first: str = "auto",
    validation: int = 2000,
    relu: bool = True,
) -> Iterator[RunContext]:
    """A run of this network on so many processors and GPUs, calibrated; minibatches in so many parts.

    first: what of the first convolution is divided (train.first_conv). validation: samples that are not trained on.
    relu: False leaves the papers' networks with exactly the layers that they list.
    """
    job = resolve(
        {
            "data": {"path": data, "validation": validation},
            "model": {"name": model, "relu": relu},
            "train": {
                "strategy": "layer",
                "batch_size": batch,
                "threads": 1,
                "sub_batches": parts,
                "first_conv": first,
            },
            "cluster": {"workers": {"cpu": workers, "gpu": gpus}, "wire": wire, "stall_timeout": 900.0},
        }
    )
    prepared = fitted(job, find_dataset(job, progress=_silent, warn=print))
    members = wait_for_members(client, job.cluster.workers, job.cluster.wait, lambda: None)
    name = f"scaling-{time.time_ns():x}"
    told: dict[str, Any] = {"emit": lambda event: None, "save": lambda state: None}
    context = RunContext.of(client, name, job, prepared.dataset, members, **told)
    try:
        for worker, future in {name: submit_calibration(context, name) for name in context.workers.alive}.items():
            context.results.gather({worker: future})
            calibrated(context, worker, future, time.monotonic())
        yield context
    finally:
        context.close()


def alone(at: TaskContext, seconds: float) -> list[float]:
    """When each whole step of this worker by itself ended, for about so many seconds."""
    replica = session_of(at.run).replica
    dataset, size = replica.dataset, replica.batch_size
    plan = batch_plan(replica.job, training_samples(replica.job, dataset), 0)
    batch = load_batch(dataset, dataset.train, plan, replica.job.model.dtype, np.arange(size))
    ends, step = [], partial(replica.step, batch, StepPace(1e-4))
    with single_threaded_blas():
        for _ in range(WARM):
            replica.watch.seconds(step)
        begun = time.time()
        ends.append(begun)
        while time.time() - begun < seconds or len(ends) < 4:
            replica.watch.seconds(step)  # throttled as in a run
            ends.append(time.time())
    return ends


def alone_on(context: RunContext, workers: Sequence[str], seconds: float) -> list[float]:
    """Steps a second of each of these workers, all at once, while all are at work; parts of steps count."""
    tasks = {w: TaskContext(context.name, w, 0, 0, "float32") for w in workers}
    futures = {w: context.dispatch.submit("alone", alone, at, seconds, worker=w) for w, at in tasks.items()}
    ends = context.results.gather(futures)
    first, last = max(own[0] for own in ends.values()), min(own[-1] for own in ends.values())
    if last <= first:
        raise RuntimeError(f"{seconds:g} s: no two steps at the same time; give more")
    made = [np.interp([first, last], own, range(len(own))) for own in ends.values()]
    return [float(end - begin) / (last - first) for begin, end in made]


class Sharded:
    """Steps of all workers together."""

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self.driver, self.number = LayerSharded(context, None), 0
        self.graph: LayerGraph = None  # type: ignore[assignment]
        self._place()
        self.batch = context.job.train.batch_size
        self.steps_per_epoch = context.samples // self.batch

    def _place(self) -> None:
        """By what is known of the workers now."""
        driver, generation = self.driver, self.graph.generation if self.graph else 0
        self.graph = LayerGraph(self.context, driver.stages, driver.layout)
        self.graph.generation = generation
        self.graph.place(driver.state.weights, driver.state.optimizers[REPLICA], self.number)

    @property
    def shares(self) -> Shares:
        """The cut that steps are made by."""
        return Shares(self.graph.balance, self.graph.kernels)

    def settle(self, seconds: float) -> None:
        """Shares by what steps take, for about so many seconds, as a run has behind its first snapshot."""
        watch = ShareWatch(self.shares)
        for _ in range(REPORTS):
            counted = self.seconds(seconds / REPORTS, warm=1)[1]
            watch.take({worker: Spent(name=worker, **asdict(own)) for worker, own in counted.items()})
        if move := watch.move(WORTH_ANYWAY):
            known = self.context.calibrations
            before = {
                name: Measured(known[name].seconds_per_sample, calibration_row(member, known[name]))
                for name, member in self.context.workers.alive.items()
            }
            self.driver.balance(self.graph.home, move.measured(before), self.context.links or WorkerLinks())
            self._place()

    def seconds(self, seconds: float, *, warm: int = WARM) -> tuple[list[float], dict[str, Counters], int]:
        """Of each step, for about so many seconds; what the workers counted meanwhile, over how many steps."""
        flight: deque[Future] = deque()
        for _ in range(warm):
            self._submit(flight)
        while flight:
            self.context.results.result(flight.popleft())
        self._counters()
        first, begun, ends = self.number, time.monotonic(), [time.monotonic()]
        while time.monotonic() - begun < seconds or len(ends) < 4:
            while len(flight) < STEPS_AHEAD:
                self._submit(flight)
            self.context.results.result(flight.popleft())
            ends.append(time.monotonic())
        while flight:
            self.context.results.result(flight.popleft())
            ends.append(time.monotonic())
        wait(list(self.graph.held.values()))  # a score is there before the way back
        return [b - a for a, b in itertools.pairwise(ends)], self._counters(), self.number - first

    def _submit(self, flight: deque[Future]) -> None:
        presentation, position = divmod(self.number, self.steps_per_epoch)
        flight.append(self.graph.submit(MinibatchStep(self.number, presentation, position, StepPace(1e-4), self.batch)))
        self.number += 1

    def _counters(self) -> dict[str, Counters]:
        return self.context.results.gather({w: self.graph.counters(w) for w in self.context.workers.alive})
