"""Commands of a queue: `daskcnn serve`, `jobs`, `cancel`, `hold`, `release`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from daskcnn.batch.asking import asking, number_of
from daskcnn.batch.spool_folder import usual_folder
from daskcnn.cli.command import Command, as_json, tell, verbose
from daskcnn.cli.queue_options import queue_options, scheduler_of, scheduler_options
from daskcnn.documents import dumps
from daskcnn.show.queue_table import readable_jobs


@click.command(cls=Command)
@scheduler_options
@click.option(
    "--spool",
    metavar="DIR",
    help="Folder of the queue, on a disk of this machine; it is its owner's alone. Default: daskcnn/queue in the "
    "user's folder of states, such as ~/.local/state.",
)
@click.option(
    "--run-dir", metavar="PATH", default="runs", show_default=True, help="Folder of runs whose job names none."
)
@verbose
def serve(scheduler: str | None, scheduler_file: str | None, spool: str | None, run_dir: str, **_: Any) -> None:
    """Serve a queue of jobs on a Dask cluster, until it is ended. Jobs that run go on.

    Give jobs to it with `daskcnn submit`. Each job gets workers of its own, and its driver is a process on this
    machine. A service that is killed is started again by the same command; it loses no job and starts none twice. In a
    container, drivers cannot go on without it: a service that is to end waits until they have saved.
    """
    from daskcnn.batch.serving import serve as serve_queue
    from daskcnn.job.cluster_table import Cluster

    if not (scheduler or scheduler_file):
        raise click.UsageError("no scheduler is given; give --scheduler ADDRESS, as `dask scheduler` prints it")
    folder = Path(spool) if spool else usual_folder()
    cluster = Cluster(scheduler=scheduler, scheduler_file=scheduler_file)
    serve_queue(cluster, folder, runs=Path(run_dir), say=_say)


def _say(text: str) -> None:
    """Tell of the service, with the time. A file for its output that is full, or gone, does not end it."""
    with suppress(OSError):
        tell(f"{datetime.now():%Y-%m-%d %H:%M:%S}  {text}", err=True)


@click.command(cls=Command)
@click.option("--all", "everything", is_flag=True, help="List all jobs that have ended, too, not only the last 20.")
@queue_options
@as_json
@verbose
def jobs(everything: bool, spool: str | None, as_json: bool, verbose: bool, **scheduler: str | None) -> None:
    """List the jobs of a queue: state, place and why it waits, progress, accuracy, workers."""
    with asking(spool, scheduler_of(scheduler)) as ask:
        found = ask("jobs", everything=everything)
    tell(dumps(found, indent=2) if as_json else readable_jobs(found))


def _changing(name: str, text: str) -> Callable[..., Any]:
    """Return the command that asks the service for a change of jobs."""

    @click.command(name, cls=Command, help=text)
    @click.argument("jobs", metavar="JOB…", nargs=-1, required=True)
    @queue_options
    @verbose
    def command(jobs: tuple[str, ...], spool: str | None, verbose: bool, **scheduler: str | None) -> None:
        with asking(spool, scheduler_of(scheduler)) as ask:
            for number in [number_of(ask, job) for job in jobs]:
                job = ask(name, number=number)
                state = "is asked to end" if name == "cancel" and job["state"] == "running" else job["state"]
                tell(f"job {number} ({job['name']}): {state}")

    return command


cancel = _changing(
    "cancel",
    "Cancel jobs, by number or name. One that runs is saved first; cancelled once more, it ends at once.",
)
hold = _changing("hold", "Keep jobs from starting, by number or name, until they are released.")
release = _changing(
    "release", "Release jobs, by number or name: those that are held, that wait for another attempt, or have failed."
)
