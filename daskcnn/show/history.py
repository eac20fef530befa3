"""The course of a run as its events tell it: rounds, looks at the center, troubles, each with its time.

Rounds. A round is one worker's push cycle as the log has it; in a layer-sharded run, where all workers train on every
sample, an epoch. Its number counts from 1, for each worker by itself.

Lives. A run that is resumed, or whose server is lost, makes some rounds again: its next life. Rounds are kept of all
lives, as they are work that was done. The clock and the looks go back to the checkpoint that was resumed from.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import singledispatchmethod
from typing import Any

from daskcnn import events
from daskcnn.show.lines import describe
from daskcnn.show.text import shard_text

SPENT = ("load", "compute", "evaluation", "communication", "wait")
"""What a round is made of. A log has the sums of a round, not their order."""
_APART = frozenset(("load", "communication", "evaluation"))
"""What is measured of a round alone: in an epoch of sharded layers it counts as waiting."""


@dataclass(frozen=True, slots=True)
class RoundRow:
    """One worker's round; `at` in seconds of the run, `epoch` the run's then.

    life, number: see the module's text. increment: how many parts of its samples the worker had been given. numbers:
    what it measured; apart: those of `_APART` too.
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
        """A column of this name, its own or of its numbers; None: not measured."""
        if name in _OWN:
            return getattr(self, name)
        return getattr(self.numbers, name) if self.apart or name not in _APART else None

    @property
    def spent(self) -> tuple[float, ...]:
        """Seconds of each of `SPENT`; 0 for what was not measured apart."""
        n = self.numbers
        load, evaluation, communication = (n.load, n.evaluation, n.communication) if self.apart else (0.0, 0.0, 0.0)
        return load, max(0.0, n.busy - load), evaluation, communication, n.wait

    def to_dict(self) -> dict[str, Any]:
        """Every column, by name."""
        return {name: self.value(name) for name in ROUND_COLUMNS}


_OWN = frozenset(("life", "number", "increment", "at", "epoch"))
_NUMBERS = [name for name in events.RoundNumbers.model_fields if name not in ("worker", "round")]
ROUND_COLUMNS = ("life", "number", "increment", "worker", "at", "epoch", *_NUMBERS)
"""What is kept of a round: its own fields, and every number of the event."""


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """A look at the center: when, and how good it was. rounds: made until then, the mean of the workers.

    moved: bytes of all rounds until then, those that were made again included. loss, accuracy: of the training since
    the last look.
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


@dataclass(frozen=True, slots=True)
class Note:
    """Something out of the ordinary, and when (seconds of the run)."""

    at: float
    text: str


@dataclass
class StepSums:
    """Steps of sharded layers, and their seconds: all, of the slowest convolutions, of home besides its shards."""

    steps: int = 0
    seconds: float = 0.0
    conv: float = 0.0
    comp: float = 0.0

    def add(self, epoch: events.EpochEnded, home: str, steps: int) -> None:
        """An epoch: its convolutions are those of the worker that took the longest (Marques et al., fig. 6)."""
        shards = {row.name: sum(row.conv_seconds.values()) for row in epoch.workers}
        self.conv += max(shards.values(), default=0.0)
        self.comp += sum(max(0.0, row.busy - shards[home]) for row in epoch.workers if row.name == home)
        self.seconds, self.steps = self.seconds + epoch.seconds, self.steps + steps


_TIMELESS = (
    *(events.Calibrating, events.LinkSpeeds, events.SamplesAllocated, events.StepsEnded, events.UnknownEvent),
    events.RunEnded,
)
"""Events that do not move a report's clock."""


