"""Sequential: nesting, names, initial weights, gradients that are not needed; networks from data."""

from __future__ import annotations

import copy
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from daskcnn.arrays import Array, Device
from daskcnn.nn import LAYERS, Context, Layer, Sequential, Shape, leaves, map_leaves, predict, sequential_from_spec
from daskcnn.nn.layer import Initializer, glorot_uniform, he_normal
from daskcnn.nn.layers import Conv, Dense, Dropout, Flatten, MaxPool, ReLU, Tanh
from daskcnn.nn.local import Chain
from daskcnn.nn.network import most_held
from daskcnn.nn.spec import SpecError
from tests.nn.nn_cases import BASIC, CASES, MAP, NESTED, PROJECTED, example, in_turn


def test_it_is_its_layers_in_order() -> None:
    params, state, x, _, ctx = example(NESTED, MAP, Device())
    y, new_state, _ = NESTED.forward(params, state, x, ctx)
    step, _, _ = NESTED.layers[0][1].forward(params["conv1"], {}, x, ctx.child("conv1"))
    step, kept, _ = NESTED.layers[1][1].forward(params["stage"], state["stage"], step, ctx.child("stage"))
    step, _, _ = NESTED.layers[2][1].forward(params["dense1"], {}, step, ctx.child("dense1"))
    np.testing.assert_array_equal(y, step)
    np.testing.assert_equal(new_state, {"stage": kept})


def test_params_and_state_nest_by_name_without_empty_children() -> None:
    params, state, _, _, _ = example(NESTED, MAP, Device())
    assert [n for n, _ in leaves(params)] == [
        *("conv1/w", "conv1/b", "stage/norm/scale", "stage/norm/shift", "dense1/w", "dense1/b"),
    ]
    assert [n for n, _ in leaves(state)] == ["stage/norm/mean", "stage/norm/variance"]


def test_without_need_dx_only_dx_is_missing() -> None:
    net = Sequential((("drop", Dropout(0.0)), ("relu", ReLU()), *NESTED.layers))  # a chain before the first parameters
    params, state, x, dy, ctx = example(net, MAP, Device())
    _, _, residual = net.forward(params, state, x, ctx)
    dx, grads = net.backward(params, residual, dy, ctx)
    none, same = net.backward(params, residual, dy, replace(ctx, need_dx=False))
    assert dx is not None
    assert dx.shape == x.shape
    assert none is None
    np.testing.assert_equal(same, grads)


def test_nothing_is_kept_outside_training() -> None:
    params, state, x, _, ctx = example(NESTED, MAP, Device(), training=False)
    assert NESTED.forward(params, state, x, ctx)[2] is None


def peak_of_prediction(net: Sequential, in_shape: Shape, N: int, device: Device) -> int:
    """The bytes that a second prediction allocates: scratch memory and plans stay from the first."""
    params, state, x, _, ctx = example(net, in_shape, device, N=N, training=False)
    given = map_leaves(device.backend.from_host, params), map_leaves(device.backend.from_host, state), x, ctx
    predict(net, *given)
    tracemalloc.start()
    try:
        predict(net, *given)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("layers", [(Conv(3, 3, pad=1), ReLU()), (BASIC, ReLU())], ids=["plain", "blocks"])
def test_a_prediction_of_many_layers_holds_no_more_maps_than_one_of_few(
    layers: tuple[Layer, ...], device: Device
) -> None:
    few, many = (peak_of_prediction(in_turn(*layers * times), (16, 16, 3), 50, device) for times in (2, 6))
    one_map = 16 * 16 * 3 * 50 * 8
    assert many < few + one_map / 2


@pytest.mark.parametrize(
    "net",
    [NESTED, in_turn(BASIC, BASIC, PROJECTED), in_turn(ReLU(), CASES["branches"][0][0], ReLU())],
    ids=["chain", "blocks", "branches"],
)
def test_a_prediction_holds_no_more_than_is_said(net: Sequential) -> None:
    said = most_held(net, MAP) * 1000 * 8
    assert 0.4 * said < peak_of_prediction(net, MAP, 1000, Device()) < 1.05 * said


