"""The choice of a run's strategy and workers, and the memory of the workers that were left out.

They are asked again where one of the others is lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from daskcnn.events import ALONE, PricedStep, StrategyChosen
from daskcnn.job.tables import LAYER
from daskcnn.ps import BSP, LocalSGD, UpdateRule
from daskcnn.ps.auto import ALONE as BY_ITSELF
from daskcnn.sharded.balance import WorkerLink
from daskcnn.training.coordinator import orders
from daskcnn.training.coordinator.facts import ServerProbed
from daskcnn.training.coordinator.orders import Outbox
from daskcnn.training.coordinator.roster import Roster
from daskcnn.training.coordinator.settings import Settings
from daskcnn.training.strategy_choice import STRATEGIES, PricedStrategy, choose, local_steps, measured_problem

REMEDY = "it is free for another job; to use it anyway, train by strategy bsp"


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice of a run. event: as it is logged. left_out: why, by worker, of those that were asked.

    turn: the kind of run that it is instead, where kernels are sharded.
    """

    rule: UpdateRule
    event: StrategyChosen
    left_out: dict[str, str]
    turn: orders.Turn | None = None


class Choosing:
    """The links of a run's workers so far, and its choices. spared: workers that were left out, with their kinds."""

    def __init__(self, settings: Settings) -> None:
        self._asked = settings
        self._links: dict[str, WorkerLink] = {}
        self.spared: dict[str, str] = {}

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

    def decide(self, fact: ServerProbed, roster: Roster, *, begins: bool = False) -> Choice:
        """Return the choice among all calibrated workers. begins: nothing is trained yet: kernels may be sharded."""
        self._links.update(fact.links)
        asked, measured = self._asked, {name: (own.row, own.seconds) for name, own in roster.alive.items()}
        server = {"bandwidth": fact.bandwidth, "merge": fact.merge, "overhead": fact.overhead, "ahead": fact.ahead}
        how: dict[str, Any] = {"epoch": asked.samples, "overlaps": asked.overlap, **server}
        problem = measured_problem(measured, asked.batch_size, self._links, fact.nbytes, **how)
        pricers = [each for each in STRATEGIES if asked.parts_ways or each is not local_steps]
        if begins and asked.sharded is not None:
            pricers += asked.sharded.pricers({name: row for name, (row, _) in measured.items()})
        found = choose(problem, pricers)
        left_out = {part.worker: part.why_left_out for part in found.left_out if part.worker in fact.workers}
        self.spared |= {worker: roster.kind(worker) for worker in left_out}
        return Choice(self._rule_of(found.chosen.row()), found.event(), left_out, _turn_of(found.chosen))

    def _rule_of(self, chosen: PricedStep) -> UpdateRule:
        if chosen.strategy == ALONE:
            return self._alone
        return BSP() if chosen.every is None else LocalSGD(every=chosen.every)

    def recall(self, lost: Iterable[str], roster: Roster, out: Outbox, now: float) -> None:
        """Let those that were left out measure themselves again, where one of the others is lost."""
        if not self.spared or not any(worker in roster.alive for worker in lost):
            return
        for worker, kind in self.spared.items():
            roster.calibrate(worker, kind, now)
            out.put(orders.Calibrate(worker))
        out.warn(f"a worker is lost: {', '.join(self.spared)}, left out until now, may be used again")
        self.spared = {}


def _turn_of(chosen: PricedStrategy) -> orders.Turn | None:
    if chosen.strategy == LAYER or chosen.group is not None:
        return orders.Turn(chosen.strategy, chosen.group or 1)
    return None


def alike(rule: UpdateRule, other: UpdateRule) -> bool:
    """Return True if a run may go on by the one as it began by the other: local steps may be more or fewer."""
    return type(rule) is type(other) and rule.serverless == other.serverless
