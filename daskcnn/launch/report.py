"""Reports on finished, broken and running runs: what `daskcnn report` and `daskcnn compare` call."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import astuple, fields, replace
from pathlib import Path
from typing import Any

from daskcnn.errors import DataError, UserError
from daskcnn.runs.directory import RunDirectory
from daskcnn.runs.log import read_events
from daskcnn.show.comparison import Comparison
from daskcnn.show.comparison import compare as compare_reports
from daskcnn.show.history import RoundRow
from daskcnn.show.report_tables import RunReport, tables


def report(run: str) -> RunReport:
    """The figures of the run in a folder, or of an event log. Raises DataError where there is none or it is damaged."""
    log = events(run)
    try:
        found = tables(log)
    except DataError as error:
        raise DataError(f"{_log(Path(run))}: {error}") from error
    return replace(found, start=found.start.model_copy(update={"run": run}))  # the folder may have been moved since


def events(run: str) -> list[dict[str, Any]]:
    """The log of the run in a folder, or an event log. Raises DataError where there is none or it is damaged."""
    log = _log(Path(run))
    found = read_events(log)
    if not found:
        raise DataError(f"{log}: no events; the run was stopped before it began, or its log is damaged; start it anew")
    return found


def compare(runs: Sequence[str], targets: Sequence[float]) -> Comparison:
    """Several runs side by side. Raises DataError as `report`, and UserError for fewer than two."""
    if len(runs) < 2:
        raise UserError(
            f"compare: {len(runs)} run, which has nothing beside it; give two or more, or use daskcnn report"
        )
    return compare_reports([report(run) for run in runs], targets=targets)


def _log(path: Path) -> Path:
    if path.is_file():
        return path
    log = path / "events.jsonl"
    if not log.is_file():
        RunDirectory.open(path)  # says what is wrong with the folder
        raise DataError(f"{log}: no such file; the run was stopped before it began: start it anew")
    return log


def rounds_csv(report: RunReport) -> str:
    """A line for every worker's round, under the names of `RoundRow`."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(field.name for field in fields(RoundRow))
    writer.writerows(map(astuple, report.rounds))
    return text.getvalue()


def write_rounds(report: RunReport, path: str) -> None:
    """Write them to a file. Raises DataError where it cannot be written."""
    try:
        Path(path).write_text(rounds_csv(report), encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}; give a file that may be written") from error
