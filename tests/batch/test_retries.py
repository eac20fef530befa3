"""Laws of what becomes of a job after an attempt."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskcnn.batch.records import Attempt
from daskcnn.batch.retries import FINAL, FIRST, LONGEST, MOST_FAILURES, MOST_LOST, outcome

CODES = st.sampled_from([None, 0, 1, 2, 3, 4, 5, 6, 130, 137, 139, 143])
ATTEMPTS = st.lists(st.builds(Attempt, CODES, st.booleans(), st.booleans()), min_size=1, max_size=12)


@given(ATTEMPTS, st.floats(0, 1e10), st.booleans())
@settings(max_examples=200, deadline=None)
def test_an_attempt_leads_to_one_of_four_states_and_never_waits_long(
    attempts: list[Attempt], now: float, cancelled: bool
) -> None:
    found = outcome(attempts, now, cancelled=cancelled)
    code = attempts[-1].exit_code
    assert found.state in ("done", "failed", "waiting", "cancelled")
    assert (found.state == "done") == (code == 0)
    assert (found.state == "cancelled") == (cancelled and code != 0)
    if found.state == "waiting":
        assert code not in FINAL
        assert now <= found.again_at <= now + LONGEST
    assert bool(found.why) == (code != 0)


@pytest.mark.parametrize("code", FINAL)
def test_what_would_end_the_same_way_is_never_tried_again(code: int) -> None:
    assert outcome([Attempt(code, progressed=True)], 0).state == "failed"


@pytest.mark.parametrize(
    ("code", "most"), [(1, MOST_FAILURES), (137, MOST_FAILURES), (None, MOST_FAILURES), (5, MOST_LOST)]
)
def test_failures_without_progress_end(code: int | None, most: int) -> None:
    states = [outcome([Attempt(code)] * n, 0).state for n in range(1, most + 2)]
    assert states == ["waiting"] * (most - 1) + ["failed"] * 2


def test_a_cluster_that_is_not_usable_is_waited_for_however_long() -> None:
    again = [outcome([Attempt(3)] * n, 0).again_at for n in range(1, 100)]
    assert again[:3] == [FIRST, 2 * FIRST, 4 * FIRST]
    assert again[-1] == LONGEST
    assert all(before <= after for before, after in pairwise(again))


@pytest.mark.parametrize(
    "codes",
    [[3] * 20 + [137], [3] * 20 + [5], [5] * (MOST_LOST - 1) + [137], [1] * (MOST_FAILURES - 1) + [5, 3]],
    ids=str,
)
def test_failures_of_one_kind_do_not_count_for_another(codes: list[int]) -> None:
    assert outcome([Attempt(code) for code in codes], 0).state == "waiting"


def test_failures_of_a_kind_are_counted_with_others_between_them() -> None:
    assert outcome([Attempt(code) for code in (1, 3, 137, 5, None)], 0).state == "failed"


def test_progress_begins_a_new_row_of_failures() -> None:
    assert outcome([Attempt(137)] * 2 + [Attempt(137, progressed=True)], 0).state == "waiting"
    assert outcome([Attempt(137)] * 2 + [Attempt(137, progressed=True)] + [Attempt(137)] * 2, 0).state == "failed"


def test_a_machine_that_was_started_again_is_no_fault_of_the_job() -> None:
    found = outcome([Attempt(137), Attempt(137), Attempt(None, rebooted=True)], 5.0)
    assert (found.state, found.again_at) == ("waiting", 5.0)
