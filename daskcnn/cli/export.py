"""`daskcnn export`."""

from __future__ import annotations

from typing import Any

import click

from daskcnn.cli.command import Command, checkpoint_option, tell, verbose
from daskcnn.export import FORMATS
from daskcnn.show.stderr import say
from daskcnn.trained import export as exporting
from daskcnn.trained.trained_run import Which


@click.command(cls=Command)
@click.argument("run")
@click.option("--to", type=click.Choice(list(FORMATS)), required=True, help="Format of the file.")
@click.option("--out", metavar="FILE", help="File to write.  [default: model.onnx, .py or .safetensors in RUN]")
@checkpoint_option
@verbose
def export(run: str, to: str, out: str | None, checkpoint: Which, **_: Any) -> None:
    """Write RUN's network for other programs.

    RUN is a run directory, one of its checkpoints, or a model that was exported to safetensors.
    """
    for file in exporting.export(run, to, out=out, which=checkpoint, say=say):
        tell(file)
