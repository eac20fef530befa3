"""`daskcnn run` and `python -m daskcnn.run`: flags and a job file become one job, and the job runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import click

from daskcnn.cli.command import Command, settings, tell, terminal_width, verbose
from daskcnn.errors import installing
from daskcnn.job.reference import default_of, tables
from daskcnn.job.resolve import apply_settings, override, parse_value, read_job_file
from daskcnn.job.tables import LAYER, description_of
from daskcnn.launch import jobs
from daskcnn.launch.dry_run import dry_run as dry_run_of
from daskcnn.nn import MODELS
from daskcnn.partition import PARTITIONERS
from daskcnn.ps import RULES
from daskcnn.show.renderers.drawing import can_draw
from daskcnn.show.renderers.job_text import readable_keys
from daskcnn.show.renderers.run_text import format_summary
from daskcnn.store import DATASETS

FLAGS = {
    "dataset": ("data.name", "NAME"),
    "data": ("data.path", "PATH"),
    "archive": ("data.archive", "FILE"),
    "model": ("model.name", "NAME"),
    "strategy": ("train.strategy", "NAME"),
    "partition": ("train.partition", "NAME"),
    "epochs": ("train.epochs", "N"),
    "batch-size": ("train.batch_size", "N"),
    "lr": ("train.lr", "RATE"),
    "seed": ("train.seed", "N"),
    "scheduler": ("cluster.scheduler", "ADDRESS"),
    "scheduler-file": ("cluster.scheduler_file", "FILE"),
    "workers": ("cluster.workers", "cpu=N,gpu=N"),
    "wait": ("cluster.wait", "SECONDS"),
    "name": ("run.name", "NAME"),
    "run-dir": ("run.dir", "PATH"),
}
"""The flags that stand for keys of the job, and what their values look like."""
NAMES: Mapping[str, Iterable[str]] = {
    "data.name": (*DATASETS, "any other that lies at --data"),
    "model.name": (*MODELS, "C1:C2"),
    "train.strategy": (*RULES, LAYER),
    "train.partition": PARTITIONERS,
}
"""What may stand for a name."""


def job_flags(function: Any) -> Any:
    """Add the flags that stand for keys of the job file. Values are checked with the job, all problems at once."""
    for flag, (key, metavar) in reversed(FLAGS.items()):
        known = f" One of: {', '.join(NAMES[key])}." if key in NAMES else ""
        default = f"  [{key}; default: {default_of(key)}]" if default_of(key) else f"  [{key}]"
        function = click.option(f"--{flag}", metavar=metavar, help=f"{description_of(key)}{known}{default}")(function)
    return function


def _print_keys(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        tell(readable_keys(tables(), terminal_width()))
        ctx.exit()


def cluster_options(function: Any) -> Any:
    """Add the options of every command that works on a cluster and has no job."""
    for flag in ("workers", "wait", "scheduler-file", "scheduler"):
        key, metavar = FLAGS[flag]
        function = click.option(f"--{flag}", metavar=metavar, help=description_of(key))(function)
    return function


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job_file", metavar="[JOB.toml]", required=False)
@job_flags
@settings
@click.option(
    "--resume",
    metavar="RUN|auto",
    help="Continue a run from its last checkpoint; with --epochs N until it has N epochs in all.",
)
@click.option("--dry-run", is_flag=True, help="Print the resolved job and the plan; start nothing.")
@click.option("--quiet", is_flag=True, help="Print nothing but warnings and the summary.")
@click.option(
    "--help-keys",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_keys,
    help="Print every key of a job with type, default and meaning.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON on stdout, all else on stderr.")
@verbose
def run(
    job_file: str | None,
    settings: tuple[str, ...],
    resume: str | None,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
    verbose: bool,
    **flags: str | None,
) -> None:
    """Train a convolutional network on a Dask cluster of unequal machines.

    Keys come from JOB.toml, then the flags, then --set. Without a scheduler a local cluster starts.
    """
    raw = read_job_file(job_file) if job_file else {}
    override_by_flags(raw, flags, settings)
    if dry_run:
        job, plan = dry_run_of(raw, resume=resume)
        tell(json.dumps(job, indent=2))
        tell(f"\n{plan}", err=as_json)
        return
    summary = jobs.run(raw, resume=resume, json_mode=as_json, quiet=quiet)
    to_draw = "" if can_draw() else installing("plot")
    tell(json.dumps(summary, indent=2) if as_json else format_summary(summary, terminal_width(), to_draw=to_draw))


def override_by_flags(raw: dict[str, Any], flags: Mapping[str, str | None], settings: Iterable[str]) -> None:
    """Set the keys that flags stand for, then those of the settings."""
    for flag, text in flags.items():
        if text is not None:
            key, metavar = FLAGS[flag.replace("_", "-")]
            override(raw, key, parse_value(text) if metavar in ("N", "RATE", "SECONDS") else text)
    apply_settings(raw, settings)
