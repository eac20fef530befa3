"""`python -m daskcnn.run`: flags and a job file become one job; the job runs; the exit code says how it ended."""

from __future__ import annotations

import json
import signal
import sys
import traceback
from collections.abc import Iterable
from typing import Any

import click

from daskcnn import launch
from daskcnn.errors import UserError
from daskcnn.job import tables as config

FLAGS = {
    "dataset": ("data.name", "NAME", "Data set: cifar10, mnist or synthetic."),
    "data": ("data.path", "PATH", "Path of the prepared data set (a zarr store; s3://… works too)."),
    "archive": ("data.archive", "FILE", "The data set's own archive; a missing data set is prepared from it."),
    "model": ("model.name", "NAME", "Network: quick, lenet5, or C1:C2 such as 50:500."),
    "strategy": (
        "train.strategy",
        "NAME",
        "sgwu, agwu, bsp, easgd, downpour, admm or parallel-sgd (replicas); layer (kernels sharded).",
    ),
    "partition": ("train.partition", "NAME", "idpa, idpa-paper or udpa."),
    "epochs": ("train.epochs", "N", "How often every sample is seen, on average."),
    "batch-size": ("train.batch_size", "N", "Samples in a minibatch."),
    "lr": ("train.lr", "RATE", "Learning rate at the start."),
    "seed": ("train.seed", "N", "Seed of weights, order and augmentation."),
    "scheduler": (
        "cluster.scheduler",
        "ADDRESS",
        "Dask scheduler, tcp://host:8786. Without one a local cluster starts.",
    ),
    "scheduler-file": ("cluster.scheduler_file", "FILE", "The file to which the scheduler wrote its address."),
    "workers": ("cluster.workers", "cpu=N,gpu=N", "Workers to wait for and use. Default: all that are there."),
    "wait": ("cluster.wait", "SECONDS", "Seconds to wait for scheduler and workers."),
    "name": ("run.name", "NAME", "Name of the run's folder."),
    "run-dir": ("run.dir", "PATH", "Folder that holds the runs."),
}


class Command(click.Command):
    """A command that turns foreseeable failures into one message and an exit code, never a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.ClickException, click.Abort):
            raise
        except UserError as error:
            _say(f"error: {error}", ctx.params.get("verbose"))
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            ctx.exit(128 + signal.SIGINT)
        except Exception as error:
            _say(f"internal error: {type(error).__name__}: {error}", ctx.params.get("verbose"))
            click.echo("This is a bug of daskcnn's; run again with --verbose and report what it prints.", err=True)
            ctx.exit(1)


def _say(message: str, verbose: Any) -> None:
    if verbose:
        traceback.print_exc()
    click.secho(message, fg="red", err=True)


def job_flags(function: Any) -> Any:
    """Add the flags that stand for keys of the job file. Values are checked with the job, all problems at once."""
    for flag, (key, metavar, text) in reversed(FLAGS.items()):
        function = click.option(f"--{flag}", metavar=metavar, help=f"{text}  [{key}]")(function)
    return function


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job_file", metavar="[JOB.toml]", required=False)
@job_flags
@click.option("--set", "settings", metavar="SECTION.KEY=VALUE", multiple=True, help="Set any key of the job.")
@click.option("--resume", metavar="RUN|auto", help="Continue a run from its last checkpoint.")
@click.option("--dry-run", is_flag=True, help="Print the resolved job and the plan; start nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON on stdout, all else on stderr.")
@click.option("--verbose", is_flag=True, help="Show tracebacks.")
def main(
    job_file: str | None,
    settings: tuple[str, ...],
    resume: str | None,
    dry_run: bool,
    as_json: bool,
    verbose: bool,
    **flags: str | None,
) -> None:
    """Train a convolutional network on a Dask cluster of unequal machines.

    Keys come from JOB.toml, then the flags, then --set. Without a scheduler a local cluster starts.
    """
    raw = config.read_job_file(job_file) if job_file else {}
    _override(raw, flags, settings)
    if dry_run:
        job, plan = launch.dry_run(raw, resume=resume)
        click.echo(json.dumps(job, indent=2))
        click.echo(f"\n{plan}", err=as_json)
        return
    summary = launch.run(raw, resume=resume, json_mode=as_json)
    click.echo(json.dumps(summary, indent=2) if as_json else launch.format_summary(summary))


def _override(raw: dict[str, Any], flags: dict[str, str | None], settings: Iterable[str]) -> None:
    for flag, text in flags.items():
        if text is not None:
            key, metavar, _ = FLAGS[flag.replace("_", "-")]
            config.override(raw, key, config.parse_value(text) if metavar in ("N", "RATE", "SECONDS") else text)
    config.apply_settings(raw, settings)


if __name__ == "__main__":
    sys.exit(main(prog_name="python -m daskcnn.run"))
