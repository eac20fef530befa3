"""`daskcnn compare`."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

from daskcnn.cli.command import Command, as_json, tell, verbose
from daskcnn.reports import report as reporting
from daskcnn.runs.files import dumps
from daskcnn.show.comparison import format_comparison


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
@as_json
@verbose
def compare(runs: tuple[str, ...], targets: tuple[float, ...], html: str | None, as_json: bool, **_: Any) -> None:
    """Print RUNS side by side; the best value of each line is marked."""
    if html and as_json:
        raise click.UsageError("--json and --html: each is a form of its own; give one of them")
    source = click.get_current_context().get_parameter_source("targets")
    reached = source is ParameterSource.DEFAULT  # nobody has asked for them
    if html:
        tell(f"page {reporting.write_comparison(runs, targets, html, reached=reached)}")
        return
    result = reporting.compare(runs, targets, reached=reached)
    tell(dumps(result.to_dict(), indent=2) if as_json else format_comparison(result))
