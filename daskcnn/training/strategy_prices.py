"""The choice of a strategy by its expected seconds a sample, from measured workers and links. No clock, no I/O.

A step of n samples takes a worker f + c·n seconds (Cannikin): on a GPU nearly all of it is f. V bytes take it one way
w_i(k) = latency_i + V / min(bandwidth_i, server's / k), if k workers share the server's link. They share the step's
samples so that all are heard at the same time (`partition.step_shares`), and go on once the last has its answer:

    max_i(f_i + c_i·n_i + w_i(1)) + overhead + k · merge + max_i w_i(k).

Gradients that go ahead while the way back is computed (`training.gradient_parts`) hide up to that much of the time on
the links. All are answered at once, and so wait for each other's bytes. A worker that was answered first has computed
first, and pushes while the link is free. That is `daskcnn.sim`'s meeting. A worker by itself exchanges nothing. Whoever
makes steps of the same samples makes the same progress with each, so the seconds of a step are compared. A strategy
that needs more samples for the same progress says by how much (`PricedStrategy.needed`).

Workers that make steps of their own (`local-sgd`) for T seconds make R·T samples at R a second, and then meet, in E
seconds. They need N·(1 + A·R·T) samples for the progress of one: N grows with their number, as the mean of k advances
less than one that makes all k steps, and A with the samples between two meetings. So (T + E)·(1 + A·R·T) / T is least
for T = √(E / (A·R)). N and A are measured (`_APART`). Where the exchange overlaps the next steps its bytes take no time
of their own if T ≥ E, but at an epoch's end; what processors do for it, C, they do not do for steps. What is made
meanwhile comes to the others a meeting later, so that the samples apart are R·(T + E), and the larger of E and
√(C / (A·R)) is best. T is at least twice as long as E (`_SLACK`).

The best workers are found exactly, not by trying some sets: of each number of workers, and of each slowest link that
they may have. So another worker, or a faster link, never makes the least time longer.

Workers of one host share its cores with each other and with what runs beside their training threads (`_BESIDE`). All
compute at the same time, so those of t threads together on C cores take (1 + `_BESIDE`)·t / C times as long, if that is
more than 1. Nothing is hidden behind their computing then, as what is sent takes a core from it. Where they leave the
server's host no core, meetings take longer (`_CROWDED`). How many of a host's workers take part is counted once the
best of each number are found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, inf, log
from typing import Any, TypeAlias

from daskcnn.events import ALONE, CalibratedWorker, PricedStep, asked_of
from daskcnn.partition.proportions import proportional
from daskcnn.partition.step_shares import LEAST
from daskcnn.sharded.balance import FREE, WorkerLink

SHARED, LOCAL = "bsp", "local-sgd"
_LEAST_EACH = 1e-12
WAY_BACK = 0.6
"""The part of a step's computing in which gradients are found."""
_MOST_FIXED = 0.999  # part of a step
_APART = {1: 1.0, 2: 1.2, 4: 2.0, 8: 4.5}
"""Samples that equal replicas need with steps of their own, of those of one alone, by their number."""
_MOST_APART = 16
"""The most of them that are compared: from about four on, another one needs more samples than it makes."""
_SLACK = 2.0
"""The least time from one meeting to the next, of the seconds that a meeting takes, where it overlaps the steps.

So one that is late is not waited for, and most of what a worker gains is of weights that have what the others gained.
By `benchmarks/results/sooner_links_simulated.json`, two workers, 5 MB/s, two seeds: at 1.1 they take 20 and 25 s to
55 %; at 1.6, 2.3 and 3.7 they take 16 to 18.
"""
_BETWEEN = 1.3e-5
"""The part that is added to these for each sample between two meetings."""
_BESIDE = 0.25
"""Cores taken, for each training thread of workers that share a host, by loaders, the server, Dask and the driver.

By `benchmarks/results/sooner.json`, two workers on two cores: steps of 32 samples take 1.23 times (`quick`) and 1.28
times (two convolutions) as long as one worker alone takes for them.
"""
_CROWDED = 0.9e-3
"""Seconds that a meeting takes more where the server has no core of its own, by the same runs: 1.8 to 2.1 ms in all."""
MEETING = 0.7e-3
"""Seconds of a meeting besides the way of its bytes: what the server's streams take more than plain sockets do, beside
busy cores (`benchmarks/meeting.py`)."""


