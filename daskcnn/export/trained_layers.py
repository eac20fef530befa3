"""A trained network's layers with their weights, as converters take them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, TypeVar

import numpy as np

from daskcnn.arrays import Array
from daskcnn.conv import ConvSpec
from daskcnn.errors import UserError
from daskcnn.nn.layer import Shape
from daskcnn.nn.layers import kind_of
from daskcnn.training.trained_network import Classifier

Converter = TypeVar("Converter")


@dataclass(frozen=True, slots=True)
class TrainedLayer:
    """A layer of a trained network.

    Attributes
    ----------
    name : the layer's path in the network with dots, such as "residual1.path.conv1"
    in_shape : shape of its input without N: (H, W, C) or (F,)
    values : parameters and state by name, on the host; nested like them for a layer of layers
    owner : the layer before it whose weights it uses, transposed; None: they are its own
    """

    name: str
    layer: Any
    in_shape: Shape
    values: Mapping[str, Any]
    owner: TrainedLayer | None = None

    @property
    def children(self) -> Iterator[TrainedLayer]:
        """The layers that it is made of."""
        before: dict[str | None, TrainedLayer] = {}
        for name, layer, in_shape in self.layer.children(self.in_shape):
            path, owner = f"{self.name}.{name}" if self.name else name, before.get(layer.tied_to)
            before[name] = TrainedLayer(path, layer, in_shape, self.values.get(name, {}), owner)
            yield before[name]

    @property
    def problem(self) -> ConvSpec:
        """The problem of a convolution for one image, with its padding in numbers."""
        H, W, C = self.in_shape
        spec: ConvSpec = self.layer.spec((H, W, 1, C), self.layer.kernels)
        return spec

    @property
    def w_chw(self) -> Array:
        """A dense layer's weights (*in_shape, units) as (F, units), with F in the order of channels-first maps."""
        w = self.values["w"]
        if len(self.in_shape) == 3 and w.ndim == 4:
            w = w.transpose(2, 0, 1, 3)
        return w.reshape(-1, w.shape[-1])

    @property
    def scale_and_shift(self) -> tuple[Array, Array]:
        """The numbers (C,) that batch normalising scales and shifts by: 1 and 0 where it has no such parameter."""
        mean = self.values["mean"]
        return self.values.get("scale", np.ones_like(mean)), self.values.get("shift", np.zeros_like(mean))


def trained_layers(classifier: Classifier) -> Iterator[TrainedLayer]:
    """Yield the network's layers in order."""
    params, state = classifier.layout.views(classifier.weights)
    yield from TrainedLayer("", classifier.model, classifier.facts.shape, _joined(params, state)).children


def _joined(params: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return two trees as one."""
    found = {**params, **{name: value for name, value in state.items() if name not in params}}
    return {
        name: _joined(params.get(name, {}), state.get(name, {})) if isinstance(value, Mapping) else value
        for name, value in found.items()
    }


def converter_of(trained: TrainedLayer, converters: Mapping[str, Converter], target: str, module: str) -> Converter:
    """Return a layer's converter. Raises UserError if the format `target` has none for its kind."""
    kind = kind_of(trained.layer)
    if kind is None or kind not in converters:
        raise UserError(
            f"layer {trained.name}",
            f"{type(trained.layer).__name__} has no converter to {target}",
            f"add an entry to CONVERTERS in {module}, or export with --to safetensors, which takes every layer",
        )
    return converters[kind]


def version() -> str:
    """Return the version of daskcnn, for files to name."""
    return metadata.version("daskcnn")
