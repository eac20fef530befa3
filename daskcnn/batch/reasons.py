"""The reasons why jobs wait, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from daskcnn.batch.records import QueuedJob
from daskcnn.batch.shares import SERVES, Allotment, SharedWorker, comes_after, may_have, needs_of
from daskcnn.cluster.link.lease_table import clock_text
from daskcnn.show.text import plural, size

_LISTED = 8


def reasons(
    jobs: Iterable[QueuedJob],
    workers: Iterable[SharedWorker],
    allotment: Allotment,
    *,
    now: float,
    memory: Mapping[int, float] | None = None,
    when: Callable[[float, float], str] = clock_text,
) -> dict[int, str]:
    """Return why each job of an allotment waits, in the order of the queue.

    jobs, workers, now, memory : as `share` had them. when : a time in words, given the time and now.
    """
    told = _Reasons(jobs, workers, allotment, memory or {}, now, when)
    return {job: told.reason(job) for job in allotment.waits}


class _Reasons:
    """Has who holds which worker, in words."""

    def __init__(
        self,
        jobs: Iterable[QueuedJob],
        workers: Iterable[SharedWorker],
        allotment: Allotment,
        memory: Mapping[int, float],
        now: float,
        when: Callable[[float, float], str],
    ) -> None:
        self._jobs = {job.id: job for job in jobs}
        self._workers, self._memory, self._now, self._when = [*workers], memory, now, when
        self._given, self._servers = allotment.workers, allotment.servers
        self._kept = {name: job for job, kept in allotment.waits.items() for name in kept}
        self._starts = {name: job for job, own in allotment.starts.items() for name in own}
        self._has = {name: job for job in self._jobs.values() if job.state == "running" for name in job.has}

    def reason(self, id_: int) -> str:
        """Return why a job waits."""
        job = self._jobs[id_]
        if job.cancelling:
            return "is being cancelled"
        if job.state == "held":
            return "held"
        if before := comes_after(job, self._jobs):
            return f"after {'job' if len(before) == 1 else 'jobs'} {', '.join(map(str, before))}"
        if job.state == "waiting" and job.again_at > self._now:
            return f"is tried again at {self._when(job.again_at, self._now)}"
        if given := self._given.get(id_):
            return f"starts when they are given up: {self._held(job, given)}"
        return "; ".join([*self._never(job)] or [*self._taken(job)] or [*self._server(id_)])

    def _never(self, job: QueuedJob) -> Iterator[str]:
        """Yield what all workers that are there are too few for."""
        patterns = ", ".join(job.only)
        for kind, count in needs_of(job).items():
            able = [worker for worker in self._workers if may_have(job, kind, worker)]
            if not able and count.least:
                yield f"no {_worker(kind)} {f'matches {patterns}' if job.only else 'is there'}"
            elif len(able) < count.least:
                named = f" by the name {patterns}" if job.only else ""
                yield f"needs {plural(count.least, _worker(kind))}{named}: the cluster has {len(able)}"

    def _taken(self, job: QueuedJob) -> Iterator[str]:
        """Yield what others have of the workers that a job may have."""
        for kind, count in needs_of(job).items():
            able = [worker.name for worker in self._workers if may_have(job, kind, worker)]
            free = [name for name in able if self._holder(job, name) in ("free", "kept for it")]
            if len(free) < count.least:
                yield f"waits for {plural(count.least, _worker(kind))}: {self._held(job, able)}"

    def _server(self, id_: int) -> Iterator[str]:
        """Yield what is missing for the job's server."""
        rooms = ", ".join(
            f"{worker.name} has {size(max(0.0, self._room(worker)))} left"
            for worker in self._workers
            if worker.kind == SERVES
        )
        yield f"waits for {size(self._memory.get(id_, 0))} for its server: {rooms}"

    def _room(self, worker: SharedWorker) -> float:
        given = {job for job, name in self._servers.items() if name == worker.name}
        return worker.memory - sum(self._memory.get(job, 0) for job in given | {*worker.serves})

    def _held(self, job: QueuedJob, names: Iterable[str]) -> str:
        """Workers and their holders: 'desk-1, desk-2 are job 7's since 12:30:00; desk-3 is free'."""
        found = dict[str, list[str]]()
        for name in names:
            found.setdefault(self._holder(job, name), []).append(name)
        return "; ".join(f"{_named(own)} {'is' if len(own) == 1 else 'are'} {holder}" for holder, own in found.items())

    def _holder(self, job: QueuedJob, name: str) -> str:
        if (owner := self._has.get(name)) is not None:
            return f"job {owner.id}'s since {self._when(owner.since, self._now)}"
        if (next_one := self._starts.get(name, self._kept.get(name))) not in (None, job.id):
            return f"{'given to' if name in self._starts else 'kept for'} job {next_one}"
        return "kept for it" if name in self._kept else "free"


def _worker(kind: str) -> str:
    return f"{kind} worker".strip()


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