@dataclass(frozen=True, slots=True)
class WorkerCost:
    """A worker's step of n samples takes fixed + each · n seconds; its link leads to the server.

    host: the computer that it may share with others; empty: its own. threads: cores that it computes with.
    """

    name: str
    fixed: float
    each: float
    link: WorkerLink = FREE
    host: str = ""
    threads: int = 1

    def seconds(self, samples: float) -> float:
        """Return the seconds of a step of these samples."""
        return self.fixed + self.each * samples

    def times(self, factor: float) -> WorkerCost:
        """Return a worker whose steps take this many times as long."""
        return replace(self, fixed=self.fixed * factor, each=self.each * factor)


def worker_cost(row: CalibratedWorker, seconds: float, batch: int, link: WorkerLink = FREE) -> WorkerCost:
    """Return the cost of a worker that was calibrated with steps of `batch` samples. seconds: of a sample in them."""
    fixed = min(row.step_fixed or 0.0, _MOST_FIXED * batch * seconds)
    threads = 1 if row.device == "gpu" else row.threads or 1
    return WorkerCost(row.name, fixed, seconds - fixed / batch, link, row.host, threads)


@dataclass(frozen=True, slots=True)
class StepProblem:
    """A step of `samples` samples, the workers that may make it, and the cost of their meeting.

    nbytes: of the vector that each worker sends and receives. bandwidth: of the server's link each way, which all
    share. merge: seconds of the server for each worker. overhead: seconds of a meeting besides. epoch: samples after
    which workers meet anyway. ahead: part of the vector whose gradients are sent while the rest is computed. overlaps:
    workers that make steps of their own go on while they exchange. cores: of each host, where they are known. home: the
    server's host.
    """

    workers: tuple[WorkerCost, ...]
    samples: int
    nbytes: float
    bandwidth: float = inf
    merge: float = 0.0
    overhead: float = 0.0
    epoch: float = inf
    ahead: float = 0.0
    overlaps: bool = False
    cores: Mapping[str, int] = field(default_factory=dict)
    home: str = ""

    def together(self, names: Collection[str]) -> StepProblem:
        """Return the same at the speeds that these workers have while all of them, and no others, compute."""
        taken = {host: self._threads(host, names) for host in self.cores}
        slower = {host: (1 + _BESIDE) * own / self._cores(host) for host, own in taken.items() if own}
        if all(factor <= 1 for factor in slower.values()):
            return self
        workers = tuple(own.times(max(1.0, slower.get(own.host, 1.0))) for own in self.workers)
        longer = _CROWDED if taken.get(self.home, 0) >= self.cores.get(self.home, inf) else 0.0
        return replace(self, workers=workers, cores={}, ahead=0.0, overhead=self.overhead + longer)

    def _threads(self, host: str, names: Collection[str]) -> int:
        """Return the threads of these workers on a host that they share; 0: none, or one worker."""
        threads = [own.threads for own in self.workers if own.host == host and own.name in names]
        return sum(threads) if len(threads) > 1 else 0

    def _cores(self, host: str) -> int:
        """Return the host's cores; where it has fewer than threads, all have been measured at that."""
        return max(self.cores[host], sum(own.threads for own in self.workers if own.host == host))

    def left(self, exchange: float, compute: float) -> float:
        """Return the seconds of an exchange behind the computing, where a part of it has gone ahead: not `overhead`."""
        return exchange - min(self.ahead * (exchange - self.overhead), WAY_BACK * compute)

    def answer(self, slowest: float, workers: int) -> float:
        """Return the seconds until the last of these workers has its answer. slowest: seconds of the slowest way."""
        return self.overhead + workers * self.merge + slowest

    def way(self, worker: WorkerCost, workers: int) -> float:
        """Return the seconds of the vector's way to or from a worker. workers: those that share the server's link."""
        return worker.link.each + self.nbytes / min(worker.link.bandwidth, self.bandwidth / workers)

    def linked(self, factor: float) -> StepProblem:
        """Return the same with links that are faster by this factor, in bandwidth and latency."""
        workers = tuple(replace(own, link=own.link.faster(factor)) for own in self.workers)
        return replace(self, workers=workers, bandwidth=self.bandwidth * factor)

    def with_one_more(self, like: WorkerCost) -> StepProblem:
        """Return the same with another worker like this one."""
        return replace(self, workers=(*self.workers, replace(like, name=f"another {like.name}", host="")))


def measured_problem(
    workers: Mapping[str, tuple[CalibratedWorker, float]],
    samples: int,
    links: Mapping[str, WorkerLink],
    nbytes: int,
    **more: Any,
) -> StepProblem:
    """Return the step of calibrated workers, each with its seconds a sample. more: further fields of the problem.

    A link that is not known counts as the best of those that are.
    """
    best = min(links.values(), key=lambda link: link.seconds(nbytes), default=FREE)
    costs = (worker_cost(row, seconds, samples, links.get(name, best)) for name, (row, seconds) in workers.items())
    cores = {row.host: row.cores for row, _ in workers.values() if row.host and row.cores}
    return StepProblem(tuple(costs), samples, nbytes, cores=cores, **more)


