"""Laws of the choice of a strategy: what must hold of it on any cluster."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskcnn.event_base import APART
from daskcnn.events import ALONE
from daskcnn.sharded.balance import WorkerLink
from daskcnn.training.strategy_choice import choose
from daskcnn.training.strategy_prices import (
    STRATEGIES,
    PricedStrategy,
    StepProblem,
    WorkerCost,
    alone,
    local_steps,
    priced_set,
    shared_steps,
)

QUICK = 145_578 * 4  # bytes of the network
EXACT = (alone, shared_steps)
"""Those that make the steps of one machine."""
GIGABIT = WorkerLink(1.25e8, 2e-4)

links = st.builds(WorkerLink, st.floats(1e6, 1e10), st.floats(0, 0.02))
costs = st.builds(WorkerCost, st.just(""), st.floats(0, 0.01), st.floats(1e-6, 0.01), links)
server = {"bandwidth": st.sampled_from([float("inf"), 1.25e8]), "merge": st.sampled_from([0.0, 1e-3])}
overhead = st.sampled_from([0.0, 2e-3])


def named(workers: list[WorkerCost], prefix: str = "w") -> tuple[WorkerCost, ...]:
    return tuple(replace(own, name=f"{prefix}{i}") for i, own in enumerate(workers))


problems = st.builds(
    StepProblem,
    st.lists(costs, min_size=1, max_size=5).map(named),
    st.integers(1, 128),
    st.just(float(QUICK)),
    overhead=overhead,
    **server,
)


def desks(*images_per_second: float, fixed: float = 1e-3, link: WorkerLink = GIGABIT) -> StepProblem:
    workers = (WorkerCost("", fixed, 1 / rate, link) for rate in images_per_second)
    return StepProblem(named([*workers], "desk-"), 64, QUICK)


def least(problem: StepProblem) -> float:
    return choose(problem, EXACT).chosen.seconds


# --- what is chosen ---


@pytest.mark.parametrize("number", [2, 3, 8])
def test_equal_machines_on_a_fast_link_share_each_step(number: int) -> None:
    chosen = choose(desks(*[1900] * number, link=WorkerLink(1.25e9, 1e-4))).chosen
    assert (chosen.strategy, len(chosen.samples)) == ("bsp", number)
    assert sum(chosen.samples.values()) == 64
    assert max(chosen.samples.values()) - min(chosen.samples.values()) <= 1


def test_one_machine_is_alone_and_exchanges_nothing() -> None:
    found = choose(desks(1900))
    assert found.chosen == PricedStrategy(ALONE, {"desk-0": 64}, 1e-3 + 64 / 1900, 0.0, 64)
    assert not found.parts
    assert found.faster_link is None


def test_a_slow_link_leaves_the_fastest_machine_alone_among_shared_steps() -> None:
    found = choose(desks(1900, 2100, link=WorkerLink(5e6, 1e-3)), EXACT)
    assert found.chosen.samples == {"desk-1": 64}
    assert [part.worker for part in found.left_out] == ["desk-0"]


def test_a_worker_that_costs_more_than_it_brings_is_left_out_by_name_with_figures() -> None:
    workers = desks(1900, 1900, 1900).workers
    far = replace(workers[2], link=WorkerLink(5e6, 1e-3))
    found = choose(StepProblem((*workers[:2], far), 64, QUICK), EXACT)
    assert found.chosen.workers == ("desk-0", "desk-1")
    (out,) = found.left_out
    assert (out.worker, out.without) == ("desk-2", found.chosen.step_seconds)
    assert out.with_it == pytest.approx(out.without - out.brings + out.costs)
    assert 0 <= out.brings < out.costs
    used = [part for part in found.parts if part.used]
    assert all(part.with_it < part.without for part in used)


def test_processors_cannot_share_the_steps_of_a_gpu_that_are_nearly_all_fixed() -> None:
    """An H100 makes 9,144 images/s of `quick` by itself; one processor of 1,900 beside it made it 5,200, and so did
    six."""
    gpu, cpu = WorkerCost("gpu", 6.9e-3, 1e-6, GIGABIT), WorkerCost("cpu", 1e-3, 1 / 1900, GIGABIT)
    for number in (1, 6):
        found = choose(StepProblem((gpu, *named([cpu] * number)), 64, QUICK), EXACT)
        assert found.chosen.workers == ("gpu",)
        assert 64 / found.chosen.step_seconds == pytest.approx(9144, rel=0.01)
        assert len(found.left_out) == number
        assert all(64 / part.with_it < 6000 for part in found.left_out)
        assert all(part.brings < 1e-4 for part in found.left_out)


def test_ties_are_broken_by_fewer_workers() -> None:
    """A second worker of no use and no cost: its first sample takes as long as the whole step of the other."""
    slow = WorkerCost("slow", 0.064, 1e-9)
    found = choose(StepProblem((slow, WorkerCost("fast", 0.0, 0.001)), 64, 0.0), EXACT)
    assert found.chosen.strategy == ALONE


# --- steps of their own, where links are slow ---


def test_a_slow_link_makes_meetings_rare() -> None:
    found = choose(desks(1900, 2100, link=WorkerLink(5e6, 1e-3)))
    chosen = found.chosen
    assert (chosen.strategy, {*chosen.samples}) == ("local-sgd", {"desk-0", "desk-1"})
    assert chosen.every is not None
    assert chosen.every > 32
    assert 0.05 < chosen.exchange / chosen.step_seconds < 0.2
    assert chosen.seconds < found.alone.seconds / 1.2
    assert [part.used for part in found.parts] == [True, True]
    slower = choose(desks(1900, 2100, link=WorkerLink(1e6, 1e-3))).chosen
    assert slower.every is None or slower.every > chosen.every


def test_gradients_that_go_ahead_make_shared_steps_the_choice_on_a_slower_link() -> None:
    problem = desks(2400, 2400, link=WorkerLink(1.2e8, 2e-4))
    whole, ahead = choose(problem), choose(replace(problem, ahead=0.97))
    assert (whole.chosen.strategy, ahead.chosen.strategy) == ("local-sgd", "bsp")
    slow = replace(desks(2400, 2400, link=WorkerLink(5e6, 2e-4)), ahead=0.97)
    assert choose(slow).chosen.strategy == "local-sgd"


def test_a_fast_link_is_not_for_local_steps_however_small_the_step() -> None:
    small = replace(desks(9000, 9000, fixed=1.3e-3, link=WorkerLink(1.5e9, 2e-5)), samples=16, nbytes=250_000.0)
    assert "local-sgd" not in {each.strategy for each in choose(small).candidates}


def test_workers_that_share_steps_well_do_not_rule_out_the_local_steps_of_others() -> None:
    """Two that were no sooner than one of the four by itself got a little faster, and the four were left out."""
    far = [WorkerCost("", 0.0, 1 / 900, WorkerLink(1e7, 1e-3))] * 4
    for rate in (440, 470):
        near = [WorkerCost("", 0.0, 1 / rate)] * 2
        chosen = choose(StepProblem((*named(far), *named(near, "near-")), 64, QUICK)).chosen
        assert (chosen.strategy, {*chosen.samples}) == ("local-sgd", {"w0", "w1", "w2", "w3"})


def test_where_no_step_is_worth_sharing_local_steps_are_compared_on_a_fast_link_too() -> None:
    """Two GPUs: a step of half of the samples takes them as long as one of all."""
    gpu = WorkerCost("", 6.9e-3, 1e-6, WorkerLink(1.25e9, 1e-4))
    found = choose(StepProblem(named([gpu] * 2, "gpu-"), 64, QUICK))
    assert (found.chosen.strategy, len(found.chosen.samples)) == ("local-sgd", 2)
    assert found.chosen.seconds < found.alone.seconds / APART


@given(problem=problems)
@settings(max_examples=40, deadline=None)
def test_one_worker_of_several_is_alone_only_beside_the_price_of_local_steps(problem: StepProblem) -> None:
    found = choose(problem)
    if found.chosen.strategy == ALONE and len(problem.workers) > 1:
        assert "local-sgd" in {each.strategy for each in found.candidates}


@given(problems, st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_gradients_that_go_ahead_cost_no_more_and_hide_no_computing(problem: StepProblem, ahead: float) -> None:
    for whole, part in zip(shared_steps(problem), shared_steps(replace(problem, ahead=ahead)), strict=True):
        assert part.compute <= part.step_seconds * (1 + 1e-9) <= whole.step_seconds * (1 + 2e-9)


def test_workers_meet_at_an_epochs_end_at_the_latest() -> None:
    problem = replace(desks(1900, 1900, link=WorkerLink(1e5, 1e-3)), epoch=6400.0)
    assert [each.every for each in local_steps(problem)] == [50]


def test_another_machine_needs_to_bring_more_than_the_samples_that_it_makes_be_needed() -> None:
    eight = choose(desks(*[1900] * 8, link=WorkerLink(5e6, 1e-3))).chosen
    assert eight.strategy == "local-sgd"
    assert 2 <= len(eight.samples) <= 5


def test_a_worker_that_costs_more_than_it_brings_is_left_out_of_local_steps_too() -> None:
    near = desks(1900, 1900, link=WorkerLink(5e6, 1e-3)).workers
    found = choose(StepProblem((*near, WorkerCost("far", 1e-3, 1 / 300, WorkerLink(1e5, 1e-3))), 64, QUICK))
    assert (found.chosen.strategy, found.chosen.workers) == ("local-sgd", ("desk-0", "desk-1"))
    (far,) = found.left_out
    assert far.worker == "far"
    assert far.with_it > far.without
    assert far.why_left_out.startswith("with it the progress of one shared step would take ")


@settings(max_examples=20, deadline=None)
@given(problem=problems)
def test_steps_that_are_not_those_of_one_machine_are_taken_only_where_much_sooner(problem: StepProblem) -> None:
    found = choose(problem).chosen
    assert found.needed == 1 or found.seconds * APART <= least(problem) * (1 + 1e-9)


# --- what holds of every choice ---


@settings(max_examples=25, deadline=None)
@given(problem=problems)
def test_no_set_of_workers_is_sooner_than_the_chosen_one(problem: StepProblem) -> None:
    names = [own.name for own in problem.workers]
    most = min(len(names), problem.samples)
    sets = [each for k in range(1, most + 1) for each in combinations(names, k)]
    assert least(problem) == pytest.approx(min(priced_set(problem, each).seconds for each in sets), rel=1e-6)


@settings(max_examples=25, deadline=None)
@given(problem=problems)
def test_a_price_is_what_the_samples_take(problem: StepProblem) -> None:
    cost = {own.name: own for own in problem.workers}
    for found in choose(problem, EXACT).candidates:
        assert sum(found.samples.values()) == problem.samples
        assert min(found.samples.values()) >= 1
        slowest = max(cost[name].seconds(samples) for name, samples in found.samples.items())
        one_more = max(cost[name].each for name in found.samples)  # samples are whole
        assert found.compute - one_more <= slowest <= found.compute + one_more


@settings(max_examples=25, deadline=None)
@given(problem=problems, other=costs)
def test_another_worker_never_makes_it_longer(problem: StepProblem, other: WorkerCost) -> None:
    more = replace(problem, workers=(*problem.workers, replace(other, name="other")))
    assert least(more) <= least(problem) * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(problem=problems, factor=st.floats(1, 1000), which=st.integers(0, 4))
def test_a_faster_link_never_makes_it_longer(problem: StepProblem, factor: float, which: int) -> None:
    assert least(problem.linked(factor)) <= least(problem) * (1 + 1e-9)
    workers = [*problem.workers]
    i = which % len(workers)
    workers[i] = problem.linked(factor).workers[i]
    assert least(replace(problem, workers=tuple(workers))) <= least(problem) * (1 + 1e-9)


@settings(max_examples=20, deadline=None)
@given(problem=problems)
def test_names_change_nothing(problem: StepProblem) -> None:
    names = {own.name: f"z{9 - i}" for i, own in enumerate(problem.workers)}
    renamed = replace(problem, workers=tuple(replace(own, name=names[own.name]) for own in problem.workers))
    found, other = choose(problem), choose(renamed)
    assert {names[name]: n for name, n in found.chosen.samples.items()} == other.chosen.samples
    assert [part.model_copy(update={"worker": names[part.worker]}) for part in found.parts] == [*other.parts]
    assert found.chosen.seconds == other.chosen.seconds


@settings(max_examples=20, deadline=None)
@given(problem=problems)
def test_the_chosen_one_is_never_later_than_the_fastest_worker_alone(problem: StepProblem) -> None:
    found = choose(problem)
    assert found.chosen.seconds <= found.alone.seconds
    assert {part.worker for part in found.parts if part.used} <= {*found.chosen.samples}
    assert all(part.with_it >= part.without * (1 - 1e-6) for part in found.left_out)


# --- what would change it ---


def test_the_faster_link_that_is_named_changes_the_choice_and_a_slower_one_does_not() -> None:
    problem = desks(1900, 1900, link=WorkerLink(1e7, 1e-3))
    found = choose(problem, EXACT)
    assert found.chosen.strategy == ALONE
    assert found.faster_link is not None
    factor, then = found.faster_link
    assert then.workers == ("desk-0", "desk-1")
    assert choose(problem.linked(factor), EXACT).chosen.workers == then.workers
    assert choose(problem.linked(factor * 0.95), EXACT).chosen.workers == found.chosen.workers


@settings(max_examples=25, deadline=None)
@given(problem=problems)
def test_a_faster_link_is_named_only_for_what_is_sooner_then(problem: StepProblem) -> None:
    found = choose(problem)
    if found.faster_link is not None:
        assert found.faster_link[1].compared < found.chosen.compared


def test_another_worker_is_named_where_it_would_help() -> None:
    fast = WorkerLink(1.25e9, 1e-4)
    found = choose(desks(1900, link=fast))
    assert found.more is not None
    assert len(found.more.samples) == 2
    assert choose(desks(1900, link=WorkerLink(5e6, 1e-3)), EXACT).more is None


def test_a_strategy_that_prices_itself_is_compared_by_the_samples_that_it_needs() -> None:
    problem = desks(1900, 1900, link=WorkerLink(5e6, 1e-3))

    def seldom(problem: StepProblem) -> list[PricedStrategy]:
        half = next(alone(problem)).compute
        return [PricedStrategy("seldom", {"desk-0": 64, "desk-1": 64}, half, 0.0, 128, needed=1.3)]

    chosen = choose(problem, (*STRATEGIES, seldom)).chosen
    assert chosen.strategy == "seldom"
    assert chosen.seconds == pytest.approx(0.65 * next(alone(problem)).seconds)
