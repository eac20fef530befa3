"""`daskcnn report`."""

from __future__ import annotations

from typing import Any

import click

from daskcnn.cli.command import Command, as_json, tell, verbose
from daskcnn.reports import report as reporting
from daskcnn.runs.files import dumps
from daskcnn.show.report_text import format_report


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
