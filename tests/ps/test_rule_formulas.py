"""What each rule computes: the papers' formulas, and what follows from them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from daskcnn.nn import SGD
from daskcnn.ps import RULES, Join, Local, ParameterServer, Push, UpdateRule, Vector
from daskcnn.ps.local_sgd import GROWS, steps_between
from daskcnn.ps.messages import PAST
from daskcnn.ps.server import CenterRange
from daskcnn.ps.split import joined_snapshot, spans, split_snapshot
from tests.ps.driving import MOMENTUM, Cluster, Replica, alone, parabola, push, rule_of, trained, vectors, view


def gamma(rule: UpdateRule, version: int, base: int, others: dict[str, int]) -> float:
    merge = rule.merge(np.zeros(1), {}, [push("me", np.ones(1), base=base)], view(version, {"me": base, **others}))
    return merge.gamma["me"]


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


# --- agwu ---

attenuations = pytest.mark.parametrize("attenuation", ["paper", "staleness"])


@attenuations
@given(st.integers(1, 10**6), st.data())
def test_an_older_base_counts_less(attenuation: str, version: int, data: st.DataObject) -> None:
    rule = rule_of("agwu", attenuation=attenuation)
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
    assert gamma(rule_of("agwu", attenuation=attenuation), version, version, others) == 1 / (workers - 1)


@attenuations
def test_a_worker_alone_counts_in_full(attenuation: str) -> None:
    assert gamma(rule_of("agwu", attenuation=attenuation), 7, 3, {}) == 1.0


def test_the_paper_s_formula() -> None:
    """Eq. 9 as printed: v = 10, own base 4, the others' 10 and 7."""
    expected = math.exp(0.4) / (math.exp(1.0) + math.exp(0.7))
    assert gamma(RULES["agwu"](), 10, 4, {"a": 10, "b": 7}) == pytest.approx(expected, rel=1e-14)


def test_the_staleness_formula() -> None:
    expected = math.exp(-6 / 3) / (math.exp(0) + math.exp(-3 / 3))
    assert gamma(rule_of("agwu", attenuation="staleness"), 10, 4, {"a": 10, "b": 7}) == pytest.approx(
        expected, rel=1e-14
    )


def test_only_staleness_attenuates_late_in_the_run() -> None:
    others = {"a": 100_000, "b": 100_000}
    assert gamma(RULES["agwu"](), 100_000, 99_997, others) == pytest.approx(0.5, rel=1e-4)
    assert gamma(rule_of("agwu", attenuation="staleness"), 100_000, 99_997, others) == pytest.approx(0.5 / math.e)


@attenuations
def test_beside_a_stale_peer_it_is_capped(attenuation: str) -> None:
    """Uncapped it would be e, or e^(v/2)."""
    assert gamma(rule_of("agwu", attenuation=attenuation), 10**9, 10**9, {"a": 0}) == 1.0


@given(st.integers(1, 10**6), st.lists(st.integers(0, 10**6), min_size=1, max_size=6), st.data())
def test_uncapped_it_is_eq_9_and_the_cap_binds_with_two_or_three_workers_only(
    version: int, bases: list[int], data: st.DataObject
) -> None:
    own, others = data.draw(st.integers(0, version)), {f"w{i}": min(b, version) for i, b in enumerate(bases)}
    literal = math.exp(own / version) / sum(math.exp(b / version) for b in others.values())
    uncapped, capped = (
        gamma(rule_of("agwu", attenuation=name), version, own, others) for name in ("paper-uncapped", "paper")
    )
    assert uncapped == pytest.approx(literal, rel=1e-12)
    assert capped == min(uncapped, 1.0)
    assert len(others) + 1 < 4 or capped == uncapped
    assert gamma(rule_of("agwu", attenuation="paper-uncapped"), 9, 9, {"a": 0}) == pytest.approx(math.e)


def test_age_beyond_all_exponents_counts_nothing() -> None:
    assert gamma(rule_of("agwu", attenuation="staleness"), 10**9, 0, {"a": 10**9}) < 1e-200


def test_accuracy_scales_the_increment_from_its_floor() -> None:
    event = push("w", np.ones(2), accuracy=0.1)
    for floor, step in ((0.0, 0.1), (0.6, 0.6)):
        rule = rule_of("agwu", accuracy_floor=floor)
        np.testing.assert_allclose(rule.merge(np.full(2, 5.0), {}, [event], view(0, {"w": 0})).center, 5 + step)


