"""What converters are given: a network's layers with their weights, and how its images are normalised."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np

from daskcnn.arrays import Array
from daskcnn.errors import UserError
from daskcnn.nn.layer import Layer, Shape
from daskcnn.training.trained_network import Classifier


@dataclass(frozen=True, slots=True)
class TrainedLayer:
    """A layer of a trained network.

    Attributes
    ----------
    name : the layer's name in the network, such as "conv1"
    layer : its hyper-parameters
    in_shape : shape of its input without N: (H, W, C) or (F,)
    values : parameters and state by name, on the host
    owner : the layer before it whose weights it uses, transposed; None: they are its own
    """

    name: str
    layer: Layer
    in_shape: Shape
    values: Mapping[str, Array]
    owner: TrainedLayer | None = None


def trained_layers(classifier: Classifier) -> Iterator[TrainedLayer]:
    """Yield the layers in order."""
    params, state = classifier.layout.views(classifier.weights)
    before: dict[str | None, TrainedLayer] = {}
    for name, layer, in_shape in classifier.model.shapes(classifier.facts.shape):
        values, owner = params.get(name, {}) | state.get(name, {}), before.get(layer.tied_to)
        before[name] = TrainedLayer(name, layer, in_shape, values, owner)
        yield before[name]


def without_converter(trained: TrainedLayer, target: str, registry: str) -> UserError:
    """Return the error about a layer that a format has no converter for."""
    return UserError(
        f"layer {trained.name}",
        f"{type(trained.layer).__name__} has no converter to {target}",
        f"add an entry to {registry}, or export with --to safetensors, which takes every layer",
    )


def hwc_to_chw(w: Any, in_shape: Shape) -> Any:
    """Return a dense layer's weights (*in_shape, units) as (F, units), with F in the order of channels-first maps."""
    if len(in_shape) == 3 and w.ndim == 4:
        w = w.transpose(2, 0, 1, 3)
    return w.reshape(-1, w.shape[-1])


def scale_and_shift(trained: TrainedLayer) -> tuple[Array, Array]:
    """Return what a layer of batch normalising scales and shifts by, (C,) each: 1 and 0 where it has no such number."""
    values, mean = trained.values, trained.values["mean"]
    return values.get("scale", np.ones_like(mean)), values.get("shift", np.zeros_like(mean))


def version() -> str:
    """Return the version of daskcnn, for files to name."""
    return metadata.version("daskcnn")
