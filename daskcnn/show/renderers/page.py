"""A figure as SVG inside a page: its colours are the page's, its text stays text, and its ids are its own.

A run, or several, as one HTML file that needs nothing else: the tables of the report, its figures, a timeline.

The file asks for nothing from anywhere; a content security policy in it holds that. It is light or dark as the reader's
system is, fits a telephone, prints, and is read aloud. A click on a worker shows that worker alone.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any
from xml.etree import ElementTree

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from daskcnn.show.comparison import Comparison
from daskcnn.show.figures import COLOUR_OF, Curve, Figure, part_name, run_figures
from daskcnn.show.history import SPENT
from daskcnn.show.renderers.network_text import CONFUSION, class_table, confusion_table, judged_line
from daskcnn.show.renderers.pictures import COLOURS, drawn
from daskcnn.show.report_sections import sections
from daskcnn.show.report_tables import RunReport
from daskcnn.show.text import clean, count, duration, number, percent, spread
from daskcnn.show.timeline import Lane, Timeline, timeline

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


MOST_ROWS = 240
"""Rows of a table, where they are not asked for in full."""
MOST_MARKS, MOST_TICKS = 100, 6
"""Troubles that are marked in a timeline, and times that stand below it."""
MOST_CLASSES = 60
"""Classes up to which there is a confusion matrix."""
CAPTIONS = {
    "workers": "Samples, seconds and bytes of each worker",
    "pushes": "What each worker pushed to the server",
    "balance": "How evenly the workers were busy; seconds are summed over the rounds",
    "sharding": "What each worker has of every convolution, and what a step of it is made of",
    "accuracy": "The center, each time it was judged",
    "rounds": "Rounds of the workers",
    "troubles": "What was out of the ordinary, and when",
}
"""What each table of a report shows."""
SPAN = 1000.0
"""Units of a lane's width; its height is one."""
LEAST_WIDTH = 0.01
"""Units of a part, however short it was."""


@dataclass(frozen=True, slots=True)
class DrawnLane:
    """A lane as a page has it. paths: of each part its name and outline; told: the same in words."""

    name: str
    paths: tuple[tuple[str, str], ...]
    told: str


@dataclass(frozen=True, slots=True)
class DrawnTimeline:
    """Lanes, ticks (per cent of the width, and what stands there) and marks (units, and what was the trouble)."""

    run: str
    lanes: tuple[DrawnLane, ...]
    ticks: tuple[tuple[float, str], ...]
    marks: tuple[tuple[float, str], ...]
    parts: tuple[tuple[str, str], ...]
    note: str


def report_page(
    report: RunReport, *, name: str = "", evaluation: Mapping[str, Any] | None = None, full: bool = False
) -> str:
    """The page of one run. evaluation: what `daskcnn evaluate` kept of it; full: no table shortened.

    Raises UserError without matplotlib.
    """
    parts = sections(report, most=None if full else MOST_ROWS, troubles=None if full else MOST_ROWS)
    head, rest = parts[0], parts[1:]
    return _render(
        "report.html",
        {clean(name or report.start.run): report},
        head=head,
        parts=rest,
        captions=CAPTIONS,
        evaluation=evaluation and _evaluated(evaluation),
    )


def comparison_page(comparison: Comparison, reports: Mapping[str, RunReport]) -> str:
    """The page of several runs, by name. Raises UserError without matplotlib."""
    return _render("compare.html", reports, comparison=comparison, names=[clean(name) for name in reports])


