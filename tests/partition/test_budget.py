"""Presentations add up to samples · epochs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskcnn.partition import PARTITIONERS, Budget

many_seconds = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=5)


def test_the_paper_s_case_has_nine_and_a_half_epochs_no_more() -> None:
    """K = 10, A = 4: eq. 6 gives 9.5·N presentations, we give 10·N."""
    partitioner, budget = PARTITIONERS["idpa"](increments=4), Budget.of(4000, 10)
    allocation, rounds, presented = partitioner.start(4000, ["a", "b"]), 0, 0
    while not budget.spent:
        rounds += 1
        if rounds <= 4:
            allocation = partitioner.allocate(allocation, {"a": 1.0, "b": 3.0}, increment=rounds)
        sizes, budget = budget.round(allocation.sizes())
        presented += sum(sizes.values())
    assert presented == 40000
    assert rounds == 12
    assert sizes == {"a": 1500, "b": 500}  # the last: half a round, in proportion


@given(st.integers(4, 500), st.integers(1, 6), many_seconds)
def test_alone_rounds_add_up_too(samples: int, epochs: int, seconds: list[float]) -> None:
    times = {f"w{i}": t for i, t in enumerate(seconds)}
    partitioner, budget, presented = PARTITIONERS["idpa"](increments=4), Budget.of(samples, epochs), 0
    allocation = partitioner.start(samples, list(times))
    while not budget.spent:
        for worker in times:
            allocation = partitioner.grant_each(allocation, times, [worker])
            size, budget = budget.one(allocation.size(worker))
            presented += size
    assert presented == samples * epochs


def test_a_cut_round_asks_nobody_for_more_than_it_has() -> None:
    sizes, budget = Budget(2).round({"a": 1, "b": 1, "c": 1, "d": 40})
    assert sizes == {"a": 0, "b": 0, "c": 0, "d": 2}
    assert budget.spent


def test_what_a_lost_worker_did_not_present_is_presented_by_others() -> None:
    size, budget = Budget(10).one(8)
    assert budget.returned(size) == Budget(10)


@pytest.mark.parametrize(("samples", "epochs"), [(0, 1), (5, 0)])
def test_nothing_to_present_is_refused(samples: int, epochs: int) -> None:
    with pytest.raises(ValueError, match="nothing to train on"):
        Budget.of(samples, epochs)
