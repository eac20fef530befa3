"""A simulated cluster, from a TOML file by hand or from the measurements of a run (`measured`)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tomli_w
from pydantic import Field, ValidationError

from daskcnn.arrays import DeviceKind
from daskcnn.documents import reason_of
from daskcnn.errors import JobError, nearest
from daskcnn.job.options import Options
from daskcnn.job.resolve import read_job_file
from daskcnn.sharded.balance import SPREAD_SHARE, WorkerLink
from daskcnn.sim.speeds import Constant, Drift, Factor, Link, Speed, Stall, Walk
from daskcnn.training.strategy_prices import StepProblem, WorkerCost

_MOST_BYTES = 1 << 20
_MOST_WORKERS = 1 << 20
# With these bounds the clock of a simulation keeps seconds of its shortest steps.
_Images = Annotated[float, Field(ge=1e-3, le=1e9)]
_Rate = Annotated[float, Field(ge=1e-3, le=1e15)]
_Seconds = Annotated[float, Field(ge=0, le=1e6)]
_NAME = r"^[\w@+][\w.:/@+-]*$"  # every name that a worker has in a run, in any script


class ClusterFileError(JobError):
    """The cluster file is wrong: all problems, one a line."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(problems)
        self.args = (self.args[0].replace("the job has", "the cluster file has", 1),)


class Server(Options):
    """`[server]`: the parameter server's host. Keys that are left out set no limit.

    bandwidth: bytes a second of its link each way, which all workers share. merge_rate: bytes of pushes that it unpacks
    and merges a second.
    """

    bandwidth: _Rate | None = None
    merge_rate: _Rate | None = None

    def split(self, hosts: int) -> Server:
        """Return several such hosts as one, each with a range of the vector: together as many times as fast."""
        bandwidth, merge_rate = (value and value * hosts for value in (self.bandwidth, self.merge_rate))
        return self.model_copy(update={"bandwidth": bandwidth, "merge_rate": merge_rate})


class Costs(Options):
    """`[costs]`: overheads in seconds.

    dispatch: between a round's report and the first step of the next round; for sharded kernels, of submitting a step's
    tasks. task: of each of these tasks besides. exchange: of every exchange with the server, besides its transfer.
    start: once, in the first round.
    """

    dispatch: _Seconds = 0.0
    task: _Seconds = 0.0
    exchange: _Seconds = 0.0
    start: _Seconds = 0.0


class Unequal(Options):
    """`unequal = {lowest = 0.5, highest = 1.5}`: how many times as fast as the pattern each of its workers is.

    It is drawn from a Gaussian between them, three deviations from its mean (Marques et al., 5.3); what would lie
    beyond is drawn to the end. The first workers of a seed stay the same when there are more.
    """

    lowest: Factor
    highest: Factor
    seed: int = Field(default=0, ge=0)

    def factors(self, count: int) -> list[float]:
        """Return one for each worker."""
        mean, deviation = (self.lowest + self.highest) / 2, (self.highest - self.lowest) / 6
        drawn = np.random.default_rng(self.seed).normal(mean, abs(deviation), count)
        return [float(each) for each in np.clip(drawn, self.lowest, self.highest)]


