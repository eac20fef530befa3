"""`daskcnn plan`."""

from __future__ import annotations

import re
from typing import Any

import click

from daskcnn.cli.command import Command, as_json, tell, verbose
from daskcnn.cli.scenario import scenario_options
from daskcnn.planning import plan as planning
from daskcnn.planning.simulate import scenario
from daskcnn.runs.files import dumps
from daskcnn.show.worker_plan import format_worker_plan


def _additions(ctx: click.Context, parameter: click.Parameter, text: str) -> dict[str, int]:
    if not re.fullmatch(r"(\w+=\d+)(,\w+=\d+)*", text):
        raise click.BadParameter(f"{text!r}: write kinds and how many, such as gpu=1,cpu=4", ctx, parameter)
    return {kind: int(number) for kind, _, number in (part.partition("=") for part in text.split(","))}


@click.command(cls=Command)
@click.argument("job", metavar="JOB.toml|RUN")
@scenario_options
@click.option("--add", required=True, metavar="gpu=N,cpu=N", callback=_additions, help="Workers to add, one at a time.")
@as_json
@verbose
def plan(
    job: str, cluster: str | None, settings: tuple[str, ...], seed: int, add: dict[str, int], as_json: bool, **_: Any
) -> None:
    """Print what more workers would bring JOB: time per epoch, traffic, balance, and when another stops paying."""
    found = planning.plan(scenario(job, cluster, settings), add, seed=seed)
    tell(dumps(found.to_dict(), indent=2) if as_json else format_worker_plan(found))
