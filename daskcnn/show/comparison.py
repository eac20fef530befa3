"""Runs side by side."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count as numbers_from
from itertools import takewhile
from typing import Any, Literal, TypeAlias

from daskcnn.events import CalibratedWorker
from daskcnn.show.report_sections import rule_of, status_of, strategy_of
from daskcnn.show.report_tables import RunReport, WorkerRow
from daskcnn.show.text import aligned, clean, count, duration, number, percent, size

Value: TypeAlias = float | str | None
DONE = "done"
LOADED = 1.25  # factor between calibrations of the same machines above which other programs are to blame
WIDE = 20  # letters of the longest name in a heading; longer names are listed and numbered
LONG = 40  # letters of a key's value
CUT = "…"


@dataclass(frozen=True, slots=True)
class ComparedLine:
    """One figure of every run. values: None for a run that has none; shown: the values for people.

    best: indices of the best of the runs that ended well; empty if all are alike, or if none is better. asked: True if
    it was asked for; then it is shown even if no run has it.
    """

    label: str
    values: tuple[Value, ...]
    shown: tuple[str, ...]
    best: tuple[int, ...]
    asked: bool = False


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs side by side.

    names: short ones that tell the runs apart. keys: of their jobs, those in which they differ. differences: what makes
    their figures hard to compare.
    """

    runs: tuple[str, ...]
    names: tuple[str, ...]
    keys: tuple[ComparedLine, ...]
    lines: tuple[ComparedLine, ...]
    differences: tuple[str, ...]

    def told(self) -> tuple[ComparedLine, ...]:
        """Return the keys, the lines that some run has, and those that were asked for."""
        told = (line for line in self.lines if line.asked or any(value is not None for value in line.values))
        return (*self.keys, *told)

    def labels(self) -> tuple[str, ...]:
        """Return the names for a legend.

        Runs that differ in one key have its values in theirs; the values alone if these differ and the names are parts.
        """
        if len(self.keys) != 1:
            return self.names
        (line,) = self.keys
        values = tuple(f"{line.label.rpartition('.')[2]}={shown}" for shown in line.shown)
        if len({*values}) == len(values) and all(name.startswith(CUT) for name in self.names):
            return values
        return tuple(f"{name} ({value})" for name, value in zip(self.names, values, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Figure:
    """A line to be: its value in a report, the text of that, and the better direction."""

    label: str
    value: Callable[[RunReport], Value]
    text: Callable[[Any], str]
    better: Literal["less", "more", None] = None
    asked: bool = False
    of_data: bool = False  # it depends on the samples: where runs had different ones, none is the best

    def line(self, reports: Sequence[RunReport]) -> ComparedLine:
        values = tuple(self.value(report) for report in reports)
        shown = tuple("-" if value is None else self.text(value) for value in values)
        done = [i for i, report in enumerate(reports) if report.status == DONE]  # one that broke off is not the fastest
        return ComparedLine(self.label, values, shown, self._best(values, done or range(len(reports))), self.asked)

    def _best(self, values: Sequence[Value], rated: Sequence[int]) -> tuple[int, ...]:
        """The rated runs that have the best value; where it was asked for, having none is worse than any."""
        known = {i: value for i in rated if isinstance(value := values[i], int | float)}
        found = set(known.values()) | {values[i] for i in rated if self.asked}
        if self.better is None or not known or len(found) < 2:
            return ()
        best = min(known.values()) if self.better == "less" else max(known.values())
        return tuple(i for i, value in known.items() if value == best)


def compare(
    reports: Sequence[RunReport],
    *,
    methods: Sequence[Mapping[str, Any]] = (),
    targets: Sequence[float] = (),
    reached: bool = False,
) -> Comparison:
    """Return the figures of several runs, with time, epochs and rounds to each target, a validation accuracy in (0, 1].

    Rounds to an accuracy are those of BPT-CNN's table 1, the mean of the workers. Runs that have losses alone have no
    line for the targets. methods: the tables of each run's job that describe its method, empty where none are known.
    reached: leave out targets that no run has reached.
    """
    if any(map(_losses, reports)) and all(_best_validation(report) is None for report in reports):
        targets = ()
    if reached:
        targets = [target for target in targets if any(report.reached(target) for report in reports)]
    results = [*_RESULTS, *_metrics(reports), *(figure for target in targets for figure in _to(target))]
    if len({_trained_on(report) for report in reports}) > 1:
        results = [replace(figure, better=None) if figure.of_data else figure for figure in results]
    figures = [*_SETUP, *results, *_COSTS]
    runs = tuple(clean(report.start.run) for report in reports)
    lines, keys = tuple(figure.line(reports) for figure in figures), tuple(_differing("", methods))
    return Comparison(runs, told_apart(runs), keys, lines, tuple(_differences(reports)))


# --- the keys ---


def _differing(key: str, values: Sequence[Any]) -> Iterator[ComparedLine]:
    """Yield a line for each key in which the runs that have it differ; lists of one length differ in their entries."""
    there = [value for value in values if value is not _ABSENT]
    if all(value == there[0] for value in there):
        return
    if all(isinstance(value, Mapping) for value in there):
        names = dict.fromkeys(name for value in there for name in value)
        parts = {f"{key}.{name}".removeprefix("."): [_entry(value, name) for value in values] for name in names}
    elif all(isinstance(value, list) and len(value) == len(there[0]) for value in there):
        parts = {f"{key}[{i}]": [_entry(value, i) for value in values] for i in range(len(there[0]))}
    else:
        plain = tuple(None if value is _ABSENT else _plain(value) for value in values)
        shown = tuple(
            word if len(word) <= LONG else f"{word[:LONG]}{CUT}" for word in told_apart(list(map(_words, values)))
        )
        yield ComparedLine(clean(key), plain, shown, ())
        return
    for name, own in parts.items():
        yield from _differing(name, own)


_ABSENT = object()  # in place of the value of a key that a job has not


def _entry(value: Any, place: Any) -> Any:
    if isinstance(value, Mapping):
        return value.get(place, _ABSENT)
    return _ABSENT if value is _ABSENT else value[place]


def _plain(value: Any) -> Value:
    """The value, or JSON in place of lists and tables."""
    return value if value is None or isinstance(value, str | int | float) else json.dumps(value)


def _words(value: Any) -> str:
    if value is None or value is _ABSENT:
        return "-"
    if isinstance(value, list):
        return f"{len(value)} entries"
    return clean(value if isinstance(value, str) else json.dumps(value))


def told_apart(paths: Sequence[str]) -> tuple[str, ...]:
    """Return the shortest ends of the paths that tell them apart; of long ones without what all begin with."""
    parts = {path: tuple(path.rstrip("/").split("/")) for path in paths}
    deep = next(n for n in numbers_from(1) if len({own[-n:] for own in parts.values()}) == len({*parts.values()}))
    names = {path: "/".join(own[-deep:]) or "/" for path, own in parts.items()}
    alike = takewhile(lambda letters: len({*letters}) == 1, zip(*names.values(), strict=False))
    shared = re.search(r".*[-_. /]", "".join(letters[0] for letters in alike))
    if shared and len({*names.values()}) > 1 and max(map(len, names.values())) > WIDE:
        names = {path: f"{CUT}{name[shared.end() :]}" for path, name in names.items()}
    return tuple(names[path] for path in paths)


def _differences(reports: Sequence[RunReport]) -> list[str]:
    told: list[tuple[str, Callable[[RunReport], Any], str]] = [
        ("data", _trained_on, "accuracies"),
        ("networks", lambda r: (r.start.model, r.start.parameters), "times and accuracies"),
        ("epochs", lambda r: r.start.epochs, "whole times"),
        ("workers", lambda r: len(_trained(r)), "times"),
        ("machines", lambda r: frozenset((w.host, w.processor, w.threads) for w in _calibrated(r)), "times"),
    ]
    found = [what for what, of, _ in told if len(set(map(of, reports))) > 1]
    words = [f"the {what} differ: compare {which} with care" for what, _, which in told if what in found]
    alike = len({report.start.batch_size for report in reports}) == 1
    alike = alike and not {"networks", "workers", "machines"} & {*found}
    return words + (_loads(reports) if alike else [])


def _trained_on(report: RunReport) -> tuple[Any, ...]:
    return report.start.dataset, report.start.samples, report.start.validation_samples


def _loads(reports: Sequence[RunReport]) -> list[str]:
    """A line where the same machines were slower in one run than in another when they were calibrated."""
    speeds = [sum(worker.images_per_second or 0.0 for worker in _calibrated(report)) for report in reports]
    if min(speeds) <= 0 or max(speeds) <= LOADED * min(speeds):
        return []
    slowest, fastest = (reports[speeds.index(speed(speeds))].start.run for speed in (min, max))
    less = percent(1 - min(speeds) / max(speeds))
    return [
        f"the load differs: when they were calibrated, the workers of {clean(slowest)} were {less} slower than those "
        f"of {clean(fastest)}; did other programs run? Compare times with care"
    ]


# --- the lines ---


_figures, _short = "{:.3f}".format, "{:.4g}".format


def _network(report: RunReport) -> Value:
    start = report.start
    return None if start.parameters is None else f"{start.model or ''} ({count(start.parameters)})".strip()


def _trained(report: RunReport) -> list[WorkerRow]:
    """The workers with rounds; until one has ended, all."""
    return [worker for worker in report.workers if worker.rounds] or [*report.workers]


def _calibrated(report: RunReport) -> Sequence[CalibratedWorker]:
    """Return what those measured of themselves; what all did where they train in groups, which have other names."""
    names = {worker.name for worker in _trained(report)}
    return [worker for worker in report.calibrated if worker.name in names] or report.calibrated


def _workers(report: RunReport) -> Value:
    """'2 cpu, 1 gpu'."""
    devices = [worker.device or "?" for worker in _trained(report)]
    return ", ".join(f"{devices.count(device)} {device}" for device in dict.fromkeys(devices)) or None


def _best_validation(report: RunReport) -> Value:
    known = (look.validation_accuracy for look in report.looks if look.judged is None)
    return max((accuracy for accuracy in known if accuracy is not None), default=None)


def _losses(report: RunReport) -> list[float]:
    """The losses on all validation samples of a run whose loss has no accuracy."""
    known = ((look.validation_loss, look.validation_accuracy) for look in report.looks if look.judged is None)
    return [loss for loss, accuracy in known if loss is not None and accuracy is None]


def _to(target: float) -> list[_Figure]:
    """Seconds, epochs and rounds until the validation accuracy reached the target; None if it never did."""

    def of(name: str) -> Callable[[RunReport], Value]:
        return lambda report: getattr(report.reached(target), name, None)

    kinds = (("time", "at", duration), ("epochs", "epoch", _short), ("rounds", "rounds", _short))
    to = f"to {100 * target:.4g} %"
    return [_Figure(f"{kind} {to}", of(name), text, "less", asked=True, of_data=True) for kind, name, text in kinds]


def _metrics(reports: Sequence[RunReport]) -> list[_Figure]:
    """A line of each of the jobs' own metrics; which way is better is not known."""

    def of_test(name: str) -> Callable[[RunReport], Value]:
        return lambda report: report.test.metrics.get(name) if report.test else None

    def of_validation(name: str) -> Callable[[RunReport], Value]:
        return lambda report: report.looks[-1].metrics.get(name) if report.looks else None

    names = dict.fromkeys(name for report in reports for look in report.looks for name in look.metrics)
    names |= dict.fromkeys(name for report in reports if report.test for name in report.test.metrics)
    kinds = (("test", of_test), ("validation", of_validation))
    return [_Figure(f"{part} {clean(name)}", of(name), _short) for name in names for part, of in kinds]


_SETUP = [
    _Figure("status", lambda r: status_of(r.start, r.status), clean),
    _Figure("strategy", lambda r: strategy_of(r.start), clean),
    _Figure("rule", lambda r: rule_of(r.start) or None, clean),
    _Figure("data", lambda r: r.start.dataset and f"{r.start.dataset}, {count(r.start.samples)}", clean),
    _Figure("network", _network, clean),
    _Figure("workers", _workers, clean),
    _Figure("epochs", lambda r: r.epoch, _short),
]
_RESULTS = [
    _Figure("time", lambda r: r.seconds, duration, "less"),
    _Figure("images/s", lambda r: r.images_per_second, count, "more"),
    _Figure("test accuracy", lambda r: r.test.accuracy if r.test else None, percent, "more", of_data=True),
    _Figure("test AUC", lambda r: r.test.auc if r.test else None, _figures, "more", of_data=True),
    _Figure(
        "last validation accuracy",
        lambda r: r.looks[-1].validation_accuracy if r.looks else None,
        percent,
        "more",
        of_data=True,
    ),
    _Figure("best of the run", _best_validation, percent, "more", of_data=True),
    _Figure(
        "test loss", lambda r: r.test.loss if r.test and r.test.accuracy is None else None, number, "less", of_data=True
    ),
    _Figure("validation loss", lambda r: next(reversed(_losses(r)), None), number, "less", of_data=True),
    _Figure("least of the run", lambda r: min(_losses(r), default=None), number, "less", of_data=True),
]
_COSTS = [
    _Figure("workers busy", lambda r: r.utilisation, percent, "more"),
    _Figure("balance", lambda r: r.balance.balance if r.balance else None, _figures, "more"),
    _Figure("balance, increment 3 on", lambda r: getattr(r.from_increment(3), "balance", None), _figures, "more"),
    _Figure("wait", lambda r: r.total.wait, duration, "less"),
    _Figure("wait by Eq. 8", lambda r: r.balance.wait if r.balance else None, duration),
    _Figure("communication", lambda r: r.total.communication, duration, "less"),
    _Figure("bytes", lambda r: r.traffic.up + r.traffic.down, size, "less"),
    _Figure("of Eq. 11", lambda r: r.traffic.share, _figures),
    _Figure("pushes", lambda r: r.total.pushes or None, count),
    _Figure("mean staleness", lambda r: r.total.staleness_mean, number),
]


def format_comparison(comparison: Comparison) -> str:
    """Return a line a key or a figure, a column a run, the best of a line marked with *."""
    legend, headings = _headings(comparison)
    rows = [["", *(f"{heading} " for heading in headings)]]
    rows += [
        [line.label, *(f"{shown}{'*' if i in line.best else ' '}" for i, shown in enumerate(line.shown))]
        for line in comparison.told()
    ]
    warnings = [f"warning: {difference}" for difference in comparison.differences]
    return "\n".join([*legend, *aligned(rows), "", "* the best of its line", *warnings])


def _headings(comparison: Comparison) -> tuple[list[str], list[str]]:
    """Lines that say which run is which, and the headings of the columns."""
    runs, names = comparison.runs, list(comparison.names)
    if len(set(names)) == len(names) and max(map(len, names)) <= WIDE:
        return [], names
    numbers = [str(i) for i in range(1, len(runs) + 1)]
    return [*aligned(list(zip(numbers, runs, strict=True)), left=2), ""], numbers
