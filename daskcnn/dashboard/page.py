"""The page, with Bokeh, of what `live_run` shows; once a second it is written anew if something has changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from bokeh.document import Document
from bokeh.layouts import column, row
from bokeh.models.annotations.legends import Legend, LegendItem
from bokeh.models.ranges import DataRange1d, FactorRange
from bokeh.models.sources import ColumnDataSource
from bokeh.models.widgets.inputs import Select
from bokeh.models.widgets.markups import Div
from bokeh.models.widgets.tables import DataTable, TableColumn
from bokeh.plotting import figure as plot
from distributed.dashboard.components import DashboardComponent, add_periodic_callback
from distributed.dashboard.components.scheduler import BOKEH_THEME, env
from distributed.dashboard.utils import update

from daskcnn.cluster.link.leases import workers_on
from daskcnn.dashboard.live_run import TITLES, Runs, ShownBar, ShownRun, heading, shown
from daskcnn.show.queue_table import DESK, QUEUE_COLUMNS
from daskcnn.show.renderers.drawing import BEHIND_TEXT, COLOURS
from daskcnn.show.run_figures import COLOUR_OF, Figure
from daskcnn.show.text import clean

EVERY = 1000  # milliseconds between two updates
LANE, HEIGHT = 26, 260  # pixels of a lane and of a figure
NARROW, WRAPPED = 340, ":host { flex-wrap: wrap; }"
"""Least pixels of a figure beside another, and the style that puts it below the other otherwise."""
_PLOT: dict[str, Any] = {"height": HEIGHT, "sizing_mode": "stretch_width", "toolbar_location": "above"}
UNDIVIDED = "#dddddd"
WIDE = 0.15  # of the figure: a box with room for a worker's name
NOTHING = "No run has sent an event yet. A job sends them where run.dashboard is true, which is the default."
_CURVE, _POINT = ("xs", "ys", "name", "colour", "dash"), ("x", "y", "name", "colour")
DASHES = ("solid", "dashed", "dotdash", "dotted")  # of curves, so that one behind another stays visible
_BAR = ("row", "left", "right", "colour", "name", "text", "label")
WORKER_COLUMNS = ("worker", "run", "since")
LAYER_COLUMNS = ("layer", "kind", "output", "parameters", "kernels of")
GivesRows = Callable[[], Sequence[Sequence[str]]]
Columns = dict[str, list[Any]]


class CurveFigure:
    """A figure with any number of curves, or of points by themselves."""

    def __init__(self, name: str) -> None:
        title, x, y = TITLES[name]
        self.lines = ColumnDataSource(_columns(_CURVE), name=f"{name}-curves")
        self.points = ColumnDataSource(_columns(_POINT), name=f"{name}-points")
        ranges = {"x_range": DataRange1d(start=0), "y_range": DataRange1d(start=0)}
        tools = "pan,wheel_zoom,box_zoom,reset"
        self.root = plot(title=title, x_axis_label=x, y_axis_label=y, tools=tools, **ranges, **_PLOT)
        drawn: tuple[Any, ...] = (
            self.root.multi_line("xs", "ys", source=self.lines, line_color="colour", line_dash="dash", line_width=2),
            self.root.scatter("x", "y", source=self.points, color="colour", size=5),
        )
        items = [LegendItem(label={"field": "name"}, renderers=[each]) for each in drawn]
        self.root.add_layout(_legend(items=items), "above")

    def show(self, figure: Figure | None) -> None:
        """Show the figure, or hide its place if there is none."""
        self.root.visible = figure is not None
        if figure is None:
            return
        curves = [(name, list(xs), list(ys)) for name, (xs, ys) in figure.curves.items()]
        if curves:  # a line across, as long as the longest curve
            begin, end = min(xs[0] for _, xs, _ in curves), max(xs[-1] for _, xs, _ in curves)
            curves += [(name, [begin, end], [level, level]) for name, level in figure.levels.items()]
        single = [(name, x, y) for name, xs, ys in curves if len(xs) == 1 for x, y in zip(xs, ys, strict=True)]
        single += [(name, x, y) for name, (xs, ys) in figure.points.items() for x, y in zip(xs, ys, strict=True)]
        colours = _colours([name for name, *_ in curves] + list(figure.points))
        dashes = {name: DASHES[i % len(DASHES)] for i, name in enumerate(colours)}
        lined = [(xs, ys, name, colours[name], dashes[name]) for name, xs, ys in curves if len(xs) > 1]
        update(self.lines, _columns(_CURVE, lined))
        update(self.points, _columns(_POINT, [(x, y, n, colours[n]) for n, x, y in single]))


class Bars:
    """Bars from left to right, in rows with labels: lanes of workers, layers of a network."""

    def __init__(self, name: str, title: str, x: str) -> None:
        self.source = ColumnDataSource(_columns(_BAR), name=name)
        self._rows = FactorRange()
        hints: dict[str, Any] = {"tools": "xpan,xwheel_zoom,reset,hover", "tooltips": [("", "@name @text")]}
        self.root = plot(title=title, x_axis_label=x, y_range=self._rows, **hints, **_PLOT)
        self.root.add_layout(_legend(), "above")
        look: dict[str, Any] = {"source": self.source, "fill_color": "colour", "line_color": None}
        self.root.hbar("row", left="left", right="right", height=0.8, legend_field="name", **look)
        look = {"source": self.source, "text_baseline": "middle", "text_font_size": "11px", "text_color": "#000000"}
        self.root.text("left", "row", "label", x_offset=4, **look)
        self.root.ygrid.visible = False

    def show(self, rows: Sequence[str], bars: Columns) -> None:
        """Show these bars, in these rows from the top down; hide the place without rows."""
        self.root.visible = bool(rows)
        if (factors := list(dict.fromkeys(reversed(rows)))) != self._rows.factors:
            self._rows.factors = factors
            self.root.height = 90 + LANE * max(3, len(factors))
        update(self.source, bars)


class RunPage(DashboardComponent):  # type: ignore[misc] # of Dask, which is not typed
    """The page for one reader, who chooses a run; the latest one until then.

    workers, queue : give rows of all of them, and of the jobs of a queue.
    """

    def __init__(self, runs: Runs, workers: GivesRows = list, queue: GivesRows = list) -> None:
        self._runs, self._workers, self._queue = runs, workers, queue
        self._chosen, self._seen = False, ("", -1)
        self._choosing = False  # by this page, not by the reader
        self.choice = Select(title="Run", options=[], width=260, name="run")
        self.choice.on_change("value", self._on_choice)
        self.heading = Div(text=NOTHING, render_as_text=True, name="heading", styles={"white-space": "pre-line"})
        self.heading.sizing_mode = "stretch_width"
        self.curves = {name: CurveFigure(name) for name in TITLES}
        self.lanes = Bars("lanes", "What the workers did in the last rounds", "seconds of the run")
        self.network = Bars("network", "Who has which kernels", "part of the layer")
        self.network.root.xaxis.visible = False
        self.layers = _table("layers", LAYER_COLUMNS)
        self.workers = _table("workers", WORKER_COLUMNS, widths=(200, 700, 200))
        self.lines = _table("events", ("time", "event"), widths=(80, 1000))
        plots = [each.root for each in self.curves.values()]
        self.queue = _table("queue", QUEUE_COLUMNS, widths=(40, 100, 140, 80, 50, 80, 80, 250, 600))
        self.root = column(
            self.queue,
            _side_by_side(self.choice, self.heading),
            _side_by_side(*plots[:2]),
            self.lanes.root,
            *(_side_by_side(*plots[i : i + 2]) for i in range(2, len(plots), 2)),
            self.network.root,
            self.layers,
            self.workers,
            self.lines,
            sizing_mode="stretch_width",
        )
        self.source = self.lines.source

    def _on_choice(self, attr: str, old: str, new: str) -> None:
        self._chosen |= not self._choosing
        self.update()

    def update(self) -> None:
        """Show what is new."""
        who = _columns(WORKER_COLUMNS, [tuple(map(clean, row)) for row in self._workers()])
        if who != dict(self.workers.source.data):
            update(self.workers.source, who)
        jobs = _columns(QUEUE_COLUMNS, [tuple(map(clean, row)) for row in self._queue()])
        if jobs != dict(self.queue.source.data):
            update(self.queue.source, jobs)
        self.queue.visible = bool(jobs["id"])
        if not (labels := self._runs.labels()):
            return
        if self.choice.options != labels:
            self.choice.options = list[Any](labels)
        run = self._runs.runs.get(self.choice.value) if self._chosen else None
        if run is None:
            run = self._runs.runs[labels[0][0]]
            self._choosing = True
            self.choice.value = run.key
            self._choosing = False
        self.heading.text = heading(run, time.time())
        if (seen := (run.key, run.version)) != self._seen:
            self._seen = seen
            self._show(shown(run))

    def _show(self, now: ShownRun) -> None:
        for name, curves in self.curves.items():
            curves.show(now.figures.get(name))
        parts = [(p.row, p.begin, p.end, COLOURS[COLOUR_OF[p.name]], p.name, "", "") for p in now.parts]
        self.lanes.show(now.lanes, _columns(_BAR, parts))
        self.network.show(now.layers, _columns(_BAR, box_rows(now.boxes)))
        update(self.layers.source, _columns(LAYER_COLUMNS, now.table))
        self.layers.visible = bool(now.table)
        self.layers.columns[-1].visible = any(cells[-1] for cells in now.table)  # where kernels are divided
        update(self.lines.source, _columns(("time", "event"), now.lines))


def box_rows(boxes: Sequence[ShownBar]) -> list[tuple[Any, ...]]:
    """Return the rows of the boxes of a network, each in the colour of its worker; a wide one has the worker's name."""
    colours = _colours([box.name for box in boxes if box.name], BEHIND_TEXT) | {"": UNDIVIDED}
    labels = [f"{b.name} {b.text}".strip() if b.end - b.begin >= WIDE else b.text for b in boxes]
    return [
        (b.row, b.begin, b.end, colours[b.name], b.name or "home", b.text, label)
        for b, label in zip(boxes, labels, strict=True)
    ]


