"""The server's exact instructions in the situations that matter."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from daskcnn.partition.step_shares import Change
from daskcnn.ps import (
    RULES,
    Code,
    Instruction,
    Join,
    Leave,
    Merge,
    ParameterServer,
    Pull,
    Push,
    Refuse,
    Reply,
    Snapshot,
    UpdateRule,
)
from tests.ps.driving import rule_of


def server(name: str, *workers: str, rule: dict[str, Any] | None = None) -> ParameterServer:
    """With these workers in it, center (0, 0)."""
    made = ParameterServer(RULES[name](**rule or {}), np.zeros(2, "float32"))
    for worker in workers:
        made.handle(Join(made.snapshot().life, worker, 1))
    return made


def push(worker: str, seq: int = 1, *, value: float = 1.0, base: int = 0, session: int = 1, **other: Any) -> Push:
    event = Push(0, worker, session, seq, base, np.full(2, value, "float32"), 10, 0.5)
    return replace(event, **other)


def reply(worker: str, seq: int, version: int, *, base: int | None = None, session: int = 1, **facts: Any) -> Reply:
    base = version if base is None else base
    return Reply(facts.pop("life", 0), worker, session, seq, np.zeros(2), version, base, **facts)


def merged(worker: str, seq: int, version: int, *, base: int, staleness: int = 0, **facts: Any) -> Reply:
    return reply(worker, seq, version, base=base, staleness=staleness, accuracy=0.5, n_samples=10, **facts)


def refusal(worker: str, seq: int, code: Code, *, session: int = 1) -> Refuse:
    return Refuse(worker, session, seq, code, "")


def handle(made: ParameterServer, event: Any) -> list[Instruction]:
    instructions = made.handle(event)
    made.validate()
    return instructions


# --- pushes ---


def test_asynchronous_pushes_are_merged_as_they_come() -> None:
    s = server("agwu", "a", "b")
    assert handle(s, push("a")) == [merged("a", 1, 1, base=0)]
    assert handle(s, push("b")) == [merged("b", 1, 2, base=0, staleness=1, gamma=math.exp(-1))]
    np.testing.assert_allclose(s.snapshot().center, 0.5 + 0.5 * math.exp(-1), rtol=1e-6)


def test_a_barrier_opens_with_the_last_push_and_answers_in_the_workers_order() -> None:
    s = server("sgwu", "a", "b", "c")
    assert handle(s, push("c", value=3, at=1.0)) == []
    assert handle(s, push("a", value=1, at=2.0)) == []
    replies = handle(s, push("b", value=2, at=5.0))
    assert replies == [
        merged("a", 1, 1, base=0, waited=3.0),
        merged("b", 1, 1, base=0),
        merged("c", 1, 1, base=0, waited=4.0),
    ]
    for each in replies:
        assert isinstance(each, Reply)
        np.testing.assert_allclose(each.weights, 2.0)


@pytest.mark.parametrize("name", RULES)
def test_a_repeated_push_gets_the_same_reply_and_is_merged_once(name: str) -> None:
    s = server(name, "a")
    first = handle(s, push("a"))
    center = s.snapshot().center
    again = handle(s, push("a", value=7.0))
    assert again[0] is first[0]
    assert s.snapshot().center is center
    assert (s.snapshot().merged, s.snapshot().repeated, s.snapshot().version) == (1, 1, 1)


def test_a_push_repeated_at_the_barrier_waits_for_its_one_reply() -> None:
    s = server("sgwu", "a", "b")
    assert handle(s, push("a")) == []
    assert handle(s, push("a")) == []
    assert [r.worker for r in handle(s, push("b"))] == ["a", "b"]
    assert (s.snapshot().merged, s.snapshot().repeated) == (2, 1)


def test_a_push_after_the_repeated_one_is_next() -> None:
    s = server("agwu", "a")
    handle(s, push("a"))
    handle(s, push("a"))
    assert handle(s, push("a", 2, base=1)) == [merged("a", 2, 2, base=1)]


REFUSED = {
    "life": (push("a", life=1), Code.LIFE),
    "unknown worker": (push("z"), Code.WORKER),
    "old session": (push("a", session=0), Code.SESSION),
    "session to come": (push("a", session=2), Code.SESSION),
    "seq 0": (push("a", 0), Code.SEQ),
    "seq skipped": (push("a", 2), Code.SEQ),
    "base from the future": (push("a", base=1), Code.BASE),
    "base below 0": (push("a", base=-1), Code.BASE),
    "too long": (push("a", payload=np.zeros(3, "float32")), Code.LENGTH),
    "two-dimensional": (push("a", payload=np.zeros((2, 1), "float32")), Code.LENGTH),
    "other precision": (push("a", payload=np.zeros(2)), Code.DTYPE),
    "objects": (push("a", payload=np.array([None, None])), Code.DTYPE),
    "no array": (push("a", payload=[0.0, 0.0]), Code.DTYPE),
    "NaN": (push("a", value=math.nan), Code.FINITE),
    "infinity": (push("a", value=-math.inf), Code.FINITE),
    "accuracy NaN": (push("a", accuracy=math.nan), Code.ACCURACY),
    "accuracy above 1": (push("a", accuracy=1.5), Code.ACCURACY),
    "no samples": (push("a", n_samples=0), Code.SAMPLES),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_push_changes_nothing_and_is_counted(name: str, case: str) -> None:
    event, code = REFUSED[case]
    s = server(name, "a")
    before = s.snapshot()
    (refuse,) = handle(s, event)
    assert refuse == Refuse(event.worker, event.session, event.seq, code, "")
    assert isinstance(refuse, Refuse)
    assert ";" in refuse.reason  # says what to do
    after = s.snapshot()
    assert after.center is before.center
    assert replace(after, refused={}) == before
    assert after.refused == {code.value: 1}
    assert handle(s, push("a")) == [merged("a", 1, 1, base=0)]  # the seq is still to be used


def test_a_push_before_the_waiting_one_is_merged_is_refused() -> None:
    s = server("sgwu", "a", "b")
    handle(s, push("a"))
    assert handle(s, push("a", 2)) == [refusal("a", 2, Code.SEQ)]
    assert len(handle(s, push("b"))) == 2


# --- pulls ---


def test_a_pull_gets_the_center_and_sets_the_base() -> None:
    s = server("agwu", "a", "b")
    handle(s, push("a"))
    (pulled,) = handle(s, Pull(0, "b", 1, seq=4))
    assert pulled == reply("b", 4, 1)
    assert isinstance(pulled, Reply)
    assert pulled.weights is s.snapshot().center
    assert handle(s, push("b", base=1)) == [merged("b", 1, 2, base=1)]


def test_strangers_do_not_get_the_center() -> None:
    s = server("agwu", "a")
    assert handle(s, Pull(0, "z", 1)) == [refusal("z", 0, Code.WORKER)]
    assert handle(s, Pull(1, "a", 1)) == [refusal("a", 0, Code.LIFE)]
    assert handle(s, Pull(0, "a", 2)) == [refusal("a", 0, Code.SESSION, session=2)]


@pytest.mark.parametrize("name", RULES)
def test_no_one_can_write_into_the_center(name: str) -> None:
    payload, start = np.ones(2, "float32"), np.zeros(2, "float32")
    s = ParameterServer(RULES[name](), start)
    (joined,) = s.handle(Join(0, "a", 1))
    start += 9
    (pushed,) = s.handle(push("a", payload=payload))
    assert isinstance(joined, Reply)
    assert isinstance(pushed, Reply)
    center, answer = s.snapshot().center.copy(), pushed.weights.copy()
    payload += 9
    np.testing.assert_array_equal(joined.weights, 0)
    np.testing.assert_array_equal(pushed.weights, answer)
    np.testing.assert_array_equal(s.snapshot().center, center)
    for each in (joined.weights, pushed.weights, s.snapshot().center):
        with pytest.raises(ValueError, match="read-only"):
            each += 1


# --- what a reply brings ---


@pytest.mark.parametrize("name", RULES)
def test_a_reply_brings_what_the_rule_says(name: str) -> None:
    s = server(name, "a")
    (answered,) = handle(s, push("a"))
    assert isinstance(answered, Reply)
    match RULES[name].answers:
        case "center":
            assert answered.weights is s.snapshot().center
        case "difference":
            np.testing.assert_array_equal(answered.weights, s.snapshot().center)  # which was 0
        case "nothing":
            assert (answered.weights.shape, answered.weights.dtype) == ((0,), np.dtype(np.float32))


def test_a_downpour_push_brings_nothing_and_its_base_stays_what_was_pulled() -> None:
    s = server("downpour", "a", "b")
    handle(s, push("b"))
    assert handle(s, push("a")) == [merged("a", 1, 2, base=0, staleness=1)]
    assert handle(s, push("a", 2)) == [merged("a", 2, 3, base=0, staleness=2)]
    assert handle(s, push("a", 3, base=3)) == [refusal("a", 3, Code.BASE)]  # it never had version 3
    assert handle(s, Pull(0, "a", 1)) == [reply("a", 0, 3)]
    assert handle(s, push("a", 3, base=3)) == [merged("a", 3, 4, base=3)]
    np.testing.assert_array_equal(s.snapshot().center, 4)


# --- bounded staleness ---


def test_who_is_too_far_ahead_waits_for_the_slowest_and_is_answered_with_it() -> None:
    s = server("agwu", "a", "b", rule={"max_staleness": 1})
    assert handle(s, push("a")) == [merged("a", 1, 1, base=0)]
    assert handle(s, push("a", 2, base=1)) == [merged("a", 2, 2, base=1, gamma=1.0)]
    assert handle(s, push("a", 3, base=2, at=4.0)) == []
    assert handle(s, push("a", 3, base=2, at=5.0)) == []  # a repeat waits for the same answer
    both = handle(s, push("b", at=9.0))
    assert [(r.worker, r.seq, r.version, r.staleness, r.waited) for r in both if isinstance(r, Reply)] == [
        ("b", 1, 3, 2, 0.0),
        ("a", 3, 4, 1, 5.0),
    ]


def test_those_who_wait_are_merged_as_they_came() -> None:
    s = server("easgd", "a", "b", "c", rule={"max_staleness": 0})
    assert len(handle(s, push("b"))) == len(handle(s, push("a"))) == 1
    assert handle(s, push("b", 2, base=1)) == handle(s, push("a", 2, base=2)) == []
    assert [r.worker for r in handle(s, push("c"))] == ["c", "b", "a"]


def test_leaving_frees_those_who_wait_for_the_slowest() -> None:
    s = server("downpour", "a", "b", "c", rule={"max_staleness": 0})
    assert [len(handle(s, push(worker))) for worker in ("a", "b", "a", "b")] == [1, 1, 1, 1]  # two are repeats
    assert handle(s, push("a", 2)) == handle(s, push("b", 2)) == []
    assert [r.worker for r in handle(s, Leave("c", 1, at=3.0))] == ["a", "b"]


def test_a_worker_that_leaves_frees_the_one_that_waits_for_it_at_that_time() -> None:
    s = server("agwu", "a", "b", rule={"max_staleness": 0})
    handle(s, push("a", at=1.0))
    assert handle(s, push("a", 2, base=1, at=2.0)) == []
    assert handle(s, Leave("b", 1, at=20.0)) == [merged("a", 2, 2, base=1, waited=18.0)]


def test_who_comes_late_begins_with_the_slowest_and_holds_nobody_up() -> None:
    s = server("agwu", "a", "b", rule={"max_staleness": 1})
    for seq in range(1, 6):
        assert len(handle(s, push("a", seq))) == len(handle(s, push("b", seq))) == 1
    assert handle(s, Join(0, "c", 1)) == [reply("c", 0, 10)]
    assert len(handle(s, push("a", 6))) == len(handle(s, push("a", 7))) == 1  # as far ahead as it might be before
    assert handle(s, push("a", 8)) == []
    assert [r.worker for r in handle(s, push("c", base=10))] == ["c"]
    assert [r.worker for r in handle(s, push("b", 6))] == ["b", "a"]


def test_a_worker_that_comes_back_begins_with_the_slowest() -> None:
    s = server("agwu", "a", "b", rule={"max_staleness": 0})
    handle(s, push("a"))
    assert handle(s, push("a", 2, base=1)) == []
    assert handle(s, Join(0, "a", 2)) == [refusal("a", 2, Code.SESSION), reply("a", 0, 1, session=2)]
    assert handle(s, push("a", base=1, session=2)) == [merged("a", 1, 2, base=1, session=2, gamma=1.0)]
    assert handle(s, push("a", 2, base=2, session=2)) == []


# --- coming and going ---


def test_a_join_brings_the_center_once_more_when_repeated() -> None:
    s = server("agwu", "a")
    handle(s, push("a"))
    assert handle(s, Join(0, "b", 1)) == [reply("b", 0, 1)]
    assert handle(s, Join(0, "b", 1)) == [reply("b", 0, 1)]


def test_a_newer_session_supersedes_the_older() -> None:
    s = server("sgwu", "a", "b")
    handle(s, push("a"))
    assert handle(s, Join(0, "a", 2)) == [refusal("a", 1, Code.SESSION), reply("a", 0, 0, session=2)]
    assert handle(s, push("a")) == [refusal("a", 1, Code.SESSION)]
    assert handle(s, Join(0, "a", 1)) == [refusal("a", 0, Code.SESSION)]
    handle(s, push("b", value=3.0))
    assert len(handle(s, push("a", session=2))) == 2
    np.testing.assert_allclose(s.snapshot().center, 2.0)  # the push of the first session is not in it


def test_who_joins_into_a_round_takes_part_from_the_next() -> None:
    s = server("sgwu", "a", "b")
    handle(s, push("a"))
    assert handle(s, Join(0, "c", 1)) == []
    assert handle(s, Pull(0, "c", 1, seq=9)) == []
    assert handle(s, push("c")) == [refusal("c", 1, Code.BASE)]
    assert handle(s, push("b")) == [
        merged("a", 1, 1, base=0),
        merged("b", 1, 1, base=0),
        reply("c", 0, 1),
        reply("c", 9, 1),
    ]
    assert handle(s, push("a", 2, base=1)) == handle(s, push("b", 2, base=1)) == []
    assert len(handle(s, push("c", 1, base=1))) == 3


def test_a_session_that_is_superseded_in_a_round_joins_the_next() -> None:
    s = server("sgwu", "a", "b", "c")
    handle(s, push("a"))
    handle(s, push("b"))
    assert handle(s, Join(0, "c", 2)) == [
        merged("a", 1, 1, base=0),
        merged("b", 1, 1, base=0),
        reply("c", 0, 1, session=2),
    ]


def test_an_asynchronous_join_never_waits() -> None:
    s = server("agwu", "a")
    handle(s, push("a"))
    assert handle(s, Join(0, "b", 1)) == [reply("b", 0, 1)]


def test_leaving_frees_the_barrier() -> None:
    s = server("sgwu", "a", "b")
    assert handle(s, push("a", at=1.0)) == []
    assert handle(s, Leave("b", 1, at=3.0)) == [merged("a", 1, 1, base=0, waited=2.0)]


def test_a_leaver_s_waiting_push_is_dropped_and_answered() -> None:
    s = server("sgwu", "a", "b")
    handle(s, push("a"))
    assert handle(s, Leave("a", 1)) == [refusal("a", 1, Code.LEFT)]
    assert handle(s, push("b", value=4.0)) == [merged("b", 1, 1, base=0)]
    np.testing.assert_allclose(s.snapshot().center, 4.0)


def test_the_last_push_of_one_that_leaves_in_good_order_counts_and_nobody_waits_for_another() -> None:
    s = server("sgwu", "a", "b")
    handle(s, push("a", value=2.0, accuracy=0.25))
    assert handle(s, Leave("a", 1, last=1)) == handle(s, Leave("a", 1, last=1)) == [refusal("a", 1, Code.LEFT)]
    assert s.counts("a", 1, 1)
    assert handle(s, push("b", value=6.0, accuracy=0.75)) == [replace(merged("b", 1, 1, base=0), accuracy=0.75)]
    np.testing.assert_allclose(s.snapshot().center, 5.0)
    assert s.counts("a", 1, 1)
    assert (s.snapshot().merged, s.snapshot().refused) == (2, {})
    assert handle(s, push("b", 2, base=1)) == [merged("b", 2, 2, base=1)], "it is by itself"


def test_the_last_push_of_one_that_leaves_does_not_count_where_its_merge_overflows() -> None:
    s = server("bsp", "a", "b", rule={"combine": "sum", "every": 0, "batch": "worker"})
    handle(s, push("a", value=3e38))
    handle(s, Leave("a", 1, last=1))
    assert handle(s, push("b", value=3e38)) == [refusal("a", 1, Code.FINITE), refusal("b", 1, Code.FINITE)]
    assert not s.counts("a", 1, 1)


def test_a_worker_that_leaves_waits_until_its_last_push_is_there() -> None:
    s = server("sgwu", "a", "b")
    handle(s, push("b"))
    assert handle(s, Leave("a", 1, last=1)) == []
    assert not s.counts("a", 1, 1)
    assert [type(each) for each in handle(s, push("a"))] == [Reply, Reply]
    assert handle(s, Leave("a", 1, last=1)) == []
    assert s.counts("a", 1, 1)
    assert handle(s, push("b", 2, base=1)) == [merged("b", 2, 2, base=1)]


def test_one_that_is_back_before_its_last_push_is_merged_is_let_in_behind_it() -> None:
    s = server("sgwu", "a", "b")
    handle(s, push("a", value=2.0))
    handle(s, Leave("a", 1, last=1))
    assert handle(s, Join(0, "a", 2)) == []
    assert handle(s, Join(0, "a", 3)) == [refusal("a", 0, Code.SESSION, session=2)]
    found = handle(s, Leave("a", 1))  # as its driver says that has not heard of its push
    assert found == [refusal("a", 1, Code.LEFT), reply("a", 0, 0, session=3)]
    s = server("sgwu", "a", "b")
    handle(s, push("a", value=2.0))
    handle(s, Leave("a", 1, last=1))
    handle(s, Join(0, "a", 2))
    found = handle(s, push("b", value=4.0))
    assert found == [merged("b", 1, 1, base=0), reply("a", 0, 1, session=2)]
    np.testing.assert_allclose(s.snapshot().center, 3.0)
    handle(s, push("a", base=1, session=2))
    handle(s, Leave("a", 2, last=1))
    handle(s, Join(0, "a", 3))
    assert handle(s, Leave("a", 3)) == [refusal("a", 0, Code.LEFT, session=3)]
    assert len(handle(s, push("b", 2, base=1))) == 1


@pytest.mark.parametrize("back", [False, True])
def test_one_that_leaves_in_good_order_is_refused_all_else_at_once(back: bool) -> None:
    s = server("sgwu", "a", "b")
    handle(s, push("a"))
    handle(s, push("b"))
    handle(s, push("a", 2, base=1))
    handle(s, Leave("a", 1, last=2))
    if back:
        handle(s, Join(0, "a", 2))
    for seq in (1, 2, 3):  # merged and answered before, waiting, never sent
        assert handle(s, push("a", seq, base=1)) == [refusal("a", seq, Code.LEFT)]
    assert handle(s, Pull(0, "a", 1, seq=4)) == [refusal("a", 4, Code.LEFT)]
    assert handle(s, push("b", 2, base=1))[0] == merged("b", 2, 2, base=1)
    assert s.snapshot().merged == 4


def test_of_joins_that_are_put_off_the_newest_is_let_in_and_a_repeat_is_no_other() -> None:
    s = server("sgwu", "a", "b")
    handle(s, push("a"))
    handle(s, Leave("a", 1, last=1))
    assert handle(s, Join(0, "a", 3)) == handle(s, Join(0, "a", 3)) == []
    for older in (1, 2):  # they were longer on their way
        assert handle(s, Join(0, "a", older)) == [refusal("a", 0, Code.SESSION, session=older)]
    assert handle(s, Leave("a", 2)) == [], "of a session before"
    assert handle(s, push("b")) == [merged("b", 1, 1, base=0), reply("a", 0, 1, session=3)]


def test_the_last_push_of_one_that_is_far_ahead_waits_for_nobody() -> None:
    s = server("agwu", "a", "b", rule={"max_staleness": 0})
    handle(s, push("a"))
    assert handle(s, push("a", 2, base=1)) == []
    assert handle(s, Leave("a", 1, last=2)) == [refusal("a", 2, Code.LEFT)]
    assert s.snapshot().merged == 2
    assert s.counts("a", 1, 2)


def test_the_late_begin_when_all_others_have_left() -> None:
    s = server("sgwu", "a")
    s.handle(Join(0, "b", 1))
    handle(s, push("a"))
    handle(s, Join(0, "c", 1))
    assert handle(s, Leave("b", 1)) == [merged("a", 1, 1, base=0), reply("c", 0, 1)]
    handle(s, push("a", 2, base=1))
    handle(s, Join(0, "d", 1))
    assert handle(s, Leave("d", 1)) == [refusal("d", 0, Code.LEFT)]
    assert handle(s, Leave("a", 1)) == [refusal("a", 2, Code.LEFT)]


def test_leaving_twice_or_for_an_earlier_life_changes_nothing() -> None:
    s = server("agwu", "a")
    handle(s, Join(0, "a", 2))
    assert handle(s, Leave("a", 1)) == []
    assert handle(s, push("a", session=2)) == [merged("a", 1, 1, base=0, session=2)]
    assert handle(s, Leave("a", 2)) == handle(s, Leave("a", 2)) == []
    assert handle(s, push("a", 2, base=1, session=2)) == [refusal("a", 2, Code.WORKER, session=2)]
    assert handle(s, Join(0, "a", 2)) == [refusal("a", 0, Code.SESSION, session=2)]
    assert handle(s, Join(0, "a", 3)) == [reply("a", 0, 1, session=3)]


def test_a_worker_gone_no_longer_attenuates_the_others() -> None:
    s = server("agwu", "a", "b")
    handle(s, Leave("b", 1))
    (only,) = handle(s, push("a"))
    assert only == merged("a", 1, 1, base=0, gamma=1.0)


def test_a_worker_that_left_a_round_may_join_again() -> None:
    s = server("sgwu", "a", "b")
    assert handle(s, push("a", at=5.0)) == []
    assert handle(s, Leave("b", 1, at=10.5)) == [merged("a", 1, 1, base=0, waited=5.5)]
    assert handle(s, push("b", at=11.0)) == [refusal("b", 1, Code.WORKER)]
    assert handle(s, Join(0, "b", 2, at=12.0)) == [reply("b", 0, 1, session=2)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("sgwu", "bsp") else pytest.mark.slow) for name in RULES]
)
def test_ten_thousand_workers_are_served(name: str) -> None:
    s, workers = server(name), [f"w{i}" for i in range(10_000)]
    for worker in workers:
        s.handle(Join(0, worker, 1))
    answers = [each for seq in (1, 2) for worker in workers for each in s.handle(push(worker, seq))]
    s.validate()
    assert len(answers) == s.snapshot().merged == 20_000
    assert s.snapshot().version == (2 if RULES[name].barrier else 20_000)


# --- snapshots ---


class _Summing(UpdateRule):
    """Keeps a state and answers with something else than the center."""

    barrier = False

    def payload(self, local: Any) -> Any:
        return local.weights

    def init(self, center: Any) -> Any:
        return {"sum": np.zeros_like(center)}

    def merge(self, center: Any, state: Any, pushes: Any, view: Any) -> Merge:
        (event,) = pushes
        total = state["sum"] + event.payload
        return Merge(center + total, {"sum": total}, replies={event.worker: -total})


def test_a_rule_may_keep_state_and_reply_with_something_else() -> None:
    s = ParameterServer(_Summing(), np.zeros(2, "float32"))
    handle(s, Join(0, "a", 1))
    handle(s, push("a"))
    (second,) = handle(s, push("a", 2, base=1))
    assert isinstance(second, Reply)
    np.testing.assert_array_equal(second.weights, -2)
    np.testing.assert_array_equal(s.snapshot().center, 3)
    restored = ParameterServer.restore(_Summing(), s.snapshot())
    handle(restored, Join(1, "a", 1))
    handle(restored, push("a", life=1))
    np.testing.assert_array_equal(restored.snapshot().center, 6)


def test_a_restored_server_goes_on_as_a_new_epoch() -> None:
    s = server("sgwu", "a", "b")
    for event in (push("a"), push("b", value=3.0), push("z"), push("a", 2, base=1)):
        handle(s, event)
    kept = s.snapshot()
    assert kept == Snapshot(kept.center, version=1, life=0, merged=2, refused={"worker": 1})
    new = ParameterServer.restore(RULES["sgwu"](), kept)
    new.validate()
    assert handle(new, push("a", 2, base=1)) == [refusal("a", 2, Code.LIFE)]
    assert handle(new, Join(1, "a", 1)) == [reply("a", 0, 1, life=1)]  # the same life may go on
    assert handle(new, push("a", life=1, base=1)) == [merged("a", 1, 2, base=1, life=1)]
    after = new.snapshot()
    assert (after.life, after.version, after.merged) == (1, 2, 3)
    assert after.refused == {"worker": 1, "life": 1}
    np.testing.assert_allclose(kept.center, 2.0)
    assert ParameterServer.restore(RULES["sgwu"](), kept, life=7).snapshot().life == 7


def test_a_snapshot_without_state_begins_with_the_rule_s_own() -> None:
    s = ParameterServer.restore(rule_of("downpour", server="adagrad"), Snapshot(np.zeros(2, "float32"), state={}))
    handle(s, Join(1, "a", 1))
    assert handle(s, push("a", life=1)) == [merged("a", 1, 1, base=0, life=1)]


@pytest.mark.parametrize("bad", [np.zeros((2, 2)), np.zeros(2, int), np.array([1.0, math.nan])])
def test_a_center_that_is_none_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="finite 1-D float vector"):
        ParameterServer(RULES["sgwu"](), bad)


def test_server_and_partitioners_bring_no_io_with_them() -> None:
    code = (
        "import sys, daskcnn.ps, daskcnn.partition\n"
        "found = {'dask', 'distributed', 'zarr', 'cupy'} & {name.split('.')[0] for name in sys.modules}\n"
        "sys.exit(f'imported: {found}' if found else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- shares of a step ---


class Noted:
    """Notes what it is told, and gives one sample of a's to b after each step."""

    def __init__(self) -> None:
        self.told: list[tuple[int, dict[str, int], dict[str, float]]] = []

    def met(self, step: int, samples: Mapping[str, int], seconds: Mapping[str, float]) -> Change:
        self.told.append((step, dict(samples), dict(seconds)))
        return Change(step + 3, {"a": -1, "b": 1})


