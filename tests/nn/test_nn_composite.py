"""Layers of several paths: against the paths by themselves, what is refused, and their names, tables and freezing."""

from __future__ import annotations

import tomllib
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from daskcnn.arrays import Device
from daskcnn.errors import JobError
from daskcnn.job.resolve import resolve
from daskcnn.nn import (
    LOSSES,
    Context,
    Layout,
    SpecError,
    describe,
    freeze,
    init_network,
    loss_and_gradients,
    map_leaves,
    sequential_from_spec,
    summarise,
    walk,
)
from daskcnn.nn.layer import LayerError
from daskcnn.nn.layers import Add, Branches, Conv, MaxPool, ReLU, Residual
from daskcnn.nn.spec import expand, spec_of
from tests.nn.nn_cases import MAP, example, in_turn
from tests.standin import device_of

CONV = {"layer": "conv", "kernels": 3, "size": 3, "pad": 1}
NETWORK: list[dict[str, Any]] = [
    {"layer": "residual", "path": [CONV, {"layer": "batchnorm"}, {"layer": "relu"}, CONV]},
    {"layer": "branches", "branches": [[{"layer": "residual", "path": [CONV]}], [], [{"layer": "relu"}, CONV]]},
    {"layer": "dense", "units": 4},
]


def test_a_sum_is_that_of_the_paths_by_themselves() -> None:
    device = Device()
    left, right = in_turn(Conv(4, 3, pad=1), ReLU()), in_turn(Conv(4, 1))
    for layer, names in (
        (Residual(left, right), ("path", "shortcut")),
        (Add((left, right)), ("branch1", "branch2")),
    ):
        params, state, x, dy, ctx = example(layer, MAP, device)
        y, _, residual = layer.forward(params, state, x, ctx)
        dx, grads = layer.backward(params, residual, dy, ctx)
        parts, back = [], []
        for path, name in zip((left, right), names, strict=True):
            own, _, kept = path.forward(params[name], {}, x, ctx.child(name))
            parts.append(own)
            own_dx, own_grads = path.backward(params[name], kept, dy, ctx.child(name))
            assert own_dx is not None
            back.append(own_dx)
            np.testing.assert_allclose(grads[name]["layer0"]["w"], own_grads["layer0"]["w"], rtol=1e-12)
        np.testing.assert_allclose(y, parts[0] + parts[1], rtol=1e-12)
        assert dx is not None
        np.testing.assert_allclose(dx, back[0] + back[1], rtol=1e-12)


NORMALISED = {"layer": "residual", "path": [CONV, {"layer": "relu"}, CONV, {"layer": "batchnorm"}]}
PROJECTED = NORMALISED | {"shortcut": [CONV | {"bias": False}, {"layer": "batchnorm"}]}
RELU, DENSE = {"layer": "relu"}, {"layer": "dense", "units": 4}


