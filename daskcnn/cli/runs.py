"""Commands on runs that there are: `daskcnn runs`, `logs`, `report`, `compare`, `plot`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from daskcnn.batch.asking import asking, number_of, printed, runs_of
from daskcnn.cli.command import Command, as_json, tell, verbose
from daskcnn.cli.queue_options import queue_options, scheduler_of
from daskcnn.documents import dumps
from daskcnn.reports import report as reporting
from daskcnn.reports.report import list_runs, log_lines
from daskcnn.show.comparison import format_comparison
from daskcnn.show.renderers.run_text import format_report, readable_runs
from daskcnn.show.renderers.terminal import say
from daskcnn.show.run_figures import FIGURES
from daskcnn.show.sweep_table import format_sweep


@click.command(cls=Command)
@click.argument("folder", default="runs")
@as_json
@verbose
def runs(folder: str, as_json: bool, **_: Any) -> None:
    """List the runs in FOLDER (runs, by default) with state, accuracies, duration and workers, the oldest first."""
    found = list_runs(folder)
    tell(dumps([row.to_dict() for row in found], indent=2) if as_json else readable_runs(found, folder))


@click.command(cls=Command)
@click.argument("run")
@click.option("-f", "--follow", is_flag=True, help="Go on printing until the run ends.")
@queue_options
@verbose
def logs(run: str, follow: bool, spool: str | None, verbose: bool, **scheduler: str | None) -> None:
    """Print the log of RUN: epochs, checkpoints, and what is out of the ordinary.

    A number, or with --scheduler or --spool a name, is that of a job of a queue: what its drivers have printed.
    """
    of_queue = run.isdecimal() or spool or scheduler_of(scheduler)
    if not of_queue or Path(run).exists():
        for line in log_lines(run, follow=follow):
            tell(line)
        return
    with asking(spool, scheduler_of(scheduler)) as ask:
        for text in printed(ask, number_of(ask, run), follow=follow):
            tell(text, nl=False)


@click.command(cls=Command)
@click.argument("run")
@click.option("--rounds", is_flag=True, help="Print every round of every worker; shorten no table.")
@click.option(
    "--csv", "csv_file", metavar="FILE", help="Write every round of every worker to FILE instead (-: stdout)."
)
@click.option(
    "--html", metavar="FILE", help="Write tables, figures and a timeline, as a page for any browser, to FILE."
)
@as_json
@verbose
def report(run: str, rounds: bool, csv_file: str | None, html: str | None, as_json: bool, **_: Any) -> None:
    """Print the tables of RUN: workers, balance, waiting, traffic, accuracy. RUN may still be going on."""
    forms = [name for name, given in (("--json", as_json), ("--csv", csv_file), ("--html", html)) if given]
    if len(forms) > 1:
        raise click.UsageError(f"{' and '.join(forms)}: each is a form of its own; give one of them")
    if html:
        tell(f"page {reporting.write_page(run, html, full=rounds)}")
        return
    found = reporting.report(run)
    if csv_file == "-":
        tell(reporting.rounds_csv(found), nl=False)
    elif csv_file:
        reporting.write_rounds(found, csv_file)
    else:
        tell(dumps(found.to_dict(), indent=2) if as_json else format_report(found, full=rounds))


def _accuracies(ctx: click.Context, parameter: click.Parameter, text: str) -> tuple[float, ...]:
    try:
        targets = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        targets = (0.0,)
    if not all(0 < target <= 1 for target in targets):
        raise click.BadParameter(f"{text!r}: write accuracies above 0 and up to 1, such as 0.5,0.6", ctx, parameter)
    return targets


@click.command(cls=Command)
@click.argument("runs", nargs=-1, required=True)
@click.option(
    "--targets",
    metavar="A,B,…",
    default="0.5,0.6,0.7",
    show_default=True,
    callback=_accuracies,
    help="Print time, epochs and rounds until each of these validation accuracies.",
)
@click.option("--html", metavar="FILE", help="Write figures and timelines too, as a page for any browser, to FILE.")
@click.option("--picture", metavar="FILE", help="Draw the accuracies of a sweep by epoch; the ending says SVG or PNG.")
@queue_options
@as_json
@verbose
def compare(
    runs: tuple[str, ...],
    targets: tuple[float, ...],
    html: str | None,
    picture: str | None,
    spool: str | None,
    as_json: bool,
    verbose: bool,
    **scheduler: str | None,
) -> None:
    """Print RUNS side by side: the keys in which their jobs differ, and figures, the best of each line marked.

    A single one that is a folder of runs, or what the names of several begin with, is a sweep. It is printed by cell:
    runs that differ in their seeds alone, with mean and standard deviation. With --scheduler or --spool each is a job,
    by number or name, or a sweep of that queue.
    """
    if html and as_json:
        raise click.UsageError("--json and --html: each is a form of its own; give one of them")
    names, is_sweep = _to_compare(runs, spool, scheduler_of(scheduler))
    if picture and not is_sweep:
        raise click.UsageError("--picture: is of a sweep; `daskcnn plot` draws runs")
    source = click.get_current_context().get_parameter_source("targets")
    reached = source is ParameterSource.DEFAULT  # nobody has asked for them
    found = reporting.reports(names, say if is_sweep else None)
    if html:
        tell(f"page {reporting.write_comparison(found, targets, html, reached=reached)}")
    elif is_sweep:
        table = reporting.compare_cells(found)
        tell(dumps(table.to_dict(), indent=2) if as_json else format_sweep(table))
    else:
        result = reporting.compare(found, targets, reached=reached)
        tell(dumps(result.to_dict(), indent=2) if as_json else format_comparison(result))
    if picture:
        from daskcnn.reports.plot import draw_sweep  # it brings the simulator, and Dask with it

        say(f"picture {draw_sweep(found, picture)}")


def _to_compare(names: Sequence[str], spool: str | None, scheduler: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Return the runs that are named, and True if they are a sweep's."""
    if spool or scheduler:
        with asking(spool, scheduler) as ask:
            return runs_of(ask, names)
    sweep = reporting.sweep_runs(names[0]) if len(names) == 1 else []
    return sweep or [*names], bool(sweep)


@click.command(cls=Command)
@click.argument("runs", nargs=-1, required=True)
@click.option(
    "--out", metavar="FILE", default="runs.svg", show_default=True, help="File to write; its ending says SVG or PNG."
)
@click.option(
    "--figure",
    "names",
    multiple=True,
    type=click.Choice(FIGURES),
    help="Draw this figure; give it again for several. Default: accuracy, loss, samples, time, and breakdown.",
)
@verbose
def plot(runs: tuple[str, ...], out: str, names: tuple[str, ...], **_: Any) -> None:
    """Draw RUNS: accuracy, loss, samples and time of each worker, and what a step of sharded layers is made of."""
    from daskcnn.reports.plot import draw_runs  # it brings the simulator, and Dask with it

    tell(f"picture {draw_runs(runs, out, names)}")