def test_layers_of_one_name_in_two_places_draw_differently() -> None:
    drop = ("drop", Dropout(0.5))
    net = Sequential((("a", Sequential((drop,))), ("b", Sequential((drop,)))))
    _, _, _, _, ctx = example(net, (1000,), Device())
    x = np.ones((3, 1000))
    y, _, _ = net.forward({}, {}, x, ctx)
    assert abs((y > 0).mean() - 0.25) < 0.05  # both masks alike would leave half


def spread(w: Array, fan_in: int, fan_out: int) -> str:
    """Which start it is: He's normal or Glorot's uniform."""
    limit, deviation = np.sqrt(6 / (fan_in + fan_out)), np.sqrt(2 / fan_in)
    assert abs(w.mean()) < 0.05 * deviation
    if abs(w).max() <= limit:
        assert abs(w.std() / (limit / np.sqrt(3)) - 1) < 0.03
        return "glorot"
    assert abs(w.std() / deviation - 1) < 0.03
    assert abs((abs(w) < deviation).mean() - 0.6827) < 0.02
    return "he"


def test_weights_before_a_relu_start_he_normal_and_others_glorot() -> None:
    net = Sequential(
        (
            ("a", Conv(20, 5, pad=2)),
            ("pool", MaxPool(2)),
            ("relu1", ReLU()),
            ("b", Conv(20, 5, pad=2)),
            ("tanh", Tanh()),
            ("relu2", ReLU()),
            ("inner", Sequential((("c", Conv(20, 5, pad=2)), ("d", Conv(20, 5, pad=2))))),
            ("relu3", ReLU()),
            ("e", Dense(50)),
        )
    )
    params, _, out_shape = net.init(np.random.default_rng(0), (8, 8, 10))
    assert out_shape == (50,)
    assert all(not b.any() for name, b in leaves(params) if name.endswith("/b"))
    starts = {
        "a": spread(params["a"]["w"], 250, 500),
        "b": spread(params["b"]["w"], 500, 500),
        "c": spread(params["inner"]["c"]["w"], 500, 500),
        "d": spread(params["inner"]["d"]["w"], 500, 500),
        "e": spread(params["e"]["w"], 4 * 4 * 20, 50),
    }
    assert starts == {"a": "he", "b": "glorot", "c": "glorot", "d": "he", "e": "glorot"}


@pytest.mark.parametrize("kind", LAYERS)
def test_what_each_layer_asks_of_the_weights_before_it(kind: str) -> None:
    own: dict[str, Initializer] = {
        **dict.fromkeys(["relu", "leakyrelu", "gelu", "silu"], he_normal),
        **dict.fromkeys(["conv", "dense", "sigmoid", "tanh", "residual", "branches", "add"], glorot_uniform),
    }
    layer, _ = CASES[kind][0]
    for after in (he_normal, glorot_uniform):
        assert layer.initial_before(after) is own.get(kind, after)


def test_a_nested_network_asks_the_weights_before_it() -> None:
    inner = Sequential((("pool", MaxPool(2)), ("relu", ReLU())))
    net = Sequential((("conv", Conv(20, 5, pad=2)), ("inner", inner)))
    params, _, _ = net.init(np.random.default_rng(0), (8, 8, 10))
    assert spread(params["conv"]["w"], 250, 500) == "he"


