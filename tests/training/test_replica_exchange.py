"""A replica's side of exchanges: facts in any order keep its promises; what it orders, told by hand."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from daskcnn.nn.score import Score
from daskcnn.partition.rounds import Round
from daskcnn.partition.step_shares import LAG
from daskcnn.ps import RULES, AccuracyWeighted, Action, Local, Reply, UpdateRule, Vector
from daskcnn.store.loader import BatchPlan, batch_edges
from daskcnn.training.cadence import Cadence, TrainSteps
from daskcnn.training.exchange_orders import Await, Gain, JudgeCenter, JudgeLocal, Order, PullCenter, Report, Send
from daskcnn.training.judging import JudgedPart
from daskcnn.training.replica_exchange import CERTAIN, ExchangePhase, ReplicaExchange
from daskcnn.training.round_report import RoundReport
from tests.ps.driving import rule_of

BATCH, OWN = 3, JudgedPart(100, 107, 2)
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "sgwu": [{"accuracy_on": "train"}],
    "agwu": [{"accuracy_on": "train"}, {"max_staleness": 1}],
    "bsp": [{"combine": "sum"}, {"every": 3}, {"every": 0}],
    "easgd": [{"alpha": 0.9}, {"tau": 3}, {"max_staleness": 2}],
    "downpour": [{"n_push": 2, "n_fetch": 3}, {"n_push": 4, "n_fetch": 2}, {"n_push": 3, "n_fetch": 3}],
    "dc-asgd": [{"every": 3}, {"every": 0}],
    "admm": [{"rho": 1.0, "every": 2}, {"rho": 0.5, "from_center": True}],
    "local-sgd": [{"every": 3}],
}
every_variant = pytest.mark.parametrize(
    "of",
    [
        pytest.param(kind.model_validate(options), id=f"{name} {options}")
        for name, kind in RULES.items()
        for options in ({}, *VARIANTS.get(name, []))
    ],
)


class JudgedWithinRounds(AccuracyWeighted):
    """A toy rule: a replica goes on while every second step's weights are judged and pushed; every third it pulls."""

    barrier = False

    @property
    def period(self) -> int:
        return 2

    @property
    def overlaps(self) -> bool:
        return True

    def due(self, step: int, *, round_end: bool) -> frozenset[Action]:
        return super().due(step, round_end=round_end) | ({Action.PULL} if step % 3 == 0 else set())

    def payload(self, local: Local) -> Vector:
        return local.weights

    def pulled(self, local: Local, center: Vector, version: int) -> None:
        self.adopt(local, center, version)

    def merge(self, *_: Any) -> Any:
        raise NotImplementedError


class SaysNothing(JudgedWithinRounds):
    """A toy rule: not even a round's end is an exchange."""

    def due(self, step: int, *, round_end: bool) -> frozenset[Action]:
        return frozenset()


