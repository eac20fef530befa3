"""`daskcnn model`."""

from __future__ import annotations

import json
from typing import Any

import click

from daskcnn.cli.command import Command, as_json, tell, verbose
from daskcnn.planning.show_model import show_model
from daskcnn.show.network_text import readable_model


@click.command(cls=Command)
@click.argument("model", metavar="MODEL|JOB.toml")
@click.option(
    "--dataset",
    metavar="NAME|PATH|HxWxC",
    help="A data set, or the size of its images.  [default: what the network was described for]",
)
@click.option("--classes", type=click.IntRange(1), help="Outputs.  [default: those the network was described for]")
@click.option("--batch", type=click.IntRange(1), default=128, show_default=True, help="Samples in a minibatch.")
@click.option("--picture", metavar="FILE", help="Draw the network into this file; its ending says SVG or PNG.")
@as_json
@verbose
def model(
    model: str,
    dataset: str | None,
    classes: int | None,
    batch: int,
    picture: str | None,
    as_json: bool,
    **_: Any,
) -> None:
    """Print the layers of a network, by its name or from a job file: outputs, parameters, operations, memory."""
    found = show_model(model, images=dataset, classes=classes, batch=batch, picture=picture)
    tell(json.dumps(found, indent=2) if as_json else readable_model(found))
