"""`daskcnn predict`."""

from __future__ import annotations

import json
from typing import Any

import click

from daskcnn.cli.command import Command, as_json, tell, verbose
from daskcnn.launch import predict as predicting
from daskcnn.launch.trained_run import Which
from daskcnn.show.stderr import say
from daskcnn.show.trained_text import readable_predictions


@click.command(cls=Command)
@click.argument("run")
@click.argument("images", nargs=-1, required=True)
@click.option("--checkpoint", type=click.Choice(["last", "best"]), default="last", show_default=True)
@click.option("--top", type=click.IntRange(1), default=3, show_default=True, help="Number of classes to print.")
@as_json
@verbose
def predict(run: str, images: tuple[str, ...], checkpoint: Which, top: int, as_json: bool, **_: Any) -> None:
    """Print the likeliest classes of IMAGES by RUN's network."""
    result = predicting.predict(run, images, which=checkpoint, top=top, say=say)
    tell(json.dumps(result, indent=2) if as_json else readable_predictions(result))
