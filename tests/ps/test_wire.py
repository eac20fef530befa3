"""Pushes in int8: what is lost of one comes with the next, so that all that arrives adds up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from daskcnn.arrays import Device
from daskcnn.errors import JobError
from daskcnn.job.resolve import resolve
from daskcnn.ps import RULES, Join, Local, ParameterServer, Pull, Push, Reply, UpdateRule, Vector
from daskcnn.ps.messages import Code
from daskcnn.ps.split import spans
from daskcnn.ps.wire import BLOCK, CODED, Feedback, Wire, bytes_of, decode, encode, problems_with_int8
from tests.ps.driving import rule_of

few = settings(max_examples=25, deadline=None)
numbers = st.floats(-(2.0**99), 2.0**99, width=32)
vectors = arrays(np.float32, st.integers(1, 3 * BLOCK), elements=numbers)
TRAVELS = [name for name in RULES if not list(problems_with_int8(RULES[name](), name))]


def there_and_back(vector: Vector, xp: Any = np) -> Vector:
    return decode(encode(vector, xp), len(vector), vector.dtype, xp)


# --- a vector ---


@few
@given(vectors)
def test_no_number_is_off_by_more_than_half_a_unit_of_its_block(vector: Vector) -> None:
    found = there_and_back(vector)
    for lo in range(0, len(vector), BLOCK):
        block, own = vector[lo : lo + BLOCK].astype(float), found[lo : lo + BLOCK].astype(float)
        largest = np.abs(block).max()
        np.testing.assert_allclose(own, block, rtol=0, atol=0.5001 * largest / 127 + 1e-44)
        np.testing.assert_array_equal(own[np.abs(block) == largest], block[np.abs(block) == largest])
        np.testing.assert_array_equal(own[block == 0], 0)


@few
@given(vectors)
def test_what_was_coded_once_is_coded_to_the_same_bytes(vector: Vector) -> None:
    assert encode(there_and_back(vector)).tobytes() == encode(vector).tobytes()


@given(numbers, st.integers(1, 600))
def test_equal_numbers_are_exact(number: float, size: int) -> None:
    vector = np.full(size, number, np.float32)
    np.testing.assert_array_equal(there_and_back(vector), vector)


@given(st.integers(1, 10**7))
def test_a_push_takes_a_quarter_of_the_bytes_and_little_more(size: int) -> None:
    assert bytes_of("int8", size) <= bytes_of("float32", size) / 4 * (1 + 1 / 64) + BLOCK + 4
    assert len(encode(np.zeros(size % 5000 + 1, np.float32))) == bytes_of("int8", size % 5000 + 1)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_vectors_are_coded_where_the_replica_computes(device: Device, dtype: str) -> None:
    backend, vector = device.backend, np.random.default_rng(0).standard_normal(1000).astype(dtype)
    there = encode(backend.from_host(vector), backend.xp)
    assert backend.to_host(there).tobytes() == encode(vector).tobytes()
    back = decode(there, len(vector), dtype, backend.xp)
    np.testing.assert_array_equal(backend.to_host(back), there_and_back(vector))


# --- a replica's pushes ---


def gained(feedback: Feedback, gain: Vector, xp: Any = np) -> Vector:
    """The coded push of a replica that has gained this."""
    base = xp.zeros(len(gain), gain.dtype)
    return feedback.pushed(Local(gain, base))


@few
@given(st.lists(st.tuples(st.integers(0, 99), st.floats(1e-6, 1e6), st.booleans()), min_size=1, max_size=12))
def test_what_arrived_and_the_rest_are_together_all_that_was_pushed(pushes: list[tuple[int, float, bool]]) -> None:
    """A push that is lost takes its own gain along, and nothing besides."""
    feedback, arrived, pushed = Feedback(rule_of("local-sgd")), np.zeros(300), np.zeros(300)
    local = Local(np.zeros(300, np.float32), np.zeros(300, np.float32))
    for seed, size, answered in pushes:
        gain, before = (size * np.random.default_rng(seed).standard_normal(300)).astype(np.float32), feedback.rest()
        coded = gained(feedback, gain)
        if answered:
            feedback.adopt(Local(gain.copy(), np.zeros(300, np.float32)), np.zeros(300, np.float32), 1)
            arrived, pushed = arrived + decode(coded, 300, np.float32), pushed + gain
        else:
            feedback.begin(local, before)
    rest = feedback.rest()
    kept = 0 if rest is None else decode(rest, 300, np.float32)
    lost = 4.5 * max(size for _, size, _ in pushes) / 254**2  # of a rest, which is coded between two sessions
    np.testing.assert_allclose(arrived + kept, pushed, rtol=0, atol=lost * (1 + len(pushes)))


def test_what_the_last_push_has_lost_is_kept_although_no_answer_is_waited_for() -> None:
    feedback = Feedback(rule_of("local-sgd"))
    gain = np.linspace(0, 1, 300, dtype=np.float32)
    coded = gained(feedback, gain)
    rest = feedback.rest()
    assert rest is not None
    lost = gain - decode(coded, 300, np.float32)
    np.testing.assert_allclose(decode(rest, 300, np.float32), lost, rtol=0, atol=1 / 254**2)
    again = Feedback(rule_of("local-sgd"))
    again.begin(Local(gain, gain), rest)
    assert gained(again, gain).tobytes() != coded.tobytes()


def test_nothing_is_added_to_a_push_of_another_kind() -> None:
    """A replica that is alone pushes weights where it pushes gradients beside others."""
    feedback, size = Feedback(rule_of("bsp")), 300
    local = Local(np.ones(size), np.zeros(size), gradients=np.linspace(0, 1, size), pace=(0.1, 0.0))
    feedback.pushed(local)
    feedback.adopt(local, np.zeros(size), 1)
    assert feedback.rest() is not None
    weights = np.linspace(1, 3, size)
    coded = feedback.pushed(Local(weights, np.zeros(size)))
    np.testing.assert_array_equal(coded, encode(weights))
    assert feedback.rest() is None, "of the kind that the rule usually pushes"


@pytest.mark.parametrize("name", TRAVELS)
def test_feedback_works_where_the_replica_computes(name: str, device: Device) -> None:
    backend, rule, found = device.backend, RULES[name](), list[bytes]()
    for xp, put, get in ((np, np.asarray, np.asarray), (backend.xp, backend.from_host, backend.to_host)):
        feedback = Feedback(rule, xp)
        local = Local(put(np.linspace(0, 1, 300)), put(np.zeros(300)))
        feedback.begin(local, encode(np.full(300, 1e-3)))
        for _ in range(3):
            coded = feedback.pushed(local)
            feedback.adopt(local, put(encode(np.full(300, 0.5))) if rule.barrier else put(np.ones(300)), 1)
            local.weights += 0.125
        rest = feedback.rest()
        found.append(get(coded).tobytes() + (b"" if rest is None else get(rest).tobytes()))
    assert found[0] == found[1]


# --- a server ---


RATE, LARGE, AWAY = 0.02, 30.0, 3.0


def run(rule: UpdateRule, *, coded: bool, feedback: bool, meetings: int = 600) -> Vector:
    """Return the center that two replicas end with. Their minima lie around `AWAY`; one number swings."""
    size = 64
    target = np.linspace(0.9, 1.1, size) * AWAY
    target[0] = 0.0
    server = ParameterServer(rule, np.zeros(size), wire="int8" if coded else "float32")
    replicas = dict[str, Local]()
    feedbacks = dict[str, Feedback]()
    for name in "ab":
        (reply,) = server.handle(Join(0, name, 1))
        assert isinstance(reply, Reply)
        replicas[name] = Local(np.zeros(size), np.zeros(size))
        rule.begin(replicas[name], reply.weights, reply.version)
        if coded:
            feedbacks[name] = Feedback(rule)
    for seq in range(1, meetings + 1):
        for name in "ab":
            local = replicas[name]
            local.weights -= RATE * (local.weights - target)
            local.weights[0] = local.base[0] + LARGE * (-1) ** seq
            push = Push(0, name, 1, seq, local.base_version, feedbacks.get(name, rule).pushed(local).copy(), 10, 1.0)
            for each in server.handle(push):
                assert isinstance(each, Reply)
                own = replicas[each.worker]
                feedbacks.get(each.worker, rule).adopt(own, each.weights, each.version)
                if not feedback and coded:
                    feedbacks[each.worker].begin(own, None)
            if rule.answers == "nothing":
                (pulled,) = server.handle(Pull(0, name, 1))
                assert isinstance(pulled, Reply)
                rule.pulled(local, pulled.weights, pulled.version)
        server.validate()
    return server.snapshot().center[1:] - target[1:]


@pytest.mark.parametrize("name", ["local-sgd", "sgwu", "agwu", "downpour", "parallel-sgd"])
def test_with_feedback_a_parabola_is_descended_to_its_minimum(name: str) -> None:
    """Beside a large number each gain of the others is less than half a unit: alone none of them would arrive.

    With e of a push and f of an answer still to come, center + e goes down the parabola of the center less f: it ends
    within e + f of the minimum, and the center within 2 e + f. Each is at most half a unit of the block.
    """
    rule = RULES[name]()
    half = 1.2 * LARGE / 127 / 2  # the swing of a center that is met by one after the other is larger by a little
    assert half > RATE * AWAY * 1.1
    assert np.abs(run(rule, coded=False, feedback=False)).max() < 0.01
    assert np.abs(run(rule, coded=True, feedback=True)).max() < 3 * half
    assert np.abs(run(rule, coded=True, feedback=False)).min() > 0.8 * AWAY


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("name", TRAVELS)
def test_a_split_server_does_the_same(name: str, parts: int) -> None:
    """Ranges hold whole blocks, so that their pieces are pieces of the whole push and of the whole answer."""
    rule, size = RULES[name](), 5 * BLOCK + 7
    cuts = spans(size, parts, Wire.of("int8", rule).unit)
    assert all(lo % BLOCK == 0 for lo, _ in cuts)
    assert cuts[-1][1] == size
    rng = np.random.default_rng(0)
    whole = ParameterServer(rule, rng.standard_normal(size).astype(np.float32), wire="int8")
    center = whole.snapshot().center
    held = [ParameterServer(rule, center[lo:hi], wire="int8") for lo, hi in cuts]
    for server in (whole, *held):
        server.handle(Join(0, "a", 1))
    for seq in range(1, 4):
        coded = encode(rng.standard_normal(size).astype(np.float32))
        (told,) = whole.handle(Push(0, "a", 1, seq, 0, coded, 10, 0.5))
        assert isinstance(told, Reply)
        pieces = []
        for (lo, hi), server in zip(cuts, held, strict=True):
            piece = coded[bytes_of("int8", lo) : bytes_of("int8", hi)]
            (answer,) = server.handle(Push(0, "a", 1, seq, 0, piece, 10, 0.5))
            assert isinstance(answer, Reply)
            pieces.append(answer.weights)
        np.testing.assert_array_equal(np.concatenate(pieces), told.weights)
        assert (told.weights.dtype == CODED) == rule.barrier
    np.testing.assert_array_equal(np.concatenate([s.snapshot().center for s in held]), whole.snapshot().center)


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (np.zeros(300, np.float32), Code.DTYPE),
        (encode(np.zeros(900, np.float32)), Code.LENGTH),
        (encode(np.full(300, np.nan, np.float32)), Code.FINITE),
        (encode(np.full(300, np.inf, np.float32)), Code.FINITE),
    ],
)
def test_what_is_no_coded_push_is_refused(payload: Vector, code: Code) -> None:
    server = ParameterServer(rule_of("local-sgd"), np.zeros(300, np.float32), wire="int8")
    server.handle(Join(0, "a", 1))
    (refused,) = server.handle(Push(0, "a", 1, 1, 0, payload, 10, 0.5))
    assert refused.code == code  # type: ignore[union-attr] # it is a refusal


def test_a_repeated_push_is_merged_once_and_told_the_same() -> None:
    server = ParameterServer(rule_of("local-sgd"), np.zeros(300, np.float32), wire="int8")
    server.handle(Join(0, "a", 1))
    push = Push(0, "a", 1, 1, 0, encode(np.linspace(0, 1, 300, dtype=np.float32)), 10, 0.5)
    (first,), center = server.handle(push), server.snapshot().center
    (again,) = server.handle(push)
    assert again is first
    assert server.snapshot().center is center


def test_one_that_joins_is_given_the_center_that_the_others_know() -> None:
    server = ParameterServer(rule_of("sgwu"), np.zeros(300, np.float32), wire="int8")
    known = np.zeros(300, np.float32)
    for name in "ac":
        server.handle(Join(0, name, 1))
    for seq in range(1, 4):
        gain = np.linspace(0, seq, 300, dtype=np.float32)
        server.handle(Push(0, "a", 1, seq, seq - 1, encode(gain), 10, 0.5))
        told, also = server.handle(Push(0, "c", 1, seq, seq - 1, encode(-np.sqrt(gain)), 20, 0.5))
        assert told.weights is also.weights  # type: ignore[union-attr] # both are replies
        known += decode(told.weights, 300, np.float32)  # type: ignore[union-attr] # likewise
    (given_,) = server.handle(Join(0, "b", 1))
    np.testing.assert_array_equal(given_.weights, known)  # type: ignore[union-attr] # it is a reply
    assert not np.array_equal(known, server.snapshot().center)


# --- jobs ---


@pytest.mark.parametrize(
    ("strategy", "rule", "word"),
    [("easgd", {}, "moved on"), ("bsp", {"exchange": "asa"}, "peer to peer"), ("layer", None, "maps")],
)
def test_where_changes_make_no_sense_it_is_refused(strategy: str, rule: Any, word: str) -> None:
    tables: dict[str, Any] = {"train": {"strategy": strategy}, "cluster": {"wire": "int8"}}
    with pytest.raises(JobError, match=word) as refused:
        resolve(tables | ({} if rule is None else {"rule": rule}))
    assert str(refused.value).count("cluster.wire") == 1


@pytest.mark.parametrize("name", TRAVELS)
def test_other_strategies_take_it(name: str) -> None:
    assert resolve({"train": {"strategy": name, "epochs": 2}, "cluster": {"wire": "int8"}}).cluster.maps == "float16"
