"""`daskcnn run` and `python -m daskcnn.run`: flags and a job file become one job, and the job runs."""

from __future__ import annotations

import json

import click

from daskcnn.cli.command import Command, settings, tell, terminal_width, verbose
from daskcnn.cli.flags import add_imports, job_flags, meant_flags, override_by_flags
from daskcnn.errors import installing
from daskcnn.job.reference import tables
from daskcnn.job.resolve import override, read_job_file
from daskcnn.job.tables import description_of
from daskcnn.launch import jobs
from daskcnn.launch.dry_run import dry_run as dry_run_of
from daskcnn.show.renderers.drawing import can_draw
from daskcnn.show.renderers.network_text import readable_keys
from daskcnn.show.renderers.run_text import format_summary


def _print_keys(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        tell(readable_keys(tables(), terminal_width()))
        ctx.exit()


@click.command(cls=Command, meant=meant_flags, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job_file", metavar="[JOB.toml]", required=False)
@job_flags
@click.option(
    "--adapt",
    metavar="LEAST..MOST",
    help="Begin with the least workers, and ask the cluster for those that shorten the run, up to the most: sets "
    "cluster.workers and cluster.adapt. A range of GPU workers is written gpu=1..4.",
)
@click.option(
    "--import", "imports", metavar="MODULE", multiple=True, help=description_of("run.imports") + "  [run.imports]"
)
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
    adapt: str | None,
    imports: tuple[str, ...],
    settings: tuple[str, ...],
    resume: str | None,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
    verbose: bool,
    **flags: str | tuple[str, ...] | None,
) -> None:
    """Train a convolutional network on a Dask cluster of unequal machines.

    Keys come from JOB.toml, then the flags, then --set. Without a scheduler a local cluster starts.
    """
    raw = read_job_file(job_file) if job_file else {}
    if adapt is not None:
        if flags["workers"]:
            raise click.UsageError("--adapt and --workers: each says how many workers train; give one of them")
        flags["workers"] = adapt if "=" in adapt else f"cpu={adapt}"
        override(raw, "cluster.adapt", True)
    override_by_flags(raw, flags, settings)
    if imports:
        add_imports(raw, imports)
    if dry_run:
        job, plan = dry_run_of(raw, resume=resume)
        tell(json.dumps(job, indent=2))
        tell(f"\n{plan}", err=as_json)
        return
    summary = jobs.run(raw, resume=resume, json_mode=as_json, quiet=quiet)
    to_draw = "" if can_draw() else installing("plot")
    tell(json.dumps(summary, indent=2) if as_json else format_summary(summary, terminal_width(), to_draw=to_draw))