@pytest.mark.parametrize("floor", [-0.1, 1.1, math.nan])
def test_the_floor_lies_between_0_and_1(floor: float) -> None:
    with pytest.raises(ValidationError, match="accuracy_floor"):
        rule_of("agwu", accuracy_floor=floor)


def test_agwu_pushes_the_increment() -> None:
    weights, base = vectors(2)
    np.testing.assert_array_equal(RULES["agwu"]().payload(Local(weights, base)), weights - base)


# --- bsp ---


def _bsp(rule: UpdateRule, sgd: SGD, counts: tuple[int, ...] = (10, 20, 5)) -> Vector:
    """The center after training on parabolas of different minima, with minibatches of these sizes."""
    gradients = [parabola(c, [m, 1.0]) for c, m in zip((0.5, 1.0, 2.0), (1.0, -1.0, 4.0), strict=True)]
    lr = 0.05 * rule.rate(len(gradients))
    replicas = [
        Replica(rule, f"w{i}", gradient, rounds=2, steps=5, lr=lr, optimizer=sgd, samples=count)
        for i, (gradient, count) in enumerate(zip(gradients, counts, strict=True))
    ]
    cluster = Cluster(ParameterServer(rule, np.array([3.0, -2.0])), replicas)
    cluster.run()
    return cluster.server.snapshot().center


sgds = pytest.mark.parametrize("sgd", [SGD(), SGD(0.9), SGD(0.9, True), SGD(0.0, False, 0.1), SGD(0.9, True, 0.1)])


@sgds
def test_bsp_s_mean_of_weights_agrees_with_the_sum_of_updates_that_carry_momentum_and_decay(sgd: SGD) -> None:
    average, total = (_bsp(rule_of("bsp", combine=combine), sgd) for combine in ("average", "sum"))
    np.testing.assert_allclose(average, total, rtol=1e-12)


@sgds
def test_bsp_s_mean_disagrees_with_a_sum_that_leaves_momentum_and_decay_out(sgd: SGD) -> None:
    """What is added up then is -lr·gradient, whatever the replicas' optimizers are."""
    bare, carried = _bsp(rule_of("bsp", combine="sum"), SGD()), _bsp(RULES["bsp"](), sgd)
    assert np.allclose(bare, carried, rtol=1e-12) == (sgd == SGD())
    if sgd != SGD():
        assert np.abs(bare - carried).max() > 0.01


@pytest.mark.parametrize("combine", ["average", "sum"])
def test_shared_steps_of_bsp_are_those_of_one_machine_at_its_own_rate(combine: str) -> None:
    rule, sgd = rule_of("bsp", combine=combine), SGD(0.9, True, 0.1)
    gradients = [parabola(c, [m, 1.0]) for c, m in ((0.5, 1.0), (1.0, -1.0), (2.0, 4.0))]

    def mean(weights: Vector) -> Vector:
        return sum((n * g(weights) for n, g in zip((10, 20, 5), gradients, strict=True)), np.zeros(2)) / 35

    expected = alone(np.array([3.0, -2.0]), mean, 10, lr=0.05, optimizer=sgd)
    np.testing.assert_allclose(_bsp(rule, sgd), expected, rtol=1e-12)


@pytest.mark.parametrize("combine", ["average", "sum"])
def test_unequal_minibatches_of_bsp_make_the_gradient_of_all_samples(combine: str) -> None:
    """The mean of all 35 samples' gradients, with a rate multiplied by the number of replicas."""
    rule, sgd = rule_of("bsp", combine=combine, batch="worker"), SGD(0.9, True, 0.1)
    gradients = [parabola(c, [m, 1.0]) for c, m in ((0.5, 1.0), (1.0, -1.0), (2.0, 4.0))]

    def mean(weights: Vector) -> Vector:
        return sum((n * g(weights) for n, g in zip((10, 20, 5), gradients, strict=True)), np.zeros(2)) / 35

    np.testing.assert_allclose(
        _bsp(rule, sgd), alone(np.array([3.0, -2.0]), mean, 10, lr=0.15, optimizer=sgd), rtol=1e-12
    )


