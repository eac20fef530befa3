"""Each kind of layer as a line of PyTorch. Maps are (N, C, H, W) there, vectors (N, F)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from daskcnn.arrays import Array
from daskcnn.export.trained_layers import TrainedLayer, hwc_to_chw, problem_of, scale_and_shift, without_converter
from daskcnn.nn.layer import Layer
from daskcnn.nn.layers import (
    GELU,
    LRN,
    Add,
    Auxiliary,
    AveragePool,
    BatchNorm,
    Branches,
    Conv,
    Dense,
    Dropout,
    Flatten,
    GlobalPool,
    L2Pool,
    LeakyReLU,
    MaxPool,
    Multiply,
    Pad,
    ReLU,
    Reshape,
    Residual,
    Sigmoid,
    SiLU,
    Tanh,
    Upsample,
)


@dataclass(frozen=True, slots=True)
class Lines:
    """A layer in PyTorch.

    Attributes
    ----------
    forward : an expression of x, the layer's input
    module : what makes the layer's module, where it has one
    tensors : the module's parameters and buffers by their names in PyTorch
    """

    forward: str
    module: str | None = None
    tensors: Mapping[str, Array] = field(default_factory=dict)


Converter: TypeAlias = Callable[[TrainedLayer], Lines]


def attribute(trained: TrainedLayer) -> str:
    """Return the name of the layer's module and of its values."""
    return trained.name.replace(".", "_")


def lines_of(trained: TrainedLayer) -> Lines:
    """Return a layer in PyTorch. Raises UserError for one without converter."""
    converter = CONVERTERS.get(type(trained.layer))
    if converter is None:
        raise without_converter(trained, "PyTorch", "CONVERTERS in daskcnn/export/torch_layers.py")
    return converter(trained)


def _conv(trained: TrainedLayer) -> Lines:
    layer = trained.layer
    assert isinstance(layer, Conv)
    s = problem_of(trained)
    (top, left), (below, right) = s.pad, s.pad_end
    uneven = below or right  # nn.Conv2d has the same padding on both sides
    options = {
        "stride": _short(s.stride),
        "padding": 0 if uneven else _short(s.pad),
        "dilation": _short(s.dilation),
        "groups": s.groups,
        "bias": layer.bias,
    }
    usual = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, "bias": True}
    given = "".join(f", {key}={value!r}" for key, value in options.items() if value != usual[key])
    module = f"nn.Conv2d({s.C}, {s.K}, {_short((s.R, s.S))!r}{given})"
    x = f"F.pad(x, ({left}, {left + right}, {top}, {top + below}))" if uneven else "x"
    tensors = {"weight": trained.values["w"].transpose(3, 2, 0, 1)}
    return Lines(f"self.{attribute(trained)}({x})", module, tensors | _bias(trained))


def _short(pair: tuple[int, int]) -> int | tuple[int, int]:
    """Return one number for two that are equal."""
    return pair[0] if pair[0] == pair[1] else pair


def _dense(trained: TrainedLayer) -> Lines:
    layer, of_map = trained.layer, len(trained.in_shape) == 3
    assert isinstance(layer, Dense)
    if trained.owner is not None:
        return _tied(trained, trained.owner, layer)
    w = hwc_to_chw(trained.values["w"], trained.in_shape)
    module = f"nn.Linear({len(w)}, {layer.units}{'' if layer.bias else ', bias=False'})"
    forward = f"self.{attribute(trained)}(x.flatten(1))" if of_map else f"self.{attribute(trained)}(x)"
    return Lines(forward, module, {"weight": w.T} | _bias(trained))


def _tied(trained: TrainedLayer, owner: TrainedLayer, layer: Dense) -> Lines:
    """The owner's weight the other way, in the order of our vectors, where channels vary fastest."""
    weight = f"self.{attribute(owner)}.weight"
    if len(owner.in_shape) == 3:
        H, W, C = owner.in_shape
        weight = f"{weight}.unflatten(1, ({C}, {H}, {W})).permute(0, 2, 3, 1).flatten(1)"
    if not layer.bias:
        return Lines(f"F.linear(x, {weight}.T)")
    module = f'nn.ParameterDict({{"bias": nn.Parameter(torch.zeros({layer.units}))}})'
    return Lines(f'F.linear(x, {weight}.T, self.{attribute(trained)}["bias"])', module, _bias(trained))


def _bias(trained: TrainedLayer) -> dict[str, Array]:
    return {"bias": trained.values["b"]} if "b" in trained.values else {}


