"""Maps to vectors."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from daskcnn.arrays import Array
from daskcnn.nn.layer import Context, Layer, Params, Residual, Shape, State, map_shape


@dataclass(frozen=True)
class Flatten(Layer):
    """(H, W, N, C) to (N, H·W·C), in NHWC's order in memory: rows, then columns, then channels, which vary fastest."""

    def out_shape(self, in_shape: Shape) -> Shape:
        """Return (H·W·C,). Raises ValueError for a vector."""
        return (prod(map_shape(self, in_shape)),)

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        """Return a copy of x in the order (N, H·W·C); the residual is x's shape."""
        return as_vectors(x), state, x.shape

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array, Params]:
        """Return a copy of dy in the shape of x."""
        return as_map(dy, residual), {}


def as_vectors(x: Array) -> Array:
    """Return a copy of a map (H, W, N, C) as vectors (N, H·W·C)."""
    H, W, N, C = x.shape
    y = x.transpose(2, 0, 1, 3).copy(order="C")  # even a single pixel's, which reshape alone would not copy
    return y.reshape(N, H * W * C)


def as_map(y: Array, shape: Shape) -> Array:
    """Return a copy of vectors (N, H·W·C) as a map of this shape (H, W, N, C)."""
    H, W, N, C = shape
    return y.reshape(N, H, W, C).transpose(1, 2, 0, 3).copy(order="C")