def test_between_two_meetings_bsp_s_replicas_go_their_own_ways() -> None:
    rule = rule_of("bsp", every=3)
    cluster, replicas = trained(rule, np.zeros(1), [parabola(1.0, [1.0]), parabola(1.0, [3.0])], steps=6)
    assert len(cluster.centers) == 3
    expected = np.mean([alone(np.zeros(1), r.gradient, 3) for r in replicas], axis=0)
    np.testing.assert_allclose(cluster.centers[1], expected, rtol=1e-14)
    for replica in replicas:
        np.testing.assert_array_equal(replica.local.weights, cluster.centers[2])


def test_only_means_of_bsp_s_minibatches_a_worker_scale_the_rate() -> None:
    combines = ("gradients", "average", "sum")
    assert [rule_of("bsp", combine=combine, batch="worker").rate(8) for combine in combines] == [8.0, 8.0, 1.0]
    assert [rule_of("bsp", combine=combine).rate(8) for combine in combines] == [1.0, 1.0, 1.0]
    assert rule_of("bsp", every=4).rate(8) == 8.0
    assert {RULES[name]().rate(8) for name in RULES if name != "bsp"} == {1.0}


# --- easgd ---


@given(
    st.floats(0.01, 1.0),
    st.lists(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=2), min_size=2, max_size=5),
)
def test_easgd_s_exchange_conserves_the_sum_of_replica_and_center(alpha: float, points: list[list[float]]) -> None:
    rule, (center, *replicas) = rule_of("easgd", alpha=alpha), (np.array(p) for p in points)
    for x in replicas:
        local = Local(x.copy(), x)
        merge = rule.merge(center, {}, [push("w", rule.payload(local))], view(0, {"w": 0}))
        assert merge.replies is not None
        rule.adopt(local, merge.replies["w"], 1)
        np.testing.assert_allclose(local.weights + merge.center, x + center, rtol=0, atol=1e-12)
        np.testing.assert_allclose(merge.center, center + alpha * (x - center), rtol=0, atol=1e-12)
        center = merge.center


@given(st.floats(0.01, 1.0), st.integers(1, 3), st.integers(0, 3))
def test_easgd_moves_replicas_and_center_together_by_what_was_trained_and_no_more(
    alpha: float, tau: int, late: int
) -> None:
    rule, start = rule_of("easgd", alpha=alpha, tau=tau), np.array([3.0, 2.0])
    cluster, replicas = trained(rule, start, [parabola(1.0, [i, 1.0]) for i in range(3)], rounds=2, steps=5, late=late)
    total = cluster.server.snapshot().center + sum(replica.local.weights for replica in replicas)
    everything = sum(step for replica in replicas for step in replica.trained)
    np.testing.assert_allclose(total, 4 * start + everything, rtol=1e-12)


@pytest.mark.parametrize(("alpha", "rate"), [(0.5, 4 / 3), (0.9, 4 / 11), (1.0, 0.0)])
def test_late_answers_narrow_the_rates_that_easgd_bears(alpha: float, rate: float) -> None:
    """One step for each exchange, which is answered after the next: beyond the bound the distance grows."""
    for factor, grows in ((0.99, False), (1.01, True)):
        eta = rate * factor if rate else 0.01 * grows
        late = np.array([[1 - alpha - eta, alpha], [alpha, 1 - alpha]])  # replica and center, from the minimum
        assert (np.abs(np.linalg.eigvals(late)).max() > 1 + 1e-12) == grows
    assert rule_of("easgd", alpha=alpha).overlaps == (alpha <= 0.5)


def test_an_easgd_replica_keeps_its_own_way() -> None:
    """α = 1 swaps replica and center; a smaller one draws them together and leaves them apart."""
    for alpha, replica, center in ((1.0, 2.0, 6.0), (0.5, 4.0, 4.0), (0.25, 5.0, 3.0)):
        rule, local = rule_of("easgd", alpha=alpha), Local(np.array([6.0]), np.array([0.0]))
        merge = rule.merge(np.array([2.0]), {}, [push("w", rule.payload(local))], view(0, {"w": 0}))
        assert merge.replies is not None
        rule.adopt(local, merge.replies["w"], 9)
        assert (local.weights.item(), merge.center.item(), local.base_version) == (replica, center, 9)


# --- downpour ---

cadences = given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 7), st.integers(1, 3))


