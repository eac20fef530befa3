"""A merge of finite pushes that is not finite is refused, for every rule, whole and split, and nobody waits for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskcnn.ps import RULES, Code, Instruction, Join, Pull, Push, Refuse, Reply, UpdateRule
from tests.ps.driving import every_variant, rule_of
from tests.ps.split_here import SplitServer, WholeServer, server_of

SIZE = 4
LARGEST = float(np.finfo(np.float32).max)
both = pytest.mark.parametrize("kind", ["whole", "split"])

OVERFLOWS: dict[str, tuple[str, dict[str, Any], float, float]] = {
    "agwu": ("agwu", {}, 3e38, 3e38),
    "bsp sum": ("bsp", {"combine": "sum"}, 3e38, 3e38),
    "downpour": ("downpour", {}, 3e38, 3e38),
    "adagrad": ("downpour", {"server": "adagrad"}, 0.0, 1e30),
    "easgd": ("easgd", {}, 3e38, -3e38),
}
"""The rule, its options, the center's last number, and that of a push. All numbers before these are 0."""


def last(value: float) -> Any:
    """Zeros, and this number in the last place: of two ranges only the second has it."""
    vector = np.zeros(SIZE, np.float32)
    vector[-1] = value
    return vector


def push(worker: str, payload: Any, seq: int = 1, *, at: float = 0.0) -> Push:
    return Push(0, worker, 1, seq, 0, payload, 1, 1.0, at)


def refused(instructions: list[Instruction]) -> list[str]:
    """Who is refused because a number is not finite; there is no other instruction."""
    assert all(isinstance(each, Refuse) and each.code == Code.FINITE for each in instructions), instructions
    assert all("NaN or infinity in float32; lower the learning rate" in each.reason for each in instructions)  # type: ignore[union-attr]
    return [each.worker for each in instructions]


def replied(server: WholeServer | SplitServer, instructions: list[Instruction]) -> list[str]:
    """Who is answered; every answer is finite."""
    for each in instructions:
        assert isinstance(each, Reply)
        assert np.isfinite(server.read(each)).all()
    return [each.worker for each in instructions]


def kept(server: WholeServer | SplitServer) -> tuple[Any, ...]:
    """Center, state and version."""
    found = server.snapshot()
    return found.center.tobytes(), {name: v.tobytes() for name, v in (found.state or {}).items()}, found.version


@both
@pytest.mark.parametrize("case", OVERFLOWS)
def test_a_push_whose_merge_overflows_changes_nothing_and_its_seq_may_be_used_again(kind: str, case: str) -> None:
    name, options, center, value = OVERFLOWS[case]
    server = server_of(kind, RULES[name](**options), last(center))
    server.handle(Join(0, "a", 1))
    before = kept(server)
    assert refused(server.handle(push("a", last(value)))) == ["a"]
    server.validate()
    assert kept(server) == before
    assert server.snapshot().refused == {"finite": 1}
    assert replied(server, server.handle(push("a", last(0.0)))) == ["a"]
    assert server.snapshot().version == 1


@both
def test_a_barrier_refuses_all_pushes_of_the_round_and_lets_in_who_came_late(kind: str) -> None:
    server = server_of(kind, rule_of("bsp", combine="sum"), last(3e38))
    for worker in "ab":
        server.handle(Join(0, worker, 1))
    assert server.handle(push("a", last(3e38))) == []
    assert server.handle(Join(0, "c", 1)) == []
    *round_, late = server.handle(push("b", last(3e38)))
    assert refused(round_) == ["a", "b"]
    assert replied(server, [late]) == ["c"]
    server.validate()
    for worker in "ab":
        assert server.handle(push(worker, last(0.0))) == []
    assert replied(server, server.handle(push("c", last(0.0)))) == ["a", "b", "c"]
    assert server.snapshot().refused == {"finite": 2}


@both
def test_a_push_that_waited_is_refused_as_one_that_did_not(kind: str) -> None:
    """With bounded staleness, the slowest worker's push frees another, whose merge overflows."""
    server = server_of(kind, rule_of("downpour", max_staleness=0), last(0.0))
    for worker in "ab":
        server.handle(Join(0, worker, 1))
    assert replied(server, server.handle(push("a", last(3e38)))) == ["a"]
    assert server.handle(push("a", last(3e38), 2)) == []
    merged, waited = server.handle(push("b", last(0.0)))
    assert replied(server, [merged]) == ["b"]
    assert refused([waited]) == ["a"]
    assert replied(server, server.handle(push("b", last(0.0), 2))) == ["b"]
    assert server.handle(push("b", last(0.0), 3)) == [], "the refused push does not count: a is the slowest"
    assert replied(server, server.handle(push("a", last(0.0), 2))) == ["a", "b"]


@both
@every_variant
def test_the_largest_numbers_leave_a_finite_center_and_nobody_waiting(rule: UpdateRule, kind: str) -> None:
    """Three workers push them for some rounds, of either sign: each is answered or refused, and then all is well."""
    server, numbers = server_of(kind, rule, np.zeros(SIZE, np.float32)), np.random.default_rng(0)
    seqs, bases = dict.fromkeys("abc", 1), dict.fromkeys("abc", 0)
    for worker in seqs:
        server.handle(Join(0, worker, 1))
    for round_ in range(8):
        waiting = set(seqs)
        for worker in seqs:
            payload = last(LARGEST * numbers.choice([-1, 1])) if round_ < 6 else last(0.0)
            for each in server.handle(Push(0, worker, 1, seqs[worker], bases[worker], payload, 1, 1.0)):
                waiting.remove(each.worker)
                if isinstance(each, Reply):
                    replied(server, [each])
                    seqs[each.worker] += 1
                    bases[each.worker] = each.version if rule.answers != "nothing" else 0
                else:
                    refused([each])
            server.validate()
        while waiting:  # ahead of a worker that was refused: it pushes zeros until all have the same count
            slowest = min(seqs, key=lambda worker: seqs[worker])
            for each in server.handle(Push(0, slowest, 1, seqs[slowest], bases[slowest], last(0.0), 1, 1.0)):
                waiting.discard(each.worker)
                seqs[each.worker] += isinstance(each, Reply)
                bases[each.worker] = each.version if isinstance(each, Reply) and rule.answers != "nothing" else 0
    snapshot = server.snapshot()
    assert np.isfinite(snapshot.center).all()
    assert all(np.isfinite(vector).all() for vector in (snapshot.state or {}).values())


@both
def test_the_reason_says_whether_the_push_or_its_merge_was_not_finite(kind: str) -> None:
    server = server_of(kind, RULES["downpour"](), last(3e38))
    server.handle(Join(0, "a", 1))
    (payload,) = server.handle(push("a", last(np.inf)))
    (merge,) = server.handle(push("a", last(3e38)))
    assert isinstance(payload, Refuse)
    assert isinstance(merge, Refuse)
    assert payload.reason == "payload: holds NaN or infinity; lower the learning rate"
    assert merge.reason == "merge of finite pushes: would hold NaN or infinity in float32; lower the learning rate"
    (pulled,) = server.handle(Pull(0, "a", 1))
    assert replied(server, [pulled]) == ["a"]
