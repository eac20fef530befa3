"""Figures drawn with matplotlib, as SVG or PNG."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from daskcnn.errors import DataError, UserError
from daskcnn.show.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's: told apart by the colour-blind too."""
MARKERS, STROKES = "osD^vPX", ("-", "--", "-.", ":")
"""Curves that lie on one another stay visible."""

WIDTH, BAR = 6.4, 0.6
"""Inches of a picture, and of a bar in one at the least."""
ABOVE_BARS: dict[str, Any] = {"loc": "upper center", "ncols": 3}
UNDER_ROOF: dict[str, Any] = {"loc": "lower right"}
HEADROOM = 1.18
"""Of the highest bar, so that the legend stands above all."""


def need_matplotlib() -> Any:
    """The package. Raises UserError with the remedy where it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("pictures", "matplotlib is not installed", "pip install 'daskcnn[plot]'") from error
    return matplotlib


def draw(figure: Figure, path: Path) -> Path:
    """One picture, SVG or PNG by the file's ending; the same bytes for the same numbers. Raises DataError."""
    matplotlib = need_matplotlib()
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context({"svg.hashsalt": figure.name, "font.size": 9, "svg.fonttype": "none"}):
        canvas = Canvas(figsize=(_width(figure), 4.0), layout="constrained")
        axes = canvas.add_subplot()
        (_bars if figure.stacked else _curves)(axes, figure)
        _lines(axes, figure)
        axes.set_title(f"{figure.title}\n(as {figure.like})" if figure.like else figure.title, fontsize=10)
        axes.set_xlabel(figure.x)
        axes.set_ylabel(figure.y)
        axes.grid(alpha=0.3, axis="y" if figure.stacked else "both")
        place = ABOVE_BARS if figure.stacked else UNDER_ROOF if figure.rates else {}
        axes.legend(framealpha=0.85, edgecolor="none", **place)
        try:
            canvas.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise DataError(path, error.strerror or error, "give a folder that may be written") from error
    return path


def _width(figure: Figure) -> float:
    """Inches; more where many bars stand side by side, for what stands below them."""
    return max(WIDTH, BAR * len(figure.ticks)) if figure.stacked else WIDTH


def _curves(axes: Axes, figure: Figure) -> None:
    from matplotlib.ticker import LogFormatter

    styles = zip(COLOURS, MARKERS, cycle(STROKES), strict=False)
    drawn = [(curve, True) for curve in figure.curves.items()] + [(curve, False) for curve in figure.points.items()]
    for ((name, (xs, ys)), joined), (colour, marker, stroke) in zip(drawn, styles, strict=False):
        line, mark = stroke if joined else "none", "none" if figure.rates and joined else marker
        look: dict[str, Any] = {"marker": mark, "markersize": 5, "fillstyle": "none", "linewidth": 1.4}
        axes.plot(xs, ys, linestyle=line, label=name, color=colour, **look)
    if figure.rates:
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):  # plain numbers, the minor ones only where there are few others
            axis.set_major_formatter(LogFormatter())
            axis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
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
    axes.set_axisbelow(True)
    axes.set_ylim(top=HEADROOM * max(below, default=0.0) or 1.0)


def _lines(axes: Axes, figure: Figure) -> None:
    for name, level in figure.levels.items():
        axes.axhline(level, color="#555555", linestyle="--", linewidth=1, label=name)
    for name, mark in figure.marks.items():
        axes.axvline(mark, color="#555555", linestyle=":", linewidth=1.2, label=name)
    if not figure.rates:
        axes.set_ylim(bottom=0)
