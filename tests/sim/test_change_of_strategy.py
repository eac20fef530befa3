"""Runs that change strategy or workers between two rounds, in simulated time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from daskcnn.events import Event, RoundEnded, StrategyChosen, WorkerJoined, WorkerLeft, WorkerLeftOut
from daskcnn.show.lines import describe
from daskcnn.show.renderers.run_text import format_report
from daskcnn.show.report_tables import tables
from daskcnn.sim.cluster import SimulatedCluster
from daskcnn.sim.simulation import Simulation
from daskcnn.sim.workload import Workload
from daskcnn.training.coordinator import facts, orders
from tests.sim.sim_cases import cluster, of, workload

EPOCHS, SAMPLES = 8, 6400
LINK = {"bandwidth": 5.7e7, "latency": 5e-4}


class Changing(Simulation):
    """A simulation in which first calibrations may be wrong, and links get slower.

    wrong: times as slow as workers are measured at first, one time after the other. slower: a time, and times as slow
    as the links of these workers are from then on.
    """

    def __init__(
        self,
        work: Workload,
        on: SimulatedCluster,
        *,
        wrong: Mapping[str, Sequence[float]] | None = None,
        slower: tuple[float, Mapping[str, float]] | None = None,
    ) -> None:
        self.events: list[Event] = []
        super().__init__(work, on, emit=self.events.append)
        self._wrong = {name: list(factors) for name, factors in (wrong or {}).items()}
        if slower is not None:
            at, workers = slower
            self._agenda.at(at, self._slow_down, workers)

    def _calibrate(self, order: orders.Calibrate) -> None:
        super()._calibrate(order)
        fact, wrong = self._facts.pop(), self._wrong.get(order.worker)
        factor = wrong.pop(0) if wrong else 1.0
        assert isinstance(fact, facts.Calibrated)
        row = fact.row.model_copy(update={"images_per_second": (fact.row.images_per_second or 0.0) / factor})
        self._tell(replace(fact, seconds=fact.seconds * factor, row=row))

    def _slow_down(self, workers: Mapping[str, float]) -> None:
        for name, factor in workers.items():
            member, index = self._known[name]
            link = {"bandwidth": (member.bandwidth or 0.0) / factor, "latency": member.latency * factor}
            slow = member.model_copy(update=link)
            self._known[name] = slow, index
            self.replicas[name].member, self.replicas[name].link = slow, slow.link()


def job(epochs: int = EPOCHS, samples: int = SAMPLES, **more: Any) -> Workload:
    sizes = {"samples": samples, "batch_size": 64, "validation": 64, "numbers": 90_000, "epochs": epochs, **more}
    return workload("auto", partition="idpa", increments=2, **sizes)


def played(work: Workload, on: SimulatedCluster, **how: Any) -> Changing:
    """The simulation after its end, in which every sample was presented as often as it was to be."""
    simulation = Changing(work, on, **how)
    simulation.run()
    simulation.server.validate()
    assert sum(event.samples for event in of(RoundEnded, simulation.events)) == work.epochs * work.samples
    return simulation


def chosen(simulation: Changing) -> list[tuple[str, set[str]]]:
    return [
        (each.candidates[0].strategy, {*each.candidates[0].samples}) for each in of(StrategyChosen, simulation.events)
    ]


def desks(number: int = 2, **link: float) -> SimulatedCluster:
    return cluster(*[1000.0] * number, **{**LINK, **link})


@pytest.mark.parametrize(("times", "without"), [(1, 0), (2, 2), (3, 4)])
def test_a_worker_that_was_measured_too_slow_is_measured_again_and_taken_in(times: int, without: int) -> None:
    simulation = played(job(), desks(), wrong={"w1": [5.0] * times})
    assert chosen(simulation) == [("alone", {"w0"}), ("bsp", {"w0", "w1"})]
    rounds = [event.worker for event in of(RoundEnded, simulation.events)]
    assert rounds[:without] == ["w0"] * without
    assert rounds[without:] == ["w0", "w1"] * ((len(rounds) - without) // 2)
    assert len(of(WorkerLeftOut, simulation.events)) == 1


def test_one_of_eight_that_was_measured_too_slow_joins_the_others_without_a_break() -> None:
    simulation = played(job(samples=12_800, epochs=2), desks(8, bandwidth=1.25e9, latency=2e-3), wrong={"w7": [60.0]})
    before, after = chosen(simulation)
    assert (len(before[1]), len(after[1])) == (7, 8)
    assert [event.worker for event in of(WorkerJoined, simulation.events)] == ["w7"]


@pytest.mark.parametrize(("times", "then"), [(10.0, "local-sgd"), (200.0, "alone")])
def test_links_that_get_slower_lead_to_rarer_meetings_or_none(times: float, then: str) -> None:
    begun = played(job(), desks()).now / 3
    simulation = played(job(), desks(), slower=(begun, {"w0": times, "w1": times}))
    assert [each for each, _ in chosen(simulation)] == ["bsp", then]
    alone, slow_round = EPOCHS * SAMPLES / 1000, SAMPLES / 64 * (0.032 + times * 0.0136)
    assert simulation.now < begun + slow_round + alone
    left = of(WorkerLeft, simulation.events)
    assert [event.worker for event in left] == (["w1"] if then == "alone" else [])
    assert all("left out, with it a step would take" in event.reason for event in left)


def test_a_worker_whose_link_alone_gets_slower_is_left_out_and_the_others_go_on() -> None:
    simulation = played(job(), desks(3, bandwidth=2e8), slower=(3.0, {"w2": 100.0}))
    assert chosen(simulation) == [("bsp", {"w0", "w1", "w2"}), ("bsp", {"w0", "w1"})]


def test_a_worker_that_has_got_slower_is_measured_again_at_its_present_speed_and_stays_left_out() -> None:
    slow = {"kind": "drift", "to": 0.01, "after": 8.0, "seconds": 2.0}
    on = cluster(1000.0, 1000.0, **LINK)
    on = on.model_copy(update={"worker": [on.worker[0], cluster(1.0, 1000.0, **LINK, speed=slow).worker[1]]})
    assert chosen(played(job(), on)) == [("bsp", {"w0", "w1"}), ("alone", {"w0"})]


def test_nothing_changes_where_nothing_has_changed() -> None:
    for on in (desks(), desks(3, bandwidth=4.4e5), cluster(1000.0, 300.0, 20.0, bandwidth=1.25e7, latency=5e-4)):
        assert len(chosen(played(job(), on))) == 1


def test_a_run_that_is_nearly_over_does_not_change() -> None:
    assert chosen(played(job(epochs=1, samples=1600), desks(), wrong={"w1": [5.0]})) == [("alone", {"w0"})]


@pytest.mark.parametrize("speeds", [(1000.0, 1000.0), (1000.0, 400.0, 150.0)])
def test_speeds_that_vary_by_a_tenth_change_nothing_back_and_forth(speeds: tuple[float, ...]) -> None:
    speed = {"kind": "walk", "every": 0.3, "spread": 0.1, "lowest": 0.9, "highest": 1.1}
    on = cluster(*speeds, **LINK, speed=speed)
    assert len(chosen(played(job(epochs=10, samples=3200), on))) <= 2


def test_the_log_and_the_report_say_what_was_changed_and_why() -> None:
    simulation = played(job(), desks(), wrong={"w1": [5.0]})
    _, change = of(StrategyChosen, simulation.events)
    assert change.before.strategy == "alone"
    text = "\n".join(describe(change))
    assert "changed from w0 alone, which now takes 1." in text
    assert "bsp on w0, w1" in text
    report = format_report(tables(simulation.events))
    assert "changed from w0 alone" in report
