"""Laws of the change of a strategy: by measurements that have changed, and never by chance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from daskcnn.events import ALONE, SURER
from daskcnn.sharded.balance import FREE, WorkerLink
from daskcnn.training.strategy_change import CHANGE, MeasuredSteps, WayToTrain, at_speeds, better, with_links
from daskcnn.training.strategy_choice import priced
from daskcnn.training.strategy_prices import LOCAL, SHARED, PricedStrategy, StepProblem, WorkerCost, shared_steps
from daskcnn.training.strategy_prices import STRATEGIES as ALL
from daskcnn.training.strategy_prices import alone as by_itself

LONG = 1e9  # samples: whatever a change takes, the rest of the run pays for it
CHANCE = 0.1
FAST = WorkerLink(1.25e8, 2e-4)


def problem(*speeds: float, link: WorkerLink = FAST, fixed: float = 0.0, **more: Any) -> StepProblem:
    """A step of 64 samples and a vector of 600 kB, by workers of these images a second."""
    workers = (WorkerCost(f"w{i}", fixed, 1 / speed, link) for i, speed in enumerate(speeds))
    return StepProblem(tuple(workers), 64, 6e5, epoch=50_000, **more)


def way_of(chosen: PricedStrategy) -> WayToTrain:
    return WayToTrain(frozenset(chosen.samples), chosen.strategy, chosen.every)


def names(numbers: Sequence[int]) -> frozenset[str]:
    return frozenset(f"w{i}" for i in numbers)


speeds = st.lists(st.sampled_from([30.0, 100.0, 300.0, 1000.0, 1100.0]), min_size=1, max_size=5)
links = st.sampled_from([FREE, FAST, WorkerLink(1.25e7, 5e-4), WorkerLink(5e6, 2e-3), WorkerLink(1e6, 0.01)])
problems = st.builds(
    lambda speeds, link, fixed: problem(*speeds, link=link, fixed=fixed, overhead=7e-4),
    *(speeds, links, st.sampled_from([0.0, 0.01])),
)


@given(problems)
@examples(max_examples=40, deadline=None)
def test_nothing_changes_where_measurements_are_as_they_were(found: StepProblem) -> None:
    assert better(found, way_of(priced(found, ALL)[0]), LONG) is None


def blurred(found: StepProblem, off: Sequence[float]) -> StepProblem:
    """Each worker's computing and its link as many times as slow as two of these numbers say, and the server too."""
    workers = tuple(
        replace(own, fixed=own.fixed * c, each=own.each * c, link=own.link.faster(1 / link))
        for own, c, link in zip(found.workers, off[::2], off[1::2], strict=False)
    )
    return replace(found, workers=workers, overhead=found.overhead * off[-1])


@given(
    problems, st.lists(st.lists(st.floats(1 - CHANCE, 1 + CHANCE), min_size=11, max_size=11), min_size=5, max_size=5)
)
@examples(max_examples=20, deadline=None)
def test_no_chance_makes_it_change_back_and_forth(found: StepProblem, off: list[list[float]]) -> None:
    way = way_of(priced(blurred(found, off[0]), ALL)[0])
    been = [(way.strategy, way.workers)]
    for each in off[1:]:
        if (then := better(blurred(found, each), way, LONG)) is not None:
            way = way_of(then)
            been += [(way.strategy, way.workers)] if been[-1] != (way.strategy, way.workers) else []
    assert len(been) == len({*been}), been


def test_another_strategy_has_to_be_so_much_sooner() -> None:
    two = problem(1000.0, 1000.0, link=FREE)
    alone = WayToTrain(names([0]), ALONE)
    for factor, sooner in ((SURER * 0.99, False), (SURER * 1.01, True)):
        # the second worker shortens the step by this factor
        overhead = 64 / 1000 / factor - 32 / 1000
        found = better(replace(two, overhead=overhead), alone, LONG, (by_itself, shared_steps))
        assert (found is not None) == sooner


def test_it_changes_only_where_the_rest_of_the_run_saves_more_than_the_change_takes() -> None:
    found, alone = problem(1000.0, 1000.0, link=FREE), WayToTrain(names([0]), ALONE)
    saved = alone.price(found).seconds / 2  # a sample
    assert better(found, alone, 0.99 * CHANGE / saved) is None
    assert better(found, alone, 1.01 * CHANGE / saved) is not None


def test_a_worker_more_that_changes_nothing_for_the_others_costs_nothing() -> None:
    found = better(problem(1000.0, 1000.0, 1000.0), WayToTrain(names([0, 1])), 64)
    assert found is not None
    assert found.samples.keys() == names([0, 1, 2])


