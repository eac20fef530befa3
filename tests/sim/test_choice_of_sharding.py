"""The choice of sharded kernels: their price against simulated time, and the run that goes on with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from daskcnn.events import CalibratedWorker, EpochEnded, RunEnded, RunStarted, StrategyChosen
from daskcnn.job.resolve import resolve
from daskcnn.planning.compare_strategies import compare_strategies, problem_of
from daskcnn.planning.simulate import Scenario, scenario_of, simulate
from daskcnn.show.strategy_table import choice_text
from daskcnn.sim.cluster import parse_cluster
from daskcnn.training.strategy_choice import choose
from daskcnn.training.strategy_prices import STRATEGIES, PricedStrategy
from tests.sim.sim_cases import of

WIDE, NARROW = {"name": "500:1500"}, {"name": "quick"}
GIGABIT = 1.25e8


def scenario(model: dict[str, Any], *speeds: float, bandwidth: float = GIGABIT, **train: Any) -> Scenario:
    """A job on workers of these speeds, whose cluster says what a task costs."""
    workers = [
        {"name": f"w{i}", "images_per_second": speed, "bandwidth": bandwidth, "latency": 2e-4}
        for i, speed in enumerate(speeds)
    ]
    job = resolve({"data": {"name": "cifar10"}, "model": model, "train": {"epochs": 1, **train}})
    return scenario_of(job, parse_cluster({"worker": workers, "costs": {"task": 2e-3}}), "a test")


def layer_of(chosen: Scenario) -> PricedStrategy:
    return next(each for each in compare_strategies(chosen).candidates if each.strategy == "layer")


def test_wide_layers_are_sharded_where_their_weights_take_longer_than_their_maps() -> None:
    found = compare_strategies(scenario(WIDE, 25.0, 25.0))
    assert found.chosen.strategy == "layer"
    assert found.chosen.workers == ("w0", "w1")
    assert found.chosen.seconds < 0.75 * min(found.alone.seconds, compared(found.candidates, "bsp"))
    assert found.more is not None


def compared(candidates: Any, strategy: str) -> float:
    return min(each.seconds for each in candidates if each.strategy == strategy)


@pytest.mark.parametrize("bandwidth", [5e6, 1.25e7, GIGABIT, 1.25e9])
@pytest.mark.parametrize("speeds", [(2400.0, 2400.0), (2400.0, 800.0, 800.0)])
def test_narrow_layers_never_are(speeds: tuple[float, ...], bandwidth: float) -> None:
    assert compare_strategies(scenario(NARROW, *speeds, bandwidth=bandwidth)).chosen.strategy != "layer"


@pytest.mark.parametrize("train", [{"lookahead": {}}, {"largest_batch": 4096}])
def test_steps_of_their_own_are_not_considered_where_a_run_could_not_make_them(train: dict[str, Any]) -> None:
    def considered(**own: Any) -> set[str]:
        return {
            each.strategy for each in compare_strategies(scenario(NARROW, 25.0, 25.0, bandwidth=1e5, **own)).candidates
        }

    assert "local-sgd" in considered()
    assert "local-sgd" not in considered(**train)


def test_nor_are_wide_ones_over_a_slow_link() -> None:
    assert compare_strategies(scenario(WIDE, 25.0, 25.0, bandwidth=1e6)).chosen.strategy != "layer"


@pytest.mark.parametrize(("model", "bandwidth"), [(WIDE, GIGABIT), (NARROW, 5e6), (NARROW, 1.25e9)])
def test_further_candidates_never_make_the_chosen_one_slower(model: dict[str, Any], bandwidth: float) -> None:
    chosen = scenario(model, 40.0, 30.0, 10.0, 10.0, bandwidth=bandwidth)
    found = compare_strategies(chosen)
    assert found.chosen.seconds <= choose(problem_of(chosen), STRATEGIES).chosen.seconds
    assert found.chosen.compared == pytest.approx(min(each.compared for each in found.candidates))
    assert {each.group for each in found.candidates if each.strategy == "bsp"} == {None, 2}


@pytest.mark.parametrize("speeds", [(25.0, 25.0), (25.0, 10.0)])
def test_the_price_is_what_a_sharded_step_takes_in_simulated_time(speeds: tuple[float, ...]) -> None:
    chosen, sharded = (scenario(WIDE, *speeds, strategy=strategy) for strategy in ("auto", "layer"))
    assert layer_of(chosen).step_seconds == pytest.approx(sharded.sharding(sharded.cluster).step().seconds, rel=0.02)


def test_a_run_goes_on_with_sharded_kernels_where_they_are_chosen() -> None:
    found, alike = (simulate(scenario(WIDE, 25.0, 25.0, strategy=strategy)) for strategy in ("auto", "layer"))
    assert [event.strategy for event in of(RunStarted, found.events)] == ["auto", "layer"]
    (choice,) = of(StrategyChosen, found.events)
    assert choice.candidates[0].strategy == "layer"
    assert [event.at for event in of(EpochEnded, found.events)] == [event.at for event in of(EpochEnded, alike.events)]
    assert len(of(RunEnded, found.events)) == 1
    assert found.report.start.strategy == "layer"


def test_a_job_that_needs_whole_replicas_does_not_shard() -> None:
    for train in ({"clip": 1.0}, {"optimizer": "lars"}, {"batch_size": "auto"}):
        prices = scenario(WIDE, 25.0, 25.0, **train).sharded_prices()
        assert prices is not None
        assert not prices.layer
        assert not prices.groups
    adamw = scenario(WIDE, 25.0, 25.0, optimizer="adamw", lr=1e-3).sharded_prices()
    assert adamw is not None
    assert (adamw.layer, adamw.groups) == (True, False)


def test_what_is_not_measured_is_estimated_from_convolutions_and_said() -> None:
    chosen = scenario(WIDE, 25.0, 25.0)
    prices, staged = chosen.sharded_prices(), chosen.staged_rows()
    assert prices is not None
    rows = {name: convolutions_of(row) for name, row in staged.items()}
    found = choose(problem_of(chosen), [*STRATEGIES, *replace(prices, measured=False).pricers(rows)])
    layer = next(each for each in found.candidates if each.strategy == "layer")
    assert layer.estimated
    assert not layer_of(chosen).estimated
    assert layer.step_seconds == pytest.approx(layer_of(chosen).step_seconds, rel=0.15)
    told = choice_text(found.event()).splitlines()
    assert any(line.startswith("about: an estimate") for line in told), "a line of its own"
    unknown = {name: row.model_copy(update={"conv_seconds": {}}) for name, row in rows.items()}
    found = choose(problem_of(chosen), [*STRATEGIES, *prices.pricers(unknown)])
    assert {each.strategy for each in found.candidates} == {"alone", "bsp", "local-sgd"}


def convolutions_of(row: CalibratedWorker) -> CalibratedWorker:
    """The row of a run that has not measured its stages: of these, four fifths are their convolutions."""
    convs = {name: 0.8 * seconds for name, seconds in row.conv_seconds.items()}
    return row.model_copy(update={"conv_seconds": convs, "rest_seconds": None})
