"""Runs of a sweep by cell: runs that differ in their seeds alone, as mean and standard deviation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, stdev
from typing import Any

import numpy as np

from daskcnn.show.comparison import DONE, Comparison, Value, compare
from daskcnn.show.report_tables import RunReport
from daskcnn.show.run_figures import Curve, Figure
from daskcnn.show.text import aligned, count, duration, number, percent

_SEEDS = ("train.seed", "data.seed")
_FIGURES: dict[str, Callable[[float], str]] = {
    "test accuracy": percent,
    "best of the run": percent,
    "test loss": number,
    "least of the run": number,
    "time": duration,
    "images/s": count,
}
"""The figures of a cell, by their labels in a comparison."""
_BEST = {"test accuracy": max, "best of the run": max, "test loss": min, "least of the run": min}


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure of the runs of a cell that have it. deviation: the standard deviation, None of a single run."""

    mean: float
    deviation: float | None
    runs: int


@dataclass(frozen=True, slots=True)
class SweepCell:
    """Runs that differ in their seeds alone.

    values: of the keys that the sweep varies. members: places of the runs among all. done: runs that ended well.
    """

    values: Mapping[str, Value]
    shown: tuple[str, ...]
    runs: tuple[str, ...]
    members: tuple[int, ...]
    done: int
    figures: Mapping[str, Spread]


@dataclass(frozen=True, slots=True)
class SweepTable:
    """A sweep's cells. keys: those that it varies, but for the seed. best: the cell with the best result, if any."""

    keys: tuple[str, ...]
    cells: tuple[SweepCell, ...]
    best: int | None
    differences: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return asdict(self)


def sweep_table(reports: Sequence[RunReport], methods: Sequence[Mapping[str, Any]]) -> SweepTable:
    """Return the cells of runs. Only runs that ended well count in figures; methods: as `compare` has them."""
    found = compare(reports, methods=methods)
    keys = tuple(line for line in found.keys if line.label not in _SEEDS)
    members = defaultdict[tuple[Value, ...], list[int]](list)
    for i in range(len(reports)):
        members[tuple(line.values[i] for line in keys)].append(i)
    cells = tuple(
        SweepCell(
            {line.label: value for line, value in zip(keys, values, strict=True)},
            tuple(line.shown[runs[0]] for line in keys),
            tuple(found.runs[i] for i in runs),
            tuple(runs),
            sum(reports[i].status == DONE for i in runs),
            _figures(found, [i for i in runs if reports[i].status == DONE]),
        )
        for values, runs in members.items()
    )
    return SweepTable(tuple(line.label for line in keys), cells, _best(cells), found.differences)


def _figures(found: Comparison, runs: Sequence[int]) -> dict[str, Spread]:
    figures = dict[str, Spread]()
    for line in found.lines:
        values = [value for i in runs if isinstance(value := line.values[i], int | float)]
        if line.label in _FIGURES and values:
            figures[line.label] = Spread(mean(values), stdev(values) if len(values) > 1 else None, len(values))
    return figures


def _best(cells: Sequence[SweepCell]) -> int | None:
    """The cell with the best mean of the first figure that says how good a network is."""
    for label, better in _BEST.items():
        known = {cell.figures[label].mean: i for i, cell in reversed([*enumerate(cells)]) if label in cell.figures}
        if known:
            return known[better(known)] if len(known) > 1 else None
    return None


def format_sweep(found: SweepTable) -> str:
    """Return a line a cell: its values, its runs, and mean ± standard deviation of each figure."""
    labels = [label for label in _FIGURES if any(label in cell.figures for cell in found.cells)]
    rows = [[*(found.keys or ("sweep",)), "runs", *labels]]
    for i, cell in enumerate(found.cells):
        runs = f"{cell.done}/{len(cell.runs)}" if cell.done < len(cell.runs) else str(cell.done)
        figures = [_spread(cell.figures.get(label), _FIGURES[label]) for label in labels]
        rows.append([*(cell.shown or ("all",)), f"{runs}{'*' if i == found.best else ' '}", *figures])
    notes = [
        "mean ± standard deviation of the runs that ended well",
        *(["* the best"] if found.best is not None else []),
    ]
    warnings = [f"warning: {difference}" for difference in found.differences]
    return "\n".join([*aligned(rows, left=max(1, len(found.keys))), "", "; ".join(notes), *warnings])


def _spread(found: Spread | None, text: Callable[[float], str]) -> str:
    if found is None:
        return "-"
    if found.deviation is None:
        return text(found.mean)
    if text is percent:
        return percent(found.mean, found.deviation)
    return f"{text(found.mean)} ± {text(found.deviation)}"


def sweep_figure(reports: Sequence[RunReport], table: SweepTable) -> Figure:
    """Return the mean validation accuracy of each cell by epoch, of the runs that its figures are of.

    A cell none of whose runs ended well has a curve of those that there are, and says so.
    """
    curves = dict[str, Curve]()
    for cell in table.cells:
        own = [(reports[i].status == DONE, curve) for i in cell.members if (curve := _accuracies(reports[i]))]
        if not own:
            continue
        ended = [curve for done, curve in own if done]
        words = [f"{key.rpartition('.')[2]}={value}" for key, value in zip(table.keys, cell.shown, strict=True)]
        label = ", ".join(words) or "all"
        curves[label if ended else f"{label} (none ended well)"] = _mean(ended or [curve for _, curve in own])
    title = "Validation accuracy by epoch, mean of the seeds"
    return Figure("sweep", title, "", "epoch", "validation accuracy, %", curves, counted=True)


def _accuracies(report: RunReport) -> dict[float, float]:
    """The validation accuracies in per cent, by epoch."""
    known = ((look.epoch, look.validation_accuracy) for look in report.looks)
    return {epoch: 100 * accuracy for epoch, accuracy in known if accuracy is not None}


def _mean(runs: Sequence[Mapping[float, float]]) -> Curve:
    """The mean over the epochs that all runs have been at; in between, a run's accuracy is interpolated."""
    first, last = max(map(min, runs)), min(map(max, runs))
    epochs = sorted({epoch for run in runs for epoch in run if first <= epoch <= last}) or [max(first, last)]
    return epochs, np.mean([np.interp(epochs, sorted(run), [run[x] for x in sorted(run)]) for run in runs], 0).tolist()
