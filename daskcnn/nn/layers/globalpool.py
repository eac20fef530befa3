"""Maps to one number a channel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from daskcnn.arrays import Array
from daskcnn.nn.layer import Context, Layer, Params, Residual, Shape, State, map_shape


@dataclass(frozen=True)
class GlobalPool(Layer):
    """Mean of each channel over its whole map: (H, W, N, C) to (N, C). Lin, Chen and Yan 2014, section 3.2."""

    def out_shape(self, in_shape: Shape) -> Shape:
        """Return (C,). Raises ValueError for a vector."""
        return map_shape(self, in_shape)[2:]

    @property
    def reach(self) -> int | None:
        """0: each channel depends on itself alone."""
        return 0

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        """Return the means; the residual is x's shape."""
        pixels = x.reshape(-1, *x.shape[2:])
        total = pixels.sum(axis=0, dtype=np.float64) if len(pixels) > 1 else pixels[0]
        return (total / len(pixels)).astype(x.dtype), state, x.shape

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array, Params]:
        """Return dy / (H · W) at every pixel."""
        H, W = residual[:2]
        dx = ctx.device.xp.empty(residual, dy.dtype)
        dx[...] = dy * (1 / (H * W))
        return dx, {}
