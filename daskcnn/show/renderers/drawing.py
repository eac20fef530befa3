"""Pictures drawn with matplotlib, as SVG or PNG: figures, confusion matrices, contact sheets."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import cycle, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unicodedata import combining, normalize

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from daskcnn.errors import DataError, UserError, installing
from daskcnn.show.run_figures import Figure
from daskcnn.show.text import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas


COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's colours, which the colour-blind tell apart."""
BEHIND_TEXT = (*COLOURS[:-1], "#8CC8E8", "#F4B183", "#8FD9BF", "#E6C3D8", "#F6DC9A", "#C8E6F7")
"""Colours on which black text is read: those but for black, then paler ones."""
MARKERS, STROKES = "osD^vPX", ("-", "--", "-.", ":")  # of curves, so that one behind another stays visible

WIDTH, HEIGHT, BAR = 6.4, 4.0, 0.6  # inches of a picture, and of the narrowest bar
LONG_TICK, LONGEST_TICK = 8, 24  # letters of a bar's name above which it stands upright, and above which it is cut
MARKED = 60  # points of a curve up to which each has a mark
ABOVE_BARS: dict[str, Any] = {"loc": "upper center", "ncols": 3}
UNDER_ROOF: dict[str, Any] = {"loc": "lower right"}
HEADROOM = 0.18  # room above the highest bar for each line of the legend, as a share of the bar
MARGIN = 0.05  # room above the highest point of the curves, as a share of the height
LETTER = 0.075  # inches of a letter of a name that stands upright


def can_draw() -> bool:
    """Return True if matplotlib is installed."""
    return find_spec("matplotlib") is not None


def need_matplotlib() -> Any:
    """Return the package. Raises UserError if it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("pictures", "matplotlib is not installed", installing("plot")) from error
    return matplotlib


def draw(figure: Figure, path: Path) -> Path:
    """Draw one picture, SVG or PNG by the file's ending, with the same bytes for the same numbers. Raises DataError."""
    return draw_together((figure,), path)


def draw_together(figures: Sequence[Figure], path: Path) -> Path:
    """Draw one picture of these figures, several in two columns; otherwise as `draw`."""
    with drawn(figures) as canvas:
        return saved(canvas, path)