def queue_on(scheduler: Any) -> Sequence[Sequence[str]]:
    """Return the rows of the queue that a service has left at this scheduler; none where there is no service."""
    desk = scheduler.plugins.get(DESK)
    return () if desk is None else desk.rows


def show_runs(runs: Runs, scheduler: Any, extra: Mapping[str, Any], document: Document) -> None:
    """Fill a reader's document with the page, as Dask's own pages are made. extra: variables of its template."""
    page = RunPage(runs, partial(workers_on, scheduler), partial(queue_on, scheduler))
    page.update()
    add_periodic_callback(document, page, EVERY)
    document.add_root(page.root)
    document.title = "Dask: daskcnn"
    document.template = env.get_template("simple.html")
    document.template_variables.update(extra)
    document.theme = BOKEH_THEME


def _table(name: str, heads: Sequence[str], widths: Sequence[int] = ()) -> DataTable:
    columns = [TableColumn(field=head, title=head) for head in heads]
    for each, width in zip(columns, widths, strict=False):
        each.width = width
    source = ColumnDataSource(_columns(heads), name=name)
    as_it_is: dict[str, Any] = {"index_position": None, "sortable": False, "reorderable": False}
    return DataTable(source=source, columns=columns, height=HEIGHT, sizing_mode="stretch_width", **as_it_is)


def _side_by_side(*parts: Any) -> Any:
    """A row that becomes a column where the screen is narrow."""
    for part in parts:
        part.min_width = NARROW
    return row(*parts, sizing_mode="stretch_width", stylesheets=[WRAPPED])


def _legend(**options: Any) -> Legend:
    look: dict[str, Any] = {"orientation": "horizontal", "padding": 0, "margin": 2, "border_line_color": None}
    return Legend(**look, label_text_font_size="11px", glyph_width=14, glyph_height=14, spacing=8, **options)


def _columns(names: Sequence[str], rows: Sequence[Sequence[Any]] = ()) -> Columns:
    return {name: [each[i] for each in rows] for i, name in enumerate(names)}


def _colours(names: Sequence[str], of: Sequence[str] = COLOURS) -> dict[str, str]:
    return {name: of[i % len(of)] for i, name in enumerate(dict.fromkeys(names))}
