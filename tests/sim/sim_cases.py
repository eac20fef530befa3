"""Small workloads and clusters, and their simulation."""

from __future__ import annotations

from typing import Any

from daskcnn.events import Event
from daskcnn.partition import PARTITIONERS
from daskcnn.ps import RULES
from daskcnn.sim.cluster import SimulatedCluster, parse_cluster
from daskcnn.sim.simulation import Simulation
from daskcnn.sim.workload import Workload

WITHIN: dict[str, dict[str, Any]] = {
    "bsp": {"every": 3},
    "easgd": {"tau": 3},
    "downpour": {"n_push": 2, "n_fetch": 3},
    "dc-asgd": {"every": 3},
    "admm": {"every": 2},
    "local-sgd": {"every": 3},
}
"""Parameters with which rules meet several times in a round of the cases here."""


def workload(
    strategy: str, *, partition: str = "udpa", increments: int = 1, rule: Any = None, **facts: Any
) -> Workload:
    """A hundred samples in batches of ten, vectors of 400 bytes, twenty samples to judge by, one epoch."""
    usual: dict[str, Any] = {"samples": 100, "validation": 20, "epochs": 1, "batch_size": 10, "numbers": 100}
    made = RULES[strategy].model_validate(rule or {})
    parted: dict[str, Any] = {"partition": partition, "partitioner": PARTITIONERS[partition](increments)}
    return Workload(strategy=strategy, rule=made, **{**usual, **parted, **facts})


def cluster(*speeds: float, server: Any = None, costs: Any = None, **worker: Any) -> SimulatedCluster:
    """A worker for each speed (images a second), alike but for that."""
    workers = [{"name": f"w{i}", "images_per_second": speed, **worker} for i, speed in enumerate(speeds)]
    return parse_cluster({"worker": workers, "server": server or {}, "costs": costs or {}})


def run(work: Workload, on: SimulatedCluster, **options: Any) -> tuple[Simulation, list[Event]]:
    """The simulation after its end, its server's invariants checked, and the events."""
    events: list[Event] = []
    simulation = Simulation(work, on, emit=events.append, **options)
    simulation.run()
    simulation.server.validate()
    return simulation, events


def of(model: type[Event], events: list[Event]) -> list[Any]:
    """The events of a kind; of a simulation they have all numbers that a log may lack."""
    return [event for event in events if isinstance(event, model)]


def seconds(work: Workload, on: SimulatedCluster) -> float:
    """How long the run takes."""
    return run(work, on)[0].now
