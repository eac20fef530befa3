"""The laws of every update rule, found from the registry, and the formulas of each."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from daskcnn.ps import (
    RULES,
    AccuracyWeighted,
    Action,
    Join,
    Local,
    ParameterServer,
    Push,
    Reply,
    UpdateRule,
    Vector,
    View,
)
from daskcnn.ps.bases import Bases
from daskcnn.ps.vectors import add_scaled, all_finite, weighted_sum

every = pytest.mark.parametrize("name", RULES)
accuracies = st.lists(st.floats(0, 1), min_size=1, max_size=6)


def push(worker: str, payload: Vector, *, accuracy: float = 0.5, base: int = 0, seq: int = 1) -> Push:
    return Push(0, worker, 1, seq, base, payload, 10, accuracy)


def view(version: int, bases: dict[str, int]) -> View:
    known = Bases()
    for worker, base in bases.items():
        known.set(worker, base)
    return View(version, len(bases), known)


def vectors(count: int, size: int = 7, dtype: str = "float32") -> list[Vector]:
    return list(np.random.default_rng(count).standard_normal((count, size)).astype(dtype))


def gamma(rule: UpdateRule, version: int, base: int, others: dict[str, int]) -> float:
    merge = rule.merge(np.zeros(1), {}, [push("me", np.ones(1), base=base)], view(version, {"me": base, **others}))
    return merge.gamma["me"]


# --- every rule ---


@every
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_merge_changes_no_input_and_keeps_the_dtype(name: str, dtype: str) -> None:
    rule, (center, *payloads) = RULES[name](), vectors(4, dtype=dtype)
    center.flags.writeable = False
    pushes = [push(f"w{i}", p) for i, p in enumerate(payloads)][: 3 if rule.barrier else 1]
    copies = [p.payload.copy() for p in pushes]
    merge = rule.merge(center, rule.init(center), pushes, view(3, {"w0": 0, "w1": 1, "w2": 2}))
    assert merge.center.dtype == center.dtype
    assert merge.center.shape == center.shape
    for each, copy in zip(pushes, copies, strict=True):
        np.testing.assert_array_equal(each.payload, copy)
        assert not np.shares_memory(merge.center, each.payload)
    assert not np.shares_memory(merge.center, center)


@every
@given(qualities=accuracies)
def test_a_barrier_s_merge_does_not_depend_on_who_came_first(name: str, qualities: list[float]) -> None:
    if not RULES[name].barrier:
        return
    pushes = [
        push(f"w{i}", v, accuracy=q) for i, (v, q) in enumerate(zip(vectors(len(qualities)), qualities, strict=True))
    ]
    centers = set()
    for order in list(permutations(pushes))[:24]:
        server = ParameterServer(RULES[name](), np.zeros(7, "float32"))
        for each in pushes:
            server.handle(Join(0, each.worker, 1))
        for each in order:
            replies = server.handle(each)
        assert [r.worker for r in replies] == sorted(p.worker for p in pushes)
        centers.add(server.snapshot().center.tobytes())
    assert len(centers) == 1


@every
def test_a_parabola_converges(name: str) -> None:
    """Three replicas, each with its own noise-free quadratic around the same minimum, and its own speed."""
    rule = RULES[name]()
    minimum, server, locals_ = np.array([3.0, -2.0]), ParameterServer(rule, np.zeros(2)), {}
    for worker in ("a", "b", "c"):
        (reply,) = server.handle(Join(0, worker, 1))
        locals_[worker] = Local(reply.weights.copy(), reply.weights, reply.version)
    for seq in range(1, 200):
        for curvature, (worker, local) in enumerate(locals_.items(), 1):
            local.weights -= 0.2 * rule.local_step(curvature * (local.weights - minimum), local)
            event = Push(0, worker, 1, seq, local.base_version, rule.payload(local), 5, 0.5)
            for each in server.handle(event):
                assert isinstance(each, Reply)
                rule.adopt(locals_[each.worker], each.weights, each.version)
    np.testing.assert_allclose(server.snapshot().center, minimum, rtol=1e-6)


@every
def test_adopting_leaves_the_replica_its_own_memory(name: str) -> None:
    rule, (weights, center) = RULES[name](), vectors(2)
    local = Local(weights.copy(), weights)
    rule.adopt(local, center, 4)
    local.weights += 1
    np.testing.assert_array_equal(local.base, center)
    assert not np.shares_memory(local.weights, center)
    assert local.base_version == 4


@every
def test_pushes_are_due_at_the_round_s_end(name: str) -> None:
    rule = RULES[name]()
    assert rule.due(17, round_end=True) == {Action.PUSH}
    assert rule.due(17, round_end=False) == frozenset()


@every
def test_unknown_parameters_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        RULES[name](no_such_parameter=1)


@every
def test_rules_do_not_change(name: str) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RULES[name]().anything = 1


@every
def test_where_q_is_measured_is_checked(name: str) -> None:
    if issubclass(RULES[name], AccuracyWeighted):
        assert RULES[name](accuracy_on="train").accuracy_on == "train"
        with pytest.raises(ValidationError, match="accuracy_on"):
            RULES[name](accuracy_on="test")


# --- sgwu ---


@given(st.integers(1, 6), st.floats(1e-3, 1))
def test_equal_accuracy_makes_sgwu_the_mean(count: int, quality: float) -> None:
    payloads = vectors(count, dtype="float64")
    pushes = [push(f"w{i}", v, accuracy=quality) for i, v in enumerate(payloads)]
    merge = RULES["sgwu"]().merge(np.zeros(7), {}, pushes, view(0, {}))
    np.testing.assert_allclose(merge.center, np.mean(payloads, axis=0), rtol=1e-12, atol=1e-14)


def test_sgwu_is_the_mean_where_every_accuracy_is_zero() -> None:
    pushes = [push(f"w{i}", v, accuracy=0.0) for i, v in enumerate(vectors(3, dtype="float64"))]
    merge = RULES["sgwu"]().merge(np.zeros(7), {}, pushes, view(0, {}))
    np.testing.assert_allclose(merge.center, np.mean([p.payload for p in pushes], axis=0), rtol=1e-14)


def test_sgwu_weighs_by_accuracy() -> None:
    pushes = [push("a", np.array([1.0, 0.0]), accuracy=0.9), push("b", np.array([0.0, 1.0]), accuracy=0.3)]
    np.testing.assert_allclose(RULES["sgwu"]().merge(np.zeros(2), {}, pushes, view(0, {})).center, [0.75, 0.25])


def test_sgwu_of_one_worker_is_plain_sgd_bit_for_bit() -> None:
    rule, (start, gradient) = RULES["sgwu"](), vectors(2)
    server, alone = ParameterServer(rule, start), start.copy()
    (reply,) = server.handle(Join(0, "w", 1))
    local = Local(reply.weights.copy(), reply.weights)
    for seq in range(1, 6):
        for weights in (alone, local.weights):
            weights -= np.float32(0.1) * gradient * weights
        (reply,) = server.handle(push("w", rule.payload(local), accuracy=0.37, seq=seq, base=seq - 1))
        rule.adopt(local, reply.weights, reply.version)
    assert server.snapshot().center.tobytes() == alone.tobytes()


# --- agwu ---

attenuations = pytest.mark.parametrize("attenuation", ["paper", "staleness"])


@attenuations
@given(st.integers(1, 10**6), st.data())
def test_an_older_base_counts_less(attenuation: str, version: int, data: st.DataObject) -> None:
    rule = RULES["agwu"](attenuation=attenuation)
    bases = st.integers(0, version)
    others = {f"w{i}": b for i, b in enumerate(data.draw(st.lists(bases, min_size=1, max_size=8)))}
    older, newer = sorted(data.draw(st.tuples(bases, bases)))
    a, b = gamma(rule, version, older, others), gamma(rule, version, newer, others)
    assert 0 <= a <= b <= 1
    far = (newer - older) / (version if attenuation == "paper" else len(others) + 1)
    if far > 1e-6 and 1e-200 < a < b < 1:
        assert b > a
        assert math.log(b / a) == pytest.approx(far, rel=1e-6)  # γ ∝ e^(k/v) or e^(k/m)


@attenuations
@pytest.mark.parametrize("version", [0, 1, 1000])
@pytest.mark.parametrize("workers", [2, 3, 10])
def test_of_m_current_workers_each_counts_one_by_m_minus_one(attenuation: str, version: int, workers: int) -> None:
    others = {f"w{i}": version for i in range(workers - 1)}
    assert gamma(RULES["agwu"](attenuation=attenuation), version, version, others) == 1 / (workers - 1)


@attenuations
def test_a_worker_alone_counts_in_full(attenuation: str) -> None:
    assert gamma(RULES["agwu"](attenuation=attenuation), 7, 3, {}) == 1.0


def test_the_paper_s_formula() -> None:
    """Eq. 9 as printed: v = 10, own base 4, the others' 10 and 7."""
    expected = math.exp(0.4) / (math.exp(1.0) + math.exp(0.7))
    assert gamma(RULES["agwu"](), 10, 4, {"a": 10, "b": 7}) == pytest.approx(expected, rel=1e-14)


