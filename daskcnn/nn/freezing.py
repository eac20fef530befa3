"""Layers that training leaves as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from daskcnn.nn.layer import Layer, Shape, walk
from daskcnn.nn.layers.normalise import BatchNorm
from daskcnn.nn.sequential import Sequential


def freeze(model: Sequential, patterns: Sequence[str], in_shape: Shape) -> Sequential:
    """Return the network with the layers frozen whose paths match one of the patterns, such as `conv*`.

    A pattern of a composite layer's path freezes what is inside it.

    Frozen layers keep their parameters. Batch normalising among them is fixed: it goes by its running mean and
    variance, and keeps them. Raises ValueError for a pattern that matches no layer with weights, or if all are frozen.
    """
    if not patterns:
        return model
    weighted = [path for path, layer, shape in walk(model, in_shape) if layer.numbers(shape)]
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in weighted):
            known = ", ".join(weighted) or "none"
            raise ValueError(f"freeze = {pattern!r}: matches no layer with weights; there are {known}")
    frozen = frozenset(name for name in weighted if any(_matches(name, pattern) for pattern in patterns))
    if len(frozen) == len(weighted):
        raise ValueError(f"freeze = {list(patterns)!r}: leaves no layer to train; there are {', '.join(weighted)}")
    changed = _frozen(model, frozen)
    assert isinstance(changed, Sequential)
    return changed


def _matches(path: str, pattern: str) -> bool:
    """Return whether the pattern is of this layer's path, or of that of a layer around it."""
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}/*")


def _frozen(layer: Layer, paths: frozenset[str]) -> Layer:
    """Return the layer with the layers of these paths inside it frozen; "" is the layer itself."""
    if isinstance(layer, BatchNorm):
        return replace(layer, fixed=True) if "" in paths else layer
    changed = layer.mapped(lambda name, child: _frozen(child, _inside(paths, name)))
    return replace(changed, frozen=paths) if isinstance(changed, Sequential) else changed


def _inside(paths: frozenset[str], name: str) -> frozenset[str]:
    """Return the paths that lead into the child of this name, from there on."""
    parts = (path.partition("/") for path in paths)
    return frozenset(rest for first, _, rest in parts if first == name)
