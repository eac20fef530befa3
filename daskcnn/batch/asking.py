"""Ways to ask for what a queue does: through the scheduler, or at the spool on the service's machine."""

from __future__ import annotations

import getpass
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from daskcnn import __version__
from daskcnn.batch.drivers import Drivers
from daskcnn.batch.requests import Requests
from daskcnn.batch.spool import Spool
from daskcnn.batch.spool_folder import runs_of_spool, usual_folder
from daskcnn.errors import ClusterError, DataError

REACHED = 10.0  # seconds within which the scheduler is reached
LOOK = 1.0  # seconds between two questions for what is new
PATIENCE = 300.0  # seconds for which those who follow a job ask again while no service answers
_DIGITS = 18  # of the highest number that a job may have
Ask: TypeAlias = Callable[..., Any]
"""A request by name with its values; returns the answer. Raises UserError for a refusal."""


@contextmanager
def at_spool(folder: Path) -> Iterator[Ask]:
    """Ask the spool in a folder of this machine; a service need not run. Raises SpoolError if there is none."""
    with Spool(folder, must_exist=True) as spool:
        runs = runs_of_spool(spool.folder)
        asked = Requests(spool, Drivers(spool.folder), runs=runs, clock=time.time, places={})
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


def user_name() -> str:
    """Return the name of this user, as jobs have it."""
    try:
        return getpass.getuser().encode(errors="replace").decode()
    except (KeyError, OSError):  # a number without a name, as in containers
        return str(os.getuid())


def patient(ask: Ask, until: float = math.inf) -> Ask:
    """Return a way to ask that asks again while no service answers, as while it is started again.

    until : on the monotonic clock; without it for `PATIENCE` seconds a question.
    """

    def asked(name: str, **values: Any) -> Any:
        last = until if math.isfinite(until) else time.monotonic() + PATIENCE
        while True:
            try:
                return ask(name, **values)
            except ClusterError:
                if time.monotonic() >= last:
                    raise
                time.sleep(LOOK)

    return asked


def _is_number(job: str) -> bool:
    return job.isdecimal() and len(job) <= _DIGITS


def number_of(ask: Ask, job: str) -> int:
    """Return the number of a job that is named by it or by its name: of several jobs of one name, of the last.

    Raises DataError where the queue has no job of that name. A number is taken as it is.
    """
    if _is_number(job):
        return int(job)
    if not (found := _of_name(ask, job)):
        raise DataError(f"job {job}", "the queue has none of that name", "`daskcnn jobs --all` lists all jobs")
    return max(int(each["id"]) for each in found)


def _of_name(ask: Ask, name: str) -> list[Mapping[str, Any]]:
    return [job for job in ask("jobs", everything=True) if job["name"] == name]


def runs_of(ask: Ask, names: Sequence[str]) -> tuple[list[str], bool]:
    """Return the runs of jobs, by number or name, and of sweeps, but for those that have not begun.

    The last sweep of a name is meant, this user's last one where there is any. The runs are in the order of the names.
    True: they are those of one sweep. Raises UserError for what is neither a job nor a sweep of the queue, and where no
    run can be seen from here.
    """
    jobs, sweeps = list[Mapping[str, Any]](), list[str]()
    for name in names:
        found = [ask("job", number=int(name))] if _is_number(name) else _last_sweep(ask("jobs", sweep=name))
        sweeps += [name] * bool(found and not _is_number(name))
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


def _last_sweep(jobs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The jobs of the last submission among these, of this user's where there are any."""
    own = [job for job in jobs if job["user"] == user_name()] or jobs
    last = max(((job["submitted"], job["user"]) for job in own), default=None)
    return [job for job in own if (job["submitted"], job["user"]) == last]


def printed(ask: Ask, number: int, *, follow: bool) -> Iterator[str]:
    """Yield what a job's drivers have printed; with `follow` until the job has ended. Raises UserError."""
    offset, asked = 0, ask
    while True:
        found = asked("logs", number=number, offset=offset)
        asked = patient(ask) if follow else ask
        offset = found["offset"]
        yield found["text"]
        if not found["text"]:
            if not (follow and found["more"]):
                return
            time.sleep(LOOK)
