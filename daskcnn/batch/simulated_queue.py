"""A queue of jobs on a simulated cluster: shares by the policy, durations by the simulator."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

from daskcnn.batch.queue_file import ComingJob, ComingQueue, QueueFileError, read_queue
from daskcnn.batch.queue_play import PlayedJob, PlayedQueue, QueuePlay
from daskcnn.batch.reasons import reasons
from daskcnn.batch.records import Count, Grant, QueuedJob
from daskcnn.batch.shares import SharedWorker
from daskcnn.errors import JobError
from daskcnn.planning.simulate import Scenario, scenario, simulate
from daskcnn.show.text import aligned, duration, percent
from daskcnn.sim.cluster import ClusterFileError, SimulatedCluster

_LANE = 72  # letters of a worker's lane
_LETTERS = "123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Durations:
    """Seconds of each job of a queue on any of the cluster's workers, simulated once for workers that are alike."""

    def __init__(self, scenarios: Mapping[int, Scenario], cluster: SimulatedCluster, seed: int = 0) -> None:
        self._scenarios, self._seed = scenarios, seed
        self._members = {member.name: member for member in cluster.members()}
        self._alike = {name: repr(own.model_copy(update={"name": "any"})) for name, own in self._members.items()}
        self._known: dict[tuple[int, tuple[str, ...]], float] = {}

    def __call__(self, job: QueuedJob, workers: Collection[str]) -> float:
        """Return the seconds of a job on these workers; infinite where it cannot run on them."""
        chosen = self._scenarios[job.id]
        key = id(chosen), tuple(sorted(self._alike[name] for name in workers))
        if key not in self._known:
            left = [self._members[name] for name in self._members if name in workers]
            alone = replace(chosen, cluster=chosen.cluster.model_copy(update={"worker": left}))
            try:
                self._known[key] = simulate(alone, seed=self._seed).report.seconds
            except JobError:  # too few for its rule
                self._known[key] = inf
        return self._known[key]


@dataclass(frozen=True)
class SimulatedQueue:
    """A queue that was played. seconds: until the last job ended; waits: the reasons of those that never began."""

    source: str
    workers: tuple[str, ...]
    jobs: tuple[PlayedJob, ...]
    grants: tuple[Grant, ...]
    waits: Mapping[int, str]

    @cached_property
    def seconds(self) -> float:
        """Seconds until the last job ended."""
        return max((job.ended for job in self.jobs if job.ended is not None), default=0.0)

    @property
    def busy(self) -> float:
        """The part of the workers' time in which a job had them."""
        had = sum((self.seconds if g.ended is None else g.ended) - g.begun for g in self.grants)
        return had / (self.seconds * len(self.workers)) if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        rows = [
            {
                "id": own.job.id,
                "name": own.job.name,
                "user": own.job.user,
                "came": own.job.submitted,
                "began": own.began,
                "ended": own.ended,
                "why": self.waits.get(own.job.id),
                "workers": [asdict(grant) for grant in self.grants if grant.job == own.job.id],
            }
            for own in self.jobs
        ]
        return {"jobs": rows, "seconds": self.seconds, "busy": self.busy, "workers": [*self.workers]}


def simulate_queue(path: str, cluster: str, settings: Sequence[str] = (), *, seed: int = 0) -> SimulatedQueue:
    """Play the queue of a file on a cluster file, or on the cluster of a run.

    settings: keys of every job, "section.key=value". Raises UserError; QueueFileError has the problems of all jobs.
    """
    queue = read_queue(path)
    scenarios = _scenarios(queue, Path(path).parent, cluster, settings)
    jobs = [_with_workers(job, scenarios[job.id]) for job in queue.jobs]
    machines = next(iter(scenarios.values())).cluster
    if machines.changes:
        reason = "arrives, leaves and dies are seconds of a run, and each run of a queue begins at a time of its own"
        raise ClusterFileError([f"worker: {reason}; leave these keys out with --queue"])
    workers = [SharedWorker(own.name, own.kind, own.images_per_second) for own in machines.members()]
    durations = Durations(scenarios, machines, seed)
    played = QueuePlay(jobs, workers, durations, change=machines.costs.start, rules=queue.rules).run()
    return SimulatedQueue(path, tuple(own.name for own in workers), played.jobs, played.grants, _waits(played, workers))


