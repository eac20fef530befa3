"""Rounds: every sample is presented `epochs` times on average, whoever comes and goes."""

from __future__ import annotations

import heapq
import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from daskcnn.partition import PARTITIONERS
from daskcnn.partition.allocation import count
from daskcnn.partition.rounds import Meetings, Round, Rounds
from daskcnn.partition.step_shares import SETTLED, StepSizes

every = pytest.mark.parametrize("partition", PARTITIONERS)
both = pytest.mark.parametrize("barrier", [True, False])
speeds = st.lists(st.floats(0.1, 10), min_size=1, max_size=4)


def _rounds(
    partition: str,
    seconds: list[float],
    barrier: bool,
    *,
    total: int = 100,
    epochs: int = 3,
    how: dict[str, Any] | None = None,
    **options: Any,
) -> Rounds:
    times = {f"w{i}": each for i, each in enumerate(seconds)}
    return Rounds(PARTITIONERS[partition](**options), total, times, epochs=epochs, barrier=barrier, **how or {})


def _simulate(rounds: Rounds, speeds: dict[str, float]) -> list[Round]:
    """All rounds in the order in which they begin, if a sample takes each worker so many seconds."""
    begun: list[Round] = []
    ends: list[tuple[float, str]] = []
    now = 0.0
    while True:
        for each in rounds.due():
            begun.append(each)
            heapq.heappush(ends, (now + each.samples * speeds[each.worker], each.worker))
        if not ends:
            assert rounds.ended
            return begun
        now, worker = heapq.heappop(ends)
        rounds.finished(worker, speeds[worker])


# --- whatever happens ---


class Life(RuleBasedStateMachine):
    """Workers finish, are lost and join in any order; what is due begins at any time, or later."""

    def __init__(self) -> None:
        super().__init__()
        self.presented = 0
        self.came = 0
        self.losses = 0
        self.progress = 0.0  # of the latest round's beginning
        self.end: float | None = None  # of the barrier's latest round
        self.latest: tuple[float, float] | None = None

    @initialize(
        partition=st.sampled_from(sorted(PARTITIONERS)),
        seconds=speeds,
        barrier=st.booleans(),
        total=st.integers(4, 60),
        epochs=st.integers(2, 4),
        increments=st.integers(1, 3),
        passes=st.integers(1, 3),
        batch_size=st.integers(1, 20) | st.none(),
    )
    def start(
        self,
        partition: str,
        seconds: list[float],
        barrier: bool,
        total: int,
        epochs: int,
        increments: int,
        passes: int,
        batch_size: int | None,
    ) -> None:
        self.how: dict[str, Any] = {"passes": passes, "batch_size": batch_size if barrier else None}
        options: dict[str, Any] = {"total": total, "epochs": epochs, "increments": increments, "how": self.how}
        self.rounds = _rounds(partition, seconds, barrier, **options)
        self.total, self.epochs = total, epochs

    @rule()
    def due(self) -> None:
        idle, before = set(self.rounds.workers) - set(self.rounds.running), self.rounds.allocation
        joined = self.rounds.to_dict()["joined"]
        begun = self.rounds.due()
        assert {each.worker for each in begun} <= idle
        assert not (self.rounds.barrier and begun) or idle == set(self.rounds.workers)
        for each in begun:
            self._check(each)
        if self.rounds.to_dict()["joined"] != joined:  # a share is corrected: samples move to it or from it
            return
        steps = max((each.steps or 0 for each in begun), default=0)
        for worker in before.workers:
            own, now = (_samples(each.ranges[worker]) for each in (before, self.rounds.allocation))
            # samples move to a worker that lacks one for a step, from those that keep one for each
            assert own <= now or (self.rounds.batch_size is not None and len(now) * self.rounds.passes >= steps > 0)

    def _check(self, each: Round) -> None:
        assert self.rounds.running[each.worker] is each
        assert each.ranges == self.rounds.allocation.ranges[each.worker]
        assert 0 < each.samples <= self.rounds.passes * count(each.ranges)
        assert (each.steps is None) == (self.rounds.batch_size is None)
        start, end = each.progress
        assert self.progress <= start < end <= 1
        assert start == self.presented / self.rounds.presentations
        if self.rounds.barrier and not self.losses and self.end is not None:
            assert start == self.end or each.progress == self.latest
        self.progress, self.end, self.latest = start, end, each.progress

    @precondition(lambda self: self.rounds.running)
    @rule(data=st.data(), seconds=st.floats(0.01, 100))
    def finished(self, data: st.DataObject, seconds: float) -> None:
        worker = data.draw(st.sampled_from(sorted(self.rounds.running)))
        self.presented += self.rounds.running[worker].samples
        self.rounds.finished(worker, seconds)

    @precondition(lambda self: len(self.rounds.workers) > 1)
    @rule(data=st.data())
    def lost(self, data: st.DataObject) -> None:
        worker, given = data.draw(st.sampled_from(self.rounds.workers)), self.rounds.allocation.given
        self.rounds.lost(worker)
        self.losses += 1
        assert worker not in self.rounds.workers
        assert worker not in self.rounds.running
        assert self.rounds.allocation.given >= given

    @precondition(lambda self: len(self.rounds.workers) < 5)
    @rule(seconds=st.floats(0.1, 10))
    def join(self, seconds: float) -> None:
        self.came += 1
        self.rounds.join(f"new{self.came}", seconds)

    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        """From a checkpoint of this moment: some workers are gone, one may be new."""
        record = json.loads(json.dumps(self.rounds.to_dict()))
        left = data.draw(st.lists(st.sampled_from(self.rounds.workers), min_size=1, unique=True))
        self.came += 1
        now = [*left, *data.draw(st.sampled_from([[], [f"new{self.came}"]]))]
        partitioner, barrier = self.rounds.partitioner, self.rounds.barrier
        seconds = {worker: self.rounds.seconds.get(worker, 1.0) for worker in now}
        self.rounds = Rounds(partitioner, self.total, seconds, epochs=self.epochs, barrier=barrier, **self.how)
        self.rounds.restore(record, tuple(seconds))
        self.losses += 1  # what was under way is presented again
        assert set(self.rounds.workers) == set(now)

    @invariant()
    def nothing_is_lost_or_made_up(self) -> None:
        rounds = self.rounds
        rounds.allocation.check()
        assert set(rounds.workers) == set(rounds.allocation.workers) == set(rounds.numbers)
        assert set(rounds.running) <= set(rounds.workers)
        under_way = sum(each.samples for each in rounds.running.values())
        assert rounds.done == self.presented
        assert self.presented + under_way + rounds.budget.left == self.total * self.epochs

    def teardown(self) -> None:
        """From here on nobody is lost: the run ends, with every presentation made."""
        if not hasattr(self, "rounds"):
            return
        for _ in range(100_000):
            self.due()
            if not self.rounds.running:
                break
            worker = next(iter(self.rounds.running))
            self.presented += self.rounds.running[worker].samples
            self.rounds.finished(worker, 1.0)
        assert self.rounds.ended
        assert self.presented == self.total * self.epochs
        if not self.rounds.barrier or self.rounds.passes == 1:  # 2·epochs - 1 increments fit into every run
            assert not self.rounds.allocation.free


