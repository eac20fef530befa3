"""The runs of a folder, and the log of one: what `daskcnn runs` and `daskcnn logs` call."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from daskcnn.errors import DataError
from daskcnn.events import EpochEnded, Event, RunStarted
from daskcnn.runs.directory import RunDirectory, is_written
from daskcnn.runs.log import followed
from daskcnn.runs.summary import checked_summary
from daskcnn.show.lines import stamped
from daskcnn.show.runs_text import RunRow

_pause = time.sleep
LOOK = 0.5
"""Seconds between two looks at a log that is followed."""


def list_runs(folder: str) -> list[RunRow]:
    """The runs that lie in the folder, the oldest first. Raises DataError where there is no folder."""
    root = Path(folder)
    if not root.is_dir():
        raise DataError(root, "no such folder", "give the folder that holds the runs (run.dir, `runs` by default)")
    return [_row(file.parent) for file in sorted(root.glob("*/job.json"), key=lambda file: file.stat().st_mtime_ns)]


def _row(run: Path) -> RunRow:
    """What is known of a run. One that cannot be read is shown as such: it must not hide the others."""
    try:
        found = RunDirectory.open(run)
        if is_written(run):
            return _by_log(run, "running", found.events(), until=time.time())
        if (summary := found.summary()) is None:
            return _by_log(run, "broken off", found.events())
        checked = checked_summary(summary, run / "summary.json")
    except DataError:
        return RunRow(str(run), "damaged")
    judged = checked["test"] or checked["validation"] or {}
    return RunRow(
        str(run), checked["status"], checked["strategy"], checked["epochs"], judged.get("accuracy"), checked["seconds"]
    )


def _by_log(run: Path, state: str, events: list[Event], until: float | None = None) -> RunRow:
    """A run without a summary. Its seconds are those since it was last started. until: now, where it goes on."""
    started = [event for event in events if isinstance(event, RunStarted)]
    epochs = [event for event in events if isinstance(event, EpochEnded)]
    judged = [event.validation.accuracy for event in epochs if event.validation]
    ends = until if until is not None else max((event.at or 0.0 for event in events), default=0.0)
    begun = started[-1].at if started else None
    return RunRow(
        str(run),
        state,
        started[-1].strategy if started else "",
        epochs[-1].epoch if epochs else 0.0,
        judged[-1] if judged else None,
        ends - begun if begun is not None else None,
    )


def log_lines(run: str, *, follow: bool) -> Iterator[str]:
    """The log of a run as lines for people. follow: go on as long as a driver writes it.

    Raises DataError where there is no log, or where it is damaged.
    """
    path = Path(run)
    if not path.is_file():
        RunDirectory.open(path)  # says what is wrong with the folder

    def more() -> bool:
        if not follow or path.is_file() or not is_written(path):
            return False
        _pause(LOOK)
        return True

    for event in followed(path if path.is_file() else path / "events.jsonl", more):
        yield from stamped(event, datetime.fromtimestamp(event.at or 0.0))