def test_layers_from_data_are_named_by_kind_and_number() -> None:
    net = sequential_from_spec(
        [
            {"layer": "conv", "kernels": 4, "size": 3, "pad": 1},
            {"layer": "relu"},
            {"layer": "conv", "kernels": 2, "size": 1},
            {"layer": "maxpool", "size": 2},
            {"layer": "flatten"},
            {"layer": "dense", "units": 5},
        ]
    )
    assert [name for name, _ in net.layers] == ["conv1", "relu1", "conv2", "maxpool1", "flatten1", "dense1"]
    assert net.layers[0][1] == Conv(4, 3, pad=1)
    assert net.layers[4][1] == Flatten()
    assert net.out_shape((4, 4, 3)) == (5,)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"layer": "convv", "kernels": 1}, r"layers\[0\].*\"convv\".*did you mean 'conv'"),
        ({"kernels": 1}, '"layer" is missing'),
        ({"layer": "conv", "kernel": 1, "size": 3}, "kernel: .*did you mean 'kernels'"),
        ({"layer": "relu", "slope": 1}, "slope: relu has no such option"),
        ({"layer": "conv", "size": 3}, "conv needs kernels"),
        ({"layer": "conv", "kernels": "8", "size": 3}, "kernels = '8': conv needs int here, not str"),
        ({"layer": "conv", "kernels": 8.0, "size": 3}, "kernels = 8.0"),
        ({"layer": "conv", "kernels": True, "size": 3}, "kernels = True"),
        ({"layer": "dense", "units": 0}, r"layers\[0\]: units=0"),
        ({"layer": "maxpool", "size": 2, "stride": "2"}, "stride = '2': maxpool needs int"),
        ({"layer": "conv", "kernels": 10**400, "size": 3}, "conv takes numbers of at most 2,147,483,648"),
        ({"layer": "lrn", "alpha": float("nan")}, "alpha = nan: lrn takes numbers of at most"),
        ({"layer": "lrn", "alpha": float("-inf")}, "alpha = -inf: lrn takes numbers of at most"),
        ({"layer": ["conv"]}, "there is none of this name"),
        ({"layer": "Conv2d"}, "did you mean 'conv'?"),
        ({"layer": "softmax"}, "leave it out: the loss makes probabilities"),
    ],
)
def test_wrong_layers_are_named_with_the_nearest_right_one(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sequential_from_spec([entry])


def test_all_that_is_wrong_with_a_layer_is_said_at_once() -> None:
    entry = {"layer": "conv", "out_channels": 8, "kernel_size": 3, "padding": 1, "stride": "2"}
    with pytest.raises(SpecError) as caught:
        sequential_from_spec([entry])
    assert caught.value.problems == (
        "layers[0]: out_channels: conv has no such option; did you mean 'kernels'?",
        "layers[0]: kernel_size: conv has no such option; did you mean 'size'?",
        "layers[0]: padding: conv has no such option; did you mean 'pad'?",
        "layers[0]: stride = '2': conv needs int or [int, int] here, not str",
    )


def test_whole_numbers_will_do_where_floats_are_wanted() -> None:
    assert sequential_from_spec([{"layer": "dropout", "rate": 0}]).layers == (("dropout1", Dropout(0)),)


def test_a_layer_that_does_not_fit_is_named() -> None:
    net = sequential_from_spec([{"layer": "maxpool", "size": 2}, {"layer": "maxpool", "size": 4}])
    with pytest.raises(ValueError, match=r"layer maxpool2: size=4.*2x2"):
        net.out_shape((4, 4, 1))


@pytest.mark.parametrize(("layers", "message"), [((), "at least one"), ((("a", ReLU()),) * 2, "names a: given more")])
def test_empty_and_ambiguous_networks_are_refused(layers: tuple[tuple[str, Layer], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sequential(layers)


def test_a_minibatch_does_not_look_for_its_chains_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sequential_from_spec([{"layer": kind} for kind in ("relu", "tanh", "flatten", "relu")])
    found, of = list[int](), Chain.of

    def noted(layers: Sequence[Layer]) -> Chain:
        found.append(len(layers))
        return of(layers)

    monkeypatch.setattr(Chain, "of", noted)
    x, ctx = np.ones((2, 2, 3, 1), "f"), Context(Device(), training=True)
    first, _, _ = model.forward({}, {}, x, ctx)
    assert found == [4, 2, 1]
    second, _, residual = model.forward({}, {}, x, ctx)
    model.backward({}, residual, second, ctx)
    assert found == [4, 2, 1]
    np.testing.assert_array_equal(first, second)
    assert vars(copy.deepcopy(model)).keys() == {"layers", "frozen"}
