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
        (_bars if figure.stacked else _curves)(axes, figure)
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
    drawn = [(curve, True) for curve in figure.curves.items()] + [(curve, False) for curve in figure.points.items()]
    for ((name, (xs, ys)), joined), (colour, marker, stroke) in zip(drawn, styles, strict=False):
        line, mark = stroke if joined else "none", "none" if figure.rates and joined else marker
        look: dict[str, Any] = {"marker": mark, "markersize": 5, "fillstyle": "none", "linewidth": 1.4}
        axes.plot(xs, ys, linestyle=line, label=name, color=colour, **look)
    if figure.rates:
        axes.set_xscale("log")
        axes.set_yscale("log")
    if figure.doubling:
        axes.set_xscale("log", base=2)
        ticks = next(iter(figure.curves.values()))[0]
        axes.set_xticks(ticks, figure.ticks or [f"{x:g}" for x in ticks])


def _bars(axes: Axes, figure: Figure) -> None:
    """One on top of the other."""
    xs = next(iter(figure.curves.values()))[0]
    below = [0.0] * len(xs)
    for (name, (_, ys)), colour in zip(figure.curves.items(), COLOURS, strict=False):
        axes.bar(xs, ys, bottom=below, label=name, color=colour, width=0.7)
        below = [b + y for b, y in zip(below, ys, strict=True)]
    axes.set_xticks(xs, figure.ticks or [f"{x:g}" for x in xs])


def _lines(axes: Axes, figure: Figure) -> None:
    for name, level in figure.levels.items():
        axes.axhline(level, color="#555555", linestyle="--", linewidth=1, label=name)
    for name, mark in figure.marks.items():
        axes.axvline(mark, color="#555555", linestyle=":", linewidth=1.2, label=name)
    if not figure.rates:
        axes.set_ylim(bottom=0)
