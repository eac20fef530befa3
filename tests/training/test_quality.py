"""How good a network is by a loss that has no accuracy: what rules, checkpoints and early stopping go by."""

from __future__ import annotations

import math
from functools import reduce
from operator import add

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskcnn.nn.score import Score
from daskcnn.partition.rounds import Round
from daskcnn.ps import RULES, Join, Local, ParameterServer, Push, UpdateRule
from daskcnn.training.cadence import Cadence
from daskcnn.training.coordinator.evaluations import NOTHING, Evaluations
from daskcnn.training.exchange_orders import Send
from daskcnn.training.judging import JudgedPart
from daskcnn.training.replica_exchange import ReplicaExchange
from tests.training.coordinator_shell import report_of

losses = st.floats(0, 1e30)


def judged(loss: float, samples: int = 4) -> Score:
    return Score(loss * samples, None, samples)


@given(losses, losses)
def test_quality_falls_with_the_loss_from_1_to_0(one: float, other: float) -> None:
    for loss in (one, other):
        assert 0 <= judged(loss).quality <= 1
    assert judged(0.0).quality == 1
    if one < other:
        assert judged(one).quality >= judged(other).quality


@pytest.mark.parametrize(("loss", "quality"), [(math.nan, 0.0), (math.inf, 0.0), (1.0, 0.5), (3.0, 0.25)])
def test_a_loss_that_is_no_number_is_as_bad_as_can_be(loss: float, quality: float) -> None:
    assert judged(loss).quality == quality


def test_where_there_is_an_accuracy_it_is_the_quality() -> None:
    assert Score(100.0, 3, 4).quality == Score(0.0, 3, 4).quality == 0.75


@given(st.lists(st.tuples(losses, st.integers(0, 9)), min_size=1))
def test_scores_without_right_answers_add_up(parts: list[tuple[float, int]]) -> None:
    whole = reduce(add, [judged(loss, n) for loss, n in parts], NOTHING)
    assert whole.samples == sum(n for _, n in parts)
    assert whole.correct is None
    assert whole.accuracy is None
    if whole.samples:
        assert whole.loss == pytest.approx(sum(loss * n for loss, n in parts) / whole.samples)


def test_runs_stop_early_without_a_lower_loss() -> None:
    evaluations = Evaluations({}, 2, 10, 0.0, 0.0)
    better = []
    for loss in (0.9, 0.5, 0.5, 0.7):
        assert not evaluations.stopping
        evaluations.scored(judged(loss))
        better.append(evaluations.end_interval(1.0)[1])
    assert better == [True, True, False, False]
    assert evaluations.stopping
    assert evaluations.best == 1 / 1.5


@pytest.mark.parametrize(("accuracy_on", "quality"), [("validation", 0.8), ("train", 0.25)])
def test_a_push_is_weighed_by_the_loss(accuracy_on: str, quality: float) -> None:
    rule = RULES["sgwu"].model_validate({"accuracy_on": accuracy_on})
    machine = ReplicaExchange(rule, Local(np.zeros(2), np.zeros(2)), Cadence(rule, 4, 4), overlap=True)
    machine.joined(np.zeros(2), 0)
    machine.begin(Round("a", 0, ((0, 4),), 4, (0.0, 1.0)), None, JudgedPart(8, 12))
    order = machine.trained(judged(3.0), 0.1, busy=1.0, load=0.0, at=1.0)
    if accuracy_on == "validation":
        order = machine.judged_local(judged(0.25), begun=1.0, at=2.0)
    assert isinstance(order, Send)
    assert order.push is not None
    assert order.push.accuracy == quality


def merged(rule: UpdateRule, *pushed: tuple[float, float]) -> float:
    """The center behind pushes of a number each, from replicas with these losses; it was 0."""
    server = ParameterServer(rule, np.zeros(1))
    for i in range(len(pushed)):
        server.handle(Join(0, str(i), 1))
    for i, (payload, loss) in enumerate(pushed):
        server.handle(Push(0, str(i), 1, 1, 0, np.full(1, payload), 4, judged(loss).quality))
    return float(server.snapshot().center[0])


def test_both_weighted_rules_take_the_better_replica_for_more() -> None:
    assert merged(RULES["sgwu"](), (1.0, 0.0), (4.0, 1.0)) == pytest.approx((1.0 * 1 + 4.0 * 0.5) / 1.5)
    assert merged(RULES["agwu"](), (1.0, 1.0)) == 0.5


def test_a_rounds_report_has_no_accuracy() -> None:
    report = report_of(Round("a", 0, ((0, 4),), 4, (0.0, 1.0)))._replace(score=judged(0.5))
    event = report.event(1.0)
    assert (event.loss, event.accuracy) == (0.5, None)
