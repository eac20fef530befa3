"""Kills around a push, by each rule: it is applied once or not at all, whoever is killed, and whenever."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from daskcnn.ps import RULES, Code, Instruction, Join, Leave, ParameterServer, Reply
from tests.ps.test_server import handle, push, refusal, server

RULE = pytest.mark.parametrize("name", RULES)


def answered(found: Sequence[Instruction]) -> list[str]:
    """The workers whose pushes are merged."""
    return [each.worker for each in found if isinstance(each, Reply)]


@RULE
def test_a_worker_that_is_killed_before_its_push_leaves_is_waited_for_by_no_other(name: str) -> None:
    s = server(name, "a", "b")
    first = handle(s, push("a"))
    left = handle(s, Leave("b", 1))
    assert answered([*first, *left]) == ["a"]
    assert s.snapshot().merged == 1


@RULE
def test_a_worker_that_is_killed_after_its_push_has_left_leaves_it_merged_once_or_not_at_all(name: str) -> None:
    """Behind a barrier it counts only if all others came before the server heard of the kill."""
    s = server(name, "a", "b")
    handle(s, push("a"))
    handle(s, Leave("a", 1))
    found = handle(s, push("b"))
    assert answered(found) == ["b"]
    assert s.snapshot().merged == (1 if RULES[name]().barrier else 2)
    assert np.isfinite(s.snapshot().center).all()


@RULE
def test_a_push_whose_answer_is_lost_is_sent_again_and_merged_once(name: str) -> None:
    """The connection breaks after the server has taken it: the sender cannot know."""
    s = server(name, "a")
    handle(s, push("a"))
    center = s.snapshot().center.copy()
    assert answered(handle(s, push("a"))) == ["a"]
    np.testing.assert_array_equal(s.snapshot().center, center)
    assert (s.snapshot().merged, s.snapshot().repeated) == (1, 1)


@RULE
def test_a_worker_that_comes_back_with_a_new_session_cannot_push_what_it_pushed_before(name: str) -> None:
    s = server(name, "a")
    handle(s, push("a"))
    center = s.snapshot().center.copy()
    handle(s, Join(0, "a", 2))
    assert handle(s, push("a")) == [refusal("a", 1, Code.SESSION)]
    np.testing.assert_array_equal(s.snapshot().center, center)


@RULE
@pytest.mark.parametrize("merged", [False, True])
def test_a_server_that_is_killed_in_a_merge_has_the_push_once_in_its_next_life(name: str, *, merged: bool) -> None:
    """The snapshot is of before the merge, or of after it. The push of the old life is refused in either case."""
    s = server(name, "a")
    before, first = s.snapshot(), push("a")
    handle(s, first)
    kept = s.snapshot() if merged else before
    new = ParameterServer.restore(RULES[name](), kept)
    assert handle(new, first) == [refusal("a", 1, Code.LIFE)]
    np.testing.assert_array_equal(new.snapshot().center, kept.center)
    handle(new, Join(1, "a", 1))
    assert answered(handle(new, push("a", life=1, base=kept.version))) == ["a"]
    assert new.snapshot().merged == kept.merged + 1
