"""The summary of a run, for people."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from daskcnn.show.text import aligned, clean, count, duration, judged, plural, size, time_shares

Parts = Mapping[str, Any]


LABEL = 12
"""Columns of the labels."""
GLUE = "\N{NO-BREAK SPACE}"
WHOLE = ("kept in", "checkpoint", "evaluate", "report", "page", "picture", "both need", "resume")
"""Labels of paths and commands, which are copied as they stand."""
SPENT = ("busy", "evaluation", "wait", "communication")
"""What a worker's seconds go to."""


def format_summary(summary: Parts, width: int | None = None, *, to_draw: str = "") -> str:
    """The summary in aligned lines for people: results, workers, where the run is kept and what to do with it.

    Lines longer than `width` columns are broken behind commas; paths and commands are left whole. None: none is.
    to_draw: the command that installs what pictures need, where it is missing.
    """
    rate = f", {count(summary['images_per_second'])} images/s"
    epochs, traffic = plural(f"{summary['epochs']:.4g}", "epoch"), summary["bytes"]
    run, command = clean(summary["run"]), shlex.quote(str(summary["run"]))
    lines = [
        ("status", clean(summary["status"]) + (f": {clean(reason)}" if (reason := summary.get("reason")) else "")),
        ("training", f"{summary['strategy']}, {epochs} in {duration(summary['seconds'])}{rate}"),
        *((part, _result(summary[part])) for part in ("test", "validation") if summary[part]),
        *([("time", time)] if (time := _time(summary)) else []),
        ("traffic", f"{size(traffic['up'])} up, {size(traffic['down'])} down"),
        *zip(["workers"] + [""] * len(summary["workers"]), _worker_lines(summary["workers"]), strict=True),
        ("kept in", run),
        *([("checkpoint", clean(summary["checkpoint"]))] if summary["checkpoint"] else []),
        *([("evaluate", f"daskcnn evaluate {command}")] if summary["checkpoint"] else []),
        ("report", f"daskcnn report {command}"),
        ("page", f"daskcnn report {command} --html run.html"),
        ("picture", f"daskcnn plot {command} --out run.svg"),
        *([("both need", to_draw)] if to_draw else []),
        *([("resume", f"python -m daskcnn.run --resume {command}")] if _resumable(summary) else []),
    ]
    return "\n".join(line.rstrip() for label, value in lines for line in _broken(label, value, width))


def _broken(label: str, value: str, width: int | None) -> list[str]:
    """A line, or several where it is too long: continued under its value, or whole on a line of its own."""
    if width is None or LABEL + len(value) <= width:
        return [f"{label:<{LABEL}}{value}"]
    if label in WHOLE:
        own = f"  {value}"
        return [label, own] if len(own) <= width else [label, value]
    if label in ("workers", ""):  # a row of a table
        return [*([label] if label else []), f"  {value}"]
    indent, room = " " * LABEL, max(width - LABEL, 1)
    first, *more = textwrap.wrap(_glued(value), room, break_long_words=False, break_on_hyphens=False)
    return [line.replace(GLUE, " ") for line in (f"{label:<{LABEL}}{first}", *(f"{indent}{line}" for line in more))]


def _glued(value: str) -> str:
    """The text with spaces that are no place for a line to end, but behind commas: numbers stay with their units."""
    return value.replace(" ", GLUE).replace(f",{GLUE}", ", ")


def _time(summary: Parts) -> str:
    workers = summary["workers"]
    spent = {kind: sum(w.get(kind, 0.0) for w in workers) for kind in SPENT}
    return time_shares((summary["seconds"] or 0.0) * len(workers), **spent)


def _resumable(summary: Parts) -> bool:
    return summary["checkpoint"] is not None and summary["status"] not in ("done", "diverged")


def _result(result: Parts) -> str:
    return judged(result["accuracy"], result["loss"], result.get("auc"))


def _worker_lines(workers: Sequence[Parts]) -> list[str]:
    """A table of the workers, its heading first."""
    cells: list[Sequence[str]] = [("name", "device", "samples", "busy", "wait", "communication")]
    for w in workers:
        seconds = (duration(w[key]) for key in ("busy", "wait", "communication"))
        cells.append((clean(w["name"]), clean(w["device"]), count(w["samples"]), *seconds))
    return aligned(cells, left=2)
