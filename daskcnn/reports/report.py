"""Reports on finished, broken and running runs, the runs of a folder, and the log of one, for the command line."""

from __future__ import annotations

import csv
import gc
import io
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from glob import escape
from pathlib import Path
from typing import Any

from daskcnn.errors import DataError, UserError
from daskcnn.events import Event, RunStarted
from daskcnn.job.method import method_of
from daskcnn.runs.directory import RunDirectory, begun, is_written
from daskcnn.runs.log import followed, read_events
from daskcnn.runs.summary import checked_summary, kept_evaluation
from daskcnn.show.comparison import Comparison
from daskcnn.show.comparison import compare as compare_reports
from daskcnn.show.history import ROUND_COLUMNS, History
from daskcnn.show.lines import stamped
from daskcnn.show.renderers.drawing import need_matplotlib
from daskcnn.show.renderers.run_text import RunRow
from daskcnn.show.report_sections import status_of
from daskcnn.show.report_tables import RunReport, tables
from daskcnn.show.sweep_table import SweepTable, sweep_table

_pause = time.sleep
LOOK = 0.5  # seconds between two reads of a log that is followed


def list_runs(folder: str) -> list[RunRow]:
    """Return the runs of the folder, the oldest first. Raises DataError if there is no folder."""
    root = Path(folder)
    if not root.is_dir():
        remedy = "no job has run here yet, or give the folder of its runs (run.dir, `runs` by default)"
        raise DataError(root, "no such folder", remedy)
    return [_row(file.parent) for file in sorted(root.glob("*/job.json"), key=lambda file: file.stat().st_mtime_ns)]


def _row(run: Path) -> RunRow:
    """The row of a run. One that cannot be read is shown as damaged: it must not hide the others."""
    try:
        found = RunDirectory.open(run)
        if is_written(run):
            if begun(run, logged := found.events()):
                return _by_log(run, "running", logged, until=time.time())
            return replace(_by_log(run, "", logged), state="waiting")  # how it ended before is of an earlier life
        if (summary := found.summary()) is None:
            return _by_log(run, "broken off", found.events())
        checked = checked_summary(summary, run / "summary.json")
        test, validation = ((checked[part] or {}).get("accuracy") for part in ("test", "validation"))
        if validation is None and checked["status"] != "done":  # it ended between two evaluations: that of the last
            validation = _by_log(run, checked["status"], found.events()).validation
    except DataError:
        return RunRow(str(run), "damaged")
    status, strategy, epochs = checked["status"], checked["strategy"], checked["epochs"]
    return RunRow(str(run), status, strategy, epochs, test, validation, checked["seconds"])


def _by_log(run: Path, state: str, events: list[Event], until: float | None = None) -> RunRow:
    """The row of a run without a summary, as a simulation is. until: now, if it goes on."""
    course = History()
    for event in events:
        course.take(event)
    validation = course.looks[-1].validation_accuracy if course.looks else None
    seconds = course.attendance.seconds_at(until) if events else None
    workers = tuple(sorted(course.attendance.present)) if until is not None else ()
    state = status_of(course.start, course.end.status if course.end is not None else state)
    return RunRow(str(run), state, course.start.strategy, course.epoch, None, validation, seconds, workers)


def log_lines(run: str, *, follow: bool) -> Iterator[str]:
    """Yield the log of a run as lines for people. follow: as long as a driver writes it. Raises DataError."""
    path = Path(run)
    if not path.is_file():
        RunDirectory.open(path)  # says what is wrong with the folder

    def more() -> bool:
        if not follow or path.is_file() or not is_written(path):
            return False
        _pause(LOOK)
        return True

    simulated = False
    for event in followed(path if path.is_file() else path / "events.jsonl", more):
        simulated = event.simulated if isinstance(event, RunStarted) else simulated
        at = event.at or 0.0
        yield from stamped(event, at if simulated else datetime.fromtimestamp(at))


def report(run: str) -> RunReport:
    """Return the figures of the run in a folder, or of an event log. Raises DataError if it is missing or damaged."""
    found = tables(events(run))
    return replace(found, start=found.start.model_copy(update={"run": run}))  # the folder may have been moved since


