"""The change of a strategy between two rounds of a run, by what its rounds have taken. No clock, no I/O.

Candidates are priced as at the start (`strategy_prices`), with what was measured since in the place of calibrations
and probes: a worker is as many times slower as its steps took longer, and its link has what its meetings took longer.

Measurements differ by chance, by up to a tenth each way, and so by 1.1 / 0.9 = 1.22 against each other. A change has to
hold where they do (`SURER`). Then no such chance makes a run change back and forth:

- A worker that is not used counts as `SURER` times as slow as it is measured, one that would be left out no longer as
  as many times as fast. What others take is in both prices, and cancels: one of eight workers is as sure of its place
  as one of two.
- Another strategy has to be expected to be `SURER` times as soon.

A change takes a while: all state is kept, another server starts, replicas join. The rest of the run has to gain more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median

from daskcnn.events import ALONE, SURER
from daskcnn.sharded.balance import WorkerLink
from daskcnn.training.round_report import RoundReport
from daskcnn.training.strategy_choice import priced
from daskcnn.training.strategy_prices import (
    SHARED,
    STRATEGIES,
    WAY_BACK,
    PricedStrategy,
    Pricer,
    StepProblem,
    WorkerCost,
    priced_set,
)

_FLAT = 1.05
"""The same, besides, for workers with steps of their own: how fast one is hardly changes what it brings."""
CHANGE = 0.4
"""Seconds that a change takes, besides the ways of its vectors: from the end of a round to the first step of the next.

Three workers and a server on two busy cores, a small network, `bsp` without one of them, by the logs of two runs
(`tests/cluster/test_strategy_changes.py`): 0.26 and 0.42 s, where 0.1 to 0.2 s lie between any two rounds.
"""
_FASTER = 10.0  # times that a link may turn out to be as fast
_VECTORS = 4  # that travel at a change: state from and to the server, center and optimizer's state to replicas


@dataclass(frozen=True, slots=True)
class WayToTrain:
    """The way in which workers train: alone, by `bsp`, or by `local-sgd` whose replicas meet after `every` steps."""

    workers: frozenset[str]
    strategy: str = SHARED
    every: int | None = None

    def price(self, problem: StepProblem) -> PricedStrategy:
        """Return its step."""
        return priced_set(problem, self.workers, self.strategy, self.every)


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """The steps of a worker's last round.

    samples, seconds: of one, the mean. exchange: seconds of a meeting, without waiting for others; None: there was
    none. hidden: of those, the ones during which steps were made.
    """

    samples: float
    seconds: float
    exchange: float | None = None
    hidden: float = 0.0

    @classmethod
    def of(cls, report: RoundReport, batch: int) -> MeasuredSteps | None:
        """Return what a report tells; None if that is nothing. batch: samples of a step that is not cut."""
        samples = report.samples
        if report.cut is not None or not (samples and report.busy):
            return None
        steps, meetings = report.round.steps or -(-samples // batch), report.pushes
        found = cls(samples / steps, report.busy / steps)
        if report.round.alone or not meetings:
            return found
        return replace(found, exchange=report.communication / meetings, hidden=report.hidden / meetings)


# --- what was measured ---


def at_speeds(problem: StepProblem, steps: Mapping[str, MeasuredSteps]) -> StepProblem:
    """Return the problem with workers as fast as these steps of theirs, made together, have shown them to be.

    Rounds take longer than calibrations, so the others count as slower by as much; but a worker that has got slower
    says nothing of another.
    """
    together = problem.together(steps.keys()).workers
    slower = {own.name: _slower(own, steps[own.name]) for own in together if own.name in steps}
    others = min(max(median(slower.values()), 1 / SURER), SURER) if slower else 1.0
    return replace(problem, workers=tuple(own.times(slower.get(own.name, others)) for own in problem.workers))


def with_links(problem: StepProblem, way: WayToTrain, steps: Mapping[str, MeasuredSteps]) -> StepProblem:
    """Return the problem with links as these meetings of workers that train in this way have shown them to be."""
    if len(way.workers) == 1:
        return problem
    together = problem.together(way.workers)
    workers = (
        replace(own, link=_link(together, own, way, steps[own.name])) if own.name in way.workers & steps.keys() else own
        for own in problem.workers
    )
    return replace(problem, workers=tuple(workers))


def _slower(own: WorkerCost, took: MeasuredSteps) -> float:
    return took.seconds / expected if (expected := own.seconds(took.samples)) else 1.0


def _link(problem: StepProblem, own: WorkerCost, way: WayToTrain, took: MeasuredSteps) -> WorkerLink:
    """Return the link of a worker whose meetings with the others took this long."""
    if took.exchange is None:
        return own.link
    workers, shared, whole = len(way.workers), way.strategy == SHARED, took.exchange + took.hidden
    if shared:
        whole = _whole(problem, whole, took.seconds)
    expected = problem.way(own, 1 if shared else workers) + problem.way(own, workers)
    ways = max(0.0, whole - problem.overhead - workers * problem.merge)
    if ways >= expected:  # a longer latency is as long whatever limits the bandwidth
        return replace(own.link, latency=own.link.latency + (ways - expected) / 2)
    return own.link.faster(expected / max(ways, expected / _FASTER))


def _whole(problem: StepProblem, seen: float, compute: float) -> float:
    """Return the seconds of an exchange of which these were seen behind the computing: the inverse of `left`."""
    ahead = problem.ahead
    sent = (seen - ahead * problem.overhead) / (1 - ahead) if ahead < 1 else inf
    return max(seen, min(sent, seen + WAY_BACK * compute))


# --- the change ---


def better(
    problem: StepProblem, way: WayToTrain, samples: float, pricers: Sequence[Pricer] = STRATEGIES, surer: float = SURER
) -> PricedStrategy | None:
    """Return what is sooner than the present way by so much that no chance has made it so; None: nothing is.

    problem: of workers that train, and of others that might. samples: of the rest of the run, in which the change has
    to save more than it takes.
    """
    now = way.price(problem)

    def pays(then: PricedStrategy) -> bool:
        if then.strategy == way.strategy and way.workers < then.samples.keys():
            return True  # they are taken in besides, at no cost
        slowest = max(problem.way(own, 1) for own in problem.workers)
        return (now.seconds - then.seconds) * samples > CHANGE + _VECTORS * slowest

    found = [
        each for each in priced(problem, pricers) if not _of_others(each, way) and each.compared * surer < now.compared
    ]
    cautious = _differing(problem, {own.name for own in problem.workers} - way.workers, surer)
    for each in (each for each in priced(cautious, pricers) if _of_others(each, way)):
        without = _differing(problem, way.workers - each.samples.keys(), 1 / surer)
        if each.compared * (_FLAT if each.needed != 1 else 1) < way.price(without).compared:
            found.append(priced_set(problem, each.samples, each.strategy))
    return min(filter(pays, found), key=lambda each: each.compared, default=None)


def _of_others(each: PricedStrategy, way: WayToTrain) -> bool:
    """Return True for the present strategy on other workers: those are compared one by one."""
    return each.strategy == way.strategy != ALONE and each.samples.keys() != way.workers


def _differing(problem: StepProblem, names: Iterable[str], factor: float) -> StepProblem:
    """Return the problem with these workers, and their links, as many times as slow."""
    slow = {*names}
    workers = tuple(
        replace(own.times(factor), link=own.link.faster(1 / factor)) if own.name in slow else own
        for own in problem.workers
    )
    return replace(problem, workers=workers)
