"""A run that goes on, folded from its events within bounded memory; and all runs that a scheduler has heard of.

No Dask, no clock: when a message came is an argument. The folds are those of the terminal's display (`Board`) and of
the report (`History`), so the page, the display and the report cannot differ.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from daskcnn.events import DamagedEvent, Event, RunStarted, StepsEnded, UnknownEvent, parse
from daskcnn.show.board import Board
from daskcnn.show.history import History
from daskcnn.show.lines import describe
from daskcnn.show.text import clean

MOST_ROUNDS = 1_000
"""Rounds, looks at the center, troubles, and reports of steps of a run that are kept; at times up to twice as many."""
MOST_LINES, LONGEST_LINE = 200, 400
"""Lines about events of one run that are kept, and letters of one."""
MOST_RUNS = 16
"""Runs that are kept. The one that was heard longest ago goes first, one that has ended before one that has not."""
MOST_LAYERS = 400
"""Layers of a network that are kept."""


@dataclass(frozen=True, slots=True)
class LayerRow:
    """A layer of the network: its path, its kind with options, the shape of its output, its parameters."""

    name: str
    layer: str
    output: str
    parameters: int


@dataclass(frozen=True, slots=True)
class StepsRow:
    """A report of steps; `at` in seconds of the run."""

    at: float
    epoch: float
    loss: float | None
    images_per_second: float | None


@dataclass(frozen=True, slots=True)
class Message:
    """Events of one run, as its driver sends them.

    key: names the run among all. feed: names the driver's process, so that a resumed run is told from a message that
    came twice. first: number of the first record, counted from 0 through all messages of the feed. layers: of the
    network, each with the fields of a `LayerRow`; in the first message only.
    """

    key: str
    feed: str
    first: int
    records: Sequence[Mapping[str, Any]]
    layers: Sequence[Sequence[Any]] = ()


@dataclass
class LiveRun:
    """One run; `hear` is the only thing that changes it.

    heard: when its last message came, in seconds of the hearer's clock. at: when its last event was logged, in seconds
    of the driver's. version: events taken in so far. lines: seconds of the run, and what happened.
    """

    key: str
    layers: tuple[LayerRow, ...] = ()
    board: Board = field(default_factory=Board)
    history: History = field(default_factory=History)
    steps: deque[StepsRow] = field(default_factory=lambda: deque(maxlen=MOST_ROUNDS))
    lines: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=MOST_LINES))
    heard: float = 0.0
    at: float = 0.0
    version: int = 0
    _feed: str = ""
    _next: int = 0  # number of the record that the feed sends next

    @property
    def name(self) -> str:
        """What people call it."""
        return clean(PurePath(self.board.run).name or self.key)

    @property
    def ended(self) -> bool:
        """Whether it has said how it ended."""
        return self.history.end is not None

    def hear(self, message: Message, now: float) -> None:
        """Take in the events that have not come before; those that this version cannot read change nothing."""
        self.heard = now
        if message.feed != self._feed:
            self._feed, self._next = message.feed, 0
        if message.layers:
            self.layers = tuple(LayerRow(*row) for row in message.layers[:MOST_LAYERS])
        for record in message.records[max(0, self._next - message.first) :]:
            try:
                event = parse(record)
            except DamagedEvent:
                continue
            if not isinstance(event, UnknownEvent):
                self._take(event)
        self._next = max(self._next, message.first + len(message.records))

    def _take(self, event: Event) -> None:
        self.at = event.at or self.at
        if isinstance(event, RunStarted):  # of a resumed run too: its workers are others
            self.board = Board()
            self.steps.clear()
        self.board.apply(event, self.at)
        self.history.take(event)
        at = self.history.seconds_at(event.at)
        if isinstance(event, StepsEnded):
            batch, pace = self.history.start.batch_size, event.seconds_per_step
            speed = batch / pace if batch and pace > 0 else None
            self.steps.append(StepsRow(at, event.epoch, event.loss, speed))
        self.lines.extend((at, line[:LONGEST_LINE]) for line in describe(event))
        history = self.history
        if max(len(history.rows), len(history.looks), len(history.notes)) >= 2 * MOST_ROUNDS:
            history.forget(MOST_ROUNDS)
        self.version += 1


@dataclass
class Runs:
    """The runs that a scheduler has heard of, by key, in the order in which they were first heard."""

    runs: dict[str, LiveRun] = field(default_factory=dict)

    def hear(self, message: Message, now: float) -> None:
        """Take in a message that came at `now`."""
        self.runs.setdefault(message.key, LiveRun(message.key)).hear(message, now)
        if len(self.runs) > MOST_RUNS:
            others = [run for run in self.runs.values() if run.key != message.key]
            del self.runs[min(others, key=lambda run: (not run.ended, run.heard)).key]

    def labels(self) -> list[tuple[str, str]]:
        """The key and the name of every run, the latest first. Runs of one name are told apart by their keys."""
        return list(self._labels())[::-1]

    def _labels(self) -> Iterator[tuple[str, str]]:
        names = Counter(run.name for run in self.runs.values())
        for key, run in self.runs.items():
            yield key, run.name if names[run.name] == 1 else f"{run.name} ({clean(key)})"
