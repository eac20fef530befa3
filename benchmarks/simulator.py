"""How fast the simulator is: seconds for 10,000 workers and 100 rounds of every rule, timing only.

    python -m benchmarks.simulator [--workers 10000] [--rounds 100] [--rules agwu sgwu …] [--json FILE]

A round is one push of every worker. Workers have a hundred different speeds, so that asynchronous pushes come in no
simple order. Seconds are those of the processor; the wall's stand beside them. Exit 1 where a rule takes a minute or
longer.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from daskcnn.arrays import cpu_count, device_profile
from daskcnn.partition import PARTITIONERS
from daskcnn.ps import RULES
from daskcnn.sim.cluster import SimulatedCluster, parse_cluster
from daskcnn.sim.simulation import Simulation
from daskcnn.sim.workload import Workload

BAR = 60.0
"""Seconds a rule may take."""
SPEEDS = 100
"""Different ones, from half the usual speed to three halves of it."""


def workload(strategy: str, workers: int, rounds: int) -> Workload:
    """Four samples a worker, all given out at once; every round is one step and one push."""
    rule = RULES[strategy].model_validate({"rounds": rounds} if strategy == "parallel-sgd" else {})
    return Workload(
        strategy=strategy,
        rule=rule,
        partition="udpa",
        partitioner=PARTITIONERS["udpa"](1),
        samples=4 * workers,
        validation=100,
        epochs=rounds,
        batch_size=4,
        numbers=10**6,
    )


def cluster(workers: int) -> SimulatedCluster:
    """Workers of unequal speed behind one server's link."""
    link = {"bandwidth": 1e8, "latency": 1e-3}
    kinds = min(SPEEDS, workers)
    groups = [
        {**link, "name": f"w{i}", "images_per_second": 100 * (0.5 + i / kinds), "count": len(range(i, workers, kinds))}
        for i in range(kinds)
    ]
    return parse_cluster({"server": {"bandwidth": 1e13}, "worker": groups})


def measure(strategy: str, workers: int, rounds: int) -> dict[str, Any]:
    """One rule: seconds, and what the simulation came to."""
    wall, processor = time.perf_counter(), time.process_time()
    simulation = Simulation(workload(strategy, workers, rounds), cluster(workers))
    pushes = simulation.run().merged
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    simulation.server.validate()
    assert pushes == workers * rounds, pushes
    return {
        "rule": strategy,
        "seconds": processor,
        "wall_seconds": wall,
        "microseconds_a_push": 1e6 * processor / pushes,
        "pushes": pushes,
        "simulated_seconds": simulation.now,
    }


def show(found: dict[str, Any]) -> None:
    """One line a rule."""
    print(
        f"{found['rule']:13} {found['seconds']:7.1f} s ({found['wall_seconds']:.1f} s by the wall clock), "
        f"{found['microseconds_a_push']:5.1f} µs a push, {found['simulated_seconds']:7.1f} s simulated",
        flush=True,
    )


def main() -> int:
    """Exit code 1 where a rule misses the bar."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--workers", type=int, default=10_000, help="default %(default)s")
    options.add_argument("--rounds", type=int, default=100, help="pushes of each worker; default %(default)s")
    options.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES), metavar="RULE", help="default: all")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    chosen = options.parse_args()
    results = []
    for strategy in chosen.rules:
        results.append(measure(strategy, chosen.workers, chosen.rounds))
        show(results[-1])
    slowest = max(found["seconds"] for found in results)
    print(
        f"{chosen.workers:,} workers, {chosen.rounds} rounds: the slowest rule takes {slowest:.1f} s, bar {BAR:.0f} s"
    )
    if chosen.json:
        machine = {"processor": device_profile("cpu", 1).name, "cores": cpu_count()}
        found = {"machine": machine, "workers": chosen.workers, "rounds": chosen.rounds, "results": results}
        chosen.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(slowest >= BAR)


if __name__ == "__main__":
    raise SystemExit(main())
