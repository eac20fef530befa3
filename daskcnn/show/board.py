"""The state of a run, folded from its events: all that a display shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from daskcnn import events
from daskcnn.runs.totals import WorkerTotals
from daskcnn.show.text import shard_texts

STARTING, CALIBRATING, TRAINING = "starting", "calibrating", "training"


@dataclass
class WorkerLine(WorkerTotals):
    """A worker's totals, and what its last event said of it.

    given: samples allocated to it. step: its part of a step that all share.
    """

    given: int | None = None
    step: int | None = None
    loss: float | None = None
    speed: float | None = None
    staleness: int | None = None
    shards: dict[str, str] = field(default_factory=dict)
    conv_seconds: float | None = None
    state: str = ""
    doing: str = ""  # what it measures before it is calibrated, or that it has no kernels

    @property
    def shares(self) -> tuple[float, float, float] | None:
        """Busy, waiting and communicating, as shares of their sum; None before the first round."""
        total = self.busy + self.wait + self.communication
        return (self.busy / total, self.wait / total, self.communication / total) if total > 0 else None


@dataclass
class Board:
    """Folds events, in order, into what a display shows; nothing but `apply` changes it."""

    run: str = ""
    strategy: str = ""
    status: str = STARTING
    epoch: float = 0.0
    epochs: float | None = None
    step: int | None = None
    loss: float | None = None
    accuracy: float | None = None
    validation_accuracy: float | None = None
    validation_error: float | None = None
    best_validation: float | None = None
    validation_loss: float | None = None
    least_validation_loss: float | None = None
    samples_per_second: float | None = None
    seconds_per_step: float | None = None
    lr: float | None = None
    noise_scale: float | None = None
    step_samples: int | None = None
    asynchronous: bool = False
    workers: dict[str, WorkerLine] = field(default_factory=dict)
    _left_out: dict[str, WorkerLine] = field(default_factory=dict)  # until they get samples or kernels
    _divided: dict[str, dict[str, str]] = field(default_factory=dict)
    _of: dict[str, int] = field(default_factory=dict)
    _origin: tuple[float, float] | None = None
    _begun: bool = True  # it is known at which epoch
    _best_before: float | None = None  # of the run that goes on; the next evaluation says if it is an accuracy
    _now: float = 0.0
    _advanced: float = 0.0

    def apply(self, event: events.Event, now: float) -> None:
        """Take in one event at `now`, in seconds of any clock."""
        self._now = now
        self._take(event)

    @property
    def calibrating(self) -> bool:
        """True if no worker trains yet."""
        return self.status in (STARTING, CALIBRATING) and self.loss is None

    @property
    def fraction(self) -> float:
        """The part of the run that is done, 0 to 1."""
        return min(1.0, self.epoch / self.epochs) if self.epochs else 0.0

    def remaining(self, now: float) -> float | None:
        """Return the seconds left, at the pace since training began or was resumed; None while unknown."""
        if self._origin is None or self.fraction <= self._origin[1]:
            return None
        since, begun = self._origin
        pace = (self.fraction - begun) / max(self._advanced - since, 1e-9)
        return max(0.0, (1.0 - self.fraction) / pace - (now - self._advanced))

    def worker(self, name: str) -> WorkerLine:
        """Return the worker's line, made when it is new."""
        return self.workers.setdefault(name, self._left_out.pop(name, WorkerLine(name)))

    def _measured(self, name: str) -> WorkerLine:
        """The line of a worker that is measured: one that was left out stays so."""
        return self._left_out.get(name) or self.worker(name)

    def _advance(self, epoch: float) -> None:
        self.epoch, self._advanced = max(self.epoch, epoch), self._now
        if self._origin is None:
            self._origin = (self._now, self.fraction)

    def _take(self, event: events.Event) -> None:
        match event:
            case events.RunStarted():
                self.run, self.strategy, self.epochs = event.run, event.strategy, event.epochs
                self.status = CALIBRATING
            case events.WorkersCalibrated():
                self._calibrated(event)
            case events.RunResumed():
                self.step, self.epoch = event.step, event.epoch or 0.0
                self._origin, self._begun, self._best_before = None, event.epoch is not None, event.best
            case events.RoundEnded():
                self._round(event)
            case events.EpochEnded():
                self._epoch(event)
            case events.StepsEnded():
                self._steps(event)
            case events.KernelsSharded():
                self._divided, self._of = event.divided, event.of
            case events.RunEnded():
                self.status = event.status
            case _:
                self._take_of_workers(event)

    def _take_of_workers(self, event: events.Event) -> None:
        match event:
            case events.Calibrating():
                parts = f" {event.done}/{event.of}" if event.of else ""
                self._measured(event.worker).doing = f"{event.doing}{parts}"
            case events.GroupsFormed():
                self._groups(event)
            case events.SamplesAllocated():
                for name, samples in event.sizes.items():
                    row = self.worker(name)
                    row.given, row.step = samples, event.step.get(name)
            case events.WorkerLost():
                self.worker(event.worker).state = "lost"
            case events.WorkerLeft():
                self.worker(event.worker).state = "left"
            case events.WorkerLeftOut():
                self._left_out[event.worker] = self.worker(event.worker)
                del self.workers[event.worker]
            case events.WorkerJoined():
                row = self.worker(event.worker)
                row.given, row.state = event.samples, ""
            case events.WorkerIgnored():
                self.worker(event.address).state = "ignored"

    def _calibrated(self, event: events.WorkersCalibrated) -> None:
        if self.status in (STARTING, CALIBRATING):  # later ones are of workers that come in mid-run
            self.status, self._advanced = TRAINING, self._now
            self._origin = (self._now, self.fraction) if self._begun else None
        for worker in event.workers:
            row = self._measured(worker.name)
            row.device, row.state, row.doing = worker.device, "", ""

    def _groups(self, event: events.GroupsFormed) -> None:
        for group in event.groups:  # in the place of its members
            for member in group.members:
                self.workers.pop(member, None)
            row = self.worker(group.name)
            row.device, row.state = group.device, ""

    def _round(self, event: events.RoundEnded) -> None:
        row = self.worker(event.worker)
        row.add(event)
        row.loss, row.speed, row.staleness, row.state = event.loss, event.samples_per_second, event.staleness, ""
        self.asynchronous |= bool(row.staleness)
        self.loss, self.accuracy, self.lr = event.loss, event.accuracy, event.lr
        self.samples_per_second = sum(w.speed or 0.0 for w in self.workers.values() if not w.state)
        self._advance(event.epoch)

    def _epoch(self, event: events.EpochEnded) -> None:
        self.step, self.loss, self.accuracy = event.step, event.loss, event.accuracy
        self.samples_per_second, self.lr = event.samples_per_second, event.lr
        self.noise_scale, self.step_samples = event.noise_scale, event.step_samples
        self.epochs = event.epochs or self.epochs
        if event.validation:
            accuracy, loss = event.validation.accuracy, event.validation.loss
            self.validation_accuracy, self.validation_loss = accuracy, loss
            self.validation_error = event.validation.error
            if (before := self._best_before) and accuracy is not None:
                self.best_validation = before
            elif before:
                self.least_validation_loss = 1 / before - 1
            self._best_before = None
            if event.validation.samples is None:  # a part of the samples decides nothing
                self.best_validation = _best(max, self.best_validation, accuracy)
                self.least_validation_loss = _best(min, self.least_validation_loss, loss)
        self._advance(event.epoch)

    def _steps(self, event: events.StepsEnded) -> None:
        self.step, self.loss, self.seconds_per_step = event.step, event.loss, event.seconds_per_step
        for worker in event.workers:
            row = self.worker(worker.name)
            row.shards = shard_texts(worker.kernels, self._divided.get(worker.name, {}), self._of)
            row.conv_seconds = worker.conv_seconds
            row.doing = "" if any(worker.kernels.values()) else "no kernels"
        self._advance(event.epoch)


def _best(choose: Callable[..., float], *found: float | None) -> float | None:
    """Return the best of the numbers that are known."""
    return choose((each for each in found if each is not None), default=None)
