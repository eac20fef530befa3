"""Layers that training leaves as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from daskcnn.nn.layer import Layer, Shape
from daskcnn.nn.layers.normalise import BatchNorm
from daskcnn.nn.sequential import Sequential


def freeze(model: Sequential, patterns: Sequence[str], in_shape: Shape) -> Sequential:
    """Return the network with the layers frozen whose names match one of the patterns, such as `conv*`.

    Frozen layers keep their parameters. Batch normalising among them is fixed: it goes by its running mean and
    variance, and keeps them. Raises ValueError for a pattern that matches no layer with weights, or if all are frozen.
    """
    if not patterns:
        return model
    weighted = [name for name, layer, shape in model.shapes(in_shape) if layer.numbers(shape)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in weighted):
            known = ", ".join(weighted) or "none"
            raise ValueError(f"freeze = {pattern!r}: matches no layer with weights; there are {known}")
    frozen = frozenset(name for name in weighted if any(fnmatchcase(name, pattern) for pattern in patterns))
    if len(frozen) == len(weighted):
        raise ValueError(f"freeze = {list(patterns)!r}: leaves no layer to train; there are {', '.join(weighted)}")
    layers = tuple((name, _fixed(layer) if name in frozen else layer) for name, layer in model.layers)
    return Sequential(layers, frozen)


def _fixed(layer: Layer) -> Layer:
    """Return the layer with its batch normalising fixed, inside it too."""
    if isinstance(layer, BatchNorm):
        return replace(layer, fixed=True)
    if isinstance(layer, Sequential):
        return Sequential(tuple((name, _fixed(child)) for name, child in layer.layers), layer.frozen)
    return layer