class Facts(RuleBasedStateMachine):
    """One worker. `order` is what it is to do; `calls` is a Send that is not answered yet."""

    of: UpdateRule
    averaged = False

    # of the latest order, exchange and round
    stop: TrainSteps
    sent: Local
    payload: Vector
    center: Vector
    last_push: Gain
    last_reply: Reply
    range: tuple[int, int] | None
    score: Score | None
    q: float | None
    exchanged: dict[int, set[Action]]
    pushed: int

    def __init__(self) -> None:
        super().__init__()
        self.local = Local(np.zeros(2), np.zeros(2))
        cadence = Cadence(self.of, BATCH, OWN.samples)
        self.machine = ReplicaExchange(self.of, self.local, cadence, overlap=True, averaged=self.averaged)
        self.now, self.version, self.seq = 0.0, 0, 0
        self.order: Order | None = None
        self.calls: Send | None = None
        self.reports: list[RoundReport] = []
        self.rounds = 0
        self.round: Round | None = None

    # --- the world ---

    def passes(self, seconds: float) -> float:
        self.now += seconds
        return self.now

    def take(self, order: Order | None) -> None:
        """Look at what is ordered."""
        self.order, self.asked = order, self.now
        match order:
            case Send(push, pull, meanwhile):
                assert self.calls is None, "every Send is answered before the next"
                self.calls, self.order = order, meanwhile
                self.sent = deepcopy(self.local)
                self.exchanged[self.stop.step] = {Action.PUSH} if push else set()
                self.exchanged[self.stop.step] |= {Action.PULL} if pull else set()
                assert (meanwhile is not None) == (self.of.overlaps and not self.stop.last)
                if push:
                    self.seq += 1
                    self.pushed += push.samples
                    self.payload = push.payload.copy()
                    self.last_push = push
                    assert push.seq == self.seq
                    assert push.base_version == self.local.base_version
                    assert push.accuracy == (CERTAIN if self.q is None else self.q)
                self.q = None if self.score is None else self.score.accuracy
            case JudgeLocal(part):
                assert self.of.judges_pushes
                assert part is OWN
            case JudgeCenter(part, weights):
                assert self.round is not None
                assert part is self.part
                if self.of.answers != "difference" and not self.averaged:
                    np.testing.assert_array_equal(weights, self.local.base)
                else:
                    np.testing.assert_array_equal(weights, self.center)
            case PullCenter(averaged):
                assert averaged == self.averaged
        if isinstance(self.order, TrainSteps):
            self.stop, self.steps_made = self.order, self.order.first - 1

    def reply(self, data: st.DataObject) -> tuple[Reply, Vector]:
        self.version += data.draw(st.integers(0, 3))
        waited, staleness = data.draw(st.floats(0, 2)), data.draw(st.integers(0, 5))
        self.center = np.array([data.draw(st.integers(-9, 9)), 1.0])
        change: dict[str, Any] = {"more": data.draw(st.integers(0, 3)), "since": self.stop.step + LAG}
        self.last_reply = Reply(
            0, "a", 1, 1, self.center, self.version, 0, staleness=staleness, gamma=0.5, waited=waited, **change
        )
        return self.last_reply, self.center

    # --- facts ---

    @rule(version=st.integers(0, 5))
    def join(self, version: int) -> None:
        self.version = max(self.version, version)
        self.machine.joined(np.array([self.version, 2.0]), self.version)
        np.testing.assert_array_equal(self.local.weights, [self.version, 2.0])
        self.seq, self.calls, self.order, self.round = 0, None, None, None

    @precondition(lambda self: self.machine.phase is ExchangePhase.IDLE)
    @rule(
        whole=st.integers(1, 14),
        passes=st.integers(1, 2),
        steps=st.none() | st.integers(1, 5),
        score=st.none() | st.just(JudgedPart(100, 104)),
    )
    def begin(self, whole: int, passes: int, steps: int | None, score: JudgedPart | None) -> None:
        self.rounds += 1
        self.round = Round("a", self.rounds, ((0, whole),), whole * passes, (0.0, 1.0), steps)
        self.part, self.score, self.exchanged = score, None, dict[int, set[Action]]()
        self.q = None
        self.pushed = self.answered = self.staleness = 0
        self.communication = self.waited = self.evaluation = self.busy = 0.0
        self.last_version = self.local.base_version
        self.take(self.machine.begin(self.round, score, OWN))

    @precondition(lambda self: isinstance(self.order, TrainSteps))
    @rule(data=st.data(), all_of_them=st.booleans(), known=st.booleans())
    def train(self, data: st.DataObject, all_of_them: bool, known: bool) -> None:
        stop = self.stop
        assert isinstance(self.order, TrainSteps)
        while self.steps_made < stop.step:
            self.local.weights += 1.0
            self.steps_made += 1
            self.busy += 1.0
            self.passes(1.0)
            if not all_of_them:
                break
        if self.steps_made == stop.step:
            self.score = Score(1.0, data.draw(st.integers(0, stop.samples)), stop.samples) if known else None
            self.q = None if self.score is None else self.score.accuracy
            self.asked = self.now
            self.take(self.machine.trained(self.score, 0.1, busy=self.busy, load=0.5, at=self.now))
            assert isinstance(self.order, Await) == (self.calls is not None and self.calls.meanwhile is stop)

    @precondition(lambda self: self.calls is not None)
    @rule(data=st.data(), seconds=st.floats(0, 5))
    def answer(self, data: st.DataObject, seconds: float) -> None:
        calls, training = self.calls, isinstance(self.order, TrainSteps)
        assert calls is not None
        waited = self.passes(seconds) - self.asked if not training else 0.0
        shadow, gained, answers = self.sent, self.local.weights - self.sent.weights, []
        if calls.push:
            np.testing.assert_array_equal(calls.push.payload, self.payload)
            answers.append(self.reply(data))
            self.of.adopt(shadow, self.center, self.version)
            self.answered += 1
            hides = calls.meanwhile is not None  # steps were made while others were waited for
            self.waited += min(waited, self.last_reply.waited) if hides else self.last_reply.waited
            self.staleness = max(self.staleness, self.last_reply.staleness)
        if calls.pull:
            answers.append(self.reply(data))
            self.of.pulled(shadow, self.center, self.version)
        self.calls, self.last_version = None, self.version
        self.communication += waited
        order = self.machine.replied(answers, self.now)
        np.testing.assert_allclose(self.local.weights, shadow.weights + gained)
        assert self.local.base_version == shadow.base_version
        assert (order is None) == training
        if order is not None:
            self.take(order)

    @precondition(lambda self: isinstance(self.order, PullCenter))
    @rule(data=st.data(), seconds=st.floats(0, 5))
    def bring_center(self, data: st.DataObject, seconds: float) -> None:
        self.communication += self.passes(seconds) - self.asked
        before = self.local.weights.copy()
        self.take(self.machine.replied([self.reply(data)], self.now))
        np.testing.assert_array_equal(self.local.weights, before)

    @precondition(lambda self: isinstance(self.order, JudgeLocal | JudgeCenter))
    @rule(right=st.none() | st.integers(0, 4), seconds=st.floats(0, 5))
    def judge(self, right: int | None, seconds: float) -> None:
        score = None if right is None else Score(1.0, right, 4)
        begun, at = self.now, self.passes(seconds)
        self.evaluation += at - begun
        if isinstance(self.order, JudgeLocal):
            self.q = None if score is None else score.accuracy
            self.take(self.machine.judged_local(score, begun=begun, at=at))
        else:
            self.center_score = score
            self.take(self.machine.judged_center(score, begun=begun, at=at))

    @precondition(lambda self: isinstance(self.order, Report))
    @rule()
    def report(self) -> None:
        assert self.round is not None
        report = self.machine.report(bytes_up=3, bytes_down=4)
        self.reports.append(report)
        assert report.round is self.round
        assert self.exchanged == self.due()
        assert report.pushes == self.answered
        assert report.version == self.last_version
        assert report.staleness == self.staleness
        assert report.wait == pytest.approx(self.waited)
        assert report.communication == pytest.approx(max(0.0, self.communication - self.waited))
        assert report.evaluation == pytest.approx(self.evaluation)
        assert (report.busy, report.load, report.score) == (self.busy, 0.5, self.score)
        assert report.samples >= self.round.samples
        assert report.samples == self.round.samples or self.round.steps is not None
        if self.answered:
            assert self.pushed == self.stop.samples == report.samples or Action.PUSH not in self.due().get(
                self.stop.step, set()
            )
            assert report.base_version == self.last_push.base_version
            assert report.gamma == 0.5
        assert report.judged == (0 if self.part is None else 4)
        assert self.part is None or report.center == self.center_score
        self.order = self.round = None

    @precondition(lambda self: self.machine.phase is not ExchangePhase.APART)
    @rule(sure=st.integers(0, 3))
    def give_up(self, sure: int) -> None:
        if not sure:
            self.machine.give_up()
            self.order = self.calls = self.round = None

    # --- what is out of turn ---

    @rule()
    def facts_out_of_turn_are_refused_and_change_nothing(self) -> None:
        machine, phase, weights = self.machine, self.machine.phase, self.local.weights.copy()
        score = Score(1.0, 1, 1)
        refused: list[tuple[tuple[ExchangePhase, ...], Callable[[], Any]]] = [
            ((ExchangePhase.IDLE,), lambda: machine.begin(Round("a", 0, ((0, 1),), 1, (0.0, 1.0)), None)),
            ((ExchangePhase.TRAINING,), lambda: machine.trained(score, 0.1, busy=0.0, load=0.0, at=0.0)),
            ((ExchangePhase.JUDGING_LOCAL,), lambda: machine.judged_local(score, begun=0.0, at=0.0)),
            ((ExchangePhase.JUDGING_CENTER,), lambda: machine.judged_center(score, begun=0.0, at=0.0)),
            ((ExchangePhase.REPORTING,), lambda: machine.report(bytes_up=0, bytes_down=0)),
        ]
        if self.calls is None and phase is not ExchangePhase.PULLING_CENTER:
            refused.append(((), lambda: machine.replied([], 0.0)))
        for legal, fact in refused:
            if phase not in legal:
                with pytest.raises(AssertionError):
                    fact()
        assert machine.phase is phase
        np.testing.assert_array_equal(self.local.weights, weights)

    # --- what always holds ---

    def due(self) -> dict[int, set[Action]]:
        """After which steps of the round what is to be exchanged, asked step by step."""
        assert self.round is not None
        samples, (lo, hi) = self.round.samples, self.round.ranges[0]
        plan, step, done = BatchPlan((), BATCH, 0, steps=self.round.steps), 0, 0
        found = {}
        while done < samples:
            for begin, end in batch_edges(plan, min(hi - lo, samples - done)):
                step += 1
                before = done
                found[step] = set(self.of.due(step, round_end=before + end - begin == samples))
                done = before + end - begin
        return {step: actions for step, actions in found.items() if actions}

    @invariant()
    def valid(self) -> None:
        self.machine.validate()

    @invariant()
    def somebody_knows_what_is_next(self) -> None:
        assert (self.round is None) == (self.machine.phase in (ExchangePhase.APART, ExchangePhase.IDLE))
        assert self.round is None or self.order is not None or self.calls is not None

    def teardown(self) -> None:
        assert len({report.round.number for report in self.reports}) == len(self.reports), "a round is reported once"