class Worker(Options):
    """`[[worker]]`: `count` workers alike, or `unequal` ones; 0 is a pattern for `daskcnn plan --add` only.

    images_per_second: of training, loading included, with all its threads, beyond step_fixed, the seconds that each
    step takes however few samples it has: nearly all of a GPU's small step. evaluations_per_second: images judged
    without training, by default three times as many. serial: the part of a one-thread step that more threads do not
    shorten. bandwidth (bytes a second), latency (seconds a message): of its link. speed: its change over time.

    arrives, leaves, dies: seconds of the run at which it comes, calibrated; leaves in good order; or is lost.

    For sharded kernels, in seconds a sample: conv_seconds, of each convolution and the layers spread with it, forward
    and backward; conv_fixed, the part of these that a shard takes whatever its size; rest_seconds, of the loss and the
    layers that are not divided, which home computes alone (by default all of a step but conv_seconds). conv_share: the
    part of a step that conv_seconds take, where they are not given. spread_share: the part of conv_seconds that spread
    layers take.
    """

    name: str = Field(pattern=_NAME)
    count: int = Field(default=1, ge=0, le=_MOST_WORKERS)
    kind: Literal["cpu", "gpu"] = "cpu"
    images_per_second: _Images
    step_fixed: _Seconds = 0.0
    evaluations_per_second: _Rate | None = None
    threads: int = Field(default=1, ge=1)
    serial: float = Field(default=0.1, ge=0, le=1)
    conv_share: float = Field(default=0.85, gt=0, lt=1)
    spread_share: float = Field(default=SPREAD_SHARE, ge=0, lt=1)
    conv_seconds: dict[str, Annotated[float, Field(ge=1e-12, le=1e6)]] | None = None
    conv_fixed: dict[str, _Seconds] | None = None
    rest_seconds: _Seconds | None = None
    bandwidth: _Rate | None = None
    latency: _Seconds = 0.0
    speed: Speed = Constant()
    unequal: Unequal | None = None
    arrives: float = Field(default=0.0, ge=0)
    leaves: float | None = Field(default=None, gt=0)
    dies: float | None = Field(default=None, gt=0)

    @property
    def seconds(self) -> float:
        """Seconds to train on a sample, at the nominal speed, besides step_fixed."""
        return 1 / self.images_per_second

    def step(self, samples: float) -> float:
        """Return the seconds of a step of these samples, at the nominal speed."""
        return self.step_fixed + samples * self.seconds

    def rate(self, samples: float) -> float:
        """Return the images it trains on in a second, in steps of this number of samples."""
        return self.images_per_second / (1 + self.step_fixed * self.images_per_second / samples)

    @property
    def judging(self) -> float:
        """Seconds to evaluate a sample: the forward pass is about a third of a step."""
        return 1 / (self.evaluations_per_second or 3 * self.images_per_second)

    def link(self) -> Link:
        """Return the worker's link to the server."""
        return Link(self.bandwidth or math.inf, self.latency)

    def times_as_fast(self, factor: float) -> Worker:
        """Return a worker of which all computing takes this factor less time."""

        def shortened(seconds: dict[str, float] | None) -> dict[str, float] | None:
            return seconds and {name: each / factor for name, each in seconds.items()}

        return self.model_copy(
            update={
                "images_per_second": self.images_per_second * factor,
                "step_fixed": self.step_fixed / factor,
                "evaluations_per_second": self.evaluations_per_second and self.evaluations_per_second * factor,
                "conv_seconds": shortened(self.conv_seconds),
                "conv_fixed": shortened(self.conv_fixed),
                "rest_seconds": self.rest_seconds and self.rest_seconds / factor,
            }
        )

    def with_threads(self, threads: int) -> Worker:
        """Return the same processor with this number of threads, by Amdahl's law."""
        now, then = (self.serial + (1 - self.serial) / t for t in (self.threads, threads))
        return self.times_as_fast(now / then).model_copy(update={"threads": threads})

    def each(self) -> list[Worker]:
        """Return every single worker of the pattern: `desk` of count 3 is desk-1, desk-2 and desk-3."""
        found = self.unequal
        single = [self.times_as_fast(each) for each in found.factors(self.count)] if found else [self] * self.count
        return [_renamed(own, f"{self.name}-{i}" if self.count > 1 else self.name) for i, own in enumerate(single, 1)]


class SimulatedCluster(Options):
    """The content of a cluster file."""

    server: Server = Server()
    costs: Costs = Costs()
    worker: list[Worker] = Field(min_length=1)

    def members(self) -> list[Worker]:
        """Return every single worker."""
        return [own for pattern in self.worker for own in pattern.each()]

    @property
    def changes(self) -> bool:
        """True if workers come or go during a run."""
        return any(own.arrives or own.leaves is not None or own.dies is not None for own in self.worker)

    @property
    def varies(self) -> bool:
        """True if the speed of a worker changes during a run."""
        return not all(isinstance(own.speed, Constant) for own in self.worker)

    def with_one_more(self, pattern: Worker) -> SimulatedCluster:
        """Return the cluster with another worker like this one."""
        names = {member.name for member in self.members()}
        name = next(n for i in range(1, len(names) + 2) if (n := f"{pattern.name}+{i}") not in names)
        return self.model_copy(update={"worker": [*self.worker, _renamed(pattern, name)]})

    def without(self, names: Collection[str]) -> SimulatedCluster:
        """Return the cluster without these members."""
        left = [member for member in self.members() if member.name not in names]
        return self.model_copy(update={"worker": left})

    def of_size(self, workers: int) -> SimulatedCluster:
        """Return a cluster of this size: the first workers, repeated in turn if there are fewer."""
        members = self.members()
        own, places = len(members), range(len(members), workers)
        more = [_renamed(members[i % own], f"{members[i % own].name}+{i // own}") for i in places]
        return self.model_copy(update={"worker": [*members[:workers], *more]})