@dataclass
class History:
    """Takes in events, in order; `take` is the only thing that changes it.

    devices, calibrated: of every worker ever. present: the workers of now, `there` of a (life, number) of a round.
    servers: the last that each server said, by life and its own number. now: seconds of training. steps: that ended
    with an epoch, those that were made again counted again. began: seconds of the run at which each life began.
    step_sums: of steps of sharded layers.
    """

    start: events.RunStarted = field(default_factory=events.RunStarted)
    end: events.RunEnded | None = None
    epoch: float = 0.0
    rows: list[RoundRow] = field(default_factory=list)
    looks: list[EvaluationRow] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    kernels: dict[str, dict[str, int]] = field(default_factory=dict)
    shards: dict[str, dict[str, str]] = field(default_factory=dict)
    eq2: int | None = None
    conv_seconds: dict[str, Counter[str]] = field(default_factory=dict)
    calibrated: dict[str, events.CalibratedWorker] = field(default_factory=dict)
    devices: dict[str, str] = field(default_factory=dict)
    present: frozenset[str] = frozenset()
    there: dict[tuple[int, int], frozenset[str]] = field(default_factory=dict)
    servers: dict[tuple[int, int], events.ServerCounted] = field(default_factory=dict)
    now: float = 0.0
    steps: int = 0
    began: dict[int, float] = field(default_factory=lambda: {1: 0.0})
    step_sums: StepSums = field(default_factory=StepSums)
    _moved: int = 0  # bytes of all rounds
    _home: str | None = None  # of the layers that are not sharded
    _step: int = 0  # of the run, at its last epoch's end
    _life: int = 1
    _begun: float | None = None  # on the events' own clock
    _before: float = 0.0  # seconds of the run at that moment
    _kept: dict[int, float] = field(default_factory=dict)  # seconds of each checkpoint, by its step
    _undone: list[EvaluationRow] = field(default_factory=list)  # unless the run is resumed from behind them
    _numbers: dict[str, int] = field(default_factory=dict)  # of each worker's last round in this life

    def take(self, event: events.Event) -> None:
        """Take in one event; those that a report has no use for change nothing."""
        if not isinstance(event, _TIMELESS):
            self.now = self.seconds_at(event.at)
        self._take(event)

    def seconds_at(self, at: float | None) -> float:
        """Seconds of the run at this time of the events' clock; those of now where it is not known."""
        return self.now if at is None or self._begun is None else self._before + at - self._begun

    def forget(self, most: int) -> None:
        """Keep about the last `most` rounds and troubles, and as many looks over the whole run: for a view of a run
        that goes on, whose memory must not grow. Sums, such as bytes moved, stay what they are.
        """
        del self.rows[:-most], self.notes[:-most]
        while len(self.looks) > most:
            self.looks = self.looks[-1::-2][::-1]
        rounds = {(row.life, row.number) for row in self.rows}
        lives = {self._life, *(row.life for row in self.rows)}
        self.there = {key: names for key, names in self.there.items() if key in rounds}
        self.began = {life: at for life, at in self.began.items() if life in lives}
        self.servers = dict(list(self.servers.items())[-most:])
        self._kept = dict(list(self._kept.items())[-most:])

    @singledispatchmethod
    def _take(self, event: events.Event) -> None:
        """Take in an event by its class; one without a method of its own changes nothing."""

    @_take.register
    def _(self, event: events.RunStarted) -> None:
        """The driver starts. Unless a resume follows, it starts at the beginning."""
        self._before, self.now, self._step = 0.0, 0.0, 0
        if self.rows:
            self._begin_life()
        self.start, self.end, self._begun = event, None, event.at
        self._undone, self.looks = self.looks, []

    def _begin_life(self) -> None:
        self._life += 1
        self._numbers = {}
        self.began[self._life] = self.now

    @_take.register
    def _(self, event: events.RunResumed) -> None:
        self.looks = [look for look in self._undone if look.step <= event.step]
        latest = self.looks[-1].at if self.looks else 0.0
        self._before = self.now = self.began[self._life] = self._kept.get(event.step, latest)
        self._step = event.step
        self._note(event)

    @_take.register
    def _(self, event: events.WorkersCalibrated) -> None:
        """Training begins."""
        self._begun, self.now = event.at, self._before
        self.calibrated |= {worker.name: worker for worker in event.workers}
        self.devices |= {worker.name: worker.device for worker in event.workers}
        self.present = frozenset(worker.name for worker in event.workers)

    @_take.register
    def _(self, event: events.GroupsFormed) -> None:
        """Groups take the place of their members."""
        members = {member for group in event.groups for member in group.members} | {*event.left_out}
        own = {group.name: group.device for group in event.groups}
        self.devices = {name: device for name, device in self.devices.items() if name not in members} | own
        self.present = frozenset(own)

    @_take.register
    def _(self, event: events.RoundEnded) -> None:
        number = event.round + 1
        if number <= self._numbers.get(event.worker, 0):  # made again, for a new server
            self._begin_life()
        given = None if self.start.increments is None else min(number, self.start.increments)
        for member in event.members:
            self.conv_seconds.setdefault(member.name, Counter()).update(member.conv_seconds)
        self._add(RoundRow(self._life, number, given, self.now, event.epoch, event))

    @_take.register
    def _(self, event: events.EpochEnded) -> None:
        if event.at is None:  # a log without times
            self.now += event.seconds
        for part in event.workers:
            self._add(self._part_row(part, event))
            self.conv_seconds.setdefault(part.name, Counter()).update(part.conv_seconds)
        made_steps = event.step - self._step
        self.steps, self._step = self.steps + made_steps, event.step
        if self._home is not None and event.workers:
            self.step_sums.add(event, self._home, made_steps)
        judged = event.validation or events.Judged()
        made = [number for worker, number in self._numbers.items() if worker in self.present or not self.present]
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
            )
        )
        self.epoch = event.epoch

    def _part_row(self, part: events.EpochWorker, event: events.EpochEnded) -> RoundRow:
        """Kernels are sharded: a worker's part of an epoch. What it did not compute in counts as waiting."""
        number = max(1, round(event.epoch))
        numbers = events.RoundNumbers(
            worker=part.name,
            round=number - 1,
            samples=part.samples,
            busy=part.busy,
            wait=part.wait,
            communication=part.communication,
            bytes_up=part.bytes_up,
            bytes_down=part.bytes_down,
            pushes=0,
        )
        return RoundRow(self._life, number, None, self.now, event.epoch, numbers, apart=False)

    def _add(self, row: RoundRow) -> None:
        self.rows.append(row)
        self._moved += row.numbers.bytes_up + row.numbers.bytes_down
        self.epoch = row.epoch
        self._numbers[row.worker] = row.number
        self.there[row.life, row.number] = self.present

    @_take.register
    def _(self, event: events.WorkerJoined) -> None:
        self.present |= {event.worker}
        self.devices.setdefault(event.worker, "")
        self._note(event)

    @_take.register
    def _(self, event: events.WorkerLost) -> None:
        self.present -= {event.worker}
        self._note(event)

    @_take.register(events.WorkerIgnored | events.WorkerLeftOut | events.Warned)
    def _note(self, event: events.Event) -> None:
        self.notes += [Note(self.now, line) for line in describe(event)]

    @_take.register
    def _(self, event: events.KernelsSharded) -> None:
        self.kernels, self.eq2, self._home = event.kernels, event.eq2, event.home
        self.shards = {
            worker: {
                layer: shard_text(n, event.divided.get(worker, {}).get(layer, "kernels"), event.of.get(layer, n))
                for layer, n in own.items()
            }
            for worker, own in event.kernels.items()
        }

    @_take.register
    def _(self, event: events.ServerCounted) -> None:
        self.servers[self._life, event.server] = event

    @_take.register
    def _(self, event: events.CheckpointWritten) -> None:
        self._kept[event.step] = self.now

    @_take.register
    def _(self, event: events.RunEnded) -> None:
        self.end = event
