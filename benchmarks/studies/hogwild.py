"""Hogwild: threads that each make minibatches of their own, on one vector of weights and without locks.

    python -m benchmarks.studies.hogwild --data data/cifar10.zarr [--threads 2] [--rates 0.005 0.01 0.02] [--json FILE]
    python -m benchmarks.studies.hogwild --data data/cifar10.zarr --timed [--rates 0.005] [--json FILE]
    python -m benchmarks.studies.hogwild --data data/cifar10.zarr --speed [--models rules quick lenet5] [--json FILE]

Hegde and Usmani's section 2 has it as the second use of cores. Each thread is a replica with an optimizer's state of
its own. The weights of all are the same memory, which each reads while others write. Beside it: what a worker does
here, where threads share each minibatch, so that steps follow one another. Rates, the part of CIFAR-10, epochs and the
batch are the same. Runs that FILE has are not made again.

--timed: the same trainings on two threads each, with the seconds of training up to the end of each epoch. --speed:
images a second of steps alone, Hogwild's and the shared ones, in turns, on random images; medians count.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import PAUSE, TWO_CONVOLUTIONS, Configuration, in_fresh_process
from benchmarks.runs import kept_in, load, machine, markdown, save, told_time
from daskcnn.arrays import Device, cpu_count, keep_freed_memory, single_threaded_blas
from daskcnn.errors import Diverged
from daskcnn.job.resolve import resolve
from daskcnn.nn import StepPace
from daskcnn.store import Batch, open_dataset
from daskcnn.training.replica import Replica
from daskcnn.training.worker_calibration import tune_convolutions

RESULTS = Path(__file__).parent / "results" / "hogwild.json"
LIMIT, VALIDATION, EPOCHS, BATCH = 6000, 1500, 10, 32
SHARED, HOGWILD = "threads share each step", "Hogwild"
"""The first has the same numbers with any number of threads; it is trained with one."""
LR = 1e-5
TARGETS = (0.4, 0.45, 0.5)
STEPS = 10
"""Steps of a turn that is timed."""


def share(replicas: Sequence[Replica]) -> None:
    """Let all have the first one's weights, in its memory."""
    for each in replicas[1:]:
        each.weights = replicas[0].weights
        each._params, each._state = each.layout.views(each.weights)


