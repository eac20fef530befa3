"""Every update rule with both partitions over 4 to 32 simulated workers, of which every other is three times slower.

    python benchmarks/rules_simulated.py --data data/cifar10.zarr [--quick] [--only bsp] [--results FILE]

The arithmetic is real, on a part of CIFAR-10; time is that of the cluster below. Parts that are kept in FILE are not
simulated again. `--tables` prints what it holds.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import TWO_CONVOLUTIONS
from rules import TUNED, kept_of, load, save, table

from daskcnn.errors import Diverged
from daskcnn.job.network import layout_of, training_samples
from daskcnn.job.resolve import resolve
from daskcnn.planning.simulate import Scenario, simulate
from daskcnn.ps import RULES
from daskcnn.sim.cluster import Costs, Server, SimulatedCluster, Worker
from daskcnn.store import open_dataset

WORKERS = (4, 8, 16, 32)
GIGABIT = 1.25e8  # bytes a second
FAST, SLOW = 900.0, 300.0  # images a second
EXCHANGE = 0.003  # seconds of a meeting besides its transfer
TARGETS = (0.25, 0.3, 0.35, 0.4)
LIMIT, VALIDATION, BATCH, EPOCHS = 6500, 500, 32, 4


def cluster(
    workers: int, fast: float = FAST, slow: float = SLOW, bandwidth: float = GIGABIT, exchange: float = EXCHANGE
) -> SimulatedCluster:
    """Half of the workers fast, half slow, one alone fast, all on such links to one server."""
    half = workers // 2
    link: dict[str, Any] = {"bandwidth": bandwidth, "latency": 0.0002}
    return SimulatedCluster(
        server=Server(bandwidth=bandwidth, merge_rate=2e9),
        costs=Costs(dispatch=0.03, exchange=exchange),
        worker=[
            Worker(name="fast", count=workers - half, images_per_second=fast, **link),
            Worker(name="slow", count=half, images_per_second=slow, **link),
        ],
    )


def scenario(strategy: str, partition: str, workers: int, data: str) -> Scenario:
    """The job of a part on its cluster."""
    job = resolve(
        {
            "data": {"name": "cifar10", "path": data, "limit": LIMIT, "validation": VALIDATION},
            "model": {"layers": TWO_CONVOLUTIONS},
            "train": {
                "strategy": strategy,
                "partition": partition,
                "epochs": EPOCHS,
                "batch_size": BATCH,
                "threads": 1,
            },
            "rule": TUNED.get(strategy, {}),
        }
    )
    dataset = open_dataset(data, limit=LIMIT)
    numbers = layout_of(job, dataset).size
    return Scenario(job, cluster(workers), "a cluster file", dataset, training_samples(job, dataset), numbers)


def simulated(chosen: Scenario) -> dict[str, Any]:
    """Simulate a run with its arithmetic; what is kept of it, or why it diverged."""
    try:
        result = simulate(chosen, train=True)
    except Diverged as error:
        return {"diverged": str(error)}
    return kept_of(replace(result.report, test=None))


def names(quick: bool) -> list[str]:
    """All parts."""
    sizes = WORKERS[:1] if quick else WORKERS
    return [f"{s} {p} {w} workers" for w in sizes for s in RULES for p in ("idpa", "udpa")]


def by_size(results: Mapping[str, Any]) -> str:
    """Seconds of the whole run by the number of workers, in Markdown."""
    heading = ["rule", "partition", *(f"{w} workers" for w in WORKERS)]
    rows = [heading, ["---"] * len(heading)]
    for strategy in RULES:
        for partition in ("idpa", "udpa"):
            kept = [results["parts"].get(f"{strategy} {partition} {w} workers") for w in WORKERS]
            rows.append([strategy, partition, *(_seconds(k) for k in kept)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _seconds(kept: Mapping[str, Any] | None) -> str:
    return "–" if kept is None else "diverged" if "diverged" in kept else f"{kept['seconds']:.1f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate the parts that are missing, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data/cifar10.zarr", help="the prepared data set")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/rules_simulated.json"))
    parser.add_argument("--quick", action="store_true", help="four workers only")
    parser.add_argument("--only", nargs="+", default=[""], help="parts whose names contain one of these")
    parser.add_argument("--tables", action="store_true", help="print what there is")
    given = parser.parse_args(arguments)
    results = load(given.results)
    for name in names(given.quick):
        if given.tables or name in results["parts"] or not any(text in name for text in given.only):
            continue
        strategy, partition, workers = name.split()[:3]
        results["parts"][name] = simulated(scenario(strategy, partition, int(workers), given.data))
        save(given.results, results)
        print(f"{name}: {_seconds(results['parts'][name])} s simulated", flush=True)
    print(table(results, TARGETS), by_size(results), sep="\n\n")


if __name__ == "__main__":
    main()
