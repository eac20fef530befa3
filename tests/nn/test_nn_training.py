"""Losses, optimiser, schedules, the flat vector, and all of them together."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from functools import reduce
from typing import Any

import numpy as np
import pytest

from daskcnn.arrays import Device
from daskcnn.nn import (
    LOSSES,
    SCHEDULES,
    SGD,
    Context,
    Layout,
    OptimizerState,
    Params,
    RateSchedule,
    State,
    build_model,
    correct,
    init_network,
    leaves,
    loss_and_gradients,
    map_leaves,
    predict,
)
from daskcnn.nn.schedule import ConstantRate, CosineDecay, OneCycle, PolyDecay, StepDecay, WarmUp
from daskcnn.nn.score import Score
from tests.nn.nn_cases import MAP, NESTED, cast, example, values

CLASSES = np.array([0, 4, 2, 2])
IMAGES = np.linspace(0, 1, 20).reshape(5, 1, 4, 1)
SEVERAL = np.array([[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 1, 0, 0, 1]], np.uint8)
WEIGHTS = np.array([0.5, 2.0, 0.0, 1.25])


def _labels(name: str) -> np.ndarray:
    """Four samples' labels of the kind that the loss is for, five classes or pixels."""
    return {"classes": CLASSES, "several": SEVERAL, "image": IMAGES}[LOSSES[name].labels]


def _some(name: str, which: Any) -> np.ndarray:
    """Some samples' labels."""
    return _labels(name)[:, :, which] if LOSSES[name].labels == "image" else _labels(name)[which]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_dscores_are_the_central_differences_of_the_loss(
    name: str, weights: np.ndarray | None, rng: np.random.Generator
) -> None:
    scores, labels, step = values(rng, (4, 5)), _labels(name), 1e-6
    _, dscores = LOSSES[name](scores, labels, np, weights)
    for place in np.ndindex(*scores.shape):
        change = np.zeros_like(scores)
        change[place] = step
        above, below = (LOSSES[name](scores + sign * change, labels, np, weights)[0] for sign in (1, -1))
        assert abs((above - below) / (2 * step) - dscores[place]) < 1e-8


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_losses_keep_dtype_and_scores(name: str, dtype: str, device: Device, rng: np.random.Generator) -> None:
    scores, labels = values(rng, (4, 5), dtype), _labels(name)
    move, host = device.backend.from_host, device.backend.to_host
    given = move(scores.copy())
    loss, dscores = LOSSES[name](given, move(labels), device.xp, move(WEIGHTS.astype(np.float32)))
    assert (host(loss).dtype, host(dscores).dtype) == (np.dtype(dtype), np.dtype(dtype))
    assert host(loss).shape == ()
    np.testing.assert_array_equal(host(given), scores)


@pytest.mark.parametrize("name", LOSSES)
def test_a_weighted_loss_is_the_mean_of_weight_times_each_samples_loss(name: str, rng: np.random.Generator) -> None:
    loss, scores, labels = LOSSES[name], values(rng, (4, 5)), _labels(name)
    each = [loss(scores[i : i + 1], _some(name, slice(i, i + 1)))[0] for i in range(4)]
    assert loss(scores, labels, np, WEIGHTS)[0] == pytest.approx(np.mean(WEIGHTS * each), rel=1e-13)


