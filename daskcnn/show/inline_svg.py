"""A figure as SVG inside a page: its colours are the page's, its text stays text, and its ids are its own."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from xml.etree import ElementTree

from daskcnn.show.drawing import COLOURS, drawn
from daskcnn.show.figure import Curve, Figure
from daskcnn.show.text import number

SIZE = (4.7, 3.1)
"""Inches: on a telephone the letters of a figure of this width are still large enough."""
MARGINS = {"left": 0.16, "right": 0.95, "bottom": 0.16, "top": 0.95}
"""Of the picture: letters of nine points beside it have room in them."""
INK, MUTED, PAPER, GRID = "#010101", "#555555", "#fefefe", "#b0b0b0"
PAGE_COLOURS = {colour.lower(): f"var(--series-{i})" for i, colour in enumerate(COLOURS)} | {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    PAPER: "var(--paper)",
    GRID: "var(--muted)",
}
"""What the page calls a colour that Matplotlib writes."""
_LOOK = {
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "legend.facecolor": PAPER,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
_BARE = dict.fromkeys(("Date", "Creator", "Format", "Type"))


def inline_svg(figure: Figure) -> str:
    """The figure without its title, which the page has, as one `svg` element that names and describes itself.

    Raises UserError without matplotlib.
    """
    file = io.StringIO()
    with drawn((figure,), size=SIZE, margins=MARGINS, titled=False, **_LOOK) as canvas:
        canvas.savefig(file, format="svg", metadata=_BARE)
    root = ElementTree.fromstring(file.getvalue())
    for parent in list(root.iter()):
        for style in parent.findall(f"{_SVG}style"):  # it would hold for the whole page
            parent.remove(style)
    _rename(root, figure.name)
    for each in root.iter():
        if "style" in each.attrib:
            each.set("style", _styled(each.attrib["style"]))
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    _describe(root, figure)
    ElementTree.register_namespace("", _SVG[1:-1])
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    return ElementTree.tostring(root, encoding="unicode")


def _rename(root: ElementTree.Element, name: str) -> None:
    """Keep the ids that something refers to, under names that no other figure has."""
    texts = [value for each in root.iter() for key, value in each.attrib.items() if key != "id"]
    used = {
        found for text in texts for found in re.findall(r"^#(\S+)$|url\(#([^)]+)\)", text) for found in found if found
    }
    for each in root.iter():
        for key, value in list(each.attrib.items()):
            if key == "id":
                each.attrib.pop(key)
                if value in used:
                    each.set(key, f"{name}-{value}")
            elif key == _LINK or "url(#" in value:
                each.set(key, re.sub(r"^#|(?<=url\()#", f"#{name}-", value))


def _styled(style: str) -> str:
    """The same with the page's colours and letters."""
    style = re.sub(r"#[0-9a-f]{6}\b", lambda found: PAGE_COLOURS.get(found[0], found[0]), style)
    return re.sub(r"font: ([\d.]+px) [^;]+", r"font: \1 var(--sans)", style)


def _describe(root: ElementTree.Element, figure: Figure) -> None:
    title, told = ElementTree.Element(f"{_SVG}title"), ElementTree.Element(f"{_SVG}desc")
    title.text, told.text = figure.title, in_words(figure)
    title.set("id", f"{figure.name}-title")
    told.set("id", f"{figure.name}-desc")
    root.set("role", "img")
    root.set("aria-labelledby", f"{figure.name}-title {figure.name}-desc")
    root.insert(0, told)
    root.insert(0, title)


def in_words(figure: Figure) -> str:
    """What the figure shows, for those who do not see it: the axes, and where each curve begins, ends and turns."""
    curves: Mapping[str, Curve] = {**figure.curves, **figure.points}
    tell = _bars_in_words if figure.stacked else _curve_in_words
    told = [f"{name}: {tell(figure, curve)}." for name, curve in curves.items() if len(curve[0])]
    levels = [f"{name}: {number(level)} throughout." for name, level in figure.levels.items()]
    return " ".join([f"{figure.y} by {figure.x}.", *told, *levels])


def _curve_in_words(figure: Figure, curve: Curve) -> str:
    xs, ys = curve
    ends = f"{number(ys[0])} at {number(xs[0])}, {number(ys[-1])} at {number(xs[-1])}"
    return f"{ends}; between {number(min(ys))} and {number(max(ys))}"


def _bars_in_words(figure: Figure, curve: Curve) -> str:
    return ", ".join(f"{tick} {number(y)}" for tick, y in zip(figure.ticks, curve[1], strict=False))
