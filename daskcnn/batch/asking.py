"""Ways to ask for what a queue does: through the scheduler, or at the spool on the service's machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from daskcnn import __version__
from daskcnn.batch.drivers import Drivers
from daskcnn.batch.requests import Requests
from daskcnn.batch.spool import Spool, usual_folder
from daskcnn.errors import ClusterError, DataError

REACHED = 10.0  # seconds within which the scheduler is reached
LOOK = 1.0  # seconds between two questions for what is new
Ask: TypeAlias = Callable[..., Any]
"""A request by name with its values; returns the answer. Raises UserError for a refusal."""


@contextmanager
def at_spool(folder: Path) -> Iterator[Ask]:
    """Ask the spool in a folder of this machine; a service need not run. Raises SpoolError if there is none."""
    with Spool(folder, must_exist=True) as spool:
        asked = Requests(spool, Drivers(spool.folder), runs=Path("runs").absolute(), clock=time.time, places={})
        yield lambda name, **values: asked.called(name, values)


@contextmanager
def at_scheduler(settings: Mapping[str, Any]) -> Iterator[Ask]:
    """Ask the service through its scheduler. settings: keys of `[cluster]` that name it. Raises ClusterError."""
    from daskcnn.cluster.link.connect import connect  # Dask takes longer to import than the spool to answer
    from daskcnn.job.cluster_table import Cluster

    with connect(Cluster(**settings, wait=REACHED)) as client:
        yield at_client(client)


def at_client(client: Any) -> Ask:
    """Return the way to ask the service at a client's scheduler."""
    from daskcnn.batch.desk import ask_service

    return lambda name, **values: ask_service(client, {"ask": name, "version": __version__, **values})


@contextmanager
def asking(spool: str | None, settings: Mapping[str, Any]) -> Iterator[Ask]:
    """Ask at the spool if one is given, else at the scheduler, else at the usual spool of this machine.

    Raises ClusterError where there is none of them.
    """
    if spool is None and settings:
        with at_scheduler(settings) as ask:
            yield ask
        return
    folder = Path(spool) if spool is not None else usual_folder()
    if spool is None and not folder.is_dir():
        raise ClusterError("the queue", "no scheduler is given", "give --scheduler ADDRESS, or --spool DIR of `serve`")
    with at_spool(folder) as ask:
        yield ask


def number_of(ask: Ask, job: str) -> int:
    """Return the number of a job that is named by it or by its name: of several jobs of one name, of the last.

    Raises DataError where the queue has no job of that name. A number is taken as it is.
    """
    if job.isdecimal():
        return int(job)
    if not (found := _of_name(ask, job)):
        raise DataError(f"job {job}", "the queue has none of that name", "`daskcnn jobs --all` lists all jobs")
    return max(int(each["id"]) for each in found)


def _of_name(ask: Ask, name: str) -> list[Mapping[str, Any]]:
    return [job for job in ask("jobs", everything=True) if job["name"] == name]


def runs_of(ask: Ask, names: Sequence[str]) -> tuple[list[str], bool]:
    """Return the runs of jobs, by number or name, and of sweeps, but for those that have not begun.

    They are in the order of the names. True: they are those of one sweep. Raises UserError for what is neither a job
    nor a sweep of the queue, and where no run can be seen from here.
    """
    jobs, sweeps = list[Mapping[str, Any]](), list[str]()
    for name in names:
        found = [ask("job", number=int(name))] if name.isdecimal() else ask("jobs", sweep=name)
        sweeps += [name] * bool(found and not name.isdecimal())
        if not (found := found or _of_name(ask, name)):
            reason = "the queue has no job and no sweep of that name"
            raise DataError(name, reason, "`daskcnn jobs --all` lists all jobs")
        jobs += found
    if runs := dict.fromkeys(str(job["run"]) for job in jobs if (Path(job["run"]) / "job.json").exists()):
        return [*runs], sweeps == [*names] and len(names) == 1
    begun = [job for job in jobs if job["attempts"]]
    if not begun:
        raise DataError(", ".join(names), "none of its jobs has begun", "`daskcnn jobs` says why they wait")
    remedy = "compare them on the service's machine, or where its runs are seen"
    raise DataError(", ".join(names), f"no run can be seen from here ({begun[0]['run']})", remedy)


def printed(ask: Ask, number: int, *, follow: bool) -> Iterator[str]:
    """Yield what a job's drivers have printed; with `follow` until the job has ended. Raises UserError."""
    offset = 0
    while True:
        found = ask("logs", number=number, offset=offset)
        offset = found["offset"]
        yield found["text"]
        if not found["text"]:
            if not (follow and found["more"]):
                return
            time.sleep(LOOK)
