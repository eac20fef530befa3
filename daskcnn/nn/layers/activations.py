"""Activations: functions of one number, and of maps and vectors of any shape."""

from __future__ import annotations

from dataclasses import dataclass

from daskcnn.arrays import Array
from daskcnn.nn.initial import Initializer, glorot_uniform, he_normal
from daskcnn.nn.layer import Context, Layer, Params, Residual, Shape, State


@dataclass(frozen=True)
class ReLU(Layer):
    """max(x, 0); the derivative at 0 is 0."""

    def out_shape(self, in_shape: Shape) -> Shape:
        return in_shape

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        y = ctx.device.xp.maximum(x, 0)
        return y, state, y

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array, Params]:
        return dy * (residual > 0), {}

    def initial_before(self, after: Initializer) -> Initializer:
        return he_normal


@dataclass(frozen=True)
class Sigmoid(Layer):
    """1 / (1 + e^-x), as (1 + tanh(x / 2)) / 2, which does not overflow."""

    def out_shape(self, in_shape: Shape) -> Shape:
        return in_shape

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        y = ctx.device.xp.tanh(x * 0.5)
        y += 1
        y *= 0.5
        return y, state, y

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array, Params]:
        dx = 1 - residual
        dx *= residual
        dx *= dy
        return dx, {}

    def initial_before(self, after: Initializer) -> Initializer:
        return glorot_uniform


@dataclass(frozen=True)
class Tanh(Layer):
    """tanh x."""

    def out_shape(self, in_shape: Shape) -> Shape:
        return in_shape

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        y = ctx.device.xp.tanh(x)
        return y, state, y

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array, Params]:
        dx = residual * residual
        dx = 1 - dx
        dx *= dy
        return dx, {}

    def initial_before(self, after: Initializer) -> Initializer:
        return glorot_uniform
