"""The laws of every partitioner, found from the registry, and the corners that MATHS.md names."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskcnn.partition import PARTITIONERS, Allocation, Partitioner
from daskcnn.partition.partitioner import WORTH

every = pytest.mark.parametrize("name", PARTITIONERS)
times = st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=7).map(
    lambda seconds: {f"w{i}": each for i, each in enumerate(seconds)}
)
increments = st.integers(1, 6)
drift = st.data()


def _jittered(data: st.DataObject, seconds: dict[str, float]) -> dict[str, float]:
    return {worker: each * data.draw(st.floats(0.2, 5)) for worker, each in seconds.items()}


def _grew(before: Allocation, after: Allocation) -> None:
    after.check()
    for worker in before.workers:
        assert _samples(before, worker) <= _samples(after, worker)


def _samples(allocation: Allocation, worker: str) -> set[int]:
    return {i for lo, hi in allocation.ranges[worker] for i in range(lo, hi)}


@every
@given(total=st.integers(6, 300), seconds=times, count=increments, data=drift)
def test_synchronous_disjoint_growing_complete(
    name: str, total: int, seconds: dict[str, float], count: int, data: st.DataObject
) -> None:
    partitioner = PARTITIONERS[name](increments=count)
    allocation = partitioner.start(total, list(seconds))
    for increment in range(1, partitioner.increments + 1):
        before = allocation
        allocation = partitioner.allocate(before, _jittered(data, seconds), increment=increment)
        _grew(before, allocation)
        if increment < partitioner.increments:
            assert abs(allocation.given - total * increment / partitioner.increments) < partitioner.increments
    if "complete" in partitioner.laws:
        assert not allocation.free


@every
@settings(max_examples=20)
@given(total=st.integers(6, 300), seconds=times, count=increments, data=drift)
def test_an_even_one_gives_the_same_whatever_is_measured(
    name: str, total: int, seconds: dict[str, float], count: int, data: st.DataObject
) -> None:
    partitioner = PARTITIONERS[name](increments=count, even=True)
    found = []
    for _ in range(2):
        allocation = partitioner.start(total, list(seconds))
        for increment in range(1, partitioner.increments + 1):
            allocation = partitioner.allocate(allocation, _jittered(data, seconds), increment=increment)
        allocation = partitioner.join(allocation, "late", _jittered(data, seconds | {"late": 1.0}))
        found.append(partitioner.leave(allocation, "w0", _jittered(data, seconds | {"late": 1.0})))
    assert found[0] == found[1]


@every
@given(total=st.integers(6, 300), seconds=times, count=increments, data=drift)
def test_asynchronous_disjoint_growing_complete(
    name: str, total: int, seconds: dict[str, float], count: int, data: st.DataObject
) -> None:
    partitioner = PARTITIONERS[name](increments=count)
    allocation = partitioner.start(total, list(seconds))
    turns = data.draw(st.permutations([worker for worker in seconds for _ in range(partitioner.increments + 1)]))
    for worker in turns:
        before = allocation
        allocation = partitioner.grant_each(before, _jittered(data, seconds), [worker])
        _grew(before, allocation)
        if total >= len(seconds):
            assert allocation.size(worker) > 0
    if "complete" in partitioner.laws:
        assert not allocation.free


@every
@given(total=st.integers(6, 10**6), seconds=times)
def test_targets(name: str, total: int, seconds: dict[str, float]) -> None:
    partitioner = PARTITIONERS[name]()
    speed = dict.fromkeys(seconds, 1.0) if "equal" in partitioner.laws else {w: 1 / t for w, t in seconds.items()}
    target = partitioner.target(total, seconds)
    assert sum(target.values()) == total
    if {"equal", "proportional"} & partitioner.laws:
        for worker in seconds:
            assert abs(target[worker] - total * speed[worker] / sum(speed.values())) < 1 + 1e-6


@every
@given(seconds=times, count=increments)
def test_steady_speeds_reach_the_target(name: str, seconds: dict[str, float], count: int) -> None:
    """Both ways end within one sample of proportional when nothing drifts, and no share is below one sample."""
    partitioner, total = PARTITIONERS[name](increments=count), 10**6
    if not {"equal", "proportional"} & partitioner.laws:
        return
    together = alone = partitioner.start(total, list(seconds))
    for increment in range(1, partitioner.increments + 1):
        together = partitioner.allocate(together, seconds, increment=increment)
        for worker in seconds:
            alone = partitioner.grant_each(alone, seconds, [worker])
    target = partitioner.target(total, seconds)
    if min(target.values()) > len(seconds) * count:
        for worker in seconds:
            assert abs(together.size(worker) - target[worker]) <= 1
            assert abs(alone.size(worker) - target[worker]) <= 1


@every
@given(seconds=times, extra=st.integers(0, 50), data=drift)
def test_everybody_has_a_sample_while_there_are_enough(
    name: str, seconds: dict[str, float], extra: int, data: st.DataObject
) -> None:
    partitioner = PARTITIONERS[name](increments=2)
    start = partitioner.start(2 * len(seconds) + extra, list(seconds))
    assert all(partitioner.allocate(start, seconds, increment=1).sizes().values())


@every
@given(total=st.integers(1, 60), seconds=times, count=st.integers(1, 20), data=drift)
def test_nobody_gets_a_second_sample_while_a_worker_has_none(
    name: str, total: int, seconds: dict[str, float], count: int, data: st.DataObject
) -> None:
    """Also where an increment has fewer samples than there are workers."""
    partitioner = PARTITIONERS[name](increments=min(count, total))
    if "served" not in partitioner.laws:
        return
    allocation = partitioner.start(total, list(seconds))
    for increment in range(1, partitioner.increments + 1):
        allocation = partitioner.allocate(allocation, _jittered(data, seconds), increment=increment)
        sizes = allocation.sizes().values()
        assert all(sizes) or max(sizes) <= 1
    assert all(allocation.sizes().values()) or total < len(seconds)


def test_a_slow_worker_is_served_in_its_turn() -> None:
    seconds = {"fast": 1.0, "a": 100.0, "b": 100.0, "c": 100.0}
    allocation = PARTITIONERS["idpa"](increments=4).start(8, list(seconds))
    found = []
    for increment in range(1, 5):
        allocation = PARTITIONERS["idpa"](increments=4).allocate(allocation, seconds, increment=increment)
        found.append(tuple(allocation.sizes().values()))
    assert found == [(1, 1, 0, 0), (1, 1, 1, 1), (3, 1, 1, 1), (5, 1, 1, 1)]


@every
@given(total=st.integers(8, 300), seconds=times, data=drift)
def test_leave_and_join_move_only_to_the_joiner_and_from_the_leaver(
    name: str, total: int, seconds: dict[str, float], data: st.DataObject
) -> None:
    partitioner = PARTITIONERS[name](increments=3)
    allocation = partitioner.start(total, list(seconds))
    for increment in range(1, data.draw(st.integers(0, partitioner.increments)) + 1):
        allocation = partitioner.allocate(allocation, _jittered(data, seconds), increment=increment)
    now = {**_jittered(data, seconds), "new": data.draw(st.floats(1e-4, 1e4))}

    joined = partitioner.join(allocation, "new", now)
    joined.check()
    assert (joined.given, joined.free) == (allocation.given, allocation.free)
    for worker in allocation.workers:
        assert _samples(joined, worker) <= _samples(allocation, worker)
        assert bool(joined.size(worker)) == bool(allocation.size(worker))
    assert joined.size("new") or allocation.given <= len(seconds)

    settled = partitioner.settle(joined, "new", {**_jittered(data, seconds), "new": data.draw(st.floats(1e-4, 1e4))})
    settled.check()
    assert (settled.workers, settled.given, settled.free) == (joined.workers, joined.given, joined.free)
    grown = settled.size("new") >= joined.size("new")
    for worker in joined.workers:
        less, more = (settled, joined) if grown == (worker != "new") else (joined, settled)
        assert _samples(less, worker) <= _samples(more, worker)
        assert bool(settled.size(worker)) == bool(joined.size(worker))

    gone = data.draw(st.sampled_from(sorted(seconds)))
    left = partitioner.leave(joined, gone, now)
    left.check()
    assert left.workers == tuple(w for w in joined.workers if w != gone)
    assert (left.given, left.free) == (joined.given, joined.free)
    for worker in left.workers:
        assert _samples(left, worker) >= _samples(joined, worker)


@every
@given(total=st.integers(6, 300), seconds=times, data=drift)
def test_levelling_moves_samples_only_where_a_step_gets_shorter(
    name: str, total: int, seconds: dict[str, float], data: st.DataObject
) -> None:
    partitioner = PARTITIONERS[name](increments=2)
    allocation = partitioner.start(total, list(seconds))
    for increment in range(1, data.draw(st.integers(1, partitioner.increments)) + 1):
        allocation = partitioner.allocate(allocation, _jittered(data, seconds), increment=increment)
    now = _jittered(data, seconds)

    levelled = partitioner.levelled(allocation, now)
    levelled.check()
    assert (levelled.workers, levelled.free, levelled.granted) == (
        allocation.workers,
        allocation.free,
        allocation.granted,
    )
    assert partitioner.levelled(levelled, now) is levelled
    if not partitioner.adapts:
        assert levelled is allocation
    for worker in seconds:
        assert levelled.size(worker) or not allocation.size(worker)
        before, after = _samples(allocation, worker), _samples(levelled, worker)
        assert before <= after or after <= before
    if levelled is not allocation:
        longest = [max(size * now[worker] for worker, size in each.sizes().items()) for each in (allocation, levelled)]
        assert longest[1] < (1 - WORTH) * longest[0]


# --- corners ---


def test_means_inequality_starves_the_last_worker_of_the_paper_only() -> None:
    """t̄ = (1, 4), A = 2: eq. 4 promises worker 1 1.25·N."""
    sizes = {}
    for name in ("idpa", "idpa-paper"):
        partitioner = PARTITIONERS[name](increments=2)
        allocation = partitioner.start(1000, ["fast", "slow"])
        allocation = partitioner.allocate(allocation, {"fast": 1.0, "slow": 1.0}, increment=1)
        allocation = partitioner.allocate(allocation, {"fast": 1.0, "slow": 4.0}, increment=2)
        sizes[name] = allocation.sizes()
    assert sizes["idpa-paper"] == {"fast": 750, "slow": 250}  # the slow one got nothing of the second increment
    assert sizes["idpa"] == {"fast": 750, "slow": 250}  # its target, 200, is below what it has: clamped, never moved


def test_the_paper_s_formula_while_it_holds() -> None:
    """Equal times: T_2 = F·2·t̄/m, n' = F, so half of each increment each."""
    partitioner = PARTITIONERS["idpa-paper"](increments=3)
    allocation = partitioner.start(302, ["a", "b"])
    seen = []
    for increment in (1, 2, 3):
        allocation = partitioner.allocate(allocation, {"a": 2.0, "b": 2.0}, increment=increment)
        seen.append(allocation.sizes())
    assert seen == [{"a": 50, "b": 50}, {"a": 100, "b": 100}, {"a": 150, "b": 152}]  # the rest: N mod A = 2


