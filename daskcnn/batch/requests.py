"""Requests of people and the service's answers: plain values on both sides. A job is data: nothing of it is run."""

from __future__ import annotations

import re
import socket
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import tomli_w

from daskcnn import __version__
from daskcnn.batch.drivers import Drivers
from daskcnn.batch.progress import progress_of
from daskcnn.batch.records import ACTIVE, ENDED, RUN_NAME, Count, QueuedJob, Submission
from daskcnn.batch.spool import Spool
from daskcnn.batch.spool_folder import SpoolError
from daskcnn.errors import ClusterError, DataError, UserError, nearest
from daskcnn.show.queue_table import row_of

MOST_LOG, MOST_EVENTS = 256 << 10, 1 << 20  # bytes in an answer
LISTED = 20  # jobs that have ended in a list that is not of all
_LONGEST_USER = 64
_MOST_JOB, _MOST_MODULES, _MOST_JOBS = 4 << 20, 8 << 20, 1000


class Requests:
    """Answers requests about the jobs of a spool. The service has one, and so has a command on the service's machine.

    runs : the folder of runs whose job names none. places : in the queue, by job.
    """

    def __init__(
        self, spool: Spool, drivers: Drivers, *, runs: Path, clock: Callable[[], float], places: Mapping[int, int]
    ) -> None:
        self._spool, self._drivers, self._runs, self._clock, self._places = spool, drivers, runs, clock, places
        self._known: dict[str, Callable[..., Any]] = {
            "submit": self.submit,
            "jobs": self.jobs,
            "job": self.job,
            "logs": self.logs,
            "events": self.events,
            "cancel": self.cancel,
            "hold": self.hold,
            "release": self.release,
        }

    def answer(self, request: Any) -> dict[str, Any]:
        """Return the answer to a request, or the refusal in words. Whatever was sent, the service goes on."""
        try:
            return {"answer": self._answered(request)}
        except UserError as error:
            return {"refused": (error.exit_code, error.value, error.reason, error.remedy)}
        except (sqlite3.OperationalError, OSError) as error:
            return {"refused": (ClusterError.exit_code, str(self._spool.folder), str(error), "make room; try again")}
        except Exception as error:  # of values that no submitter of this version sends
            return {"refused": (2, "request", f"{type(error).__name__}: {error}", f"use daskcnn {__version__}")}

    def _answered(self, request: Any) -> Any:
        options = dict(request)
        if (version := options.pop("version", None)) != __version__:
            reason = f"version {version} asks; the service has {__version__}"
            raise ClusterError("daskcnn", reason, "install the same version here and there")
        return self.called(options.pop("ask"), options)

    def called(self, name: str, options: Mapping[str, Any]) -> Any:
        """Return the answer to a request by name. Raises UserError, and sqlite3.Error where the disk is full."""
        if (known := self._known.get(name)) is None:
            raise DataError(f"request {name!r:.60}", "unknown", nearest(name, self._known).removeprefix("; "))
        return known(**options)

    def submit(self, jobs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Queue jobs, all or none. Returns their numbers, and what this machine sees of their data."""
        if len(jobs) > _MOST_JOBS:
            raise SpoolError("submit", f"{len(jobs):,} jobs", f"submit at most {_MOST_JOBS:,} at once")
        submissions, seen = list[Submission](), dict[str, None]()
        for each in jobs:
            submissions.append(_submission(each))
            seen |= dict.fromkeys(_seen(submissions[-1].content, made=bool(each.get("makes_data"))))
        added = self._spool.add(submissions, self._runs, self._clock())
        return {"ids": [job.id for job in added], "seen": [*seen], "runs": [job.run for job in added]}

    def jobs(self, everything: bool = False, sweep: str = "") -> list[dict[str, Any]]:
        """Return the jobs that have not ended, and the last ones that have, or all of them."""
        last, of = None if everything or sweep else LISTED, sweep or None
        found = [*self._spool.jobs(ENDED, last=last, sweep=of), *self._spool.jobs(ACTIVE, sweep=of)]
        return [self._row(job) for job in found]

    def job(self, number: int) -> dict[str, Any]:
        """Return a job."""
        return self._row(self._spool.job(number))

    def logs(self, number: int, offset: int = 0) -> dict[str, Any]:
        """Return what a job's drivers have printed from an offset on, and whether there may come more."""
        job = self._spool.job(number)
        text, end = self._drivers.output(number, offset, MOST_LOG)
        return {"text": text, "offset": end, "more": job.state in ACTIVE or end > offset}

    def events(self, number: int, offset: int = 0) -> dict[str, Any]:
        """Return lines of the log of a job's run from an offset on, and whether there may come more."""
        job, lines = self._spool.job(number), b""
        path = Path(job.run) / "events.jsonl"
        if path.is_file():
            with open(path, "rb") as log:
                log.seek(offset)
                lines = log.read(MOST_EVENTS)
                if b"\n" not in lines:
                    lines += log.readline()
        whole = lines[: lines.rfind(b"\n") + 1]
        return {"text": whole.decode(), "offset": offset + len(whole), "more": job.state in ACTIVE or bool(whole)}

    def rows(self) -> list[list[str]]:
        """Return the jobs that have not ended, and the last ones that have, as the page shows them."""
        return [row_of(job) for job in self.jobs()]

    def cancel(self, number: int) -> dict[str, Any]:
        """Cancel a job."""
        return self._row(self._spool.cancel(number, self._clock()))

    def hold(self, number: int) -> dict[str, Any]:
        """Keep a job from starting."""
        return self._row(self._spool.hold(number, self._clock()))

    def release(self, number: int) -> dict[str, Any]:
        """Let a job that is held, or has failed, start."""
        return self._row(self._spool.release(number, self._clock()))

    def _row(self, job: QueuedJob) -> dict[str, Any]:
        """Return a job as a plain table. Nothing of what was submitted is in it but names and numbers."""
        row = {name: getattr(job, name) for name in job.__slots__}
        row["workers"] = {kind: [count.least, count.most] for kind, count in job.workers.items()}
        row |= {"after": [*job.after], "only": [*job.only], "has": [*job.has], "place": self._places.get(job.id)}
        row["epochs"] = None
        if job.state == "running":
            now = progress_of(Path(job.run))
            row |= {"epoch": now.epoch, "epochs": now.epochs, "accuracy": now.accuracy}
        return row


def _submission(sent: Mapping[str, Any]) -> Submission:
    """Return a submission as it was sent. Raises SpoolError for one that is too large, or not what it should be."""
    values = dict(sent)
    content = dict(values.pop("content"))
    for section in ("cluster", "run", "data"):
        if not isinstance(content.get(section, {}), Mapping):
            raise SpoolError(f"[{section}]", "it is no table", "write a table of keys")
    made, usual = (values.pop(key, False) for key in ("makes_data", "usual_path"))
    if made and usual and not Path(content["data"]["path"]).exists():  # the driver's own usual path counts
        content["data"] = {key: value for key, value in content["data"].items() if key != "path"}
    size = len(tomli_w.dumps(content))
    if size > _MOST_JOB:
        raise SpoolError("job", f"{size:,} bytes, more than the {_MOST_JOB:,} allowed", "make it smaller")
    modules = tuple((str(path), str(source)) for path, source in values.pop("modules", ()))
    if sum(len(source) for _, source in modules) > _MOST_MODULES:
        raise SpoolError("run.imports", f"more than {_MOST_MODULES >> 20} MiB of sources", "install the modules there")
    for path, _ in modules:
        _check_source(path)
    asked = dict(values.pop("workers", {}))
    workers = {
        str(kind): Count(int(least), None if most is None else int(most)) for kind, (least, most) in asked.items()
    }
    after, only = tuple(map(int, values.pop("after", ()))), tuple(map(str, values.pop("only", ())))
    new = Submission(content=content, modules=modules, workers=workers, after=after, only=only, **values)
    if not re.fullmatch(RUN_NAME, new.name or "job"):
        raise SpoolError(f"run.name = {new.name!r:.80}", "no name of a run", "use letters, digits and . _ -")
    if number := next((name for name in (new.name, new.sweep) if name.isdecimal()), None):
        raise SpoolError(f"run.name = {number!r:.80}", "a number is that of a job", "choose a name with a letter")
    if "\0" in new.folder:
        raise SpoolError(f"run.dir = {new.folder!r:.80}", "no folder has a NUL character in its name", "remove it")
    return replace(new, user=str(new.user)[:_LONGEST_USER])


def _check_source(path: str) -> None:
    """Raise SpoolError for a path of a module that would lie outside the job's folder, or be no source."""
    parts = PurePosixPath(path).parts
    if path.startswith("/") or ".." in parts or "\0" in path or not path.endswith(".py"):
        raise SpoolError(f"module {path!r:.80}", "no path of a source within a folder", "name modules in run.imports")


def _seen(content: Mapping[str, Any], *, made: bool) -> list[str]:
    """Return what this machine sees of a job's data, in words. Raises DataError where it does not see what is named.

    made : whether the run makes a data set that is not there.
    """
    data, host = content.get("data", {}), socket.gethostname()
    names = ("path", "archive", "images", "labels", "test_images", "test_labels")
    places = {key: str(data[key]) for key in names if data.get(key) and "://" not in str(data[key])}
    seen = []
    for key, place in places.items():
        there = Path(place).exists()
        if not there and not (key == "path" and made):
            remedy = "give a path that this machine and the workers see, or serve the queue where it is seen"
            raise DataError(f"data.{key} = {place}", f"{host}, which starts the drivers, does not see it", remedy)
        seen.append(f"data.{key} {place}: {'seen by' if there else 'to be made by'} {host}")
    return seen
