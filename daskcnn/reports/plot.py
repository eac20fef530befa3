"""Figures into files: `daskcnn plot`, and `daskcnn simulate --figures`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from daskcnn.errors import DataError, UserError
from daskcnn.planning.paper_figures import paper_figures
from daskcnn.planning.simulate import Scenario
from daskcnn.reports.report import compare_cells, compared, reports
from daskcnn.show.renderers.drawing import draw, draw_together, need_matplotlib
from daskcnn.show.report_tables import RunReport
from daskcnn.show.run_figures import run_figures, step_parts
from daskcnn.show.sweep_table import sweep_figure

USUAL = ("accuracy-by-time", "loss-by-time", "samples-by-worker", "time-by-worker", "breakdown")
"""The figures in a picture of runs by default."""


def draw_paper_figures(chosen: Scenario, folder: str, *, suffix: str = "svg", seed: int = 0) -> Iterator[Path]:
    """Draw every figure into the folder, which is made. Raises UserError without matplotlib, DataError on disk."""
    need_matplotlib()
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(folder, error.strerror or error, "give a folder that may be written") from error
    for figure in paper_figures(chosen, seed):
        yield draw(figure, path / f"{figure.name}.{suffix}")


def draw_runs(runs: Sequence[str], file: str, names: Sequence[str] = ()) -> Path:
    """Draw figures of runs, `USUAL` by default, into one picture; SVG or PNG by the file's ending.

    Raises UserError without matplotlib or for another ending, DataError for a figure without numbers, or on disk.
    """
    path = _picture(file)
    _, found = compared(reports(runs))
    if "breakdown" in names:
        step_parts(found)  # says which run has none
    drawable = {figure.name: figure for figure in run_figures(found)}
    if missing := [name for name in names if name not in drawable]:
        there = f"choose from: {', '.join(drawable)}" if drawable else "let the run train for a round first"
        raise DataError(missing[0], "these logs have no numbers for it", there)
    chosen = [drawable[name] for name in names or USUAL if name in drawable]
    if not chosen:
        raise DataError(runs[0], "no round has ended yet: there is nothing to draw", "let the run train for a while")
    return draw_together(chosen, path)


def draw_sweep(found: Sequence[RunReport], file: str) -> Path:
    """Draw the mean accuracy of each cell of a sweep by epoch. Raises as `draw_runs`."""
    path = _picture(file)
    if not (figure := sweep_figure(found, compare_cells(found))).curves:
        raise DataError(found[0].start.run, "no validation accuracies: there is nothing to draw", "set data.validation")
    return draw(figure, path)


def _picture(file: str) -> Path:
    """Return the path of a picture. Raises UserError without matplotlib, or for another ending."""
    need_matplotlib()
    path = Path(file)
    if path.suffix not in (".svg", ".png"):
        raise UserError(file, "pictures are SVG or PNG", "give a file that ends in .svg or .png")
    return path
