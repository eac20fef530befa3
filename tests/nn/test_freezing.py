"""Layers that training leaves as they are: which, and what the passes make of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskcnn.arrays import Device
from daskcnn.nn import LOSSES, Context, Layout, Sequential, freeze, init_network, loss_and_gradients
from daskcnn.nn.layers import BatchNorm, Conv, Dense, ReLU

IN_SHAPE = (6, 6, 3)
NETWORK = Sequential(
    (
        ("conv1", Conv(4, 3)),
        ("batchnorm1", BatchNorm()),
        ("relu1", ReLU()),
        ("conv2", Conv(3, 3)),
        ("block", Sequential((("batchnorm", BatchNorm()), ("relu", ReLU())))),
        ("dense1", Dense(5)),
    )
)


def passed(model: Sequential) -> tuple[float, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Loss, gradients, and the state before and after a pass of training."""
    params, state = init_network(NETWORK, 0, IN_SHAPE, "float64")
    state["batchnorm1"]["mean"] += 0.3
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((6, 6, 8, 3)), np.arange(8) % 5
    ctx = Context(Device(), training=True)
    loss, _, grads, new = loss_and_gradients(model, params, state, x, labels, LOSSES["softmax"], ctx)
    return float(loss), grads, state, new


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["conv*"], {"conv1", "conv2"}),
        (["conv1", "batchnorm?"], {"conv1", "batchnorm1"}),
        (["[bc]*"], {"conv1", "conv2", "batchnorm1", "block/batchnorm"}),
        (["dense1"], {"dense1"}),
    ],
)
def test_patterns_choose_layers_with_weights(patterns: list[str], names: set[str]) -> None:
    assert freeze(NETWORK, patterns, IN_SHAPE).frozen == names


def test_a_pattern_without_a_layer_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        ValueError, match=r"'relu\*': matches no layer with weights; there are conv1, batchnorm1, conv2"
    ):
        freeze(NETWORK, ["conv1", "relu*"], IN_SHAPE)


def test_all_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="leaves no layer to train"):
        freeze(NETWORK, ["conv*", "b*", "dense1"], IN_SHAPE)


def test_statistics_are_nothing_to_train() -> None:
    model = Sequential((("norm", BatchNorm(scale=False, shift=False)), ("dense", Dense(5)), ("relu", ReLU())))
    assert freeze(model, ["norm"], IN_SHAPE).frozen == {"norm"}
    with pytest.raises(ValueError, match=r"leaves no layer to train; there are dense$"):
        freeze(model, ["dense"], IN_SHAPE)


def test_nothing_frozen_is_the_network_itself() -> None:
    assert freeze(NETWORK, [], IN_SHAPE) is NETWORK


def test_frozen_layers_have_no_gradients_and_keep_their_statistics() -> None:
    _, grads, before, after = passed(freeze(NETWORK, ["conv2", "block"], IN_SHAPE))
    assert not grads["conv2"]["w"].any()
    assert not grads["block"]["batchnorm"]["scale"].any()
    assert grads["conv1"]["w"].any()
    assert grads["dense1"]["w"].any()
    assert after["block"]["batchnorm"] is before["block"]["batchnorm"]
    assert (after["batchnorm1"]["mean"] != before["batchnorm1"]["mean"]).all()


def test_gradients_of_trained_layers_are_those_of_the_same_network_unfrozen() -> None:
    """Where no batch normalising is frozen, for that goes by other numbers then."""
    loss, grads, _, _ = passed(NETWORK)
    same, found, _, _ = passed(freeze(NETWORK, ["conv1"], IN_SHAPE))
    assert loss == same
    for name in ("conv2", "dense1"):
        np.testing.assert_array_equal(found[name]["w"], grads[name]["w"])


def test_the_way_back_ends_at_the_first_trained_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    backward = Conv.backward

    def noted(self: Conv, params: Any, residual: Any, dy: Any, ctx: Context) -> Any:
        asked.append(ctx.need_dx)
        return backward(self, params, residual, dy, ctx)

    monkeypatch.setattr(Conv, "backward", noted)
    passed(freeze(NETWORK, ["conv1", "batchnorm1"], IN_SHAPE))
    assert asked == [False]  # conv2's, and nobody asks for its dx
    asked.clear()
    passed(freeze(NETWORK, ["conv*", "b*"], IN_SHAPE))
    assert asked == []


def test_places_of_frozen_layers_in_the_vector() -> None:
    params, state = init_network(NETWORK, 0, IN_SHAPE, "float64")
    layout = Layout.of(params, state)
    vector = np.zeros(layout.size)
    for place in layout.spans({"conv1", "batchnorm1", "dense1"}):
        vector[place] += 1
    ones, of_state = layout.views(vector)
    assert all((leaf == 1).all() for name in ("conv1", "batchnorm1", "dense1") for leaf in ones[name].values())
    assert (of_state["batchnorm1"]["mean"] == 1).all()
    assert not ones["conv2"]["w"].any()
    assert not of_state["block"]["batchnorm"]["mean"].any()
    assert layout.spans(()) == ()
    assert len(layout.spans({"conv1", "batchnorm1"})) == 2  # parameters, which are neighbours, and state
