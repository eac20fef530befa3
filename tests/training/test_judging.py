"""Evaluations are sized by the seconds of training: laws of the sizes, of the parts, and of what decides the best."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskcnn.events import EpochEnded, RoundEnded
from daskcnn.nn.score import Score
from daskcnn.show.text import percent
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.evaluations import Evaluations
from daskcnn.training.coordinator.orders import Log, StartRound
from daskcnn.training.coordinator.records import Kept
from daskcnn.training.judging import (
    APART,
    FEWEST,
    FORWARD,
    TARGET,
    JudgedPart,
    Judging,
    JudgingCost,
    judged_sizes,
    pushes_a_measurement,
)
from tests.sim.sim_cases import cluster, of, run, workload
from tests.training.coordinator_shell import Shell
from tests.training.test_coordinator_machine import settings_of

seconds = st.floats(0, 1e6)
costs = st.lists(st.builds(JudgingCost, st.floats(-1e6, 1e6), seconds, seconds), min_size=1, max_size=4)


@given(st.integers(1, 10_000), costs, st.booleans())
def test_sizes_keep_to_what_is_allowed(validation: int, found: list[JudgingCost], whole: bool) -> None:
    """More than the fewest are judged only where every replica may spend what it takes."""
    q, center = judged_sizes(validation, found, whole=whole)
    fewest = min(FEWEST, validation)
    assert fewest <= q <= validation
    assert fewest <= center <= validation
    assert center == validation or not whole
    for cost in found if not whole else ():
        least = fewest * (cost.own + cost.center)
        assert q * cost.own + center * cost.center <= max(cost.allowed, least) * (1 + 1e-9)


@given(st.integers(1, 10_000), costs, st.floats(0, 1e6))
def test_who_may_spend_more_never_judges_the_center_on_fewer(
    validation: int, found: list[JudgingCost], more: float
) -> None:
    richer = [cost._replace(allowed=cost.allowed + more) for cost in found]
    assert judged_sizes(validation, found, whole=False)[1] <= judged_sizes(validation, richer, whole=False)[1]


@pytest.mark.parametrize(("validation", "share"), [(2000, 0.5), (2000, 1 / 8), (800, 0.5)])
@pytest.mark.parametrize("own", [True, False])
def test_over_a_run_judging_takes_the_target_at_most(validation: int, share: float, own: bool) -> None:
    """The center is often judged on all samples, and what Q and the center take adds up to 4 % of the training."""
    judging, samples = Judging({}, validation, sized=True), round(9 * validation * share)
    trained = judged = wholes = 0.0
    for _ in range(40):
        q, center = judging.sizes([judging.cost("a", samples, 3.0, own=own, share=share)])
        q, part = q if own else 0, round(center * share)
        judging.add("a", samples, 3.0 * samples, own=q, center=part, evaluation=q + part, paid=("a",))
        trained, judged, wholes = trained + 3.0 * samples, judged + q + part, wholes + (center == validation)
    assert judged <= TARGET * trained + FEWEST
    assert wholes >= 20


def test_measured_seconds_replace_the_guess_of_a_third() -> None:
    judging = Judging({}, 2000, sized=True)
    guess = judging.cost("a", 3000, 0.3, own=True, share=0.5)
    assert guess == pytest.approx((TARGET * 900, 0.1, 0.05))
    judging.add("a", 3000, 600.0, own=100, center=50, evaluation=3.0, paid=("a",))
    assert judging.cost("a", 1000, 0.2, own=True, share=0.5) == pytest.approx((TARGET * 800 - 3.0, 0.02, 0.01))


def test_replicas_that_wait_for_nobody_share_the_cost_of_the_center() -> None:
    judging = Judging({}, 2000, sized=True)
    judging.add("a", 100, 10.0, own=0, center=40, evaluation=8.0, paid=("a", "b"))
    a, b = judging.book()["judging"].values()
    assert a == {"trained": 10.0, "judged": 4.0, "each": 0.2}
    assert b == {"trained": 0.0, "judged": 4.0, "each": None}


def test_a_reproducible_run_counts_samples_and_not_seconds() -> None:
    found = []
    for slower in (1.0, 7.0):
        judging = Judging({}, 2000, sized=True, even=True)
        judging.add("a", 3000, slower, own=100, center=50, evaluation=slower, paid=("a",))
        found.append(judging.cost("a", 3000, slower, own=True, share=0.5))
    assert found[0] == found[1] == pytest.approx((TARGET * 6000 - 50, 1 / 3, 1 / 6))


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 500)), min_size=1, max_size=4))
def test_q_is_measured_no_more_often_than_half_of_what_judging_may_take_allows(found: list[tuple[int, int]]) -> None:
    between = pushes_a_measurement(found)
    for samples, pushes in found:
        measured = -(-pushes // between)  # the first push of a round always is
        assert (measured - 1) * FEWEST * FORWARD <= TARGET / 2 * samples
    assert between == 1 or any((between - 1) * samples < APART * pushes for samples, pushes in found if pushes > 1)


@pytest.mark.parametrize("rule", ["sgwu", "agwu"])
@pytest.mark.parametrize("every", [0, 2, 40])
def test_q_costs_at_most_five_percent_however_often_replicas_push(rule: str, every: int) -> None:
    work = workload(rule, rule={"every": every}, samples=8000, validation=1000, epochs=4, batch_size=20, sized=True)
    rounds = of(RoundEnded, run(work, cluster(100.0, 300.0))[1])
    assert all(event.q_samples >= FEWEST for event in rounds)
    assert sum(event.evaluation for event in rounds) <= 0.05 * sum(event.busy for event in rounds)
    assert every == 0 or min(event.pushes for event in rounds) > 1


def test_a_resumed_run_goes_on_with_what_was_spent() -> None:
    judging = Judging({}, 2000, sized=True)
    judging.add("a", 3000, 600.0, own=100, center=50, evaluation=3.0, paid=("a",))
    again = Judging(json.loads(json.dumps(judging.book())), 2000, sized=True)
    assert again.book() == judging.book()
    assert again.cost("a", 9, 0.2, own=True, share=1) == judging.cost("a", 9, 0.2, own=True, share=1)


# --- parts ---


@given(st.integers(0, 50), st.integers(2, 200), st.data())
def test_parts_of_one_draw_lie_in_each_other_and_are_cut_without_overlap(
    first: int, validation: int, data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, validation - 1))
    part = JudgedPart.of(first, size, validation, draw=3)
    found = part.indices(first, first + validation, seed=1)
    assert len({*found}) == size
    assert min(found) >= first
    assert max(found) < first + validation
    assert {*found} <= {*part._replace(hi=part.hi + 1).indices(first, first + validation, 1)}
    cut = data.draw(st.integers(0, size))
    halves = part._replace(hi=first + cut), part._replace(lo=first + cut)
    assert sorted(np.concatenate([half.indices(first, first + validation, 1) for half in halves])) == [*found]


def test_every_round_and_seed_has_a_part_of_its_own() -> None:
    drawn = {(seed, draw): JudgedPart(50, 60, draw).indices(50, 250, seed) for seed in (0, 1) for draw in range(4)}
    assert len({tuple(part) for part in drawn.values()}) == 8
    assert JudgedPart.of(50, 200, 200, draw=3) == (50, 250, None)


def test_the_standard_error_is_that_of_parts_drawn_at_random() -> None:
    right = np.random.default_rng(0).random(1000) < 0.7
    parts = [right[JudgedPart(0, 150, draw).indices(0, 1000, 0)] for draw in range(400)]
    scores = [Score(0.0, int(part.sum()), 150) for part in parts]
    spread = np.std([score.quality for score in scores])
    assert np.mean([score.error(1000) or math.nan for score in scores]) == pytest.approx(spread, rel=0.1)


def test_an_accuracy_on_a_part_has_its_standard_error() -> None:
    part = Score(1.0, 62, 100).judged_of(2000)
    assert part.samples == 100
    assert percent(part.accuracy, part.error) == "62.0 ± 4.7 %"
    whole = Score(1.0, 62, 100).judged_of(100)
    assert whole.samples is whole.error is None
    assert percent(whole.accuracy, whole.error) == "62.0 %"
    assert Score(1.0, 100, 100).judged_of(2000).error, "others may be wrong"
    assert Score(1.0, None, 100).judged_of(2000).error is None


# --- a run ---


def test_a_part_decides_nothing_about_the_best() -> None:
    evaluations, better = Evaluations({}, 2, 10, 0.0, 0.0, validation=200), []
    for score in (Score(1.0, 90, 200), Score(1.0, 99, 100), Score(1.0, 1, 100), Score(1.0, 91, 200)):
        evaluations.scored(score)
        better.append(evaluations.end_interval(1.0)[1])
        assert not evaluations.worse
    assert better == [True, False, False, True]
    assert evaluations.best == 91 / 200


class Judges(Shell):
    """Its replicas take a third of the seconds of training for each sample that they judge."""

    def _round_done(self, order: StartRound, at: float) -> facts.Fact:
        fact = super()._round_done(order, at)
        assert isinstance(fact, facts.RoundDone)
        report, own = fact.report, order.q.samples if order.q else 0
        seconds = (own + report.judged) * report.busy / report.samples / 3
        return replace(fact, report=report._replace(q_samples=own, q_measured=1, evaluation=seconds))


def begun(shell: Shell) -> Iterator[list[StartRound]]:
    """Answer all orders, and yield the rounds that start together."""
    for worker in ("cpu-0", "cpu-1"):
        shell.tell(facts.WorkerReady(worker, "cpu", 0.0))
    while shell.pending:
        found = shell.answer(0)
        if started := [order for order in found if isinstance(order, StartRound)]:
            yield started


LARGE = {"samples": 6000, "validation": 1000, "epochs": 8, "sized": True}


def test_all_replicas_of_a_round_are_judged_on_the_same_part() -> None:
    shell, draws = Judges(settings_of(("sgwu", {}), "udpa", **LARGE)), []
    for started in begun(shell):
        own, center = {order.q for order in started}, [order.score for order in started]
        assert len(own) == 1
        (q,) = own
        assert q is not None
        draws.append(q.draw)
        parts = [part for part in center if part is not None]
        assert [part.hi for part in parts[:-1]] == [part.lo for part in parts[1:]]
    assert draws == [*range(len(draws))]
    assert center[-1] is not None
    assert (center[0], center[-1].hi) == (JudgedPart(6000, center[-1].lo), 7000), "the last center is judged on all"


@pytest.mark.parametrize("rule", ["sgwu", "agwu", "bsp"])
def test_a_checkpoint_has_the_score_of_all_samples_or_none(rule: str) -> None:
    shell = Judges(settings_of((rule, {}), "udpa", **LARGE))
    for _ in begun(shell):
        pass
    looks = [order.event for order in shell.orders if isinstance(order, Log) and isinstance(order.event, EpochEnded)]
    assert {look.validation.samples is None for look in looks if look.validation} == {True, False}
    kept = [order.validation for order in shell.orders if isinstance(order, orders.Save)]
    assert {score.samples for score in kept if score is not None} == {1000}
    assert kept[-1] is not None


@pytest.mark.parametrize("changed", [{"patience": 5}, {}], ids=str)
def test_a_run_that_keeps_the_best_judges_its_center_on_all_samples(changed: dict[str, int]) -> None:
    shell = Judges(settings_of(("sgwu", {}), "udpa", **LARGE, keeps_best=True, **changed))
    for started in begun(shell):
        assert sum(order.score.samples for order in started if order.score) == 1000


def test_a_run_may_ask_for_all() -> None:
    shell = Judges(settings_of(("sgwu", {}), "udpa", **{**LARGE, "sized": False}))
    for started in begun(shell):
        assert {order.q for order in started} == {JudgedPart(6000, 7000)}


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 7))
def test_a_resumed_run_draws_the_same_parts(after: int) -> None:
    """Reproducible, so that the times of a test's facts do not matter."""
    how = settings_of(("sgwu", {}), "udpa", **LARGE, even=True)
    whole = [[order.q for order in started] for started in begun(Judges(how))]
    shell, kept = Judges(how), None
    for number, _ in enumerate(begun(shell)):
        saves = [order for order in shell.orders if isinstance(order, orders.Save)]
        if number == after:
            kept = Kept(after, saves[-1].epoch, json.loads(json.dumps(saves[-1].book)))
            break
    assert kept is not None
    assert [[order.q for order in started] for started in begun(Judges(how, kept))] == whole[round(kept.epoch) :]


def test_draws_differ_from_round_to_round() -> None:
    found = [started[0].q for started in begun(Judges(settings_of(("sgwu", {}), "udpa", **LARGE)))]
    assert all(a != b for a, b in pairwise(found))