@cadences
def test_downpour_pushes_every_n_push_and_pulls_every_n_fetch(
    n_push: int, n_fetch: int, steps: int, rounds: int
) -> None:
    rule = rule_of("downpour", n_push=n_push, n_fetch=n_fetch)
    cluster, _ = trained(rule, np.zeros(1), [parabola(1.0, [1.0])], steps=steps, rounds=rounds)
    expected = []
    for step in range(1, steps + 1):
        expected += ["Push"] if step % n_push == 0 or step == steps else []
        expected += ["Pull"] if step % n_fetch == 0 or step == steps else []
    assert [type(event).__name__ for event in cluster.events] == ["Join", *expected * rounds, "Leave"]


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 7), st.integers(1, 3), st.integers(0, 4))
def test_what_downpour_pushes_is_what_was_trained_nothing_lost_or_twice(
    n_push: int, n_fetch: int, steps: int, rounds: int, late: int
) -> None:
    """Also what was trained between a push and a pull, or while they were under way."""
    rule = rule_of("downpour", n_push=n_push, n_fetch=n_fetch)
    gradients = [parabola(0.5, [1.0, 2.0]), parabola(1.5, [-3.0, 2.0])]
    cluster, replicas = trained(rule, np.zeros(2), gradients, steps=steps, rounds=rounds, optimizer=MOMENTUM, late=late)
    for replica in replicas:
        pushed = [e.payload for e in cluster.events if isinstance(e, Push) and e.worker == replica.worker]
        np.testing.assert_allclose(np.sum(pushed, axis=0), np.sum(replica.trained, axis=0), rtol=0, atol=1e-12)
    everything = np.sum([step for replica in replicas for step in replica.trained], axis=0)
    np.testing.assert_allclose(cluster.server.snapshot().center, everything, rtol=0, atol=1e-12)


def test_a_downpour_replica_goes_on_by_itself_until_it_pulls() -> None:
    rule = rule_of("downpour", n_push=1, n_fetch=4)
    local = Local(np.empty(1), np.empty(1))
    rule.begin(local, np.zeros(1), 3)
    local.weights += 1
    assert rule.payload(local).item() == 1
    rule.adopt(local, np.empty(0), 9)
    assert (local.weights.item(), local.base_version) == (1, 3)  # it trains from what it pulled
    local.weights += 2
    assert rule.payload(local).item() == 2
    rule.pulled(local, np.array([10.0]), 11)
    assert (local.weights.item(), local.base_version) == (10, 11)


def test_downpour_s_adagrad_server_divides_by_the_root_of_the_sum_of_squares() -> None:
    rule = rule_of("downpour", server="adagrad", server_lr=0.1)
    server, center, squares = ParameterServer(rule, np.zeros(3)), np.zeros(3), np.zeros(3)
    server.handle(Join(0, "w", 1))
    for seq, payload in enumerate(vectors(6, 3, "float64"), 1):
        server.handle(push("w", payload, seq=seq))
        squares += payload**2
        center += 0.1 * payload / np.sqrt(squares)
        np.testing.assert_allclose(server.snapshot().center, center, rtol=1e-6)
    np.testing.assert_allclose(server.snapshot().state["squares"], squares, rtol=1e-14)  # type: ignore[index]


def test_a_number_that_never_moved_stays_under_adagrad() -> None:
    server = ParameterServer(rule_of("downpour", server="adagrad"), np.array([5.0, 5.0]))
    server.handle(Join(0, "w", 1))
    server.handle(push("w", np.array([0.0, 1.0])))
    np.testing.assert_allclose(server.snapshot().center, [5.0, 5.001])


def test_a_factor_on_the_replicas_rate_changes_nothing_under_adagrad() -> None:
    rule, centers = rule_of("downpour", server="adagrad", server_lr=0.1), []
    for factor in (1.0, 100.0):
        server = ParameterServer(rule, np.zeros(7))
        server.handle(Join(0, "w", 1))
        for seq, payload in enumerate(vectors(5, dtype="float64"), 1):
            server.handle(push("w", factor * payload, seq=seq))
        centers.append(server.snapshot().center)
    one, other = centers
    np.testing.assert_allclose(one, other, rtol=1e-5)