@every_variant
@pytest.mark.parametrize("examples", [8, pytest.param(40, marks=pytest.mark.slow)])
def test_any_order_of_facts_keeps_the_promises(of: UpdateRule, examples: int) -> None:
    machine = type("FactsOfRule", (Facts,), {"of": of})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=40, deadline=None))


@pytest.mark.parametrize("name", ["sgwu", "easgd", "downpour"])
def test_the_average_of_the_center_is_pulled_to_be_judged(name: str) -> None:
    machine = type("FactsOfRule", (Facts,), {"of": RULES[name](), "averaged": True})
    run_state_machine_as_test(machine, settings=settings(max_examples=8, stateful_step_count=40, deadline=None))


@pytest.mark.parametrize("kind", [JudgedWithinRounds, SaysNothing])
def test_a_rule_of_any_cadence_keeps_the_promises(kind: type[UpdateRule]) -> None:
    machine = type("FactsOfRule", (Facts,), {"of": kind()})
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=60, deadline=None))


def test_an_exchange_that_steps_hide_is_counted_apart_and_its_wait_is_none() -> None:
    """Sent at 1 s, answered at 4 s after 1 s at the barrier: of a stretch that lasts till 3 s, and of one till 9 s."""
    for ends, communication, wait, hidden in ((3.0, 0.0, 1.0, 2.0), (9.0, 0.0, 0.0, 2.0)):
        rule = rule_of("local-sgd", every=4)
        machine = ReplicaExchange(rule, Local(np.zeros(2), np.zeros(2)), Cadence(rule, BATCH), overlap=True)
        machine.joined(np.zeros(2), 0)
        machine.begin(Round("a", 0, ((0, 80),), 80, (0.0, 1.0), 8, meetings=2), None)
        assert isinstance(machine.trained(None, 0.1, busy=1.0, load=0.0, at=1.0), Send)
        if ends < 4.0:
            assert isinstance(machine.trained(None, 0.1, busy=3.0, load=0.0, at=ends), Await)
        machine.replied([_answered(1)], 4.0)
        if ends > 4.0:
            assert isinstance(machine.trained(None, 0.1, busy=9.0, load=0.0, at=ends), Send)
        machine.replied([_answered(2)], max(ends, 4.0) + 1.0)  # all of it is waiting for others
        report = machine.report(bytes_up=0, bytes_down=0)
        assert report.wait == pytest.approx(wait + 1.0)
        assert report.communication == pytest.approx(communication)
        assert report.hidden == pytest.approx(hidden)


