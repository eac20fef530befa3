"""The runs of sweeps as they go on, by their logs: those that end early."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from pathlib import Path

from daskcnn.batch.halving import EarlyEnd, EpochScore, early_ends
from daskcnn.batch.records import QueuedJob
from daskcnn.errors import DataError
from daskcnn.events import EpochEnded, Event, RunStarted
from daskcnn.runs.log import read_events

STOPS = ("asha",)


class SweepWatch:
    """Reads the logs of runs, each only when it has grown."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[int, float, list[EpochScore]]] = {}

    def early(self, jobs: Iterable[QueuedJob]) -> dict[int, EarlyEnd]:
        """Return the jobs of one sweep that end early, those that have ended before included."""
        read = {job.id: self._looks(Path(job.run) / "events.jsonl") for job in jobs}
        begun = {number: found for number, found in read.items() if found[1]}
        return early_ends({n: looks for n, (_, _, looks) in begun.items()}, {n: own[1] for n, own in begun.items()})

    def _looks(self, log: Path) -> tuple[int, float, list[EpochScore]]:
        """The size of a log, the epochs of the run, and its evaluations."""
        before = self._read.get(str(log), (-1, 0.0, []))
        try:
            if (size := log.stat().st_size) == before[0]:
                return before
            events = read_events(log)
        except (OSError, DataError):
            return before
        lengths = [float(event.epochs) for event in events if isinstance(event, RunStarted) and event.epochs]
        looks = [look for event in events if (look := _look(event)) is not None]
        self._read[str(log)] = found = (size, lengths[-1] if lengths else 0.0, looks)
        return found


def _look(event: Event) -> EpochScore | None:
    """The evaluation in an event: by accuracy, or by loss where the network has none."""
    if not isinstance(event, EpochEnded) or event.validation is None or event.at is None:
        return None
    accuracy, loss = event.validation.accuracy, event.validation.loss
    score = accuracy if accuracy is not None else None if loss is None else -loss
    return EpochScore(event.epoch, event.at, score) if score is not None and isfinite(score) else None
