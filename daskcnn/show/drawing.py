"""Figures drawn with matplotlib, as SVG or PNG."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import cycle, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from daskcnn.errors import DataError, UserError, installing
from daskcnn.show.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's: told apart by the colour-blind too."""
MARKERS, STROKES = "osD^vPX", ("-", "--", "-.", ":")
"""Curves that lie on one another stay visible."""

WIDTH, HEIGHT, BAR = 6.4, 4.0, 0.6
"""Inches of a picture, and the width of a bar in one at the least."""
LONG_TICK, LONGEST_TICK = 8, 24
"""Letters below a bar from which they stand upright, and from which they are cut."""
MARKED = 60
"""Points of a curve up to which each has a mark."""
ABOVE_BARS: dict[str, Any] = {"loc": "upper center", "ncols": 3}
UNDER_ROOF: dict[str, Any] = {"loc": "lower right"}
HEADROOM = 0.18
"""Above the highest bar for each line of the legend, so that it stands above all; of the bar."""
MARGIN = 0.05
"""Above the highest point of the curves; of the height."""
LETTER = 0.075
"""Inches of a letter that stands upright below a bar."""


def can_draw() -> bool:
    """Is matplotlib installed?"""
    return find_spec("matplotlib") is not None


def need_matplotlib() -> Any:
    """The package. Raises UserError with the remedy where it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("pictures", "matplotlib is not installed", installing("plot")) from error
    return matplotlib


def draw(figure: Figure, path: Path) -> Path:
    """One picture, SVG or PNG by the file's ending; the same bytes for the same numbers. Raises DataError."""
    return draw_together((figure,), path)


def draw_together(figures: Sequence[Figure], path: Path) -> Path:
    """One picture of these figures, in two columns where there are several; otherwise as `draw`."""
    with drawn(figures) as canvas:
        try:
            canvas.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise DataError(path, error.strerror or error, "give a folder that may be written") from error
    return path


