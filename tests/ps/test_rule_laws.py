"""The laws of every update rule, found from the registry."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from daskcnn.arrays import NUMPY, Device
from daskcnn.nn import SGD, Optimizer
from daskcnn.nn.optimizers import LARS, AdamW
from daskcnn.ps import (
    RULES,
    AccuracyWeighted,
    Action,
    Asynchronous,
    Join,
    Local,
    ParameterServer,
    Pull,
    Push,
    Reply,
    Snapshot,
    UpdateRule,
    Vector,
)
from daskcnn.ps.admm import ADMM
from daskcnn.ps.vectors import cast
from daskcnn.ps.wire import CODED, Differences, Feedback, Wire, problems_with_int8
from tests.ps.driving import (
    MOMENTUM,
    Cluster,
    Replica,
    alone,
    every_optimizer,
    every_variant,
    parabola,
    push,
    rule_of,
    trained,
    vectors,
    view,
)
from tests.standin import elsewhere

every = pytest.mark.parametrize("name", RULES)
accuracies = st.lists(st.floats(0, 1), min_size=1, max_size=6)
few = settings(max_examples=10)  # of each variant
turns = st.lists(st.integers(0, 5), max_size=12)


# --- every rule ---


def gained(rule: UpdateRule, wire: str, *, gain: float = 1e-5, meetings: int = 200) -> Vector:
    """What the center gains where each of two replicas gains this between two meetings.

    Where replicas go their own way, what they and the center have gained together.
    """
    start, way = np.array([1.0, 0.05, -0.5], np.float32), Wire.of(wire, rule)
    server, replicas, ways = ParameterServer(rule, start, wire=wire), dict[str, Local](), dict[str, Any]()

    def travelled(vector: Vector) -> Vector:
        return vector.copy() if vector.dtype == CODED else cast(cast(vector, way.whole), "float32").copy()

    def told(request: Join | Push | Pull) -> list[Reply]:
        return [each for each in server.handle(request) if isinstance(each, Reply)]

    for name in "ab":
        (reply,) = told(Join(0, name, 1))
        local = replicas[name] = Local(start.copy(), start)
        rule.begin(local, travelled(reply.weights), reply.version)
        ways[name] = Feedback(rule) if way.coded else Differences(rule) if way.differences else rule
    for seq in range(1, meetings + 1):
        for name, local in replicas.items():
            local.weights += np.float32(gain)
            pushed = travelled(ways[name].pushed(local))
            for each in told(Push(0, name, 1, seq, local.base_version, pushed, 10, 1.0)):
                ways[each.worker].adopt(replicas[each.worker], travelled(each.weights), each.version)
            if rule.answers == "nothing":
                (reply,) = told(Pull(0, name, 1))
                rule.pulled(local, travelled(reply.weights), reply.version)
    found = server.snapshot().center - start
    if rule.answers == "difference":
        found += sum(local.weights - local.base for local in replicas.values())
    return found


@every_variant
@pytest.mark.parametrize("wire", ["float16", "int8"])
def test_gains_that_are_small_beside_the_weights_reach_the_center(rule: UpdateRule, wire: str) -> None:
    """A gain of 1e-5 is a fiftieth of a unit of a float16 near 1: replicas that sent weights never came on."""
    name = next(name for name, kind in RULES.items() if type(rule) is kind)
    if wire == "float16" or not list(problems_with_int8(rule, name)):
        np.testing.assert_allclose(gained(rule, wire), gained(rule, "float32"), rtol=0.1)


@every
def test_replicas_that_have_gained_nothing_leave_the_center_as_it_is(name: str) -> None:
    """In float16 they are given a rounded center, as they join at first, late, or after a resume."""
    rule, center = RULES[name](), np.random.default_rng(0).normal(size=1000).astype(np.float32)
    if not rule.barrier:
        return
    arithmetic, server = Differences(rule) if Wire.of("float16", rule).differences else rule, None

    def pushes(found: Iterable[Any], seq: int) -> list[Push]:
        """Each replica's push of what it was given."""
        made = []
        for reply in found:
            given_ = cast(cast(reply.weights, "float16"), "float32")
            pushed = cast(cast(arithmetic.pushed(Local(given_.copy(), given_)), "float16"), "float32")
            made.append(Push(life, reply.worker, 1, seq, reply.version, pushed, 10, 0.5))
        return made

    for life in range(2):
        server = ParameterServer.restore(
            rule, server.snapshot() if server else Snapshot(center), life=life, wire="float16"
        )
        first, second = pushes([each for name in "ab" for each in server.handle(Join(life, name, 1))], 1)
        assert server.handle(first) == server.handle(Join(life, "late", 1)) == []
        *others, late = server.handle(second)
        again = [each for push in [*pushes(others, 2), *pushes([late], 1)] for each in server.handle(push)]
        assert len(again) == 3
        np.testing.assert_allclose(server.snapshot().center, center, rtol=3e-7)


