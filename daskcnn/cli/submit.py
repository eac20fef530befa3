"""`daskcnn submit`: a job is checked here, and given to a queue's service."""

from __future__ import annotations

import click

from daskcnn.batch.asking import asking
from daskcnn.batch.submission import message_of, send
from daskcnn.cli.command import Command, as_json, settings, tell, verbose
from daskcnn.cli.flags import add_imports, job_flags, meant_flags, override_by_flags
from daskcnn.cli.queue_options import scheduler_of, spool_option
from daskcnn.documents import dumps
from daskcnn.job.resolve import read_job_file
from daskcnn.job.tables import description_of


@click.command(cls=Command, meant=meant_flags, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job_file", metavar="[JOB.toml]", required=False)
@click.option(
    "--priority", type=int, default=0, show_default=True, help="Of your waiting jobs a higher one goes first."
)
@click.option("--after", metavar="ID", type=int, multiple=True, help="Start once this job is done; may be repeated.")
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
    """
    raw = read_job_file(job_file) if job_file else {}
    override_by_flags(raw, flags, settings)
    if imports:
        add_imports(raw, imports)
    message = message_of(raw, priority=priority, after=after, hold=hold)
    with asking(spool, scheduler_of(raw.get("cluster", {}))) as ask:
        answer = send(ask, [message])
    for text in answer["seen"]:
        tell(text, err=True)
    tell(dumps(answer, indent=2) if as_json else answer["ids"][0])
