"""A queue of jobs in simulated time, by the policy that the service goes by. No Dask and no clock."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from daskcnn.batch.past_use import oldest_since
from daskcnn.batch.policy import share
from daskcnn.batch.records import Grant, QueuedJob
from daskcnn.batch.shares import Allotment, Gain, SharedWorker, SharingRules


@dataclass(frozen=True, slots=True)
class PlayedJob:
    """A job of a queue that was played. began, ended: seconds since the queue began; None if it never did."""

    job: QueuedJob
    began: float | None
    ended: float | None


@dataclass(frozen=True, slots=True)
class PlayedQueue:
    """The course of a queue: its jobs, the workers that each had and when, and the last word of the policy."""

    jobs: tuple[PlayedJob, ...]
    grants: tuple[Grant, ...]
    last: Allotment


class QueuePlay:
    """Plays a queue. Times are seconds since it began.

    Parameters
    ----------
    jobs : with the times at which they come, as `submitted`
    seconds : that a job takes from beginning to end on some workers
    change : seconds that a job stands still at its start, and when it is given other workers
    """

    def __init__(
        self,
        jobs: Iterable[QueuedJob],
        workers: Sequence[SharedWorker],
        seconds: Gain,
        *,
        change: float = 0.0,
        rules: SharingRules | None = None,
    ) -> None:
        self._now = 0.0
        self._jobs: dict[int, QueuedJob] = {}  # that have come and not ended
        self._coming = sorted(jobs, key=lambda job: (job.submitted, job.id))
        self._workers, self._seconds, self._change, self._rules = workers, seconds, change, rules or SharingRules()
        self._played = {job.id: PlayedJob(job, None, None) for job in self._coming}
        self._left: dict[int, tuple[float, float]] = {}  # of a job: the part to be done, and from when on it is
        self._had: list[Grant] = []
        self._has: dict[str, Grant] = {}  # by worker

    def run(self, until: float = inf) -> PlayedQueue:
        """Play until no job runs and none comes, or up to a time."""
        last = self._step()
        while (then := self._next()) < until:
            self._now = then
            last = self._step()
        return PlayedQueue((*self._played.values(),), (*self._grants(),), last)

    def _step(self) -> Allotment:
        """Let jobs end and come whose time it is, and carry out what the policy says. Returns its last word."""
        for id_ in [id_ for id_ in self._left if self._ends(id_) <= self._now]:
            self._end(id_)
        while self._coming and self._coming[0].submitted <= self._now:
            job = self._coming.pop(0)
            self._jobs[job.id] = replace(job, since=self._now)
        while (said := self._said()).starts or said.gives or said.takes:
            for id_ in {**said.gives, **said.takes, **said.starts}:
                self._change_workers(id_, said.gives.get(id_, ()), said.takes.get(id_, said.starts.get(id_, ())))
        return said

    def _grants(self) -> list[Grant]:
        return [*self._had, *self._has.values()]

    def _said(self) -> Allotment:
        return share(
            self._jobs.values(), self._workers, self._grants(), now=self._now, gain=self._seconds, rules=self._rules
        )

    def _next(self) -> float:
        """When something happens next: a job comes, ends, or has aged."""
        waiting = [job for job in self._jobs.values() if job.state == "queued"]
        aged = (at + self._rules.aged for at in oldest_since(waiting, self._grants()).values())
        coming = [self._coming[0].submitted] if self._coming else []
        return min([*coming, *map(self._ends, self._left), *(at for at in aged if at > self._now)], default=inf)

    def _ends(self, id_: int) -> float:
        left, at = self._left[id_]
        job = self._jobs[id_]
        return at + left * self._seconds(job, job.has) if job.has else inf

    def _change_workers(self, id_: int, gone: Collection[str], new: Collection[str]) -> None:
        job = self._jobs[id_]
        if job.state != "running":
            job = replace(job, state="running", since=self._now)
            self._played[id_] = replace(self._played[id_], began=self._now)
            self._left[id_] = 1.0, self._now
        left, at = self._left[id_]
        if self._now > at:
            left -= (self._now - at) / self._seconds(job, job.has)
        self._left[id_] = left, max(self._now, at) + self._change
        self._free(gone)
        self._has |= {name: Grant(id_, job.user, name, self._now) for name in new}
        self._jobs[id_] = replace(job, has=(*(name for name in job.has if name not in gone), *new))

    def _free(self, workers: Iterable[str]) -> None:
        self._had += [replace(self._has.pop(name), ended=self._now) for name in workers]

    def _end(self, id_: int) -> None:
        self._free(self._jobs.pop(id_).has)
        del self._left[id_]
        self._played[id_] = replace(self._played[id_], ended=self._now)
