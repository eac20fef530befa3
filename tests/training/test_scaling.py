"""The number of workers that a run asks its cluster for: laws of the decision, and a run that asks and gives back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from daskcnn.events import WorkerJoined, WorkerLeft, WorkersAsked
from daskcnn.sharded.balance import WorkerLink
from daskcnn.training.coordinator import facts, orders
from daskcnn.training.coordinator.facts import Fact
from daskcnn.training.coordinator.orders import StartRound
from daskcnn.training.coordinator.scaling import ANEW, COMES, step_seconds, worth_having
from daskcnn.training.strategy_choice import PAYS
from daskcnn.training.strategy_prices import StepProblem, WorkerCost
from tests.training.coordinator_shell import Shell
from tests.training.test_coordinator_machine import EPOCHS, SAMPLES, settings_of

# --- the decision ---

times = st.floats(1e-4, 1e-1)
costs = st.builds(WorkerCost, name=st.just(""), fixed=st.floats(0.0, 0.1), each=times)


@st.composite
def problems(draw: st.DrawFn) -> StepProblem:
    workers = draw(st.lists(costs, min_size=1, max_size=5))
    named = tuple(replace(own, name=f"cpu-{i}") for i, own in enumerate(workers))
    return StepProblem(named, draw(st.integers(8, 512)), 0, merge=draw(st.floats(0.0, 0.2)))


def grown(problem: StepProblem, number: int) -> StepProblem:
    """The same with as many workers, the others like the one of middle speed."""
    like = sorted(problem.workers, key=lambda own: own.seconds(problem.samples / len(problem.workers)))
    more = (replace(like[len(like) // 2], name=f"more-{i}") for i in range(number - len(problem.workers)))
    return replace(problem, workers=(*problem.workers, *more))


@examples(max_examples=40, deadline=None)
@given(problems(), st.integers(1, 6), st.integers(0, 6), st.floats(0.0, 1e4))
def test_it_asks_for_no_more_than_the_most_and_no_fewer_than_the_least(
    problem: StepProblem, least: int, more: int, left: float
) -> None:
    assert least <= worth_having(problem, least, least + more, left)[0] <= least + more


@examples(max_examples=40, deadline=None)
@given(problems())
def test_each_worker_that_it_asks_for_pays_and_the_next_one_does_not(problem: StepProblem) -> None:
    number, gain = worth_having(problem, 1, 99)
    seconds = [step_seconds(grown(problem, k)) for k in range(len(problem.workers), number + 1)]
    assert all(1 - after / before >= PAYS for before, after in pairwise(seconds))
    if len(seconds) > 1:
        assert gain == pytest.approx(1 - seconds[1] / seconds[0])
    if number < min(2 * len(problem.workers), problem.samples):
        assert 1 - step_seconds(grown(problem, number + 1)) / seconds[-1] < PAYS


@examples(max_examples=40, deadline=None)
@given(problems(), st.floats(0.0, 1e4), st.floats(1.0, 10.0))
def test_a_longer_run_and_a_cheaper_meeting_are_never_worth_fewer(
    problem: StepProblem, left: float, factor: float
) -> None:
    assert worth_having(problem, 1, 99, left * factor)[0] >= worth_having(problem, 1, 99, left)[0]
    cheaper = replace(problem, merge=problem.merge / factor)
    assert worth_having(cheaper, 1, 99)[0] >= worth_having(problem, 1, 99)[0]


@examples(max_examples=40, deadline=None)
@given(problems())
def test_workers_that_came_as_expected_change_nothing_but_what_may_be_doubled(problem: StepProblem) -> None:
    number = worth_having(problem, 1, 99)[0]
    if number < 2 * len(problem.workers):
        assert worth_having(grown(problem, number), 1, 99)[0] == number


def test_no_worker_is_asked_for_that_saves_less_than_it_takes_to_come() -> None:
    two = StepProblem((WorkerCost("a", 0.0, 1e-3), WorkerCost("b", 0.0, 1e-3)), 100, 0)
    assert worth_having(two, 1, 3, COMES * 2.99)[0] == 2
    assert worth_having(two, 1, 3, COMES * 3.01)[0] == 3


# --- a run ---

ALL = ("sgwu", "agwu", "bsp")
LEFT = 10_000  # epochs: another worker takes less to come than it saves


@dataclass
class Cluster(Shell):
    """Workers that share a machine: beyond a number of them, another one only slows the others."""

    room: float = inf
    meeting: float = 0.0  # part of a round's time

    def _round_done(self, order: StartRound, at: float) -> Fact:
        fact = super()._round_done(order, at)
        assert isinstance(fact, facts.RoundDone)
        there = len(self.coordinator.roster.alive)
        busy = fact.report.samples * max(1.0, there / self.room)
        return replace(fact, report=fact.report._replace(busy=busy, communication=self.meeting * busy))

    def come(self) -> None:
        """Start the workers that were asked for."""
        names = {f"cpu-{i}" for i in range(self.of(orders.AskWorkers)[-1].number)}
        for name in sorted(names - {*self.coordinator.roster.alive}):
            self.tell(facts.WorkerReady(name, "cpu", self.now))


def begun(which: str, most: int, workers: int = 2, epochs: int = LEFT, **more: Any) -> Cluster:
    """A run of two workers or more that may ask for some."""
    asked = {"wanted": {"cpu": most}, "least": {"cpu": 1}, "asks": most, "epochs": epochs}
    shell = Cluster(settings_of((which, {}), "udpa", **asked), **more)
    shell.start(*(f"cpu-{i}" for i in range(workers)))
    return shell


def rounds(shell: Shell, number: int) -> None:
    """Go on until this number of rounds has been reported."""
    done = len([fact for fact in shell.facts if isinstance(fact, facts.RoundDone)])
    while len([fact for fact in shell.facts if isinstance(fact, facts.RoundDone)]) < done + number:
        shell.answer(0)


@pytest.mark.parametrize("which", ALL)
def test_a_run_asks_for_workers_that_pay_once_each_has_reported(which: str) -> None:
    shell = begun(which, most=4)
    rounds(shell, 1)
    assert not shell.of(orders.AskWorkers)
    rounds(shell, 3)
    assert [order.number for order in shell.of(orders.AskWorkers)] == [4]
    (asked,) = shell.of(WorkersAsked)
    assert (asked.workers, asked.wanted) == (2, 4)
    assert asked.gain == pytest.approx(1 / 3, abs=0.05)
    rounds(shell, 8)
    assert len(shell.of(orders.AskWorkers)) == 1, "it is asked once"
    shell.come()
    rounds(shell, 40)
    assert {event.worker for event in shell.of(WorkerJoined)} == {"cpu-2", "cpu-3"}
    assert not shell.of(orders.LetGo)


@pytest.mark.parametrize("which", ALL)
def test_a_worker_that_brings_too_little_goes_back_and_is_not_asked_for_again(which: str) -> None:
    shell = begun(which, most=3, room=2.0)
    rounds(shell, 4)
    shell.come()
    rounds(shell, 40)
    (left,) = shell.of(WorkerLeft)
    assert left.reason == "the run is about as fast without it"
    (back,) = shell.of(orders.LetGo)
    assert back.worker == left.worker
    gone = shell.orders.index(orders.Dismiss(back.worker, for_good=True))
    assert gone < shell.orders.index(back), "another run could not take it before"
    assert [order.number for order in shell.of(orders.AskWorkers)] == [3]
    shell.tell(facts.WorkerReady("cpu-9", "cpu", shell.now))
    rounds(shell, 10)
    assert {*shell.coordinator.roster.alive} == {"cpu-0", "cpu-1", "cpu-2"} - {back.worker}
    shell.tell(facts.WorkerGone((next(iter(shell.coordinator.roster.alive)),), "gone", shell.now))
    shell.tell(facts.Tick(shell.now))
    assert shell.coordinator.roster.knows("cpu-9"), "it has a place now"


def test_after_a_while_it_tries_once_more_and_each_time_later() -> None:
    """The machine may have been busy with other things."""
    shell = begun("sgwu", most=3, room=2.0)
    for _ in range(2):
        before = len(shell.of(orders.AskWorkers))
        while len(shell.of(orders.AskWorkers)) == before:
            rounds(shell, 1)
        shell.come()
        rounds(shell, 20)
    assert len(shell.of(orders.LetGo)) == 2
    shell.now += ANEW
    rounds(shell, 4)
    assert len(shell.of(orders.AskWorkers)) == 2
    shell.now += ANEW
    rounds(shell, 4)
    assert len(shell.of(orders.AskWorkers)) == 3


def test_the_least_and_the_host_of_the_server_stay() -> None:
    shell = begun("sgwu", most=2, meeting=2.0)
    shell.coordinator._host = "cpu-1"
    rounds(shell, 10)
    assert [order.worker for order in shell.of(orders.LetGo)] == ["cpu-0"]
    rounds(shell, 5)
    assert {*shell.coordinator.roster.alive} == {"cpu-1"}


def test_a_run_that_is_about_to_end_asks_for_none() -> None:
    shell = begun("sgwu", most=4, epochs=1)
    assert shell.finish().status == "done"
    assert not shell.of(orders.AskWorkers)


def test_a_run_asks_again_for_a_worker_in_place_of_a_lost_one() -> None:
    shell = begun("agwu", most=3)
    rounds(shell, 4)
    shell.come()
    rounds(shell, 9)
    shell.tell(facts.WorkerGone(("cpu-2",), "gone", shell.now))
    rounds(shell, 6)
    assert [order.number for order in shell.of(orders.AskWorkers)] == [3, 3]


def test_a_run_that_chooses_its_strategy_gives_back_whom_it_leaves_out() -> None:
    fast, slow = WorkerLink(1e9, 1e-5), WorkerLink(1e3, 0.1)
    asked = {"wanted": {"cpu": 3}, "least": {"cpu": 1}, "asks": 3}
    shell = Shell(settings_of(("auto", {}), "idpa", **asked))
    shell.links = {"cpu-0": fast, "cpu-1": fast, "cpu-2": slow}
    shell.start(*shell.links)
    assert shell.finish().status == "done"
    assert [order.worker for order in shell.of(orders.LetGo)] == ["cpu-2"]
    assert not shell.of(orders.AskWorkers)
    assert shell.coordinator.rounds is not None
    assert shell.coordinator.rounds.done == EPOCHS * SAMPLES