@pytest.mark.parametrize("name", LOSSES)
def test_whole_weights_repeat_samples(name: str, rng: np.random.Generator) -> None:
    loss, scores, labels, times = LOSSES[name], values(rng, (4, 5)), _labels(name), np.array([3, 0, 1, 2])
    again = np.repeat(np.arange(4), times)
    weighted, dscores = loss(scores, labels, np, times / times.mean())
    repeated, dagain = loss(scores[again], _some(name, again))
    assert weighted == pytest.approx(repeated, rel=1e-13)
    summed = np.zeros_like(scores)
    np.add.at(summed, again, dagain)
    np.testing.assert_allclose(dscores, summed, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("name", LOSSES)
def test_weights_of_1_change_no_bit(name: str, rng: np.random.Generator) -> None:
    scores, labels = values(rng, (4, 5), "float32"), _labels(name)
    (loss, dscores), (weighted, dweighted) = (
        LOSSES[name](scores, labels, np, weights) for weights in (None, np.ones(4, np.float32))
    )
    assert loss == weighted
    np.testing.assert_array_equal(dscores, dweighted)


def test_sigmoid_cross_entropy_is_the_sum_over_labels_of_the_log_of_the_right_answer(rng: np.random.Generator) -> None:
    scores = 3 * values(rng, (4, 5))
    p = 1 / (1 + np.exp(-scores))
    loss, dscores = LOSSES["sigmoid"](scores, SEVERAL)
    each = -(SEVERAL * np.log(p) + (1 - SEVERAL) * np.log(1 - p))
    assert loss == pytest.approx(each.sum(axis=1).mean(), rel=1e-13)
    np.testing.assert_allclose(dscores, (p - SEVERAL) / 4, rtol=1e-12)
    np.testing.assert_allclose(LOSSES["sigmoid"].probabilities(scores), p, rtol=1e-13)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sigmoid_cross_entropy_of_very_sure_answers_neither_overflows_nor_loses_its_digits(dtype: str) -> None:
    scores, labels = np.array([[1e4, -1e4], [50.0, -50.0]], dtype), np.array([[0, 1], [1, 0]], np.uint8)
    with np.errstate(all="raise", under="ignore"):
        loss, dscores = LOSSES["sigmoid"](scores, labels)
        alone, sure = LOSSES["sigmoid"](scores[1:], labels[1:])
        probabilities = LOSSES["sigmoid"].probabilities(scores)
    assert loss == pytest.approx(1e4)
    np.testing.assert_array_equal(dscores[0], [0.5, -0.5])
    assert alone == pytest.approx(2 * np.exp(-50.0), rel=1e-5)
    np.testing.assert_allclose(sure[0], [-np.exp(-50.0), np.exp(-50.0)], rtol=1e-5)
    np.testing.assert_allclose(probabilities, [[1, 0], [1, np.exp(-50.0)]], rtol=1e-5)


def test_one_label_alone_is_softmax_of_two_classes(rng: np.random.Generator) -> None:
    score, labels = values(rng, (6, 1)), np.array([0, 1, 1, 0, 1, 0])
    two = np.concatenate([np.zeros_like(score), score], axis=1)
    alone, both = LOSSES["sigmoid"](score, labels[:, None])[0], LOSSES["softmax"](two, labels)[0]
    assert alone == pytest.approx(both, rel=1e-13)


def test_a_loss_of_diverged_scores_is_not_finite() -> None:
    for name in LOSSES:
        assert not np.isfinite(LOSSES[name](np.full((4, 5), np.nan), _labels(name))[0]), name


def test_losses_by_hand() -> None:
    even, labels = np.zeros((2, 4)), np.array([1, 3])
    assert LOSSES["softmax"](even, labels)[0] == pytest.approx(np.log(4))
    assert LOSSES["softmax"](np.array([[1e4, 0.0], [0.0, -1e4]]), np.array([0, 1]))[0] == pytest.approx(5e3)
    assert LOSSES["squared"](even, labels)[0] == pytest.approx(0.5)


def test_correct_counts_the_highest_scores() -> None:
    assert correct(np.array([[1.0, 2], [3, 0], [0, 1]]), np.array([1, 0, 0])) == 2


def test_correct_counts_the_labels_whose_score_is_on_the_right_side_of_0() -> None:
    assert correct(np.array([[1.0, 2], [-3, 0], [np.nan, -1]]), np.array([[1, 0], [1, 0], [0, 1]], np.uint8)) == 2


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_answer_without_a_probability_is_not_right(bad: float, device: Device) -> None:
    scores = np.array([[bad, 0.0, 1.0], [0.0, -np.inf, 1.0], [0.0, 1.0, bad], [bad, bad, bad]], "f")
    given, labels = map(device.backend.from_host, (scores, np.array([0, 2, 1, 0])))
    right = correct(given, labels, device.xp)
    assert device.backend.scalar(right) == 1


def test_accuracy_by_label_is_the_share_of_right_labels_however_parts_are_cut() -> None:
    labels = np.zeros((3, 4), np.uint8)
    parts = Score(0.0, 0, 0), Score.of_batch(2.0, 7, labels), Score.of_batch(1.0, 4, labels[:2])
    whole = reduce(operator.add, parts)
    assert (whole.accuracy, whole.loss, whole.samples) == (11 / 20, 8 / 5, 5)
    assert reduce(operator.add, parts[::-1]) == whole
    assert Score.of_batch(2.0, 3, CLASSES).accuracy == 3 / 4


def test_plain_descent_with_decay_by_hand() -> None:
    params, grads, velocity = np.array([1.0, -2]), np.array([0.5, 0.5]), np.zeros((1, 2))
    SGD(weight_decay=0.1).step(params, grads, OptimizerState(velocity), 0.1, Device())
    np.testing.assert_allclose(params, [1 - 0.1 * 0.6, -2 - 0.1 * 0.3])


@pytest.mark.parametrize(("nesterov", "second"), [(False, 1.9 + 1), (True, 0.9 * 2.71 + 1)])
def test_momentum_by_hand(nesterov: bool, second: float) -> None:
    """Gradient 1, momentum 0.9: velocities 1, 1.9, 2.71; plain steps by them, Nesterov's by 1 + 0.9 of them."""
    params, state = np.zeros(1), OptimizerState(np.zeros((1, 1)))
    seen = []
    for _ in range(3):
        state = SGD(0.9, nesterov).step(params, np.ones(1), state, 0.5, Device())
        seen.append(-params[0] / 0.5)
    assert state.vectors[0, 0] == pytest.approx(2.71)
    assert state.count == 3
    first = 1.9 if nesterov else 1.0
    assert seen[:2] == pytest.approx([first, first + (1 + 0.9 * 1.9 if nesterov else 1.9)])
    assert seen[2] - seen[1] == pytest.approx(second if nesterov else 2.71)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"momentum": -0.1}, "momentum=-0.1"),
        ({"nesterov": True}, "momentum=0"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0"),
    ],
)
def test_nonsense_descent_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SGD(**options)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_fall_from_the_rate_once_it_is_reached(name: str) -> None:
    schedule = SCHEDULES[name](**({"every": 2} if name == "step" else {}))
    rates = [schedule.rate(0.1, i / 100, 5 * i / 100) for i in range(101)]
    top = rates.index(0.1)
    assert top == (30 if name == "onecycle" else 0)
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert min(rates) >= 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_rise_from_0_while_it_warms_up(name: str) -> None:
    schedule = SCHEDULES[name](**({"every": 2} if name == "step" else {}))
    own, warmed = ([s.rate(0.1, i / 100, 5 * i / 100) for i in range(101)] for s in (schedule, WarmUp(schedule, 0.5)))
    assert warmed[10:] == own[10:]
    assert warmed[:10] == pytest.approx([rate * i / 10 for i, rate in enumerate(own[:10])])