def test_one_of_eight_equal_workers_is_taken_in_although_it_brings_an_eighth() -> None:
    found = problem(*[1000.0] * 8, link=WorkerLink(1.25e9, 1e-4))
    then = better(found, WayToTrain(names(range(7))), LONG)
    assert then is not None
    assert len(then.samples) == 8


@pytest.mark.parametrize("slower", [1.1, 5.0])
def test_a_worker_that_has_got_slower_is_left_out_once_it_costs_more_than_it_brings(slower: float) -> None:
    found = problem(1000.0, 1000.0, 1000.0, fixed=0.01)  # a shared step takes 0.031 s, that of two 0.042 s
    took = {f"w{i}": MeasuredSteps(64 / 3, 0.01 + 64 / 3000) for i in range(3)}
    took["w2"] = replace(took["w2"], seconds=took["w2"].seconds * slower)
    then = better(at_speeds(found, took), WayToTrain(names([0, 1, 2])), LONG)
    assert (then and then.samples.keys()) == (None if slower == 1.1 else names([0, 1]))


# --- what was measured ---


def met(found: StepProblem, way: WayToTrain, seconds: float, hidden: float = 0.0) -> Mapping[str, MeasuredSteps]:
    """The steps of workers whose meetings take this long."""
    step = way.price(found)
    costs = {own.name: own for own in found.workers}
    took = {name: costs[name].seconds(samples) for name, samples in step.samples.items()}
    return {name: MeasuredSteps(step.samples[name], took[name], seconds, hidden) for name in took}


@pytest.mark.parametrize("ahead", [0.0, 0.9])
@pytest.mark.parametrize("link", [FREE, FAST, WorkerLink(5e6, 2e-3)])
@pytest.mark.parametrize("way", [WayToTrain(names([0, 1])), WayToTrain(names([0, 1]), LOCAL, 20)])
def test_meetings_that_take_what_was_expected_leave_the_prices_as_they_are(
    way: WayToTrain, link: WorkerLink, ahead: float
) -> None:
    found = problem(1000.0, 1000.0, link=link, overhead=7e-4, ahead=ahead)
    step = way.price(found)
    took = met(found, way, step.exchange)
    assert at_speeds(found, took).workers == pytest.approx(found.workers)
    assert way.price(with_links(found, way, took)).step_seconds == pytest.approx(step.step_seconds)


@pytest.mark.parametrize("times", [0.3, 3.0, 100.0])
@pytest.mark.parametrize("way", [WayToTrain(names([0, 1])), WayToTrain(names([0, 1]), LOCAL, 20)])
def test_a_link_is_as_slow_as_meetings_show_it_to_be(way: WayToTrain, times: float) -> None:
    found = problem(1000.0, 1000.0, link=WorkerLink(5e6, 2e-3))
    took = met(found, way, 0.7 * times * way.price(found).exchange, 0.3 * times * way.price(found).exchange)
    assert way.price(with_links(found, way, took)).exchange == pytest.approx(times * way.price(found).exchange)


def test_a_worker_alone_has_no_meetings_and_others_count_as_slower_by_as_much_within_bounds() -> None:
    found, alone = problem(1000.0, 1000.0), WayToTrain(names([0]), ALONE)
    took = {"w0": MeasuredSteps(64, 64 / 1000 * 1.1)}
    assert with_links(found, alone, took) == found
    assert [own.each for own in at_speeds(found, took).workers] == pytest.approx([1.1e-3, 1.1e-3])
    much = {"w0": MeasuredSteps(64, 64 / 1000 * 9)}
    assert [own.each for own in at_speeds(found, much).workers] == pytest.approx([9e-3, SURER * 1e-3])


def test_where_links_get_slower_workers_meet_more_rarely_or_one_goes_on_alone() -> None:
    found, way = problem(1000.0, 1000.0, link=WorkerLink(1.25e8, 2e-4)), WayToTrain(names([0, 1]))
    assert way_of(priced(found, ALL)[0]) == way
    found = with_links(found, way, met(found, way, 100 * way.price(found).exchange))
    rarer = better(found, way, LONG)
    assert rarer is not None
    assert rarer.strategy == LOCAL
    rarely = with_links(found, way_of(rarer), met(found, way_of(rarer), 100 * rarer.exchange))
    then = better(rarely, way_of(rarer), LONG)
    assert then is not None
    assert then.strategy == ALONE or (then.every or 0) > 2 * (rarer.every or 0)
    assert SHARED not in (rarer.strategy, then.strategy)