def together(works: Sequence[Callable[[], Any]]) -> None:
    """Make each call in a thread of its own. Raises Diverged where one does."""
    failed: list[Diverged] = []

    def kept(work: Callable[[], Any]) -> None:
        try:
            work()
        except Diverged as error:
            failed.append(error)

    threads = [threading.Thread(target=kept, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


# --- accuracy ---


def accuracies(way: str, threads: int, lr: float, seed: int, data: str) -> list[float]:
    """Accuracy on the validation samples after each epoch; shorter where it diverged."""
    return [accuracy for _, accuracy in trained(way, threads, lr, seed, data)]


def trained(way: str, threads: int, lr: float, seed: int, data: str) -> list[tuple[float, float]]:
    """Seconds of training up to each epoch's end, and the accuracy there; shorter where it diverged."""
    job = resolve(
        {
            "data": {"name": "cifar10", "path": data, "limit": LIMIT, "validation": VALIDATION},
            "model": {"layers": TWO_CONVOLUTIONS},
            "train": {"batch_size": BATCH, "optimizer": "sgd", "lr": lr, "schedule": "poly", "seed": seed},
        }
    )
    dataset, count = open_dataset(data, limit=LIMIT), threads if way == HOGWILD else 1
    devices = [Device.of("cpu", threads=threads // count) for _ in range(count)]
    replicas = [Replica(job, dataset, device, clock=time.perf_counter) for device in devices]
    share(replicas)
    samples, found, taken = LIMIT - VALIDATION, list[tuple[float, float]](), 0.0
    keep_freed_memory()  # as a worker does
    edges = [samples * i // count for i in range(count + 1)]
    with single_threaded_blas():
        for replica in replicas:
            tune_convolutions(replica)
        for epoch in range(EPOCHS):
            progress = epoch / EPOCHS, (epoch + 1) / EPOCHS

            def work(i: int, progress: tuple[float, float] = progress, epoch: int = epoch) -> None:
                own = edges[i], edges[i + 1]
                replicas[i].train((own,), own[1] - own[0], presentation=epoch, progress=progress)

            begun = time.perf_counter()
            try:
                together([lambda i=i, work=work: work(i) for i in range(count)])  # type: ignore[misc]
            except Diverged:
                return found
            taken += time.perf_counter() - begun
            score = replicas[0].evaluate(dataset.train, samples, LIMIT)
            found.append((taken, score.correct / score.samples))
    return found


# --- speed ---


def speeds(c: Configuration, rounds: int) -> dict[str, float]:
    """Images a second of both ways, medians of turns."""

    def made(threads: int) -> tuple[Replica, Batch]:
        replica = Replica(c.job, c.images, Device.of("cpu", threads=threads), clock=time.perf_counter)
        tune_convolutions(replica)
        rng, (H, W, C) = np.random.default_rng(0), c.images.shape
        x = rng.standard_normal((H, W, c.batch, C), dtype=np.float32)
        labels = rng.integers(0, len(c.images.classes), c.batch)
        return replica, Batch(x, labels, np.arange(c.batch, dtype=np.uint64))

    def steps(replica: Replica, batch: Batch) -> None:
        for _ in range(STEPS):
            replica.step(batch, StepPace(LR))

    keep_freed_memory()  # as a worker does
    with single_threaded_blas():
        one, several = made(c.threads), [made(1) for _ in range(c.threads)]
        share([replica for replica, _ in several])
        works: dict[str, tuple[Callable[[], None], int]] = {
            SHARED: (lambda: steps(*one), 1),
            HOGWILD: (lambda: together([lambda own=own: steps(*own) for own in several]), c.threads),  # type: ignore[misc]
        }
        taken: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(rounds + 1):
            for name, (work, minibatches) in works.items():
                time.sleep(PAUSE)
                begun = time.perf_counter()
                work()
                taken[name].append(STEPS * minibatches * c.batch / (time.perf_counter() - begun))
    return {name: median(each[1:]) for name, each in taken.items()}


# --- output ---


def tables() -> Iterator[str]:
    """Yield those of the kept results: accuracies by rate, seconds to an accuracy, images a second."""
    kept = load(RESULTS)
    ends: dict[str, dict[str, list[str]]] = {}
    for name, found in kept["accuracy"].items():
        way, rate, _ = name.rsplit(", ", 2)
        ends.setdefault(rate.removeprefix("rate "), {}).setdefault(way, []).append(f"{100 * found[-1]:.1f}")
    ways = list(dict.fromkeys(way for own in ends.values() for way in own))
    cells = [[rate, *(f"{', '.join(own[way])} %" if way in own else "–" for way in ways)] for rate, own in ends.items()]
    yield markdown(["rate", *ways], cells, left=[0])
    timed: dict[str, list[Any]] = {}
    for name, found in kept.get("timed", {}).items():
        timed.setdefault(name.rpartition(", ")[0], []).append(found)
    heading = ["two threads", "s of ten epochs", *(f"s to {target:.0%}" for target in TARGETS)]
    if timed:
        yield markdown(heading, [[name, *_seconds(runs)] for name, runs in timed.items()], left=[0])
    speed = [
        [words.split()[0], f"{own[SHARED]:,.0f}", f"{own[HOGWILD]:,.0f}", f"{own[HOGWILD] / own[SHARED]:.2f}"]
        for words, own in kept["speed"].items()
    ]
    yield markdown(["steps of 64, images/s", SHARED, HOGWILD, "ratio"], speed, left=[0])


def _seconds(runs: Sequence[Sequence[Sequence[float]]]) -> Iterator[str]:
    """Yield the seconds of the trainings, and those to each target, in the order of the seeds."""
    yield ", ".join(f"{own[-1][0]:.1f}" for own in runs)
    looks = [{"looks": [[at, epoch, 0, accuracy] for epoch, (at, accuracy) in enumerate(own, 1)]} for own in runs]
    for target in TARGETS:
        yield ", ".join(told_time([own], target) for own in looks)


def main() -> None:
    """Train, or measure steps, and print a table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", default="data/cifar10.zarr", help="the prepared data set")
    options.add_argument("--threads", nargs="+", type=int, default=[2, 4])
    options.add_argument("--rates", nargs="+", type=float, default=[0.005, 0.01, 0.02])
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--timed", action="store_true", help="seconds of the trainings too, of two threads each")
    options.add_argument("--speed", action="store_true", help="images a second of steps alone")
    options.add_argument("--models", nargs="+", default=["rules", "lenet5", "quick", "50:500"])
    options.add_argument("--batch", type=int, default=64, help="of --speed")
    options.add_argument("--rounds", type=int, default=9, help="of --speed")
    options.add_argument("--json", type=Path, metavar="FILE", help="keep the figures in this file")
    given = options.parse_args()
    kept = kept_in(given.json, machine())
    part = "speed" if given.speed else "timed" if given.timed else "accuracy"
    for name, work in {"speed": _speeds, "timed": _timed, "accuracy": _trainings}[part](given).items():
        own = kept.setdefault(part, {})
        if name not in own:
            own[name] = work()
        print(name, own[name], flush=True)
        if given.json:
            save(given.json, kept)


def _speeds(given: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    every = [Configuration(model, given.batch, min(2, cpu_count())) for model in given.models]
    return {str(c): partial(in_fresh_process, speeds, c, given.rounds) for c in every}


def _trainings(given: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    ways = {SHARED: (SHARED, 1)} | {f"{HOGWILD}, {k} threads": (HOGWILD, k) for k in given.threads}
    return _runs(accuracies, ways, given)


def _timed(given: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    return _runs(trained, {way: (way, 2) for way in (SHARED, HOGWILD)}, given)


def _runs(
    function: Callable[..., Any], ways: Mapping[str, tuple[str, int]], given: argparse.Namespace
) -> dict[str, Callable[[], Any]]:
    """Each way, as (way, threads), by each rate and seed, in a process of its own."""
    return {
        f"{name}, rate {lr:g}, seed {seed}": partial(in_fresh_process, function, *way, lr, seed, given.data)
        for seed, lr, (name, way) in product(range(given.seeds), given.rates, ways.items())
    }


if __name__ == "__main__":
    main()