@dataclass(frozen=True, slots=True)
class PricedStrategy:
    """A strategy's step on these workers.

    samples: of the step, by worker. compute: seconds until the slowest has computed. exchange: the rest of the step.
    step: samples of the step. needed: samples for the progress that one sample of a shared step makes. every:
    minibatches of the fastest worker in the step, where each makes steps of its own. group: workers of each group; each
    of them has its samples. estimated: a part of the seconds is not measured here.
    """

    strategy: str
    samples: dict[str, int]
    compute: float
    exchange: float
    step: int
    needed: float = 1.0
    every: int | None = None
    group: int | None = None
    estimated: bool = False

    @property
    def workers(self) -> tuple[str, ...]:
        """The workers that take part."""
        return tuple(self.samples)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.compute + self.exchange

    @property
    def seconds(self) -> float:
        """Expected seconds a sample of progress."""
        return self.step_seconds * self.needed / self.step

    @property
    def compared(self) -> float:
        """The seconds by which it is compared: longer where they go by figures of other networks or clusters."""
        return self.seconds * asked_of(self.needed, estimated=self.estimated)

    def like(self, other: PricedStrategy) -> bool:
        """Return True if it is the same strategy on the same workers."""
        one, then = ((each.strategy, each.group, each.samples.keys()) for each in (self, other))
        return one == then

    def row(self) -> PricedStep:
        """Return the price as it is logged."""
        fields = PricedStep.model_fields.keys()
        return PricedStep(**{name: getattr(self, name) for name in fields})


Pricer: TypeAlias = Callable[[StepProblem], Iterable[PricedStrategy]]


def alone(problem: StepProblem) -> Iterator[PricedStrategy]:
    """Yield each worker by itself, which exchanges nothing and waits for no other."""
    for own in problem.workers:
        samples = problem.samples
        yield PricedStrategy(ALONE, {own.name: samples}, own.seconds(samples), 0.0, samples)


def shared_steps(problem: StepProblem) -> Iterator[PricedStrategy]:
    """Yield `bsp` on the best two workers, the best three, and so on to all of them."""
    for k in range(2, min(len(problem.workers), problem.samples) + 1):
        ways = {own.name: problem.way(own, k) for own in problem.workers}
        slowest_ways = sorted(ways.values())[k - 1 :]  # within a shorter way there are fewer than k
        best = _shared(problem, problem.workers, k)
        least = best.step_seconds - problem.answer(slowest_ways[-1], k)  # fewer are not all heard sooner
        for slowest in dict.fromkeys(slowest_ways[:-1]):
            if least + problem.answer(slowest, k) >= best.step_seconds:
                break
            found = _shared(problem, [own for own in problem.workers if ways[own.name] <= slowest], k)
            best = found if found.step_seconds < best.step_seconds else best
        yield priced_set(problem, best.samples) if problem.cores else best


def _shared(problem: StepProblem, workers: Sequence[WorkerCost], k: int) -> PricedStrategy:
    """Return the step of those `k` workers that are heard soonest, each with `LEAST` samples where there are as many.

    All of these workers count for the slowest answer: fewer are given where that is shorter.
    """
    ways = {own.name: problem.way(own, 1) for own in workers}
    least = LEAST if LEAST * k <= problem.samples else 1
    first = {own.name: own.seconds(least) + ways[own.name] for own in workers}
    each = {own.name: max(own.each, _LEAST_EACH) for own in workers}
    more = max(0, problem.samples - least * k)  # besides the first ones of each
    level = min(own.seconds(problem.samples) + ways[own.name] for own in workers)

    def most(seconds: float) -> list[tuple[float, str]]:
        """The samples of those that make the most within these seconds, besides their first ones."""
        return sorted((((seconds - first[name]) / each[name], name) for name in first), key=lambda one: -one[0])[:k]

    while True:  # the sum of the most is convex, so that this comes down to the level at which it is `more`
        busy = [name for samples, name in most(level) if samples > 0]
        if not busy:
            break
        then = (more + sum(first[name] / each[name] for name in busy)) / sum(1 / each[name] for name in busy)
        if then >= level * (1 - 1e-15):
            break
        level = then
    level = max(level, sorted(first.values())[k - 1])
    taken = most(level)
    parts = proportional(more, [max(0.0, samples) for samples, _ in taken]) if more else [0] * k
    named = {name: least + part for (_, name), part in zip(taken, parts, strict=True)}
    samples = {own.name: named[own.name] for own in workers if own.name in named}
    compute = min(level, max(own.seconds(samples[own.name]) for own in workers if own.name in samples))
    exchange = level - compute + problem.answer(max(problem.way(own, k) for own in workers), k)
    exchange = problem.left(exchange, compute)
    return PricedStrategy(SHARED, samples, compute, exchange, problem.samples)


