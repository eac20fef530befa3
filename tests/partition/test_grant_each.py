"""Increments of several workers at once are those of one after the other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskcnn.partition import PARTITIONERS
from daskcnn.partition.rounds import Rounds

names = [f"w{i}" for i in range(6)]


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@given(
    total=st.integers(4, 300),
    seconds=st.lists(st.floats(0.01, 10), min_size=1, max_size=6),
    increments=st.integers(1, 4),
    data=st.data(),
)
def test_granting_each_is_granting_one_after_the_other(
    partitioner: str, total: int, seconds: list[float], increments: int, data: st.DataObject
) -> None:
    made = PARTITIONERS[partitioner](increments)
    times = dict(zip(names, seconds, strict=False))
    one = several = made.start(total, tuple(times))
    for _ in range(6):
        workers = data.draw(st.lists(st.sampled_from(list(times)), unique=True))
        several = made.grant_each(several, times, workers)
        for worker in workers:
            one = made.grant_each(one, times, [worker])
        assert several == one
        several.check()


@given(
    total=st.integers(2, 100),
    workers=st.integers(1, 5),
    epochs=st.integers(1, 4),
    data=st.data(),
    barrier=st.booleans(),
)
def test_presentations_under_way_and_idle_workers_are_kept_count_of(
    total: int, workers: int, epochs: int, data: st.DataObject, barrier: bool
) -> None:
    """`done` without a sum over all rounds under way; whoever has none is asked again."""
    rounds = Rounds(PARTITIONERS["udpa"](1), total, dict.fromkeys(names[:workers], 1.0), epochs=epochs, barrier=barrier)
    presented = 0
    while not rounds.ended:
        for begun in rounds.due():
            assert rounds.running[begun.worker] == begun
        under_way = sum(each.samples for each in rounds.running.values())
        assert rounds.done == presented == rounds.presentations - rounds.budget.left - under_way
        if not rounds.running:
            break
        worker = data.draw(st.sampled_from(sorted(rounds.running)))
        if len(rounds.workers) > 1 and data.draw(st.integers(0, 9)) == 0:
            rounds.lost(worker)
        else:
            presented += rounds.running[worker].samples
            rounds.finished(worker, 1.0)
    assert presented == rounds.presentations
