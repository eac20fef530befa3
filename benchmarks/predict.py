"""Predicting 50,000 images over two workers of a cluster, against two independent processes of half of them each.

    python -m benchmarks.predict [--data data/cifar10.zarr] [--model quick] [--rounds 5] [--json FILE]

Without --data, random images of CIFAR-10's shape are made. Both ways take turns: what else the machine does meets both.
Starting processes, imports and a first part for warming up are not counted. The cluster's time goes on until all parts
are kept on the disk; writing the table is told apart. Exit 1 if the median ratio is below the bar.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.loader import random_data
from daskcnn.arrays import cpu_count, device_profile
from daskcnn.cluster.link.connect import MEMORY, connect
from daskcnn.cluster.spread.spread import spread
from daskcnn.job.network import initial_weights
from daskcnn.job.resolve import resolve
from daskcnn.job.tables import Cluster, Workers
from daskcnn.store import open_dataset
from daskcnn.store.image_facts import Facts
from daskcnn.trained.predictions.parts import KeptParts, PredictionTask, identity
from daskcnn.trained.predictions.sources import Part, PredictedSource, of_store
from daskcnn.trained.predictions.tables import Columns, write_table
from daskcnn.training.trained_network import Classifier

BAR = 0.92
PROCESSES = 2
Timed = Callable[[], dict[str, float]]


def task_of(path: str, model: str) -> tuple[PredictionTask, PredictedSource]:
    """The network, with first weights, and all training images."""
    dataset = open_dataset(path)
    source, job, facts = of_store(path, "train", dataset), resolve({"model": {"name": model}}), Facts.of(dataset)
    return PredictionTask(Classifier(job, facts, initial_weights(job, facts)[1]), source.read), source


def forget() -> None:
    """Read chunks anew from here on; on a worker, whose own cache it is."""
    from daskcnn.store.chunk_source import CACHE

    CACHE.clear()


def independent(number: int, task: PredictionTask, parts: list[Part], pipe: Any) -> None:
    """A process by itself: at every word from the pipe it predicts its parts, and answers."""
    task.predict(parts[0], "cpu", 1)
    pipe.send("ready")
    while pipe.recv():
        forget()
        anew = replace(task)  # of which a predictor is made, as a worker makes one for every call
        for part in parts:
            anew.predict(part, "cpu", 1)
        pipe.send("done")


@contextmanager
def processes(task: PredictionTask, source: PredictedSource) -> Iterator[Timed]:
    """Two processes that know nothing of each other."""
    parts, context = source.parts, get_context("spawn")
    os.environ.update(MEMORY | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
    pipes = []
    for number in range(PROCESSES):
        here, there = context.Pipe()
        context.Process(
            target=independent, args=(number, task, list(parts[number::PROCESSES]), there), daemon=True
        ).start()
        pipes.append(here)
    for pipe in pipes:
        pipe.recv()

    def timed() -> dict[str, float]:
        begun = time.perf_counter()
        for pipe in pipes:
            pipe.send(True)
        for pipe in pipes:
            pipe.recv()
        return {"independent": time.perf_counter() - begun}

    yield timed
    for pipe in pipes:
        pipe.send(False)


@contextmanager
def cluster(task: PredictionTask, source: PredictedSource, folder: Path) -> Iterator[Timed]:
    """Two workers of a local cluster."""
    settings = Cluster(workers=Workers(cpu=PROCESSES))
    parts = source.parts
    columns = Columns(source.key, False, task.classifier.classes, source.label_names)
    with connect(settings, server=False) as client:
        client.wait_for_workers(PROCESSES)
        rounds = iter(range(1_000_000))

        def predict(some: tuple[Part, ...], out: Path) -> KeptParts:
            kept = KeptParts(out, identity(task.classifier, source), len(task.classifier.classes))
            for part, found in spread(client, task.predict, some, settings, whole=True, warn=print):
                kept.keep(part, found)
            return kept

        def timed() -> dict[str, float]:
            client.run(forget)
            out = folder / f"{next(rounds)}.csv"
            begun = time.perf_counter()
            kept = predict(parts, out)
            predicted = time.perf_counter()
            write_table(out, columns, sum(map(len, parts)), kept.read(parts))
            written = time.perf_counter()
            kept.remove()
            return {"cluster": predicted - begun, "table": written - predicted}

        predict(parts[: 2 * PROCESSES], folder / "warm.csv")
        yield timed


def measure(path: str, model: str, rounds: int) -> dict[str, Any]:
    """Seconds of each way by turns; the one that begins takes turns too."""
    task, source = task_of(path, model)
    found: list[dict[str, float]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        processes(task, source) as alone,
        cluster(task, source, Path(folder)) as together,
    ):
        for number in range(rounds):
            both = (alone, together) if number % 2 else (together, alone)
            found.append({name: seconds for way in both for name, seconds in way().items()})
            print({name: round(seconds, 2) for name, seconds in found[-1].items()}, file=sys.stderr, flush=True)
    ratios = [turn["independent"] / turn["cluster"] for turn in found]
    cpu = device_profile("cpu", cpu_count())
    return {
        "machine": {"processor": cpu.name, "cores": cpu.threads, "load": os.getloadavg()[0]},
        "model": model,
        "images": sum(map(len, source.parts)),
        "seconds": found,
        "ratios": [round(ratio, 3) for ratio in ratios],
        "median": round(statistics.median(ratios), 3),
        "with the table": round(
            statistics.median(turn["independent"] / (turn["cluster"] + turn["table"]) for turn in found), 3
        ),
        "bar": BAR,
    }


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--model", default="quick")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.data or random_data(Path(folder) / "random.zarr")
        found = measure(path, arguments.model, arguments.rounds)
    print(json.dumps(found, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(found["median"] < BAR)


if __name__ == "__main__":
    main()
