"""Activations: functions of single numbers, for maps and vectors of any shape."""

from __future__ import annotations

from dataclasses import dataclass

from daskcnn.arrays import Array
from daskcnn.nn.initial import Initializer, glorot_uniform, he_normal
from daskcnn.nn.layer import Residual, Shape
from daskcnn.nn.local import BlockSteps, LocalLayer


class _Activation(LocalLayer):
    """Base of the activations; y is kept as the residual."""

    def out_shape(self, in_shape: Shape) -> Shape:
        return in_shape

    def window(self, in_shape: Shape) -> int | None:
        return 1

    @property
    def reach(self) -> int | None:
        return 0


@dataclass(frozen=True)
class ReLU(_Activation):
    """max(x, 0); the derivative at 0 is 0."""

    def block_forward(self, x: Array, block: BlockSteps) -> tuple[Array, Residual]:
        """Note y = max(x, 0); the residual is y."""
        zeros = block.xp.zeros(x.shape[-2:], x.dtype)  # NumPy takes four times as long with a number in their place
        y = block.do(block.xp.maximum, x, zeros, out=block.result(x.shape))
        return y, y

    def block_backward(self, residual: Residual, dy: Array, block: BlockSteps) -> Array:
        """Note dx = dy where y > 0, else 0."""
        y, xp = residual, block.xp
        positive = block.do(xp.greater, y, 0, out=block.take(y.shape, bool))
        return block.do(xp.multiply, dy, positive, out=block.result(y.shape, free=dy))

    def initial_before(self, after: Initializer) -> Initializer:
        """Return He's initializer."""
        return he_normal


@dataclass(frozen=True)
class Sigmoid(_Activation):
    """1 / (1 + e^-x), computed as (1 + tanh(x / 2)) / 2, which does not overflow."""

    def block_forward(self, x: Array, block: BlockSteps) -> tuple[Array, Residual]:
        """Note y = (1 + tanh(x / 2)) / 2; the residual is y."""
        xp = block.xp
        y = block.do(xp.multiply, x, 0.5, out=block.result(x.shape))
        block.do(xp.tanh, y, out=y)
        block.do(xp.add, y, 1, out=y)
        block.do(xp.multiply, y, 0.5, out=y)
        return y, y

    def block_backward(self, residual: Residual, dy: Array, block: BlockSteps) -> Array:
        """Note dx = dy · y · (1 - y)."""
        y, xp = residual, block.xp
        slope = block.do(xp.subtract, 1, y, out=block.take(y.shape))
        block.do(xp.multiply, slope, y, out=slope)
        return block.do(xp.multiply, slope, dy, out=block.result(y.shape, free=slope))

    def initial_before(self, after: Initializer) -> Initializer:
        """Return Glorot's initializer."""
        return glorot_uniform


@dataclass(frozen=True)
class Tanh(_Activation):
    """tanh x."""

    def block_forward(self, x: Array, block: BlockSteps) -> tuple[Array, Residual]:
        """Note y = tanh x; the residual is y."""
        y = block.do(block.xp.tanh, x, out=block.result(x.shape))
        return y, y

    def block_backward(self, residual: Residual, dy: Array, block: BlockSteps) -> Array:
        """Note dx = dy · (1 - y²)."""
        y, xp = residual, block.xp
        block.do(xp.multiply, y, y, out=y)
        slope = block.do(xp.subtract, 1, y, out=y)
        return block.do(xp.multiply, slope, dy, out=block.result(y.shape, free=slope))

    def initial_before(self, after: Initializer) -> Initializer:
        """Return Glorot's initializer."""
        return glorot_uniform