def test_the_paper_and_the_mended_formula_differ() -> None:
    sizes = {}
    for name in ("idpa", "idpa-paper"):
        partitioner = PARTITIONERS[name](increments=2)
        allocation = partitioner.start(1000, ["a", "b", "c"])
        for increment in (1, 2):
            allocation = partitioner.allocate(allocation, {"a": 1.0, "b": 2.0, "c": 4.0}, increment=increment)
        sizes[name] = tuple(allocation.sizes().values())
    # T_2 = 500·2·(7/3)/3 = 777.8 s: a is told 777, which leaves b 8 of the 500 and c none
    assert sizes["idpa-paper"] == (777, 150, 73)
    assert sizes["idpa"] == (571, 286, 143)


@pytest.mark.parametrize(("name", "expected"), [("idpa", [26, 52, 77, 103]), ("idpa-paper", [25, 50, 75, 103])])
def test_increments_are_rounded_and_the_last_takes_what_the_paper_drops(name: str, expected: list[int]) -> None:
    partitioner = PARTITIONERS[name](increments=4)
    allocation = partitioner.start(103, ["a", "b", "c"])
    given_after = []
    for increment in (1, 2, 3, 4):
        allocation = partitioner.allocate(allocation, {"a": 1, "b": 2, "c": 4}, increment=increment)
        given_after.append(allocation.given)
    assert given_after == expected


