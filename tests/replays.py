"""Recorded runs, played again without a cluster: by the bare coordinator, and by the simulator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

from daskcnn.events import CalibratedWorker, Calibrating, CheckpointWritten, Event, RunEnded, RunStarted, ServerCounted
from daskcnn.job.tables import Job
from daskcnn.sim.cluster import SimulatedCluster, parse_cluster
from daskcnn.sim.simulation import Simulation
from daskcnn.sim.workload import Workload
from daskcnn.training.coordinator import orders
from daskcnn.training.coordinator.evaluations import Guessing
from daskcnn.training.coordinator.facts import Calibrated, Fact
from daskcnn.training.coordinator.orders import Order

Heard: TypeAlias = Sequence[tuple[Fact, Sequence[Order]]]
"""Facts of a run, and the orders that they led to."""
OF_A_SHELL = (RunStarted, Calibrating, CheckpointWritten, ServerCounted, RunEnded)
"""Events that a shell records by itself."""


class Decider(Protocol):
    """A coordinator as it is before its first fact."""

    def handle(self, fact: Any) -> list[Order]: ...

    def validate(self) -> None: ...


def compared(found: Iterable[Order]) -> list[Any]:
    """Orders by what they are equal by: an error by its class and words."""
    return [
        (order.status, type(order.error), str(order.error)) if isinstance(order, orders.End) else order
        for order in found
    ]


def assert_replayed(coordinator: Decider, heard: Heard) -> None:
    """The bare coordinator gives the same orders as in the run, bit for bit."""
    assert heard
    for fact, found in heard:
        assert compared(coordinator.handle(fact)) == compared(found), fact
        coordinator.validate()


def assert_played(job: Job, samples: int, heard: Heard, events: Iterable[Event], guess: Guessing | None = None) -> None:
    """The simulator with the recorded facts as its agenda gives the same orders and events."""
    rows = {fact.worker: fact.row for fact, _ in heard if isinstance(fact, Calibrated)}  # a worker may come back
    logged: list[Event] = []
    workload = replace(Workload.of_job(job, samples=samples, numbers=1), lowers=True, guess=guess)
    simulation = Simulation(workload, cluster_of(rows.values()), emit=logged.append)
    found = simulation.play(fact for fact, _ in heard)
    assert [compared(each) for each in found] == [compared(each) for _, each in heard]
    assert _of_the_coordinator(logged) == _of_the_coordinator(events)
    times = [event.at or 0.0 for event in logged]
    assert times == sorted(times)


def cluster_of(rows: Iterable[CalibratedWorker]) -> SimulatedCluster:
    """A cluster of these workers."""
    return parse_cluster(
        {"worker": [{"name": row.name, "images_per_second": row.images_per_second or 1.0} for row in rows]}
    )


def _of_the_coordinator(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Events of its `Log` orders, without their times."""
    return [_without_time(event) for event in events if not isinstance(event, OF_A_SHELL)]


def _without_time(event: Event) -> dict[str, Any]:
    return {key: value for key, value in event.record().items() if key != "at"}
