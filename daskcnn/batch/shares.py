"""Values of sharing: workers, the numbers that it goes by, and the workers that each job has in the end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

from daskcnn.batch.records import Count, QueuedJob
from daskcnn.cluster.link.lease_table import named_by

Gain: TypeAlias = Callable[[QueuedJob, Collection[str]], float]
"""Seconds that a job takes to its accuracy on workers of these names. Only the ratios of one job's times count."""

SERVES = "ps"
"""Kind of a worker that holds parameter servers, of as many jobs as its memory has room for, and does not train."""
_WHATEVER = {"": Count(1, None)}  # what a job asks for that gives no numbers: one worker will do, all are of use


@dataclass(frozen=True, slots=True)
class SharedWorker:
    """A worker that is there.

    kind : `cpu`, `gpu` or `ps`. speed : images a second or the like; faster ones are given first. memory : bytes of a
    `ps` worker. serves : jobs whose parameter servers it holds now.
    """

    name: str
    kind: str = "cpu"
    speed: float = 1.0
    memory: float = inf
    serves: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SharingRules:
    """Numbers that the policy goes by.

    half_life : seconds in which half of a user's use is forgotten. ahead : seconds of use that a worker counts for as
    soon as it is given. aged : seconds after which a user's oldest job goes first. pays : part of a job's time that
    another worker has to save. moves : times what it costs that a worker has to save elsewhere. elastic : running jobs
    give up workers and take others.
    """

    half_life: float = 86_400.0
    ahead: float = 600.0
    aged: float = 1800.0
    pays: float = 0.01
    moves: float = 1.2
    elastic: bool = True


@dataclass(frozen=True, slots=True)
class Allotment:
    """The workers of each job.

    Attributes
    ----------
    workers : of each job that runs or starts, in the end.
    starts : jobs that start now, in order, each with the workers that are free. Others wait until theirs are given up.
    gives, takes : workers that a running job gives up, and those that it takes now.
    servers : of jobs that start, and of those that room is kept for, the worker set apart for servers that has it.
    waits : jobs that do not start now, in the order of the queue, each with the workers that are kept for it.
    """

    workers: Mapping[int, tuple[str, ...]]
    starts: Mapping[int, tuple[str, ...]]
    gives: Mapping[int, tuple[str, ...]]
    takes: Mapping[int, tuple[str, ...]]
    servers: Mapping[int, str]
    waits: Mapping[int, tuple[str, ...]]


def by_number(job: QueuedJob, workers: Collection[str]) -> float:
    """Return seconds that halve as workers double: the gain where nothing is known of a job."""
    return 1 / len(workers)


def needs_of(job: QueuedJob) -> Mapping[str, Count]:
    """Return the numbers of workers that a job asks for, by kind; the kind "" is any."""
    return job.workers or _WHATEVER


def may_have(job: QueuedJob, kind: str, worker: SharedWorker) -> bool:
    """Return True if a worker may be one of those of this kind that a job asks for."""
    return worker.kind != SERVES and kind in ("", worker.kind) and named_by(job.only, worker.name)


def comes_after(job: QueuedJob, jobs: Collection[int]) -> tuple[int, ...]:
    """Return which of these jobs, none of which has ended, the job comes after."""
    return tuple(each for each in job.after if each in jobs)
