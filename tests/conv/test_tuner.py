"""Measuring: who is run, how often, what is remembered, and when the model keeps its say."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

import pytest

from daskcnn.arrays import NUMPY, Device
from daskcnn.conv import Convolution, ConvSpec, plan, tuner
from daskcnn.conv.planner import forget_plans
from daskcnn.conv.timings import memory_of
from daskcnn.conv.tuner import RUNS, tune
from tests.conv.fake_algorithm import FakeAlgorithm, FakeClock, Only

SPEC = ConvSpec(N=2, H=5, W=5, C=2, K=3, R=3, S=3, pad=(1, 1))
LARGER = ConvSpec(N=4, H=5, W=5, C=2, K=3, R=3, S=3, pad=(1, 1))
pytestmark = pytest.mark.usefixtures("tuned")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def measured(spec: ConvSpec = SPEC) -> dict[str, Any]:
    """All that is remembered of a problem, on one thread, from the disk."""
    memory_of.cache_clear()
    (found,) = (e for k, e in memory_of(NUMPY).entries.items() if k.startswith(f"N{spec.N} "))
    return {name: pytest.approx(seconds) for name, seconds in found.seconds.items()}


def test_the_measured_best_replaces_the_predicted_one(only: Only, clock: FakeClock) -> None:
    fast = FakeAlgorithm("fast", 0.02, (0.01, 0.02, 0.03), clock=clock)
    slow = FakeAlgorithm("slow", 0.01, (0.02, 0.03, 0.03), clock=clock)
    only(fast, slow)
    assert plan(SPEC, Device()).algorithm == "slow"
    assert tune([SPEC], Device(), clock=clock) == [SPEC]
    assert plan(SPEC, Device()).algorithm == "fast"
    assert measured() == {"fast": (0.01, 0.02, 0.03), "slow": (0.02, 0.03, 0.03)}
    assert (fast.runs, slow.runs) == (1 + RUNS, 1 + RUNS)


def test_what_is_remembered_is_not_measured_again(only: Only, clock: FakeClock) -> None:
    fakes = [FakeAlgorithm(name, 0.01, (0.01, 0.01, 0.01), clock=clock) for name in "ab"]
    only(*fakes)
    tune([SPEC, SPEC], Device(), clock=clock)
    runs = [fake.runs for fake in fakes]
    assert tune([SPEC], Device(), clock=clock) == []
    assert [fake.runs for fake in fakes] == runs
    assert tune([SPEC], Device(), clock=clock, anew=True) == [SPEC]


def test_a_size_that_is_asked_for_is_measured_though_a_near_one_is_known(only: Only, clock: FakeClock) -> None:
    only(*(FakeAlgorithm(name, 0.01, (0.01, 0.01, 0.01), clock=clock) for name in "ab"))
    tune([LARGER], Device(), clock=clock)
    assert "with 4 samples" in plan(SPEC, Device()).reason
    assert tune([SPEC, LARGER], Device(), clock=clock) == [SPEC]
    assert plan(SPEC, Device()).reason.startswith("measured 20 ms")


@pytest.mark.parametrize("news", ["version", "algorithm"])
def test_news_are_measured(news: str, only: Only, clock: FakeClock) -> None:
    def fake(name: str, version: int = 1) -> FakeAlgorithm:
        return FakeAlgorithm(name, 0.01, (0.01, 0.01, 0.01), clock=clock, version=version)

    only(fake("a"), fake("b"))
    tune([SPEC], Device(), clock=clock)
    only(*([fake("a"), fake("b", 2)] if news == "version" else [fake("a"), fake("b"), fake("c")]))
    assert "predicted" in plan(SPEC, Device()).reason
    assert tune([SPEC], Device(), clock=clock) == [SPEC]
    assert "measured" in plan(SPEC, Device()).reason


def test_the_warm_up_does_not_count_and_the_median_does(only: Only, clock: FakeClock) -> None:
    runs = [(s, s, s) for s in (9.0, 3.0, 1.0, 2.0, 5.0, 4.0)]
    only(*[FakeAlgorithm(name, 0.01, *runs, clock=clock) for name in "ab"])
    tune([SPEC], Device(), clock=clock, seconds=1000)
    middle = (median(s for s, *_ in runs[1 : 1 + RUNS]),) * 3
    assert measured() == {"a": middle, "b": middle}


def test_who_is_predicted_far_behind_is_not_run(only: Only, clock: FakeClock) -> None:
    ones = (0.01, 0.01, 0.01)
    fakes = [FakeAlgorithm(name, p, ones, clock=clock) for name, p in (("a", 0.01), ("b", 0.024), ("c", 0.026))]
    only(*fakes)
    tune([SPEC], Device(), clock=clock)
    assert [bool(fake.runs) for fake in fakes] == [True, True, False]
    assert measured().keys() == {"a", "b"}


def test_who_is_fast_one_way_alone_stays(only: Only, clock: FakeClock) -> None:
    """A first layer has no dx: the best there may be the last elsewhere."""
    first = FakeAlgorithm("first", 0.01, (0.01, 0.9, 0.01), clock=clock)
    others = FakeAlgorithm("others", 0.01, (0.05, 0.05, 0.05), clock=clock)
    only(first, others)
    tune([SPEC], Device(), clock=clock, seconds=1000)
    assert first.runs == others.runs == 1 + RUNS
    assert plan(SPEC, Device()).algorithm == "first, backward others"
    assert plan(SPEC, Device(), need_dx=False).algorithm == "first"


def test_the_hopeless_are_dropped_after_the_warm_up_and_the_slow_after_a_run(only: Only, clock: FakeClock) -> None:
    best = FakeAlgorithm("best", 0.01, (0.01, 0.01, 0.01), clock=clock)
    slow = FakeAlgorithm("slow", 0.01, (0.03, 0.03, 0.03), clock=clock)
    hopeless = FakeAlgorithm("hopeless", 0.01, (0.05, 0.05, 0.05), clock=clock)
    only(best, slow, hopeless)
    tune([SPEC], Device(), clock=clock)
    assert (best.runs, slow.runs, hopeless.runs) == (1 + RUNS, 2, 1)
    assert measured().keys() == {"best", "slow"}


def test_where_time_runs_short_fewer_runs_do(only: Only, clock: FakeClock) -> None:
    fakes = [FakeAlgorithm(name, 0.1, (1.0, 1.0, 1.0), clock=clock) for name in "ab"]
    only(*fakes)
    assert tune([SPEC], Device(), clock=clock, seconds=16.0) == [SPEC]
    assert [fake.runs for fake in fakes] == [3, 3]


@pytest.mark.parametrize(("predicted", "runs"), [(10.0, 0), (0.1, 1)])
def test_a_problem_without_time_for_it_is_left_to_the_model(
    predicted: float, runs: int, only: Only, clock: FakeClock
) -> None:
    """Whether that is foreseen, or seen when the time is over: a warm-up alone is not believed."""
    fakes = [FakeAlgorithm(name, predicted, (5.0, 5.0, 5.0), clock=clock) for name in "ab"]
    only(*fakes)
    assert tune([SPEC], Device(), clock=clock, seconds=29.0) == []
    assert [fake.runs for fake in fakes] == [runs, runs]
    assert memory_of(NUMPY).entries == {}
    assert "predicted" in plan(SPEC, Device()).reason


def test_time_is_shared_out_and_small_problems_come_first(only: Only, clock: FakeClock) -> None:
    asked: list[ConvSpec] = []

    class Noted(FakeAlgorithm):
        def bind(self, spec: ConvSpec, backend: Any, limit: int) -> Convolution:
            asked.append(spec)
            return super().bind(spec, backend, limit)

    only(*[Noted(name, 0.1, (1.0, 1.0, 1.0), clock=clock) for name in "ab"])
    assert tune([LARGER, SPEC], Device(), clock=clock, seconds=40.0) == [SPEC, LARGER]
    assert asked.index(LARGER) == asked.count(SPEC)
    assert clock.now <= 40.0 + 3.0  # a run that has begun is ended


def test_nothing_is_measured_or_believed_where_results_must_repeat(
    only: Only, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes = [FakeAlgorithm(name, 0.01, (s, s, s), clock=clock) for name, s in (("a", 0.02), ("b", 0.01))]
    only(*fakes)
    tune([SPEC], Device(), clock=clock)
    assert plan(SPEC, Device()).algorithm == "b"
    monkeypatch.setenv("DASKCNN_TUNE", "0")
    forget_plans()
    assert plan(SPEC, Device()).algorithm == "a"
    runs = [fake.runs for fake in fakes]
    assert tune([SPEC], Device(), clock=clock, anew=True) == []
    assert [fake.runs for fake in fakes] == runs


def test_a_device_that_is_not_tuned_measures_nothing_and_goes_by_the_model(only: Only, clock: FakeClock) -> None:
    fakes = [FakeAlgorithm(name, 0.01, (s, s, s), clock=clock) for name, s in (("a", 0.02), ("b", 0.01))]
    only(*fakes)
    tune([SPEC], Device(), clock=clock)
    runs, by_the_model = [fake.runs for fake in fakes], Device(tuned=False)
    assert (plan(SPEC, Device()).algorithm, plan(SPEC, by_the_model).algorithm) == ("b", "a")
    assert tune([SPEC], by_the_model, clock=clock, anew=True) == []
    assert [fake.runs for fake in fakes] == runs


def test_without_a_choice_nothing_is_run(only: Only, clock: FakeClock) -> None:
    alone = FakeAlgorithm("alone", 0.01, (0.01, 0.01, 0.01), clock=clock)
    large = FakeAlgorithm("large", 0.01, (0.01, 0.01, 0.01), clock=clock, workspace=1000)
    only(alone, large)
    assert tune([SPEC], Device(workspace_limit=999), clock=clock) == []
    assert alone.runs == large.runs == 0


def test_a_problem_that_fits_nowhere_is_left_alone(only: Only, clock: FakeClock) -> None:
    only(FakeAlgorithm("large", 0.01, (0.01, 0.01, 0.01), clock=clock, workspace=1000))
    assert tune([SPEC], Device(workspace_limit=999), clock=clock) == []


def test_the_real_algorithms_are_measured_on_every_device(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leave no scratch memory behind."""
    monkeypatch.setattr(tuner, "CLOSE", math.inf)
    ticks = iter(range(10**6))
    assert tune([SPEC], device, clock=lambda: next(ticks) * 1e-4) == [SPEC]
    assert plan(SPEC, device).measured
    assert device.workspace.nbytes == 0


class TooLarge(FakeAlgorithm):
    """Finds no memory on its device, as CuPy says it."""

    def passed(self, direction: int) -> None:
        raise MemoryError("out of memory allocating 8,589,934,592 bytes")


def test_an_algorithm_that_the_device_has_no_memory_for_gives_way_to_smaller_ones(only: Only, clock: FakeClock) -> None:
    large = TooLarge("large", 0.001, (0.0, 0.0, 0.0), clock=clock)
    small = [FakeAlgorithm(name, 0.002, (0.01, 0.01, 0.01), clock=clock) for name in "ab"]
    only(large, *small)
    assert plan(SPEC, Device()).algorithm == "large"
    assert tune([SPEC], Device(), clock=clock) == [SPEC]
    assert plan(SPEC, Device()).algorithm in ("a", "b")
    assert large.runs == 1
