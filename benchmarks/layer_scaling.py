"""Layer sharding measured: a step of two one-thread workers against one, for the papers' networks and batches.

    python benchmarks/layer_scaling.py --data data/cifar10.zarr [--models 50:500 …] [--batches 64 256] [--json FILE]

Shares are settled first, by what some steps take, as a run does behind its first snapshot.
In each round one worker makes whole steps by itself, then both do at the same time (the machine's own ceiling), then
they make sharded steps together. Medians count. Figures go to FILE as each configuration is done, in place of older
ones of the same configuration. Exit 1 where a network misses its bar in its best batch. --simulate goes on from the
figures in FILE to more devices and other links, without measuring anew (`layer_study`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from distributed import Client, Future, wait
from layer_study import simulate

from daskcnn.arrays import cpu_count, device_profile, single_threaded_blas
from daskcnn.cluster.layers.step_graph import LayerGraph, MinibatchStep
from daskcnn.cluster.layers.task_context import TaskContext, batch_plan
from daskcnn.cluster.link.connect import connect
from daskcnn.cluster.link.members import wait_for_members
from daskcnn.cluster.run.admission import calibrated, calibration_row, submit_calibration
from daskcnn.cluster.run.context import RunContext
from daskcnn.cluster.shell.layer_sharded import LayerSharded
from daskcnn.cluster.worker.session import Counters, session_of
from daskcnn.datasets.job_dataset import find_dataset
from daskcnn.events import Spent
from daskcnn.job.network import training_samples
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import Cluster, Workers
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
BARS = {"50:500": 1.45, "150:800": 1.65, "300:1000": 1.75, "500:1500": 1.85}
OF_CEILING = 0.92
"""Of the machine's own ceiling, where the bar is higher than that."""
TINY = "8:8"
"""A network that computes next to nothing: what a step takes is Dask's."""
RESULTS = Path(__file__).parent / "results" / "layer_scaling.json"
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
) -> Iterator[RunContext]:
    """A run of this network on so many processors and GPUs, calibrated; minibatches in so many parts.

    first: what of the first convolution is divided (train.first_conv). validation: samples that are not trained on.
    """
    job = resolve(
        {
            "data": {"path": data, "validation": validation},
            "model": {"name": model},
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
    ends = []
    with single_threaded_blas():
        for _ in range(WARM):
            replica.step(batch, StepPace(1e-4))
        begun = time.time()
        ends.append(begun)
        while time.time() - begun < seconds or len(ends) < 4:
            replica.step(batch, StepPace(1e-4))
            ends.append(time.time())
    return ends


def alone_on(context: RunContext, workers: Sequence[str], seconds: float) -> list[float]:
    """Steps a second of each of these workers, all at once; where they overlap."""
    tasks = {w: TaskContext(context.name, w, 0, 0, "float32") for w in workers}
    futures = {w: context.dispatch.submit("alone", alone, at, seconds, worker=w) for w, at in tasks.items()}
    ends = context.results.gather(futures)
    first, last = max(own[0] for own in ends.values()), min(own[-1] for own in ends.values())
    inside = [[t for t in own if first <= t <= last] for own in ends.values()]
    return [(len(own) - 1) / (own[-1] - own[0]) for own in inside]


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


def measure(
    client: Client,
    data: str,
    model: str,
    batch: int,
    *,
    rounds: int,
    seconds: float,
    wire: str,
    parts: int = 1,
    first: str = "auto",
) -> Any:
    """One configuration: seconds of a step, and what they are made of."""
    with opened(client, data, model, batch, wire, parts=parts, first=first) as context:
        workers, sharded = list(context.workers.alive), Sharded(context)
        sharded.settle(seconds)
        one, both, together, busy, conv, moved = [], [], [], [], [], []
        for _ in range(rounds):
            one.append(alone_on(context, workers[:1], seconds)[0])
            both.append(sum(alone_on(context, workers, seconds)))
            steps, counters, count = sharded.seconds(seconds)
            together.append(median(steps))
            busy.append(max(c.busy for c in counters.values()) / count)
            conv.append(max(sum(c.conv_seconds.values()) for c in counters.values()) / count)
            moved.append(sum(c.bytes_up for c in counters.values()) / count)
        cut = sharded.shares.event()
        found: dict[str, Any] = {
            "one": 1 / median(one),
            "ceiling": median(both) / median(one),
            "step": median(together),
            "busy": median(busy),
            "shards": median(conv),
            "bytes": median(moved),
            "kernels": cut.kernels,
            "divided": next(iter(cut.divided.values())),
        }
    return {**found, "speedup": found["one"] / found["step"]}


def bar(model: str, found: dict[str, Any]) -> float:
    """What the speed-up is to be."""
    return min(BARS.get(model, 0.0), OF_CEILING * found["ceiling"])


def show(model: str, batch: int, found: dict[str, Any]) -> None:
    """A line."""
    print(
        f"{model:9} batch {batch:5}: one {1e3 * found['one']:7.0f} ms, two {1e3 * found['step']:7.0f} ms = "
        f"{found['speedup']:.2f} (ceiling {found['ceiling']:.2f}, bar {bar(model, found):.2f}); busiest "
        f"{1e3 * found['busy']:.0f} ms, the rest {1e3 * (found['step'] - found['busy']):.0f} ms, "
        f"{found['bytes'] / 1e6:.1f} MB",
        flush=True,
    )


def main() -> int:
    """Exit code 1 where a bar is missed."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", default="data/cifar10.zarr", help="the prepared data set")
    options.add_argument("--models", nargs="+", default=[*MODELS, TINY])
    options.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--seconds", type=float, default=10.0, help="of each part of a round; four steps at least")
    options.add_argument("--wire", choices=("float32", "float16"), default="float32")
    options.add_argument("--sub-batches", type=int, default=1, help="parts of a minibatch (train.sub_batches)")
    options.add_argument("--first-conv", choices=("auto", "kernels", "samples"), default="auto")
    options.add_argument("--json", type=Path, metavar="FILE")
    options.add_argument("--simulate", action="store_true", help="tables and pictures from what FILE has")
    given = options.parse_args()
    if given.simulate:
        simulate(given.json or RESULTS)
        return 0
    kept = json.loads(given.json.read_text()) if given.json and given.json.exists() else {"measured": {}}
    kept["machine"] = {"processor": device_profile("cpu", cpu_count()).name, "cores": cpu_count()}
    with connect(Cluster(workers=Workers(cpu=2))) as client:
        for model in given.models:
            for batch in given.batches:
                args = client, given.data, model, batch
                how = {"rounds": given.rounds, "seconds": given.seconds, "wire": given.wire}
                found = measure(*args, **how, parts=given.sub_batches, first=given.first_conv)
                show(model, batch, found)
                parts = f" in {given.sub_batches}" if given.sub_batches > 1 else ""
                by = f" by {given.first_conv}" if given.first_conv != "auto" else ""
                kept["measured"][f"{model} {batch} {given.wire}{parts}{by}"] = found
                if given.json:
                    given.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    best = {
        m: max((kept["measured"][k] for k in kept["measured"] if k.split()[0] == m), key=_by_bar(m))
        for m in given.models
    }
    missed = [m for m, found in best.items() if m in BARS and found["speedup"] < bar(m, found)]
    print("missed: " + ", ".join(missed) if missed else "every bar is met")
    return int(bool(missed))


def _by_bar(model: str) -> Any:
    return lambda found: found["speedup"] - bar(model, found)


if __name__ == "__main__":
    raise SystemExit(main())
