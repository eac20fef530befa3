"""The clock of a run, and its workers' times in it, folded from its events.

A run that is started or resumed trains from its first calibration on; later ones are of workers that come in mid-run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from daskcnn import events

_TIMELESS = (
    *(events.Calibrating, events.LinkSpeeds, events.SamplesAllocated, events.StepsEnded, events.UnknownEvent),
    *(events.ClockSet, events.RunStarted, events.RunEnded),  # between one's end and the next one's start nobody trains
)
"""Events that do not move the clock."""
_TRAINED = (events.RoundEnded, events.EpochEnded)


@dataclass
class Attendance:
    """Folds events, in order; nothing but `take`, `end` and `forget` changes it.

    Attributes
    ----------
    now : Seconds of training. A run that is resumed goes back to those of its checkpoint.
    present : Workers, or groups, that take part now.
    lost, left : Those that an event calls lost, or that left in good order, and that have not come back.
    """

    now: float = 0.0
    present: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    _elapsed: float = 0.0  # seconds of training, also those that a resume went back over
    _training: bool = False
    _at: float | None = None  # `now`, on the events' own clock
    _since: dict[str, float] = field(default_factory=dict)  # when each came, in `_elapsed`
    _stayed: dict[str, float] = field(default_factory=dict)  # seconds of earlier stays
    _marks: dict[int, float] = field(default_factory=dict)  # seconds of evaluations and checkpoints, by step

    def take(self, event: events.Event) -> None:
        """Take in one event."""
        if not isinstance(event, _TIMELESS) and (self._training or isinstance(event, _TRAINED)):
            self._move(event)
        match event:
            case events.RunStarted():
                self._go(self.present)
                self.now, self._training, self._at = 0.0, False, event.at
            case events.ClockSet() if self._at is not None:
                self._at += event.seconds
            case events.RunResumed():
                before = [at for step, at in self._marks.items() if step <= event.step]
                self.now = self._marks.get(event.step, max(before, default=0.0))
            case events.EpochEnded() | events.CheckpointWritten():
                self._marks[event.step] = self.now
            case events.RunEnded():
                self.end(event.seconds)
                self._training = False
            case _:
                self._take_of_workers(event)
        self._training |= isinstance(event, _TRAINED)

    def _take_of_workers(self, event: events.Event) -> None:
        match event:
            case events.WorkersCalibrated():
                names = [worker.name for worker in event.workers]
                self._back(names)
                if not self._training:
                    self._training, self._at = True, event.at
                    self._come(names)
            case events.GroupsFormed():
                names = [group.name for group in event.groups]
                self._go(self.present.difference(names))
                self._come(names)
            case events.SamplesAllocated():
                self._come(event.sizes)
            case events.WorkerJoined():
                self._come([event.worker])
            case events.WorkerLeftOut():
                self._go([event.worker])
            case events.WorkerLost():
                self._go([event.worker])
                self.lost |= {event.worker}
            case events.WorkerLeft():
                self._go([event.worker])
                self.left |= {event.worker}

    def end(self, seconds: float | None) -> None:
        """Move the clock to the run's seconds at its end, if they are known."""
        if seconds is not None and seconds > self.now:
            self._elapsed, self.now = self._elapsed + seconds - self.now, seconds

    def seconds_at(self, at: float | None) -> float:
        """Return the seconds of the run at this time of the events' clock; those of now for None."""
        known = self._training and at is not None and self._at is not None
        return self.now + max(0.0, at - self._at) if known else self.now  # type: ignore[operator] # both are known

    def stay(self, worker: str) -> float:
        """Return the seconds that the worker has taken part, in all."""
        since = self._since.get(worker, self._elapsed)
        return self._stayed.get(worker, 0.0) + self._elapsed - since

    def forget(self, most: int) -> None:
        """Keep the times of the last `most` evaluations and checkpoints."""
        self._marks = dict(list(self._marks.items())[-most:])

    def _move(self, event: events.Event) -> None:
        passed = 0.0
        if event.at is None:  # a log without times
            passed = event.seconds if isinstance(event, events.EpochEnded) else 0.0
        elif self._at is not None:
            passed = max(0.0, event.at - self._at)  # a clock may be set back
        self.now, self._elapsed = self.now + passed, self._elapsed + passed
        self._at = self._at if event.at is None else event.at

    def _come(self, workers: Iterable[str]) -> None:
        if new := set(workers) - self.present:
            self.present |= new
            self._since |= dict.fromkeys(new, self._elapsed)
        self._back(self.present)

    def _back(self, workers: Iterable[str]) -> None:
        self.lost, self.left = self.lost.difference(workers), self.left.difference(workers)

    def _go(self, workers: Iterable[str]) -> None:
        for worker in self.present.intersection(workers):
            self._stayed[worker] = self.stay(worker)
            del self._since[worker]
        self.present -= frozenset(workers)