@pytest.mark.parametrize("frozen", [[], ["residual1/path/batchnorm1"], ["residual1/path/*"], ["*conv*"]], ids=str)
@pytest.mark.parametrize("behind", [[RELU, DENSE], [DENSE], [RELU, NORMALISED, RELU, DENSE]], ids=len)
@pytest.mark.parametrize("block", [NORMALISED, PROJECTED], ids=["itself", "projected"])
def test_a_normalised_sum_and_the_relu_behind_it_are_one_pass(
    block: dict[str, Any], behind: list[dict[str, Any]], frozen: list[str]
) -> None:
    """As what the array expressions compute one by one, to the bit for any number of threads."""
    model = freeze(sequential_from_spec([CONV, block, *behind]), frozen, MAP)
    params, state = init_network(model, 0, MAP, "float64")
    layout, rng = Layout.of(params, state), np.random.default_rng(0)
    batch = rng.standard_normal((5, 4, 40, 3)), rng.integers(0, 4, 40)

    def results(device: Device) -> np.ndarray:
        host, move = device.backend.to_host, device.backend.from_host
        own = layout.views(move(layout.flatten(params, state)))
        loss, _, grads, new = loss_and_gradients(
            model, *own, move(batch[0]), batch[1], LOSSES["softmax"], Context(device)
        )
        flat = layout.flatten(map_leaves(host, grads), map_leaves(host, new))
        return np.append(flat, device.backend.scalar(loss))

    found = results(Device.of("cpu", threads=1))
    np.testing.assert_allclose(found, results(device_of("standin")), rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(found, results(Device.of("cpu", threads=3)))


def test_branches_lie_side_by_side_and_an_empty_one_is_the_input() -> None:
    layer = Branches((in_turn(Conv(2, 3, pad=1)), None, in_turn(MaxPool(1))))
    params, state, x, _, ctx = example(layer, MAP, Device())
    y, _, _ = layer.forward(params, state, x, ctx)
    assert y.shape[-1] == 2 + 3 + 3
    np.testing.assert_array_equal(y[..., 2:5], x)
    np.testing.assert_array_equal(y[..., 5:], x)


def test_a_network_names_its_layers_by_path_and_is_written_out_again() -> None:
    model = sequential_from_spec(NETWORK)
    assert [path for path, _, _ in walk(model, MAP)] == [
        *(f"residual1/path/{name}" for name in ("conv1", "batchnorm1", "relu1", "conv2")),
        "branches1/branch1/residual1/path/conv1",
        *(f"branches1/branch3/{name}" for name in ("relu1", "conv1")),
        "dense1",
    ]
    assert sequential_from_spec(spec_of(model)) == model
    assert deepcopy(model) == model


def test_parameters_of_the_table_are_those_of_the_vector() -> None:
    model = sequential_from_spec(NETWORK)
    params, state = init_network(model, 0, MAP, "float32")
    rows = summarise(model, MAP)
    assert sum(row.parameters for row in rows) == Layout.of(params, state).parameter_size
    assert model.numbers(MAP) == Layout.of(params, state).size
    first, *others = (row for row in rows if row.forward)
    assert first.forward == first.backward == 2 * 5 * 4 * 27 * 3
    assert all(row.backward == 2 * row.forward for row in others)
    assert "branches1/branch1/residual1/path/conv1" in describe(model, MAP)


@pytest.mark.parametrize("threads", [1, 3])
def test_gradients_of_a_nested_network_are_differences_of_its_loss(threads: int) -> None:
    model, rng = sequential_from_spec(NETWORK), np.random.default_rng(0)
    params, state = init_network(model, 0, MAP, "float64")
    layout = Layout.of(params, state)
    x, labels = rng.standard_normal((5, 4, 6, 3)), rng.integers(0, 4, 6)
    vector, along = layout.flatten(params, state), rng.standard_normal(layout.parameter_size)

    def loss(step: float) -> Any:
        moved = vector.copy()
        moved[: layout.parameter_size] += step * along
        return loss_and_gradients(model, *layout.views(moved), x, labels, LOSSES["softmax"], ctx)

    ctx = Context(Device.of("cpu", threads=threads))
    slope = (loss(1e-6)[0] - loss(-1e-6)[0]) / 2e-6
    np.testing.assert_allclose(layout.flatten(loss(0.0)[2], {}) @ along, slope, rtol=1e-6)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("residual1/path/conv1", {"residual1/path/conv1"}),
        ("residual1", {"residual1/path/conv1", "residual1/path/batchnorm1", "residual1/path/conv2"}),
        ("branches1/*/conv1", {"branches1/branch1/residual1/path/conv1", "branches1/branch3/conv1"}),
    ],
)
def test_layers_inside_others_are_frozen_by_their_paths(pattern: str, expected: set[str]) -> None:
    model = freeze(sequential_from_spec(NETWORK), [pattern], MAP)
    assert model.frozen == expected
    params, state = init_network(model, 0, MAP, "float64")
    layout, rng = Layout.of(params, state), np.random.default_rng(0)
    batch = rng.standard_normal((5, 4, 6, 3)), rng.integers(0, 4, 6)
    _, _, grads, new = loss_and_gradients(model, params, state, *batch, LOSSES["softmax"], Context(Device()))
    vector = layout.flatten(grads, {})
    still = np.zeros(layout.size, bool)
    for place in layout.spans(model.frozen):
        still[place] = True
    assert not vector[still[: layout.parameter_size]].any()
    assert (vector[~still[: layout.parameter_size]] != 0).mean() > 0.9
    fixed = "residual1/path/batchnorm1" in expected
    assert fixed == np.array_equal(new["residual1"]["path"]["batchnorm1"]["mean"], np.zeros(3))


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Residual(in_turn(Conv(4, 3, pad=1))), "path gives 5×4×4 and shortcut 5×4×3"),
        (Branches((in_turn(Conv(4, 3)), None)), "branch1 gives 3×2×4 and branch2 5×4×3"),
        (Add((in_turn(Conv(4, 3)), in_turn(Conv(4, 1)))), "branch1 gives 3×2×4 and branch2 5×4×4"),
    ],
)
def test_outputs_that_do_not_go_together_are_refused(layer: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        layer.out_shape(MAP)


def test_a_layer_that_does_not_fit_is_named_by_its_path() -> None:
    model = sequential_from_spec([CONV, {"layer": "residual", "path": [{"layer": "dense", "units": 4}, CONV]}])
    for check in (lambda: model.out_shape(MAP), lambda: list(walk(model, MAP)), lambda: summarise(model, MAP)):
        with pytest.raises(LayerError, match=r"layer residual1/path/conv1: input shape \(4,\)") as caught:
            check()
        assert deepcopy(caught.value).path == "residual1/path/conv1"


def test_all_that_is_wrong_with_a_list_of_layers_is_listed() -> None:
    wrong: list[dict[str, Any]] = [
        {"layer": "residual", "path": [{"layer": "cov"}, {"layer": "conv", "kernels": 3}]},
        {"layer": "residual", "path": []},
        {"layer": "branches", "branches": [[{"layer": "relu"}]]},
        {"layer": "branches", "branches": "conv"},
        {"layer": "add", "branches": [[{"layer": "relu", "size": 2}], [], 3]},
    ]
    with pytest.raises(SpecError) as caught:
        sequential_from_spec(wrong)
    problems = caught.value.problems
    for place, reason in (
        ("layers[0].path[0]", 'layer = "cov"'),
        ("layers[0].path[1]", "conv needs size"),
        ("layers[1]", "path = []"),
        ("layers[2]", "branches=1"),
        ("layers[3]", "branches = 'conv'"),
        ("layers[4]", "branches[2] = 3"),
    ):
        assert any(problem.startswith(place) and reason in problem for problem in problems), (place, problems)


BLOCKS = """
[model.blocks.basic]
defaults = { stride = 1 }
layers = [
  { layer = "residual", path = [
      { layer = "conv", kernels = "$kernels", size = 3, stride = "$stride", pad = 1 },
      { layer = "relu" },
      { layer = "conv", kernels = "$kernels", size = 3, pad = 1 },
    ], shortcut = [{ layer = "conv", kernels = "$kernels", size = 1, stride = "$stride" }] },
  { layer = "relu" },
]

[model.blocks.stage]
layers = [{ block = "basic", kernels = "$kernels", stride = 2 }, { block = "basic", kernels = "$kernels", repeat = 2 }]
"""


def job(text: str) -> dict[str, Any]:
    return tomllib.loads(text)


def test_blocks_with_parameters_are_written_out() -> None:
    layers = """
[[model.layers]]
block = "stage"
kernels = 4
[[model.layers]]
layer = "dense"
units = 10
"""
    resolved = resolve(job(BLOCKS + layers))
    assert resolved.model.blocks is None
    model = sequential_from_spec(resolved.model.layers or [])
    strides = [layer.stride for _, layer, _ in walk(model, (8, 8, 3)) if isinstance(layer, Conv)]
    assert strides == [2, 1, 2, *6 * [1]]
    assert resolve(resolved.model_dump(mode="json", exclude_none=True)).model == resolved.model


@pytest.mark.parametrize(
    ("layers", "problems"),
    [
        ('[{block = "basik"}]', ["layers[0].block = 'basik': there is none of this name; did you mean 'basic'?"]),
        ('[{block = "basic"}]', ["layers[0]: block basic needs kernels"]),
        ('[{block = "basic", kernels = 2, strid = 1}]', ["layers[0].strid: block basic has no such parameter"]),
        ('[{layer = "relu", repeat = 0}]', ["layers[0].repeat = 0"]),
        ('[{layer = "conv", kernels = "$k", size = 1}]', ["layers[0].kernels = '$k': only a block's layers"]),
        ('[{block = "basic", kernels = 2.5}]', ["kernels = 2.5: conv needs int here"]),
        ('[{block = "a"}, {block = "x", repeat = true}]', ["layers[0].block = 'a'", "layers[1].repeat = True"]),
    ],
)
def test_what_is_wrong_with_blocks_is_listed_with_its_place(layers: str, problems: list[str]) -> None:
    with pytest.raises(JobError) as caught:
        resolve(job(f"[model]\nlayers = {layers}\n{BLOCKS}"))
    for problem in problems:
        assert problem in str(caught.value)


class OwnBlock:
    """A block of layers."""

    def __init__(self, *layers: dict[str, Any], **defaults: Any) -> None:
        self.layers, self.defaults = list(layers), defaults


def test_a_mistake_in_nested_repetitions_is_met_once() -> None:
    met = list[str]()

    class Noted(dict[str, OwnBlock]):
        def get(self, name: str, default: Any = None) -> Any:
            met.append(name)
            return super().get(name, default)

    blocks = Noted(inner=OwnBlock({"block": "iner", "repeat": 20}), outer=OwnBlock({"block": "inner", "repeat": 20}))
    layers, problems = expand([{"block": "outer", "repeat": 20}], blocks)
    assert (layers, len(problems), met) == ([], 1, ["outer", "inner", "iner"])


def test_blocks_inside_themselves_and_endless_repetition_are_refused() -> None:
    blocks = {
        "a": OwnBlock({"block": "b"}),
        "b": OwnBlock({"block": "a", "repeat": 2}),
        "unused": OwnBlock({"layer": "relu"}, x=1),
    }
    _, problems = expand([{"block": "a"}], blocks)
    assert any("inside itself (a in b in a)" in problem for problem in problems)
    assert any(problem.startswith("blocks.unused.defaults.x") for problem in problems)
    many = {"c": OwnBlock({"layer": "relu", "repeat": 1000}), "d": OwnBlock({"block": "c", "repeat": 1000})}
    layers, problems = expand([{"block": "d", "repeat": 1000}], many)
    assert len(layers) < 3000
    assert any("more than 2,000 layers" in problem for problem in problems)
