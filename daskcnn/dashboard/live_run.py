"""Runs that go on, folded from their events within bounded memory, and their figures, lanes, network and lines.

There is no Dask and no clock here: the time of a message is an argument. The folds are those of the terminal's display
(`Board`) and of the report (`History`), and so are curves, lanes and shares: page, display and report cannot differ. A
round is known when it has ended, so a drawing over time ends at the last round of the slowest worker.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from daskcnn.events import ClockSet, DamagedEvent, Event, RunStarted, StepsEnded, UnknownEvent, parse
from daskcnn.show.alone import LAYER
from daskcnn.show.board import Board
from daskcnn.show.history import SPENT, History, RoundRow
from daskcnn.show.lines import describe
from daskcnn.show.report_tables import RunReport, report_of
from daskcnn.show.run_figures import MEGA, Curve, Figure, run_figures, thinned
from daskcnn.show.text import clean, clock, count, number, percent, plural, spread
from daskcnn.show.timeline import Stretch, divided, standing, timeline

MOST_ROUNDS = 1_000
"""Rounds, evaluations, troubles, and reports of steps of a run that are kept; at times up to twice as many."""
MOST_LINES, LONGEST_LINE = 200, 400  # lines about events of one run that are kept, and letters of one
MOST_RUNS = 16
"""Runs that are kept. Ended runs go first, and those that were heard longest ago."""
MOST_LAYERS = 400  # layers of a network that are kept


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
    """Events of one run, by its key, as its driver sends them.

    feed: of the driver's process; it tells a resumed run from a message that came twice. first: number of the first
    record, from 0, through all messages of the feed. layers: as `LayerRow`; in the first message only.
    """

    key: str
    feed: str
    first: int
    records: Sequence[Mapping[str, Any]]
    layers: Sequence[Sequence[Any]] = ()


@dataclass
class LiveRun:
    """One run; nothing but `hear` changes it. lines: seconds of the run, and a line of an event.

    heard: time of the last message, in seconds of the hearer's clock; at: of the last event, of the driver's as it was
    at first. feed: of the process that sent it.
    """

    key: str
    layers: tuple[LayerRow, ...] = ()
    board: Board = field(default_factory=Board)
    history: History = field(default_factory=History)
    steps: deque[StepsRow] = field(default_factory=lambda: deque(maxlen=MOST_ROUNDS))
    lines: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=MOST_LINES))
    heard: float = 0.0
    at: float = 0.0
    version: int = 0  # events taken in so far
    feed: str = ""
    _ahead: float = 0.0  # seconds by which the driver's clock was set forward
    _next: int = 0  # number of the record that the feed sends next

    @property
    def name(self) -> str:
        """The run's name for people."""
        return clean(PurePath(self.board.run).name or self.key)

    @property
    def ended(self) -> bool:
        """True if its last event came."""
        return self.history.end is not None

    def hear(self, message: Message, now: float) -> None:
        """Take in the events that have not come before; those that this version cannot read change nothing."""
        self.heard = now
        if message.feed != self.feed:
            self.feed, self._next = message.feed, 0
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
        self._ahead += event.seconds if isinstance(event, ClockSet) else 0.0
        self.at = self.at if event.at is None else event.at - self._ahead
        if isinstance(event, RunStarted):  # of a resumed run too: its workers are others
            self.board = Board()
            self.steps.clear()
        self.board.apply(event, self.at)
        self.history.take(event)
        at = self.history.attendance.seconds_at(event.at)
        if isinstance(event, StepsEnded):
            batch, pace = self.history.start.batch_size, event.seconds_per_step
            self.steps.append(StepsRow(at, event.epoch, event.loss, batch / pace if batch and pace > 0 else None))
        self.lines.extend((at, line[:LONGEST_LINE]) for line in describe(event))
        if max(len(self.history.rows), len(self.history.looks), len(self.history.notes)) >= 2 * MOST_ROUNDS:
            self.history.forget(MOST_ROUNDS)
        self.version += 1


@dataclass
class Runs:
    """The runs that a scheduler has heard of, by key, in the order in which they were started or resumed."""

    runs: dict[str, LiveRun] = field(default_factory=dict)

    def hear(self, message: Message, now: float) -> None:
        """Take in a message that came at `now`."""
        run = self.runs.get(message.key) or LiveRun(message.key)
        if message.feed != run.feed:  # one that is resumed is the latest again
            self.runs.pop(message.key, None)
        self.runs[message.key] = run
        run.hear(message, now)
        if len(self.runs) > MOST_RUNS:
            others = [run for run in self.runs.values() if run.key != message.key]
            del self.runs[min(others, key=lambda run: (not run.ended, run.heard)).key]

    def labels(self) -> list[tuple[str, str]]:
        """Return the key and the name of every run, the latest first; runs of one name have their keys behind it."""
        names = Counter(run.name for run in self.runs.values())
        runs = reversed(self.runs.items())
        return [(key, run.name if names[run.name] == 1 else f"{run.name} ({clean(key)})") for key, run in runs]