@every_variant
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_merge_changes_no_input_and_keeps_the_dtype(rule: UpdateRule, dtype: str) -> None:
    center, *payloads = vectors(4, dtype=dtype)
    state = {name: vector + 1 for name, vector in rule.init(center).items()}
    pushes = [push(f"w{i}", p) for i, p in enumerate(payloads)][: 3 if rule.barrier else 1]
    inputs = [center, *state.values(), *(p.payload for p in pushes)]
    copies = [vector.copy() for vector in inputs]
    for vector in inputs:
        vector.flags.writeable = False
    merge = rule.merge(center, state, pushes, view(3, {"w0": 0, "w1": 1, "w2": 2}))
    assert (merge.center.dtype, merge.center.shape) == (center.dtype, center.shape)
    assert {(v.dtype, v.shape) for v in merge.state.values()} <= {(center.dtype, center.shape)}
    for vector, copy in zip(inputs, copies, strict=True):
        np.testing.assert_array_equal(vector, copy)
        assert not any(np.shares_memory(vector, new) for new in (merge.center, *(merge.replies or {}).values()))


@every_variant
@few
@given(qualities=accuracies)
def test_a_barrier_s_merge_does_not_depend_on_who_came_first(rule: UpdateRule, qualities: list[float]) -> None:
    if not rule.barrier:
        return
    pushes = [
        push(f"w{i}", v, accuracy=q, samples=i + 1)
        for i, (v, q) in enumerate(zip(vectors(len(qualities)), qualities, strict=True))
    ]
    centers = set()
    for order in list(permutations(pushes))[:24]:
        server = ParameterServer(rule, np.zeros(7, "float32"))
        for each in pushes:
            server.handle(Join(0, each.worker, 1))
        for each in order:
            replies = server.handle(each)
        assert [r.worker for r in replies] == sorted(p.worker for p in pushes)
        centers.add(server.snapshot().center.tobytes())
    assert len(centers) == 1


@every_variant
def test_a_parabola_converges(rule: UpdateRule) -> None:
    """Three replicas, each with its own noise-free parabola around the same minimum, and its own curvature."""
    if rule == RULES["admm"]():  # its dual variables forget the beginning by about ρ/curvature a round
        rule = rule_of("admm", rho=1.0)
    minimum = [3.0, -2.0]
    gradients = [parabola(curvature, minimum) for curvature in (1.0, 2.0, 3.0)]
    for late in (0, 2) if rule.overlaps else (0,):
        # Downpour adds up the steps of all replicas, so that a higher rate is too much for it
        cluster, _ = trained(rule, np.zeros(2), gradients, rounds=200, steps=4, lr=0.03, late=late)
        np.testing.assert_allclose(cluster.server.snapshot().center, minimum, rtol=1e-6)


@every_variant
@few
@given(turns=turns, steps=st.integers(1, 4), rounds=st.integers(1, 3), late=st.integers(0, 3))
def test_in_any_order_all_come_to_the_end_with_what_they_trained_counted(
    rule: UpdateRule, turns: list[int], steps: int, rounds: int, late: int
) -> None:
    gradients = [parabola(1.0, [i, -1.0]) for i in range(3)]
    cluster, replicas = trained(rule, np.zeros(2), gradients, turns=turns, rounds=rounds, steps=steps, late=late)
    pushes = [event for event in cluster.events if isinstance(event, Push)]
    assert cluster.server.snapshot().merged == len(pushes) >= 3 * rounds
    assert all(len(replica.trained) == rounds * steps for replica in replicas)
    assert not any(cluster.server.snapshot().refused.values())


@every_variant
@every_optimizer
def test_every_optimizer_comes_near_the_minimum_that_replicas_share(rule: UpdateRule, optimizer: Optimizer) -> None:
    """By less than half of the way where its steps are as short as LARS's are."""
    optimizer = replace(optimizer, trust=0.05) if isinstance(optimizer, LARS) else optimizer
    start, minimum = np.array([3.0, -2.0]), np.array([1.0, 2.0])
    gradients = [parabola(1.0, [1.0, 2.0]), parabola(2.0, [1.0, 2.0])]
    cluster, replicas = trained(rule, start, gradients, rounds=30, steps=4, lr=0.03, optimizer=optimizer, accuracy=1.0)
    reached = cluster.server.snapshot().center
    assert np.linalg.norm(reached - minimum) < 0.5 * np.linalg.norm(start - minimum)
    assert [replica.state.count for replica in replicas] == [120, 120]


