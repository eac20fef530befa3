"""The choice of a run's strategy and workers at its start, and its change as the run goes on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from daskcnn.events import ALONE, SURER, StrategyChosen
from daskcnn.job.tables import LAYER
from daskcnn.ps import BSP, LocalSGD, UpdateRule
from daskcnn.ps.auto import ALONE as BY_ITSELF
from daskcnn.sharded.balance import WorkerLink
from daskcnn.training.coordinator import orders
from daskcnn.training.coordinator.facts import ServerProbed
from daskcnn.training.coordinator.roster import Roster
from daskcnn.training.coordinator.settings import Settings
from daskcnn.training.coordinator.spared import Spared
from daskcnn.training.round_report import RoundReport
from daskcnn.training.strategy_change import MeasuredSteps, WayToTrain, at_speeds, better, with_links
from daskcnn.training.strategy_choice import choose
from daskcnn.training.strategy_prices import (
    LOCAL,
    SHARED,
    PricedStrategy,
    StepProblem,
    measured_problem,
    strategies_of,
)

REMEDY = "it is free for another job, and measured again now and then; to use it anyway, train by strategy bsp"
TOO_LATE = "what is left of the run is too short for a change of all to pay"


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision: the way of a run from its next life on.

    event: as it is logged. workers: that it was chosen for; none: all. left_out: why, by worker. turn: the
    kind of run that it is instead, where kernels are sharded.
    """

    rule: UpdateRule
    event: StrategyChosen | None = None
    workers: frozenset[str] = frozenset()
    left_out: Mapping[str, str] = field(default_factory=dict)
    turn: orders.Turn | None = None


@dataclass(frozen=True, slots=True)
class Rest:
    """The rest of a run. step: samples of a step. samples: presentations that are still to be given out."""

    step: int
    samples: int


class Choosing:
    """Choices of a run, by what is known of its workers and links. spared: workers that were left out."""

    def __init__(self, settings: Settings) -> None:
        self._asked = settings
        self._links: dict[str, WorkerLink] = {}
        self._nbytes, self._server = 0, dict[str, Any]()  # as they were probed last
        self._steps: dict[str, MeasuredSteps] = {}
        self._pricers = strategies_of(parts_ways=settings.parts_ways)
        self.spared = Spared()

    def unmeasured(self, workers: int) -> UpdateRule | None:
        """Return the rule of this number of workers where there is nothing to compare; None where there is."""
        asked = self._asked
        if not asked.chooses:
            return asked.rule
        if workers == 1:
            return self._alone
        return None if self.compares else BSP()

    @property
    def compares(self) -> bool:
        """True if workers may be left out, by what they bring."""
        return self._asked.chooses_workers

    @property
    def _alone(self) -> UpdateRule:
        """The rule of one worker. An average of the weights is kept by the server."""
        return BSP() if self._asked.averages else BY_ITSELF

    def _rule_of(self, chosen: PricedStrategy) -> UpdateRule:
        if chosen.strategy == ALONE:
            return self._alone
        return BSP() if chosen.every is None else LocalSGD(every=chosen.every)

    # --- what is known ---

    def heed(self, fact: ServerProbed) -> None:
        """Take in what was probed of workers that have just been calibrated."""
        self._links.update(fact.links)
        self._nbytes = fact.nbytes
        self._server = {name: getattr(fact, name) for name in ("bandwidth", "merge", "overhead", "ahead", "home")}
        for worker in fact.workers:
            self._steps.pop(worker, None)

    def take(self, report: RoundReport, step: int) -> None:
        """Take in a round of a worker. step: samples of a step that is not cut."""
        if (steps := MeasuredSteps.of(report, step)) is not None:
            self._steps[report.worker] = steps

    def _problem(self, roster: Roster, workers: Collection[str], step: int) -> StepProblem:
        """Return the step of these workers, by their last rounds where there are any."""
        measured = {name: (own.row, own.seconds) for name, own in roster.alive.items() if name in workers}
        asked, how = self._asked, dict(self._server)
        how |= {"epoch": asked.samples, "overlaps": asked.overlap}
        found = measured_problem(measured, asked.batch_size, self._links, self._nbytes, **how)
        return replace(at_speeds(found, self._steps), samples=step)

    # --- choices ---

    def decide(self, fact: ServerProbed, roster: Roster, *, begins: bool = False) -> Choice:
        """Return the choice among all calibrated workers. begins: nothing is trained yet: kernels may be sharded."""
        self.heed(fact)
        asked, pricers = self._asked, self._pricers
        if begins and asked.sharded is not None:
            pricers = (*pricers, *asked.sharded.pricers({name: own.row for name, own in roster.alive.items()}))
        found = choose(self._problem(roster, roster.alive, asked.batch_size), pricers)
        left_out = {part.worker: part.why_left_out for part in found.left_out}
        return Choice(self._rule_of(found.chosen), found.event(), left_out=left_out, turn=_turn_of(found.chosen))

    def way(self, rule: UpdateRule, workers: Collection[str]) -> WayToTrain:
        """Return the way in which these workers train by this rule."""
        if len(workers) == 1:
            return WayToTrain(frozenset(workers), ALONE)
        if isinstance(rule, LocalSGD):
            return WayToTrain(frozenset(workers), LOCAL, rule.period)
        return WayToTrain(frozenset(workers), SHARED)

    def seconds(self, way: WayToTrain, roster: Roster, rest: Rest) -> float:
        """Return the seconds a sample of the present way."""
        return way.price(self._problem(roster, way.workers, rest.step)).seconds

    def reconsider(self, way: WayToTrain, roster: Roster, rest: Rest) -> Choice | None:
        """Compare anew, as all have reported a round; return a change that pays."""
        if len(way.workers) == 1:
            return None
        problem = with_links(self._problem(roster, way.workers, rest.step), way, self._steps)
        self._links |= {own.name: own.link for own in problem.workers}
        then = better(problem, way, rest.samples, self._pricers)
        return None if then is None else self._change(problem, way, then)

    def judge(self, fact: ServerProbed, way: WayToTrain, roster: Roster, rest: Rest) -> Choice:
        """Return what becomes of a worker that came, or was measured again: it may be left out, or change all."""
        self.heed(fact)
        (worker,) = fact.workers
        problem = self._problem(roster, way.workers | {worker}, rest.step)
        surer = SURER if worker in self.spared.again else 1.0
        then = better(problem, way, rest.samples, self._pricers, surer)
        if then is not None and worker in then.samples:
            return self._change(problem, way, then)
        found = choose(problem, self._pricers, way.price(problem))
        (part,) = (part for part in found.parts if part.worker == worker)
        reason = part.why_left_out if part.with_it > part.without else TOO_LATE
        return Choice(self._rule_of(found.chosen), found.event(), way.workers, {worker: reason})

    def _change(self, problem: StepProblem, way: WayToTrain, then: PricedStrategy) -> Choice:
        found = choose(problem, self._pricers, then)
        why = {part.worker: part.why_left_out for part in found.left_out if part.worker in way.workers}
        return Choice(self._rule_of(then), found.event(way.price(problem)), frozenset(then.samples), why)


def _turn_of(chosen: PricedStrategy) -> orders.Turn | None:
    if chosen.strategy == LAYER or chosen.group is not None:
        return orders.Turn(chosen.strategy, chosen.group or 1)
    return None


def alike(rule: UpdateRule, other: UpdateRule) -> bool:
    """Return True if a run may go on by the one as it began by the other: local steps may be more or fewer."""
    return type(rule) is type(other) and rule.serverless == other.serverless
