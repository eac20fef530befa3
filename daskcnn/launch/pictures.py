"""Figures as pictures, with matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from daskcnn.errors import DataError, UserError
from daskcnn.launch.figures import Figure, figures
from daskcnn.launch.simulating import Scenario

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's: told apart by the colour-blind too."""
MARKERS, STROKES = "osD^vPX", ("-", "--", "-.", ":")
"""Curves that lie on one another stay visible."""


def draw_all(chosen: Scenario, folder: str, *, suffix: str = "svg", seed: int = 0) -> Iterator[Path]:
    """Draw every figure into the folder, which is made. Raises UserError without matplotlib, DataError on disk."""
    need_matplotlib()
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder}: {error.strerror or error}; give a folder that may be written") from error
    for figure in figures(chosen, seed):
        yield draw(figure, path / f"{figure.name}.{suffix}")


def need_matplotlib() -> Any:
    """The package. Raises UserError with the remedy where it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("--figures: matplotlib is not installed; pip install 'daskcnn[plot]'") from error
    return matplotlib


def draw(figure: Figure, path: Path) -> Path:
    """One picture, SVG or PNG by the file's ending; the same bytes for the same numbers. Raises DataError."""
    matplotlib = need_matplotlib()
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context({"svg.hashsalt": figure.name, "font.size": 9, "svg.fonttype": "none"}):
        canvas = Canvas(figsize=(6.4, 4.0), layout="constrained")
        axes = canvas.add_subplot()
        _curves(axes, figure)
        _lines(axes, figure)
        axes.set_title(f"{figure.title}\n(as {figure.like})", fontsize=10)
        axes.set_xlabel(figure.x)
        axes.set_ylabel(figure.y)
        axes.grid(alpha=0.3)
        axes.legend(framealpha=0.85, edgecolor="none")
        try:
            canvas.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}; give a folder that may be written") from error
    return path


def _curves(axes: Axes, figure: Figure) -> None:
    styles = zip(COLOURS, MARKERS, cycle(STROKES), strict=False)
    for (name, (xs, ys)), (colour, marker, stroke) in zip(figure.curves.items(), styles, strict=False):
        axes.plot(
            xs, ys, stroke, label=name, color=colour, marker=marker, markersize=5, fillstyle="none", linewidth=1.4
        )
    if figure.doubling:
        axes.set_xscale("log", base=2)
        ticks = next(iter(figure.curves.values()))[0]
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])


def _lines(axes: Axes, figure: Figure) -> None:
    for name, level in figure.levels.items():
        axes.axhline(level, color="#555555", linestyle="--", linewidth=1, label=name)
    for name, mark in figure.marks.items():
        axes.axvline(mark, color="#555555", linestyle=":", linewidth=1.2, label=name)
    axes.set_ylim(bottom=0)
