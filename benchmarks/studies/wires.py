"""Accuracy after the same epochs with weights in float32, in float16 and in int8 with error feedback on the wire.

    python -m benchmarks.studies.wires --data data/cifar10.zarr [--strategies bsp local-sgd]
        [--wires float32 float16 int8] [--limit 9000] [--epochs 4] [--seeds 3]

The arithmetic is real, on one thread, and the wire's too: pushes and answers are cut as `cluster.wire` says. Time is
that of a cluster: two equal workers of 2,400 images a second on links of 5 MB/s to the server's host. CIFAR-10, the
network of two convolutions of rules.py, SGD with momentum 0.9, 64 samples a step of all (`bsp`) or of each, which meet
every eight (`local-sgd`). Accuracies are of 3,000 validation samples; the standard deviation of one is 0.9 points.

Each run is kept in --results when it has ended, and a study that was broken off goes on with the runs that are missing.
Exit 1 where the mean of the seeds is more than a point below that of float32.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.common import TWO_CONVOLUTIONS
from benchmarks.runs import add_command, kept_of, load, machine, markdown, save
from daskcnn.errors import Diverged
from daskcnn.job.resolve import resolve
from daskcnn.planning.simulate import scenario_of, simulate
from daskcnn.sim.cluster import Costs, Server, SimulatedCluster, Worker

RESULTS = Path(__file__).parent / "results" / "wires.json"
STRATEGIES, WIRES = ("bsp", "local-sgd"), ("float32", "float16", "int8")
LIMIT, EPOCHS, SEEDS = 9_000, 4, 3
WORKERS, SPEED, LINK, EVERY = 2, 2400.0, 5e6, 8
JUDGED = 3000  # samples that accuracies are of
BELOW = 0.01
"""Most by which an accuracy may be below that of float32."""


@dataclass(frozen=True)
class Run:
    """A run of a strategy with vectors of this kind on the wire."""

    strategy: str
    wire: str
    seed: int
    limit: int
    epochs: int

    @property
    def name(self) -> str:
        """The key it is kept under."""
        return f"{self.strategy} {self.wire} limit={self.limit} epochs={self.epochs} seed={self.seed}"

    def made(self, path: str) -> dict[str, Any]:
        """Simulate it with its arithmetic; its figures."""
        link = {"bandwidth": LINK, "latency": 1e-3}
        workers = [Worker(name="desk", count=WORKERS, images_per_second=SPEED, **link)]
        on = SimulatedCluster(server=Server(bandwidth=LINK), costs=Costs(exchange=0.0008), worker=workers)
        train = {"strategy": self.strategy, "epochs": self.epochs, "batch_size": 64, "lr": 0.02, "optimizer": "sgd"}
        job = {
            "data": {"name": "cifar10", "path": path, "limit": self.limit, "validation": JUDGED},
            "model": {"layers": TWO_CONVOLUTIONS},
            "train": train | {"schedule": "poly", "threads": 1, "seed": self.seed, "evaluation": "all"},
            "rule": {"every": EVERY} if self.strategy == "local-sgd" else {},
            "cluster": {"wire": self.wire},
        }
        begun = time.process_time()
        try:
            found = kept_of(simulate(scenario_of(resolve(job), on, "wires"), train=True).report)
        except Diverged as error:
            return {"diverged": str(error)}
        kept = {"accuracy": found["looks"][-1][3], "seconds": found["seconds"], "bytes": found["bytes"]}
        return kept | {"cpu_seconds": round(time.process_time() - begun, 1)}


def summed(parts: Mapping[str, Any], runs: Sequence[Run]) -> dict[str, list[Any]]:
    """The figures of these runs that there are; one that diverged has no accuracy."""
    found = [parts[each.name] for each in runs if each.name in parts]
    return {key: [own.get(key, 0.0) for own in found] for key in ("accuracy", "seconds", "bytes")}


def rows(parts: Mapping[str, Any], asked: Sequence[Run]) -> Iterator[tuple[str, str, dict[str, list[Any]], float]]:
    """Yield strategy, wire, the figures of its seeds, and the accuracy beyond that of float32."""
    for strategy, wire in dict.fromkeys((each.strategy, each.wire) for each in asked):
        there, whole = (
            summed(parts, [each for each in asked if (each.strategy, each.wire) == (strategy, own)])
            for own in (wire, WIRES[0])
        )
        if there["accuracy"] and whole["accuracy"]:
            yield strategy, wire, there, mean(there["accuracy"]) - mean(whole["accuracy"])


def table(parts: Mapping[str, Any], asked: Sequence[Run]) -> str:
    """All strategies and wires, in Markdown."""
    lines = []
    for strategy, wire, found, beyond in rows(parts, asked):
        seeds = ", ".join(f"{100 * own:.1f}" for own in found["accuracy"])
        figures = f"{100 * mean(found['accuracy']):.1f} %", f"{100 * beyond:+z.1f}", f"{mean(found['bytes']) / 1e6:.0f}"
        lines.append([f"`{strategy}`", f"`{wire}`", seeds, *figures, f"{mean(found['seconds']):.0f}"])
    head = ["strategy", "wire", "accuracy, by seed", "mean", "beyond float32", "MB", "simulated s"]
    return markdown(head, lines, left=[0, 1])


def tables() -> Iterator[str]:
    """Yield that of the kept results."""
    yield table(load(RESULTS)["parts"], list(runs(STRATEGIES, WIRES, SEEDS, LIMIT, EPOCHS)))


def runs(strategies: Sequence[str], wires: Sequence[str], seeds: int, limit: int, epochs: int) -> Iterator[Run]:
    """Yield the run of every seed of each of them."""
    for each in product(strategies, wires, range(seeds)):
        yield Run(*each, limit, epochs)


def main(words: Sequence[str] | None = None) -> int:
    """Exit code 1 where a bar is missed."""
    head, _, more = __doc__.partition("\n")
    options = argparse.ArgumentParser(
        description=head, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--data", default="data/cifar10.zarr", help="the prepared data set")
    options.add_argument("--strategies", nargs="+", default=STRATEGIES, choices=STRATEGIES, metavar="NAME")
    options.add_argument("--wires", nargs="+", default=WIRES, choices=WIRES, metavar="NAME")
    options.add_argument("--limit", type=int, default=LIMIT, help="training samples; default %(default)s")
    options.add_argument("--epochs", type=int, default=EPOCHS, help="default %(default)s")
    options.add_argument("--seeds", type=int, default=SEEDS, help="default %(default)s")
    options.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="keeps the runs")
    options.add_argument("--tables", action="store_true", help="print what there is, and simulate nothing")
    given = options.parse_args(words)
    results = load(given.results)
    asked = list(runs(given.strategies, given.wires, given.seeds, given.limit, given.epochs))
    missing = [] if given.tables else [each for each in asked if each.name not in results["parts"]]
    if missing:
        results["machine"] = machine()
        add_command(results)
    for each in sorted(missing, key=lambda each: each.seed):
        results["parts"][each.name] = each.made(given.data)
        save(given.results, results)
        print(f"{each.name}: {results['parts'][each.name]}", file=sys.stderr, flush=True)
    print(table(results["parts"], asked))
    return int(any(beyond < -BELOW for *_, beyond in rows(results["parts"], asked)))


if __name__ == "__main__":
    raise SystemExit(main())