@every_variant
@pytest.mark.parametrize("optimizer", [SGD(0.9), AdamW()])
def test_no_rule_changes_an_optimizer_s_state(rule: UpdateRule, optimizer: Optimizer) -> None:
    """Moments are of the gradients that a replica goes by, and of nothing that comes from others."""
    seen: list[Vector] = []

    def gradient(weights: Vector) -> Vector:
        seen.append(np.array([1.0, -0.5 * (len(seen) + 1)]))
        return seen[-1].copy()

    if isinstance(rule, ADMM):
        rule = rule.model_copy(update={"rho": 0.0})  # else it changes the gradients, by the weights
    others = [parabola(1.0, [i, 1.0]) for i in range(2)]
    _, (replica, *_) = trained(rule, np.ones(2), [gradient, *others], rounds=3, steps=3, optimizer=optimizer)
    state = optimizer.init(np.ones(2))
    for each in seen:
        state = optimizer.step(np.ones(2), each, state, 0.1, Device())
    np.testing.assert_array_equal(replica.state.vectors, state.vectors)
    assert replica.state.count == 9
    assert state.vectors.any()


@every_variant
@few
@given(turns=turns)
def test_the_recorded_events_give_the_same_centers_bit_for_bit(rule: UpdateRule, turns: list[int]) -> None:
    start = np.random.default_rng(0).standard_normal(5).astype("float32")
    gradients = [parabola(i + 0.3, [i, -1.0, 0.1, 7.0, i / 3]) for i in range(3)]
    cluster, _ = trained(rule, start, gradients, turns=turns, rounds=3, steps=4, optimizer=MOMENTUM)
    server = ParameterServer(rule, start)
    centers = [server.snapshot().center]
    for event in cluster.events:
        server.handle(event)
        if server.snapshot().center is not centers[-1]:
            centers.append(server.snapshot().center)
    assert [c.tobytes() for c in centers] == [c.tobytes() for c in cluster.centers]


@every_variant
def test_a_replica_never_shares_memory_with_what_it_is_sent(rule: UpdateRule) -> None:
    weights, center, answer = vectors(3)
    local = Local(weights, weights)
    rule.begin(local, center, 4)
    np.testing.assert_array_equal(local.weights, center)
    assert (local.base_version, local.memory) == (4, {})
    rule.local_step(weights.copy(), local)
    rule.payload(local)
    copies = center.copy(), answer.copy()
    rule.adopt(local, answer, 5)
    local.weights += 1
    rule.local_step(weights.copy(), local)
    for vector, copy in zip((center, answer), copies, strict=True):
        np.testing.assert_array_equal(vector, copy)
        assert not np.shares_memory(local.weights, vector)
        assert not any(np.shares_memory(kept, vector) for kept in local.memory.values())


@every_variant
def test_beginning_again_forgets_what_was_before(rule: UpdateRule) -> None:
    """As a worker does that joins a new server, or a server that has lost it."""
    replica = Replica(rule, "a", parabola(1.0, [2.0, 3.0]), rounds=2, steps=3)
    Cluster(ParameterServer(rule, np.ones(2)), [replica]).run()
    rule.begin(replica.local, np.zeros(2), 7)
    replica.local.weights += 1
    pushed = rule.payload(replica.local)
    fresh = Local(np.empty(2), np.empty(2))
    rule.begin(fresh, np.zeros(2), 7)
    fresh.weights += 1
    np.testing.assert_array_equal(pushed, rule.payload(fresh))


@every_variant
def test_pushes_are_due_every_period_and_at_the_round_s_end(rule: UpdateRule) -> None:
    for step in range(1, 20):
        assert Action.PUSH in rule.due(step, round_end=True)
        assert (Action.PUSH in rule.due(step, round_end=False)) == bool(rule.period and step % rule.period == 0)


@every_variant
def test_who_never_pulls_says_so(rule: UpdateRule) -> None:
    if any(Action.PULL in rule.due(step, round_end=end) for step in range(1, 20) for end in (True, False)):
        assert rule.answers == "nothing"
        return
    with pytest.raises(NotImplementedError, match="never pulls"):
        rule.pulled(Local(np.zeros(1), np.zeros(1)), np.zeros(1), 1)


@every_variant
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_replica_s_side_keeps_the_dtype(rule: UpdateRule, dtype: str) -> None:
    cluster, replicas = trained(rule, np.ones(2, dtype), [parabola(1.0, [1, 2])] * 2, rounds=2, steps=3)
    for replica in replicas:
        local = replica.local
        assert {v.dtype for v in (local.weights, local.base, *local.memory.values())} == {np.dtype(dtype)}
    assert {e.payload.dtype for e in cluster.events if isinstance(e, Push)} == {np.dtype(dtype)}