def test_a_restored_adagrad_server_goes_on_as_if_nothing_had_been() -> None:
    rule = rule_of("downpour", server="adagrad")
    one = ParameterServer(rule, np.zeros(7, "float32"))
    one.handle(Join(0, "w", 1))
    payloads = vectors(8)
    for seq, payload in enumerate(payloads[:4], 1):
        one.handle(push("w", payload, seq=seq))
    other = ParameterServer.restore(rule, one.snapshot(), life=0)
    other.handle(Join(0, "w", 1))
    for seq, payload in enumerate(payloads[4:], 1):
        one.handle(push("w", payload, seq=4 + seq))
        other.handle(push("w", payload, seq=seq))
    assert one.snapshot().center.tobytes() == other.snapshot().center.tobytes()
    assert one.snapshot().state["squares"].tobytes() == other.snapshot().state["squares"].tobytes()  # type: ignore[index]


# --- dc-asgd ---


def test_delay_compensation_is_the_paper_s_update_whatever_the_rate() -> None:
    """Zheng et al., eq. 10 and alg. 2: W - η·(g + λ_t·g²·(W - W_bak)), λ_t = λ/√(mean square of g)."""
    start, (g1, g2, g3) = np.zeros(5), vectors(3, 5, "float64")
    for eta in (0.01, 0.001):
        server = ParameterServer(rule_of("dc-asgd", compensation=0.7, memory=0.6), start)
        for worker in ("a", "b"):
            server.handle(Join(0, worker, 1))
        server.handle(push("a", -eta * g1))
        server.handle(push("a", -eta * g2, seq=2, base=1))
        square = np.zeros(5)
        for g in (g1, g2, g3):
            square = 0.6 * square + 0.4 * g**2
        before = server.snapshot().center
        np.testing.assert_allclose(before, -eta * (g1 + g2), rtol=1e-12)  # nothing was late yet
        server.handle(push("b", -eta * g3))
        expected = before - eta * (g3 + 0.7 / np.sqrt(square) * g3**2 * (before - start))
        np.testing.assert_allclose(server.snapshot().center, expected, rtol=1e-12)


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(0, 4), st.integers(0, 2))
def test_without_compensation_the_center_is_what_was_trained_as_under_downpour(
    turns: list[int], every: int, late: int
) -> None:
    rule = rule_of("dc-asgd", compensation=0.0, every=every)
    gradients = [parabola(c, [c, -1.0]) for c in (0.5, 1.0, 2.0)]
    cluster, replicas = trained(
        rule, np.zeros(2), gradients, turns=turns, rounds=2, steps=3, optimizer=MOMENTUM, late=late
    )
    everything = np.sum([step for replica in replicas for step in replica.trained], axis=0)
    np.testing.assert_allclose(cluster.server.snapshot().center, everything, rtol=0, atol=1e-12)


def test_a_compensation_takes_back_no_more_than_the_center_has_moved() -> None:
    server = ParameterServer(rule_of("dc-asgd"), np.zeros(1))
    for worker in ("a", "b"):
        server.handle(Join(0, worker, 1))
    server.handle(push("a", np.array([4.0])))
    server.handle(push("b", np.array([100.0])))
    assert server.snapshot().center.item() == 100.0


@given(st.lists(st.integers(0, 5), max_size=40))
def test_the_server_keeps_the_centers_that_workers_train_from_and_no_snapshot_does(turns: list[int]) -> None:
    held = CenterRange(RULES["dc-asgd"](), np.zeros(2))
    bases = {f"w{i}": 0 for i in range(6)}
    for version, turn in enumerate(turns):
        worker = f"w{turn}"
        assert held.merge([push(worker, np.ones(2), base=bases[worker])], view(version, bases)) is not None
        bases[worker] = version + 1
        of = {name: vector for name, vector in held._state.items() if name.startswith(PAST)}
        assert {f"{PAST}{base}" for base in bases.values() if base <= version} == of.keys()
        assert held.kept()[1].keys() == {"squares"}


def test_centers_of_workers_that_left_are_forgotten() -> None:
    held, bases = CenterRange(RULES["dc-asgd"](), np.zeros(2)), {f"w{i}": 0 for i in range(9)}
    for version in range(9):
        held.merge([push(f"w{version}", np.ones(2))], view(version, bases))
        bases[f"w{version}"] = version + 1
    held.merge([push("w8", np.ones(2), base=9)], view(9, {"w8": 9}))
    assert held._state.keys() == {"squares"}


# --- admm ---

