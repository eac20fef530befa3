"""A network as training uses it: initial values, the gradients of a step, prediction, and the table of its layers."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.arrays import Array
from daskcnn.nn.layer import Context, Layer, Params, Shape, State
from daskcnn.nn.losses import Loss, correct, labels_for
from daskcnn.nn.sequential import Sequential
from daskcnn.nn.tree import leaves, map_leaves


def init_network(model: Layer, seed: int, in_shape: Shape, dtype: str) -> tuple[Params, State]:
    """Return parameters and state of this dtype on the host. They are the same values, rounded, for every dtype."""
    params, state, _ = model.init(np.random.default_rng(seed), in_shape)
    return map_leaves(lambda a: a.astype(dtype), params), map_leaves(lambda a: a.astype(dtype), state)


@np.errstate(over="ignore", invalid="ignore")
def loss_and_gradients(
    model: Layer,
    params: Params,
    state: State,
    x: Array,
    labels: npt.NDArray[Any],
    loss: Loss,
    ctx: Context,
    weights: npt.NDArray[Any] | None = None,
) -> tuple[Any, Any, Params, State]:
    """Run one training pass over a host batch x (H, W, N, C), labels (N,): (mean loss, correct, gradients, new state).

    labels may be (N, L), if the loss is for such. weights (N,): of the samples, as `Loss` has them.

    Loss and number of right answers (None where there are none) are 0-d arrays of the device, so that the pass does not
    wait for the device; `backend.scalar` fetches them. A network that diverges gives a loss that is not finite, and no
    warnings.
    """
    backend, ctx = ctx.device.backend, replace(ctx, training=True, need_dx=False)
    images = backend.from_host(x)
    scores, new_state, residual = model.forward(params, state, images, ctx)
    targets = labels_for(loss, images, backend.from_host(labels))
    value, dscores = loss(scores, targets, backend.xp, None if weights is None else backend.from_host(weights))
    _, grads = model.backward(params, residual, dscores, ctx)
    return value, correct(scores, targets), grads, new_state


@np.errstate(over="ignore", invalid="ignore")
def predict(model: Layer, params: Params, state: State, x: Array, ctx: Context) -> Array:
    """Return the scores, (N, classes) of a classifier, on the device, of a host batch x (H, W, N, C)."""
    scores, _, _ = model.forward(params, state, ctx.device.backend.from_host(x), replace(ctx, training=False))
    return scores


@dataclass(frozen=True)
class LayerSummary:
    """A layer's row of the table; out_shape leaves N out."""

    name: str
    layer: str
    out_shape: Shape
    parameters: int


def summarise(model: Sequential, in_shape: Shape) -> tuple[LayerSummary, ...]:
    """Return one entry per layer, in order."""
    rng = np.random.default_rng(0)
    return tuple(_summary(name, layer, rng, shape) for name, layer, shape in model.shapes(in_shape))


def _summary(name: str, layer: Layer, rng: np.random.Generator, in_shape: Shape) -> LayerSummary:
    params, _, out_shape = layer.init(rng, in_shape)
    return LayerSummary(name, _label(layer), out_shape, sum(leaf.size for _, leaf in leaves(params)))


def _label(layer: Layer) -> str:
    """Return the layer with the options that are set: "MaxPool(size=2)"."""
    options = [(f.name, getattr(layer, f.name), f.default) for f in fields(layer)]  # type: ignore[arg-type]
    return f"{type(layer).__name__}({', '.join(f'{n}={v!r}' for n, v, default in options if v != default)})"


def describe(model: Sequential, in_shape: Shape) -> str:
    """Return the table of the layers: name, kind, output shape (without N), parameters; and the total."""
    rows = summarise(model, in_shape)
    cells = [(r.name, r.layer, "×".join(map(str, r.out_shape)), f"{r.parameters:,}") for r in rows]
    total = ("", "", "total", f"{sum(r.parameters for r in rows):,}")
    table = [("layer", "", "output", "parameters"), *cells, total]
    w = [max(len(row[i]) for row in table) for i in range(4)]
    return "\n".join(f"{a:<{w[0]}}  {b:<{w[1]}}  {c:>{w[2]}}  {d:>{w[3]}}" for a, b, c, d in table)
