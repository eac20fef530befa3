"""Pages of runs: the tables of a report, its figures and a timeline, in one HTML file.

A page asks for nothing from anywhere; its content security policy forbids it. It is light or dark as the reader's
system is, fits a telephone, prints, and can be read aloud. A click on a worker shows that worker alone. Figures are SVG
in the page's colours; their text stays text.
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
from daskcnn.show.history import SPENT
from daskcnn.show.renderers.drawing import COLOURS, drawn
from daskcnn.show.renderers.network_text import CONFUSION, class_table, confusion_table, judged_line
from daskcnn.show.report_sections import sections
from daskcnn.show.report_tables import RunReport
from daskcnn.show.run_figures import COLOUR_OF, Curve, Figure, capital, part_name, run_figures
from daskcnn.show.text import clean, count, duration, number, percent, spread
from daskcnn.show.timeline import Lane, timeline

SIZE = (4.7, 3.1)  # inches of a figure: on a telephone its letters are still large enough
MARGINS = {"left": 0.16, "right": 0.95, "bottom": 0.16, "top": 0.95}
"""Shares of the picture, with room for letters of nine points."""
INK, MUTED, PAPER, GRID = "#010101", "#555555", "#fefefe", "#b0b0b0"
PAGE_COLOURS = {colour.lower(): f"var(--series-{i})" for i, colour in enumerate(COLOURS)}
PAGE_COLOURS |= {INK: "var(--ink)", MUTED: "var(--muted)", PAPER: "var(--paper)", GRID: "var(--muted)"}
"""The page's name for each colour that Matplotlib writes."""
_LOOK: dict[str, Any] = {"grid.color": GRID, "legend.facecolor": PAPER}
_LOOK |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
_LOOK |= dict.fromkeys(("axes.facecolor", "figure.facecolor"), "none")
_LOOK |= dict.fromkeys(("axes.spines.top", "axes.spines.right"), False)
_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
_BARE = dict.fromkeys(("Date", "Creator", "Format", "Type"))


def inline_svg(figure: Figure) -> str:
    """Return the figure as one `svg` element with a name and a description. Raises UserError without matplotlib."""
    file = io.StringIO()
    with drawn((figure,), size=SIZE, margins=MARGINS, titled=False, **_LOOK) as canvas:
        canvas.savefig(file, format="svg", metadata=_BARE)
    root = ElementTree.fromstring(file.getvalue())
    for parent in list(root.iter()):
        for style in parent.findall(f"{_SVG}style"):  # it would hold for the whole page
            parent.remove(style)
    _rename(root, figure.name)
    for each in root.iter():
        if look := each.attrib.get("style"):
            look = re.sub(r"#[0-9a-f]{6}\b", lambda found: PAGE_COLOURS.get(found[0], found[0]), look)
            each.set("style", re.sub(r"font: ([\d.]+px) [^;]+", r"font: \1 var(--sans)", look))
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
    """Return the figure in words, for those who do not see it: axes, and each curve's ends and extremes."""
    curves: Mapping[str, Curve] = {**figure.curves, **figure.points}
    told = [f"{figure.y} by {figure.x}."]
    for name, (xs, ys) in curves.items():
        if len(xs) and figure.stacked:
            bars = ", ".join(f"{tick} {number(y)}" for tick, y in zip(figure.ticks, ys, strict=False))
            told.append(f"{name}: {bars}.")
        elif len(xs):
            ends = f"{number(ys[0])} at {number(xs[0])}, {number(ys[-1])} at {number(xs[-1])}"
            told.append(f"{name}: {ends}; between {number(min(ys))} and {number(max(ys))}.")
    unit = f" {figure.unit}" if figure.unit else ""
    return " ".join([*told, *(f"{name}: {number(level)}{unit} throughout." for name, level in figure.levels.items())])


MOST_ROWS = 240  # rows of a table that is not asked for in full
MOST_MARKS, MOST_TICKS = 100, 6  # troubles that are marked in a timeline, and times below it
MOST_CLASSES = 60  # classes up to which there is a confusion matrix
CAPTIONS = {
    "choice": "The strategies that were compared, the least expected seconds first",
    "workers": "Samples, seconds and bytes of each worker",
    "pushes": "What each worker pushed to the server",
    "balance": "How evenly the workers were busy; seconds are summed over the rounds",
    "sharding": "What each worker has of every convolution, and what a step of it is made of",
    "accuracy": "The center, each time it was judged",
    "rounds": "Rounds of the workers",
    "changes": "Who came and went, the samples that moved with them, and the seconds that each change cost",
    "troubles": "What was out of the ordinary, and when",
}
"""The caption of each table of a report."""
SPAN = 1000.0  # units of a lane's width; its height is one
LEAST_WIDTH = 0.01  # units of the shortest part


@dataclass(frozen=True, slots=True)
class DrawnLane:
    """A lane of a page. paths: name and outline of each part; told: the lane in words."""

    name: str
    paths: tuple[tuple[str, str], ...]
    told: str


@dataclass(frozen=True, slots=True)
class DrawnTimeline:
    """Lanes, ticks (per cent of the width, and a time) and marks (units, and a trouble)."""

    run: str
    lanes: tuple[DrawnLane, ...]
    ticks: tuple[tuple[float, str], ...]
    marks: tuple[tuple[float, str], ...]
    parts: tuple[tuple[str, str], ...]
    note: str


