"""The service of a queue: it starts drivers, shares workers among them, and looks after them.

All that it knows is in the spool. It may be killed at any moment. The next one finds what runs by the drivers' locks,
and goes on.
"""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from daskcnn.batch.desk import DeskNews
from daskcnn.batch.drivers import Drivers, boot
from daskcnn.batch.estimates import Estimates
from daskcnn.batch.policy import share
from daskcnn.batch.progress import is_done, newest_step, progress_of
from daskcnn.batch.reasons import reasons
from daskcnn.batch.records import ACTIVE, ENDED, STARTABLE, Attempt, Count, QueuedJob
from daskcnn.batch.retries import LONGEST, WRONG, pause
from daskcnn.batch.shares import SERVES, Allotment, SharedWorker, SharingRules
from daskcnn.batch.spool import Spool
from daskcnn.batch.sweep_watch import SweepWatch
from daskcnn.cluster.link.members import Member, advertised, given_name

REMEMBERED = 7 * 86_400.0  # seconds for which the use of workers counts


class Service:
    """Looks after the jobs of a spool.

    Parameters
    ----------
    cluster : keys of `[cluster]` that name the scheduler.
    runs : the folder of runs whose job names none.
    say : is told what has changed, in words.
    """

    def __init__(
        self,
        spool: Spool,
        drivers: Drivers,
        *,
        cluster: Mapping[str, Any],
        runs: Path,
        say: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.spool, self.drivers, self.runs = spool, drivers, runs
        self._cluster, self._say, self.clock = dict(cluster), say, clock
        self._troubles, self._told = set[str](), set[str]()  # of this turn, and of the one before
        self.places: dict[int, int] = {}  # in the queue, by job
        self._sweeps, self._estimates = SweepWatch(), Estimates()
        self._unstarted = Counter[int]()  # starts in a row that the system refused, by job

    @property
    def busy(self) -> bool:
        """True if there are jobs that run or wait."""
        return bool(self.spool.counts().keys() & {"queued", "waiting", "running"})

    # --- a turn ---

    def turn(self, news: DeskNews | None) -> None:
        """Take note of drivers that have ended, pass on who is cancelled, and start jobs. news: None without a cluster.

        A disk that is full changes nothing: the next turn tries again.
        """
        self._told, self._troubles = self._troubles, set()
        running: list[QueuedJob] = []
        with self._in_spite_of_trouble():
            running = self.spool.jobs(("running",))
        for submission in sorted({job.submission for job in running if job.stop}):
            with self._in_spite_of_trouble():
                self._end_early(submission)
        for job in running:
            with self._in_spite_of_trouble(job.id):
                self._look_after(job)
        if news is not None:
            with self._in_spite_of_trouble():
                self._share(news)

    @contextmanager
    def _in_spite_of_trouble(self, number: int | None = None) -> Iterator[None]:
        """Go on after an error that may pass, and after any other of one job, which is set aside."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            self._warn(f"{error}; it is tried again and again")
        except Exception as error:
            if number is None:
                raise
            why = f"the service failed at it ({type(error).__name__}: {error})"
            self._warn(f"job {number}: {why}")
            with self._in_spite_of_trouble():
                self._set_aside(number, why)

    def _warn(self, text: str) -> None:
        """Tell of a trouble once, as long as it lasts."""
        if text not in self._troubles | self._told:
            self._say(f"warning: {self.spool.folder}: {text}")
        self._troubles.add(text)

    def _set_aside(self, number: int, why: str) -> None:
        """Hold a job that cannot be started, or end one whose driver has ended: the other jobs go on."""
        state = self.spool.job(number).state
        if state in STARTABLE:
            self.spool.hold(number, self.clock(), why)
        elif state == "running" and not self.drivers.lives(number):
            self.spool.end(number, Attempt(WRONG), self.clock(), said=why)

    def _end_early(self, submission: tuple[str, str, float]) -> None:
        """Cancel the runs of a sweep that are not among the best at their rung."""
        named = self.spool.jobs((*ACTIVE, *ENDED), sweep=submission[0])
        jobs = {job.id: job for job in named if job.submission == submission}
        for number, end in self._sweeps.early(jobs.values()).items():
            if (job := jobs[number]).state == "running" and job.stop and not job.cancelling:
                self.spool.cancel(number, self.clock(), str(end))
                self._say(f"job {number} ({job.name}): {end}")

    def _look_after(self, job: QueuedJob) -> None:
        if not self.drivers.lives(job.id):
            self._ended(job)
        elif job.cancelling > job.signalled and self.drivers.tell_to_end(job.id):
            self.spool.signalled(job.id, job.signalled + 1)

    def _ended(self, job: QueuedJob) -> None:
        code, run, now = self.drivers.exit_code(job.id), Path(job.run), self.clock()
        if code is None and self.drivers.process(job.id) is None:
            self.spool.never_begun(job.id, now)
            return
        if code is None and is_done(run):
            code = 0
        began_on, step = self.spool.begun(job.id)
        attempt = Attempt(code, progressed=newest_step(run) > step, rebooted=code is None and began_on != boot())
        reached = progress_of(run)
        said = self.drivers.last_words(job.id) if code else ""
        ended = self.spool.end(job.id, attempt, now, reached=(reached.epoch, reached.accuracy), said=said)
        self._say(" ".join(filter(None, [f"job {job.id} ({job.name}): {ended.state};", ended.why])).rstrip(";"))

    # --- to share workers ---

    def _share(self, news: DeskNews) -> None:
        """Start jobs, and have jobs that run give up workers and take others.

        Nothing is kept but the list of a job's workers that its driver reads. A worker of the job that is missing in
        the list is to be given up.
        """
        now, members = self.clock(), advertised(news.workers)
        lists = {job.id: self.drivers.allowed(job.id) for job in self.spool.jobs(("running",))}
        self._note_given_up(lists, members, news, now)
        if not (jobs := self.spool.jobs()):
            self.places.clear()
            return
        # the clock may have been set back since
        jobs = [replace(job, again_at=now) if job.again_at > now + LONGEST else job for job in jobs]
        others = _others(members, news, jobs)
        workers = [SharedWorker(m.name, m.kind, m.threads) for m in members if m.name not in others]
        rules = SharingRules(elastic=_named(members, news))
        how: dict[str, Any] = {
            "leaving": {name: job.id for job in jobs for name in _to_be_given_up(job, lists)},
            "fixed": [number for number, own in lists.items() if own is None],
            "rules": rules,
            "gain": self._estimates,
        }
        self._estimates.of(jobs, workers)
        found = share(jobs, workers, self.spool.grants(now - REMEMBERED), now=now, **how)
        for number in {**found.gives, **found.takes}:
            with self._in_spite_of_trouble(number):
                self._change(number, lists[number] or (), found, now)
        kinds = {member.name: member.kind for member in members}
        for number, names in found.starts.items():
            with self._in_spite_of_trouble(number):
                self._start_or_wait(self.spool.job(number), names, kinds, elastic=rules.elastic)
        self._explain(jobs, workers, found, others, now)

    def _note_given_up(
        self, lists: Mapping[int, Allowed], members: Sequence[Member], news: DeskNews, now: float
    ) -> None:
        """Free workers that their jobs were to give up, and have."""
        names = {member.address: member.name for member in members}
        trains = {(names.get(worker), run) for worker, run, _ in news.leases}
        for job in self.spool.jobs(("running",)):
            if gone := [name for name in _to_be_given_up(job, lists) if (name, job.name) not in trains]:
                with self._in_spite_of_trouble():
                    self.spool.give_up(job.id, gone, now)
                    self._say(f"job {job.id} ({job.name}): has given up {', '.join(gone)}")

    def _change(self, number: int, allowed: Sequence[str], found: Allotment, now: float) -> None:
        """Tell a driver which workers its job may have now. It begins to take a worker only once it is the job's."""
        job, gives, takes = self.spool.job(number), found.gives.get(number, ()), found.takes.get(number, ())
        new = [name for name in takes if name not in job.has]
        if new and not self.spool.take(number, new, now):
            return
        self.drivers.allow(number, [*(name for name in allowed if name not in gives), *takes])
        words = [f"is to give up {', '.join(gives)}"] * bool(gives) + [f"takes {', '.join(takes)}"] * bool(takes)
        self._say(f"job {number} ({job.name}): {', and '.join(words)}")

    def _explain(
        self,
        jobs: Sequence[QueuedJob],
        workers: Sequence[SharedWorker],
        found: Allotment,
        others: Mapping[str, str],
        now: float,
    ) -> None:
        """Note why jobs wait, and their places."""
        why = reasons(jobs, workers, found, now=now)
        self.places.clear()
        self.places.update((number, place) for place, number in enumerate(why, 1))
        theirs = "".join(f"; {name} is {run}'s" for name, run in others.items())
        later = {job.id for job in jobs if job.again_at > now}  # they have said why
        self.spool.explain({number: f"{text}{theirs}" for number, text in why.items() if number not in later})

    # --- to start jobs ---

    def _start_or_wait(self, job: QueuedJob, names: Sequence[str], kinds: Mapping[str, str], *, elastic: bool) -> None:
        """Start a job, or let it wait for another attempt: others may have its workers meanwhile."""
        try:
            self._start(job, names, kinds, elastic=elastic)
            self._unstarted.pop(job.id, None)
        except OSError as error:
            seconds = pause(self._unstarted[job.id])
            self._unstarted[job.id] += 1
            self.spool.put_off(job.id, f"cannot be started: {error}", self.clock(), seconds)
            raise

    def _start(self, job: QueuedJob, names: Sequence[str], kinds: Mapping[str, str], *, elastic: bool) -> None:
        content, modules = self.spool.content(job.id)
        fixed = not elastic or content.get("train", {}).get("reproducible", False)
        if fixed:
            given = Counter(kinds[name] for name in names)
            numbers = {kind: _number(job.workers.get(kind), count) for kind, count in given.items()}
            own: dict[str, Any] = {"workers": numbers, "only": list(names)}
        else:
            numbers = {kind: _range(count) for kind, count in job.workers.items()}
            own = {"workers": numbers, "only_from": str(self.drivers.list_of(job.id))}
        cluster = {**content.get("cluster", {}), **self._cluster, **own}
        cluster["adapt"] = False  # the queue says who has which workers
        run = {**content.get("run", {}), "name": job.name, "dir": str(Path(job.run).parent)}
        try:
            with self.drivers.lock(job.id) as lock:
                self.drivers.prepare(job.id, {**content, "cluster": cluster, "run": run}, modules)
                self.drivers.allow(job.id, None if fixed else names)
                step = newest_step(Path(job.run))
                if not self.spool.begin(job.id, names, self.clock(), boot=boot(), step=step):
                    return
                try:
                    self.drivers.start(job.id, lock)
                except Exception:
                    self.spool.never_begun(job.id, self.clock())
                    raise
        except BlockingIOError:  # a driver of an earlier attempt has not ended yet
            return
        keeps = "" if elastic else ", and keeps them: some workers have no name (dask worker --name)"
        self._say(f"job {job.id} ({job.name}): starts on {', '.join(names)}{keeps}")


def _number(asked: Count | None, given: int) -> int | str:
    """Return the number of workers that a driver is told: a range, where it may go on with fewer."""
    return given if asked is None or asked.least >= given else f"{asked.least}..{given}"


def _range(asked: Count) -> int | str:
    """Return the number of workers that a driver is told whose workers may change."""
    return asked.least if asked.least == asked.most else f"{asked.least}..{asked.most}"


Allowed: TypeAlias = tuple[str, ...] | None
"""The workers that a driver may have; None where they cannot change."""


def _to_be_given_up(job: QueuedJob, lists: Mapping[int, Allowed]) -> list[str]:
    """Return the workers that a job has, and whose driver was told to give them up."""
    allowed = lists.get(job.id)
    return [] if allowed is None else [name for name in job.has if name not in allowed]


def _named(members: Sequence[Member], news: DeskNews) -> bool:
    """Return True if all workers that train have names of their own. The numbers of others change as they come and go.

    Those of workers that are set apart for servers are counted by themselves.
    """
    return all(given_name(news.workers[each.address]["name"]) for each in members if each.kind != SERVES)


def _others(members: Sequence[Member], news: DeskNews, jobs: Sequence[QueuedJob]) -> dict[str, str]:
    """Return the workers that train for runs that are no jobs of this queue, with the run in words."""
    names = {member.address: member.name for member in members}
    ours = {name for job in jobs for name in job.has}
    theirs = ((names.get(worker, ""), f"run {run} ({by})") for worker, run, by in news.leases)
    return {name: run for name, run in theirs if name and name not in ours}
