"""The summary of a run, for people."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from daskcnn.show.text import aligned, clean, count, duration, judged, plural, size

Parts = Mapping[str, Any]


def format_summary(summary: Parts) -> str:
    """The summary in aligned lines for people: results, workers, where the run is kept and what to do with it."""
    rate = f", {count(summary['images_per_second'])} images/s"
    epochs, traffic = plural(f"{summary['epochs']:.4g}", "epoch"), summary["bytes"]
    run, command = clean(summary["run"]), shlex.quote(str(summary["run"]))
    lines = [
        ("status", clean(summary["status"])),
        ("training", f"{summary['strategy']}, {epochs} in {duration(summary['seconds'])}{rate}"),
        *((part, _result(summary[part])) for part in ("test", "validation") if summary[part]),
        ("traffic", f"{size(traffic['up'])} up, {size(traffic['down'])} down"),
        *zip(["workers"] + [""] * len(summary["workers"]), _worker_lines(summary["workers"]), strict=True),
        ("kept in", run),
        *([("checkpoint", clean(summary["checkpoint"]))] if summary["checkpoint"] else []),
        *([("evaluate", f"daskcnn evaluate {command}")] if summary["checkpoint"] else []),
        ("report", f"daskcnn report {command}"),
        *([("resume", f"python -m daskcnn.run --resume {command}")] if _resumable(summary) else []),
    ]
    return "\n".join(f"{label:<12}{value}".rstrip() for label, value in lines)


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
