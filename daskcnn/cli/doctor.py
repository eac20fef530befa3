"""`daskcnn doctor`."""

from __future__ import annotations

from typing import Any

import click

from daskcnn.cli.command import Command, as_json, tell, verbose
from daskcnn.doctor.examine import asked_for, compile_loops, examine
from daskcnn.doctor.findings import readable_findings, would_start
from daskcnn.documents import dumps
from daskcnn.show.renderers.terminal import say


@click.command(cls=Command)
@click.option("--scheduler", metavar="ADDRESS", help="Check this cluster too.")
@click.option("--scheduler-file", metavar="FILE", help="The file to which the scheduler wrote its address.")
@click.option("--workers", metavar="cpu=N,gpu=N", help="Workers that a job would ask for.  [default: one of any kind]")
@click.option("--data", metavar="PATH", help="A data set that all workers must see under the same path.")
@click.option("--run-dir", metavar="PATH", help="The folder that is to hold the runs.  [default: runs]")
@click.option(
    "--wait",
    type=click.FloatRange(0),
    default=10.0,
    show_default=True,
    help="Seconds to wait for scheduler and workers.",
)
@click.option(
    "--warm", is_flag=True, help="First compile the loops that workers here will need, into the cache folder."
)
@as_json
@verbose
@click.pass_context
def doctor(
    ctx: click.Context,
    /,
    scheduler: str | None,
    scheduler_file: str | None,
    workers: str | None,
    data: str | None,
    run_dir: str | None,
    wait: float,
    warm: bool,
    as_json: bool,
    **_: Any,
) -> None:
    """Check this machine and a cluster for what a job needs; every finding has a remedy.

    ok: fine. !: a job would start, but see the remedy. NO: a job would not start; the exit code is 3.
    """
    if workers and not (scheduler or scheduler_file):
        raise click.UsageError("--workers: they are a cluster's; give --scheduler or --scheduler-file too")
    if warm:
        compile_loops(say)
    findings = examine(scheduler, scheduler_file, wait, asked_for(workers, data, run_dir))
    tell(dumps([f.to_dict() for f in findings], indent=2) if as_json else readable_findings(findings))
    ctx.exit(0 if would_start(findings) else 3)
