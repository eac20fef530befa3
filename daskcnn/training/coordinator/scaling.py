"""The workers that a run asks its cluster for, and those that it lets go, by what each brings. No clock, no I/O.

Behind a barrier a step takes as long as the workers compute that share it by speed, and the rest of its time, which
grows with their number, as the server's part of a meeting does. Without one each worker makes its own rounds, and
their speeds add up. So the gain of one more worker is that of `daskcnn plan`: the part by which the epochs become
shorter. Once a worker is there, what the others took without it tells what it brings.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from daskcnn.training.coordinator.roster import Measured
from daskcnn.training.coordinator.settings import Settings
from daskcnn.training.round_report import RoundReport
from daskcnn.training.strategy_choice import PAYS
from daskcnn.training.strategy_prices import StepProblem, WorkerCost, priced_set

STAYS: Final = PAYS / 2
"""A worker that is there is let go if it shortens the run by less than this part."""
COMES: Final = 15.0
"""Seconds that another worker takes until it is of use: it has to save more."""
_SETTLED: Final = 2
"""Rounds of each worker after which it shows what a worker brings: in its first one its share is not yet its own. In as
many it has to bring too little before it goes: one may be slow for other reasons."""
ANEW: Final = 600.0
"""Seconds after a worker that went after which another one is asked for. Each such worker doubles them."""


def worth_having(problem: StepProblem, least: int, most: int, left: float = inf) -> tuple[int, float]:
    """Return the number of workers that are worth having, and the gain of the first that is not there yet.

    Those of the problem count, and others like the one of middle speed, as long as each shortens the run by `PAYS` and
    by more than it takes to come. There are at most twice as many: what more of them exchange is not known. left:
    seconds of the run that are left with those that are there.
    """
    number, first, most = len(problem.workers), 0.0, min(most, 2 * len(problem.workers))
    like = sorted(problem.workers, key=lambda own: own.seconds(problem.samples / number))[number // 2]
    before = now = step_seconds(problem)
    while number < min(most, problem.samples):
        problem = replace(problem, workers=(*problem.workers, replace(like, name=f"another {number}")))
        then = step_seconds(problem)
        first = first or 1 - then / now
        if 1 - then / now < PAYS or left * (now - then) / before < COMES:
            break
        number, now = number + 1, then
    return max(least, min(number, most)), first


def step_seconds(problem: StepProblem) -> float:
    """Return the seconds of a step that all workers of the problem share."""
    return priced_set(problem, [own.name for own in problem.workers]).step_seconds


@dataclass(frozen=True, slots=True)
class ScaleDecision:
    """A decision. wanted: workers that the run should have. gain: the part by which the first of those shortens it.

    leaver: a worker that brings too little, if one does.
    """

    wanted: int
    gain: float
    leaver: str | None = None


class WorkerScaling:
    """Decides on the number of workers of one run, once each of them has reported.

    limit: The most that are of use: fewer than the job's for a while, where one has turned out to bring too little.
    """

    def __init__(self, settings: Settings) -> None:
        self._peers, self._least = settings.peers, sum(settings.least.values())
        self.limit = self._most = settings.asks
        self._anew, self._times = inf, 0  # when the limit ends, and how many there were
        self._asked, self._doubts = 0, 0
        self._there: frozenset[str] = frozenset()
        self._reports: dict[str, RoundReport] = {}
        self._rounds: dict[str, int] = {}  # since the last worker has come or gone
        self._took: dict[frozenset[str], float] = {}  # seconds a sample, by those who trained

    def add(self, report: RoundReport, workers: Collection[str]) -> None:
        """Take in the report of a round. workers: all that train. One that ended early says too little."""
        if not (self.limit and report.samples and _seconds(report)) or report.cut is not None:
            return
        if (there := frozenset(workers)) != self._there:
            self._there, self._reports, self._rounds = there, {}, dict.fromkeys(workers, 0)
            self._asked = self._doubts = 0
        self._reports[report.worker] = report
        self._rounds[report.worker] += 1

    def decide(
        self,
        rows: Mapping[str, Measured],
        now: float,
        *,
        barrier: bool,
        step: int | None,
        left: int,
        stays: Collection[str],
    ) -> ScaleDecision | None:
        """Return another number of workers than now, or a worker to let go; None where all is well.

        rows: the calibrated workers. barrier: all wait for all, and have just ended a round. step: samples of a step
        that all share, if they do. left: presentations that are to be made. stays: workers that are not let go.
        """
        if now >= self._anew:
            self.limit, self._anew = self._most, inf
        if not self._reports or self._reports.keys() != self._there or rows.keys() != self._there:
            return None
        took = self._took[self._there] = 1 / sum(own.samples / _seconds(own) for own in self._reports.values())
        problem = self._problem(barrier, rows, step, took)
        leaver = self._leaver(problem, took, stays)
        self._doubts = 0 if leaver is None else self._doubts + 1
        if leaver is not None and self._doubts >= _SETTLED * (1 if barrier else len(self._there)):
            self.stop_at(len(self._there) - 1, now)
            return ScaleDecision(self.limit, 0.0, leaver)
        wanted, gain = worth_having(problem, self._least, self.limit, left * took)
        if wanted <= max(len(self._there), self._asked):
            return None
        self._asked = wanted
        return ScaleDecision(wanted, gain)

    def stop_at(self, limit: int, now: float) -> None:
        """Ask for no more workers than this for a while: one more has turned out to bring too little."""
        self.limit, self._anew = limit, now + ANEW * 2**self._times
        self._times += 1

    def _problem(self, barrier: bool, rows: Mapping[str, Measured], step: int | None, took: float) -> StepProblem:
        """Return the step that takes as long as was measured."""
        reports = self._reports
        samples = step or sum(own.samples for own in reports.values())
        costs = []
        for name, own in reports.items():
            each = (own.busy if barrier else _seconds(own)) / own.samples
            part = own.samples / own.round.steps if step and own.round.steps else samples
            fixed = min(rows[name].row.step_fixed or 0.0, 0.999 * each * part) if step else 0.0
            costs.append(WorkerCost(name, fixed, each - fixed / part))
        problem = StepProblem(tuple(costs), samples, 0)
        rest = max(0.0, took * samples - step_seconds(problem)) if len(costs) > 1 else 0.0
        return replace(problem, merge=rest / len(costs))

    def _leaver(self, problem: StepProblem, took: float, stays: Collection[str]) -> str | None:
        """Return the worker that brings the least, if that is too little."""
        there, gains = self._there, dict[str, float]()
        if self._peers or len(there) <= max(1, self._least) or min(self._rounds.values()) < _SETTLED:
            return None
        for name in there - {*stays}:
            others = there - {name}
            part = step_seconds(problem) / priced_set(problem, others).step_seconds
            gains[name] = 1 - (took / self._took[others] if others in self._took else part)
        least = min(sorted(gains), key=gains.__getitem__, default=None)
        return least if least is not None and gains[least] < STAYS else None


def _seconds(report: RoundReport) -> float:
    return report.busy + report.wait + report.communication
