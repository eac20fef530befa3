"""Runs in aligned text: a report, a summary, a folder of runs."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from daskcnn.show.report_sections import sections
from daskcnn.show.report_tables import RunReport
from daskcnn.show.text import (
    aligned,
    brought,
    clean,
    count,
    duration,
    judged,
    no_kernels,
    percent,
    plural,
    size,
    time_shares,
)

_JUDGED = ("accuracy", "loss", "auc", "metrics")
MOST = 24  # rows of a table that is not asked for in full


def format_report(report: RunReport, *, full: bool = False) -> str:
    """Return all tables of a run. full: with every worker's rounds, and no table shortened."""
    parts = []
    for part in sections(report, most=None if full else MOST, rounds=full):
        facts = [f"{label:<12}{value}" for label, value in part.facts]
        table = [f"  {line}".rstrip() for line in (part.table.lines() if part.table else [])]
        parts.append("\n".join([*([part.title] if part.title else []), *facts, *table]))
    return "\n\n".join(parts)


@dataclass(frozen=True, slots=True)
class RunRow:
    """One run. state: how it ended, or "running", "waiting", "broken off" (killed) or "damaged".

    A run that is resumed is waiting until it has its scheduler, data and workers. test, validation: accuracies on these
    samples; None if unknown. seconds: of training. workers: that it has now, in groups where it has made some.
    """

    run: str
    state: str
    strategy: str = ""
    epochs: float = 0.0
    test: float | None = None
    validation: float | None = None
    seconds: float | None = None
    workers: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return asdict(self)


def readable_runs(rows: Sequence[RunRow], folder: str) -> str:
    """Return a line a run, under a heading."""
    if not rows:
        return f"{clean(folder)}: no runs here"
    cells = [("run", "state", "strategy", "epochs", "test accuracy", "validation accuracy", "duration")]
    for row in rows:
        texts = clean(row.run), clean(row.state), clean(row.strategy)
        accuracies = percent(row.test), percent(row.validation)
        cells.append((*texts, f"{row.epochs:.4g}", *accuracies, duration(row.seconds)))
    held = [", ".join(map(clean, row.workers)) for row in rows]
    column = ["workers", *held] if any(held) else [""] * len(cells)
    return "\n".join(f"{line}  {own}".rstrip() for line, own in zip(aligned(cells, left=3), column, strict=True))


Parts = Mapping[str, Any]
LABEL = 12  # columns of the labels
GLUE = "\N{NO-BREAK SPACE}"
WHOLE = ("kept in", "checkpoint", "evaluate", "report", "page", "picture", "both need", "resume")
"""Labels of paths and commands, which are never broken."""
SPENT = ("busy", "evaluation", "wait", "communication")  # parts of a worker's seconds


def format_summary(summary: Parts, width: int | None = None, *, to_draw: str = "") -> str:
    """Return the summary in aligned lines: results, workers, the run's folder, and commands to go on with.

    Lines longer than `width` columns, if it is given, are broken behind commas; paths and commands stay whole.
    to_draw: the command that installs the packages for pictures, if they are missing.
    """
    rate = f", {count(summary['images_per_second'])} images/s"
    epochs, traffic = plural(f"{summary['epochs']:.4g}", "epoch"), summary["bytes"]
    run, command = clean(summary["run"]), shlex.quote(str(summary["run"]))
    workers, reason = summary["workers"], summary.get("reason")
    spent = {kind: sum(w.get(kind, 0.0) for w in workers) for kind in SPENT}
    present = sum(w.get("present", 0.0) for w in workers) or (summary["seconds"] or 0.0) * len(workers)
    time = time_shares(present, **spent)
    results = {part: summary[part] for part in ("test", "validation") if summary[part]}
    resumable = summary["checkpoint"] and summary["status"] not in ("done", "diverged")
    lines = [
        ("status", clean(summary["status"]) + (f": {clean(reason)}" if reason else "")),
        ("training", f"{summary['strategy']}, {epochs} in {duration(summary['seconds'])}{rate}"),
        *((part, judged(*(found.get(name) for name in _JUDGED))) for part, found in results.items()),
        *([("weights", _handed_back(summary))] if summary.get("weights") == "best" else []),
        *([("brought", brought(**summary["alone"]))] if summary.get("alone") else []),
        *([("time", time)] if time else []),
        ("traffic", f"{size(traffic['up'])} up, {size(traffic['down'])} down"),
        *zip(["workers"] + [""] * len(workers), _worker_lines(workers), strict=True),
        *([("no kernels", no_kernels(unused))] if (unused := summary.get("no_kernels")) else []),
        ("kept in", run),
        *([("checkpoint", clean(summary["checkpoint"]))] if summary["checkpoint"] else []),
        *([("evaluate", f"daskcnn evaluate {command}")] if summary["checkpoint"] else []),
        ("report", f"daskcnn report {command}"),
        ("page", f"daskcnn report {command} --html run.html"),
        ("picture", f"daskcnn plot {command} --out run.svg"),
        *([("both need", to_draw)] if to_draw else []),
        *([("resume", f"python -m daskcnn.run --resume {command}")] if resumable else []),
    ]
    return "\n".join(line.rstrip() for label, value in lines for line in _broken(label, value, width))


def _handed_back(summary: Parts) -> str:
    """The weights that the figures above are of."""
    return f"the best on the validation samples, of epoch {summary['weights_epoch'] or 0:.4g}: the figures are theirs"


def _broken(label: str, value: str, width: int | None) -> list[str]:
    """A line, or several for a long one: broken under its value, or with its value whole on the next line."""
    if width is None or LABEL + len(value) <= width:
        return [f"{label:<{LABEL}}{value}"]
    if label in WHOLE:
        return [label, f"  {value}" if len(value) + 2 <= width else value]
    if label in ("workers", ""):  # a row of a table
        return [*([label] if label else []), f"  {value}"]
    glued = value.replace(" ", GLUE).replace(f",{GLUE}", ", ")  # lines end behind commas: numbers keep their units
    lines = textwrap.wrap(glued, max(width - LABEL, 1), break_long_words=False, break_on_hyphens=False)
    return [f"{'' if i else label:<{LABEL}}{line.replace(GLUE, ' ')}" for i, line in enumerate(lines)]


def _worker_lines(workers: Sequence[Parts]) -> list[str]:
    """A table of the workers, its heading first."""
    cells: list[Sequence[str]] = [("name", "device", "samples", "busy", "wait", "communication")]
    for w in workers:
        seconds = (duration(w[key]) for key in ("busy", "wait", "communication"))
        cells.append((clean(w["name"]), clean(w["device"]), count(w["samples"]), *seconds))
    return aligned(cells, left=2)
