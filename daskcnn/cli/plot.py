"""`daskcnn plot`."""

from __future__ import annotations

from typing import Any

import click

from daskcnn.cli.command import Command, tell, verbose
from daskcnn.launch.plot import draw_breakdown


@click.command(cls=Command)
@click.argument("runs", nargs=-1, required=True)
@click.option(
    "--out",
    metavar="FILE",
    default="breakdown.svg",
    show_default=True,
    help="File to write; its ending says SVG or PNG.",
)
@verbose
def plot(runs: tuple[str, ...], out: str, **_: Any) -> None:
    """Draw what a step of layer-sharded RUNS is made of: communication, convolutions, the rest."""
    tell(f"figure {draw_breakdown(runs, out)}")