def step_problem(
    members: Sequence[Worker], samples: int, nbytes: int, cluster: SimulatedCluster, shards: int = 1
) -> StepProblem:
    """Return the step of these members of a cluster that share its samples, as a simulation has it.

    nbytes: of the vector on the wire. shards: hosts of the server.
    """
    server = cluster.server.split(shards)
    workers = (
        WorkerCost(own.name, own.step_fixed, own.seconds, WorkerLink(own.bandwidth or math.inf, own.latency))
        for own in members
    )
    return StepProblem(
        tuple(workers),
        samples,
        nbytes,
        bandwidth=server.bandwidth or math.inf,
        merge=nbytes / server.merge_rate if server.merge_rate else 0.0,
        overhead=cluster.costs.exchange,
    )


def _renamed(pattern: Worker, name: str) -> Worker:
    """Return a single worker of this name, like the pattern."""
    return pattern.model_copy(update={"name": name, "count": 1, "unequal": None})


def read_cluster(path: str | Path) -> SimulatedCluster:
    """Read the cluster of a TOML file. Raises ClusterFileError with all problems."""
    try:
        raw = read_job_file(path, _MOST_BYTES, "a cluster file, or of a run")
    except JobError as error:
        raise ClusterFileError(error.problems) from error
    return parse_cluster(raw)


def parse_cluster(raw: Mapping[str, Any]) -> SimulatedCluster:
    """Return the cluster of these tables. Raises ClusterFileError with all problems."""
    found, problems = None, list[str]()
    try:
        found = SimulatedCluster.model_validate(raw)
    except ValidationError as error:
        problems = [_readable(item["type"], item["loc"], item["input"], reason_of(item)) for item in error.errors()]
    problems += _contradictions(raw)
    if found is None or problems:
        raise ClusterFileError(problems)
    return found


_REMEDIES = {
    "images_per_second": "give the images that it trains on in a second, as `daskcnn report` of a run shows them",
    "evaluations_per_second": "give images a second, or leave it out for three times the training's",
    "bandwidth": "give bytes a second (1 Gb/s is 1.25e8), or leave it out for no limit",
    "merge_rate": "give bytes a second, or leave it out for no limit",
    **dict.fromkeys(("latency", "step_fixed", "dispatch", "task", "exchange", "start"), "give seconds, 0 or more"),
    **dict.fromkeys(("lowest", "highest"), "give times the speed of the pattern, 0.001 to 1000"),
    **dict.fromkeys(("arrives", "leaves", "dies"), "give seconds of the run, or leave it out for a worker that stays"),
    "rest_seconds": "give seconds a sample, 0 or more, or leave it out for all of a step besides conv_seconds",
    "count": f"give 1 to {_MOST_WORKERS:,}, or 0 for a pattern that only `daskcnn plan --add` uses",
    "name": "give it a name of letters, digits and . _ : / @ + -",
    "kind": 'give "cpu" or "gpu"; a speed is {kind = "constant"}, "drift", "walk" or "stall" and its numbers',
    "every": "give seconds, 0.001 or more",
    "worker": "give at least one [[worker]] with a name and images_per_second",
}
_SPEEDS: dict[str, type[Options]] = {"constant": Constant, "drift": Drift, "walk": Walk, "stall": Stall}
_TABLES: dict[str, type[Options]] = {"server": Server, "costs": Costs, "worker": Worker, "unequal": Unequal, **_SPEEDS}


