"""What a step of sharded layers is made of: the figure, from the logs of runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from daskcnn.errors import DataError
from daskcnn.events import EpochEnded, Event, KernelsSharded, RunResumed, RunStarted
from daskcnn.show.figure import Figure
from daskcnn.show.report_tables import tables

PARTS = ("communication", "convolutions", "the rest")
MILLI = 1e3
GAP = 0.8
"""Between the bars of two runs, in bars."""


def stacked(name: str, title: str, like: str, x: str, bars: Mapping[str, Sequence[float]]) -> Figure:
    """Bars by what stands below them: seconds of communication, of the slowest convolutions, of the rest."""
    xs = range(len(bars))
    curves = {part: (xs, [bar[i] for bar in bars.values()]) for i, part in enumerate(PARTS)}
    return Figure(name, title, like, x, "seconds a step", curves, stacked=True, ticks=tuple(bars))


def step_parts(runs: Mapping[str, Sequence[Event]]) -> Figure:
    """Milliseconds of a step of sharded runs, from their logs by name: of each, the papers' bar and one a worker.

    The papers' bar is `breakdown`; a worker's communication is all in which it does not compute (`tables.StepParts`).
    Raises DataError naming the run whose log has no epoch of sharded layers.
    """
    places: list[float] = []
    bars: list[tuple[str, tuple[float, float, float]]] = []
    for run, log in runs.items():
        begin = places[-1] + 1 + GAP if places else 0.0
        own = [(run, _parts_of(run, log)), *((w, (p.comm, p.conv, p.comp)) for w, p in tables(log).breakdown.items())]
        places += [begin + i for i in range(len(own))]
        bars += own
    return Figure(
        "breakdown",
        "What a step of sharded layers takes",
        "Marques et al. fig. 6 and 8",
        "runs by the papers' definition, each with its workers beside it",
        "milliseconds a step",
        {part: (places, [MILLI * parts[i] for _, parts in bars]) for i, part in enumerate(PARTS)},
        stacked=True,
        ticks=[name for name, _ in bars],
    )


def _parts_of(run: str, log: Iterable[Event]) -> tuple[float, float, float]:
    try:
        return breakdown(log)
    except DataError as error:
        raise DataError(f"{run}: {error}") from error


def breakdown(events: Iterable[Event]) -> tuple[float, float, float]:
    """Seconds a step of communication, convolutions and the rest, as the papers define them, of a sharded run's log.

    Convolutions: of the worker that takes the longest for its shards, with the layers that are spread with them. The
    rest: of home, besides its shards. Communication is what remains. Raises DataError where the log has no epoch.
    """
    seconds = conv = comp = 0.0
    steps = 0
    for epoch, home, made in _sharded_epochs(events):
        shards = {row.name: sum(row.conv_seconds.values()) for row in epoch.workers}
        conv += max(shards.values())
        comp += sum(max(0.0, row.busy - shards[home]) for row in epoch.workers if row.name == home)
        seconds, steps = seconds + epoch.seconds, steps + made
    if not steps:
        raise DataError(
            reason="this log has no epoch of sharded layers", remedy="give a run of strategy 'layer' that ended one"
        )
    return max(0.0, seconds - conv - comp) / steps, conv / steps, comp / steps


def _sharded_epochs(events: Iterable[Event]) -> Iterator[tuple[EpochEnded, str, int]]:
    """Every epoch's event, its home, and how many steps it made: a resumed run makes some again."""
    home, before = None, 0
    for event in events:
        if isinstance(event, RunStarted | RunResumed):
            before = event.step if isinstance(event, RunResumed) else 0
        elif isinstance(event, KernelsSharded):
            home = event.home
        elif isinstance(event, EpochEnded) and home is not None:
            yield event, home, event.step - before
            before = event.step
