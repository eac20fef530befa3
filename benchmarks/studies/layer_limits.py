"""Layer sharding between unequal workers, and over a long time.

    python -m benchmarks.studies.layer_limits --data data/cifar10.zarr [--models 50:500 …] [--json FILE]

1. Two one-thread workers, the second throttled to about a third. A run of `strategy = "layer"` moves kernels until both
   take as long; then the convolutions of a step, with the layers spread with them, should take t1·t2 / (t1 + t2), where
   t1 and t2 are what each takes for all kernels. By itself a throttled worker is slower than it was told to be, its
   caches being cold after every pause, so both are taken from the run: seconds of a worker's shards over their part of
   the kernels. Beside it by calibration, on warm caches. Exit 1 where that ratio is over 1.1.
2. `--steps 2000` steps of a small network: memory of scheduler and driver (one process) and of the workers.
   Exit 1 where any of them has grown by more than a twentieth from the second quarter of the run to the last.

What FILE has is not measured again.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Self, TypeVar

import psutil
from distributed import Client

from benchmarks.runs import THROTTLED, kept_in, load, machine, markdown, save, throttle
from daskcnn.cluster.link.connect import connect
from daskcnn.events import EpochEnded, Event, KernelsSharded, StepsEnded, WorkersCalibrated
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import Cluster, Workers
from daskcnn.launch.training import train_job

RESULTS = Path(__file__).parent / "results" / "layer_limits.json"
MODELS = {"50:500": 256, "150:800": 64, "300:1000": 64, "500:1500": 64}
"""And the minibatch of each."""
EPOCHS, STEPS = 4, 40
"""Of a run with unequal workers; the last epoch counts."""
WITHIN = 1.1
GROWTH = 1.05
SMALL = "8:8"
E = TypeVar("E", bound=Event)


class Watch:
    """A display that keeps events, and does something at each."""

    def __init__(self, at: Callable[[Event], None] = lambda event: None) -> None:
        self.events: list[Event] = []
        self._at = at

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def handle(self, event: Event) -> None:
        self.events.append(event)
        self._at(event)

    def of(self, model: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, model)]


@contextmanager
def two_workers() -> Iterator[Client]:
    """Processes with one thread each."""
    with connect(Cluster(workers=Workers(cpu=2))) as client:
        client.wait_for_workers(3, timeout=60)
        yield client


def trained(client: Client, data: str, model: str, batch: int, epochs: int, steps: int, watch: Watch) -> None:
    """A run of so many steps an epoch."""
    with tempfile.TemporaryDirectory() as runs:
        job = {
            "data": {"name": "cifar10", "path": data, "limit": batch * steps + 100, "validation": 100},
            "model": {"name": model},
            "train": {"strategy": "layer", "batch_size": batch, "threads": 1, "epochs": epochs, "lr": 1e-4},
            "cluster": {"workers": {"cpu": 2}, "stall_timeout": 900.0},
            "run": {"dir": runs, "checkpoint_every": 1000.0},
        }
        train_job(resolve(job), client=client, progress=watch)


# --- unequal workers ---


def unequal(data: str, model: str, batch: int) -> dict[str, Any]:
    """Seconds of a step's convolutions of both workers, and what they should be."""
    watch = Watch()
    with two_workers() as client:
        throttle(client, THROTTLED)
        trained(client, data, model, batch, EPOCHS, STEPS, watch)
    kernels = watch.of(KernelsSharded)[-1].kernels
    before, last = watch.of(EpochEnded)[-2:]
    made = last.step - before.step
    taken = {row.name: row.conv_seconds for row in last.workers}
    whole = {stage: sum(own[stage] for own in kernels.values()) for stage in kernels["cpu-0"]}
    alone = [
        sum(taken[w][stage] / made * whole[stage] / own[stage] for stage in whole if own[stage])
        for w, own in kernels.items()
    ]
    rows = watch.of(WorkersCalibrated)[0].workers
    calibrated = [batch * sum(row.conv_seconds.values()) for row in rows]
    step = sum(max(own.get(stage, 0.0) for own in taken.values()) / made for stage in whole)
    return {
        "batch": batch,
        "kernels": kernels,
        "step": last.seconds / made,
        "convolutions": step,
        "alone": alone,
        "ideal": ideal(alone),
        "calibrated": calibrated,
        "ideal_by_calibration": ideal(calibrated),
        "moves": len(watch.of(KernelsSharded)) - 1,
    }


