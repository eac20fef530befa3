"""Minibatches within a round: a step keeps its samples, whatever changes; shares follow what steps take."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from daskcnn.partition.step_shares import LAG, StepShares, StepSizes, fixed_samples
from daskcnn.store.loader import DEPTH

Costs = Mapping[str, tuple[float, float]]
"""Seconds of each worker's step, whatever it has, and of each sample in it."""


def _best(total: int, costs: Costs) -> float:
    """The shortest step that whole samples allow, of one sample each at least."""
    sizes = dict.fromkeys(costs, 1)
    for _ in range(total - len(costs)):
        sizes[min(costs, key=lambda w: costs[w][0] + (sizes[w] + 1) * costs[w][1])] += 1
    return max(fixed + sizes[w] * each for w, (fixed, each) in costs.items())


class Walk:
    """Rounds of steps that all make together. lengths: of every step so far. changes: how often shares changed."""

    def __init__(self, samples: Mapping[str, int], steps: int, *, every: int = 1) -> None:
        self.shares, self.steps, self.every = StepShares(), steps, every
        self.lengths: list[float] = []
        self.waits: list[float] = []
        self.changes = 0
        self.begin(samples)

    def begin(self, samples: Mapping[str, int]) -> None:
        """Begin a round."""
        self.sizes = {worker: StepSizes(own, self.steps) for worker, own in samples.items()}
        self.whole = {step: sum(each.of(step) for each in self.sizes.values()) for step in range(1, self.steps + 1)}
        self.made = 0

    def go(self, steps: int, costs: Costs, noise: Callable[[], float] = lambda: 1.0) -> None:
        """Make so many steps of the round."""
        for end in range(self.made + self.every, self.made + steps + 1, self.every):
            sizes = [
                {w: own.of(step) for w, own in self.sizes.items()} for step in range(end - self.every + 1, end + 1)
            ]
            for step, each in enumerate(sizes, end - self.every + 1):
                assert sum(each.values()) == self.whole[step]
                assert min(each.values()) >= 1
            seconds = {w: sum(f + each[w] * c for each in sizes) * noise() for w, (f, c) in costs.items()}
            change = self.shares.met(end, {w: sum(each[w] for each in sizes) for w in costs}, seconds)
            self.lengths.append(max(seconds.values()) / self.every)
            self.waits.append(1 - sum(seconds.values()) / len(costs) / max(seconds.values()))
            self.made = end
            if change is not None:
                assert change.since == end + LAG
                assert sum(change.more.values()) == 0
                self.changes += 1
                for worker, own in self.sizes.items():
                    own.change(change.since, change.more[worker])


def test_changes_count_for_minibatches_that_are_not_prepared_yet() -> None:
    """After step s is answered, s + 1 … s + DEPTH are loaded or being loaded."""
    assert LAG == DEPTH + 1


costs_of = st.lists(st.tuples(st.floats(0, 20), st.floats(0.05, 5)), min_size=2, max_size=5)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(costs_of, min_size=1, max_size=3),
    st.lists(st.integers(40, 3000), min_size=5, max_size=5),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_a_step_keeps_its_samples_whatever_the_speeds(
    speeds: list[list[tuple[float, float]]], samples: list[int], every: int, chance: random.Random
) -> None:
    count = min(map(len, speeds))
    walk = Walk({f"w{i}": own for i, own in enumerate(samples[:count])}, 40, every=every)
    for _ in range(2):
        for costs in speeds:
            by_name = {f"w{i}": each for i, each in enumerate(costs[:count])}
            walk.go(min(12, 40 - walk.made), by_name, lambda: chance.uniform(0.5, 2))
        walk.begin({f"w{i}": own for i, own in enumerate(samples[:count])})


@settings(max_examples=40, deadline=None)
@given(costs_of, st.integers(1, 2))
@example([(0.0, 0.0546875), (6.0625, 0.0625)], 2)
def test_at_constant_speeds_shares_settle_and_stay(costs: list[tuple[float, float]], every: int) -> None:
    """In the example nearly all of a worker's step is fixed: the last change comes at step 240."""
    by_name = {f"w{i}": each for i, each in enumerate(costs)}
    walk = Walk(dict.fromkeys(by_name, 500 * 64), 500, every=every)
    walk.go(400, by_name)
    settled = walk.changes
    walk.go(100, by_name)
    assert walk.changes == settled
    assert walk.lengths[-1] <= walk.lengths[0]