@given(total=st.integers(11, 5000), epochs=st.integers(2, 6))
def test_rounds_of_odd_increments_add_up_to_whole_epochs(total: int, epochs: int) -> None:
    """Otherwise a last round of a sample or two would follow."""
    partitioner = PARTITIONERS["idpa"](increments=2 * epochs - 1)
    allocation = partitioner.start(total, ["a"])
    presented = 0
    for increment in range(1, 2 * epochs):
        allocation = partitioner.allocate(allocation, {"a": 1}, increment=increment)
        presented += allocation.given
    assert presented == total * epochs


def test_what_drift_leaves_over_goes_to_all_with_the_last_grant() -> None:
    partitioner = PARTITIONERS["idpa"](increments=1)
    allocation = partitioner.start(100, ["a", "b"])
    allocation = partitioner.grant_each(allocation, {"a": 9.0, "b": 1.0}, ["a"])
    assert allocation.sizes() == {"a": 10, "b": 0}
    allocation = partitioner.grant_each(allocation, {"a": 1.0, "b": 1.0}, ["b"])
    assert allocation.sizes() == {"a": 50, "b": 50}
    assert partitioner.grant_each(allocation, {"a": 1.0, "b": 1.0}, ["b"]) is allocation


def test_a_grant_keeps_samples_for_those_without() -> None:
    partitioner = PARTITIONERS["idpa"](increments=1)
    allocation = partitioner.start(3, ["a", "b", "c"])
    allocation = partitioner.grant_each(allocation, {"a": 1e-6, "b": 1.0, "c": 1.0}, ["a"])
    assert allocation.size("a") == 1


