"""Figures of runs as numbers, curves or bars over one axis: of one run, or of several in the same axes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from itertools import pairwise
from typing import Any

from daskcnn.errors import DataError
from daskcnn.show.history import EvaluationRow
from daskcnn.show.report_tables import RoundBalance, RunReport, StepParts
from daskcnn.show.text import clean, spread

Curve = tuple[Sequence[float], Sequence[float]]  # values of x, and of y


@dataclass(frozen=True)
class Figure:
    """Curves by name over one axis. Nothing is below 0. like: the figures of the papers that it repeats."""

    name: str
    title: str
    like: str
    x: str
    y: str
    curves: Mapping[str, Curve]
    doubling: bool = False  # an x in powers of 2
    levels: Mapping[str, float] = field(default_factory=dict)  # lines across
    marks: Mapping[str, float] = field(default_factory=dict)  # lines up
    stacked: bool = False  # parts that add up, drawn as bars
    rates: bool = False  # both axes in powers of 10
    ticks: Sequence[str] = ()  # labels below the x of the first curve, in place of its numbers
    points: Mapping[str, Curve] = field(default_factory=dict)  # curves of which each point stands by itself
    colours: Mapping[str, int] = field(default_factory=dict)  # numbers of colours, in place of the curves' order
    top: float | None = None  # the largest y that is shown, in place of the largest one
    unit: str = ""  # of levels
    counted: bool = False  # an x in whole numbers, where there is room for two


PARTS = ("communication", "convolutions", "the rest")
MILLI = 1e3
GAP = 0.8  # between the bars of two runs, in bars


def stacked(name: str, title: str, like: str, x: str, bars: Mapping[str, Sequence[float]]) -> Figure:
    """Return bars by their labels: seconds of communication, of the slowest convolutions, of the rest."""
    xs = range(len(bars))
    curves = {part: (xs, [bar[i] for bar in bars.values()]) for i, part in enumerate(PARTS)}
    return Figure(name, title, like, x, "seconds a step", curves, stacked=True, ticks=tuple(bars))


def step_parts(reports: Mapping[str, RunReport]) -> Figure:
    """Return milliseconds of a step of each run, by the papers and by worker. Raises DataError naming one without."""
    places: list[float] = []
    bars: list[tuple[str, StepParts]] = []
    for run, report in reports.items():
        if report.papers_step is None:
            remedy = "give a run of strategy 'layer' that ended one"
            raise DataError(clean(run), "this log has no epoch of sharded layers", remedy)
        begin = places[-1] + 1 + GAP if places else 0.0
        own = [(run, report.papers_step), *report.breakdown.items()]
        places += [begin + i for i in range(len(own))]
        bars += own
    return Figure(
        "breakdown",
        "What a step of sharded layers takes",
        "Marques et al. fig. 6 and 8",
        "runs by the papers' definition, each with its workers beside it",
        "milliseconds a step",
        {part: (places, [MILLI * astuple(parts)[i] for _, parts in bars]) for i, part in enumerate(PARTS)},
        stacked=True,
        ticks=[clean(name) for name, _ in bars],
    )


FIGURES = (
    *("accuracy-by-time", "accuracy-by-epoch", "accuracy-by-bytes", "loss-by-time", "loss-by-epoch", "auc-by-epoch"),
    *("time-by-worker", "samples-by-worker", "balance-by-round", "wait-by-round", "breakdown"),
)
"""Names of all figures, in the order in which they are shown."""
MOST_POINTS, MOST_BARS = 300, 40  # points of a curve, and workers with a bar of their own, in one figure
PERCENT, MEGA = 100.0, 1e6
FLAT, ROOM = 2.0, 1.05
"""Times the largest of the later losses from which the first ones leave the figure; its height, likewise."""
COLOUR_OF = {"compute": 0, "load": 2, "evaluation": 3, "communication": 1, "wait": 4}
"""The parts of a worker's time, from below, each with its place among the colours."""

Reports = Mapping[str, RunReport]  # reports by the names of their runs


def run_figures(reports: Reports) -> tuple[Figure, ...]:
    """Return every figure that these runs have numbers for, in the order of `FIGURES`."""
    found = [*_accuracies(reports), *_losses(reports), *_workers(reports), *_rounds(reports)]
    if reports and all(report.papers_step for report in reports.values()):
        found.append(step_parts(reports))
    return tuple(figure for figure in found if any(len(xs) for xs, _ in figure.curves.values()))


# --- the center ---


def _accuracies(reports: Reports) -> Iterator[Figure]:
    axes: list[tuple[str, str, str, str, Callable[[EvaluationRow], float]]] = [
        ("time", "time", "", "seconds", lambda look: look.at),
        ("epoch", "epoch", "BPT-CNN fig. 11 in its axes", "epoch", lambda look: look.epoch),
        ("bytes", "traffic", "", "MB sent and received by all workers", lambda look: look.moved / MEGA),
    ]
    tests = [report.test.accuracy for report in reports.values() if report.test]
    levels = {"test": PERCENT * tests[0]} if len(reports) == 1 and tests and tests[0] is not None else {}
    for by, name, like, x, of in axes:
        if by == "bytes" and not any(look.moved for report in reports.values() for look in report.looks):
            continue
        curves, what = _looks(reports, of, "accuracy", PERCENT), _judged(reports, "accuracy")
        more: dict[str, Any] = {"levels": levels, "unit": "%", "counted": by == "epoch"}
        yield Figure(f"accuracy-by-{by}", f"{capital(what)} by {name}", like, x, f"{what}, %", curves, **more)