@contextmanager
def drawn(
    figures: Sequence[Figure],
    *,
    size: tuple[float, float] = (WIDTH, HEIGHT),
    margins: Mapping[str, float] | None = None,
    titled: bool = True,
    **look: Any,
) -> Iterator[Canvas]:
    """A picture of these figures, of this many inches each. titled: with their titles; look: Matplotlib's rcParams.

    margins: shares of the picture, where they need not be measured, which takes long; names that stand upright are.
    Raises UserError without matplotlib.
    """
    matplotlib = need_matplotlib()
    from matplotlib.figure import Figure as Picture

    columns = min(2, len(figures))
    rows = -(-len(figures) // max(columns, 1))
    fixed = {"svg.hashsalt": figures[0].name, "font.size": 9, "svg.fonttype": "none", "text.parse_math": False}
    with matplotlib.rc_context(fixed | look), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph", UserWarning)  # a name in letters that the font lacks
        width, height = (max(of(figure, least) for figure in figures) for of, least in zip(_SIDES, size, strict=True))
        measured = margins is None or any(map(_turned, figures))
        canvas = Picture(figsize=(columns * width, rows * height), layout="constrained" if measured else None)
        if margins is not None and not measured:
            canvas.subplots_adjust(**margins)
        places = canvas.subplots(rows, columns, squeeze=False).flat
        for figure, axes in zip_longest(figures, places):
            if figure is None:
                axes.remove()
            else:
                _fill(axes, figure, titled)
        yield canvas


def _fill(axes: Axes, figure: Figure, titled: bool) -> None:
    (_bars if figure.stacked else _curves)(axes, figure)
    _lines(axes, figure)
    if titled:
        axes.set_title(f"{figure.title}\n(as {figure.like})" if figure.like else figure.title, fontsize=10)
    axes.set_xlabel(figure.x)
    axes.set_ylabel(figure.y)
    axes.grid(alpha=0.3, axis="y" if figure.stacked else "both")
    place = ABOVE_BARS if figure.stacked else UNDER_ROOF if figure.rates else {}
    if not figure.stacked or len(figure.curves) > 1:
        axes.legend(framealpha=0.85, edgecolor="none", **place)


def _width(figure: Figure, least: float) -> float:
    """Inches; more where many bars stand side by side, for what stands below them."""
    return max(least, BAR * len(figure.ticks)) if figure.stacked and not _turned(figure) else least


def _height(figure: Figure, least: float) -> float:
    """Inches; more for names that stand upright."""
    return least + LETTER * min(_longest(figure), LONGEST_TICK) if _turned(figure) else least


_SIDES = (_width, _height)


def _turned(figure: Figure) -> bool:
    """Whether what stands below the bars is too long to stand side by side."""
    return figure.stacked and _longest(figure) > LONG_TICK


def _longest(figure: Figure) -> int:
    return max((len(line) for tick in figure.ticks for line in tick.splitlines()), default=0)


def _label(name: str) -> str:
    """Matplotlib shows no name in a legend that begins with a low line."""
    return f" {name}" if name.startswith("_") else name


def _colour(figure: Figure, name: str, place: int) -> str:
    return COLOURS[figure.colours.get(name, place) % len(COLOURS)]


def _curves(axes: Axes, figure: Figure) -> None:
    from matplotlib.ticker import LogFormatter

    styles = zip(cycle(MARKERS), cycle(STROKES), strict=False)
    drawn = [(curve, True) for curve in figure.curves.items()] + [(curve, False) for curve in figure.points.items()]
    for i, (((name, (xs, ys)), joined), (marker, stroke)) in enumerate(zip(drawn, styles, strict=False)):
        unmarked = joined and (figure.rates or len(xs) > MARKED)
        line, mark, colour = stroke if joined else "none", "none" if unmarked else marker, _colour(figure, name, i)
        look: dict[str, Any] = {"marker": mark, "markersize": 5, "fillstyle": "none", "linewidth": 1.4}
        axes.plot(xs, ys, linestyle=line, label=_label(name), color=colour, **look)
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
    for i, (name, (_, ys)) in enumerate(figure.curves.items()):
        axes.bar(xs, ys, bottom=below, label=_label(name), color=_colour(figure, name, i), width=0.7)
        below = [b + y for b, y in zip(below, ys, strict=True)]
    ticks = figure.ticks or [f"{x:g}" for x in xs]
    if _turned(figure):
        axes.set_xticks(xs, [_short(tick) for tick in ticks], rotation=90)
    else:
        axes.set_xticks(xs, ticks)
    axes.set_axisbelow(True)
    legend = -(-len(figure.curves) // ABOVE_BARS["ncols"]) if len(figure.curves) > 1 else 0
    axes.set_ylim(top=(1 + HEADROOM * max(legend, 0.3)) * max(below, default=0.0) or 1.0)


def _short(tick: str) -> str:
    return tick if len(tick) <= LONGEST_TICK else f"{tick[: LONGEST_TICK - 1]}…"


def _lines(axes: Axes, figure: Figure) -> None:
    for name, level in figure.levels.items():
        axes.axhline(level, color="#555555", linestyle="--", linewidth=1, label=f"{_label(name)}: {level:.4g}")
    for name, mark in figure.marks.items():
        axes.axvline(mark, color="#555555", linestyle=":", linewidth=1.2, label=name)
    if figure.rates:
        return
    axes.set_ylim(bottom=0)
    if not figure.stacked:  # the margin is one of the whole height: curves between 0.99 and 1 are off the edge too
        highest = max((y for _, ys in (*figure.curves.values(), *figure.points.values()) for y in ys), default=0.0)
        axes.set_ylim(top=figure.top or (1 + MARGIN) * max(highest, *figure.levels.values(), 0.0) or 1.0)
    if not (figure.stacked or figure.doubling):
        axes.set_xlim(left=0)