def test_schedules_by_hand() -> None:
    assert ConstantRate().rate(0.3, 0.7, 9) == 0.3
    assert [StepDecay(10).rate(1.0, 0, epoch) for epoch in (0, 9.99, 10, 25)] == pytest.approx([1, 1, 0.1, 0.01])
    assert StepDecay(1.5, 0.5).rate(1.0, 0, 3) == pytest.approx(0.25)
    assert [PolyDecay(1).rate(0.2, p, 0) for p in (0, 0.5, 1)] == pytest.approx([0.2, 0.1, 0])
    assert PolyDecay().rate(1.0, 0.75, 0) == pytest.approx(0.5)
    assert PolyDecay().rate(1.0, 1.0001, 0) == 0
    assert [CosineDecay(0.2).rate(1.0, p, 0) for p in (0, 0.5, 1, 1.01)] == pytest.approx([1, 0.6, 0.2, 0.2])
    cycle = OneCycle(0.25, 0.2, 0.1)
    assert [cycle.rate(2.0, p, 0) for p in (0, 0.125, 0.25, 0.625, 1, 1.01)] == pytest.approx(
        [0.4, 1.2, 2, 1.1, 0.2, 0.2]
    )
    assert [OneCycle(peak, 0.5).rate(1.0, p, 0) for peak, p in ((0, 0), (1, 0.5), (1, 1))] == pytest.approx(
        [1, 0.75, 1]
    )


