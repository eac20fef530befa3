"""`daskcnn logs`."""

from __future__ import annotations

from typing import Any

import click

from daskcnn.cli.command import Command, tell, verbose
from daskcnn.reports.list_runs import log_lines


@click.command(cls=Command)
@click.argument("run")
@click.option("-f", "--follow", is_flag=True, help="Go on printing until the run ends.")
@verbose
def logs(run: str, follow: bool, **_: Any) -> None:
    """Print the log of RUN: epochs, checkpoints, and what is out of the ordinary."""
    for line in log_lines(run, follow=follow):
        tell(line)