def _losses(reports: Reports) -> Iterator[Figure]:
    for by, x, of in (("time", "seconds", lambda look: look.at), ("epoch", "epoch", lambda look: look.epoch)):
        curves = _looks(reports, of, "loss")
        what, top = _judged(reports, "loss"), top_of(curves.values())
        title = f"{capital(what)} by {by}, mean of the samples"
        yield Figure(f"loss-by-{by}", title, "", x, what, curves, top=top, counted=by == "epoch")
    curves = _looks(reports, lambda look: look.epoch, "auc")
    title = "Area under the ROC curve, of validation"
    yield Figure("auc-by-epoch", title, "BPT-CNN fig. 11 in its axes", "epoch", "validation AUC", curves, counted=True)


def _judged(reports: Reports, what: str) -> str:
    """The name of what several runs are compared by; curves of one run name their samples themselves."""
    return what if len(reports) == 1 else f"validation {what}"


def capital(text: str) -> str:
    """Return the text with its first letter large, and the others as they are."""
    return text[:1].upper() + text[1:]


def top_of(curves: Collection[Curve]) -> float | None:
    """Return the largest loss to show: beside those of the first steps all others may lie on one line."""
    first, later = (max((y for _, ys in curves for y in ys[part]), default=0.0) for part in (slice(1), slice(1, None)))
    return ROOM * later if first > FLAT * later > 0 else None


def _looks(reports: Reports, x: Callable[[EvaluationRow], float], y: str, unit: float = 1.0) -> dict[str, Curve]:
    """Curves of training and of validation of one run; of several, those of validation by the runs' names."""
    kinds = {"validation": "auc"} if y == "auc" else {"training": y, "validation": f"validation_{y}"}
    curves = {}
    for name, report in reports.items():
        for kind, of in kinds.items():
            points = [(x(look), unit * value) for look in report.looks if (value := getattr(look, of)) is not None]
            if points and (len(reports) == 1 or kind == "validation"):
                curves[kind if len(reports) == 1 else clean(name)] = thinned(points)
    return curves


def thinned(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> Curve:
    """Return a curve of at most `most` points: both ends, and the least and the largest y of equal parts between."""
    if len(points) > most:
        inner, parts = points[1:-1], max(1, (most - 2) // 2)
        cuts = [i * len(inner) // parts for i in range(parts + 1)]
        kept = {0, len(points) - 1}
        for begin, end in pairwise(cuts):
            of = sorted(range(begin, end), key=lambda i: inner[i][1])
            kept |= {1 + of[0], 1 + of[-1]}
        points = [points[i] for i in sorted(kept)]
    return [x for x, _ in points], [y for _, y in points]


# --- the workers ---


def _workers(reports: Reports) -> Iterator[Figure]:
    """The time and the samples of each worker."""
    chosen = [
        (name, worker)
        for name, report in reports.items()
        for worker in spread(report.workers, max(1, MOST_BARS // len(reports)))
        if worker.rounds
    ]
    workers = [worker for _, worker in chosen]
    places: list[float] = []  # of the bars, with a gap between two runs
    for i, (name, _) in enumerate(chosen):
        places.append(places[-1] + 1 + (GAP if name != chosen[i - 1][0] else 0.0) if places else 0.0)
    ticks = [clean(w.name if len(reports) == 1 else f"{name} {w.name}") for name, w in chosen]
    trained = sum(1 for report in reports.values() for worker in report.workers if worker.rounds)
    x = "worker" if len(workers) == trained else "worker (some of many)"
    names = {part: part_name(part, reports) for part in COLOUR_OF if any(getattr(worker, part) for worker in workers)}
    title, colours = "Where the time of each worker went", {name: COLOUR_OF[part] for part, name in names.items()}
    times: dict[str, Curve] = {
        name: (places, [getattr(w, part) or 0.0 for w in workers]) for part, name in names.items()
    }
    yield Figure("time-by-worker", title, "", x, "seconds", times, stacked=True, ticks=ticks, colours=colours)
    title = "Samples that each worker trained on"
    samples: dict[str, Curve] = {"samples": (places, [float(w.samples) for w in workers])} if workers else {}
    yield Figure("samples-by-worker", title, "", x, "samples", samples, stacked=True, ticks=ticks)


def part_name(part: str, reports: Reports) -> str:
    """Return the name of a part of a worker's time; waiting contains communication that is not measured apart."""
    apart = all(report.total.communication is not None for report in reports.values())
    return part if apart or part != "wait" else "communication and wait"


# --- the rounds ---


def _rounds(reports: Reports) -> Iterator[Figure]:
    """Balance and wait of the rounds; one worker alone has neither."""
    several = {name: report for name, report in reports.items() if len(report.workers) > 1}
    one = len(reports) == 1
    balance = {"balance" if one else clean(name): _of_rounds(r, lambda b: b.balance) for name, r in several.items()}
    pooled = [r.balance.balance for r in several.values() if r.balance and r.balance.balance is not None]
    levels = {"of all rounds": pooled[0]} if one and pooled else {}
    title, like = "Balance of the rounds (mean busy by longest)", "BPT-CNN fig. 15 b, which has it by workers"
    yield Figure("balance-by-round", title, like, "round", "balance", balance, levels=levels, counted=True)
    wait: dict[str, Curve] = {}
    for name, report in several.items():
        wait["measured" if one else clean(name)] = _of_rounds(report, lambda b: b.waited)
        if one:
            wait["by Eq. 8"] = _of_rounds(report, lambda b: b.wait)
    title = "Wait of all workers in a round"
    yield Figure("wait-by-round", title, "BPT-CNN eq. 8", "round", "seconds", wait, counted=True)


def _of_rounds(report: RunReport, y: Callable[[RoundBalance], float | None]) -> Curve:
    """By the number of the round, counted through all lives of the run."""
    return thinned([(i, value) for i, each in enumerate(report.by_round, start=1) if (value := y(each)) is not None])