# --- minibatches that change in a round ---


def _stepping(every: int, samples: int, steps: int) -> tuple[ReplicaExchange, TrainSteps]:
    rule = rule_of("bsp", every=every)
    machine = ReplicaExchange(rule, Local(np.zeros(2), np.zeros(2)), Cadence(rule, BATCH), overlap=False)
    machine.joined(np.zeros(2), 0)
    return machine, machine.begin(Round("a", 0, ((0, samples),), samples, (0.0, 1.0), steps), None)


def _answered(version: int, more: int = 0, since: int = 0) -> tuple[Reply, Vector]:
    return Reply(0, "a", 1, version, np.zeros(2), version, 0, waited=1.0, more=more, since=since), np.zeros(2)


def test_a_change_counts_from_its_step_on() -> None:
    machine, order = _stepping(1, 80, 8)
    pushed, busy, now = [], 0.0, 0.0
    for made in range(1, 9):
        assert (order.first, order.step) == (made, made)
        busy, now = busy + order.gained / 10, now + order.gained / 10
        sent = machine.trained(None, 0.1, busy=busy, load=0.0, at=now)
        assert isinstance(sent, Send)
        assert sent.push is not None
        assert sent.push.step == made
        pushed.append(sent.push.samples)
        now += 1.5
        following = machine.replied([_answered(made, *((-6, 5) if made == 2 else (0, 0)))], now)
        if isinstance(following, TrainSteps):
            order = following
    report = machine.report(bytes_up=0, bytes_down=0)
    assert pushed == [10] * 4 + [4] * 4
    assert report.samples == 56
    assert report.busy == pytest.approx(5.6)
    assert report.communication == pytest.approx(8 * 0.5)  # without waiting
    assert report.sizes is not None
    assert report.sizes.last == 4


