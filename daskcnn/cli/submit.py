"""`daskcnn submit`: a job is checked here, and given to a queue's service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from daskcnn.batch.asking import asking
from daskcnn.batch.submission import message_of, send
from daskcnn.batch.sweep_watch import STOPS
from daskcnn.batch.sweeps import expanded
from daskcnn.cli.command import Command, as_json, settings, tell, verbose
from daskcnn.cli.flags import add_imports, job_flags, meant_flags, override_by_flags
from daskcnn.cli.queue_options import scheduler_of, spool_option
from daskcnn.documents import dumps
from daskcnn.job.resolve import read_job_file
from daskcnn.job.tables import description_of

MOST = 10**9  # as a priority, or a job's number


@click.command(cls=Command, meant=meant_flags, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job_file", metavar="[JOB.toml]", required=False)
@click.option(
    "--priority",
    metavar="N",
    type=click.IntRange(-MOST, MOST),
    default=0,
    show_default=True,
    help="Of your waiting jobs a higher one goes first.",
)
@click.option(
    "--after",
    metavar="ID",
    type=click.IntRange(1, MOST),
    multiple=True,
    help="Start once this job is done; may be repeated.",
)
@click.option(
    "--grid",
    metavar="SECTION.KEY=VALUE,…",
    multiple=True,
    help="Submit a sweep: a job for each of these values of a key, and for each combination where it is repeated.",
)
@click.option(
    "--seeds", metavar="N", type=click.IntRange(1), default=1, help="Jobs of each combination, with seeds of their own."
)
@click.option(
    "--stop",
    type=click.Choice(STOPS),
    help="End runs of the sweep early: at a third, a ninth, … of the epochs all but the best third so far.",
)
@click.option("--hold", is_flag=True, help="Do not start until `daskcnn release`.")
@job_flags
@click.option(
    "--import", "imports", metavar="MODULE", multiple=True, help=description_of("run.imports") + "  [run.imports]"
)
@settings
@spool_option
@as_json
@verbose
def submit(
    job_file: str | None,
    priority: int,
    after: tuple[int, ...],
    grid: tuple[str, ...],
    seeds: int,
    stop: str | None,
    hold: bool,
    imports: tuple[str, ...],
    settings: tuple[str, ...],
    spool: str | None,
    as_json: bool,
    verbose: bool,
    **flags: str | tuple[str, ...] | None,
) -> None:
    """Give a job to the service of a queue, and print its number. It is trained when its turn has come.

    The job is checked here, and sent with the modules of its `run.imports`. What is sent counts: the file may change.
    With --grid or --seeds it is a sweep of jobs that are named by their values, all of which are queued or none;
    `daskcnn compare` tables their runs.
    """
    raw = read_job_file(job_file) if job_file else {}
    override_by_flags(raw, flags, settings)
    if imports:
        add_imports(raw, imports)
    how: dict[str, Any] = {"priority": priority, "after": after, "hold": hold}
    if sweep := bool(grid) or seeds > 1:
        messages = _of_sweep(raw, job_file, grid, seeds, how | {"stop": stop or ""})
    elif stop:
        raise click.UsageError("--stop: ends runs of a sweep; give --grid or --seeds")
    else:
        messages = [message_of(raw, **how)]
    with asking(spool, scheduler_of(raw.get("cluster", {}))) as ask:
        answer = send(ask, messages)
    for text in answer["seen"]:
        tell(text, err=True)
    named = [f"{number}  {message['name']}" for number, message in zip(answer["ids"], messages, strict=True)]
    tell(dumps(answer, indent=2) if as_json else "\n".join(named) if sweep else answer["ids"][0])


def _of_sweep(
    raw: dict[str, Any], job_file: str | None, grid: Sequence[str], seeds: int, how: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The jobs of a sweep, which has the name of the run, or of the job file. Raises JobError with all problems."""
    run = raw.get("run", {})
    name = (run.get("name") if isinstance(run, Mapping) else None) or (Path(job_file).stem if job_file else "sweep")
    return [message_of(child.tables, sweep=name, **how) for child in expanded(raw, grid, seeds, name=str(name))]
