"""The totals of a run's workers, folded from its events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from daskcnn.events import EpochEnded, EpochWorker, Event, GroupsFormed, RoundEnded, RoundNumbers, WorkersCalibrated
from daskcnn.runs.attendance import Attendance


@dataclass
class WorkerTotals:
    """Sums of a worker, or of a group, over its rounds or, where kernels are sharded, its epochs.

    present: seconds that it took part. samples: trained on, counted each time. compute: seconds of `busy` without
    `load`. wait: seconds for other workers.
    An epoch measures no `load`, `evaluation` and `pushes`; its `wait` has communication and loading in it.
    """

    name: str
    device: str = ""
    present: float = 0.0
    samples: int = 0
    busy: float = 0.0
    compute: float = 0.0
    load: float = 0.0
    wait: float = 0.0
    communication: float = 0.0
    evaluation: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    rounds: int = 0  # without epochs
    pushes: int = 0

    def add(self, part: RoundNumbers | EpochWorker) -> None:
        """Add a round, or the worker's part of an epoch."""
        self.samples += part.samples
        self.busy += part.busy
        self.wait += part.wait
        self.communication += part.communication
        self.bytes_up += part.bytes_up
        self.bytes_down += part.bytes_down
        if isinstance(part, RoundNumbers):
            self.load += part.load
            self.compute += max(0.0, part.busy - part.load)
            self.evaluation += part.evaluation
            self.rounds += 1
            self.pushes += part.pushes
        else:
            self.compute += part.busy


class Totals(dict[str, WorkerTotals]):
    """Totals by worker; `take` folds events in. A resumed run goes on with those of its earlier life."""

    def take(self, event: Event) -> None:
        """Take in one event; groups take the place of their members."""
        match event:
            case WorkersCalibrated():
                for worker in event.workers:
                    self.of(worker.name).device = worker.device
            case GroupsFormed():
                for group in event.groups:
                    for member in group.members:
                        self.pop(member, None)
                    self.of(group.name).device = group.device
            case RoundEnded():
                self.of(event.worker).add(event)
            case EpochEnded():
                for part in event.workers:
                    self.of(part.name).add(part)

    def of(self, name: str) -> WorkerTotals:
        """Return the worker's totals, made when it is new."""
        return self.setdefault(name, WorkerTotals(name))


def worker_totals(events: Iterable[Event], seconds: float | None = None) -> list[WorkerTotals]:
    """Return the totals of every worker of a log. seconds: of training at its end, if they are known."""
    totals, attendance = Totals(), Attendance()
    for event in events:
        totals.take(event)
        attendance.take(event)
    attendance.end(seconds)
    return [replace(worker, present=attendance.stay(name)) for name, worker in totals.items()]