def test_a_change_within_a_stretch_counts_in_it() -> None:
    machine, order = _stepping(4, 80, 8)
    machine.trained(None, 0.1, busy=1.0, load=0.0, at=1.0)
    following = machine.replied([_answered(1, 5, 7)], 2.0)
    assert isinstance(following, TrainSteps)
    assert (order.gained, following.first, following.step, following.gained, following.samples) == (40, 5, 8, 50, 90)


def test_rounds_of_own_steps_have_no_minibatches_that_change() -> None:
    rule = rule_of("sgwu", accuracy_on="train")
    machine = ReplicaExchange(rule, Local(np.zeros(2), np.zeros(2)), Cadence(rule, BATCH), overlap=False)
    machine.joined(np.zeros(2), 0)
    machine.begin(Round("a", 0, ((0, 9),), 9, (0.0, 1.0)), None)
    assert machine.sizes is None
    sent = machine.trained(None, 0.1, busy=1.0, load=0.0, at=1.0)
    assert isinstance(sent, Send)
    assert sent.push is not None
    assert sent.push.step == 0


# --- a worker that leaves ---


def _begun(of: UpdateRule, samples: int = 12, *, overlap: bool = False, judged_every: int = 1) -> ReplicaExchange:
    machine = ReplicaExchange(of, Local(np.zeros(2), np.zeros(2)), Cadence(of, BATCH, OWN.samples), overlap=overlap)
    machine.joined(np.zeros(2), 0)
    round_ = Round("a", 0, ((0, samples),), samples, (0.0, 1.0), judged_every=judged_every)
    machine.begin(round_, JudgedPart(100, 107), OWN)
    return machine