def test_the_staleness_formula() -> None:
    expected = math.exp(-6 / 3) / (math.exp(0) + math.exp(-3 / 3))
    assert gamma(RULES["agwu"](attenuation="staleness"), 10, 4, {"a": 10, "b": 7}) == pytest.approx(expected, rel=1e-14)


def test_only_staleness_attenuates_late_in_the_run() -> None:
    others = {"a": 100_000, "b": 100_000}
    assert gamma(RULES["agwu"](), 100_000, 99_997, others) == pytest.approx(0.5, rel=1e-4)
    assert gamma(RULES["agwu"](attenuation="staleness"), 100_000, 99_997, others) == pytest.approx(0.5 / math.e)


@attenuations
def test_beside_a_stale_peer_it_is_capped(attenuation: str) -> None:
    """Uncapped it would be e, or e^(v/2)."""
    assert gamma(RULES["agwu"](attenuation=attenuation), 10**9, 10**9, {"a": 0}) == 1.0


def test_age_beyond_all_exponents_counts_nothing() -> None:
    assert gamma(RULES["agwu"](attenuation="staleness"), 10**9, 0, {"a": 10**9}) < 1e-200


def test_accuracy_scales_the_increment_from_its_floor() -> None:
    event = push("w", np.ones(2), accuracy=0.1)
    for floor, step in ((0.0, 0.1), (0.6, 0.6)):
        rule = RULES["agwu"](accuracy_floor=floor)
        np.testing.assert_allclose(rule.merge(np.full(2, 5.0), {}, [event], view(0, {"w": 0})).center, 5 + step)


