"""The laws of every optimizer, from the registry; what goes around one; which parameters are stepped in which way."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskcnn.arrays import Array, Device
from daskcnn.nn import (
    OPTIMIZERS,
    SGD,
    Descent,
    Layout,
    Optimizer,
    OptimizerState,
    StepPace,
    init_network,
    sequential_from_spec,
)
from daskcnn.nn.optimizers import LARS, AdamW, Averaged, Lookahead, Treatment
from daskcnn.nn.optimizers.descent import unmet
from daskcnn.nn.optimizers.optimizer import clip
from tests.standin import elsewhere

every = pytest.mark.parametrize("name", OPTIMIZERS)
AROUND = [lambda inner: inner, lambda inner: Lookahead(inner, 2), lambda inner: Averaged(Lookahead(inner, 3), 0.9)]


def made(name: str, **options: Any) -> Optimizer:
    """The optimizer of this name with those of the options that it has."""
    kind = OPTIMIZERS[name]
    own = {field.name for field in fields(kind)}  # type: ignore[arg-type] # every optimizer is a dataclass
    return kind(**{key: value for key, value in options.items() if key in own})


def walked(
    optimizer: Optimizer, start: Array, steps: int, device: Device | None = None
) -> tuple[Array, OptimizerState]:
    """Parameters, on the host, and state after steps down a parabola whose minimum is at 1."""
    device = device or Device()
    params = device.backend.from_host(start.copy())
    state = optimizer.init(params, device.xp)
    for _ in range(steps):
        state = optimizer.step(params, params - 1.0, state, 0.1, device)
    return device.backend.to_host(params), state.moved(device.backend.to_host)


# --- every optimizer ---


@every
@pytest.mark.parametrize("around", AROUND)
def test_steps_lead_to_the_minimum(name: str, around: Any) -> None:
    start = np.array([3.0, -1.0, 0.5])
    reached, _ = walked(around(made(name, trust=0.1, momentum=0.5)), start, 200)
    assert np.linalg.norm(reached - 1) < 0.2 * np.linalg.norm(start - 1)


@every
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_state_has_a_row_for_each_name_and_keeps_the_dtype(name: str, around: Any, dtype: str) -> None:
    optimizer = around(made(name))
    params, state = walked(optimizer, np.ones(7, dtype) / 3, 5)
    assert state.vectors.shape == (len(optimizer.vectors), 7)
    assert {params.dtype.name, state.vectors.dtype.name} == {dtype}
    assert state.count == 5
    assert len(set(optimizer.vectors)) == len(optimizer.vectors)
    assert not any(":" in vector or "/" in vector for vector in optimizer.vectors)  # checkpoints' separators


@every
@pytest.mark.parametrize("around", AROUND)
@elsewhere
def test_a_device_makes_the_steps_of_the_host(name: str, around: Any, device: Device) -> None:
    optimizer, start = around(made(name, weight_decay=0.1, momentum=0.9)), np.linspace(-1, 2, 50).astype("float32")
    (here, state), (there, other) = walked(optimizer, start, 6), walked(optimizer, start, 6, device)
    np.testing.assert_allclose(there, here, rtol=1e-5)
    np.testing.assert_allclose(other.vectors, state.vectors, rtol=1e-5)


@every
@given(cut=st.integers(0, 40), seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_columns_of_a_state_go_on_by_themselves(name: str, cut: int, seed: int) -> None:
    """As pieces of a network do on several workers."""
    optimizer, rng = made(name, weight_decay=0.1), np.random.default_rng(seed)
    if optimizer.by_tensor:
        return
    params, grads = rng.standard_normal((2, 40))
    state = OptimizerState(np.abs(rng.standard_normal((len(optimizer.vectors), 40))), seed)
    pieces = [(params[part].copy(), grads[part], state.part(part)) for part in (slice(cut), slice(cut, None))]
    pieces = [(p, g, OptimizerState(s.vectors.copy(), s.count)) for p, g, s in pieces]
    new = optimizer.step(params, grads, state, 0.1, Device())
    each = [optimizer.step(*piece, 0.1, Device()) for piece in pieces]
    np.testing.assert_array_equal(np.concatenate([p for p, _, _ in pieces]), params)
    np.testing.assert_array_equal(np.concatenate([own.vectors for own in each], axis=1), new.vectors)
    assert {own.count for own in each} == {new.count}


@every
def test_decay_is_left_out_where_it_is_not_wanted(name: str) -> None:
    params, none = np.array([2.0, -3.0]), np.zeros(2)
    for decays, moves in ((False, False), (True, True)):
        before, optimizer = params.copy(), made(name, weight_decay=0.1)
        optimizer.step(params, none, optimizer.init(params), 0.1, Device(), decays=decays)
        assert (np.abs(params) < np.abs(before)).all() == moves
        assert np.array_equal(params, before) != moves


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdamW(beta1=1.0), "beta1=1.0: AdamW needs 0 <= beta1 < 1"),
        (lambda: AdamW(beta2=-0.1), "beta2=-0.1"),
        (lambda: AdamW(epsilon=0.0), "epsilon=0.0"),
        (lambda: AdamW(weight_decay=-1.0), "weight_decay=-1.0"),
        (lambda: LARS(trust=0.0), "trust=0.0"),
        (lambda: LARS(momentum=1.0), "momentum=1.0"),
        (lambda: LARS(epsilon=0.0), "epsilon=0.0"),
        (lambda: LARS(weight_decay=-1.0), "weight_decay=-1.0"),
        (lambda: Lookahead(SGD(), 0), "steps=0"),
        (lambda: Lookahead(SGD(), 5, 0.0), "alpha=0.0"),
        (lambda: Averaged(SGD(), 1.0), "decay=1.0"),
    ],
)
def test_nonsense_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# --- LARS ---


def test_lars_by_hand() -> None:
    """‖w‖ = 5, ‖g‖ = 1, decay 0.2: the ratio is 0.1 · 5 / (1 + 0.2 · 5) = 0.25."""
    params, grads, lars = np.array([3.0, 4.0]), np.array([1.0, 0.0]), LARS(0.1, 0.5, 1e-12, 0.2)
    state = lars.step(params, grads, lars.init(params), 2.0, Device())
    np.testing.assert_allclose(state.vectors, [[0.5 * 1.6, 0.5 * 0.8]])
    np.testing.assert_allclose(params, [3 - 0.8, 4 - 0.4])


def test_lars_steps_by_lr_alone_where_the_weights_or_the_gradients_are_zero() -> None:
    params, lars = np.zeros(2), LARS(0.1, 0.0)
    lars.step(params, np.array([1.0, -1.0]), lars.init(params), 0.5, Device())
    assert params.tolist() == [-0.5, 0.5]
    lars.step(params, np.zeros(2), lars.init(params), 0.5, Device())
    assert params.tolist() == [-0.5, 0.5]


@given(factor=st.floats(1e-3, 1e3))
@settings(max_examples=20, deadline=None)
def test_the_length_of_the_gradient_does_not_change_lars_s_step(factor: float) -> None:
    params, grads = np.random.default_rng(0).standard_normal((2, 9))
    one, other, lars = params.copy(), params.copy(), LARS(0.1, epsilon=1e-12)
    lars.step(one, grads, lars.init(one), 0.5, Device())
    lars.step(other, factor * grads, lars.init(other), 0.5, Device())
    np.testing.assert_allclose(one, other, rtol=1e-6)


# --- lookahead and the average ---


@pytest.mark.parametrize("inner", [SGD(0.9), AdamW()])
def test_lookahead_goes_back_after_so_many_steps(inner: Optimizer) -> None:
    start = np.array([3.0, -1.0])
    plain, state = walked(inner, start, 3)
    back, ahead = walked(Lookahead(inner, 3, 0.25), start, 3)
    np.testing.assert_allclose(back, start + 0.25 * (plain - start))
    np.testing.assert_array_equal(ahead.vectors[-1], back)
    np.testing.assert_array_equal(ahead.vectors[:-1], state.vectors)
    two, _ = walked(inner, start, 2)
    between, ahead = walked(Lookahead(inner, 3, 0.25), start, 2)
    np.testing.assert_array_equal(between, two)
    np.testing.assert_array_equal(ahead.vectors[-1], start)


def test_lookahead_keeps_less_and_less_of_the_way() -> None:
    optimizer = Lookahead(SGD(), 2, 1.0, 0.2)
    assert [optimizer.kept(progress) for progress in (0, 0.5, 1, 1.1)] == pytest.approx([1.0, 0.9, 0.2, 0.2])
    params = np.zeros(1)
    state = optimizer.init(params)
    for number in range(4):  # a step of 1 each: all of the first two is kept up to 1 / 64 of 0.8, 0.9 of the next
        state = optimizer.step(params, -np.ones(1), state, 1.0, Device(), progress=(0, 1 / 4, 3 / 8, 1 / 2)[number])
    first = 2 * (1 - 0.8 / 64)
    np.testing.assert_allclose(params, first + 2 * 0.9)


@pytest.mark.parametrize("every", [1, 2])
def test_lookahead_of_replicas_that_take_means_is_that_of_their_mean(every: int) -> None:
    # what BSP does: replicas of one size meet in the mean of their weights, with the rate times their number
    rng, optimizer = np.random.default_rng(0), Lookahead(SGD(0.9, nesterov=True), 3, 0.4, 0.2)
    start, slopes = rng.standard_normal(4), rng.standard_normal((2, 12, 4))
    alone, state = start.copy(), optimizer.init(start)
    replicas = [start.copy(), start.copy()]
    states = [optimizer.init(start), optimizer.init(start)]
    for step in range(12):
        state = optimizer.step(alone, slopes[:, step].mean(axis=0), state, 0.1, Device(), progress=step / 12)
        for i, weights in enumerate(replicas):
            states[i] = optimizer.step(weights, slopes[i, step], states[i], 0.1, Device(), progress=step / 12)
        if (step + 1) % every == 0:
            mean = (replicas[0] + replicas[1]) / 2
            for weights in replicas:
                weights[...] = mean
            np.testing.assert_allclose(mean, alone, rtol=1e-12)


def test_lookahead_restarts_where_others_have_moved_the_weights() -> None:
    optimizer, params = Averaged(Lookahead(SGD(), 2, 0.5), 0.5), np.array([3.0, -1.0])
    state = optimizer.step(params, params - 1, optimizer.init(params), 0.1, Device())
    params[...] = [7.0, 8.0]
    again = optimizer.restarted(state, params)
    assert again.vectors[1].tolist() == [7.0, 8.0]
    assert again.count == 1
    np.testing.assert_array_equal(again.vectors[2], state.vectors[2])


def test_the_average_follows_the_weights_and_changes_nothing() -> None:
    start = np.array([3.0, -1.0])
    params, state = walked(Averaged(SGD(0.9), 0.8), start, 30)
    plain, _ = walked(SGD(0.9), start, 30)
    np.testing.assert_array_equal(params, plain)
    expected = start.copy()
    for made in range(1, 31):
        kept = min(0.8, (1 + made) / (10 + made))
        expected = kept * expected + (1 - kept) * walked(SGD(0.9), start, made)[0]
    np.testing.assert_allclose(state.vectors[-1], expected)


def test_average_and_weights_change_places_and_back() -> None:
    optimizer, weights = Averaged(SGD(), 0.9), np.arange(5.0)  # the last two are no parameters
    state = OptimizerState(np.array([[1.0, 2, 3], [7, 8, 9]]), 4)
    kept, other = optimizer.exchanged(weights, state)
    assert kept.tolist() == [7, 8, 9, 3, 4]
    assert other.vectors.tolist() == [[1, 2, 3], [0, 1, 2]]
    back, again = optimizer.exchanged(kept, other)
    np.testing.assert_array_equal(back, weights)
    np.testing.assert_array_equal(again.vectors, state.vectors)
    assert again.count == 4
    assert AdamW().exchanged(weights, state) == (weights, state)


# --- which parameters are stepped in which way ---

NETWORK: list[dict[str, Any]] = [
    {"layer": "conv", "kernels": 4, "size": 3},
    {"layer": "batchnorm"},
    {"layer": "conv", "kernels": 2, "size": 3},
    {"layer": "dense", "units": 3},
]


def layout() -> Layout:
    return Layout.of(*init_network(sequential_from_spec(NETWORK), 0, (8, 8, 3), "float64"))


def by_parameter(descent: Descent) -> dict[str, Treatment | None]:
    return {path: descent.treatment(path) for path, _ in layout().places()}


@given(
    frozen=st.sets(st.sampled_from(["conv1", "batchnorm1", "conv2"])),
    rates=st.lists(st.tuples(st.sampled_from(["conv*", "dense1", "*"]), st.sampled_from([0.5, 2.0])), max_size=3),
    decay_all=st.booleans(),
    optimizer=st.sampled_from([SGD(), LARS()]),
)
def test_spans_are_the_treatments_of_the_parameters(
    frozen: set[str], rates: list[tuple[str, float]], decay_all: bool, optimizer: Optimizer
) -> None:
    descent = Descent(optimizer, frozenset(frozen), tuple(rates), decay_all)
    spans = descent.spans(layout())
    found = {
        path: next((span.treatment for span in spans if span.at.start <= at.start and at.stop <= span.at.stop), None)
        for path, at in layout().places()
    }
    assert found == by_parameter(descent)
    stops = [0, *(span.at.stop for span in spans)]
    assert all(span.at.start >= stop for span, stop in zip(spans, stops, strict=False))
    if optimizer.by_tensor:
        assert len(spans) == sum(treatment is not None for treatment in found.values())


def test_neighbours_that_are_treated_alike_are_one_span() -> None:
    (span,) = Descent(SGD()).spans(layout())
    assert span.at == slice(0, layout().parameter_size)


def test_of_several_patterns_the_last_one_counts() -> None:
    found = by_parameter(Descent(SGD(), rates=(("conv*", 0.5), ("conv2", 3.0))))
    assert {path: each and each.rate for path, each in found.items()} == {
        **dict.fromkeys(("conv1/w", "conv1/b"), 0.5),
        **dict.fromkeys(("conv2/w", "conv2/b"), 3.0),
        **dict.fromkeys(("batchnorm1/scale", "batchnorm1/shift", "dense1/w", "dense1/b"), 1.0),
    }


def test_biases_and_normalising_may_be_left_out_of_the_decay() -> None:
    found = by_parameter(Descent(SGD(), decay_all=False))
    assert {path for path, each in found.items() if each and each.decays} == {"conv1/w", "conv2/w", "dense1/w"}


def test_layers_within_layers_are_met_by_their_paths_and_by_those_around_them() -> None:
    descent = Descent(SGD(), frozenset({"head"}), (("block1", 2.0), ("block1/conv2", 3.0)))
    assert descent.treatment("block1/conv1/w") == Treatment(2.0)
    assert descent.treatment("block1/conv2/w") == Treatment(3.0)
    assert descent.treatment("block2/conv1/w") == Treatment()
    assert descent.treatment("head/dense1/b") is None
    params = {"block1": {"conv1": {"w": np.zeros(2)}}, "dense1": {"b": np.zeros(1)}}
    assert list(unmet(["conv1", "block1", "*conv1", "dense*"], Layout.of(params, {}))) == ["conv1"]


@every
def test_a_network_descends_as_its_parameters_do_one_by_one(name: str) -> None:
    own, rng = layout(), np.random.default_rng(0)
    descent = Descent(made(name, weight_decay=0.1), frozenset({"conv2"}), (("conv*", 0.5),), decay_all=False)
    weights, grads = rng.standard_normal(own.size), rng.standard_normal(own.parameter_size)
    expected, state = weights.copy(), descent.optimizer.init(weights[: own.parameter_size])
    rows = state.vectors.copy()
    for path, at in own.places():
        if (treatment := descent.treatment(path)) is not None:
            given = expected[at], grads[at], OptimizerState(rows[:, at]), 0.1 * treatment.rate, Device()
            descent.optimizer.step(*given, decays=treatment.decays)
    new = descent.step(weights, grads, state, descent.spans(own), StepPace(0.1), Device())
    np.testing.assert_allclose(weights, expected, rtol=1e-12)
    np.testing.assert_allclose(new.vectors, rows, rtol=1e-12)
    assert new.count == 1


def test_only_gradients_of_what_is_trained_count_for_the_norm() -> None:
    own, rng = layout(), np.random.default_rng(0)
    descent = Descent(SGD(), frozenset({"conv1"}), clip=0.5)
    weights, grads = np.zeros(own.size), rng.standard_normal(own.parameter_size)
    descent.step(weights, grads, descent.optimizer.init(grads), descent.spans(own), StepPace(1.0), Device())
    assert np.linalg.norm(weights) == pytest.approx(0.5)


def test_gradients_are_clipped_where_the_replica_computes(device: Device) -> None:
    host = np.random.default_rng(0).standard_normal(100).astype("float32")
    grads = device.backend.from_host(host.copy())
    clip(grads, [slice(0, 50), slice(60, 100)], 0.5, device)
    found = device.backend.to_host(grads)
    assert np.linalg.norm(np.delete(found, np.s_[50:60])) == pytest.approx(0.5)
    np.testing.assert_array_equal(found[50:60], host[50:60])
    assert found.dtype == np.float32
