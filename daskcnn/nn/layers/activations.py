"""Activations: functions of single numbers, for maps and vectors of any shape."""

from __future__ import annotations

from dataclasses import dataclass

from daskcnn.arrays import Array
from daskcnn.compiled.program import RELU, SIGMOID, TANH, Operation
from daskcnn.nn.initial import Initializer, glorot_uniform, he_normal
from daskcnn.nn.layer import Context, Residual, Shape
from daskcnn.nn.local import LocalLayer


class _Activation(LocalLayer):
    """Base of the activations. As array expressions they keep y."""

    def out_shape(self, in_shape: Shape) -> Shape:
        return in_shape

    @property
    def reach(self) -> int | None:
        return 0


@dataclass(frozen=True)
class ReLU(_Activation):
    """max(x, 0); the derivative at 0 is 0."""

    def operation(self, ctx: Context) -> Operation:
        """Return the operation."""
        return Operation(RELU)

    def array_forward(self, x: Array, ctx: Context) -> tuple[Array, Residual]:
        """Return max(x, 0)."""
        y = ctx.device.xp.maximum(x, 0)
        return y, y

    def array_backward(self, residual: Residual, dy: Array, ctx: Context) -> Array:
        """Return dy where y > 0, else 0."""
        return dy * (residual > 0)

    def initial_before(self, after: Initializer) -> Initializer:
        """Return He's initializer."""
        return he_normal


@dataclass(frozen=True)
class Sigmoid(_Activation):
    """1 / (1 + e^-x)."""

    def operation(self, ctx: Context) -> Operation:
        """Return the operation."""
        return Operation(SIGMOID)

    def array_forward(self, x: Array, ctx: Context) -> tuple[Array, Residual]:
        """Return (1 + tanh(x / 2)) / 2, which does not overflow."""
        y = (1 + ctx.device.xp.tanh(x * 0.5)) * 0.5
        return y, y

    def array_backward(self, residual: Residual, dy: Array, ctx: Context) -> Array:
        """Return dy · y · (1 - y)."""
        return dy * residual * (1 - residual)

    def initial_before(self, after: Initializer) -> Initializer:
        """Return Glorot's initializer."""
        return glorot_uniform


@dataclass(frozen=True)
class Tanh(_Activation):
    """tanh x."""

    def operation(self, ctx: Context) -> Operation:
        """Return the operation."""
        return Operation(TANH)

    def array_forward(self, x: Array, ctx: Context) -> tuple[Array, Residual]:
        """Return tanh x."""
        y = ctx.device.xp.tanh(x)
        return y, y

    def array_backward(self, residual: Residual, dy: Array, ctx: Context) -> Array:
        """Return dy · (1 - y²)."""
        return dy * (1 - residual * residual)

    def initial_before(self, after: Initializer) -> Initializer:
        """Return Glorot's initializer."""
        return glorot_uniform
