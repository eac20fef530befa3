"""The command line: `daskcnn …`, and the same as `dask cnn …`. A file a command."""

from __future__ import annotations

import click

from daskcnn import __version__
from daskcnn.cli.command import CommandGroup
from daskcnn.cli.compare import compare
from daskcnn.cli.data import data
from daskcnn.cli.doctor import doctor
from daskcnn.cli.evaluate import evaluate
from daskcnn.cli.export import export
from daskcnn.cli.logs import logs
from daskcnn.cli.plan import plan
from daskcnn.cli.plan_conv import plan_conv
from daskcnn.cli.plot import plot
from daskcnn.cli.predict import predict
from daskcnn.cli.report import report
from daskcnn.cli.run import run
from daskcnn.cli.runs import runs
from daskcnn.cli.simulate import simulate

MEANT = {"train": "run", "fit": "run", "test": "evaluate", "prepare": "data", "ls": "runs"}
"""Commands by words that other programs have for them."""


# the name is the one that Dask shows it by
@click.group("cnn", cls=CommandGroup, meant=MEANT, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="daskcnn")
def main() -> None:
    """Distributed training of convolutional networks on clusters of unequal machines."""


for command in (run, runs, logs, data, evaluate, predict, export):
    main.add_command(command)
for command in (plan_conv, report, plot, compare, simulate, plan, doctor):
    main.add_command(command)
