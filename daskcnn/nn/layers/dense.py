"""Fully connected layer."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from daskcnn.arrays import Array
from daskcnn.nn.initial import Initializer, glorot_uniform
from daskcnn.nn.layer import Context, Layer, Params, Residual, Shape, State, check_at_least


@dataclass(frozen=True)
class Dense(Layer):
    """Every output from every input: a map (H, W, N, C) or a vector (N, F) to (N, units).

    Parameters: w (H, W, C, units) or (F, units), and b (units,). On a map it is one GEMM for every pixel, added up: no
    copy into vectors. Reshaped to (H·W·C, units), w is that of the same layer behind `Flatten`.
    """

    units: int

    def __post_init__(self) -> None:
        check_at_least(self, 1, "units")

    def out_shape(self, in_shape: Shape) -> Shape:
        return (self.units,)

    def init(
        self, rng: np.random.Generator, in_shape: Shape, *, initial: Initializer = glorot_uniform
    ) -> tuple[Params, State, Shape]:
        w = initial(rng, (*in_shape, self.units), prod(in_shape), self.units)
        return {"w": w, "b": np.zeros(self.units)}, {}, (self.units,)

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        w = params["w"]
        pixels, weights = (
            x.reshape(-1, *x.shape[-2:]),
            w.reshape(-1, *w.shape[-2:]),
        )  # (H·W, N, C), (H·W, C, units)
        y = ctx.device.xp.matmul(pixels, weights).sum(axis=0)
        y += params["b"]
        return y, state, x

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array | None, Params]:
        x, w, xp = residual, params["w"], ctx.device.xp
        pixels, weights = x.reshape(-1, *x.shape[-2:]), w.reshape(-1, *w.shape[-2:])
        grads = {"w": xp.matmul(pixels.swapaxes(1, 2), dy).reshape(w.shape), "b": dy.sum(axis=0)}
        return xp.matmul(dy, weights.swapaxes(1, 2)).reshape(x.shape) if ctx.need_dx else None, grads

    def initial_before(self, after: Initializer) -> Initializer:
        return glorot_uniform
