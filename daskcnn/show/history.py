"""The course of a run, folded from its events: rounds, evaluations, troubles, each with its time.

A round is one worker's push cycle; in a layer-sharded run, where all workers train on every sample, an epoch. Each
worker's rounds are numbered from 1. A run that is resumed, or whose server is lost, begins another life and makes some
rounds again. Rounds of all lives are kept, as they are work that was done. Evaluations go back with the run; the clock
goes back with a resume alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from daskcnn import events
from daskcnn.runs.attendance import Attendance
from daskcnn.show.changes import WorkerChanges
from daskcnn.show.lines import describe
from daskcnn.show.text import shard_texts

SPENT = ("load", "compute", "evaluation", "communication", "wait")
"""Parts of a round. A log has their sums, not their order."""
_APART = frozenset(("load", "communication", "evaluation"))
"""Parts that are measured of rounds alone: in an epoch of sharded layers they count as waiting."""


@dataclass(frozen=True, slots=True)
class RoundRow:
    """One worker's round in a life of the run. It ended after `at` seconds of the run.

    increment: parts of its samples that the worker had been given. apart: True if the parts in `_APART` were measured.
    """

    life: int
    number: int
    increment: int | None
    at: float
    epoch: float
    numbers: events.RoundNumbers
    apart: bool = True

    @property
    def worker(self) -> str:
        """The worker or group that made the round."""
        return self.numbers.worker

    def value(self, name: str) -> Any:
        """Return the column of this name, its own or of its numbers; None if it was not measured."""
        if name in _OWN:
            return getattr(self, name)
        return getattr(self.numbers, name) if self.apart or name not in _APART else None

    @property
    def spent(self) -> tuple[float, ...]:
        """Seconds of each of `SPENT`; 0 for a part that was not measured."""
        n = self.numbers
        load, evaluation, communication = (n.load, n.evaluation, n.communication) if self.apart else (0.0, 0.0, 0.0)
        return load, max(0.0, n.busy - load), evaluation, communication, n.wait

    def to_dict(self) -> dict[str, Any]:
        """Return every column, by name."""
        return {name: self.value(name) for name in ROUND_COLUMNS}


_OWN = frozenset(("life", "number", "increment", "at", "epoch"))
_NUMBERS = [name for name in events.RoundNumbers.model_fields if name not in ("worker", "round")]
ROUND_COLUMNS = ("life", "number", "increment", "worker", "at", "epoch", *_NUMBERS)
"""Columns of a round: its own fields, and every number of the event."""


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """An evaluation of the center. loss, accuracy: of training since the last evaluation.

    judged: validation samples, if they are a part of those set apart. validation_error: standard error of the accuracy.
    noise_scale, noise_error: the gradient noise scale in samples, and its standard error. noise_within_error: it is
    unknown, as the gradient is within its error. step_samples: of a step, where they may grow.

    rounds: made until then, the mean of the workers; moved: bytes of all rounds until then, also of those made again.
    """

    epoch: float
    at: float
    step: int
    rounds: float
    moved: int
    loss: float | None
    accuracy: float | None
    validation_loss: float | None
    validation_accuracy: float | None
    auc: float | None
    judged: int | None = None
    validation_error: float | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict, hash=False)
    noise_scale: float | None = None
    noise_error: float | None = None
    noise_within_error: bool = False
    step_samples: int | None = None


def without_kernels(kernels: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return the workers that have no kernels, of all that a network is sharded over."""
    return [name for name, own in kernels.items() if own and not any(own.values())]


@dataclass(frozen=True, slots=True)
class Note:
    """Something out of the ordinary, at a time in seconds of the run."""

    at: float
    text: str


@dataclass
class StepSums:
    """Steps of sharded layers, and their seconds: all, of the slowest convolutions, of home without its shards."""

    steps: int = 0
    seconds: float = 0.0
    conv: float = 0.0
    comp: float = 0.0

    def add(self, epoch: events.EpochEnded, home: str, steps: int) -> None:
        """Add an epoch, with the convolutions of the worker that took the longest (Marques et al., fig. 6)."""
        shards = {row.name: sum(row.conv_seconds.values()) for row in epoch.workers}
        self.conv += max(shards.values(), default=0.0)
        self.comp += sum(max(0.0, row.busy - shards[home]) for row in epoch.workers if row.name == home)
        self.seconds, self.steps = self.seconds + epoch.seconds, self.steps + steps