def _score(samples: int) -> Score:
    return Score(float(samples), samples // 2, samples)


@every_variant
@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_round_ends_behind_any_step_with_a_push_of_what_was_gained(of: UpdateRule, step: int) -> None:
    machine, pushed, made = _begun(of), 0, 0
    order: Order = machine._tally.stops[0] if machine._tally else Await()
    while isinstance(order, TrainSteps) and order.step < step:  # the exchanges on the way
        sent = machine.trained(_score(order.samples), 0.1, busy=1.0, load=0.0, at=1.0)
        sent = machine.judged_local(_score(7), begun=1.0, at=1.0) if isinstance(sent, JudgeLocal) else sent
        assert isinstance(sent, Send)
        made, pushed = order.step, pushed + (sent.push.samples if sent.push else 0)
        following = machine.replied([_answered(1)] * ((sent.push is not None) + sent.pull), 2.0)
        assert following is not None
        order = following
    assert made < step
    found = machine.leave(step, BATCH * step, _score(BATCH * step), 0.1, busy=float(step), load=0.0, at=3.0)
    machine.validate()
    found = machine.judged_local(_score(7), begun=3.0, at=3.5) if isinstance(found, JudgeLocal) else found
    assert isinstance(found, Send)
    assert (found.pull, found.meanwhile) == (False, None)
    assert found.push is not None
    assert found.push.samples == BATCH * step - pushed
    assert machine.departed(4.0) == Report()
    machine.validate()
    report = machine.report(bytes_up=0, bytes_down=0)
    assert report.cut == report.samples == BATCH * step
    assert (report.judged, report.center) == (0, None)


def test_the_q_of_a_part_of_a_round_is_that_part_of_it() -> None:
    machine = _begun(rule_of("sgwu"))
    found = machine.leave(1, 3, _score(3), 0.1, busy=1.0, load=0.0, at=1.0)
    assert found == JudgeLocal(OWN), "a moment is enough for these"
    sent = machine.judged_local(Score(7.0, 6, 8), begun=1.0, at=2.0)
    assert sent.push is not None
    assert sent.push.accuracy == 0.75 * 3 / 12
    assert rule_of("agwu").of_part(0.75, 0.25) == 0.75


def test_q_holds_until_it_is_measured_again_and_is_cut_with_the_part_between_two_pushes() -> None:
    machine, accuracies = _begun(rule_of("sgwu", every=2), 24, judged_every=2), list[float]()
    for step, right in ((2, 6), (4, None), (6, 4)):
        order = machine.trained(_score(3 * step), 0.1, busy=1.0, load=0.0, at=1.0)
        if right is not None:
            assert order == JudgeLocal(OWN)
            order = machine.judged_local(Score(7.0, right, 8), begun=1.0, at=1.0)
        assert isinstance(order, Send)
        assert order.push is not None
        accuracies.append(order.push.accuracy)
        machine.replied([_answered(step)], 1.0)
    assert accuracies == [0.75, 0.75, 0.5]
    machine.leave(7, 21, _score(21), 0.1, busy=1.0, load=0.0, at=1.0)
    sent = machine.judged_local(Score(7.0, 6, 8), begun=1.0, at=2.0)
    assert sent.push is not None
    assert (sent.push.samples, sent.push.accuracy) == (3, 0.75 / 2)


def test_a_slow_worker_that_leaves_judges_its_weights_on_as_many_samples_as_a_moment_is_enough_for() -> None:
    machine = _begun(rule_of("sgwu"))
    found = machine.leave(1, 3, _score(3), 0.1, busy=3.0, load=0.0, at=3.0)
    assert found == JudgeLocal(OWN.first(3))
    machine = _begun(rule_of("sgwu"))
    assert machine.leave(1, 3, _score(3), 0.1, busy=300.0, load=0.0, at=3.0) == JudgeLocal(OWN.first(1))


def test_a_worker_leaves_while_its_push_waits_for_others() -> None:
    machine = _begun(rule_of("local-sgd", every=2))
    sent = machine.trained(_score(6), 0.1, busy=1.0, load=0.0, at=1.0)
    assert isinstance(sent, Send)
    assert machine.departed(5.0) == Report()
    machine.validate()
    report = machine.report(bytes_up=0, bytes_down=0)
    assert (report.cut, report.pushes, report.communication) == (6, 1, 4.0)


def test_replies_that_are_under_way_are_taken_in_before_a_worker_leaves() -> None:
    machine = _begun(rule_of("easgd", tau=1), overlap=True)
    sent = machine.trained(_score(3), 0.1, busy=1.0, load=0.0, at=1.0)
    assert isinstance(sent, Send)
    assert sent.meanwhile is not None
    assert machine.leave(2, 6, _score(6), 0.1, busy=2.0, load=0.0, at=2.0) == Await()
    last = machine.replied([_answered(1)], 2.5)
    assert isinstance(last, Send)
    assert last.push is not None
    assert last.push.samples == 3
    machine.departed(3.0)
    assert machine.report(bytes_up=0, bytes_down=0).cut == 6
