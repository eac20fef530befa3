"""A simulated cluster of fast and slow workers, and what studies keep of a run on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.runs import kept_of
from daskcnn.errors import Diverged
from daskcnn.planning.simulate import Scenario, simulate
from daskcnn.sim.cluster import Costs, Server, SimulatedCluster, Worker

GIGABIT = 1.25e8  # bytes a second


def cluster(workers: int, fast: float, slow: float, bandwidth: float, exchange: float) -> SimulatedCluster:
    """Half of the workers fast, half slow, one alone fast, all on such links to one server.

    fast, slow: images a second. exchange: seconds of a meeting besides its transfer.
    """
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


def simulated(chosen: Scenario) -> dict[str, Any]:
    """Simulate a run with its arithmetic; what is kept of it, or why it diverged. Speeds are those of the cluster."""
    try:
        result = simulate(chosen, train=True)
    except Diverged as error:
        return {"diverged": str(error)}
    found = kept_of(replace(result.report, test=None))
    return {key: value for key, value in found.items() if key not in ("samples", "images_per_second")}
