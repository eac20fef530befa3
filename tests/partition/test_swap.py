"""Swapping halves: nobody's number of samples changes, and soon everybody has met samples of all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskcnn.partition import PARTITIONERS, Allocation
from daskcnn.partition.rounds import swap_halves

sizes = st.lists(st.integers(0, 200), min_size=1, max_size=9)


def _given(sizes: list[int]) -> Allocation:
    """Workers w0, w1, … with so many samples each, in their order."""
    workers = {f"w{i}": size for i, size in enumerate(sizes)}
    return PARTITIONERS["udpa"]().start(max(1, sum(sizes)), list(workers)).give(workers, 1)


def _samples(allocation: Allocation, worker: str) -> set[int]:
    return {i for lo, hi in allocation.ranges[worker] for i in range(lo, hi)}


@given(sizes, st.integers(0, 20))
def test_a_swap_moves_samples_and_changes_nobody_s_number(sizes: list[int], number: int) -> None:
    before = _given(sizes)
    after = swap_halves(before, number)
    after.check()  # every sample once
    assert after.sizes() == before.sizes()
    assert (after.free, after.granted, after.workers) == (before.free, before.granted, before.workers)


@given(sizes, st.integers(0, 20))
def test_pairs_swap_half_of_what_the_smaller_has(sizes: list[int], number: int) -> None:
    before = _given(sizes)
    after = swap_halves(before, number)
    for worker in before.workers:
        gone, came = (_samples(x, worker) - _samples(y, worker) for x, y in ((before, after), (after, before)))
        partners = {other for other in before.workers if gone & _samples(after, other)}
        assert len(partners) == bool(gone)
        for other in partners:
            assert len(gone) == min(before.size(worker), before.size(other)) // 2
            assert came <= _samples(before, other)


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_after_log2_k_swaps_everybody_has_met_samples_of_all(workers: int, data: st.DataObject) -> None:
    """And holds about as many of each, where all have the same number."""
    size = data.draw(st.integers(2 * workers, 300))
    start = allocation = _given([size] * workers)
    for number in range(workers.bit_length() - 1):
        allocation = swap_halves(allocation, number)
    for worker in start.workers:
        held = [len(_samples(allocation, worker) & _samples(start, origin)) for origin in start.workers]
        assert min(held) > 0
        assert max(held) - min(held) <= max(4, size / 4)


@pytest.mark.parametrize("workers", [3, 5, 6, 7])
def test_any_number_of_workers_meets_samples_of_all_in_time(workers: int) -> None:
    start = allocation = _given([100] * workers)
    met = {worker: _samples(start, worker) for worker in start.workers}
    for number in range(4 * workers):
        allocation = swap_halves(allocation, number)
        for worker in met:
            met[worker] |= _samples(allocation, worker)
    for worker in met:
        assert all(met[worker] & _samples(start, origin) for origin in start.workers)


def test_one_without_a_partner_keeps_its_own() -> None:
    start = _given([100, 100, 100])
    assert swap_halves(start, 0).ranges["w2"] == start.ranges["w2"]
    assert swap_halves(start, 1).ranges["w1"] == start.ranges["w1"]


def test_a_worker_alone_keeps_its_own() -> None:
    start = _given([100])
    assert [swap_halves(start, number) for number in range(3)] == [start] * 3


def test_what_is_not_given_yet_stays_free() -> None:
    start = PARTITIONERS["udpa"]().start(100, ["a", "b"]).give({"a": 20, "b": 30}, 1)
    assert swap_halves(start, 0).free == ((50, 100),)


def test_ranges_stay_few() -> None:
    """Each is a piece of a chunk that is read for it."""
    allocation = _given([10_000] * 8)
    for number in range(100):
        allocation = swap_halves(allocation, number)
    assert max(map(len, allocation.ranges.values())) < 100 * 8
