"""What a step of sharded layers is made of: the figure, from reports on runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple

from daskcnn.errors import DataError
from daskcnn.show.figure import Figure
from daskcnn.show.report_tables import RunReport, StepParts
from daskcnn.show.text import clean

PARTS = ("communication", "convolutions", "the rest")
MILLI = 1e3
GAP = 0.8
"""Between the bars of two runs, in bars."""


def stacked(name: str, title: str, like: str, x: str, bars: Mapping[str, Sequence[float]]) -> Figure:
    """Bars by what stands below them: seconds of communication, of the slowest convolutions, of the rest."""
    xs = range(len(bars))
    curves = {part: (xs, [bar[i] for bar in bars.values()]) for i, part in enumerate(PARTS)}
    return Figure(name, title, like, x, "seconds a step", curves, stacked=True, ticks=tuple(bars))


def step_parts(reports: Mapping[str, RunReport]) -> Figure:
    """Milliseconds of a step of sharded runs, by name: of each, the papers' bar and one a worker.

    The papers' bar is `papers_step`; a worker's communication is all in which it does not compute (`StepParts`).
    Raises DataError naming the run whose log has no epoch of sharded layers.
    """
    places: list[float] = []
    bars: list[tuple[str, StepParts]] = []
    for run, report in reports.items():
        begin = places[-1] + 1 + GAP if places else 0.0
        own = [(run, _papers_step(run, report)), *report.breakdown.items()]
        places += [begin + i for i in range(len(own))]
        bars += own
    return Figure(
        "breakdown",
        "What a step of sharded layers takes",
        "Marques et al. fig. 6 and 8",
        "runs by the papers' definition, each with its workers beside it",
        "milliseconds a step",
        {part: (places, [MILLI * astuple(parts)[i] for _, parts in bars]) for i, part in enumerate(PARTS)},
        stacked=True,
        ticks=[clean(name) for name, _ in bars],
    )


def _papers_step(run: str, report: RunReport) -> StepParts:
    if report.papers_step is None:
        raise DataError(
            clean(run), "this log has no epoch of sharded layers", "give a run of strategy 'layer' that ended one"
        )
    return report.papers_step