@pytest.mark.parametrize("floor", [-0.1, 1.1, math.nan])
def test_the_floor_lies_between_0_and_1(floor: float) -> None:
    with pytest.raises(ValidationError, match="accuracy_floor"):
        RULES["agwu"](accuracy_floor=floor)


def test_agwu_pushes_the_increment() -> None:
    weights, base = vectors(2)
    np.testing.assert_array_equal(RULES["agwu"]().payload(Local(weights, base)), weights - base)


# --- what they are made of ---


def test_sums_of_vectors_longer_than_a_block() -> None:
    a, b = np.random.default_rng(0).standard_normal((2, 100_003)).astype("float32")
    exact = 0.3 * a.astype("float64") + 0.7 * b.astype("float64")
    np.testing.assert_array_equal(weighted_sum([a, b], [0.3, 0.7]), exact.astype("float32"))
    np.testing.assert_allclose(add_scaled(a, 0.7, b), a + 0.7 * b, rtol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_value_is_found(bad: float) -> None:
    vector = np.zeros(70_000, "float32")
    assert all_finite(vector)
    vector[-1] = bad
    assert not all_finite(vector)


def test_large_values_are_finite_though_their_sum_is_not() -> None:
    assert all_finite(np.full(4, np.finfo("float32").max, "float32"))


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 9) | st.none()), max_size=40))
def test_bases_are_a_dictionary(changes: list[tuple[str, int | None]]) -> None:
    bases, expected = Bases(), dict[str, int]()
    for worker, version in changes:
        if version is not None:
            bases.set(worker, version)
            expected[worker] = version
        elif worker in expected:
            bases.remove(worker)
            del expected[worker]
        assert bases.as_dict() == expected
        for each in expected:
            others = sorted(v for w, v in expected.items() if w != each)
            assert sorted(bases.others(each)) == others


def test_bases_hold_thousands() -> None:
    bases = Bases()
    for i in range(1000):
        bases.set(f"w{i}", i)
    assert bases.others("w7").sum() == sum(range(1000)) - 7
