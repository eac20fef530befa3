"""The command line: `daskcnn …`, and the same as `dask cnn …`. A file a command."""

from __future__ import annotations

import click

from daskcnn import __version__
from daskcnn.cli.compare import compare
from daskcnn.cli.data import data
from daskcnn.cli.doctor import doctor
from daskcnn.cli.evaluate import evaluate
from daskcnn.cli.export import export
from daskcnn.cli.model import model, models
from daskcnn.cli.plan import plan
from daskcnn.cli.plan_conv import plan_conv
from daskcnn.cli.plot import plot
from daskcnn.cli.predict import predict
from daskcnn.cli.report import report
from daskcnn.cli.run import run
from daskcnn.cli.simulate import simulate


@click.group("cnn", context_settings={"help_option_names": ["-h", "--help"]})  # the name Dask shows it by
@click.version_option(__version__, prog_name="daskcnn")
def main() -> None:
    """Distributed training of convolutional networks on clusters of unequal machines."""


COMMANDS = (
    run,
    data,
    model,
    models,
    evaluate,
    predict,
    export,
    plan_conv,
    report,
    plot,
    compare,
    simulate,
    plan,
    doctor,
)
for command in COMMANDS:
    main.add_command(command)