@pytest.mark.parametrize("every", [1, 2, 3, 7, 15, 0.1, 0.5, 1.5, 2.5])
def test_a_step_falls_with_the_first_minibatch_of_its_period(every: float) -> None:
    """However the epoch was computed: exact fractions say which minibatch that is."""
    schedule, period = StepDecay(every, 0.5), Fraction(str(every))
    for epochs, steps in itertools.product((1, 3, 22, 49, 97, 300, 1000), (1, 3, 7, 46, 391)):
        for change in range(1, min(100, int(epochs / period)) + 1):
            first = math.ceil(change * period * steps)
            for number in (first - 1, first):
                progress, round_ = number / (epochs * steps), number // steps
                within = round_ / epochs + ((round_ + 1) / epochs - round_ / epochs) * ((number % steps) / steps)
                for epoch in (number / steps, progress * epochs, within * epochs):
                    falls = Fraction(number, steps) // period
                    assert schedule.rate(1.0, progress, epoch) == 0.5**falls, (epochs, steps, number)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StepDecay(0), "every=0"),
        (lambda: StepDecay(1, 0), "factor=0"),
        (lambda: StepDecay(1, 2), "factor=2"),
        (lambda: PolyDecay(0), "power=0"),
        (lambda: CosineDecay(-0.1), "final=-0.1"),
        (lambda: OneCycle(peak=1.5), "peak=1.5"),
    ],
)
def test_nonsense_schedules_are_refused(make: Callable[[], RateSchedule], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def network(dtype: str = "float32") -> tuple[Params, State, Layout]:
    params, state, _, _, _ = example(NESTED, MAP, Device(), dtype=dtype)
    return params, state, Layout.of(params, state)


def test_the_vector_holds_parameters_then_state_and_gives_them_back() -> None:
    params, state, layout = network()
    vector = layout.flatten(params, state)
    joined = [a.reshape(-1) for _, a in [*leaves(params), *leaves(state)]]
    np.testing.assert_array_equal(vector, np.concatenate(joined))
    assert (vector.size, vector.nbytes, vector.dtype) == (layout.size, layout.nbytes, np.dtype("float32"))
    assert layout.parameter_size == sum(a.size for _, a in leaves(params))
    np.testing.assert_equal(layout.views(vector), (params, state))


def test_views_share_the_vectors_memory() -> None:
    params, state, layout = network()
    vector = layout.flatten(params, state)
    own, kept = layout.views(vector)
    vector[...] = 7
    assert all((a == 7).all() for _, a in [*leaves(own), *leaves(kept)])
    own["conv1"]["w"][...] = 3
    assert (vector[: own["conv1"]["w"].size] == 3).all()


def test_gradients_flatten_to_the_leading_part_and_into_memory_given() -> None:
    params, state, layout = network()
    out = np.empty(layout.parameter_size, "float32")
    assert layout.flatten(params, {}, out=out) is out
    np.testing.assert_array_equal(out, layout.flatten(params, state)[: layout.parameter_size])


def test_flattening_moves_nothing_to_the_host(device: Device) -> None:
    params, state, layout = network()
    move = device.backend.from_host
    vector = layout.flatten(map_leaves(move, params), map_leaves(move, state), xp=device.xp)
    np.testing.assert_array_equal(device.backend.to_host(vector), layout.flatten(params, state))
    own, _ = layout.views(vector)
    assert type(own["conv1"]["w"]) is type(move(np.zeros(1)))


def test_a_layout_is_equal_for_equal_networks() -> None:
    assert network()[2] == network()[2]
    assert network()[2] != network("float64")[2]


def test_vectors_and_arrays_of_another_network_are_refused() -> None:
    params, state, layout = network()
    with pytest.raises(ValueError, match="shape"):
        layout.views(np.zeros(layout.size + 1, "float32"))
    with pytest.raises(ValueError, match="conv1/w"):
        layout.flatten({**params, "conv1": {"w": np.zeros(3), "b": params["conv1"]["b"]}}, state)
    with pytest.raises(ValueError, match="their number"):
        layout.flatten({"conv1": params["conv1"]}, {})


def test_mixed_dtypes_and_shared_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"float32.*float64"):
        Layout.of({"a": np.zeros(1), "b": np.zeros(1, "float32")}, {})
    with pytest.raises(ValueError, match="share one"):
        Layout.of({"a": np.zeros(1)}, {"a": np.zeros(1)})


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_step_keeps_dtype_everywhere(dtype: str, device: Device) -> None:
    params, state, x, _, ctx = example(NESTED, MAP, device, dtype=dtype)
    move, host = device.backend.from_host, device.backend.to_host
    params, state, labels = map_leaves(move, params), map_leaves(move, state), np.array([0, 3, 1])
    loss, hits, grads, new = loss_and_gradients(NESTED, params, state, x, labels, LOSSES["softmax"], ctx)
    assert {host(a).dtype.name for a in [loss, *(a for _, a in [*leaves(grads), *leaves(new)])]} == {dtype}
    assert 0 <= device.backend.scalar(hits) <= 3
    assert host(predict(NESTED, params, state, x, ctx)).dtype == dtype


