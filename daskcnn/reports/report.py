"""Reports on finished, broken and running runs: what `daskcnn report` and `daskcnn compare` call."""

from __future__ import annotations

import csv
import gc
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from daskcnn.errors import DataError, UserError
from daskcnn.events import Event
from daskcnn.runs.directory import RunDirectory
from daskcnn.runs.evaluation import kept_evaluation
from daskcnn.runs.log import read_events
from daskcnn.show.comparison import Comparison
from daskcnn.show.comparison import compare as compare_reports
from daskcnn.show.drawing import need_matplotlib
from daskcnn.show.history import ROUND_COLUMNS
from daskcnn.show.report_tables import RunReport, tables


def report(run: str) -> RunReport:
    """The figures of the run in a folder, or of an event log. Raises DataError where there is none or it is damaged."""
    found = tables(events(run))
    return replace(found, start=found.start.model_copy(update={"run": run}))  # the folder may have been moved since


def events(run: str) -> list[Event]:
    """The log of the run in a folder, or an event log. Raises DataError where there is none or it is damaged."""
    log = _log(Path(run))
    found = read_events(log)
    if not found:
        raise DataError(log, "no events", "the run was stopped before it began, or its log is damaged; start it anew")
    return found


def compare(runs: Sequence[str], targets: Sequence[float], *, reached: bool = False) -> Comparison:
    """Several runs side by side. Raises DataError as `report`, and UserError for fewer than two.

    reached: leave out targets that no run has reached.
    """
    _check_several(runs)
    return compare_reports([report(run) for run in runs], targets=targets, reached=reached)


def _check_several(runs: Sequence[str]) -> None:
    if len(runs) < 2:
        raise UserError(
            "compare", f"{len(runs)} run, which has nothing beside it", "give two or more, or use daskcnn report"
        )


def reports(runs: Sequence[str]) -> dict[str, RunReport]:
    """The figures of several runs by the names of their folders, or by whole paths where names are not their own."""
    names = [Path(run).name or run for run in runs]
    own = names if len(set(names)) == len(names) else runs
    return {name: report(run) for name, run in zip(own, runs, strict=True)}


def write_page(run: str, path: str, *, full: bool = False) -> Path:
    """Write all that is known of a run to one HTML file. full: no table is shortened.

    Raises UserError without matplotlib, DataError as `report`, and where the file cannot be written.
    """
    need_matplotlib()
    from daskcnn.show.page import report_page

    name, evaluation = Path(run).name or run, kept_evaluation(Path(run))
    with _no_garbage():
        return _write(report_page(report(run), name=name, evaluation=evaluation, full=full), path)


def write_comparison(runs: Sequence[str], targets: Sequence[float], path: str, *, reached: bool = False) -> Path:
    """Write several runs side by side to one HTML file. reached: as for `compare`. Raises as it and `write_page`."""
    need_matplotlib()
    from daskcnn.show.page import comparison_page

    _check_several(runs)
    with _no_garbage():
        found = reports(runs)
        comparison = compare_reports(list(found.values()), targets=targets, reached=reached)
        return _write(comparison_page(comparison, found), path)


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Leave out the garbage collector: events hold no cycles, and to look for some takes a fifth of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _log(path: Path) -> Path:
    if path.is_file():
        return path
    log = path / "events.jsonl"
    if not log.is_file():
        RunDirectory.open(path)  # says what is wrong with the folder
        raise DataError(log, "no such file", "the run was stopped before it began: start it anew")
    return log


def rounds_csv(report: RunReport) -> str:
    """A line for every worker's round, under the names of `ROUND_COLUMNS`."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(ROUND_COLUMNS)
    writer.writerows(row.to_dict().values() for row in report.rounds)
    return text.getvalue()


def write_rounds(report: RunReport, path: str) -> None:
    """Write them to a file. Raises DataError where it cannot be written."""
    _write(rounds_csv(report), path)


def _write(text: str, path: str) -> Path:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(path, error.strerror or error, "give a file that may be written") from error
    return Path(path)