MOST_PARTS, MOST_LANES = 1_500, 32  # parts of all lanes together, and workers that have a lane
MOST_COLOURS = 7  # workers in a figure of pushes, each with its colour
MOST_BOXES = 60  # layers that are drawn
BINS, LEAST_BIN = 120, 0.25  # points of a curve of speed, and the least seconds of one
SILENT = 15.0
"""Seconds without a message after which a run that has not ended counts as silent. It may be in a long round."""
TITLES = {
    "accuracy": ("Accuracy", "seconds", "accuracy, %"),
    "loss": ("Loss", "epoch", "mean loss per sample"),
    "throughput": ("Throughput", "seconds", "images/s"),
    "traffic": ("Traffic of all workers", "seconds", "MB/s"),
    "staleness": ("Staleness of pushes", "seconds", "merges between pull and push"),
    "gamma": ("Attenuation γ of pushes", "seconds", "γ"),
}
"""Every figure of the page in its order: title, and labels of its axes."""


@dataclass(frozen=True, slots=True)
class ShownBar:
    """A part of a row: one of `SPENT` in seconds of the run, or a worker's part of a layer, 0 to 1.

    name: of the part or the worker; empty if the layer is not divided.
    """

    row: str
    name: str
    begin: float
    end: float
    text: str = ""


@dataclass(frozen=True)
class ShownRun:
    """All that a page shows of a run. lanes, layers: labels from the top down. table: a row a layer."""

    figures: Mapping[str, Figure]
    lanes: tuple[str, ...]
    parts: tuple[ShownBar, ...]
    layers: tuple[str, ...]
    boxes: tuple[ShownBar, ...]
    table: tuple[tuple[str, ...], ...]
    lines: tuple[tuple[str, str], ...]


def shown(run: LiveRun) -> ShownRun:
    """Return all that there is to see now."""
    report = report_of(run.history)
    lanes, parts = _lanes(run, report)
    rows = spread(run.layers, MOST_BOXES) if any(run.history.kernels.values()) else []  # nothing if none is divided
    return ShownRun(
        figures={name: figure for name, figure in _figures(run, report) if figure.curves or figure.points},
        lanes=tuple(lanes),
        parts=tuple(parts),
        layers=tuple(map(_layer_label, rows)),
        boxes=tuple(box for row in rows for box in _boxes(run, row)),
        table=tuple(_layer_cells(run, row) for row in run.layers),
        lines=tuple((clock(max(0.0, at)), line) for at, line in reversed(run.lines)),
    )


def heading(run: LiveRun, now: float) -> str:
    """Return the run in a few lines. now: seconds of the hearer's clock."""
    board, start = run.board, run.history.start
    epochs = f"{board.epoch:.4g} of {board.epochs:g}" if board.epochs else f"{board.epoch:.4g}"
    steps = "step" if board.strategy == LAYER else "merges"
    facts = [f"{board.status}: epoch {epochs}", *([f"{steps} {count(board.step)}"] if board.step is not None else [])]
    facts += [f"loss {number(board.loss)}"] if board.loss is not None else []
    facts += [f"accuracy {percent(board.accuracy)}"] if board.accuracy is not None else []
    if board.validation_accuracy is not None:
        accuracy = percent(board.validation_accuracy, board.validation_error)
        best = "" if board.best_validation is None else f" (best {percent(board.best_validation)})"
        facts.append(f"validation {accuracy}{best}")
    if run.history.end is not None and run.history.end.test is not None:
        facts.append(f"test {percent(run.history.end.test.accuracy)}")
    left = None if run.ended else board.remaining(run.at)
    facts += [f"{clock(left)} left"] if left is not None else []
    silent = now - run.heard
    if silent > SILENT and not run.ended:
        facts.append(f"nothing heard for {clock(silent)}")
    partition = f" + {start.partition}" if start.partition else ""
    what = f"{board.strategy}{partition}, {start.model or 'a network'} on {start.dataset or 'a data set'}"
    return f"{clean(what)}\n{clean(', '.join(facts))}"


# --- figures ---


def _figures(run: LiveRun, report: RunReport) -> Iterator[tuple[str, Figure]]:
    reported = {figure.name: figure for figure in run_figures({run.name: report})}
    losses = dict(reported["loss-by-epoch"].curves) if "loss-by-epoch" in reported else {}
    if steps := [(row.epoch, row.loss) for row in run.steps if row.loss is not None]:
        losses["steps"] = thinned(steps)
    accuracy = reported.get("accuracy-by-time", _figure("accuracy", {}))
    yield "accuracy", replace(_figure("accuracy", accuracy.curves), levels=accuracy.levels)
    yield "loss", _figure("loss", losses)
    speeds = _speeds(run, report)
    yield "throughput", _figure("throughput", {k: v for k, v in speeds.items() if k == "images"})
    yield "traffic", _figure("traffic", {k: v for k, v in speeds.items() if k != "images"})
    for name, usual in (("staleness", None), ("gamma", 1.0)):
        points = _pushes(report, name)
        told = any(y != usual for _, ys in points.values() for y in ys)  # a rule without γ has 1 throughout
        yield name, replace(_figure(name, {}), points=points if told else {})


