"""The table of a network's layers: shapes, parameters, operations, and the memory of their outputs."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from math import prod
from typing import Any

from daskcnn.nn.layer import Layer, Shape, walk
from daskcnn.nn.sequential import Sequential
from daskcnn.nn.vector import leaves, undrawn


@dataclass(frozen=True)
class LayerSummary:
    """A layer's row of the table.

    Attributes
    ----------
    name, layer : its path; kind and options
    parameters : numbers that are trained; 0 for a layer of layers, which have rows of their own
    forward, backward : floating-point operations of its products for one sample; other operations are not counted
    outputs : numbers that it puts out for one sample; 0 for a layer of layers
    """

    name: str
    layer: str
    out_shape: Shape
    parameters: int
    forward: int
    backward: int
    outputs: int


def summarise(model: Sequential, in_shape: Shape) -> tuple[LayerSummary, ...]:
    """Return one entry per layer, in order. Those inside a layer of layers come in front of it.

    Nothing is drawn: a network may be larger than this machine's memory. Raises LayerError for a layer that does not
    fit. The first layer with weights makes no gradient of its input, so its way back is as long as its way there.
    """
    rows, trained = list[LayerSummary](), False
    for path, layer, shape in walk(model, in_shape, composite=True):
        if isinstance(layer, Sequential):
            continue
        inner = next(layer.children(shape), None) is not None
        params, _, out_shape = ({}, {}, layer.out_shape(shape)) if inner else undrawn(layer, shape)
        forward = 0 if inner else layer.operations(shape)
        backward = forward * (2 if trained else 1)
        trained = trained or bool(params)
        numbers = sum(leaf.size for _, leaf in leaves(params)), forward, backward, 0 if inner else prod(out_shape)
        rows.append(LayerSummary(path, label(layer), out_shape, *numbers))
    return tuple(rows)


def label(layer: Layer) -> str:
    """Return the layer with the options that are set: "MaxPool(size=2)"; those that are layers are left out."""

    def holds_layers(value: Any) -> bool:
        return any(isinstance(each, Layer) for each in (value if isinstance(value, tuple) else (value,)))

    options = [(f.name, getattr(layer, f.name), f.default) for f in fields(layer)]  # type: ignore[arg-type] # every layer is a dataclass
    own = [(n, v) for n, v, default in options if (default is MISSING or v != default) and not holds_layers(v)]
    return f"{type(layer).__name__}({', '.join(f'{n}={v!r}' for n, v in own)})"


def describe(model: Sequential, in_shape: Shape) -> str:
    """Return the table of the layers: name, kind, output shape (without N), parameters; and the total."""
    rows = summarise(model, in_shape)
    cells = [(r.name, r.layer, "×".join(map(str, r.out_shape)), f"{r.parameters:,}" if r.outputs else "") for r in rows]
    total = ("", "", "total", f"{sum(r.parameters for r in rows):,}")
    table = [("layer", "", "output", "parameters"), *cells, total]
    w = [max(len(row[i]) for row in table) for i in range(4)]
    return "\n".join(f"{a:<{w[0]}}  {b:<{w[1]}}  {c:>{w[2]}}  {d:>{w[3]}}" for a, b, c, d in table)
