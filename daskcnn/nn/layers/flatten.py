"""Maps to vectors."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from daskcnn.arrays import Array
from daskcnn.nn.layer import Context, Layer, Params, Residual, Shape, State, map_shape


@dataclass(frozen=True)
class Flatten(Layer):
    """(H, W, N, C) to (N, H·W·C): rows, then columns, then channels, which vary fastest; as NHWC lies in memory."""

    def out_shape(self, in_shape: Shape) -> Shape:
        return (prod(map_shape(self, in_shape)),)

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        H, W, N, C = x.shape
        y = x.transpose(2, 0, 1, 3).copy(order="C")  # even a single pixel's, which reshape alone would not copy
        return y.reshape(N, H * W * C), state, x.shape

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array, Params]:
        H, W, N, C = residual
        return dy.reshape(N, H, W, C).transpose(1, 2, 0, 3).copy(order="C"), {}
