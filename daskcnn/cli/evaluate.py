"""`daskcnn evaluate`."""

from __future__ import annotations

import json
from typing import Any

import click

from daskcnn.cli.command import Command, as_json, tell, verbose
from daskcnn.launch import evaluate as evaluating
from daskcnn.launch.trained_run import Which
from daskcnn.show.stderr import say
from daskcnn.show.trained_text import readable_evaluation


@click.command(cls=Command)
@click.argument("run")
@click.option("--checkpoint", type=click.Choice(["last", "best"]), default="last", show_default=True)
@click.option("--data", "path", metavar="PATH", help="Another data set of the same shape and classes.")
@as_json
@verbose
def evaluate(run: str, checkpoint: Which, path: str | None, as_json: bool, **_: Any) -> None:
    """Print accuracy, loss and AUC of RUN's network on the test samples."""
    result = evaluating.evaluate(run, which=checkpoint, path=path, say=say)
    tell(json.dumps(result, indent=2) if as_json else readable_evaluation(result))
