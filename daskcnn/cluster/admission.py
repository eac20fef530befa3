"""Before training: are the workers fit for the job, and how fast is each?"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from distributed import Client

from daskcnn.cluster.members import Member, Members
from daskcnn.cluster.protocol import Calibration
from daskcnn.cluster.run_context import EXPLAINED, RunContext, ServerLost, WorkersLost
from daskcnn.cluster.session.tasks import calibrate, check_dataset
from daskcnn.errors import ClusterError, UserError
from daskcnn.job.tables import Job

PACKAGES = ("daskcnn", "dask", "distributed", "numpy", "pydantic", "zarr")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that driver and workers must share."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def check_workers(client: Client, members: Members, job: Job, fingerprint: str) -> None:
    """Raise ClusterError unless scheduler and workers run the driver's versions and every worker sees the data set."""
    check_scheduler(client)
    check_versions(client, [*members.workers, members.server, *members.servers])
    workers = {m.address: m for m in members.workers}
    for address, problem in _run(client, partial(check_dataset, job, fingerprint), workers).items():
        if problem:
            raise ClusterError(
                f"worker {workers[address].name} ({address}) does not see the data set: {problem}; "
                "give data.path on storage that every worker reaches, or copy it there"
            )


def check_scheduler(client: Client) -> None:
    """Raise ClusterError where it runs other versions than the driver: it reads the graphs of tasks that it is sent."""
    found = client.run_on_scheduler(_versions_by_value())
    _require_same(f"scheduler {client.scheduler.address}", found)


def check_versions(client: Client, members: Iterable[Member]) -> None:
    """Raise ClusterError naming a worker that lacks this package or runs other versions than the driver."""
    by_address = {m.address: m for m in members}
    for address, found in _run(client, _versions_by_value(), by_address).items():
        _require_same(f"worker {by_address[address].name} ({address})", found)


def _run(client: Client, function: Callable[[], Any], members: Mapping[str, Member]) -> dict[str, Any]:
    """What it returns on each of these workers, by address. Raises ClusterError where one has gone."""
    try:
        return dict(client.run(function, workers=list(members)))
    except (OSError, KeyError, ValueError) as error:
        names = ", ".join(m.name for m in members.values())
        raise ClusterError(f"workers {names}: one was lost while it was looked at ({error}); start it again") from error


def _versions_by_value() -> Any:
    """A function that travels by its code: a worker may lack this package, and should say so."""
    names = PACKAGES

    def versions_here() -> dict[str, str]:
        import importlib.metadata
        import platform

        found = {"python": platform.python_version()}
        for name in names:
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                found[name] = "missing"
        return found

    versions_here.__module__ = "__main__"
    return versions_here


def _require_same(where: str, found: Mapping[str, str]) -> None:
    if found["daskcnn"] == "missing":
        raise ClusterError(f"{where} does not have daskcnn; pip install it there, the same version as here")
    mine = versions()
    # a Python that differs in its last number runs the same pickles
    wrong = [n for n in mine if found[n] != mine[n] and (n != "python" or _minor(found[n]) != _minor(mine[n]))]
    if wrong:
        differences = ", ".join(f"{n} {found[n]} (here {mine[n]})" for n in wrong)
        raise ClusterError(f"{where} runs {differences}; install the same versions there")


def _minor(version: str) -> str:
    return version.rpartition(".")[0]


def calibrate_all(context: RunContext) -> None:
    """Every worker measures itself, all at the same time as they will train. Fills in `context.calibrations`.

    A worker whose device cannot be used is left out with a warning. Raises ClusterError where none is left.
    """
    _warn_of_two_kinds(context)
    futures = {
        name: context.submit("calibrate", calibrate, context.name, context.job, member.kind, worker=name)
        for name, member in context.alive.items()
    }
    try:
        context.settle(futures.values(), within=context.job.cluster.stall_timeout)
    except TimeoutError as error:
        names = ", ".join(name for name, future in futures.items() if not future.done())
        raise ClusterError(
            f"worker {names}: not calibrated within {context.job.cluster.stall_timeout:g} s; is it busy with another "
            "job? Give each its own workers, or raise cluster.stall_timeout"
        ) from error
    except (WorkersLost, ServerLost) as lost:
        raise ClusterError(f"worker {lost}: lost while it was calibrated; start it again") from lost
    for name, future in futures.items():
        failure = future.exception(timeout=EXPLAINED)
        if isinstance(failure, ClusterError):
            context.emit({"event": "warning", "message": f"worker {name} is left out: {failure}"})
            del context.alive[name]
        elif isinstance(failure, UserError | None):
            context.calibrations[name] = future.result()
        else:
            raise ClusterError(f"worker {name}: calibration failed: {type(failure).__name__}: {failure}") from failure
    if not context.alive:
        raise ClusterError("no worker is usable; see the warnings above")
    context.emit(_event(context))


def _warn_of_two_kinds(context: RunContext) -> None:
    for name, member in context.alive.items():
        if member.also:
            message = f"worker {name} ({member.address}) advertises {member.declared}, and trains as {member.kind}"
            context.emit({"event": "warning", "message": f"{message}: restart it with one of them"})


def _event(context: RunContext) -> dict[str, Any]:
    rows = [_row(member, context.calibrations[name]) for name, member in context.alive.items()]
    return {"event": "calibration", "workers": rows}


def _row(member: Member, measured: Calibration) -> dict[str, Any]:
    return {
        "name": member.name,
        "address": member.address,
        "host": member.host,
        "device": member.kind,
        "processor": measured.device,
        "threads": measured.threads,
        "memory": measured.memory,
        "images_per_second": 1 / measured.seconds_per_sample,
        "conv_seconds": measured.conv_seconds,
        "conv_fixed": measured.conv_fixed,
        "rest_seconds": measured.rest_seconds,
    }
