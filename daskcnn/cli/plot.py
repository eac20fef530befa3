"""`daskcnn plot`."""

from __future__ import annotations

from typing import Any

import click

from daskcnn.cli.command import Command, tell, verbose
from daskcnn.reports.plot import draw_runs
from daskcnn.show.run_figures import FIGURES


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
    tell(f"picture {draw_runs(runs, out, names)}")