def _scenarios(queue: ComingQueue, folder: Path, cluster: str, settings: Sequence[str]) -> dict[int, Scenario]:
    """The scenario of each job; those of the same file and keys share one."""
    known, problems = dict[tuple[str, ...], Scenario](), dict[str, None]()
    for key in dict.fromkeys(map(_file_and_keys, queue.entries.values())):
        file, *keys = key
        try:
            known[key] = scenario(str(folder / file), cluster, [*keys, *settings])
        except JobError as error:
            problems |= dict.fromkeys(f"{file}: {problem}" for problem in error.problems)
    if problems:
        raise QueueFileError([*problems])
    return {id_: known[_file_and_keys(entry)] for id_, entry in queue.entries.items()}


def _file_and_keys(entry: ComingJob) -> tuple[str, ...]:
    return entry.file, *entry.set


def _with_workers(job: QueuedJob, chosen: Scenario) -> QueuedJob:
    """The job with the workers that its file asks for, where the queue file says nothing."""
    asked, only = chosen.job.cluster.workers, chosen.job.cluster.only
    workers = job.workers or {kind: Count(asked.given[kind], most) for kind, most in asked.most.items() if most}
    return replace(job, workers=workers, only=job.only or tuple(only or ()))


def _waits(played: PlayedQueue, workers: Sequence[SharedWorker]) -> dict[int, str]:
    """The reasons of jobs that never began."""
    jobs = [own.job for own in played.jobs if own.ended is None]
    return reasons(jobs, workers, played.last, now=0.0, when=lambda at, now: duration(at)) if jobs else {}


def format_queue(found: SimulatedQueue) -> str:
    """Return a table of the jobs, the lane of each worker, and the sums."""
    rows = [["job", "name", "user", "came", "waited", "ran", "ended", "workers"]]
    for own in found.jobs:
        waited = None if own.began is None else own.began - own.job.submitted
        ran = None if own.ended is None or own.began is None else own.ended - own.began
        names = dict.fromkeys(grant.worker for grant in found.grants if grant.job == own.job.id)
        what = ", ".join(names) or found.waits.get(own.job.id, "")
        times = [duration(own.job.submitted), duration(waited), duration(ran), duration(own.ended)]
        rows.append([str(own.job.id), own.job.name, own.job.user, *times, what])
    last = max(len(row[-1]) for row in rows)
    table = aligned([[*row[:-1], row[-1].ljust(last)] for row in rows], left=3)
    return "\n".join([*table, "", *_lanes(found), "", _sums(found)])


def _sums(found: SimulatedQueue) -> str:
    done = [own for own in found.jobs if own.ended is not None]
    waits = [own.began - own.job.submitted for own in done if own.began is not None]
    waited = f", waited {duration(sum(waits) / len(waits))} on average" if waits else ""
    ended = f"{len(done)} of {len(found.jobs)} jobs done in {duration(found.seconds)}"
    return f"{ended}{waited}; workers busy {percent(found.busy)}"


def _lanes(found: SimulatedQueue) -> list[str]:
    """A lane a worker, with the letter of the job that has it the longest in each stretch of time."""
    width = (found.seconds or 1.0) / _LANE
    lanes = {name: [" "] * _LANE for name in found.workers}
    longest = {name: [0.0] * _LANE for name in found.workers}
    for grant in found.grants:
        ended = found.seconds if grant.ended is None else grant.ended
        for i in range(int(grant.begun / width), min(_LANE, int(ended / width) + 1)):
            inside = min(ended, (i + 1) * width) - max(grant.begun, i * width)
            if inside > longest[grant.worker][i]:
                longest[grant.worker][i] = inside
                lanes[grant.worker][i] = _LETTERS[(grant.job - 1) % len(_LETTERS)]
    wide = max(map(len, lanes))
    return [f"{name.ljust(wide)}  |{''.join(lane)}|" for name, lane in lanes.items()]
