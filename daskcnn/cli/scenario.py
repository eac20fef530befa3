"""Options that say what is simulated, and on which cluster."""

from __future__ import annotations

from typing import Any

import click

from daskcnn.cli.command import settings


def scenario_options(function: Any) -> Any:
    """The options that say what is simulated."""
    for option in (
        click.option(
            "--cluster",
            metavar="FILE|RUN",
            help="A cluster file, or a run; a run gives the cluster that it measured.  [default: the run's own]",
        ),
        settings,
        click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of varying speeds."),
    )[::-1]:
        function = option(function)
    return function