def _figure(name: str, curves: Mapping[str, Curve]) -> Figure:
    title, x, y = TITLES[name]
    return Figure(name, title, "", x, y, curves)


def _pushes(report: RunReport, name: str) -> dict[str, Curve]:
    """Points by worker; none where the rule has no stale pushes, or no γ."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in report.rounds:
        if (value := row.value(name)) is not None:
            found.setdefault(row.worker, []).append((row.at, float(value)))
    if not any(value for points in found.values() for _, value in points):
        return {}
    return {clean(worker): thinned(found[worker]) for worker in spread(list(found), MOST_COLOURS)}


def _speeds(run: LiveRun, report: RunReport) -> dict[str, Curve]:
    """Images, and MB up and down, per second: those of a round are shared out over its time."""
    rows, present = standing(report), run.history.present
    last = {row.worker: row.at for row in rows if row.worker in present or not present}
    if not last:
        return _of_steps(run)
    until = min(last.values())  # the end of the last round of the worker that is behind all others
    begin = max(0.0, min(row.at - sum(row.spent) for row in rows))
    width = max(LEAST_BIN, (until - begin) / BINS)
    bins = [each for each in divided(list(_moved(rows)), width) if begin <= each.begin and each.end <= until]
    middles, curves = [(each.begin + each.end) / 2 for each in bins], {}
    for i, (name, unit) in enumerate((("images", 1.0), ("up", MEGA), ("down", MEGA))):
        if any(each.spent[i] for each in bins):
            curves[name] = (middles, [each.spent[i] / width / unit for each in bins])
    return curves | _of_steps(run)


def _of_steps(run: LiveRun) -> dict[str, Curve]:
    """Images per second of a layer-sharded run, which reports its steps more often."""
    points = [(row.at, row.images_per_second) for row in run.steps if row.images_per_second is not None]
    return {"images": thinned(points)} if points else {}


def _moved(rows: Iterable[RoundRow]) -> Iterator[Stretch]:
    """A stretch a round with its images and its bytes up and down. An epoch that workers share counts once."""
    counted = set[tuple[int, int]]()
    for row in rows:
        n, key = row.numbers, (row.life, row.number)
        images = 0 if not row.apart and key in counted else n.samples
        counted.add(key)
        begin = max(0.0, row.at - sum(row.spent))
        yield Stretch(begin, max(begin, row.at), (float(images), float(n.bytes_up), float(n.bytes_down)))


# --- lanes ---


def _lanes(run: LiveRun, report: RunReport) -> tuple[list[str], list[ShownBar]]:
    """Labels, and parts one after the other. A worker that is not calibrated yet has a label only."""
    drawn = timeline(report, most=MOST_PARTS, lanes=MOST_LANES)
    labels = {lane.worker: _label(run, lane.worker) for lane in drawn.lanes}
    waiting = [name for name, line in run.board.workers.items() if line.doing and name not in labels]
    parts = [part for lane in drawn.lanes for part in _parts(labels[lane.worker], lane.stretches)]
    return [*labels.values(), *(_label(run, name) for name in waiting[:MOST_LANES])], parts


def _label(run: LiveRun, name: str) -> str:
    """The worker, and its samples or kernels; before it trains, what it measures."""
    line, kernels = run.board.workers.get(name), sum(run.history.kernels.get(name, {}).values())
    facts = [plural(count(kernels), "kernel")] if kernels else []
    if line is not None:
        facts += [plural(count(line.given), "sample")] if line.given is not None and not kernels else []
        facts += filter(None, (line.doing, line.state))
    return clean(", ".join([name, *facts]))


def _parts(label: str, stretches: Sequence[Stretch]) -> Iterator[ShownBar]:
    for each in stretches:
        begin = each.begin
        for kind, seconds in zip(SPENT, each.spent, strict=True):
            if seconds > 0:
                yield ShownBar(label, kind, begin, begin + seconds)
                begin += seconds


# --- the network ---


def _layer_label(row: LayerRow) -> str:
    return clean(f"{row.name}  {row.layer.partition('(')[0]}  {row.output}")


def _boxes(run: LiveRun, row: LayerRow) -> Iterator[ShownBar]:
    """Side by side, in proportion to the shards."""
    label, left = _layer_label(row), 0.0
    own = {worker: shards[row.name] for worker, shards in run.history.kernels.items() if shards.get(row.name)}
    if not own:
        yield ShownBar(label, "", 0.0, 1.0)
    for worker, kernels in own.items():
        right = left + kernels / sum(own.values())
        yield ShownBar(label, clean(worker), left, min(1.0, right), run.history.shards[worker][row.name])
        left = right


def _layer_cells(run: LiveRun, row: LayerRow) -> tuple[str, ...]:
    """Name, kind, output, parameters, and the workers' parts."""
    having = [worker for worker, own in run.history.kernels.items() if own.get(row.name)]
    whose = ", ".join(f"{worker} {run.history.shards[worker][row.name]}" for worker in having)
    cells = (row.name, row.layer, row.output, count(row.parameters) if row.parameters else "", whose)
    return tuple(clean(cell) for cell in cells)
