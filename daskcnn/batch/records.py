"""Jobs of a queue as values, and the tables that keep them. No Dask and no clock: times are arguments.

Times are seconds since 1970. A worker is known by its name, as `cluster.only` has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

State: TypeAlias = Literal["queued", "held", "running", "waiting", "done", "failed", "cancelled"]
"""State of a job. `waiting`: it has been tried, and is tried again when its time has come."""
STARTABLE: tuple[State, ...] = ("queued", "waiting")
ACTIVE: tuple[State, ...] = ("queued", "held", "running", "waiting")
ENDED: tuple[State, ...] = ("done", "failed", "cancelled")


RUN_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
"""Pattern of a run's name, as `run.name` has it."""


@dataclass(frozen=True, slots=True)
class Count:
    """Workers of one kind: a job begins with `least` of them, and may have up to `most`; None: any number."""

    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job of the queue.

    Attributes
    ----------
    id : its number; later jobs have higher ones.
    user : the submitter's name, by which shares are fair. It is no boundary.
    submitted : when it came into the queue; since : when it came into its state.
    name : of its run, for people. run : the run's folder.
    priority : jobs of one user with a higher one go first.
    after : jobs that have to be done first.
    workers : numbers by kind, `cpu` and `gpu`; where it is empty, any one worker will do and all are of use.
    only : patterns of the names of workers that it may have; any if there are none.
    has : names of the workers that it has now, while it runs.
    again_at : when it may be tried again, if it is `waiting`.
    attempts : times that it was started. exit_code : of the last one that ended.
    sweep : name of the sweep that it is part of; empty for a job by itself. stop : `asha` if it ends early where
        others of its sweep are better.
    why : why it waits, is held or has failed, in words.
    cancelling : times that it was asked to end while it ran; signalled : times that its driver was told so.
    epoch, accuracy : how far it had trained when its last attempt ended, and what it reached on validation samples.
    """

    id: int
    user: str
    submitted: float
    state: State = "queued"
    since: float = 0.0
    name: str = ""
    run: str = ""
    priority: int = 0
    after: tuple[int, ...] = ()
    workers: Mapping[str, Count] = field(default_factory=lambda: MappingProxyType({}))
    only: tuple[str, ...] = ()
    has: tuple[str, ...] = ()
    again_at: float = 0.0
    attempts: int = 0
    exit_code: int | None = None
    sweep: str = ""
    stop: str = ""
    why: str = ""
    cancelling: int = 0
    signalled: int = 0
    epoch: float = 0.0
    accuracy: float | None = None

    @property
    def submission(self) -> tuple[str, str, float]:
        """Sweep, user and time: all jobs of one submission have the same. Others may use the sweep's name again."""
        return self.sweep, self.user, self.submitted


@dataclass(frozen=True, slots=True)
class Submission:
    """A job on its way into the queue.

    Attributes
    ----------
    token : the submitter's own mark of it; the same one again is the same job.
    folder : that holds its run; empty for the one of the service. name : of the run; empty for one by its number.
    content : the job's tables. modules : paths and sources of the modules of its `run.imports`.
    The other ones are those of `QueuedJob`.
    """

    token: str
    user: str
    content: Mapping[str, Any]
    folder: str = ""
    name: str = ""
    priority: int = 0
    after: tuple[int, ...] = ()
    workers: Mapping[str, Count] = field(default_factory=lambda: MappingProxyType({}))
    only: tuple[str, ...] = ()
    sweep: str = ""
    stop: str = ""
    modules: tuple[tuple[str, str], ...] = ()
    held: bool = False


@dataclass(frozen=True, slots=True)
class Grant:
    """A worker that a job of this user had, or has, from `begun` to `ended`; None: it has it still."""

    job: int
    user: str
    worker: str
    begun: float
    ended: float | None = None


@dataclass(frozen=True, slots=True)
class Attempt:
    """A start of a job that has ended.

    Attributes
    ----------
    exit_code : of its driver; None where none was left, as after a crash of the machine.
    progressed : it has kept more of the run than the attempts before it.
    rebooted : the machine was started again meanwhile.
    """

    exit_code: int | None
    progressed: bool = False
    rebooted: bool = False


VERSION = 1
"""Version of the tables below. A spool of another one is refused."""

SCHEMA = """
CREATE TABLE jobs (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    token TEXT NOT NULL UNIQUE,               -- of the submission: one that is sent twice is one job
    user TEXT NOT NULL,
    submitted REAL NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('queued', 'held', 'running', 'waiting', 'done', 'failed', 'cancelled')),
    since REAL NOT NULL,
    name TEXT NOT NULL,
    run TEXT NOT NULL,
    priority INTEGER NOT NULL,
    after TEXT NOT NULL,                      -- JSON: [id, ...]
    workers TEXT NOT NULL,                    -- JSON: {kind: [least, most or null]}
    only TEXT NOT NULL,                       -- JSON: [pattern, ...]
    again_at REAL NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0,
    exit_code INTEGER,
    sweep TEXT NOT NULL DEFAULT '',
    stop TEXT NOT NULL DEFAULT '',
    why TEXT NOT NULL DEFAULT '',
    cancelling INTEGER NOT NULL DEFAULT 0,    -- times that somebody has asked it to end
    signalled INTEGER NOT NULL DEFAULT 0,     -- times that its driver was told so
    epoch REAL NOT NULL DEFAULT 0,            -- trained when its last attempt ended
    accuracy REAL,
    content TEXT NOT NULL,                    -- JSON: the tables of the job as they were submitted
    modules TEXT NOT NULL DEFAULT '[]'        -- JSON: [[path, source], ...] of the modules of run.imports
) STRICT;
CREATE INDEX jobs_by_state ON jobs (state);
CREATE UNIQUE INDEX jobs_by_run ON jobs (run) WHERE state IN ('queued', 'held', 'running', 'waiting');

CREATE TABLE attempts (
    job INTEGER NOT NULL REFERENCES jobs (id),
    number INTEGER NOT NULL,
    boot TEXT NOT NULL,                       -- of the machine: tells whether it was started again meanwhile
    begun REAL NOT NULL,
    step INTEGER NOT NULL,                    -- of the newest checkpoint when it began
    ended REAL,
    exit_code INTEGER,
    progressed INTEGER NOT NULL DEFAULT 0,
    rebooted INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (job, number)
) STRICT;

CREATE TABLE grants (
    job INTEGER NOT NULL REFERENCES jobs (id),
    worker TEXT NOT NULL,
    begun REAL NOT NULL,
    ended REAL
) STRICT;
CREATE INDEX grants_by_job ON grants (job);
CREATE INDEX grants_by_end ON grants (ended);
CREATE UNIQUE INDEX one_job_a_worker ON grants (worker) WHERE ended IS NULL;
"""