def _batchnorm(trained: TrainedLayer) -> Lines:
    layer, values = trained.layer, trained.values
    assert isinstance(layer, BatchNorm)
    kind = "BatchNorm2d" if len(trained.in_shape) == 3 else "BatchNorm1d"
    affine = (
        layer.scale or layer.shift
    )  # PyTorch has both or neither: what is left out is 1 or 0, and may be trained on
    options = f"eps={layer.epsilon!r}, momentum={layer.momentum!r}{'' if affine else ', affine=False'}"
    module = f"nn.{kind}({trained.in_shape[-1]}, {options})"
    scale, shift = scale_and_shift(trained)
    tensors = ({"weight": scale, "bias": shift} if affine else {}) | {
        "running_mean": values["mean"],
        "running_var": np.maximum(values["variance"], 0),  # as the layer itself does
        "num_batches_tracked": np.zeros((), np.int64),
    }
    return Lines(f"self.{attribute(trained)}(x)", module, tensors)


def _lrn(trained: TrainedLayer) -> Lines:
    layer = trained.layer
    assert isinstance(layer, LRN)
    options = f"{layer.size}, alpha={layer.alpha!r}, beta={layer.beta!r}, k={layer.k!r}"
    if len(trained.in_shape) == 3:
        return Lines(f"F.local_response_norm(x, {options})")
    return Lines(f"F.local_response_norm(x.unsqueeze(-1), {options}).squeeze(-1)")


def _pool(function: str) -> Converter:
    def convert(trained: TrainedLayer) -> Lines:
        layer = trained.layer
        assert isinstance(layer, MaxPool | AveragePool | L2Pool)
        return Lines(f"F.{function}, {layer.size}, {layer.step})")

    return convert


def _flatten(trained: TrainedLayer) -> Lines:
    return Lines("x.permute(0, 2, 3, 1).flatten(1)")


def _dropout(trained: TrainedLayer) -> Lines:
    layer = trained.layer
    assert isinstance(layer, Dropout)
    return Lines(f"self.{attribute(trained)}(x)", f"nn.Dropout({layer.rate!r})")


def _leaky_relu(trained: TrainedLayer) -> Lines:
    layer = trained.layer
    assert isinstance(layer, LeakyReLU)
    return Lines(f"nn.functional.leaky_relu(x, {float(layer.slope)!r})")


def _reshape(trained: TrainedLayer) -> Lines:
    assert isinstance(trained.layer, Reshape)
    H, W, C = trained.layer.shape
    return Lines(f"x.reshape(-1, {H}, {W}, {C}).permute(0, 3, 1, 2)")


def _upsample(trained: TrainedLayer) -> Lines:
    layer = trained.layer
    assert isinstance(layer, Upsample)
    mode = "mode='nearest'" if layer.mode == "nearest" else "mode='bilinear', align_corners=False"
    return Lines(f"F.interpolate(x, scale_factor={layer.factor}, {mode})")


def _scale(trained: TrainedLayer) -> Lines:
    assert isinstance(trained.layer, Multiply)
    return Lines(f"x * {float(trained.layer.factor)!r}")


def _pad(trained: TrainedLayer) -> Lines:
    layer = trained.layer
    assert isinstance(layer, Pad)
    return Lines(f"F.pad(x, {(*[layer.size] * 4, 0, layer.channels)!r})")


def _always(forward: str) -> Converter:
    return lambda trained: Lines(forward)


def _sum(names: Sequence[str]) -> str:
    return " + ".join(names)


def _side_by_side(names: Sequence[str]) -> str:
    return f"torch.cat([{', '.join(names)}], 1)"


CONVERTERS: Mapping[type[Layer], Converter] = {
    Conv: _conv,
    ReLU: _always("torch.relu(x)"),
    Sigmoid: _always("torch.sigmoid(x)"),
    Tanh: _always("torch.tanh(x)"),
    LeakyReLU: _leaky_relu,
    GELU: _always("nn.functional.gelu(x)"),
    SiLU: _always("nn.functional.silu(x)"),
    LRN: _lrn,
    BatchNorm: _batchnorm,
    MaxPool: _pool("max_pool2d(x"),
    AveragePool: _pool("avg_pool2d(x"),
    L2Pool: _pool("lp_pool2d(x, 2.0"),
    GlobalPool: _always("x.mean((2, 3))"),
    Dense: _dense,
    Dropout: _dropout,
    Flatten: _flatten,
    Reshape: _reshape,
    Upsample: _upsample,
    Multiply: _scale,
    Pad: _pad,
    Auxiliary: _always("x"),
}
"""A new layer is a new entry."""

JOINS: Mapping[type[Layer], Callable[[Sequence[str]], str]] = {Residual: _sum, Add: _sum, Branches: _side_by_side}
"""What layers of paths make of the paths' outputs: an expression of their names."""


def state_dict(trained: TrainedLayer, lines: Lines) -> dict[str, Any]:
    """Return the layer's part of the network's `state_dict`: contiguous arrays by name."""
    return {
        f"{attribute(trained)}.{name}": np.ascontiguousarray(a).reshape(a.shape) for name, a in lines.tensors.items()
    }
