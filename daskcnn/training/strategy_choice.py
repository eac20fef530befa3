"""The choice of a strategy: the least expected seconds a sample, the part of each worker, and what would change it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isinf

from daskcnn.events import ALONE, StrategyChosen, WorkerGain
from daskcnn.training.strategy_prices import (
    LOCAL,
    SHARED,
    STRATEGIES,
    PricedStrategy,
    Pricer,
    StepProblem,
    WorkerCost,
    local_steps,
    priced_set,
    strategies_of,
)

PAYS = 0.05
"""A worker pays if it shortens the run by this part or more."""
EXCHANGES = 0.45
"""The part of a shared step's computing that its exchange has to take for local steps to be compared at all."""
_EQUAL = 1e-9  # part of a time within which two are equal
_WORTH_NAMING = 0.99  # of the seconds, for which another worker is named
_FASTEST_LINK = 1e6  # times the present one


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """The least expected seconds, and all that were compared, the least first.

    parts: of each worker. faster_link: the factor by which faster links change the choice; None: none would. more: what
    would be chosen with another worker like the fastest.
    """

    candidates: tuple[PricedStrategy, ...]
    parts: tuple[WorkerGain, ...] = ()
    faster_link: tuple[float, PricedStrategy] | None = None
    more: PricedStrategy | None = None

    @property
    def chosen(self) -> PricedStrategy:
        """The strategy with the least expected seconds; of equal ones that with the fewest workers."""
        return self.candidates[0]

    @property
    def alone(self) -> PricedStrategy:
        """The soonest worker by itself."""
        return next(each for each in self.candidates if each.strategy == ALONE)

    @property
    def left_out(self) -> tuple[WorkerGain, ...]:
        """The workers that cost more than they bring."""
        return tuple(part for part in self.parts if not part.used)

    def event(self, before: PricedStrategy | None = None) -> StrategyChosen:
        """Return the choice as it is logged. before: what is changed, at its present price."""
        factor, linked = self.faster_link or (None, None)
        return StrategyChosen(
            before=before and before.row(),
            candidates=[each.row() for each in self.candidates],
            parts=self.parts,
            faster_link=factor,
            linked=linked and linked.row(),
            more=self.more and self.more.row(),
        )


def choose(
    problem: StepProblem, pricers: Sequence[Pricer] = STRATEGIES, chosen: PricedStrategy | None = None
) -> StrategyChoice:
    """Return the strategy with the least expected seconds, the parts of all workers, and what would change it.

    problem: with one worker at least. pricers: the strategies to compare; each is asked again for faster links and for
    another worker. chosen: the strategy, where it is chosen otherwise.
    """
    candidates = priced(problem, pricers)
    least, chosen = candidates[0], chosen or candidates[0]
    candidates = [chosen, *(each for each in candidates if not each.like(chosen))]
    fastest = min(problem.workers, key=lambda own: own.seconds(problem.samples))
    more = priced(problem.with_one_more(fastest), pricers)[0]
    return StrategyChoice(
        tuple(candidates),
        tuple(_parts(problem, chosen, pricers)),
        _faster_link(problem, pricers, chosen) if chosen.like(least) else None,
        more if more.seconds < chosen.seconds * _WORTH_NAMING else None,
    )


def priced(problem: StepProblem, pricers: Sequence[Pricer]) -> list[PricedStrategy]:
    """Return all candidates, the least seconds first; of equal ones that with the fewest workers first.

    Local steps are none on workers whose shared ones are sooner than one worker alone and exchange for less than
    `EXCHANGES` of their computing.
    """
    found = [each for pricer in pricers for each in pricer(problem)]
    steps = [each for each in found if each.strategy in (ALONE, SHARED) and each.group is None]
    exact = min(steps, key=lambda each: each.seconds, default=None)
    if exact is not None and exact.strategy == SHARED and exact.exchange <= EXCHANGES * exact.compute:
        found = [each for each in found if each.strategy != LOCAL or not each.samples.keys() <= exact.samples.keys()]
    equal = min(each.compared for each in found) * (1 + _EQUAL)
    return sorted(found, key=lambda each: (max(each.compared, equal), len(each.samples), each.compared))


def _parts(problem: StepProblem, chosen: PricedStrategy, pricers: Sequence[Pricer]) -> Iterator[WorkerGain]:
    """Yield each worker's part, where steps are shared or made alone."""
    if chosen.strategy not in (ALONE, SHARED, LOCAL) or chosen.group is not None:
        return
    kind = LOCAL if chosen.strategy == LOCAL else SHARED
    for own in problem.workers:
        used = own.name in chosen.samples
        others = {*chosen.samples} - {own.name}
        if others:
            there = chosen if used else priced_set(problem, {*others, own.name}, kind)
            away = priced_set(problem, others, kind) if used else chosen
            yield _gain(own, used, there, away, problem.samples)
        elif rest := tuple(each for each in problem.workers if each.name != own.name):
            # it is the one that is alone: what would be without it is another choice
            plain = strategies_of(parts_ways=local_steps in pricers)
            without = priced(replace(problem, workers=rest), plain)[0]
            yield _gain(own, used, chosen, without, problem.samples)


def _gain(own: WorkerCost, used: bool, there: PricedStrategy, away: PricedStrategy, samples: int) -> WorkerGain:
    """Return the part of a worker by the step with it and the step away from it, for the progress of these samples."""
    with_it, without = (each.seconds * samples for each in (there, away))
    costs = (there.exchange * there.needed / there.step - away.exchange * away.needed / away.step) * samples
    brings = without - with_it + costs
    apart = LOCAL in (there.strategy, away.strategy)
    gain = {"with_it": with_it, "without": without, "brings": brings, "costs": costs}
    return WorkerGain(worker=own.name, used=used, apart=apart, **gain)


def _faster_link(
    problem: StepProblem, pricers: Sequence[Pricer], chosen: PricedStrategy
) -> tuple[float, PricedStrategy] | None:
    """Return the least factor of faster links at which something else is sooner than what is chosen, and what it is."""
    if len(problem.workers) == 1 or (
        len(chosen.samples) == len(problem.workers) and chosen.strategy == SHARED and chosen.group is None
    ):
        return None
    if all(isinf(own.link.bandwidth) and not own.link.each for own in problem.workers) and isinf(problem.bandwidth):
        return None

    def at(factor: float) -> PricedStrategy:
        then = priced(problem.linked(factor), pricers)[0]
        return then if then.compared < chosen.compared else chosen

    low, high, found = 1.0, _FASTEST_LINK, at(_FASTEST_LINK)
    if chosen.like(found):
        return None
    while high > 1.02 * low:  # a set's seconds are linear in the links' cost, so that it is chosen from one to another
        middle = (low * high) ** 0.5
        if chosen.like(then := at(middle)):
            low = middle
        else:
            high, found = middle, then
    return high, found