def _readable(kind: str, loc: tuple[int | str, ...], value: Any, reason: str) -> str:
    """Return a problem that the models find, with its remedy."""
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc if part not in _SPEEDS)
    key, name = key.removeprefix("."), str(next((p for p in reversed(loc) if isinstance(p, str)), "worker"))
    if kind == "extra_forbidden":
        table: type[Options] = SimulatedCluster
        for part in loc[:-1]:
            table = _TABLES.get(str(part), table)
        return f"{key}: unknown {'key' if len(loc) > 1 else 'section'}{nearest(name, list(table.model_fields))}"
    remedy = f"; {_REMEDIES[name]}" if name in _REMEDIES else ""
    if kind == "missing":
        return f"{key}: is missing{remedy}"
    return f"{key} = {f'{value!r:.80}'}: {reason}{remedy}"


def _contradictions(raw: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems of the workers together."""
    workers = [w for w in raw.get("worker", ()) if isinstance(w, dict)] if isinstance(raw.get("worker"), list) else []
    given = Counter(str(w["name"]) for w in workers if "name" in w)
    given.update(name for worker in workers for name in _numbered(worker) if name in given)
    for name, times in given.items():
        if times > 1:
            yield f"worker.name = {name!r}: {times} workers have it; give each its own, or one of them a count"
    for worker in workers:
        yield from _misplaced(worker)
        yield from _reversed(worker)
        yield from _of_stages(worker)
    if workers and all(w.get("count", 1) == 0 for w in workers):
        yield "worker.count = 0: a cluster needs at least one worker; raise a count"


def _numbered(worker: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of an entry's workers, if it is of several."""
    count = worker.get("count", 1)
    if isinstance(count, int) and 1 < count <= _MOST_WORKERS:
        yield from (f"{worker.get('name')}-{i}" for i in range(1, count + 1))


def _misplaced(worker: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems of a worker's times."""
    times = {key: worker[key] for key in ("leaves", "dies") if isinstance(worker.get(key), int | float)}
    if len(times) > 1:
        yield f"worker {worker.get('name')!r}: leaves and dies; keep one of them"
    arrives = worker.get("arrives", 0)
    if isinstance(arrives, int | float) and any(0 < time <= arrives for time in times.values()):
        (key,) = [key for key in times if times[key] <= arrives][:1]
        yield f"worker {worker.get('name')!r}: {key} = {times[key]:g}: it arrives at {arrives:g} s; give a later time"


def _reversed(worker: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problem of a range whose lower end is the higher one."""
    given = worker.get("unequal")
    lowest, highest = (given.get(key) for key in ("lowest", "highest")) if isinstance(given, dict) else (None, None)
    if isinstance(lowest, int | float) and isinstance(highest, int | float) and lowest > highest:
        yield f"worker {worker.get('name')!r}: unequal.lowest = {lowest:g}: above highest, {highest:g}; exchange them"


def _of_stages(worker: Mapping[str, Any]) -> Iterator[str]:
    """Yield the layers of which a shard takes longer than the whole."""
    fixed, whole = (
        found if isinstance(found := worker.get(f"conv_{key}"), dict) else {} for key in ("fixed", "seconds")
    )
    for name, least in fixed.items():
        most = whole.get(name, math.inf)
        if isinstance(least, int | float) and isinstance(most, int | float) and least >= most:
            of_all = f"conv_seconds of all its kernels are {most:g}"
            yield f"worker {worker.get('name')!r}: conv_fixed.{name} = {least:g}: {of_all}; give less than these"


def to_toml(cluster: SimulatedCluster) -> str:
    """Return the cluster as a file for `read_cluster`, with every key that is not its default."""
    tables = cluster.model_dump(exclude_defaults=True, exclude_none=True)
    return tomli_w.dumps({"server": {}, "costs": {}, **tables})


def kinds(cluster: SimulatedCluster) -> dict[DeviceKind, Worker]:
    """Return the first worker of each kind, the pattern for another one."""
    return {worker.kind: worker for worker in reversed(cluster.worker)}


def patterns(cluster: SimulatedCluster) -> dict[str, Worker]:
    """Return the patterns for another worker: by its kind the first one, or any by its name."""
    return {worker.name: worker for worker in [*cluster.members(), *cluster.worker]} | {**kinds(cluster)}
