"""Before training: checks that workers run the driver's versions and see the data, and the measuring of their speed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from dask.utils import format_bytes
from distributed import Client, Future

from daskcnn.cluster.link import calls
from daskcnn.cluster.link.allowed import AllowedWorkers
from daskcnn.cluster.link.calls import ANSWER, Check, ask_scheduler, ask_workers, no_check
from daskcnn.cluster.link.lease_table import named_by
from daskcnn.cluster.link.leases import Hold
from daskcnn.cluster.link.members import (
    Member,
    Members,
    advertised,
    given_name,
    present,
    taken_as_cpu,
    wait_for_members,
)
from daskcnn.cluster.link.sent import require_modules, sent
from daskcnn.cluster.messages import Calibration
from daskcnn.cluster.run.context import RunContext
from daskcnn.cluster.worker.ending import end_in_time
from daskcnn.cluster.worker.session import check_dataset
from daskcnn.cluster.worker.tasks import calibrate
from daskcnn.errors import ClusterError, DataUnseen, Interrupted, Lost, UserError, told
from daskcnn.events import CalibratedWorker, Warned
from daskcnn.job.network import replica_bytes
from daskcnn.job.prepared import largest_step
from daskcnn.job.tables import Job
from daskcnn.store.array_index import ArrayChanged, ArrayIndex
from daskcnn.training.coordinator.facts import Calibrated, CalibrationFailed, Fact

MOMENT = 3.0  # seconds without an answer, after which it is said that the job waits
LOOK_AT_DATA = 60.0  # seconds within which a worker opens the data set; it may have to import this package first
LOOK_AT_NEWCOMER = 3.0  # seconds within which a worker that came in mid-run answers: the driver waits meanwhile
MISSING = "missing"
PACKAGES = ("daskcnn", "dask", "distributed", "numpy", "pydantic", "zarr")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that driver and workers must share."""
    return {"python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}}


def version_of(package: str) -> str:
    """The version that is installed here, `MISSING` where none is."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return MISSING


def admit(
    client: Client,
    job: Job,
    fingerprint: str,
    check: Check = no_check,
    say: Callable[[str], None] = lambda _: None,
    *,
    settle: float = 0.0,
    index: ArrayIndex | None = None,
    hold: Hold | None = None,
) -> tuple[Members, tuple[str, ...]]:
    """Return the job's workers, and warnings: of those left out as silent, and of those that advertise nothing.

    `fingerprint` and, of arrays in place, `index` are of the data set as the driver has it.
    Waits for workers as `wait_for_members` does, and takes them with `hold`. Every worker runs the driver's versions
    and sees the data set.
    Raises ClusterError where one does not, where too few workers answer, or where the scheduler does not.
    """
    begun, silent, wanted, wait = time.monotonic(), dict[str, str](), job.cluster.workers, job.cluster.wait
    look, imports = partial(check_dataset, job, fingerprint, index), job.run.imports
    only = AllowedWorkers.of(job.cluster)
    how: dict[str, Any] = {"say": say, "settle": settle, "silent": silent, "begun": begun, "only": only, "hold": hold}
    check_scheduler(client, check)
    while True:
        members = wait_for_members(client, wanted, wait, check, **how)
        try:
            found = _silent_members(client, members, look, imports, _telling(check, say))
            if not found:
                left_out = (f"{words}; the run starts without it" for words in silent.values())
                unmatched = _unmatched(client, job.cluster.only or (), check)
                return members, (*taken_as_cpu(members.workers), *left_out, *unmatched)
            if hold is not None:
                hold.release(found.keys(), check)
        except OSError as error:
            raise _scheduler_lost(client, error) from error
        silent |= found
        for words in found.values():
            say(f"{words}; looking for another")


def _unmatched(client: Client, only: Sequence[str], check: Check) -> Iterator[str]:
    """Yield a warning for each of the patterns that is no worker's name."""
    names = [member.name for member in advertised(present(client, check))] if only else []
    for pattern in only:
        if not any(named_by([pattern], name) for name in names):
            yield f"cluster.only = {pattern}: no worker has such a name now"


def _telling(check: Check, say: Callable[[str], None]) -> Check:
    """The check that also says, once, that workers are waited for, if it takes longer than a moment."""
    due = [time.monotonic() + MOMENT]

    def telling() -> None:
        check()
        if due and time.monotonic() >= due[0]:
            due.clear()
            say("waiting for workers to answer")

    return telling


def _silent_members(
    client: Client, members: Members, look: Callable[[], str | None], imports: Sequence[str] | None, check: Check
) -> dict[str, str]:
    """Members that do not answer, in words. Raises ClusterError where one is not fit."""
    everyone = (*members.workers, members.server, *members.servers)
    trains = {m.address: m for m in members.workers}
    answers = check_versions(client, everyone, check)
    if answers.silent:
        return {a: unanswering(a, ANSWER) for a in answers.silent}
    require_modules(client, {m.address: f"worker {m.name} ({m.address})" for m in everyone}, imports, check)
    ask_workers(client, end_in_time, (m.address for m in everyone), check=check)
    answers = ask_workers(client, look, trains, within=LOOK_AT_DATA, check=check)
    for address, problem in _sound(answers, trains).items():
        if problem:
            where = f"worker {trains[address].name} ({address}) does not see the data set"
            raise DataUnseen(where, problem, "give data on storage that every worker reaches, or copy it there")
    return {a: unanswering(a, LOOK_AT_DATA) for a in answers.silent}


def check_versions(
    client: Client, members: Iterable[Member], check: Check = no_check, *, within: float | None = None
) -> calls.Answers:
    """Raise ClusterError where a worker runs other versions than the driver. Returns their answers."""
    asked = {m.address: m for m in members}
    answers = ask_workers(client, versions_by_value(), asked, within=within or ANSWER, check=check)
    for address, found in _sound(answers, asked).items():
        require_same(f"worker {asked[address].name} ({address})", found)
    return answers


def _sound(answers: calls.Answers, members: Mapping[str, Member]) -> Mapping[str, Any]:
    """The answers. Raises ClusterError naming a worker that was lost meanwhile."""
    for address, error in answers.failed.items():
        where = f"worker {members[address].name} ({address})"
        if lacked := missing_module(error):
            raise ClusterError(where, f"lacks the module {lacked!r}, which the job is made of", HAVE) from error
        if not isinstance(error, OSError | KeyError | ValueError):
            raise error
        raise ClusterError(f"{where}: was lost while it was looked at ({error}); start it again") from error
    return answers.given


HAVE = (
    "if it is a module of yours, name it in run.imports (--import), which sends it to the workers; "
    "else install it on every machine, and start scheduler and workers again"
)


def missing_module(error: BaseException | None) -> str | None:
    """Return the name of the module that a process lacked, by the error or its causes; None for other errors."""
    while error is not None:
        if found := re.search(r"No module named '([^']+)'", str(error)):
            return found[1]
        error = error.__cause__
    return None


def unanswering(worker: str, within: float) -> str:
    """A worker that does not answer, and the remedy, in words."""
    causes = "is it stopped, out of memory or without its storage? Restart it"
    return f"worker {worker}: no answer within {within:g} s; {causes}"


def _scheduler_lost(client: Client, error: OSError) -> ClusterError:
    if isinstance(error, calls.Unanswered):
        return ClusterError(reason=error, remedy="restart it")
    return ClusterError(f"scheduler {client.scheduler.address}: connection lost ({error}); start it again")


def check_scheduler(client: Client, check: Check = no_check) -> None:
    """Raise ClusterError where it runs other versions than the driver: it reads the graphs of tasks that it is sent."""
    try:
        found = ask_scheduler(client, versions_by_value(), check=check)
    except OSError as error:
        raise _scheduler_lost(client, error) from error
    require_same(f"scheduler {client.scheduler.address}", found)


def versions_by_value() -> Any:
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


def require_same(where: str, found: Mapping[str, str]) -> None:
    """Raise ClusterError naming a place that lacks this package or runs other versions than the driver."""
    mine = versions()
    if mine["daskcnn"] == MISSING:  # found by PYTHONPATH, say: then its version cannot be compared
        folder = Path(__file__).parents[3]
        reason = f"daskcnn is imported from {folder} here, and is not installed"
        raise ClusterError(reason=reason, remedy=f"python -m pip install {folder}, here and on every machine")
    if found["daskcnn"] == MISSING:
        remedy = "pip install it there, the same version as here"
        raise ClusterError(reason=f"{where} does not have daskcnn", remedy=remedy)
    wrong = [name for name in mine if found[name] != mine[name]]
    # a Python that differs in its last number runs the same pickles
    if "python" in wrong and found["python"].rpartition(".")[0] == mine["python"].rpartition(".")[0]:
        wrong.remove("python")
    if wrong:
        differences = ", ".join(f"{n} {found[n]} (here {mine[n]})" for n in wrong)
        raise ClusterError(reason=f"{where} runs {differences}", remedy="install the same versions there")


READ = "give a folder on storage that every worker reaches, under the same path"
WRITE = (
    "give an output on storage that every worker can write to, under the same path; "
    "a worker that systemd starts needs it in ReadWritePaths"
)


def require_sight(client: Client, source: Path, target: str, check: Check = no_check, only: Sequence[str] = ()) -> None:
    """Check that all workers run the driver's versions, can read a folder, and write to another or to a URL.

    Raises ClusterError naming a worker that does not or cannot, or does not answer. only: patterns of their names.
    """
    there = present(client, check)
    ours = {member.address: member.name for member in advertised(there)}
    called = {a: ours.get(a) or given_name(info.get("name")) for a, info in there.items()}
    names = {a: f"worker {name} ({a})" for a, name in called.items() if named_by(only, name)}
    answers = ask_workers(client, versions_by_value(), names, within=ANSWER, check=check)
    for address, found in _complete(answers, names, ANSWER).given.items():
        require_same(names[address], found)
    answers = ask_workers(client, partial(unseen, source, target), names, within=LOOK_AT_DATA, check=check)
    for address, problem in _complete(answers, names, LOOK_AT_DATA).given.items():
        if problem:
            raise ClusterError(names[address], *problem)


def check_sight(client: Client, sources: Sequence[Path], target: str, check: Check = no_check) -> None:
    """Check that workers that compute can read folders, and write to another or to a URL.

    One that does not answer is passed over: others do its part.

    Raises ClusterError naming a worker that cannot: DataUnseen for one that cannot write.
    """
    try:
        names = {m.address: f"worker {m.name} ({m.address})" for m in advertised(present(client, check))}
        for source in sources or (None,):
            answers = ask_workers(client, partial(unseen, source, target), names, within=LOOK_AT_DATA, check=check)
            for address, problem in answers.given.items():
                if problem:
                    raise (DataUnseen if problem[1] == WRITE else ClusterError)(names[address], *problem)
    except OSError as error:
        raise _scheduler_lost(client, error) from error


def _complete(answers: calls.Answers, names: dict[str, str], within: float) -> calls.Answers:
    """The answers. Raises ClusterError where one is missing."""
    for address in answers.silent:
        raise ClusterError(unanswering(address, within))
    for address, error in answers.failed.items():
        raise ClusterError(names[address], f"was lost while it was looked at ({error})", "start it again") from error
    return answers


def unseen(source: Path | None, target: str) -> tuple[str, str] | None:
    """Return the fault where this process cannot read or write, and the remedy; None where all is well."""
    try:
        with nullcontext(iter(())) if source is None else os.scandir(source) as entries:
            next(entries, None)
    except OSError as error:
        return f"cannot read {source} ({error.strerror or error})", READ
    if "://" not in target and not os.access(target, os.W_OK | os.X_OK):
        return f"cannot write beside the output ({target})", WRITE
    return None


def unfit(context: RunContext, member: Member) -> tuple[str, str] | None:
    """Return why a worker that came in mid-run cannot be used, and the remedy.

    It is looked at as those that were there at the start. Raises Lost, and Interrupted.
    """
    connection, within = context.connection, LOOK_AT_NEWCOMER
    try:
        with connection.reached():
            answers = check_versions(connection.client, [member], connection.heed, within=within)
            ask_workers(connection.client, end_in_time, {*answers.given}, within=within, check=connection.heed)
    except ClusterError as error:
        return told(error.value, error.reason, ""), error.remedy
    return (f"no answer within {within:g} s", "is it stopped? Restart it") if answers.silent else None


def submit_calibration(context: RunContext, worker: str) -> Future:
    """Let a worker of the run look whether it fits, and measure itself. Warn if it advertises two kinds."""
    member = context.workers.alive[worker]
    if member.also:
        reason = f"advertises {member.declared}, and trains as {member.kind}"
        value, remedy = f"worker {worker} ({member.address})", "restart it with one of them"
        context.emit(Warned(value=value, reason=reason, remedy=remedy))
    job, dataset = sent(context.job, context.job), context.dataset
    number = context.sessions[member.address] = context.sessions.get(member.address, 0) + 1
    order = context.name, job, member.kind, dataset.fingerprint, dataset.index, number
    return context.dispatch.submit("calibrate", calibrate, *order, worker=worker)


def calibrated(context: RunContext, worker: str, future: Future, at: float) -> Fact:
    """Take the result of a worker's calibration; the context knows it from then on.

    Raises NotYet, and WorkersLost, ServerLost, Lost, Interrupted or ArrayChanged where that is found meanwhile.
    """
    try:
        found = context.results.fetch(future)
        context.workers.tell_news()
    except (calls.NotYet, calls.CutOff, calls.WorkersLost, calls.ServerLost, Lost, Interrupted, ArrayChanged):
        raise
    except UserError as error:
        return CalibrationFailed(worker, told(error.value, error.reason, ""), error.remedy, at)
    except Exception as error:
        if lacked := missing_module(error):
            return CalibrationFailed(worker, f"it or the scheduler lacks the module {lacked!r}", HAVE, at)
        reason = f"calibration failed: {type(error).__name__}: {error}"
        return CalibrationFailed(worker, reason, "mend that on the worker, and start it again", at)
    context.calibrations[worker] = found
    member, largest = context.workers.alive[worker], None
    if context.job.train.largest_batch is not None:
        memory = found.memory if member.kind == "gpu" else member.memory_limit or found.memory
        largest = largest_step(context.job, context.dataset, memory)
        largest = min(largest, found.planned_step or largest)
    row = calibration_row(member, found).model_copy(update={"largest_step": largest})
    return Calibrated(worker, found.seconds_per_sample, row, at)


def lost_while_calibrated(context: RunContext, worker: str, at: float) -> CalibrationFailed:
    """Leave a worker out, and say what it needed and had: most often it ran out of memory."""
    needs = replica_bytes(context.job, context.dataset)
    has = context.workers.alive[worker].memory_limit
    reason = f"lost while it was calibrated: it needs about {format_bytes(needs)} and has {format_bytes(has)}"
    remedy = "give it more memory (--memory-limit), or lower train.batch_size or train.workspace_mib"
    return CalibrationFailed(worker, reason, remedy, at)


def calibration_row(member: Member, measured: Calibration) -> CalibratedWorker:
    """A calibrated worker as the log has it."""
    return CalibratedWorker(
        name=member.name,
        address=member.address,
        host=member.host,
        device=member.kind,
        processor=measured.device,
        threads=measured.threads,
        cores=measured.cores,
        memory=measured.memory,
        images_per_second=1 / measured.seconds_per_sample,
        conv_seconds=measured.conv_seconds,
        conv_fixed=measured.conv_fixed,
        rest_seconds=measured.rest_seconds,
        step_fixed=measured.step_fixed,
    )
