"""Changes of who trains: workers that come, go and come back, and pauses; what each moved and cost."""

from __future__ import annotations

from dataclasses import dataclass, field

from daskcnn import events


@dataclass(frozen=True, slots=True)
class WorkerChange:
    """A change at a time in seconds of the run.

    worker: none for a pause. samples: those that moved. lost: of a worker that came, the seconds from its calibration
    until it had samples; of one that was lost, those since its last report, whose work is lost; of a pause, its length.
    """

    at: float
    change: str
    worker: str
    samples: int | None
    lost: float | None


@dataclass
class WorkerChanges:
    """Folds events, in order; nothing but `take` changes it, and who forgets rows."""

    rows: list[WorkerChange] = field(default_factory=list)
    _since: dict[str, float] = field(default_factory=dict)  # of each worker, its last report or calibration

    def take(self, event: events.Event, now: float) -> None:
        """Take in one event. now: seconds of training."""
        match event:
            case events.WorkersCalibrated():
                self._since |= dict.fromkeys((worker.name for worker in event.workers), now)
            case events.RoundEnded():
                self._since |= dict.fromkeys((event.worker, *(member.name for member in event.members)), now)
            case events.EpochEnded():  # of sharded layers
                self._since |= dict.fromkeys((part.name for part in event.workers), now)
            case events.WorkerJoined():
                self._add(now, "joined", event.worker, event.samples or None, self._seconds(event.worker, now))
                self._since[event.worker] = now
            case events.WorkerLost():
                self._add(now, "lost", event.worker, event.samples_moved or None, self._seconds(event.worker, now))
            case events.WorkerLeft():
                self._add(now, "left", event.worker, event.samples_moved or None, None)
            case events.RunContinued():
                self._add(now, "paused", "", None, event.seconds)

    def _seconds(self, worker: str, now: float) -> float | None:
        since = self._since.pop(worker, None)
        return None if since is None else max(0.0, now - since)

    def _add(self, at: float, change: str, worker: str, samples: int | None, lost: float | None) -> None:
        self.rows.append(WorkerChange(at, change, worker, samples, lost))