DISTINCT = [parabola(c, [m, -m]) for c, m in ((0.5, 1.0), (1.0, -1.0), (2.0, 4.0))]
JOINT = (0.5 * 1.0 + 1.0 * -1.0 + 2.0 * 4.0) / 3.5  # the minimum of the three parabolas' sum


def test_admm_without_rho_from_the_center_every_step_is_the_paper_s_pseudo_code() -> None:
    """Alg. 3: fetch the parameters; parameters ← parameters - α·gradient; the server takes the mean of all k."""
    rule = rule_of("admm", rho=0.0, every=1, from_center=True)
    cluster, _ = trained(rule, np.array([3.0, 2.0]), DISTINCT, rounds=2, steps=5)
    parameters = np.array([3.0, 2.0])
    for _ in range(10):
        parameters = sum((parameters - 0.1 * gradient(parameters) for gradient in DISTINCT), np.zeros(2)) / 3
    np.testing.assert_allclose(cluster.server.snapshot().center, parameters, rtol=1e-14)


def test_admm_s_step_follows_the_proximal_term() -> None:
    """The gradient of ρ/2·‖w - z + u‖², which is 0 for what comes behind the parameters."""
    rule = rule_of("admm", rho=0.3)
    local = Local(np.array([1.0, 2.0, 9.0]), np.array([0.5, 5.0, 1.0]))
    assert rule.local_step(np.array([10.0, 10.0]), local).tolist() == [10 + 0.3 * 0.5, 10 + 0.3 * -3.0]
    rule.adopt(local, np.array([0.0, 1.0, 4.0]), 1)  # u = w - z = (1, 1), none for the statistics
    np.testing.assert_allclose(rule.local_step(np.zeros(2), local), [0.3 * (1 + 1), 0.3 * (1 + 1)], rtol=1e-15)
    assert rule.payload(local).tolist() == [2.0, 3.0, 9.0]
    assert local.weights.tolist() == [1.0, 2.0, 9.0]


@given(st.floats(0.01, 2.0), st.integers(0, 4), st.booleans())
def test_admm_s_dual_variables_add_up_to_zero_after_each_merge(rho: float, every: int, again: bool) -> None:
    rule = rule_of("admm", rho=rho, every=every, from_center=again)
    cluster, replicas = trained(rule, np.array([3.0, 2.0]), DISTINCT, rounds=3, steps=5)
    assert len(cluster.centers) > 3
    np.testing.assert_allclose(sum(r.local.memory["dual"] for r in replicas), 0.0, atol=1e-12)
    assert any(np.abs(r.local.memory["dual"]).max() > 1e-3 for r in replicas)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("steps", [1, 10])
def test_admm_finds_the_joint_optimum_of_distinct_parabolas(again: bool, steps: int) -> None:
    """Of which each replica knows its own only."""
    rule = rule_of("admm", rho=1.0, from_center=again)
    cluster, replicas = trained(rule, np.array([3.0, 2.0]), DISTINCT, rounds=400, steps=steps)
    np.testing.assert_allclose(cluster.server.snapshot().center, [JOINT, -JOINT], rtol=1e-6)
    if not again:
        for replica in replicas:
            np.testing.assert_allclose(replica.local.weights, [JOINT, -JOINT], rtol=1e-5)


def test_admm_without_rho_or_center_never_couples_the_replicas() -> None:
    cluster, replicas = trained(rule_of("admm", rho=0.0, every=2), np.array([3.0, 2.0]), DISTINCT, rounds=9, steps=10)
    for replica in replicas:
        expected = alone(np.array([3.0, 2.0]), replica.gradient, 90)
        assert replica.local.weights.tobytes() == expected.tobytes()
    np.testing.assert_allclose(cluster.server.snapshot().center, [4 / 3, -4 / 3], rtol=1e-2)  # the minima's mean


# --- parallel-sgd ---