_NOTED = (
    *(events.RunResumed, events.WorkerJoined, events.WorkerLost, events.WorkerIgnored, events.WorkerLeftOut),
    *(events.ClockSet, events.WorkerLeft, events.RunPaused, events.RunContinued, events.Warned),
)


@dataclass
class History:
    """Folds events, in order; nothing but `take` and `forget` changes it."""

    start: events.RunStarted = field(default_factory=events.RunStarted)
    end: events.RunEnded | None = None
    epoch: float = 0.0
    rows: list[RoundRow] = field(default_factory=list)
    looks: list[EvaluationRow] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    changes: WorkerChanges = field(default_factory=WorkerChanges)
    kernels: dict[str, dict[str, int]] = field(default_factory=dict)
    shards: dict[str, dict[str, str]] = field(default_factory=dict)
    eq2: int | None = None
    choice: events.StrategyChosen | None = None  # the last one
    conv_seconds: dict[str, Counter[str]] = field(default_factory=dict)
    calibrated: dict[str, events.CalibratedWorker] = field(default_factory=dict)  # every worker ever
    devices: dict[str, str] = field(default_factory=dict)  # of every worker ever
    there: dict[tuple[int, int], frozenset[str]] = field(default_factory=dict)  # at a round, by its life and number
    servers: dict[tuple[int, int], events.ServerCounted] = field(
        default_factory=dict
    )  # last counts, by life and server
    attendance: Attendance = field(default_factory=Attendance)
    steps: int = 0  # that ended with an epoch; those that were made again count again
    steps_of: Counter[str] = field(default_factory=Counter)  # the same of each worker of sharded layers
    began: dict[int, float] = field(default_factory=lambda: {1: 0.0})  # seconds of the run, by life
    step_sums: StepSums = field(default_factory=StepSums)
    _moved: int = 0  # bytes of all rounds
    _home: str | None = None  # of the layers that are not sharded
    _step: int = 0  # of the run, at its last epoch's end
    _life: int = 1
    _undone: list[EvaluationRow] = field(default_factory=list)  # unless the run is resumed from behind them
    _numbers: dict[str, int] = field(default_factory=dict)  # of each worker's last round in this life

    def take(self, event: events.Event) -> None:
        """Take in one event."""
        self.attendance.take(event)
        self._take_of_run(event)
        self._take_of_workers(event)
        self.changes.take(event, self.now)
        if isinstance(event, _NOTED):
            self.notes += [Note(self.now, line) for line in describe(event)]

    def followed(self, some: Iterable[events.Event]) -> Iterator[events.Event]:
        """Yield events, and take each in."""
        for event in some:
            self.take(event)
            yield event

    @property
    def now(self) -> float:
        """Seconds of training so far."""
        return self.attendance.now

    @property
    def present(self) -> frozenset[str]:
        """The workers, or groups, that take part now."""
        return self.attendance.present

    def forget(self, most: int) -> None:
        """Keep about the last `most` rounds and troubles, and as many evaluations over the whole run; sums stay."""
        del self.rows[:-most], self.notes[:-most], self.changes.rows[:-most]
        while len(self.looks) > most:
            self.looks = self.looks[-1::-2][::-1]
        rounds = {(row.life, row.number) for row in self.rows}
        lives = {self._life, *(row.life for row in self.rows)}
        self.there = {key: names for key, names in self.there.items() if key in rounds}
        self.began = {life: at for life, at in self.began.items() if life in lives}
        self.servers = dict(list(self.servers.items())[-most:])
        self.attendance.forget(most)

    def _take_of_run(self, event: events.Event) -> None:
        match event:
            case events.RunStarted():
                self._start(event)
            case events.RunResumed():
                self._resume(event)
            case events.RoundEnded():
                self._round(event)
            case events.EpochEnded():
                self._epoch(event)
            case events.StrategyChosen():
                self.choice = event
            case events.ServerCounted():
                self.servers[self._life, event.server] = event
            case events.RunEnded():
                self.end = event

    def _take_of_workers(self, event: events.Event) -> None:
        match event:
            case events.WorkersCalibrated():
                self.calibrated |= {worker.name: worker for worker in event.workers}
                self.devices |= {worker.name: worker.device for worker in event.workers}
            case events.GroupsFormed():
                members = {member for group in event.groups for member in group.members} | {*event.left_out}
                own = {group.name: group.device for group in event.groups}
                self.devices = {name: device for name, device in self.devices.items() if name not in members} | own
            case events.KernelsSharded():
                self.kernels, self.eq2, self._home = event.kernels, event.eq2, event.home
                divided, kernels = event.divided, event.kernels.items()
                self.shards = {name: shard_texts(own, divided.get(name, {}), event.of) for name, own in kernels}
            case events.WorkerJoined():
                self.devices.setdefault(event.worker, "")

    def _start(self, event: events.RunStarted) -> None:
        self._step, self.epoch = 0, 0.0
        if self.rows:
            self._begin_life()
        self.start, self.end = event, None
        self._undone, self.looks = self.looks, []

    def _begin_life(self) -> None:
        self._life, self._numbers = self._life + 1, {}
        self.began[self._life] = self.now

    def _resume(self, event: events.RunResumed) -> None:
        self.looks = [look for look in self._undone if look.step <= event.step]
        latest = self.looks[-1].epoch if self.looks else 0.0
        self.epoch = latest if event.epoch is None else event.epoch
        self._step, self.began[self._life] = event.step, self.now

    def _round(self, event: events.RoundEnded) -> None:
        number = event.round + 1
        given = None if self.start.increments is None else min(number, self.start.increments)
        for member in event.members:
            self.conv_seconds.setdefault(member.name, Counter()).update(member.conv_seconds)
        self._add(RoundRow(self._life, number, given, self.now, event.epoch, event))

    def _epoch(self, event: events.EpochEnded) -> None:
        number = max(1, round(event.epoch))
        for part in event.workers:  # its part of an epoch of sharded kernels
            measured = part.model_dump(exclude={"name", "conv_seconds", "conv_samples"})
            numbers = events.RoundNumbers(worker=part.name, round=number - 1, pushes=0, **measured)
            self._add(RoundRow(self._life, number, None, self.now, event.epoch, numbers, apart=False))
            self.conv_seconds.setdefault(part.name, Counter()).update(part.conv_seconds)
        self._forget_undone(event)
        if event.step <= self._step:  # the run went back
            self._step = self.looks[-1].step if self.looks else 0
        made_steps = max(0, event.step - self._step)
        self.steps, self._step = self.steps + made_steps, event.step
        self.steps_of.update(dict.fromkeys((part.name for part in event.workers), made_steps))
        if self._home is not None and event.workers:
            self.step_sums.add(event, self._home, made_steps)
        judged = event.validation or events.Judged()
        made = [last for worker, last in self._numbers.items() if worker in self.present or not self.present]
        self.looks.append(
            EvaluationRow(
                epoch=event.epoch,
                at=self.now,
                step=event.step,
                rounds=sum(made) / len(made) if made else 0.0,
                moved=self._moved,
                loss=event.loss,
                accuracy=event.accuracy,
                validation_loss=judged.loss,
                validation_accuracy=judged.accuracy,
                auc=judged.auc,
                judged=judged.samples,
                validation_error=judged.error,
                metrics=judged.metrics,
                noise_scale=event.noise_scale,
                noise_error=event.noise_error,
                noise_within_error=event.noise_within_error,
                step_samples=event.step_samples,
            )
        )
        self.epoch = event.epoch

    def _forget_undone(self, event: events.EpochEnded) -> None:
        """Drop evaluations from behind this one, and one at its place: the run went back. They never decrease."""
        at = event.epoch, event.step
        while (last := self.looks[-1] if self.looks else None) and (
            last.epoch > event.epoch or last.step > event.step or (last.epoch, last.step) == at
        ):
            self.looks.pop()

    def _add(self, row: RoundRow) -> None:
        if row.number <= self._numbers.get(row.worker, 0):  # made again: the run went back
            self._begin_life()
            row = replace(row, life=self._life)
        self.rows.append(row)
        self._moved += row.numbers.bytes_up + row.numbers.bytes_down
        self.epoch = row.epoch
        self._numbers[row.worker] = row.number
        self.there[row.life, row.number] = self.present
