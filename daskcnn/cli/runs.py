"""`daskcnn runs`."""

from __future__ import annotations

from typing import Any

import click

from daskcnn.cli.command import Command, as_json, tell, verbose
from daskcnn.reports.list_runs import list_runs
from daskcnn.runs.files import dumps
from daskcnn.show.runs_text import readable_runs


@click.command(cls=Command)
@click.argument("folder", default="runs")
@as_json
@verbose
def runs(folder: str, as_json: bool, **_: Any) -> None:
    """List the runs in FOLDER (runs, by default) with state, accuracy and duration, the oldest first."""
    found = list_runs(folder)
    tell(dumps([row.to_dict() for row in found], indent=2) if as_json else readable_runs(found, folder))