def test_a_network_that_diverges_gives_no_warning() -> None:
    params, state, x, _, ctx = example(NESTED, MAP, Device(), dtype="float32")
    huge = cast(map_leaves(lambda a: a * 1e38, params), "float32")
    loss, _, _, _ = loss_and_gradients(NESTED, huge, state, x, np.array([0, 3, 1]), LOSSES["softmax"], ctx)
    assert not np.isfinite(loss)
    assert not np.isfinite(predict(NESTED, huge, state, x, ctx)).all()


@pytest.mark.parametrize("name", ["quick", "4:8", "lenet5"])
def test_training_learns_a_few_samples_by_heart(name: str, rng: np.random.Generator) -> None:
    shape, N = (16, 16, 3), 12
    model, device = build_model(name, None, shape, 4), Device()
    params, state = init_network(model, 0, shape, "float32")
    layout = Layout.of(params, state)
    vector = layout.flatten(params, state)
    params, state = layout.views(vector)
    weights, sgd = vector[: layout.parameter_size], SGD(0.9, True)
    moving = sgd.init(weights)
    x, labels = values(rng, (16, 16, N, 3), "float32"), np.arange(N) % 4
    losses = []
    for _ in range(80):
        loss, hits, grads, _ = loss_and_gradients(model, params, state, x, labels, LOSSES["softmax"], Context(device))
        losses.append(float(loss))
        moving = sgd.step(weights, layout.flatten(grads, {}), moving, 0.01, Device())
    assert losses[0] > 1
    assert losses[-1] < 0.05
    assert hits == N
    assert (predict(model, params, state, x, Context(device)).argmax(axis=1) == labels).all()
