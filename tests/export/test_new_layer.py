"""A layer and an activation of one's own: a class each, and a line in each of three registries."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daskcnn.arrays import Array, Device
from daskcnn.export import onnx_file, torch_module
from daskcnn.nn import (
    LAYERS,
    LOSSES,
    Context,
    Layer,
    Params,
    Shape,
    State,
    describe,
    init_network,
    loss_and_gradients,
    map_leaves,
)
from daskcnn.nn.layer import Initializer, Residual, glorot_uniform
from daskcnn.nn.layers.activations import Activation
from daskcnn.nn.spec import sequential_from_spec, spec_of
from tests.export.networks import classifier, facts
from tests.export.test_onnx import check as check_onnx
from tests.export.test_torch import check as check_torch
from tests.nn.nn_cases import MAP, VECTOR, in_turn
from tests.nn.test_nn_layer_laws import test_gradients_are_the_central_differences as check_gradients

SPEC: list[dict[str, Any]] = [
    {"layer": "conv", "kernels": 4, "size": 3},
    {"layer": "softsign"},
    {"layer": "gain", "first": 1.5},
    {"layer": "maxpool", "size": 2},
    {"layer": "dense", "units": 4},
]


@dataclass(frozen=True)
class Softsign(Activation):
    """x / (1 + |x|), without a compiled loop."""

    saturates = True

    def array_forward(self, x: Array, ctx: Context) -> tuple[Array, Residual]:
        share = 1 / (1 + abs(x))
        return x * share, share

    def array_backward(self, residual: Residual, dy: Array, ctx: Context) -> Array:
        return dy * residual * residual


@dataclass(frozen=True)
class Gain(Layer):
    """Each channel times a number that is learnt, `first` in the beginning."""

    first: float = 1.0

    def out_shape(self, in_shape: Shape) -> Shape:
        return in_shape

    def numbers(self, in_shape: Shape) -> int:
        return in_shape[-1]

    def init(
        self, rng: np.random.Generator, in_shape: Shape, *, initial: Initializer = glorot_uniform
    ) -> tuple[Params, State, Shape]:
        return {"gain": np.full(in_shape[-1], float(self.first))}, {}, in_shape

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        return x * params["gain"], state, x

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array, Params]:
        return dy * params["gain"], {"gain": (dy * residual).sum(axis=tuple(range(dy.ndim - 1)))}


def gain_to_onnx(graph: onnx_file.Graph, trained: Any, x: str) -> str:
    gain = trained.values["gain"].reshape(-1, *[1] * (len(trained.in_shape) - 1))
    return graph.add("Mul", trained.name, x, graph.constant(f"{trained.name}.gain", gain))


def gain_to_torch(trained: Any) -> torch_module.Lines:
    gain = trained.values["gain"].reshape(-1, *[1] * (len(trained.in_shape) - 1))
    name, shape = torch_module.attribute(trained), ", ".join(map(str, gain.shape))
    module = f'nn.ParameterDict({{"gain": nn.Parameter(torch.zeros({shape}))}})'
    return torch_module.Lines(f'x * self.{name}["gain"]', module, {"gain": gain})


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three lines each, and no other place."""
    monkeypatch.setitem(LAYERS, "softsign", Softsign)
    monkeypatch.setitem(onnx_file.CONVERTERS, "softsign", onnx_file.node("Softsign"))
    monkeypatch.setitem(torch_module.CONVERTERS, "softsign", torch_module.line("F.softsign(x)"))
    monkeypatch.setitem(LAYERS, "gain", Gain)
    monkeypatch.setitem(onnx_file.CONVERTERS, "gain", gain_to_onnx)
    monkeypatch.setitem(torch_module.CONVERTERS, "gain", gain_to_torch)


@pytest.mark.parametrize("in_shape", [MAP, VECTOR])
@pytest.mark.parametrize("layer", [Softsign(), Gain(2.0), in_turn(Softsign(), Gain(), Softsign())], ids=repr)
def test_they_keep_the_law_of_gradients(layer: Layer, in_shape: Shape) -> None:
    check_gradients(layer, in_shape)


def test_they_are_trained() -> None:
    model = sequential_from_spec(SPEC)
    params, state = init_network(model, 0, (8, 8, 3), "float32")
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((8, 8, 12, 3)).astype("float32"), np.arange(12) % 4
    losses = []
    for _ in range(30):
        batch = x, labels, LOSSES["softmax"], Context(Device())
        loss, _, grads, state = loss_and_gradients(model, params, state, *batch)
        params = step(params, grads)
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 2
    assert not np.array_equal(params["gain1"]["gain"], np.full(4, 1.5))


def step(params: Params, grads: Params) -> Params:
    """Go down by 0.1."""
    down = map_leaves(lambda grad: np.float32(0.1) * grad, grads)
    return {name: {key: array - down[name][key] for key, array in own.items()} for name, own in params.items()}


def test_they_are_described_and_written_as_tables() -> None:
    model = sequential_from_spec(SPEC)
    assert spec_of(model)[1:3] == SPEC[1:3]
    table = describe(model, (8, 8, 3))
    assert "softsign1  Softsign()" in table
    assert "gain1      Gain(first=1.5)" in table


def test_they_are_exported() -> None:
    trained = classifier({"layers": SPEC}, facts((8, 8, 3)))
    check_onnx(trained)
    code, tensors = torch_module.torch_module(trained)
    assert "x = F.softsign(x)" in code
    assert 'x = x * self.gain1["gain"]' in code
    assert tensors["gain1.gain"].shape == (4, 1, 1)


def test_they_answer_in_pytorch_as_they_do_here(tmp_path: Path) -> None:
    check_torch(classifier({"layers": SPEC}, facts((8, 8, 3))), tmp_path)