def local_steps(problem: StepProblem) -> Iterator[PricedStrategy]:
    """Yield `local-sgd` on two workers, on three, and so on.

    They are the fastest of those within the best of their ways, or the best ones of one fewer and any other. So no
    worker that is left out would make the least of them less.
    """
    by_speed = sorted(problem.workers, key=lambda own: own.seconds(problem.samples))
    best: PricedStrategy | None = None
    for k in range(2, min(len(by_speed), _MOST_APART) + 1):
        ways = {own.name: problem.way(own, k) for own in by_speed}
        within = [[own.name for own in by_speed if ways[own.name] <= way][:k] for way in sorted({*ways.values()})]
        sets = [{*names} for names in within if len(names) == k]
        sets += [{own.name, *best.samples} for own in by_speed if own.name not in best.samples] if best else []
        best = min((priced_set(problem, names, LOCAL) for names in sets), key=lambda each: each.seconds)
        yield best


def _apart(
    problem: StepProblem, workers: Sequence[WorkerCost], ways: Mapping[str, float], every: int | None = None
) -> PricedStrategy:
    """Return the time between two meetings of workers that make as many steps of their own as fit in.

    every: steps of the fastest in it, the first one; None: the best number.
    """
    k, batch = len(workers), problem.samples
    rates = {own.name: batch / own.seconds(batch) for own in workers}
    rate, step = sum(rates.values()), workers[0].seconds(batch)
    taken = problem.overhead + k * problem.merge
    exchange = 2 * max(ways[own.name] for own in workers) + taken
    waited = taken if problem.overlaps else exchange
    best = max(_SLACK * exchange if problem.overlaps else 0.0, (waited / (_BETWEEN * rate)) ** 0.5)
    every = every or max(1, (ceil if problem.overlaps else round)(min(best, problem.epoch / rate) / step))
    compute = every * step
    samples = {name: max(1, round(own * compute)) for name, own in rates.items()}
    meanwhile = min(exchange, compute) if problem.overlaps else 0.0
    needed = _needed(rates) * (1 + _BETWEEN * rate * (compute + meanwhile))
    hidden = min(exchange - taken, meanwhile)
    exchange -= hidden * (1 - min(1.0, rate * compute / problem.epoch))
    return PricedStrategy(LOCAL, samples, compute, exchange, sum(samples.values()), needed, every)


def _needed(rates: Mapping[str, float]) -> float:
    """Return the samples that replicas of these speeds need for the progress of one replica's sample."""
    total = sum(rates.values())
    replicas = 1 / sum((rate / total) ** 2 for rate in rates.values())  # of equal ones, their number
    known = sorted(_APART.items())
    for (few, least), (many, most) in pairwise(known):
        if replicas <= many:
            return least * (most / least) ** (log(replicas / few) / log(many / few))
    return known[-1][1] * replicas / known[-1][0]


def priced_set(
    problem: StepProblem, names: Iterable[str], strategy: str = SHARED, every: int | None = None
) -> PricedStrategy:
    """Return `bsp` or `local-sgd` on exactly these workers: alone, if it is one. every: as in `PricedStrategy`."""
    asked = {*names}
    problem = problem.together(asked)
    workers = [own for own in problem.workers if own.name in asked]
    if len(workers) == 1:
        return next(alone(replace(problem, workers=(workers[0],))))
    if strategy == LOCAL:
        by_speed = sorted(workers, key=lambda own: own.seconds(problem.samples))
        return _apart(problem, by_speed, {own.name: problem.way(own, len(workers)) for own in workers}, every)
    return _shared(problem, workers, len(workers))


STRATEGIES: tuple[Pricer, ...] = (alone, shared_steps, local_steps)
"""The strategies that are compared. A paper's rule is asked for by name, and is not among them."""


def strategies_of(*, parts_ways: bool) -> tuple[Pricer, ...]:
    """Return the strategies that are compared. parts_ways: replicas may make steps of their own."""
    return tuple(each for each in STRATEGIES if parts_ways or each is not local_steps)