def events(run: str) -> list[Event]:
    """Return the log of the run in a folder, or an event log. Raises DataError if it is missing or damaged."""
    log = path if (path := Path(run)).is_file() else path / "events.jsonl"
    if not log.is_file():
        RunDirectory.open(path)  # says what is wrong with the folder
        raise DataError(log, "no such file", "the run was stopped before it began: start it anew")
    found = read_events(log)
    if not found:
        raise DataError(log, "no events", "the run was stopped before it began, or its log is damaged; start it anew")
    return found


def reports(runs: Sequence[str], warn: Callable[[str], None] | None = None) -> list[RunReport]:
    """Return the figures of runs. warn: is told which ones are left out as they cannot be read, if any can.

    Raises DataError.
    """
    found, problem = list[RunReport](), None
    for run in runs:
        try:
            with _no_garbage():
                found.append(report(run))
        except DataError as error:
            if warn is None:
                raise
            problem = error
            warn(f"warning: left out: {error}")
    if problem is not None and not found:
        raise problem
    return found


def compare(found: Sequence[RunReport], targets: Sequence[float], *, reached: bool = False) -> Comparison:
    """Return several runs side by side. reached: leave out targets that no run reached. Raises UserError."""
    _check_several(found)
    return compared(found, targets, reached=reached)[0]


def sweep_runs(place: str) -> list[str]:
    """Return the runs of a sweep: all in a folder of runs, or those beside each other whose names begin with its name.

    There are none where the place is a run.
    """
    path = Path(place)
    if path.is_dir():
        found = [] if (path / "job.json").exists() else path.glob("*/job.json")
    else:
        found = path.parent.glob(f"{escape(path.name)}-*/job.json")
    return sorted(str(file.parent) for file in found)


def compare_cells(found: Sequence[RunReport]) -> SweepTable:
    """Return the cells of a sweep's runs."""
    return sweep_table(found, [_method(each) for each in found])


def compared(
    found: Sequence[RunReport], targets: Sequence[float] = (), *, reached: bool = False
) -> tuple[Comparison, dict[str, RunReport]]:
    """Return the runs side by side, and the figures of each by a name that tells it apart in a picture."""
    comparison = compare_reports(found, methods=[_method(each) for each in found], targets=targets, reached=reached)
    by_name = dict[str, RunReport]()
    for i, (name, own) in enumerate(zip(comparison.labels(), found, strict=True), 1):
        by_name[f"{name} ({i})" if name in by_name else name] = own  # a run may be given twice
    return comparison, by_name


def _check_several(found: Sequence[RunReport]) -> None:
    if len(found) < 2:
        reason = f"{len(found)} run, which has nothing beside it"
        raise UserError("compare", reason, "give two or more, or use daskcnn report")


def _method(found: RunReport) -> dict[str, Any]:
    """The keys of the run's job that describe its method; none of a log alone, or where the job cannot be read."""
    try:
        return method_of(RunDirectory.open(found.start.run).job())
    except DataError:
        return {}


def write_page(run: str, path: str, *, full: bool = False) -> Path:
    """Write a run's report to one HTML file, full or shortened. Raises UserError without matplotlib, DataError."""
    need_matplotlib()
    from daskcnn.show.renderers.page import report_page

    name, evaluation = Path(run).name or run, kept_evaluation(Path(run))
    with _no_garbage():
        return _write(report_page(report(run), name=name, evaluation=evaluation, full=full), path)


def write_comparison(found: Sequence[RunReport], targets: Sequence[float], path: str, *, reached: bool = False) -> Path:
    """Write several runs side by side to one HTML file. reached: as for `compare`. Raises as it and `write_page`."""
    need_matplotlib()
    from daskcnn.show.renderers.page import comparison_page

    _check_several(found)
    with _no_garbage():
        return _write(comparison_page(*compared(found, targets, reached=reached)), path)


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Stop the garbage collector meanwhile: events hold no cycles, and the search takes a fifth of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def rounds_csv(report: RunReport) -> str:
    """Return a line for every worker's round, under the names of `ROUND_COLUMNS`."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(ROUND_COLUMNS)
    writer.writerows(row.to_dict().values() for row in report.rounds)
    return text.getvalue()


def write_rounds(report: RunReport, path: str) -> None:
    """Write every worker's round to a file. Raises DataError if it cannot be written."""
    _write(rounds_csv(report), path)


def _write(text: str, path: str) -> Path:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(path, error.strerror or error, "give a file that may be written") from error
    return Path(path)