def _render(template: str, reports: Mapping[str, RunReport], **more: Any) -> str:
    style, script = _asset("page.css"), _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    lanes = [_drawn(name, report, reports) for name, report in reports.items() if report.rounds]
    return (
        _environment()
        .get_template(template)
        .render(
            **more,
            title=", ".join(map(clean, reports)),
            style=Markup(style),
            script=Markup(script),
            digest=digest,
            timelines=lanes,
            workers=list(dict.fromkeys(lane.name for each in lanes for lane in each.lanes)),
            figures=[(figure, Markup(inline_svg(figure))) for figure in run_figures(reports)],
        )
    )


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("daskcnn.show.renderers"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["clean"] = clean
    return made


def _asset(name: str) -> str:
    return files("daskcnn.show.renderers").joinpath("templates", name).read_text(encoding="utf-8")


def _evaluated(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """What a page shows of an evaluation: a line and, where there are classes, a table by class and their confusion.

    shades: the share of each cell in the samples of its class, in per cent.
    """
    counts = evaluation["confusion"] if len(evaluation["classes"]) <= MOST_CLASSES else None
    return {
        "line": judged_line(evaluation),
        "classes": class_table(evaluation) if evaluation["classes"] else None,
        "matrix": None if counts is None else confusion_table(evaluation),
        "caption": CONFUSION,
        "shades": [[round(100 * n / max(sum(row), 1)) for n in row] for row in counts or ()],
    }


# --- the timeline ---


def _drawn(name: str, report: RunReport, reports: Mapping[str, RunReport]) -> DrawnTimeline:
    """The lanes of a run, over the same seconds as those of the runs beside it."""
    found = timeline(report)
    seconds = max([found.seconds, *(each.seconds for each in reports.values())]) or 1.0
    parts = tuple((part, part_name(part, reports)) for part in COLOUR_OF if _any(found, part))
    marks = [
        (SPAN * note.at / seconds, f"{duration(note.at)}: {note.text}") for note in spread(report.notes, MOST_MARKS)
    ]
    return DrawnTimeline(
        run=clean(name),
        lanes=tuple(_drawn_lane(lane, seconds) for lane in found.lanes),
        ticks=tuple((100 * at / seconds, told) for at, told in ticks(seconds)),
        marks=tuple(marks),
        parts=parts,
        note=_left_out(found),
    )


def _any(found: Timeline, part: str) -> bool:
    return any(lane.spent[SPENT.index(part)] for lane in found.lanes)


def _left_out(found: Timeline) -> str:
    lanes = f"{count(len(found.lanes))} of {count(found.workers)} workers have a lane. "
    stretches = "The run is long: each stretch shows the shares of what was done in it. "
    return f"{lanes if len(found.lanes) < found.workers else ''}{'' if found.whole else stretches}".strip()


def _drawn_lane(lane: Lane, seconds: float) -> DrawnLane:
    """Outlines in units of the whole width. A stretch's parts stand on one another, by their shares of it."""
    outlines: dict[str, list[str]] = {part: [] for part in COLOUR_OF}
    scale = SPAN / seconds
    for each in lane.stretches:
        length, low = each.end - each.begin, 1.0
        for part in COLOUR_OF:
            if length > 0 and (spent := each.spent[SPENT.index(part)]) > 0:
                high = min(1.0, spent / length)
                low -= high
                outlines[part].append(_box(scale * each.begin, low, scale * length, high))
    total = sum(lane.spent)
    told = [f"{part} {duration(s)} ({percent(s / total)})" for part, s in zip(SPENT, lane.spent, strict=True) if s]
    paths = tuple((part, "".join(boxes)) for part, boxes in outlines.items() if boxes)
    return DrawnLane(clean(lane.worker), paths, f"{count(lane.rounds)} rounds: {', '.join(told) or '-'}")


def _box(x: float, y: float, width: float, height: float) -> str:
    across = _short(max(width, LEAST_WIDTH))
    return f"M{_short(x)} {_short(max(0.0, y))}h{across}v{_short(height)}h-{across}z"


def _short(value: float) -> str:
    """At most three decimals, without what says nothing."""
    return f"{value:.3f}".rstrip("0").rstrip(".")


def ticks(seconds: float) -> list[tuple[float, str]]:
    """Round times from 0 to the end of the run, in seconds and for people, at most six of them."""
    step, unit, name = next(each for each in _steps() if seconds / each[0] < MOST_TICKS)
    return [(i * step, f"{i * step / unit:g} {name}") for i in range(int(seconds / step) + 1)]


def _steps() -> Iterator[tuple[float, float, str]]:
    """Seconds between two ticks, the seconds of the unit that they are told in, and its name."""
    decades = [(digit, power) for power in range(-6, 12) for digit in (1, 2, 5)]
    yield from ((step, 1.0, "s") for digit, power in decades if (step := digit * 10.0**power) < 60)
    yield from ((60.0 * minutes, 60.0, "min") for minutes in (1, 2, 5, 10, 20, 30))
    yield from ((3600 * digit * 10.0**power, 3600.0, "h") for digit, power in decades if power >= 0)
