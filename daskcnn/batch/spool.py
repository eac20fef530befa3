"""The spool: all that is known of a queue's jobs, in one SQLite file. Every change of a state is one transaction."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from daskcnn.batch.records import (
    ACTIVE,
    SCHEMA,
    STARTABLE,
    VERSION,
    Attempt,
    Count,
    Grant,
    QueuedJob,
    State,
    Submission,
)
from daskcnn.batch.retries import Outcome, outcome
from daskcnn.batch.spool_folder import FILE, SpoolError, own_folder
from daskcnn.files import check_regular

BUSY = 30.0  # seconds that a change waits for another process's
DURABLE = "FULL"  # a change is on the disk before it counts
_COLUMNS = (
    "id, user, submitted, state, since, name, run, priority, after, workers, only, again_at, attempts, exit_code, "
    "sweep, stop, why, cancelling, signalled, epoch, accuracy"
)


class Spool:
    """The jobs of one queue. Use it in one thread; other processes may use the same folder at the same time.

    Raises SpoolError for a folder on a network, of another user, or that cannot be written.

    folder : is made if it is not there, for its owner alone. must_exist : it is not made.
    """

    def __init__(self, folder: Path, *, must_exist: bool = False) -> None:
        self.folder = folder.absolute()
        own_folder(self.folder, must_exist=must_exist)
        path = self.folder / FILE
        with suppress(FileNotFoundError):
            check_regular(path)
        try:
            self._db = sqlite3.connect(path, timeout=BUSY, isolation_level=None)
            self._db.row_factory = sqlite3.Row
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute(f"PRAGMA synchronous = {DURABLE}")
            with self._change():
                if (version := self._db.execute("PRAGMA user_version").fetchone()[0]) == 0:
                    for statement in filter(str.strip, SCHEMA.split(";")):
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA user_version = {VERSION}")
        except sqlite3.Error as error:
            raise SpoolError(path, error, "remove what is no spool, or give another folder (--spool)") from error
        if version not in (0, VERSION):
            self.close()
            reason = f"made by another version of daskcnn (tables {version}, here {VERSION})"
            raise SpoolError(path, reason, "give another folder (--spool), or use that version")

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Make a change that is on the disk at the end, or did not happen. Raises sqlite3.Error."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):  # SQLite may have rolled it back, as when the disk is full
                self._db.execute("ROLLBACK")
            raise

    # --- to see ---

    def jobs(
        self, states: Sequence[State] = ACTIVE, *, last: int | None = None, sweep: str | None = None
    ) -> list[QueuedJob]:
        """Return the jobs in these states by number; with `last` only that number of the newest. sweep: of this one."""
        marks = ",".join("?" * len(states))
        rows = self._db.execute(
            f"SELECT {_COLUMNS} FROM jobs WHERE state IN ({marks}) AND sweep = coalesce(?, sweep)"
            " ORDER BY id DESC LIMIT ?",
            (*states, sweep, -1 if last is None else last),
        ).fetchall()
        has = self._held_workers()
        return [_job(row, has.get(row["id"], ())) for row in reversed(rows)]

    def job(self, number: int) -> QueuedJob:
        """Return a job. Raises SpoolError if there is none of this number."""
        row = self._db.execute(f"SELECT {_COLUMNS} FROM jobs WHERE id = ?", (number,)).fetchone()
        if row is None:
            raise SpoolError(f"job {number}", "there is none", "`daskcnn jobs` lists those that there are")
        return _job(row, self._held_workers().get(number, ()))

    def content(self, number: int) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        """Return the job's tables as they were submitted, and paths and sources of its modules."""
        row = self._db.execute("SELECT content, modules FROM jobs WHERE id = ?", (number,)).fetchone()
        return json.loads(row["content"]), [(path, source) for path, source in json.loads(row["modules"])]

    def attempts(self, number: int) -> list[Attempt]:
        """Return the job's attempts that have ended, the oldest first."""
        rows = self._db.execute(
            "SELECT exit_code, progressed, rebooted FROM attempts WHERE job = ? AND ended IS NOT NULL ORDER BY number",
            (number,),
        )
        return [Attempt(row["exit_code"], bool(row["progressed"]), bool(row["rebooted"])) for row in rows]

    def grants(self, since: float) -> list[Grant]:
        """Return who had which worker after this time, or has it still."""
        rows = self._db.execute(
            "SELECT job, user, worker, begun, ended FROM grants JOIN jobs ON jobs.id = grants.job"
            " WHERE ended IS NULL OR ended > ? ORDER BY grants.rowid",
            (since,),
        )
        return [Grant(*row) for row in rows]

    def begun(self, number: int) -> tuple[str, int]:
        """Return the machine's boot, and the step of the newest checkpoint, at the start of a running attempt."""
        row = self._db.execute(
            "SELECT boot, step FROM attempts WHERE job = ? AND ended IS NULL ORDER BY number DESC", (number,)
        ).fetchone()
        return row["boot"], row["step"]

    def counts(self) -> dict[str, int]:
        """Return the number of jobs in each state that there are jobs in."""
        return dict(self._db.execute("SELECT state, COUNT(*) FROM jobs GROUP BY state").fetchall())

    def _held_workers(self) -> dict[int, tuple[str, ...]]:
        found: dict[int, tuple[str, ...]] = {}
        for row in self._db.execute("SELECT job, worker FROM grants WHERE ended IS NULL ORDER BY rowid"):
            found[row["job"]] = (*found.get(row["job"], ()), row["worker"])
        return found

    # --- what people ask for ---

    def add(self, submissions: Sequence[Submission], runs: Path, now: float) -> list[QueuedJob]:
        """Queue these jobs, all or none. One that is there already, by its token, is not added again.

        runs: the folder of runs whose job names none. Raises SpoolError, and sqlite3.Error for a full disk.
        """
        with self._change():
            found = [self._added(each, runs, now) for each in submissions]
        return [self.job(number) for number in found]

    def _added(self, new: Submission, runs: Path, now: float) -> int:
        if (row := self._db.execute("SELECT id FROM jobs WHERE token = ?", (new.token,)).fetchone()) is not None:
            return int(row["id"])
        for other in new.after:
            if self.job(other).state in ("failed", "cancelled"):
                raise SpoolError(f"--after {other}", f"job {other} has not been done", f"`daskcnn release {other}`")
        columns = {
            "token": new.token,
            "user": new.user,
            "submitted": now,
            "state": "held" if new.held else "queued",
            "since": now,
            "name": new.name,
            "run": new.token,  # until its number is known
            "priority": new.priority,
            "after": json.dumps(new.after),
            "workers": json.dumps({kind: [n.least, n.most] for kind, n in new.workers.items()}),
            "only": json.dumps(new.only),
            "sweep": new.sweep,
            "stop": new.stop,
            "content": json.dumps(dict(new.content)),
            "modules": json.dumps(new.modules),
        }
        marks = ",".join("?" * len(columns))
        added = self._db.execute(f"INSERT INTO jobs ({','.join(columns)}) VALUES ({marks})", (*columns.values(),))
        number = int(added.lastrowid or 0)
        folder = Path(new.folder or runs)
        name = new.name or self._free_name(folder, f"job-{number}")
        run = str(folder / name)
        with _one_writer(run):
            self._db.execute("UPDATE jobs SET name = ?, run = ? WHERE id = ?", (name, run, number))
        _refuse_other_run(run)
        return number

    def _free_name(self, folder: Path, name: str) -> str:
        """Return a name that no run has, and no job that has not ended: a new queue finds the runs of the one before.

        Jobs are free to be called `job-7` too.
        """
        names = chain([name], (f"{name}-{i}" for i in count(2)))
        taken = "SELECT 1 FROM jobs WHERE run = ? AND state IN ('queued', 'held', 'running', 'waiting')"
        return next(
            each
            for each in names
            if not _begun(folder / each) and self._db.execute(taken, (str(folder / each),)).fetchone() is None
        )

    def cancel(self, number: int, now: float, why: str = "") -> QueuedJob:
        """Cancel a job. One that runs is asked to end; asked once more, it ends without saving. Raises SpoolError."""
        with self._change():
            job = self.job(number)
            if job.state == "running":
                self._db.execute("UPDATE jobs SET cancelling = cancelling + 1, why = ? WHERE id = ?", (why, number))
            elif job.state in ACTIVE:
                self._set(number, Outcome("cancelled", "cancelled before it ran"), now)
                self._dependants_held(number, now)
            else:
                raise SpoolError(f"job {number}", f"it has ended: {job.state}", "only others can be cancelled")
        return self.job(number)

    def hold(self, number: int, now: float, why: str = "held by hand") -> QueuedJob:
        """Keep a job from being started until it is released. Raises SpoolError for one that runs or has ended."""
        with self._change():
            job = self.job(number)
            if job.state not in STARTABLE:
                raise SpoolError(f"job {number}", f"it is {job.state}", "only a job that waits can be held")
            self._set(number, Outcome("held", why), now)
        return self.job(number)

    def release(self, number: int, now: float) -> QueuedJob:
        """Queue a job that is held or waits for another attempt, or one that has failed or was cancelled.

        It waits for no job that it comes after and that was not done. One that was cancelled is not ended early by its
        sweep again. Raises SpoolError for any other.
        """
        with self._change():
            job = self.job(number)
            if job.state not in ("held", "waiting", "failed", "cancelled"):
                raise SpoolError(f"job {number}", f"it is {job.state}", "only a job that is held or failed is released")
            after = [other for other in job.after if self.job(other).state not in ("failed", "cancelled")]
            if self._last_driven(job.run) != number:
                _refuse_other_run(job.run)
            with _one_writer(job.run):
                self._set(number, Outcome("queued"), now)
            # Its user has mended the cause. Only the last failure counts from now on.
            self._db.execute("UPDATE attempts SET progressed = 1 WHERE job = ? AND number = ?", (number, job.attempts))
            self._db.execute(
                "UPDATE jobs SET after = ?, stop = ?, cancelling = 0, signalled = 0 WHERE id = ?",
                (json.dumps(after), "" if job.state == "cancelled" else job.stop, number),
            )
        return self.job(number)

    def _last_driven(self, run: str) -> int | None:
        """The job that was the last to begin an attempt at a run. If the run is there, it is this job's."""
        row = self._db.execute(
            "SELECT job FROM attempts JOIN jobs ON jobs.id = attempts.job WHERE run = ? ORDER BY attempts.rowid DESC",
            (run,),
        ).fetchone()
        return None if row is None else int(row["job"])

    # --- what the service does ---

    def begin(self, number: int, workers: Iterable[str], now: float, *, boot: str, step: int) -> bool:
        """Let a job run on these workers. Returns False if it is not to be started, or another job has one of them.

        boot: of this machine. step: of the run's newest checkpoint.
        """
        with suppress(sqlite3.IntegrityError), self._change():
            changed = self._db.execute(
                "UPDATE jobs SET state = 'running', since = ?, attempts = attempts + 1, again_at = 0, why = '',"
                " cancelling = 0, signalled = 0 WHERE id = ? AND state IN ('queued', 'waiting')",
                (now, number),
            )
            if changed.rowcount == 0:
                return False
            self._db.executemany(
                "INSERT INTO grants VALUES (?, ?, ?, NULL)", [(number, worker, now) for worker in workers]
            )
            self._db.execute(
                "INSERT INTO attempts (job, number, boot, begun, step)"
                " SELECT id, attempts, ?, ?, ? FROM jobs WHERE id = ?",
                (boot, now, step, number),
            )
            return True
        return False

    def take(self, number: int, workers: Iterable[str], now: float) -> bool:
        """Give a running job further workers. Returns False, and gives none, where another job has one of them."""
        with suppress(sqlite3.IntegrityError), self._change():
            self._db.executemany(
                "INSERT INTO grants SELECT id, ?, ?, NULL FROM jobs WHERE id = ? AND state = 'running'",
                [(worker, now, number) for worker in workers],
            )
            return True
        return False

    def give_up(self, number: int, workers: Iterable[str], now: float) -> None:
        """Free workers of a running job."""
        with self._change():
            self._db.executemany(
                "UPDATE grants SET ended = ? WHERE job = ? AND worker = ? AND ended IS NULL",
                [(now, number, worker) for worker in workers],
            )

    def never_begun(self, number: int, now: float) -> None:
        """Take back an attempt whose driver was never started, as where the service was killed before it could."""
        with self._change():
            job = self.job(number)
            if job.state != "running":
                return
            self._db.execute("DELETE FROM attempts WHERE job = ? AND number = ?", (number, job.attempts))
            self._db.execute("DELETE FROM grants WHERE job = ? AND ended IS NULL", (number,))
            self._db.execute("UPDATE jobs SET attempts = attempts - 1 WHERE id = ?", (number,))
            state: State = "cancelled" if job.cancelling else "queued"
            self._set(number, Outcome(state, "cancelled before it ran" if job.cancelling else ""), now)
            if job.cancelling:
                self._dependants_held(number, now)

    def put_off(self, number: int, why: str, now: float, seconds: float) -> None:
        """Let a job wait that could not be started."""
        with self._change():
            if self.job(number).state in STARTABLE:
                again = Outcome("waiting", f"{why}; tried again after {seconds:g} s", now + seconds)
                self._set(number, again, now)

    def explain(self, why: Mapping[int, str]) -> None:
        """Note why jobs wait."""
        known = {job.id: job.why for job in self.jobs(STARTABLE)}
        if new := [(text, number) for number, text in why.items() if known.get(number, text) != text]:
            with self._change():
                self._db.executemany("UPDATE jobs SET why = ? WHERE id = ? AND state IN ('queued', 'waiting')", new)

    def signalled(self, number: int, times: int) -> None:
        """Note that a job's driver was told to end this number of times."""
        with self._change():
            self._db.execute("UPDATE jobs SET signalled = ? WHERE id = ?", (times, number))

    def end(
        self,
        number: int,
        attempt: Attempt,
        now: float,
        *,
        reached: tuple[float, float | None] = (0.0, None),
        said: str = "",
    ) -> QueuedJob:
        """End a job's attempt, free its workers, and decide what becomes of it. Another service may have done so.

        reached: epoch and accuracy. said: the last words of its driver, if it failed.
        """
        with self._change():
            job = self.job(number)
            if job.state != "running":
                return job
            self._db.execute(
                "UPDATE attempts SET ended = ?, exit_code = ?, progressed = ?, rebooted = ?"
                " WHERE job = ? AND number = ?",
                (now, attempt.exit_code, attempt.progressed, attempt.rebooted, number, job.attempts),
            )
            self._db.execute("UPDATE grants SET ended = ? WHERE job = ? AND ended IS NULL", (now, number))
            result = outcome(self.attempts(number), now, cancelled=job.cancelling > 0)
            why = f"{result.why}: {said}" if said and result.state in ("failed", "waiting") else result.why
            why = job.why if job.why and result.state == "cancelled" else why
            self._set(number, Outcome(result.state, why, result.again_at), now)
            self._db.execute(
                "UPDATE jobs SET exit_code = ?, epoch = ?, accuracy = ? WHERE id = ?",
                (attempt.exit_code, *reached, number),
            )
            if result.state in ("failed", "cancelled"):
                self._dependants_held(number, now)
        return self.job(number)

    def _dependants_held(self, number: int, now: float) -> None:
        """Hold the jobs that come after one that will not be done."""
        for job in self.jobs(STARTABLE):
            if number in job.after:
                state = self.job(number).state
                self._set(job.id, Outcome("held", f"job {number}, which it comes after, has {_ended(state)}"), now)

    def _set(self, number: int, new: Outcome, now: float) -> None:
        self._db.execute(
            "UPDATE jobs SET state = ?, since = ?, why = ?, again_at = ? WHERE id = ?",
            (new.state, now, new.why, new.again_at, number),
        )


def _ended(state: State) -> str:
    return "been cancelled" if state == "cancelled" else state


def _job(row: sqlite3.Row, has: tuple[str, ...]) -> QueuedJob:
    values = dict(row)
    workers = {kind: Count(*span) for kind, span in json.loads(values.pop("workers")).items()}
    after, only = (tuple(json.loads(values.pop(key))) for key in ("after", "only"))
    return QueuedJob(**values, after=after, only=only, workers=MappingProxyType(workers), has=has)


@contextmanager
def _one_writer(run: str) -> Iterator[None]:
    """Raise SpoolError where another job that has not ended has the same run."""
    try:
        yield
    except sqlite3.IntegrityError as error:
        raise SpoolError(run, "another job of the queue trains this run", "choose another --name") from error


def _begun(run: Path) -> bool:
    return (run / "job.json").exists()


def _refuse_other_run(run: str) -> None:
    """Raise SpoolError for a run that began before its job: the driver would go on with it, or find it done."""
    if _begun(Path(run)):
        remedy = "choose another --name; `daskcnn release` goes on with a job that was not done"
        raise SpoolError(run, "there is a run of that name already", remedy)
