"""Vectors to maps."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from daskcnn.arrays import Array
from daskcnn.nn.layer import Context, Layer, Params, Residual, Shape, State, check_at_least


@dataclass(frozen=True)
class Reshape(Layer):
    """(N, H·W·C) to (H, W, N, C), the inverse of `Flatten`: channels vary fastest, then columns, then rows.

    shape: H, W and C of the map.
    """

    shape: tuple[int, int, int]

    def __post_init__(self) -> None:
        check_at_least(self, 1, "shape")

    def out_shape(self, in_shape: Shape) -> Shape:
        """Return (H, W, C). Raises ValueError for a map, and for a vector of another length."""
        if in_shape != (count := prod(self.shape),):
            remedy = f"put a dense layer of {count} units before it"
            raise ValueError(f"input shape {in_shape}: Reshape to {list(self.shape)} needs ({count},); {remedy}")
        return self.shape

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        """Return a copy of x as a map; nothing is kept."""
        return x.reshape(len(x), *self.shape).transpose(1, 2, 0, 3).copy(order="C"), state, None

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array, Params]:
        """Return a copy of dy as vectors."""
        N = dy.shape[2]
        return dy.transpose(2, 0, 1, 3).copy(order="C").reshape(N, -1), {}
