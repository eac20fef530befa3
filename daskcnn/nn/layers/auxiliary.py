"""A second head in the middle of a network, which helps to train the layers in front of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from daskcnn.arrays import Array
from daskcnn.nn.layer import Context, Head, Initializer, Layer, LayerError, Params, Shape, Start, State, glorot_uniform
from daskcnn.nn.layers.parallel import added
from daskcnn.nn.sequential import Sequential
from daskcnn.nn.vector import map_leaves


@dataclass(frozen=True)
class Auxiliary(Layer):
    """Passes its input on. In training `path` makes scores of it too, whose loss counts `weight` times.

    Szegedy et al. 2015, section 5. Prediction leaves the path out, and so does training without `ctx.heads`. The path
    ends in as many outputs as there are classes.
    """

    path: Sequential
    weight: float = 0.3

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise ValueError(f"weight={self.weight}: Auxiliary needs more than 0")

    def children(self, in_shape: Shape) -> Iterator[tuple[str, Layer, Shape]]:
        """Yield the path."""
        yield "path", self.path, in_shape

    def mapped(self, function: Callable[[str, Any], Any]) -> Auxiliary:
        """Return the layer with its path changed."""
        return replace(self, path=function("path", self.path))

    def out_shape(self, in_shape: Shape) -> Shape:
        """Return the shape of the input. Raises LayerError if the path does not fit it."""
        self.scores_shape(in_shape)
        return in_shape

    def scores_shape(self, in_shape: Shape) -> Shape:
        """Return the shape of what the path makes of an input. Raises LayerError if it does not fit."""
        try:
            return self.path.out_shape(in_shape)
        except ValueError as error:
            raise LayerError.inside("path", error) from error

    def numbers(self, in_shape: Shape) -> int:
        """Return the path's numbers."""
        return self.path.numbers(in_shape)

    def init(self, rng: np.random.Generator, in_shape: Shape, *, initial: Initializer = glorot_uniform) -> Start:
        """Return params and state of the path."""
        params, state, _ = self.path.init(rng, in_shape)
        return ({"path": params} if params else {}), ({"path": state} if state else {}), in_shape

    @property
    def mixes_samples(self) -> bool:
        """True if the path does."""
        return self.path.mixes_samples

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Any]:
        """Return x. In training the path's scores are put into `ctx.heads`."""
        if not ctx.training or ctx.heads is None:
            return x.copy(), state, None
        inner = ctx.child("path")
        scores, kept, residual = self.path.forward(params.get("path", {}), state.get("path", {}), x, inner)
        ctx.heads[ctx.salt] = Head(self.weight, scores)
        return x.copy(), {"path": kept} if kept else {}, residual

    def backward(self, params: Params, residual: Any, dy: Array, ctx: Context) -> tuple[Array | None, Params]:
        """Return dy and what the path adds to it, by the gradient of its scores in `ctx.heads`."""
        if ctx.heads is None:
            return dy.copy(), map_leaves(ctx.device.xp.zeros_like, params)
        gradient, inner = ctx.heads[ctx.salt].gradient, ctx.child("path", need_dx=ctx.need_dx)
        assert gradient is not None, "the loss is known by now"
        dx, grads = self.path.backward(params.get("path", {}), residual, gradient, inner)
        return added([dx, dy], dy, ctx.device) if dx is not None else None, {"path": grads} if grads else {}