def _samples(ranges: tuple[tuple[int, int], ...]) -> set[int]:
    return {i for lo, hi in ranges for i in range(lo, hi)}


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)


# --- undisturbed runs ---


@every
@both
@given(seconds=speeds, total=st.integers(10, 300), epochs=st.integers(2, 5), increments=st.integers(1, 3))
def test_an_undisturbed_run_presents_everything(
    partition: str, barrier: bool, seconds: list[float], total: int, epochs: int, increments: int
) -> None:
    rounds = _rounds(partition, seconds, barrier, total=total, epochs=epochs, increments=increments)
    begun = _simulate(rounds, dict(rounds.seconds))
    assert sum(each.samples for each in begun) == total * epochs
    for worker in rounds.workers:
        assert [r.number for r in begun if r.worker == worker] == list(range(rounds.numbers[worker]))


@every
@both
@given(seconds=st.lists(st.floats(0.5, 4), min_size=1, max_size=4), increments=st.integers(1, 5), data=st.data())
def test_an_undisturbed_run_gives_everything(
    partition: str, barrier: bool, seconds: list[float], increments: int, data: st.DataObject
) -> None:
    epochs = data.draw(st.integers((increments + 2) // 2, 7))
    rounds = _rounds(partition, seconds, barrier, total=400, epochs=epochs, increments=increments)
    _simulate(rounds, dict(rounds.seconds))
    assert not rounds.allocation.free
    if barrier:  # without one, nothing may be left for the last increment of some
        assert set(rounds.allocation.granted.values()) == {rounds.partitioner.increments}


@every
@pytest.mark.parametrize("slower", [1, 3, 20, 1000])
def test_a_worker_that_became_slow_keeps_no_increment_from_being_given(partition: str, slower: float) -> None:
    """Without a barrier it comes late for its increments, or never again."""
    rounds = _rounds(partition, [1.0, 1.0, 1.0], False, total=1200, epochs=4, increments=4)
    begun = _simulate(rounds, {"w0": slower, "w1": 1.0, "w2": 1.0})
    assert not rounds.allocation.free
    rounds.allocation.check()
    assert set().union(*(_samples(each.ranges) for each in begun)) == set(range(1200))


def test_increments_that_come_in_time_are_not_given_before() -> None:
    rounds = _rounds("idpa", [1.0, 2.0], False, total=300, epochs=4, increments=2)
    begun = _simulate(rounds, {"w0": 1.0, "w1": 2.0})
    assert [each.samples for each in begun][:4] == [100, 50, 200, 100]


@every
@both
def test_one_worker_s_progress_is_exact(partition: str, barrier: bool) -> None:
    rounds, shown = _rounds(partition, [2.0], barrier, total=103, epochs=4), 0
    for each in _simulate(rounds, {"w0": 2.0}):
        assert each.progress == (shown / 412, (shown + each.samples) / 412)
        shown += each.samples
    assert shown == 412


@every
def test_behind_a_barrier_progress_has_neither_gaps_nor_overlaps(partition: str) -> None:
    rounds = _rounds(partition, [1.0, 2.0, 5.0], True)
    spans = list(dict.fromkeys(each.progress for each in _simulate(rounds, dict(rounds.seconds))))
    assert spans[0][0] == 0
    assert spans[-1][1] == 1
    assert all(one[1] == other[0] for one, other in pairwise(spans))


def test_alone_a_round_expects_one_of_each_other_worker_meanwhile() -> None:
    rounds = _rounds("udpa", [1.0, 1.0], False)
    assert [each.progress for each in rounds.due()] == [(0, 100 / 300)] * 2
    rounds.finished("w0", 1.0)
    assert [each.progress for each in rounds.due()] == [(50 / 300, 150 / 300)]


def test_first_rounds_alone_expect_what_all_others_were_given() -> None:
    rounds = _rounds("idpa", [1.0, 3.0], False, increments=2)
    due = rounds.due()
    assert [each.samples for each in due] == [37, 12]
    assert [each.progress for each in due] == [(0, 49 / 300)] * 2


def test_later_increments_go_by_the_seconds_measured() -> None:
    rounds = _rounds("idpa", [1.0, 1.0], True, increments=2)
    assert [each.samples for each in rounds.due()] == [25, 25]
    rounds.finished("w0", 1.0)
    assert rounds.due() == []  # the barrier
    rounds.finished("w1", 3.0)
    assert [each.samples for each in rounds.due()] == [75, 25]


def test_a_worker_without_samples_has_no_round_until_it_gets_some() -> None:
    rounds = _rounds("udpa", [1.0] * 4, True, total=3)
    assert [each.worker for each in rounds.due()] == ["w0", "w1", "w2"]
    rounds.lost("w1")
    rounds.finished("w0", 1.0)
    rounds.finished("w2", 1.0)
    assert sorted(each.worker for each in rounds.due()) == ["w0", "w2", "w3"]


# --- losses ---


@both
def test_a_lost_worker_s_presentations_are_made_by_the_others(barrier: bool) -> None:
    rounds = _rounds("udpa", [1.0, 1.0], barrier, epochs=1)
    assert [each.samples for each in rounds.due()] == [50, 50]
    rounds.finished("w0", 1.0)
    assert rounds.due() == []
    assert not rounds.ended
    rounds.lost("w1")
    (again,) = rounds.due()
    assert (again.worker, again.samples, again.ranges) == ("w0", 50, ((0, 100),))
    rounds.finished("w0", 1.0)
    assert rounds.due() == []
    assert rounds.ended


@both
def test_the_last_worker_s_loss_is_an_error_that_changes_nothing(barrier: bool) -> None:
    rounds = _rounds("idpa", [1.0], barrier)
    rounds.due()
    before = rounds.to_dict()
    with pytest.raises(ValueError, match="nobody is left"):
        rounds.lost("w0")
    assert rounds.to_dict() == before
    assert list(rounds.running) == ["w0"]


def test_who_is_there_cannot_join() -> None:
    rounds = _rounds("idpa", [1.0, 1.0], True)
    before = rounds.to_dict()
    with pytest.raises(ValueError, match="'w0': is part of the allocation already"):
        rounds.join("w0", 9.0)
    assert rounds.to_dict() == before


def test_a_joined_worker_repeats_no_presentation() -> None:
    """Orders and augmentations are drawn from a round's number: its own go on from the highest of all."""
    rounds = _rounds("udpa", [1.0, 1.0], False)
    rounds.due()
    for _ in range(2):
        rounds.finished("w0", 1.0)
        rounds.due()
    rounds.join("w2", 1.0)
    assert [(each.worker, each.number) for each in rounds.due()] == [("w2", 3)]


@both
@pytest.mark.parametrize("load", [1.0, 1.36, 4.0])
def test_equal_workers_have_equal_shares_however_late_one_joins(barrier: bool, load: float) -> None:
    """Rounds take longer than a calibration: the other's rounds and the newcomer's calibration are no comparison."""
    rounds = _rounds("idpa", [0.01], barrier, total=1200, epochs=9, increments=1)
    rounds.due()
    rounds.finished("w0", 0.01 * load)
    rounds.join("w1", 0.01)
    assert rounds.allocation.sizes() == {"w0": 600, "w1": 600}
    _simulate(rounds, {"w0": 0.01 * load, "w1": 0.01 * load})
    assert rounds.allocation.sizes() == {"w0": 600, "w1": 600}


@both
@pytest.mark.parametrize(("slower", "share"), [(3.0, 300), (1 / 3, 900)])
def test_a_newcomer_s_share_goes_by_its_first_round_from_then_on(barrier: bool, slower: float, share: int) -> None:
    rounds = _rounds("idpa", [0.01], barrier, total=1200, epochs=9, increments=1)
    rounds.due()
    rounds.finished("w0", 0.02)
    rounds.join("w1", 0.01)
    record = json.loads(json.dumps(rounds.to_dict()))
    _simulate(rounds, {"w0": 0.02, "w1": 0.02 * slower})
    assert rounds.allocation.sizes() == {"w0": 1200 - share, "w1": share}
    resumed = _rounds("idpa", [0.01, 0.01], barrier, total=1200, epochs=9, increments=1)
    resumed.restore(record, ["w0", "w1"])
    _simulate(resumed, {"w0": 0.02, "w1": 0.02 * slower})
    assert resumed.allocation.sizes() == {"w0": 1200 - share, "w1": share}


def test_increments_compare_like_with_like_while_some_have_no_round_yet() -> None:
    rounds = _rounds("idpa", [1.0, 1.0, 1.0], False, total=1200, epochs=9, increments=2)
    rounds.due()
    rounds.finished("w0", 1.4)
    rounds.due()
    assert rounds.allocation.sizes() == {"w0": 400, "w1": 200, "w2": 200}


def test_a_resume_compares_the_calibrations_of_those_that_are_there() -> None:
    rounds = _rounds("idpa", [1.0, 1.0], True, total=1200, increments=1)
    for each in rounds.due():
        rounds.finished(each.worker, 4.0)
    resumed = Rounds(rounds.partitioner, 1200, {"w1": 1.0, "w2": 1.0}, epochs=3, barrier=True)
    resumed.restore(rounds.to_dict(), ["w2", "w1"])
    assert resumed.allocation.sizes() == {"w1": 600, "w2": 600}


# --- checkpoints ---


@every
@given(seconds=speeds, drift=speeds, after=st.integers(0, 6), increments=st.integers(1, 5))
def test_a_run_resumed_between_rounds_goes_on_as_if_nothing_had_been(
    partition: str, seconds: list[float], drift: list[float], after: int, increments: int
) -> None:
    rounds = _rounds(partition, seconds, True, increments=increments)
    measured = {w: s * d for (w, s), d in zip(rounds.seconds.items(), drift * 4, strict=False)}
    for _ in range(after):
        for each in rounds.due():
            rounds.finished(each.worker, measured[each.worker])
    record = json.loads(json.dumps(rounds.to_dict()))
    resumed = Rounds(rounds.partitioner, 100, rounds.seconds, epochs=3, barrier=True)
    resumed.restore(record, rounds.workers)
    assert resumed.to_dict() == record
    assert _simulate(resumed, measured) == _simulate(rounds, measured)


@every
@both
def test_a_checkpoint_stays_what_it_was(partition: str, barrier: bool) -> None:
    rounds = _rounds(partition, [1.0, 1.0, 1.0], barrier)
    rounds.due()
    rounds.finished("w0", 2.0)
    record = rounds.to_dict()
    text = json.dumps(record)
    rounds.lost("w1")
    rounds.finished("w2", 7.0)
    rounds.join("w3", 1.0)
    rounds.due()
    assert json.dumps(record) == text
    resumed = _rounds(partition, [1.0, 1.0, 1.0], barrier)
    resumed.restore(record, ["w0", "w2"])
    resumed.due()
    assert resumed.allocation.workers == ("w0", "w2")


def test_rounds_under_way_are_presented_again_after_a_resume() -> None:
    rounds = _rounds("udpa", [1.0, 1.0], True, epochs=2)
    first = rounds.due()
    rounds.finished("w0", 1.0)
    resumed = _rounds("udpa", [1.0, 1.0], True, epochs=2)
    resumed.restore(rounds.to_dict(), ["w0", "w1"])
    assert resumed.done == 50
    # w0 goes on with its second round; w1's first was not made, and is begun again
    numbers = {"w0": 1, "w1": 0}
    assert resumed.due() == [replace(each, number=numbers[each.worker], progress=(0.25, 0.75)) for each in first]


def test_a_resume_goes_by_the_calibration_of_its_own_workers() -> None:
    rounds = _rounds("idpa", [1.0, 1.0], True, increments=2)
    for each in rounds.due():
        rounds.finished(each.worker, 1.0)
    resumed = _rounds("idpa", [1.0, 3.0], True, increments=2)
    resumed.restore(rounds.to_dict(), ["w0", "w1"])
    assert [each.samples for each in resumed.due()] == [75, 25]


def test_a_resume_on_others_only() -> None:
    rounds = _rounds("idpa", [1.0, 1.0], True, increments=2)
    for each in rounds.due():
        rounds.finished(each.worker, 1.0)
    resumed = Rounds(rounds.partitioner, 100, {"a": 1.0, "b": 1.0, "c": 2.0}, epochs=3, barrier=True)
    resumed.restore(rounds.to_dict(), ["a", "b", "c"])
    assert resumed.workers == resumed.allocation.workers == ("a", "b", "c")
    assert sum(each.samples for each in resumed.due()) == 100
    assert resumed.allocation.sizes() == {"a": 40, "b": 40, "c": 20}


# --- passes, swaps and steps ---


def _meeting(seconds: list[float], *, total: int = 100, epochs: int = 3, increments: int = 1, **options: Any) -> Rounds:
    times = {f"w{i}": each for i, each in enumerate(seconds)}
    return Rounds(PARTITIONERS["idpa"](increments), total, times, epochs=epochs, barrier=True, **options)


def _together(rounds: Rounds) -> list[list[Round]]:
    """The rounds that begin together, to the end of the run."""
    begun = []
    while due := rounds.due():
        begun.append(due)
        for each in due:
            rounds.finished(each.worker, rounds.seconds[each.worker])
    assert rounds.ended
    return begun


@given(speeds, st.integers(1, 7), st.integers(1, 7), st.integers(8, 80))
def test_rounds_of_several_passes_present_everything(
    seconds: list[float], epochs: int, passes: int, total: int
) -> None:
    rounds = _meeting(seconds, total=total, epochs=epochs, passes=passes)
    begun = _together(rounds)
    assert len(begun) == -(-epochs // passes)
    assert sum(each.samples for due in begun for each in due) == total * epochs
    for due in begun[:-1]:
        assert all(each.samples == passes * count(each.ranges) for each in due)
    assert all(each.samples <= passes * count(each.ranges) for each in begun[-1])


@example(9, 6, 25)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(24, 90))
def test_so_many_increments_are_given_in_rounds_of_several_passes(epochs: int, passes: int, total: int) -> None:
    """The most that a job may have (`job.checks`): the first round of all samples is a whole one.

    But for what the sizes before it were rounded up by, less than a sample of each increment, in every pass.
    """
    passes = min(passes, epochs)
    most = max(1, 2 * epochs // passes - 1)
    rounds = _meeting([1.0, 2.0], total=total, epochs=epochs, passes=passes, increments=most)
    begun = _together(rounds)
    assert not rounds.allocation.free
    assert passes * (total - most) <= sum(each.samples for each in begun[most - 1])


@given(speeds, st.integers(1, 60), st.integers(1, 3), st.integers(1, 3), st.integers(4, 300))
def test_behind_a_barrier_all_make_the_same_number_of_steps(
    seconds: list[float], batch_size: int, epochs: int, increments: int, total: int
) -> None:
    """Of minibatches that are as large as the job's on average, and of a sample at least."""
    rounds = _meeting(seconds, total=total, epochs=epochs, increments=increments, batch_size=batch_size)
    begun = _together(rounds)
    assert sum(each.samples for due in begun for each in due) == total * epochs
    for due in begun:
        (steps,) = {each.steps for each in due}
        assert steps is not None
        assert 1 <= steps <= min(each.samples for each in due)
        samples = sum(each.samples for each in due)
        enough = -(-samples // (batch_size * len(due)))
        assert steps == min(enough, *(each.samples for each in due))


@pytest.mark.parametrize(("increments", "joins"), [(1, False), (4, False), (1, True)])
@pytest.mark.parametrize(("batch", "shares"), [(128, True), (64, False)])
def test_a_worker_that_is_too_slow_for_a_sample_a_step_does_not_make_steps_larger(
    increments: int, joins: bool, batch: int, shares: bool
) -> None:
    seconds = {"fast": 1e-4, "slow": 0.03}
    at_first = {"fast": 1e-4} if joins else seconds
    options: dict[str, Any] = {"batch_size": batch, "shares_steps": shares, "resizes_steps": True}
    rounds = Rounds(PARTITIONERS["idpa"](increments), 45_000, at_first, epochs=9, barrier=True, **options)
    if joins:
        rounds.join("slow", seconds["slow"])
    for due in _together(rounds):
        (steps,) = {each.steps for each in due}
        assert steps == -(-sum(each.samples for each in due) // 128)
        assert len(due) == 2


def test_steps_are_those_of_the_job_s_batch_size_on_average() -> None:
    rounds = _meeting([1.0, 3.0], total=1000, batch_size=50)
    assert [(each.samples, each.steps) for each in rounds.due()] == [(750, 10), (250, 10)]


def test_without_a_batch_size_steps_are_left_to_the_replica() -> None:
    assert {each.steps for due in _together(_meeting([1.0, 3.0])) for each in due} == {None}


def test_workers_swap_between_two_rounds_and_not_before_all_is_given() -> None:
    rounds = _meeting([1.0, 1.0], epochs=4, increments=2, swaps=True)
    first, second, third, *_ = _together(rounds)
    assert [each.ranges for each in first] == [((0, 25),), ((25, 50),)]
    assert [each.ranges for each in second] == [((0, 25), (50, 75)), ((25, 50), (75, 100))]
    for mine, other, before in zip(third, reversed(second), second, strict=True):
        assert len(_samples(mine.ranges) & _samples(other.ranges)) == 25
        assert len(_samples(mine.ranges) & _samples(before.ranges)) == 25


def test_without_swaps_ranges_stay() -> None:
    first, second, third = _together(_meeting([1.0, 1.0]))
    assert [e.ranges for e in first] == [e.ranges for e in second] == [e.ranges for e in third]


@given(speeds, st.integers(0, 6), st.integers(1, 3), st.integers(1, 40) | st.none(), st.booleans())
def test_a_run_with_swaps_passes_and_steps_is_resumed_between_rounds_as_if_nothing_had_been(
    seconds: list[float], after: int, passes: int, batch_size: int | None, swaps: bool
) -> None:
    options: dict[str, Any] = {"passes": passes, "swaps": swaps, "batch_size": batch_size, "epochs": 9}
    rounds = _meeting(seconds, **options)
    for _ in range(after):
        for each in rounds.due():
            rounds.finished(each.worker, rounds.seconds[each.worker])
    record = json.loads(json.dumps(rounds.to_dict()))
    resumed = _meeting(seconds, **options)
    resumed.restore(record, rounds.workers)
    assert resumed.to_dict() == record
    assert _together(resumed) == _together(rounds)


def test_a_swap_under_way_is_made_again_after_a_resume() -> None:
    rounds = _meeting([1.0, 1.0], swaps=True)
    for each in rounds.due():
        rounds.finished(each.worker, 1.0)
    begun = rounds.due()
    resumed = _meeting([1.0, 1.0], swaps=True)
    resumed.restore(rounds.to_dict(), ["w0", "w1"])
    assert resumed.due() == begun


def test_workers_lost_between_swaps_leave_their_samples_to_the_others() -> None:
    rounds, presented = _meeting([1.0] * 4, swaps=True, epochs=5), 0
    for lost in ("w1", "w3"):
        for each in rounds.due():
            if each.worker != lost:
                rounds.finished(each.worker, 1.0)
                presented += each.samples
        rounds.lost(lost)
        rounds.allocation.check()
    assert presented + sum(each.samples for due in _together(rounds) for each in due) == 500
    assert rounds.allocation.sizes() == {"w0": 50, "w2": 50}


# --- shares follow speeds ---


def _lengths(rounds: Rounds, costs: dict[str, tuple[float, float]], number: int) -> list[float]:
    """How long the next rounds take, if a step costs each worker a fixed time and a time for each of its samples."""
    found = []
    for _ in range(number):
        due = rounds.due()
        taken = {each.worker: _seconds(each, costs) for each in due}
        for each in due:
            rounds.finished(each.worker, taken[each.worker] / each.samples)
        found.append(max(taken.values()))
    return found


def _seconds(each: Round, costs: dict[str, tuple[float, float]]) -> float:
    fixed, of_sample = costs[each.worker]
    return (each.steps or 1) * fixed + each.samples * of_sample


@settings(max_examples=30)
@given(st.lists(st.floats(0.5, 4), min_size=2, max_size=4), st.lists(st.floats(0.25, 4), min_size=4, max_size=4))
def test_behind_a_barrier_shares_follow_speeds_within_two_rounds(seconds: list[float], drift: list[float]) -> None:
    rounds = _meeting(seconds, total=4000, epochs=12, increments=2)
    _lengths(rounds, {w: (0.0, each) for w, each in rounds.seconds.items()}, 4)
    now = {w: each * d for (w, each), d in zip(rounds.seconds.items(), drift, strict=False)}
    best = 4000 / sum(1 / each for each in now.values())
    lengths = _lengths(rounds, {w: (0.0, each) for w, each in now.items()}, 4)
    assert max(lengths[1:]) <= 1.021 * best
    settled = rounds.allocation
    _lengths(rounds, {w: (0.0, each) for w, each in now.items()}, 3)
    assert rounds.allocation is settled


def test_shares_settle_by_the_whole_time_of_a_step() -> None:
    """A worker whose steps have a fixed cost gets fewer samples than its seconds for each of them alone say."""
    rounds, costs = _meeting([1.0, 1.0], total=4000, epochs=12, batch_size=40), {"w0": (0.0, 1.0), "w1": (20.0, 1.0)}
    lengths = _lengths(rounds, costs, 8)
    assert min(lengths[4:]) == max(lengths[4:])
    assert lengths[-1] <= 1.02 * (4000 + 50 * 20) / 2


@pytest.mark.parametrize(("partition", "options"), [("udpa", {}), ("idpa-paper", {}), ("idpa", {"even": True})])
def test_shares_that_do_not_go_by_speed_stay(partition: str, options: dict[str, Any]) -> None:
    rounds = _rounds(partition, [1.0, 1.0], True, epochs=6, increments=1, **options)
    for _ in range(4):
        for each in rounds.due():
            rounds.finished(each.worker, 1.0 if each.worker == "w0" else 4.0)
    assert rounds.allocation.sizes() == {"w0": 50, "w1": 50}


def test_nothing_moves_while_not_all_were_measured() -> None:
    """After a resume the times are calibrations again, which rounds are not compared with."""
    rounds = _rounds("idpa", [1.0, 1.0], True, epochs=6, increments=1)
    for each in rounds.due():
        rounds.finished(each.worker, 1.0)
    resumed = _rounds("idpa", [1.0, 8.0], True, epochs=6, increments=1)
    resumed.restore(rounds.to_dict(), ["w0", "w1"])
    assert [each.samples for each in resumed.due()] == [50, 50]
    resumed.finished("w0", 1.0)
    assert resumed.allocation.sizes() == {"w0": 50, "w1": 50}
    resumed.finished("w1", 3.0)
    assert resumed.allocation.sizes() == {"w0": 75, "w1": 25}


def _presented(rounds: Rounds, **more: int) -> None:
    """End the rounds that are due, of workers that presented more or fewer samples than they began with."""
    for each in rounds.due():
        rounds.finished(each.worker, 1.0, _sizes(each, more.get(each.worker, 0)))


def _sizes(each: Round, more: int) -> StepSizes:
    """The round's minibatches, with so many samples more."""
    assert each.steps is not None
    assert more % each.steps == 0
    sizes = StepSizes(each.samples, each.steps)
    sizes.change(1, more // each.steps)
    return sizes


def test_what_one_presented_for_another_is_counted_once() -> None:
    rounds = _meeting([1.0, 1.0], epochs=2, batch_size=10)
    _presented(rounds, w0=20, w1=-20)
    assert (rounds.done, rounds.budget.left) == (100, 100)
    _presented(rounds, w0=20, w1=-20)  # the last round: for a while more was made than was left
    assert rounds.ended
    assert rounds.done == 200


def test_a_worker_that_is_lost_after_others_made_a_part_of_its_round() -> None:
    rounds = _meeting([1.0, 1.0], epochs=1, batch_size=10)
    first, _ = rounds.due()
    rounds.finished("w0", 1.0, _sizes(first, 30))
    assert not rounds.ended
    rounds.lost("w1")
    (left,) = rounds.due()
    assert left.samples == 20
    rounds.finished("w0", 1.0)
    assert rounds.ended


def test_a_checkpoint_within_a_round_of_other_minibatches_counts_what_was_made() -> None:
    rounds = _meeting([1.0, 1.0], epochs=1, batch_size=10)
    first, _ = rounds.due()
    rounds.finished("w0", 1.0, _sizes(first, 30))
    resumed = _meeting([1.0, 1.0], epochs=1, batch_size=10)
    resumed.restore(rounds.to_dict(), ["w0", "w1"])
    assert resumed.done == 80
    assert sum(each.samples for each in resumed.due()) == 20


@pytest.mark.parametrize(("steps", "share"), [(SETTLED, 30), (SETTLED - 1, 60), (0, 60)])
def test_samples_follow_minibatches_where_these_follow_speeds(steps: int, share: int) -> None:
    """Rounds of fewer steps, and those without such minibatches, go by the seconds measured."""
    how: dict[str, Any] = {"batch_size": 10, "shares_steps": True, "resizes_steps": bool(steps)}
    rounds = _meeting([7.0, 3.0], total=100, epochs=2, **how)
    for each, seconds in zip(rounds.due(), (1.0, 1.5), strict=True):
        assert each.steps == 10
        rounds.finished(each.worker, seconds, StepSizes(each.samples, steps or 40))
    assert rounds.allocation.size("w0") == share


@pytest.mark.parametrize("early", [False, True])
def test_one_disturbed_round_of_few_steps_moves_few_samples(early: bool) -> None:
    """The round has ten steps. With `early` it was to have a hundred."""
    rounds = _meeting([1.0, 1.0], total=1000, epochs=9, batch_size=100, shares_steps=True, resizes_steps=True)
    shares = []
    for slow in (1.0, 10.0, 1.0, 1.0):
        cut = early and slow > 1.0
        for each in rounds.due():
            sizes = StepSizes(each.samples, 100 if cut else 10)
            made = each.samples // 10 if cut else None
            rounds.finished(each.worker, slow if each.worker == "w1" else 1.0, sizes, cut=made)
        shares.append(rounds.allocation.size("w1"))
    assert shares[0] == 500
    assert 250 <= shares[1] <= shares[2] <= shares[3]
    assert shares[3] >= 400


def test_samples_follow_minibatches_that_changed() -> None:
    rounds = _meeting([1.0, 1.0], total=1000, epochs=2, batch_size=50)
    for each, more in zip(rounds.due(), (25, -25), strict=True):
        sizes = StepSizes(each.samples, 10)
        sizes.change(6, more)
        rounds.finished(each.worker, 1.0, sizes)
    assert rounds.allocation.sizes() == {"w0": 750, "w1": 250}
    assert rounds.done == 1000


def test_samples_of_a_step_are_whole_numbers_where_they_move() -> None:
    """A half more in each step would be one more in every second one, for which all others wait."""
    rounds = _meeting([1.0, 1.0], total=1600, epochs=4, batch_size=16, shares_steps=True)
    for each in rounds.due():
        rounds.finished(each.worker, {"w0": 1.0, "w1": 1.07}[each.worker])
    assert rounds.allocation.sizes() == {"w0": 800, "w1": 800}
    for each in rounds.due():
        rounds.finished(each.worker, {"w0": 1.0, "w1": 2.1}[each.worker])
    assert rounds.allocation.sizes() == {"w0": 1100, "w1": 500}


def test_a_very_slow_worker_keeps_a_sample_of_each_step() -> None:
    """Or all would make fewer steps."""
    rounds = _meeting([1.0, 1.0], total=1600, epochs=4, batch_size=16, shares_steps=True)
    for each in rounds.due():
        rounds.finished(each.worker, {"w0": 1.0, "w1": 500.0}[each.worker])
    assert rounds.allocation.sizes() == {"w0": 1500, "w1": 100}
    assert [each.steps for each in rounds.due()] == [100, 100]


def test_shares_follow_the_whole_time_and_increments_that_of_computing() -> None:
    rounds = _meeting([1.0, 1.0], total=1000, epochs=6, increments=2)
    for each in rounds.due():
        rounds.finished(each.worker, 1.0, exchanges={"w0": 0.0, "w1": 3.0}[each.worker])
    due = rounds.due()
    assert [each.samples for each in due] == [500, 500]
    for each in due:
        rounds.finished(each.worker, 1.0, exchanges={"w0": 0.0, "w1": 3.0}[each.worker])
    assert rounds.allocation.sizes() == {"w0": 800, "w1": 200}


# --- workers that make steps by their speed ---


def _every(number: int) -> Meetings:
    return lambda steps, step, exchange: -(-steps // number)


def test_between_two_meetings_each_worker_makes_as_many_steps_as_its_speed_allows() -> None:
    rounds = _meeting([1.0, 3.0], total=1200, batch_size=10, meetings=_every(30))
    fast, slow = rounds.due()
    assert (fast.steps, slow.steps) == (90, 30)
    assert (fast.meetings, slow.meetings) == (3, 3)


def test_a_worker_that_has_less_than_a_step_between_two_meetings_has_smaller_minibatches() -> None:
    rounds = _meeting([1.0, 3.0], total=1200, batch_size=10, meetings=_every(1))
    assert [(each.samples, each.steps, each.meetings) for each in rounds.due()] == [(900, 90, 90), (300, 90, 90)]


@given(
    seconds=speeds,
    total=st.integers(4, 300),
    batch_size=st.integers(1, 30),
    number=st.integers(1, 40),
    increments=st.integers(1, 3),
)
def test_all_meet_the_same_number_of_times_and_make_a_step_between_at_least(
    seconds: list[float], total: int, batch_size: int, number: int, increments: int
) -> None:
    how: dict[str, Any] = {"batch_size": batch_size, "meetings": _every(number)}
    for each in _together(_meeting(seconds, total=total, increments=increments, **how)):
        assert len({one.meetings for one in each}) == 1
        for one in each:
            assert one.meetings is not None
            if one.meetings == 1:  # nothing is to be fitted in
                assert one.steps is None
                continue
            assert one.steps is not None
            assert 1 < one.meetings <= one.steps <= one.samples
            assert -(-one.samples // one.steps) <= batch_size


def _told(partition: str, exchanges: list[float], *, even: bool = False) -> list[tuple[int, float, float | None]]:
    """What meetings go by in each of several rounds, behind rounds with these seconds a sample; then after a resume."""
    told: list[tuple[int, float, float | None]] = []

    def meetings(steps: int, step: float, exchange: float | None) -> int:
        told.append((steps, step, exchange))
        return 2

    def made() -> Rounds:
        how: dict[str, Any] = {"epochs": 5, "barrier": True, "batch_size": 10, "meetings": meetings}
        return Rounds(PARTITIONERS[partition](1, even=even), 80, {"w0": 0.5, "w1": 0.5}, **how)

    rounds = made()
    for each in exchanges:
        for own in rounds.due():
            rounds.finished(own.worker, 0.5, exchanges={"w0": each, "w1": 0.2}[own.worker])
    resumed = made()
    resumed.restore(json.loads(json.dumps(rounds.to_dict())), ["w0", "w1"])
    for these in (rounds, resumed):
        these.due()
    return told


def test_meetings_go_by_the_seconds_of_a_step_and_by_those_of_the_last_meetings() -> None:
    """A worker has 40 samples and 2 meetings."""
    expected = [(4, 5.0, None), *((4, 5.0, pytest.approx(each)) for each in (4.0, 6.0, 6.0))]
    assert _told("udpa", [0.1, 0.3]) == expected


def test_a_reproducible_run_meets_whatever_the_seconds() -> None:
    assert {exchange for *_, exchange in _told("idpa", [0.1, 0.3], even=True)} == {None}


def test_a_worker_that_is_alone_has_no_meetings() -> None:
    (only,) = _meeting([1.0], batch_size=10, alone=True, meetings=_every(2)).due()
    assert (only.alone, only.meetings, only.steps) == (True, None, None)