@every_variant
@every_optimizer
@elsewhere
def test_the_replica_s_side_works_where_the_replica_computes(
    rule: UpdateRule, optimizer: Optimizer, device: Device
) -> None:
    for late in (0, 1):
        centers: list[Vector] = []
        how: dict[str, Any] = {"rounds": 2, "steps": 7, "optimizer": optimizer, "late": late}
        for backend in (NUMPY, device.backend):
            replicas = [Replica(rule, f"w{i}", lambda w: 0.5 * (w - 2.0), backend=backend, **how) for i in range(2)]
            cluster = Cluster(ParameterServer(rule, np.array([3.0, -1.0])), replicas)
            cluster.run()
            centers.append(cluster.server.snapshot().center)
        here, there = centers
        np.testing.assert_allclose(here, there, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("bsp", {"every": every}) for every in (1, 3, 0)),
        ("sgwu", {}),
        ("parallel-sgd", {}),
        ("admm", {"rho": 0.0}),
        ("admm", {"rho": 0.0, "every": 1, "from_center": True}),
    ],
)
@every_optimizer
def test_one_replica_alone_is_its_optimizer_bit_for_bit(
    name: str, options: dict[str, Any], optimizer: Optimizer
) -> None:
    start, minimum = vectors(2)
    rule, gradient = RULES[name](**options), parabola(0.7, list(minimum))
    cluster, _ = trained(rule, start, [gradient], rounds=3, steps=4, optimizer=optimizer, accuracy=0.37)
    assert cluster.server.snapshot().center.tobytes() == alone(start, gradient, 12, optimizer=optimizer).tobytes()


@every_variant
def test_replicas_that_wait_for_others_go_on_meanwhile_only_where_gains_are_pushed(rule: UpdateRule) -> None:
    """Weights that were pushed have the gains before in them, which would be merged twice."""
    waits = rule.barrier or (isinstance(rule, Asynchronous) and rule.max_staleness is not None)
    local = Local(np.full(2, 3.0), np.full(2, 2.0))
    pushes_gains = rule.payload(local).tolist() == [1.0, 1.0]
    assert not (waits and rule.overlaps) or pushes_gains


@every
def test_unknown_parameters_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        RULES[name](no_such_parameter=1)  # type: ignore[call-arg]


@every
def test_rules_do_not_change(name: str) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RULES[name]().anything = 1  # type: ignore[attr-defined]


@every
def test_a_parameter_is_not_taken_for_one_of_another_type(name: str) -> None:
    others: tuple[Any, ...] = ([], "7", math.nan, math.inf)
    for key in RULES[name].model_fields:
        for value in others:
            with pytest.raises(ValidationError, match=key):
                RULES[name](**{key: value})


@every
def test_a_rule_s_defaults_fit_every_run(name: str) -> None:
    rule = RULES[name]()
    for epochs in (1, 2, 7):
        assert list(rule.problems(epochs)) == []
        assert 1 <= rule.passes(epochs) <= epochs


@every
def test_where_q_is_measured_is_checked(name: str) -> None:
    kind = RULES[name]
    if issubclass(kind, AccuracyWeighted):
        assert kind(accuracy_on="train").accuracy_on == "train"
        with pytest.raises(ValidationError, match="accuracy_on"):
            kind(accuracy_on="test")  # type: ignore[arg-type]


# --- bounded staleness ---


@pytest.mark.parametrize("name", [name for name in RULES if issubclass(RULES[name], Asynchronous)])
@given(turns=turns, bound=st.integers(0, 3))
def test_nobody_s_push_is_merged_while_it_is_further_ahead_than_allowed(
    name: str, turns: list[int], bound: int
) -> None:
    gradients = [parabola(1.0, [i]) for i in range(4)]
    cluster, replicas = trained(rule_of(name, max_staleness=bound), np.zeros(1), gradients, turns=turns, rounds=6)
    merged = {replica.worker: 0 for replica in replicas}
    for reply in cluster.replies:
        if reply.n_samples:  # of a push
            assert merged[reply.worker] - min(merged.values()) <= bound
            merged[reply.worker] += 1
    assert set(merged.values()) == {6}


@given(turns=turns)
def test_no_staleness_at_all_is_lockstep(turns: list[int]) -> None:
    gradients = [parabola(1.0, [i]) for i in range(3)]
    cluster, _ = trained(rule_of("agwu", max_staleness=0), np.zeros(1), gradients, turns=turns, rounds=5)
    pushers = [reply.worker for reply in cluster.replies if reply.n_samples]
    assert [set(pushers[i : i + 3]) for i in range(0, 15, 3)] == [{"w0", "w1", "w2"}] * 5


def test_without_a_bound_one_may_end_before_the_others_begin() -> None:
    gradients = [parabola(1.0, [i]) for i in range(3)]
    cluster, _ = trained(RULES["agwu"](), np.zeros(1), gradients, turns=[-1], rounds=5)
    assert [reply.worker for reply in cluster.replies if reply.n_samples] == ["w2"] * 5 + ["w1"] * 5 + ["w0"] * 5
