"""Multiplication by a constant."""

from __future__ import annotations

from dataclasses import dataclass

from daskcnn.arrays import Array
from daskcnn.nn.layer import Context, Layer, Params, Residual, Shape, State


@dataclass(frozen=True)
class Multiply(Layer):
    """y = factor · x, of maps and of vectors. Behind the last layer it tempers the scores."""

    factor: float

    def __post_init__(self) -> None:
        if not abs(self.factor) > 0:
            raise ValueError(f"factor={self.factor}: Multiply needs one that is not 0, which would leave nothing of x")

    def out_shape(self, in_shape: Shape) -> Shape:
        """Return the shape of the input."""
        return in_shape

    @property
    def reach(self) -> int | None:
        """0: each channel depends on itself alone."""
        return 0

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        """Return factor · x; nothing is kept."""
        return x * self.factor, state, None

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array, Params]:
        """Return factor · dy."""
        return dy * self.factor, {}