def _sharing(rule: str, **parameters: Any) -> tuple[ParameterServer, Noted]:
    noted = Noted()
    made = ParameterServer(RULES[rule](**parameters), np.zeros(2, "float32"), sharing=noted)
    for worker in ("a", "b"):
        made.handle(Join(0, worker, 1))
    return made, noted


def test_shares_go_by_the_time_from_an_answer_to_the_next_push() -> None:
    s, noted = _sharing("bsp")
    handle(s, push("a", step=1, at=5.0))
    handle(s, push("b", step=1, at=7.0))
    handle(s, push("b", 2, step=2, at=8.0))
    answers = handle(s, push("a", 2, step=2, at=11.0))
    assert noted.told == [(1, {"a": 10, "b": 10}, {"a": 5.0, "b": 7.0}), (2, {"a": 10, "b": 10}, {"a": 4.0, "b": 1.0})]
    assert [(each.worker, each.more, each.since) for each in answers if isinstance(each, Reply)] == [
        ("a", -1, 5),
        ("b", 1, 5),
    ]


def test_a_repeated_push_is_told_the_same_change() -> None:
    s, noted = _sharing("bsp")
    handle(s, push("a", step=1))
    _, answer = handle(s, push("b", step=1))
    assert handle(s, push("b", step=1)) == [answer]
    assert isinstance(answer, Reply)
    assert (answer.more, answer.since) == (1, 4)
    assert len(noted.told) == 1


@pytest.mark.parametrize("steps", [(0, 0), (1, 2)])
def test_workers_that_do_not_make_the_same_step_keep_their_minibatches(steps: tuple[int, int]) -> None:
    s, noted = _sharing("bsp")
    handle(s, push("a", step=steps[0]))
    answers = handle(s, push("b", step=steps[1]))
    assert noted.told == []
    assert [(each.more, each.since) for each in answers if isinstance(each, Reply)] == [(0, 0)] * 2


def test_who_leaves_takes_no_part_in_a_change() -> None:
    s, noted = _sharing("bsp")
    handle(s, push("a", step=1))
    handle(s, Leave("b", 1))
    assert noted.told == [(1, {"a": 10}, {"a": 0.0})]


def test_a_server_without_shares_changes_nothing() -> None:
    s = server("bsp", "a")
    (answer,) = handle(s, push("a", step=1))
    assert isinstance(answer, Reply)
    assert (answer.more, answer.since) == (0, 0)