def ideal(seconds: list[float]) -> float:
    """Of workers that share out what takes each of them so long (Marques et al., eq. 1)."""
    return 1 / sum(1 / each for each in seconds)


# --- a long run ---


def long_run(data: str, steps: int) -> dict[str, Any]:
    """MiB of every process, quarter by quarter."""
    taken: dict[str, list[float]] = {}
    with two_workers() as client:
        names = {a: i["name"] for a, i in client.scheduler_info(n_workers=-1)["workers"].items()}
        processes = {names[a]: psutil.Process(pid) for a, pid in client.run(os.getpid).items()}
        processes["scheduler and driver"] = psutil.Process()

        def look(event: Event) -> None:
            if isinstance(event, StepsEnded):
                for name, process in processes.items():
                    taken.setdefault(name, []).append(process.memory_info().rss / 2**20)

        trained(client, data, SMALL, 32, max(1, steps // 500), min(steps, 500), Watch(look))
    return {name: [median(part) for part in _quarters(each)] for name, each in taken.items()}


def _quarters(each: list[float]) -> Iterator[list[float]]:
    size = max(1, len(each) // 4)
    return (each[i * size : (i + 1) * size] for i in range(4))


def main() -> int:
    """Exit code 1 where a bar is missed."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", default="data/cifar10.zarr", help="the prepared data set")
    options.add_argument("--models", nargs="*", default=[*MODELS])
    options.add_argument("--steps", type=int, default=2000, help="of the long run; 0: none")
    options.add_argument("--json", type=Path, metavar="FILE")
    given = options.parse_args()
    kept, missed = kept_in(given.json, machine()), False
    ratios = kept.setdefault("unequal", {})
    for model in given.models:
        if model not in ratios:
            ratios[model] = unequal(given.data, model, MODELS[model])
            keep(given.json, kept)
        found = ratios[model]
        ratio = found["convolutions"] / found["ideal"]
        missed |= ratio > WITHIN
        one, other = (1e3 * each for each in found["alone"])
        print(
            f"{model:9} batch {found['batch']}: alone {one:.0f} and {other:.0f} ms, together "
            f"{1e3 * found['convolutions']:.0f} ms, {ratio:.2f} of the ideal; by calibration "
            f"{found['convolutions'] / found['ideal_by_calibration']:.2f}; {found['moves']} moves",
            flush=True,
        )
    if given.steps:
        if "memory_mib" not in kept:
            kept["memory_mib"] = long_run(given.data, given.steps)
            keep(given.json, kept)
        for name, quarters in kept["memory_mib"].items():
            missed |= quarters[3] > GROWTH * quarters[1]
            print(
                f"{name:21} " + " ".join(f"{each:6.0f}" for each in quarters) + " MiB, quarter by quarter", flush=True
            )
    return int(missed)


def tables() -> Iterator[str]:
    """Yield those of the kept results."""
    kept = load(RESULTS)
    head = ["network, batch", "alone, ms", "together, ms", "of the ideal", "by the calibration", "moves"]
    rows = []
    for model, found in kept["unequal"].items():
        together, alone = found["convolutions"], " and ".join(f"{1e3 * each:,.0f}" for each in found["alone"])
        ratios = [f"{together / found[key]:.2f}" for key in ("ideal", "ideal_by_calibration")]
        rows.append([f"`{model}`, {found['batch']}", alone, f"{1e3 * together:.0f}", *ratios, str(found["moves"])])
    yield markdown(head, rows, left=[0])
    memory = [[name, *(f"{each:.0f}" for each in quarters)] for name, quarters in kept["memory_mib"].items()]
    yield markdown(["MiB", *(f"{which} quarter" for which in ("first", "second", "third", "last"))], memory, left=[0])


def keep(path: Path | None, found: Mapping[str, Any]) -> None:
    """All that was measured so far."""
    if path:
        save(path, found)


if __name__ == "__main__":
    raise SystemExit(main())
