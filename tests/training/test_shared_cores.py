"""Workers of one host share its cores: what a step takes them, and laws of that."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import daskcnn
from daskcnn.events import CalibratedWorker
from daskcnn.sharded.balance import WorkerLink
from daskcnn.training.strategy_change import MeasuredSteps, WayToTrain, at_speeds, with_links
from daskcnn.training.strategy_choice import choose, priced
from daskcnn.training.strategy_prices import (
    LOCAL,
    STRATEGIES,
    StepProblem,
    WorkerCost,
    measured_problem,
    priced_set,
    shared_steps,
)

RUNS = Path(daskcnn.__file__).parents[1] / "benchmarks" / "results" / "sooner.json"
LOOPBACK = WorkerLink(1.2e9, 2e-5)
MEETING = 0.7e-3


def desk(cores: int, workers: int, each: float = 3.2e-4, fixed: float = 1e-3, nbytes: float = 358_000) -> StepProblem:
    """One-thread workers, and the server, on a host of this number of cores."""
    own = (WorkerCost(f"cpu-{i}", fixed, each, LOOPBACK, "desk") for i in range(workers))
    return StepProblem(tuple(own), 64, nbytes, overhead=MEETING, ahead=0.9, cores={"desk": cores}, home="desk")


@pytest.mark.parametrize(
    ("network", "fixed", "epochs", "nbytes"), [("quick", 1.1e-3, 4, 358_000), ("rules", 0.7e-3, 6, 138_000)]
)
def test_two_workers_on_two_cores_are_priced_as_they_were_measured(
    network: str, fixed: float, epochs: int, nbytes: int
) -> None:
    """In whole runs, without evaluations. By the speeds alone two were to be 1.6 to 1.8 times as fast as one."""
    runs = [each for each in json.loads(RUNS.read_text())["parts"].values() if each["run"]["network"] == network]
    sides = {side: [each for each in runs if each["run"]["side"] == side] for side in ("alone", "bsp")}
    even = [each for each in sides["bsp"] if each["run"]["place"]["ratio"] == 1]
    alone = median(64 / each["images_per_second"]["cpu-0"] for each in sides["alone"])
    steps = epochs * 48_000 / 64
    took = median(
        32 / each["images_per_second"]["cpu-0"] + (each["communication"] + each["wait"]) / steps for each in even
    )
    two = {"cpu-0", "cpu-1"}
    shared = desk(2, 2, (alone - fixed) / 64, fixed, nbytes)
    assert priced_set(shared, two).step_seconds == pytest.approx(took, rel=0.05)
    assert alone > 1.6 * priced_set(replace(shared, cores={}), two).step_seconds
    assert choose(shared).alone.step_seconds == pytest.approx(alone)


def test_a_third_core_is_for_the_server_and_the_loaders() -> None:
    two, three, apart = (priced_set(desk(cores, 2), {"cpu-0", "cpu-1"}) for cores in (2, 3, 1000))
    assert two.step_seconds > 1.2 * three.step_seconds
    assert three == apart


hosts = st.sampled_from(["", "a", "b"])
links = st.builds(WorkerLink, st.floats(1e6, 1e10), st.floats(0, 0.02))
costs = st.builds(WorkerCost, st.just(""), st.floats(0, 0.01), st.floats(1e-6, 0.01), links, hosts, st.integers(1, 4))
cores = st.fixed_dictionaries({"a": st.integers(1, 8), "b": st.integers(1, 8)})


@st.composite
def problems(draw: st.DrawFn) -> StepProblem:
    drawn = draw(st.lists(costs, min_size=1, max_size=5))
    workers = tuple(replace(own, name=f"w{i}") for i, own in enumerate(drawn))
    ahead, home = draw(st.sampled_from([0.0, 0.9])), draw(hosts)
    return StepProblem(workers, 64, 5e5, overhead=MEETING, ahead=ahead, cores=draw(cores), home=home)


@settings(max_examples=40, deadline=None)
@given(problems(), st.sampled_from(["a", "b"]), st.integers(1, 4), st.sampled_from(["bsp", LOCAL]))
def test_more_cores_never_make_a_step_longer(problem: StepProblem, host: str, more: int, strategy: str) -> None:
    wider = replace(problem, cores={**problem.cores, host: problem.cores[host] + more})
    names = [own.name for own in problem.workers]
    every = None if strategy == "bsp" else 5
    there, then = (priced_set(each, names, strategy, every).step_seconds for each in (problem, wider))
    assert then <= there * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(problems())
def test_workers_on_hosts_of_their_own_are_priced_without_them(problem: StepProblem) -> None:
    own = tuple(replace(each, host=each.name) for each in problem.workers)
    known = replace(problem, workers=own, cores=dict.fromkeys((each.name for each in own), 1), home=own[0].name)
    there, without = (
        {(each.strategy, *sorted(each.samples.items())): each.seconds for each in priced(found, STRATEGIES)}
        for found in (known, replace(known, cores={}))
    )
    assert there == pytest.approx(without, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(problems())
def test_a_shared_host_makes_no_step_shorter_and_one_worker_as_fast_as_before(problem: StepProblem) -> None:
    for there, without in zip(shared_steps(problem), shared_steps(replace(problem, cores={})), strict=True):
        assert there.step_seconds >= without.step_seconds * (1 - 1e-9)
    found, bare = (choose(each).alone for each in (problem, replace(problem, cores={})))
    assert found == bare


def test_rounds_that_take_what_was_expected_of_workers_on_shared_cores_change_nothing() -> None:
    problem = desk(2, 2)
    way = WayToTrain(frozenset({"cpu-0", "cpu-1"}))
    expected = way.price(problem)
    took = {
        name: MeasuredSteps(32, problem.together(way.workers).workers[0].seconds(32), expected.exchange)
        for name in way.workers
    }
    then = at_speeds(problem, took)
    assert [own.seconds(64) for own in then.workers] == pytest.approx([own.seconds(64) for own in problem.workers])
    assert way.price(with_links(then, way, took)).step_seconds == pytest.approx(expected.step_seconds)


def test_what_a_calibration_knows_of_its_host_counts() -> None:
    rows = [
        CalibratedWorker(name=name, host="desk", device="cpu", threads=2, cores=4, images_per_second=1e3)
        for name in "ab"
    ]
    found = measured_problem({row.name: (row, 1e-3) for row in rows}, 64, {}, 4)
    assert found.cores == {"desk": 4}
    assert [(own.host, own.threads) for own in found.workers] == [("desk", 2)] * 2
    gpu = rows[0].model_copy(update={"device": "gpu"})
    assert measured_problem({"a": (gpu, 1e-3)}, 64, {}, 4).workers[0].threads == 1