@pytest.mark.parametrize("fixed", [0.0, 0.15, 0.3])
@pytest.mark.parametrize("others", [1, 3])
def test_twenty_steps_after_a_worker_became_four_times_slower_the_others_go_on(fixed: float, others: int) -> None:
    """fixed: the part of the slow worker's step that does not depend on its samples."""
    costs = {f"w{i}": (fixed * 128, 1 - fixed) for i in range(others)} | {"slow": (fixed * 128, 1 - fixed)}
    walk = Walk(dict.fromkeys(costs, 128 * 100), 100)
    walk.go(50, costs)
    assert walk.changes == 0
    now = {**costs, "slow": (4 * fixed * 128, 4 * (1 - fixed))}
    walk.go(30, now)
    best = _best(128 * (others + 1), now)
    assert walk.lengths[-10] <= best / 0.95
    walk.go(20, costs)  # and it becomes fast again
    assert walk.lengths[-1] <= 128 / 0.95


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.2])
def test_unequal_workers_wait_little(noise: float) -> None:
    """At 1 : 3, with a fixed cost, from equal shares. What varies from step to step, no shares can level."""
    chance = random.Random(1)
    costs = {"fast": (8.0, 0.25), "slow": (8.0, 0.75)}
    walk = Walk(dict.fromkeys(costs, 64 * 400), 400)
    walk.go(400, costs, lambda: chance.lognormvariate(0, noise))
    level = Walk({"fast": 96 * 400, "slow": 32 * 400}, 400)
    level.shares.met = lambda *_: None  # type: ignore[method-assign]
    level.go(400, costs, lambda: chance.lognormvariate(0, noise))
    waited, at_best = (sum(each.waits[40:]) / 360 for each in (walk, level))
    assert waited <= at_best + 0.015
    assert noise or waited <= 0.01
    assert walk.changes <= 40


def test_a_round_s_first_step_is_not_looked_at() -> None:
    """It follows an evaluation, and no answer."""
    costs = {"a": (0.0, 1.0), "b": (0.0, 1.0)}
    walk = Walk(dict.fromkeys(costs, 200), 20)
    for _ in range(8):
        walk.go(1, {"a": (0.0, 1.0), "b": (0.0, 50.0)})
        walk.go(2, costs)
        walk.begin(dict.fromkeys(costs, 200))
    assert walk.changes == 0


def test_who_is_lost_takes_no_part_in_the_next_change() -> None:
    shares = StepShares()
    for step in range(1, 3):
        assert shares.met(step, {"a": 10, "b": 10, "c": 10}, {"a": 1.0, "b": 4.0, "c": 1.0}) is None
    found = [shares.met(step, {"a": 10, "b": 10}, {"a": 1.0, "b": 4.0}) for step in range(3, 7)]
    assert found[:-1] == [None] * 3
    assert found[-1] is not None
    assert found[-1].more == {"a": 6, "b": -6}


def test_what_would_count_behind_the_round_s_end_changes_nothing() -> None:
    sizes = StepSizes(50, 10)
    sizes.change(11, 3)
    sizes.change(8, 0)
    assert not sizes.changed
    sizes.change(9, 2)
    assert [sizes.of(step) for step in range(1, 11)] == [5] * 8 + [7] * 2
    assert sizes.until(10) == 54


def test_shares_of_equal_workers_do_not_wander_by_chance() -> None:
    """A step is mostly fixed, so that samples matter little, and takes a tenth more or less by chance."""
    seconds, batch = (0.010 + 16 * 0.0001) / 16, 16
    fixed = dict.fromkeys("ab", fixed_samples(0.010, seconds, batch))
    assert fixed["a"] == pytest.approx(100)
    chance, shares, sizes = random.Random(0), StepShares(fixed), {"a": 8, "b": 8}
    pending: list[tuple[int, Mapping[str, int]]] = []
    for step in range(1, 2000):
        for _, more in [each for each in pending if each[0] == step]:
            sizes = {worker: size + more[worker] for worker, size in sizes.items()}
        taken = {worker: (0.010 + 0.0001 * size) * chance.gauss(1, 0.1) for worker, size in sizes.items()}
        if change := shares.met(step, sizes, taken):
            pending.append((change.since, change.more))
        assert sum(sizes.values()) == batch
    assert max(sizes.values()) <= 10


def test_a_fixed_time_of_nearly_all_has_a_bound() -> None:
    assert fixed_samples(None, 0.001, 64) == 0.0
    assert fixed_samples(0.064, 0.001, 64) == pytest.approx(50 * 64)
    assert fixed_samples(0.032, 0.001, 64) == pytest.approx(64)