def saved(canvas: Canvas, path: Path, dpi: int = 150) -> Path:
    """Write a picture, SVG or PNG by the file's ending, without its date. Raises DataError."""
    try:
        canvas.savefig(path, dpi=dpi, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise DataError(path, error.strerror or error, "give a folder that may be written") from error
    return path


@contextmanager
def _looking(salt: str, **look: Any) -> Iterator[None]:
    """Have Matplotlib draw the same bytes for the same numbers. look: its rcParams."""
    fixed = {"svg.hashsalt": salt, "font.size": 9, "svg.fonttype": "none", "text.parse_math": False}
    with need_matplotlib().rc_context(fixed | look), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph", UserWarning)  # a name in letters that the font lacks
        yield


@contextmanager
def drawn(
    figures: Sequence[Figure],
    *,
    size: tuple[float, float] = (WIDTH, HEIGHT),
    margins: Mapping[str, float] | None = None,
    titled: bool = True,
    **look: Any,
) -> Iterator[Canvas]:
    """Yield a picture of these figures, of this many inches each. Raises UserError without matplotlib.

    margins: shares of the picture; None, or names that stand upright, have them measured. look: Matplotlib's rcParams.
    """
    need_matplotlib()
    from matplotlib.figure import Figure as Picture

    columns = min(2, len(figures))
    rows = -(-len(figures) // max(columns, 1))
    with _looking(figures[0].name, **look):
        width, height = (max(sides) for sides in zip(*(_sides(figure, *size) for figure in figures), strict=True))
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
    place = ABOVE_BARS if figure.stacked else UNDER_ROOF if figure.rates and figure.points else {}
    if not figure.stacked or len(figure.curves) > 1:
        axes.legend(framealpha=0.85, edgecolor="none", **place)


def _sides(figure: Figure, width: float, height: float) -> tuple[float, float]:
    """Inches; wider for many bars side by side, higher for names that stand upright."""
    if _turned(figure):
        return width, height + LETTER * min(_longest(figure), LONGEST_TICK)
    return max(width, BAR * len(figure.ticks)) if figure.stacked else width, height


def _turned(figure: Figure) -> bool:
    """Return True if the names of the bars are too long to stand side by side."""
    return figure.stacked and _longest(figure) > LONG_TICK


def _longest(figure: Figure) -> int:
    return max((len(line) for tick in figure.ticks for line in tick.splitlines()), default=0)


def _label(name: str) -> str:
    """The name, which a legend leaves out if it begins with a low line."""
    return f" {name}" if name.startswith("_") else name


def _colour(figure: Figure, name: str, place: int) -> str:
    return COLOURS[figure.colours.get(name, place) % len(COLOURS)]


def _curves(axes: Axes, figure: Figure) -> None:
    from matplotlib.ticker import LogFormatter, MaxNLocator

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
    if figure.counted:
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    if figure.doubling:
        axes.set_xscale("log", base=2)
    if figure.doubling or figure.ticks:
        ticks = next(iter(figure.curves.values()))[0]
        if figure.ticks or all(float(x).is_integer() for x in ticks):
            axes.set_xticks(ticks, figure.ticks or [f"{x:g}" for x in ticks])
        else:
            axes.xaxis.set_major_formatter("{x:g}")


def _bars(axes: Axes, figure: Figure) -> None:
    xs = next(iter(figure.curves.values()))[0]
    below = [0.0] * len(xs)
    for i, (name, (_, ys)) in enumerate(figure.curves.items()):
        axes.bar(xs, ys, bottom=below, label=_label(name), color=_colour(figure, name, i), width=0.7)
        below = [b + y for b, y in zip(below, ys, strict=True)]
    ticks = figure.ticks or [f"{x:g}" for x in xs]
    upright: dict[str, Any] = {"rotation": 90} if _turned(figure) else {}
    axes.set_xticks(xs, [_cut(tick, LONGEST_TICK) for tick in ticks] if upright else ticks, **upright)
    axes.set_axisbelow(True)
    legend = -(-len(figure.curves) // ABOVE_BARS["ncols"]) if len(figure.curves) > 1 else 0
    axes.set_ylim(top=(1 + HEADROOM * max(legend, 0.3)) * max(below, default=0.0) or 1.0)


def _cut(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _lines(axes: Axes, figure: Figure) -> None:
    unit = f" {figure.unit}" if figure.unit else ""
    for name, level in figure.levels.items():
        label = f"{_label(name)}: {level:.4g}{unit}"
        axes.axhline(level, color="#555555", linestyle="--", linewidth=1, label=label)
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


CELL, EDGE, LEAST, MOST = 0.42, 2.6, 4.8, 24.0
"""Inches of a class, of all around them, and of the smallest and the largest picture."""
LONGEST = 24  # characters of a class's name
MOST_NAMES, MOST_NUMBERS = 50, 30  # classes up to which a picture has names, and numbers in its cells


def draw_confusion(classes: Sequence[str], confusion: Sequence[Sequence[int]], path: Path, *, title: str) -> Path:
    """Draw the confusion of classes, in shares of the samples of each. Raises UserError without matplotlib, DataError.

    confusion: samples of the row's class with the column's class for an answer.
    """
    need_matplotlib()
    from matplotlib.figure import Figure

    with _looking("confusion"):
        side = min(max(LEAST, CELL * len(classes) + EDGE), MOST)
        figure = Figure(figsize=(side, side), layout="constrained")
        axes = figure.add_subplot()
        _cells(axes, np.asarray(confusion))
        axes.set_xlabel("answer")
        axes.set_ylabel("class")
        if len(classes) <= MOST_NAMES:
            names = [_cut(clean(name), LONGEST) for name in classes]
            axes.set_xticks(range(len(names)), names, rotation=90)
            axes.set_yticks(range(len(names)), names)
        axes.set_title(_cut(clean(title), 80), fontsize=10)
        return saved(figure, path)


def _cells(axes: Axes, counts: np.ndarray) -> None:
    """Draw shares of each row as shades, with the numbers of samples if there is room."""
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if len(counts) <= MOST_NUMBERS:
        for (row, column), n in np.ndenumerate(counts):
            shade = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, str(n), ha="center", va="center", fontsize=7, color=shade)


SAMPLE_CELL = 96
"""Pixels a side of the largest sample. Smaller ones are enlarged by whole factors."""
_GAP, _NAMES, _LINE, _SIZE, _LEAST = 4, 220, 18, 14, 800
_BACK, _INK, _GREY = (255, 255, 255), (0, 0, 0), (110, 110, 110)
_LONGEST = 200


@dataclass(frozen=True)
class SheetRow:
    """One class: its name, a caption, and its samples, (h, w, 3) of at most `CELL` pixels a side."""

    name: str
    caption: str
    samples: Sequence[npt.NDArray[np.uint8]]


def contact_sheet(title: Sequence[str], rows: Sequence[SheetRow], columns: int) -> bytes:
    """Return a PNG with a line for each class. Names are in ASCII, other letters escaped; long names are cut."""
    samples = [sample for row in rows for sample in row.samples]
    factor = max(1, SAMPLE_CELL // max((max(sample.shape[:2]) for sample in samples), default=SAMPLE_CELL))
    height, width = (factor * max((sample.shape[axis] for sample in samples), default=0) for axis in (0, 1))
    step, across = max(height, 2 * _LINE) + _GAP, width + _GAP
    top = _LINE * len(title) + 2 * _GAP
    wide = max(_NAMES + columns * across + _GAP, _LEAST)
    sheet = Image.new("RGB", (wide, top + step * len(rows) + _GAP), _BACK)
    draw = ImageDraw.Draw(sheet)
    draw.font = ImageFont.load_default(_SIZE)
    for i, line in enumerate(title):
        _write(draw, (_GAP, _GAP + _LINE * i), line, wide - 2 * _GAP, _INK)
    for i, row in enumerate(rows):
        y = top + step * i
        _write(draw, (_GAP, y), row.name, _NAMES - 2 * _GAP, _INK)
        _write(draw, (_GAP, y + _LINE), row.caption, _NAMES - 2 * _GAP, _GREY)
        for j, sample in enumerate(row.samples[:columns]):
            large = sample[:SAMPLE_CELL, :SAMPLE_CELL].repeat(factor, axis=0).repeat(factor, axis=1)
            sheet.paste(Image.fromarray(np.ascontiguousarray(large)), (_NAMES + j * across, y))
    file = io.BytesIO()
    sheet.save(file, "PNG")
    return file.getvalue()


def _write(draw: ImageDraw.ImageDraw, at: tuple[int, int], text: str, width: int, colour: tuple[int, int, int]) -> None:
    """Write as much of the text as there is room for, in the letters of Pillow's own font: ASCII without accents."""
    bare = "".join(c for c in normalize("NFKD", clean(text[:_LONGEST])) if not combining(c))
    cut = line = bare.encode("ascii", "backslashreplace").decode()
    while cut and draw.getfont().getlength(cut) > width:
        line = line[:-1]
        cut = f"{line}..."
    draw.text(at, cut, colour)
