"""The workers of a cluster shared among jobs: a pure function of jobs, workers and their past. No Dask and no clock.

`share` looks at everything anew each time, and keeps nothing. Its caller carries out what it says, and calls it again
when a job comes or ends, when a worker comes or goes, and now and then because jobs age.

1. A running job keeps its workers, but for those beyond its most. One that has less than its least is filled up first.
   A worker that a job was asked to give up may be another's, which begins with it once it is free.
2. Waiting jobs get turns. The next turn is that of the user who used least lately: worker-seconds, of which half are
   forgotten in every `half_life`, and `ahead` more for each worker that the user's jobs have now. The user's job of the
   highest priority goes first, then the oldest. A job goes before all others once it has been its user's oldest for
   `aged`, and before other such jobs that have been so for less long. It counts from when it became the oldest:
   otherwise a user with a thousand jobs would always be first.
3. At its turn a job gets its least or nothing: of free workers, and of those that other jobs have beyond their least,
   the one by which the time of its job, times that of the new one, grows least. Where there are too few, the next job
   has its turn. The workers that an aged job may have are kept for it as they become free, so that no stream of small
   jobs keeps a large one waiting.
4. Idle workers go to the job that gains most: whose time another worker shortens by the largest part. From one job to
   another a worker goes only where it gains `moves` times what it costs. So everything comes to rest.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import inf, log

from daskcnn.batch.past_use import oldest_since, used
from daskcnn.batch.records import ACTIVE, STARTABLE, Grant, QueuedJob
from daskcnn.batch.retries import UNUSABLE
from daskcnn.batch.shares import (
    SERVES,
    Allotment,
    Gain,
    SharedWorker,
    SharingRules,
    by_number,
    comes_after,
    may_have,
    needs_of,
)

_LEAST = 1e-9
_CLEARLY = 1.25  # times the speed of another worker that make one the faster


def share(
    jobs: Iterable[QueuedJob],
    workers: Iterable[SharedWorker],
    grants: Iterable[Grant] = (),
    *,
    now: float,
    gain: Gain = by_number,
    memory: Mapping[int, float] | None = None,
    leaving: Mapping[str, int] | None = None,
    fixed: Collection[int] = (),
    rules: SharingRules | None = None,
) -> Allotment:
    """Return who gets which workers now.

    Parameters
    ----------
    jobs : all that have not ended. What one of them comes after has ended well if it is not among them.
    workers : all that are there; of equal ones the first is given first.
    grants : workers that jobs had, back to some half-lives ago, and have.
    now : the time, by the clock of jobs and grants.
    memory : bytes that a job's parameter server takes, by the job's id.
    leaving : workers that a job was asked to give up and still has, with its id.
    fixed : running jobs whose workers cannot change.
    """
    sharing = _Sharing(jobs, workers, [*grants], now, gain, memory or {}, leaving or {}, fixed, rules or SharingRules())
    sharing.settle()
    return sharing.allotment()


class _Sharing:
    """The state of one call: who has which worker, and which are kept for whom."""

    def __init__(
        self,
        jobs: Iterable[QueuedJob],
        workers: Iterable[SharedWorker],
        grants: Sequence[Grant],
        now: float,
        gain: Gain,
        memory: Mapping[int, float],
        leaving: Mapping[str, int],
        fixed: Collection[int],
        rules: SharingRules,
    ) -> None:
        self._leaving, self._fixed = leaving, fixed
        self._jobs = {job.id: job for job in sorted(jobs, key=lambda job: job.id) if job.state in ACTIVE}
        self._workers = {worker.name: worker for worker in workers}
        self._now, self._gain, self._memory, self._rules = now, gain, memory, rules
        self._used = used(grants, now, rules.half_life)
        self._ready = {job.id: job for job in self._jobs.values() if self._is_ready(job)}
        self._order = self._orders_of_choice(grants)
        self._since = oldest_since(filter(self._is_possible, self._ready.values()), grants)
        self._given: dict[int, list[str]] = {}
        self._owner: dict[str, int] = {}
        self._held = Counter[str]()  # workers that each user's jobs have
        self._kept: dict[str, int] = {}  # the aged job that a worker is kept for
        self._waits: list[int] = []  # those that could not start, in the order of their turns
        self._servers: dict[int, str] = {}
        self._times: dict[tuple[int, frozenset[str]], float] = {}
        self._running = [job for job in self._jobs.values() if job.state == "running"]
        for job in self._running:
            self._give(job, self._kept_by(job))
        self._had = dict(self._owner)

    def _is_ready(self, job: QueuedJob) -> bool:
        later = job.state == "waiting" and job.again_at > self._now
        return job.state in STARTABLE and not later and not job.cancelling and not comes_after(job, self._jobs)

    def _kept_by(self, job: QueuedJob) -> list[str]:
        """The workers that a running job keeps."""
        there = [n for n in job.has if n in self._workers and n not in self._owner and n not in self._leaving]
        if not self._changes(job):
            return there
        room = {kind: inf if count.most is None else count.most for kind, count in needs_of(job).items()}
        kept = list[str]()
        for name in there:
            kind = "" if "" in room else self._workers[name].kind
            room[kind] = room.get(kind, inf) - 1
            if room[kind] >= 0:
                kept.append(name)
        return kept

    def _is_possible(self, job: QueuedJob) -> bool:
        """True if all workers that there are would be enough."""
        return self._enough(job, chain.from_iterable(self._order[job.id].values()))

    def _orders_of_choice(self, grants: Iterable[Grant]) -> dict[int, dict[str, list[str]]]:
        """The workers that each job may have, by kind.

        Those that are there come first, of these the ones that the job could use or has not had yet, then the fastest,
        and of about equal ones the least wanted.
        """
        alike = dict[tuple[tuple[str, ...], tuple[str, ...], frozenset[str]], dict[str, list[str]]]()
        vain = {job.id: set[str]() for job in self._jobs.values() if job.exit_code == UNUSABLE}
        for grant in grants:
            if grant.job in vain:
                vain[grant.job].add(grant.worker)
        sorts = {j.id: (tuple(needs_of(j)), j.only, frozenset(vain.get(j.id, ()))) for j in self._jobs.values()}
        for job in self._jobs.values():
            if sorts[job.id] not in alike:
                own = {
                    kind: [w.name for w in self._workers.values() if may_have(job, kind, w)] for kind in needs_of(job)
                }
                alike[sorts[job.id]] = own
        many = Counter(sorts[job] for job in self._ready)
        wanted = Counter[str]()
        for sort, number in many.items():
            wanted.update({name: number for own in alike[sort].values() for name in own})
        for (_, _, in_vain), own in alike.items():
            ranks = {n: (n in self._leaving, n in in_vain, -self._pace(n), wanted[n]) for n in chain(*own.values())}
            for names in own.values():
                names.sort(key=ranks.__getitem__)
        return {job: alike[sort] for job, sort in sorts.items()}

    def _pace(self, name: str) -> int:
        """A worker's speed, the same for those that are about equal."""
        return round(log(self._workers[name].speed, _CLEARLY))

    # --- who has what ---

    def _give(self, job: QueuedJob, names: Iterable[str]) -> None:
        own = self._given.setdefault(job.id, [])
        for name in names:
            if (owner := self._owner.get(name)) is not None:
                self._given[owner].remove(name)
                self._held[self._jobs[owner].user] -= 1
            self._owner[name] = job.id
            self._held[job.user] += 1
            own.append(name)

    def _of_kind(self, job: QueuedJob, kind: str) -> list[str]:
        return [name for name in self._given.get(job.id, ()) if kind in ("", self._workers[name].kind)]

    def _spare(self, job: QueuedJob, gone: Collection[str] = ()) -> Iterator[str]:
        """Yield the workers of a job that it may give up, besides those that it gives up already."""
        if not self._changes(job):
            return
        for kind, count in needs_of(job).items():
            own = [name for name in self._of_kind(job, kind) if name not in gone]
            if len(own) > max(1, count.least):
                yield from (name for name in own if name not in self._kept)

    def _changes(self, job: QueuedJob) -> bool:
        """True if other workers may be given to a job that has some."""
        if job.cancelling or job.id in self._fixed:
            return False
        return job.state != "running" or self._rules.elastic

    def _time(self, job: QueuedJob, workers: frozenset[str]) -> float:
        if (key := (job.id, workers)) not in self._times:
            self._times[key] = max(_LEAST, self._gain(job, workers)) if workers else inf
        return self._times[key]

    def _saved(self, job: QueuedJob, worker: str, gone: Collection[str] = ()) -> float:
        """The part of a job's time that a worker saves, besides the others that it has, without those that are gone."""
        others = frozenset(self._given[job.id]) - {worker, *gone}
        by_itself, together = self._time(job, others), self._time(job, others | {worker})
        return 1 - together / by_itself if by_itself < inf else float(together < inf)

    # --- the least of each ---

    def _picked(self, job: QueuedJob) -> list[str]:
        """Workers that a job may take now, up to its least."""
        found = list[str]()
        for kind, count in needs_of(job).items():
            order = self._order[job.id][kind]
            missing = count.least - len(self._of_kind(job, kind))
            free = [name for name in order if name not in self._owner and name not in self._kept]
            found += free[: max(0, missing)]
            for _ in range(missing - len(free)):
                if (cheapest := self._cheapest(job, {*order}, found)) is None:
                    break
                found.append(cheapest)
        return found

    def _cheapest(self, job: QueuedJob, of: set[str], taken: Collection[str]) -> str | None:
        """The worker that lengthens the time of its job, times that of the one that takes it, the least."""
        options = list[tuple[float, float, int, str]]()
        for owner in (self._jobs[owner] for owner in self._given if owner != job.id):
            for name in (name for name in self._spare(owner, taken) if name in of):
                lost = self._saved(owner, name, taken)
                new = self._time(job, frozenset((*self._given.get(job.id, ()), *taken, name)))
                options.append((new / max(1 - lost, _LEAST), lost, -self._held[owner.user], name))
        return min(options)[-1] if options else None

    def _enough(self, job: QueuedJob, workers: Iterable[str]) -> bool:
        """True if a job can start with these."""
        kinds = [self._workers[name].kind for name in {*workers}]
        numbers = ((sum(kind in ("", own) for own in kinds), count) for kind, count in needs_of(job).items())
        return bool(kinds) and all(number >= count.least for number, count in numbers)

    def _start(self, job: QueuedJob) -> bool:
        """Give a job its least, and a place for its server, or nothing. Returns True if it starts."""
        workers, server = self._picked(job), self._server_for(job)
        if server is None or not self._enough(job, workers):
            return False
        if server:
            self._servers[job.id] = server
        self._give(job, workers)
        del self._ready[job.id]
        if self._since.pop(job.id, None) is not None:
            left = (other for other in self._ready.values() if other.user == job.user and self._is_possible(other))
            self._since |= {id_: max(at, self._now) for id_, at in oldest_since(left, ()).items()}
        return True

    def _server_for(self, job: QueuedJob) -> str | None:
        """The worker for a job's server: "" for one of its own, None where there is no room yet."""
        if (host := self._roomiest(job)) is None:
            return ""
        return host.name if self._room(host) >= self._memory[job.id] else None

    def _roomiest(self, job: QueuedJob) -> SharedWorker | None:
        """The worker set apart for servers that has most room, of those that a job's server would fit."""
        if not (needed := self._memory.get(job.id, 0)):
            return None
        hosts = (worker for worker in self._workers.values() if worker.kind == SERVES and worker.memory >= needed)
        return max(hosts, key=self._room, default=None)

    def _room(self, worker: SharedWorker) -> float:
        """Bytes for further servers on a worker."""
        ours = [job for job, name in self._servers.items() if name == worker.name]
        return worker.memory - sum(self._memory.get(job, 0) for job in {*worker.serves, *ours})

    # --- the order ---

    def settle(self) -> None:
        """Give workers until nothing changes."""
        while self._fill_up() | self._start_waiting() | self._spread():
            pass

    def _fill_up(self) -> bool:
        """Give running jobs what they lack of their least. Returns True if there was any."""
        self._kept, found = {}, False
        for job in filter(self._changes, self._running):
            if picked := self._picked(job):
                self._give(job, picked)
                found = True
        return found

    def _start_waiting(self) -> bool:
        """Let each waiting job have its turn. Returns True if one starts."""
        self._waits = []
        self._servers = {job: server for job, server in self._servers.items() if job in self._given}
        started, in_vain = False, set[tuple[object, ...]]()
        for job, aged in self._turns():
            sort = tuple(needs_of(job).items()), job.only, self._memory.get(job.id, 0)
            if sort not in in_vain and self._start(job):
                started = True
                continue
            in_vain.add(sort)
            self._waits.append(job.id)
            if aged:
                self._keep(job)
        return started

    def _turns(self) -> Iterator[tuple[QueuedJob, bool]]:
        """Yield the waiting jobs, each when its turn comes, and whether it has aged."""
        aged = sorted((at, job) for job, at in self._since.items() if self._now - at >= self._rules.aged)
        for _, job in aged:
            yield self._ready[job], True
        lines = defaultdict[str, list[QueuedJob]](list)
        for own in sorted(self._ready.values(), key=lambda own: (own.priority, -own.id)):
            if own.id not in self._waits:
                lines[own.user].append(own)
        while lines:
            user = min(lines, key=lambda user: (self._charge(user), lines[user][-1].id))
            job_of_user = lines[user].pop()
            if not lines[user]:
                del lines[user]
            yield job_of_user, False

    def _charge(self, user: str) -> float:
        return self._used.get(user, 0.0) + self._rules.ahead * self._held[user]

    def _keep(self, job: QueuedJob) -> None:
        """Keep for an aged job what it may have of its least."""
        self._kept |= dict.fromkeys(self._picked(job), job.id)
        if (host := self._roomiest(job)) is not None:
            self._servers[job.id] = host.name

    # --- what is beyond the least ---

    def _spread(self) -> bool:
        """Give idle workers to those who gain most, and move others to where they bring clearly more.

        Returns True if there were any.
        """
        found = False
        while (best := self._best_of_idle() or self._best_move()) is not None:
            job, worker = best
            self._give(job, [worker])
            found = True
        return found

    def _wishes(self) -> Iterator[tuple[QueuedJob, str]]:
        """Yield the jobs that may have more than they have, and the kind of it."""
        for job in (self._jobs[each] for each in self._given):
            if self._changes(job):
                for kind, count in needs_of(job).items():
                    if count.most is None or len(self._of_kind(job, kind)) < count.most:
                        yield job, kind

    def _best_of_idle(self) -> tuple[QueuedJob, str] | None:
        options = list[tuple[float, float, int, str]]()
        for job, kind in self._wishes():
            idle = (name for name in self._order[job.id][kind] if name not in self._owner and name not in self._kept)
            if (worker := next(idle, None)) is not None:
                options.append((-self._saved(job, worker), self._charge(job.user), job.id, worker))
        best = min(options, default=None)
        return None if best is None or -best[0] < self._rules.pays else (self._jobs[best[2]], best[3])

    def _best_move(self) -> tuple[QueuedJob, str] | None:
        """The move that brings most, of those that bring `moves` times what they cost."""
        options = list[tuple[float, float, int, str]]()
        for job, kind in self._wishes():
            for owner, worker in self._spare_of_others(job, {*self._order[job.id][kind]}):
                brings, costs = self._saved(job, worker), self._saved(owner, worker)
                if brings >= self._rules.pays and brings > self._rules.moves * costs:
                    options.append((costs - brings, self._charge(job.user), job.id, worker))
        best = min(options, default=None)
        return None if best is None else (self._jobs[best[2]], best[3])

    def _spare_of_others(self, job: QueuedJob, able: set[str]) -> Iterator[tuple[QueuedJob, str]]:
        """Yield what others have beyond their least: of the workers of one job that are alike, one."""
        for owner in (self._jobs[each] for each in self._given if each != job.id):
            there = (self._workers[name] for name in self._spare(owner) if name in able)
            alike = {(worker.kind, worker.speed): worker.name for worker in there}
            yield from ((owner, worker) for worker in alike.values())

    # --- what comes of it ---

    def _is_given_up(self, worker: str, job: int) -> bool:
        return worker in self._workers and worker not in self._leaving and self._owner.get(worker) != job

    def allotment(self) -> Allotment:
        """Return it as values."""
        running = {job.id: job for job in self._running}
        gives, takes, starts = dict[int, tuple[str, ...]](), dict[int, tuple[str, ...]](), dict[int, tuple[str, ...]]()
        for id_, own in self._given.items():
            new = tuple(n for n in own if n not in self._had and self._leaving.get(n, id_) == id_)
            if id_ not in running:
                if self._enough(self._jobs[id_], new):
                    starts[id_] = new
                continue
            if new:
                takes[id_] = new
            if lost := tuple(n for n in running[id_].has if self._is_given_up(n, id_)):
                gives[id_] = lost
        kept = {id_: tuple(n for n, job in self._kept.items() if job == id_) for id_ in {*self._kept.values()}}
        soon = [id_ for id_ in self._given if id_ not in running and id_ not in starts]
        line = dict.fromkeys([*soon, *self._waits, *(id_ for id_ in self._jobs if id_ not in self._given)])
        return Allotment(
            workers={id_: tuple(own) for id_, own in self._given.items()},
            starts=starts,
            gives=gives,
            takes=takes,
            servers=self._servers,
            waits={id_: kept.get(id_, ()) for id_ in line},
        )
