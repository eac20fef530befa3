"""The run directory: all that a run leaves behind, for reports and for `--resume`.

job.json           the resolved job
environment.json   Python, packages, processor, command line
events.jsonl       one JSON object a line: "event", "at" and the event's own fields
summary.json       how it ended
checkpoints/       weights and everything else that resuming needs
lock               held by the driver that writes the run
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import distributions, version
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from filelock import FileLock, Timeout

from daskcnn.arrays import cpu_count, device_profile
from daskcnn.documents import Bounds, read_json, write_json
from daskcnn.errors import DataError, InUse, JobError
from daskcnn.events import Event, RunStarted
from daskcnn.files import SEEN, check_regular, open_regular, write_synced
from daskcnn.runs.log import EventLog, events_in, read_events

if TYPE_CHECKING:
    from daskcnn.job.tables import Job

Warn = Callable[[str], None]
_logger = logging.getLogger("daskcnn")
JOB_BOUNDS = Bounds(size=4 << 20, values=50_000, tables=20_000)
"""Bounds of a resolved job: a network of thousands of layers."""
_SUMMARY_BOUNDS = Bounds(size=16 << 20, values=100_000, tables=20_000)
_WRITABLE = "set run.dir (--run-dir) to a folder that may be written and has room"


def near(path: Path) -> str:
    """Return the end of a message about no run: a run of that name in the usual folder, if there is one."""
    found = Path("runs") / path
    return f"; did you mean {found}?" if (found / "job.json").is_file() else ""


class RunDirectory:
    """One run's directory. Made by `create` or `open`; a writer holds its lock until `close`."""

    def __init__(self, path: Path, *, writable: bool, warn: Warn | None = None) -> None:
        self.path = path
        self._warn = warn or _logger.warning
        self._failing = False
        self._log: EventLog | None = None
        self._documents: dict[str, Mapping[str, Any]] = {}  # as written: they may have to be written anew
        self._device = _device_of(path)
        self._lock = _Lock(path) if writable else None
        if writable:
            try:
                self._log = EventLog(path / "events.jsonl")
            except OSError:
                self.close()
                raise

    @classmethod
    def create(
        cls, root: str | Path, name: str | None = None, *, strategy: str, now: datetime, warn: Warn | None = None
    ) -> Self:
        """Make `root/name`, or `root/<local time>-<strategy>` under a free name, and hold its lock. Raises DataError.

        warn: is told if an event cannot be logged.
        """
        root = Path(root)
        try:
            root.mkdir(parents=True, exist_ok=True)
            stem = f"{now.astimezone():%Y-%m-%dT%H-%M-%S}-{strategy}"
            path = _numbered_folder(root, stem) if name is None else _named_folder(root, name)
            (path / "checkpoints").mkdir()
            return cls(path, writable=True, warn=warn)
        except OSError as error:
            raise DataError(f"run directory in {root}", error.strerror or error, _WRITABLE) from error

    @classmethod
    def open(cls, path: str | Path, *, writable: bool = False, warn: Warn | None = None) -> Self:
        """Open an existing run to read or, if `writable`, to go on under its lock and with its log repaired.

        Raises DataError if it is no run, another driver writes it, or it cannot be written.
        """
        path = Path(path)
        try:
            if not (path / "job.json").is_file():
                remedy = f"give one that a run made{near(path)}"
                reason = "it has no job.json" if path.exists() else "nothing is there"
                raise DataError(path, f"not a run directory ({reason})", remedy)
            found = cls(path, writable=writable, warn=warn)
        except OSError as error:
            remedy = "make it writable to resume" if writable else SEEN
            raise DataError(f"run directory {path}", error.strerror or error, remedy) from error
        if writable:
            with suppress(DataError):  # who reads the job is told
                found._documents["job.json"] = found.job()
        return found

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    def write_job(self, job: Mapping[str, Any]) -> None:
        """Keep the resolved job. Raises DataError if it cannot be written."""
        self._write_at_start("job.json", job)

    def reopen(self) -> None:
        """Drop the summary of a run that goes on: it may be killed. That of a run that is done stays."""
        with suppress(DataError):
            if (self.summary() or {}).get("status") == "done":
                return
        (self.path / "summary.json").unlink(missing_ok=True)

    def lengthen(self, job: Mapping[str, Any]) -> None:
        """Keep a job of more epochs: the run is not done any more. Raises DataError."""
        (self.path / "summary.json").unlink(missing_ok=True)
        self.write_job(job)

    def write_environment(self, command: Sequence[str]) -> None:
        """Keep the run's environment and command line. Raises DataError."""
        self._write_at_start("environment.json", environment(command))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Keep the summary. Raises OSError."""
        write_json(self.path / "summary.json", summary)

    @property
    def in_place(self) -> bool:
        """True if a writer's directory is still there: it may have been removed, or its disk unmounted."""
        return self._log is not None and self._log.in_place

    def restore(self) -> None:
        """Write the run anew at its path after it was removed: lock, job, environment and log, but no checkpoint.

        Raises OSError if it cannot be written, or its disk is not mounted; InUse if another process has it now.
        """
        if self.in_place:
            return
        if not self.disk_is_there:
            raise OSError(errno.ENODEV, "its disk is not mounted")
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        if self._lock is None or not self._lock.in_place:
            lock = _Lock(self.path, None if self._lock is None else self._lock.since)
            if self._lock is not None:
                self._lock.release()
            self._lock = lock
        assert self._log is not None, "opened to write"
        log = self._written_to(self.path, self._log)
        self._log.close()
        self._log = log

    @property
    def disk_is_there(self) -> bool:
        """True if the run's path leads to the same disk as before, and not to the one below an unmounted disk."""
        return _device_of(self.path) == self._device

    def copied_to(self, root: Path) -> Self:
        """Copy the run without its checkpoints to a new folder in `root`, open for writing. Raises DataError."""
        assert self._log is not None, "opened to write"
        path = None
        try:
            root.mkdir(parents=True, exist_ok=True)
            path = _numbered_folder(root, self.path.name)
            (path / "checkpoints").mkdir()
            self._written_to(path, self._log).close()
            copy = type(self)(path, writable=True, warn=self._warn)
        except OSError as error:
            if path is not None:
                shutil.rmtree(path, ignore_errors=True)
            raise DataError(f"{path or root}: {error.strerror or error}; {_WRITABLE}") from error
        copy._documents = dict(self._documents)
        return copy

    def _written_to(self, path: Path, log: EventLog) -> EventLog:
        for name, value in self._documents.items():
            write_json(path / name, value)
        temporary = path / ".events.jsonl.tmp"
        write_synced(temporary, log.content())
        os.replace(temporary, path / "events.jsonl")
        return EventLog(path / "events.jsonl")

    def flush(self) -> None:
        """Write the events that could not be written so far. Raises OSError if they still cannot."""
        if self._log is not None:
            self._log.flush()

    def _write_at_start(self, name: str, value: Mapping[str, Any]) -> None:
        self._documents[name] = value
        try:
            write_json(self.path / name, value)
        except OSError as error:
            raise DataError(self.path / name, error.strerror or error, _WRITABLE) from error

    def job(self) -> dict[str, Any]:
        """Return the resolved job of the run. Raises DataError if it is damaged."""
        return self._read("job.json", "start the run anew", JOB_BOUNDS)

    def summary(self) -> dict[str, Any] | None:
        """Return the summary; None if the run goes on or was killed. Raises DataError if it is damaged."""
        if not (self.path / "summary.json").exists():
            return None
        return self._read("summary.json", "remove it, and resume the run to have it written again", _SUMMARY_BOUNDS)

    def _read(self, name: str, remedy: str, bounds: Bounds) -> dict[str, Any]:
        found = read_json(self.path / name, remedy=remedy, bounds=bounds)
        if not isinstance(found, dict):
            raise DataError(self.path / name, "not a JSON object", remedy)
        return found

    def events(self) -> list[Event]:
        """Return every event logged so far. Raises DataError if the log is damaged before its last line."""
        path = self.path / "events.jsonl"
        return read_events(path) if self._log is None else events_in(BytesIO(self._log.content()), path)

    def log(self, event: Event, at: datetime | None = None) -> None:
        """Append an event with its time, unless it has one; now by default.

        A full disk does not end a run: events are kept in memory, and `warn` is told once each time the log fails.
        """
        if self._log is None:
            raise RuntimeError(f"{self.path}: opened for reading; open it with writable=True to log")
        try:
            self._log.append(event, at or datetime.now(UTC))
            self._failing = False
        except OSError as error:
            was_failing, self._failing = self._failing, True  # set before warn, which may log in its turn
            if not was_failing:
                reason = error.strerror or error
                self._warn(f"{self.path / 'events.jsonl'}: {reason}; events are kept in memory until it has room")

    def close(self) -> None:
        """Close the log and give the lock back; the directory stays."""
        if self._log is not None:
            self._log.close()
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_written(run: Path) -> bool:
    """Return True if a driver writes the run now."""
    try:
        with open_regular(run / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (OSError, DataError) as error:
        return isinstance(error, BlockingIOError)
    return False


def begun(run: Path, events: Sequence[Event]) -> bool:
    """Return True if the driver that writes the run has started it; until then it waits for scheduler or workers."""
    with suppress(OSError, DataError, ValueError), open_regular(run / "lock") as lock:
        since = datetime.fromisoformat(lock.read(200).decode().strip().partition(" since ")[2]).timestamp()
        return any(isinstance(event, RunStarted) and (event.at or 0.0) >= since for event in events)
    return True  # of a version that does not say since when, or of a full disk


def find_latest(root: str | Path) -> Path | None:
    """Return the run under `root` that was written to last; None if there is none."""

    def written(run: Path) -> int:
        log = run / "events.jsonl"
        return (log if log.exists() else run / "job.json").stat().st_mtime_ns

    runs = [path.parent for path in Path(root).glob("*/job.json")]
    return max(runs, key=lambda run: (written(run), run.name), default=None)


def environment(command: Sequence[str]) -> dict[str, Any]:
    """Return the environment of a run: Python, operating system, processor, versions of packages, command line."""
    cpu = device_profile("cpu", cpu_count())
    return {
        "daskcnn": version("daskcnn"),
        "python": sys.version,
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpu": {"name": cpu.name, "threads": cpu.threads, "memory": cpu.memory},
        "command": list(command),
        "packages": _packages(),
    }


@cache
def _packages() -> dict[str, str]:
    """Versions by name. Read once in a process: each has a file to be parsed."""
    packages = {d.metadata["Name"]: d.version for d in distributions()}
    return {name: packages[name] for name in sorted(filter(None, packages))}


def _named_folder(root: Path, name: str) -> Path:
    if not name.strip(". ") or Path(name).name != name or not name.isprintable():
        raise DataError(f"run name {name!r}", "not a file name", "set run.name (--name) to one without a slash")
    path = root / name
    try:
        path.mkdir()
    except FileExistsError:
        is_run = (path / "job.json").exists()
        remedy = f"go on with it by --resume {path}, or choose" if is_run else "remove it, or choose"
        raise DataError(path, "exists already", f"{remedy} another name with --name") from None
    return path


def _numbered_folder(root: Path, stem: str) -> Path:
    """A new folder `root/stem`, or with -2, -3, … behind it where that is taken."""
    path, number = root / stem, 1
    while True:
        with suppress(FileExistsError):
            path.mkdir()
            return path
        number += 1
        path = root / f"{stem}-{number}"


def _device_of(path: Path) -> int | None:
    """The disk that the path, or the nearest folder above it that is there, lies on."""
    for folder in (path.absolute(), *path.absolute().parents):
        with suppress(OSError):
            return os.stat(folder).st_dev
    return None


_LOOKED_AT = 0.5
"""Seconds for which a lock is tried for: who looks whether a run is written has it for a moment (`is_written`)."""


class _Lock:
    """A run's lock, freed by the system when the process ends. Raises InUse if another process has it.

    since: when the process took it, where the file is written anew.
    A file system without locks gets no soft lock, a mere file: a killed driver would leave it behind.
    """

    def __init__(self, run: Path, since: str | None = None) -> None:
        self._file = run / "lock"
        with suppress(FileNotFoundError):
            check_regular(self._file)
        self._held = FileLock(self._file, thread_local=False, fallback_to_soft=False)
        try:
            self._held.acquire(timeout=_LOOKED_AT, poll_interval=0.02)
        except Timeout:
            owner = ""
            with suppress(OSError), open_regular(self._file) as lock:
                owner = lock.read(200).decode(errors="replace").strip()
            reason = f"being written by {owner or 'another process'}"
            raise InUse(run, reason, "stop that one, or start a run of another name") from None
        self.since = since or datetime.now(UTC).isoformat(timespec="milliseconds")
        with suppress(OSError):  # naming the owner is a courtesy: a full disk must not stop a run from resuming
            owner = f"process {os.getpid()} on {socket.gethostname()} since {self.since}\n"
            self._file.write_text(owner, encoding="utf-8")
        self._stat = os.stat(self._file)

    @property
    def in_place(self) -> bool:
        """True if the file at the path is the locked one: no other gets its inode while it is open."""
        try:
            return os.path.samestat(os.stat(self._file), self._stat)
        except OSError:
            return False

    def release(self) -> None:
        """Give the lock back; the file stays."""
        self._held.release()


def kept_job(run: RunDirectory) -> Job:
    """Return the job of an earlier run. Raises DataError or JobError if its file is damaged or of another version."""
    from daskcnn.job.resolve import resolve  # what lists runs needs no job

    try:
        job = resolve(run.job())
    except JobError as error:
        raise JobError([f"{run.path / 'job.json'}: {problem}" for problem in error.problems]) from error
    return without_archive(job)


def without_archive(job: Job) -> Job:
    """Return the job without the archive of its data set where that is there: the archive has done its work."""
    if Path(job.data.path or "").exists():
        return job.model_copy(update={"data": job.data.model_copy(update={"archive": None})})
    return job
