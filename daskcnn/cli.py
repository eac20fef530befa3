"""The command line: `daskcnn …`, and the same as `dask cnn …`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from daskcnn import __version__
from daskcnn.launch import say, tools
from daskcnn.launch.doctor import examine, readable_findings
from daskcnn.run import Command
from daskcnn.run import main as run_command

verbose = click.option("--verbose", is_flag=True, help="Show tracebacks.")
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group("cnn", context_settings={"help_option_names": ["-h", "--help"]})  # the name Dask shows it by
@click.version_option(__version__, prog_name="daskcnn")
def main() -> None:
    """Distributed training of convolutional networks on clusters of unequal machines."""


main.add_command(run_command, "run")


@main.group()
def data() -> None:
    """Prepare and check data sets."""


@data.command(cls=Command)
@click.argument("name")
@click.option("--archive", metavar="FILE", help="The data set's own archive or folder. None: download it.")
@click.option("--out", metavar="PATH", help="Where to write the zarr store.  [default: data/NAME.zarr]")
@click.option("--order", type=click.Choice(["shuffled", "stored"]), default="shuffled", show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Seed of the shuffle.")
@verbose
def prepare(name: str, archive: str | None, out: str | None, order: str, seed: int, **_: Any) -> None:
    """Write data set NAME (cifar10, mnist, synthetic) as chunks that workers can read."""
    click.echo(tools.prepare(name, archive=archive, out=out, order=order, seed=seed, say=say))


@data.command(cls=Command)
@click.argument("path")
@verbose
def verify(path: str, **_: Any) -> None:
    """Read every chunk of a prepared data set and check it."""
    click.echo(tools.verify(path))


@main.command(cls=Command)
@click.argument("run")
@click.option("--checkpoint", type=click.Choice(["last", "best"]), default="last", show_default=True)
@click.option("--data", "path", metavar="PATH", help="Another data set of the same shape and classes.")
@as_json
@verbose
def evaluate(run: str, checkpoint: tools.Which, path: str | None, as_json: bool, **_: Any) -> None:
    """Measure a trained network of RUN on its test samples."""
    result = tools.evaluate(run, which=checkpoint, path=path, say=say)
    click.echo(json.dumps(result, indent=2) if as_json else tools.readable_evaluation(result))


@main.command(cls=Command)
@click.argument("run")
@click.argument("images", nargs=-1, required=True)
@click.option("--checkpoint", type=click.Choice(["last", "best"]), default="last", show_default=True)
@click.option("--top", type=click.IntRange(1), default=3, show_default=True, help="Classes to name.")
@as_json
@verbose
def predict(run: str, images: tuple[str, ...], checkpoint: tools.Which, top: int, as_json: bool, **_: Any) -> None:
    """Say what the network of RUN sees in IMAGES."""
    result = tools.predict(run, images, which=checkpoint, top=top, say=say)
    click.echo(json.dumps(result, indent=2) if as_json else tools.readable_predictions(result))


@main.command(cls=Command)
@click.option("--scheduler", metavar="ADDRESS", help="Look at this cluster too.")
@click.option("--scheduler-file", metavar="FILE", help="The file the scheduler wrote its address to.")
@click.option(
    "--wait", type=click.FloatRange(0), default=10.0, show_default=True, help="Seconds to wait for the scheduler."
)
@as_json
@verbose
@click.pass_context
def doctor(
    ctx: click.Context, /, scheduler: str | None, scheduler_file: str | None, wait: float, as_json: bool, **_: Any
) -> None:
    """Check this machine, and a cluster, for what a job needs; every finding comes with its remedy."""
    findings = examine(scheduler, scheduler_file, wait)
    click.echo(json.dumps([asdict(f) for f in findings], indent=2) if as_json else readable_findings(findings))
    ctx.exit(0 if all(f.ok for f in findings) else 3)