def test_a_leaver_s_samples_make_the_others_proportional_again() -> None:
    partitioner = PARTITIONERS["idpa"](increments=1)
    seconds = {"a": 1.0, "b": 2.0, "c": 1.0}
    allocation = partitioner.allocate(partitioner.start(1000, list(seconds)), seconds, increment=1)
    assert partitioner.leave(allocation, "c", seconds).sizes() == {"a": 667, "b": 333}


def test_a_leaver_with_increments_to_come_leaves_nothing_free() -> None:
    partitioner = PARTITIONERS["idpa"](increments=2)
    seconds = {"a": 1.0, "b": 1.0}
    allocation = partitioner.start(100, list(seconds))
    for worker in ("a", "b", "a"):
        allocation = partitioner.grant_each(allocation, seconds, [worker])
    assert partitioner.leave(allocation, "b", seconds).sizes() == {"a": 100}


def test_a_joiner_has_the_increments_to_come_and_no_others() -> None:
    partitioner = PARTITIONERS["idpa"](increments=3)
    seconds = {"a": 1.0, "b": 1.0, "c": 1.0}
    allocation = partitioner.start(900, ["a", "b"])
    for worker in ("a", "b", "a"):
        allocation = partitioner.grant_each(allocation, seconds, [worker])
    allocation = partitioner.join(allocation, "c", seconds)
    assert allocation.granted == {"a": 2, "b": 1, "c": 1}
    for worker in ("b", "a", "b", "c", "c"):
        allocation = partitioner.grant_each(allocation, seconds, [worker])
    assert allocation.sizes() == {"a": 300, "b": 300, "c": 300}


def test_udpa_is_equal_whatever_the_speeds() -> None:
    partitioner = PARTITIONERS["udpa"](increments=5)
    allocation = partitioner.allocate(partitioner.start(11, ["a", "b"]), {"a": 1.0, "b": 9.0}, increment=1)
    assert (partitioner.increments, allocation.sizes()) == (1, {"a": 6, "b": 5})


# --- what is refused ---


@every
def test_no_increment_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="increments=0"):
        PARTITIONERS[name](increments=0)


@every
@pytest.mark.parametrize("workers", [[], ["a", "a"]])
def test_no_worker_or_one_twice_is_refused(name: str, workers: list[str]) -> None:
    with pytest.raises(ValueError, match="workers="):
        PARTITIONERS[name]().start(10, workers)


@every
def test_more_increments_than_samples_are_refused(name: str) -> None:
    partitioner = PARTITIONERS[name](increments=4)
    with pytest.raises(ValueError, match=f"increments={partitioner.increments}: more than the 0 samples"):
        partitioner.start(0, ["a"])


def _call(partitioner: Partitioner, method: str, seconds: dict[str, float]) -> None:
    allocation = partitioner.start(10, ["a", "b"])
    match method:
        case "allocate":
            partitioner.allocate(allocation, seconds, increment=1)
        case "grant":
            partitioner.grant_each(allocation, seconds, ["a"])
        case "leave":
            partitioner.leave(allocation, "b", seconds)
        case "join":
            partitioner.join(allocation, "c", seconds)


@every
@pytest.mark.parametrize("method", ["allocate", "grant", "leave", "join"])
@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, None])
def test_times_are_checked(name: str, method: str, bad: float | None) -> None:
    seconds = {"a": 1.0, "b": 1.0, "c": 1.0} | ({} if bad is None else {"a": bad})
    if bad is None:
        del seconds["a"]
    with pytest.raises(ValueError, match=r"no time for \['a'\]" if bad is None else f"seconds={bad}"):
        _call(PARTITIONERS[name](), method, seconds)


@every
@pytest.mark.parametrize("increment", [0, 2, 9])
def test_increments_come_in_turn(name: str, increment: int) -> None:
    partitioner = PARTITIONERS[name]()
    with pytest.raises(ValueError, match=f"increment={increment}"):
        partitioner.allocate(partitioner.start(10, ["a"]), {"a": 1.0}, increment=increment)


@every
def test_coming_twice_going_twice_and_the_last_going_are_refused(name: str) -> None:
    partitioner = PARTITIONERS[name]()
    allocation = partitioner.start(10, ["a"])
    with pytest.raises(ValueError, match="worker='a': is part"):
        partitioner.join(allocation, "a", {"a": 1.0})
    with pytest.raises(ValueError, match="worker='b': not among"):
        partitioner.leave(allocation, "b", {"a": 1.0})
    with pytest.raises(ValueError, match="nobody is left"):
        partitioner.leave(allocation, "a", {"a": 1.0})