def report_page(
    report: RunReport, *, name: str = "", evaluation: Mapping[str, Any] | None = None, full: bool = False
) -> str:
    """Return the page of one run, full or with shortened tables. evaluation: as `daskcnn evaluate` kept it."""
    most = None if full else MOST_ROWS
    head, *rest = sections(report, most=most, troubles=most)
    own, judged = {clean(name or report.start.run): report}, evaluation and _evaluated(evaluation)
    return _render("report.html", own, head=head, parts=rest, captions=CAPTIONS, evaluation=judged)


def comparison_page(comparison: Comparison, reports: Mapping[str, RunReport]) -> str:
    """Return the page of several runs, by name. Raises UserError without matplotlib."""
    return _render("compare.html", reports, comparison=comparison, names=[clean(name) for name in reports])


def _render(template: str, reports: Mapping[str, RunReport], **more: Any) -> str:
    assets = files("daskcnn.show.renderers") / "templates"
    style, script = ((assets / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    lanes = [_drawn(name, report, reports) for name, report in reports.items() if report.rounds]
    page = _environment().get_template(template)
    return page.render(
        **more,
        title=", ".join(map(clean, reports)),
        style=Markup(style),
        script=Markup(script),
        digest=digest,
        timelines=lanes,
        workers=list(dict.fromkeys(lane.name for each in lanes for lane in each.lanes)),
        figures=[(figure, Markup(inline_svg(figure))) for figure in run_figures(reports)],
    )


@cache
def _environment() -> Environment:
    options: dict[str, Any] = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    made = Environment(loader=PackageLoader("daskcnn.show.renderers"), autoescape=True, **options)
    made.filters |= {"clean": clean, "capital": capital}
    return made


def _evaluated(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """An evaluation for a page: a line and, if there are classes, a table by class and their confusion."""
    counts = evaluation["confusion"] if len(evaluation["classes"]) <= MOST_CLASSES else None
    return {
        "line": judged_line(evaluation),
        "classes": class_table(evaluation) if evaluation["classes"] else None,
        "matrix": None if counts is None else confusion_table(evaluation),
        "caption": CONFUSION,
        "shades": [[round(100 * n / max(sum(row), 1)) for n in row] for row in counts or ()],  # per cent of the class
    }


# --- the timeline ---


def _drawn(name: str, report: RunReport, reports: Mapping[str, RunReport]) -> DrawnTimeline:
    """The lanes of a run, over the seconds of the longest run of the page."""
    found = timeline(report)
    seconds = max([found.seconds, *(each.seconds for each in reports.values())]) or 1.0
    parts = [part for part in COLOUR_OF if any(lane.spent[SPENT.index(part)] for lane in found.lanes)]
    marks = [
        (SPAN * note.at / seconds, f"{duration(note.at)}: {note.text}") for note in spread(report.notes, MOST_MARKS)
    ]
    lanes = f"{count(len(found.lanes))} of {count(found.workers)} workers have a lane."
    notes = [lanes] if len(found.lanes) < found.workers else []
    notes += [] if found.whole else ["The run is long: each stretch shows the shares of what was done in it."]
    return DrawnTimeline(
        run=clean(name),
        lanes=tuple(_drawn_lane(lane, seconds) for lane in found.lanes),
        ticks=tuple((100 * at / seconds, told) for at, told in ticks(seconds)),
        marks=tuple(marks),
        parts=tuple((part, part_name(part, reports)) for part in parts),
        note=" ".join(notes),
    )


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
                x, y, height = _short(scale * each.begin), _short(max(0.0, low)), _short(high)
                width = _short(max(scale * length, LEAST_WIDTH))
                outlines[part].append(f"M{x} {y}h{width}v{height}h-{width}z")
    total = sum(lane.spent)
    told = [f"{part} {duration(s)} ({percent(s / total)})" for part, s in zip(SPENT, lane.spent, strict=True) if s]
    paths = tuple((part, "".join(boxes)) for part, boxes in outlines.items() if boxes)
    return DrawnLane(clean(lane.worker), paths, f"{count(lane.rounds)} rounds: {', '.join(told) or '-'}")


def _short(value: float) -> str:
    """At most three decimals, without zeros at the end."""
    return f"{value:.3f}".rstrip("0").rstrip(".")


def ticks(seconds: float) -> list[tuple[float, str]]:
    """Return at most six round times from 0 to the end of the run, in seconds and for people."""
    step, unit, name = next(each for each in _steps() if seconds / each[0] < MOST_TICKS)
    return [(i * step, f"{i * step / unit:g} {name}") for i in range(int(seconds / step) + 1)]


def _steps() -> Iterator[tuple[float, float, str]]:
    """Seconds between two ticks, the seconds of their unit, and its name."""
    decades = [(digit, power) for power in range(-6, 12) for digit in (1, 2, 5)]
    yield from ((step, 1.0, "s") for digit, power in decades if (step := digit * 10.0**power) < 60)
    yield from ((60.0 * minutes, 60.0, "min") for minutes in (1, 2, 5, 10, 20, 30))
    yield from ((3600 * digit * 10.0**power, 3600.0, "h") for digit, power in decades if power >= 0)