@pytest.mark.parametrize(
    ("rounds", "epochs", "passes"), [(1, 10, 10), (10, 10, 1), (2, 5, 3), (3, 10, 4), (4, 10, 3), (5, 10, 2), (1, 1, 1)]
)
def test_parallel_sgd_cuts_the_epochs_into_its_rounds(rounds: int, epochs: int, passes: int) -> None:
    rule = rule_of("parallel-sgd", rounds=rounds)
    assert rule.passes(epochs) == passes
    assert -(-epochs // passes) == rounds
    assert list(rule.problems(epochs)) == []


def test_parallel_sgd_has_no_more_rounds_than_passes() -> None:
    (problem,) = rule_of("parallel-sgd", rounds=11).problems(10)
    assert problem == (
        "rule.rounds = 11: a round is at least one pass, and the run has 10; lower it, or raise train.epochs"
    )


def test_parallel_sgd_is_the_mean_of_replicas_that_never_met() -> None:
    cluster, replicas = trained(RULES["parallel-sgd"](), np.array([3.0, 2.0]), DISTINCT, steps=20)
    expected = np.mean([alone(np.array([3.0, 2.0]), r.gradient, 20) for r in replicas], axis=0)
    np.testing.assert_allclose(cluster.server.snapshot().center, expected, rtol=1e-14)
    assert len(cluster.centers) == 2


def test_parallel_sgd_counts_a_replica_by_its_samples_or_all_alike() -> None:
    pushes = [push("a", np.array([1.0, 0.0]), samples=30), push("b", np.array([0.0, 1.0]), samples=10)]
    for rule, center in ((RULES["parallel-sgd"](), [0.75, 0.25]), (rule_of("parallel-sgd", weigh="equal"), [0.5, 0.5])):
        np.testing.assert_allclose(rule.merge(np.zeros(2), {}, pushes, view(0, {})).center, center)


# --- local-sgd ---

NO_MOMENTUM = {"outer_lr": 1.0, "outer_momentum": 0.0}


def _meetings(server: ParameterServer, gains: list[list[Vector]], samples: list[int]) -> Vector:
    """The center behind meetings at which workers a, b, … bring these gains."""
    names = [chr(ord("a") + i) for i in range(len(samples))]
    life, version = server.snapshot().life, server.snapshot().version
    for name in names:
        server.handle(Join(life, name, 1))
    for seq, each in enumerate(gains, 1):
        for name, gain, n in zip(names, each, samples, strict=True):
            server.handle(Push(life, name, 1, seq, version + seq - 1, gain, n, 0.5))
    server.validate()
    assert server.snapshot().version == version + len(gains)
    return server.snapshot().center


@given(samples=st.lists(st.integers(1, 100), min_size=1, max_size=5))
def test_local_sgd_without_momentum_is_the_mean_of_weights_by_samples(samples: list[int]) -> None:
    base, *weights = vectors(len(samples) + 1, dtype="float64")
    server = ParameterServer(rule_of("local-sgd", **NO_MOMENTUM), base)
    center = _meetings(server, [[each - base for each in weights]], samples)
    expected = sum(n * w for n, w in zip(samples, weights, strict=True)) / sum(samples)
    np.testing.assert_allclose(center, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_local_sgd_that_meets_after_every_step_makes_those_of_bsp(decay: float) -> None:
    """By plain SGD, with minibatches of unequal sizes."""
    rule, sgd = rule_of("local-sgd", every=1, **NO_MOMENTUM), SGD(0.0, False, decay)
    np.testing.assert_allclose(_bsp(rule, sgd), _bsp(rule_of("bsp", combine="average"), sgd), rtol=1e-12)


def test_local_sgd_s_outer_step_is_that_of_pytorch_s_nesterov_momentum() -> None:
    """On the gradient -Δ, from a velocity of 0: SGD(lr=η, momentum=μ, nesterov=True)."""
    start, *gains = vectors(6, dtype="float64")
    center = _meetings(
        ParameterServer(rule_of("local-sgd", outer_lr=0.7, outer_momentum=0.9), start),
        [[gain, 3 * gain] for gain in gains],
        [10, 30],
    )
    weights, velocity = start.copy(), np.zeros_like(start)
    for gain in gains:
        gradient = -(gain + 3 * 3 * gain) / 4
        velocity = 0.9 * velocity + gradient
        weights -= 0.7 * (gradient + 0.9 * velocity)
    np.testing.assert_allclose(center, weights, rtol=1e-12)


@given(order=st.permutations(range(4)))
def test_local_sgd_does_not_depend_on_which_worker_is_which(order: list[int]) -> None:
    start, *gains = vectors(5)
    samples = [10, 20, 5, 40]
    one, other = (
        _meetings(ParameterServer(rule_of("local-sgd"), start), [[gains[i] for i in by]] * 3, [samples[i] for i in by])
        for by in (range(4), order)
    )
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("samples", "momentum"), [([7, 7], 0.5), ([5] * 4, 0.75), ([30, 10], 0.375)])
def test_local_sgd_s_usual_momentum_goes_by_the_parts_of_the_samples(samples: list[int], momentum: float) -> None:
    """It has all of it behind the first meetings of a run."""
    start, *gains = vectors(len(samples) + 1, dtype="float64")
    usual, given_ = (
        _meetings(_later(rule_of("local-sgd", **how), start, GROWS), [gains] * 3, samples)
        for how in ({}, {"outer_momentum": momentum})
    )
    np.testing.assert_allclose(usual, given_, rtol=1e-12)


@given(version=st.integers(0, 2 * GROWS))
def test_local_sgd_s_usual_momentum_grows_within_the_first_meetings(version: int) -> None:
    start, velocity, gain = vectors(3, dtype="float64")
    pushes = [push("a", gain, samples=10), push("b", gain, samples=10)]
    merged = rule_of("local-sgd").merge(start, {"velocity": velocity}, pushes, view(version, {}))
    momentum = 0.5 * min(1.0, version / GROWS)
    np.testing.assert_allclose(merged.state["velocity"], momentum * velocity + gain, rtol=1e-12)
    np.testing.assert_allclose(merged.center, start + gain + momentum * merged.state["velocity"], rtol=1e-12)


def _later(rule: UpdateRule, center: Vector, version: int) -> ParameterServer:
    """A server that has merged this often."""
    return ParameterServer.restore(rule, replace(ParameterServer(rule, center).snapshot(), version=version))


@pytest.mark.parametrize("options", [{}, NO_MOMENTUM, {"outer_lr": 0.5, "outer_momentum": 0.9}])
def test_a_replica_that_is_alone_with_local_sgd_makes_its_own_steps(options: dict[str, float]) -> None:
    start, gradient = np.array([3.0, -2.0]), parabola(0.7, [1.0, 4.0])
    cluster, _ = trained(rule_of("local-sgd", **options), start, [gradient], rounds=3, steps=4, optimizer=MOMENTUM)
    expected = alone(start, gradient, 12, optimizer=MOMENTUM)
    np.testing.assert_allclose(cluster.server.snapshot().center, expected, rtol=1e-12)


@pytest.mark.parametrize("parts", [1, 3])
def test_local_sgd_goes_on_from_a_snapshot_as_if_nothing_had_happened(parts: int) -> None:
    """The velocity is kept, also where the center is split and put together again."""
    start, *gains = vectors(7)
    meetings = [[gain, 2 * gain] for gain in gains]
    whole = _meetings(ParameterServer(rule_of("local-sgd"), start), meetings, [10, 30])
    first = ParameterServer(rule_of("local-sgd"), start)
    _meetings(first, meetings[:2], [10, 30])
    kept = first.snapshot()
    kept = joined_snapshot(kept, split_snapshot(kept, spans(len(start), parts)))
    again = ParameterServer.restore(rule_of("local-sgd"), kept)
    assert _meetings(again, meetings[2:], [10, 30]).tobytes() == whole.tobytes()


seconds = st.floats(1e-6, 1e4)


@given(step=seconds, exchange=seconds)
def test_with_auto_a_meeting_takes_its_part_of_the_time_and_is_no_rarer(step: float, exchange: float) -> None:
    steps = steps_between(step, exchange, 0.05)
    assert exchange <= 0.05 * (exchange + steps * step) * (1 + 1e-9)
    assert steps == 1 or exchange > 0.05 * (exchange + (steps - 1) * step) * (1 - 1e-9)
    assert steps <= steps_between(step, 2 * exchange, 0.05)
    assert steps_between(2 * step, exchange, 0.05) <= steps


@given(steps=st.integers(1, 10_000), step=seconds, exchange=seconds | st.none(), every=st.integers(1, 1000))
def test_a_round_of_local_sgd_has_the_meetings_that_every_asks_for(
    steps: int, step: float, exchange: float | None, every: int
) -> None:
    fixed, auto = rule_of("local-sgd", every=every), rule_of("local-sgd")
    meetings = fixed.meetings(steps, step, exchange)
    assert (meetings - 1) * every < steps <= meetings * every
    found = auto.meetings(steps, step, exchange)
    assert 1 <= found <= steps
    if exchange is not None and found > 1:
        assert steps // found >= steps_between(step, exchange)
