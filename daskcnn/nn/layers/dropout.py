"""Dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from daskcnn.arrays import Array, derive, mix64, uniform
from daskcnn.nn.layer import Context, Layer, Params, Residual, Shape, State

_ODD = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Dropout(Layer):
    """Zeroes each number with probability `rate` in training and scales the others by 1 / (1 - rate).

    The mask is a function of the sample's key, the layer's path, the pixel and the channel alone: it depends neither
    on the batch a sample comes in nor on the worker. Outside training it is the identity.
    """

    rate: float

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1:
            raise ValueError(f"rate={self.rate}: Dropout needs 0 <= rate < 1, the part that is zeroed")

    def out_shape(self, in_shape: Shape) -> Shape:
        return in_shape

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        if not ctx.training:
            return x.copy(), state, None
        kept = self._kept(x.shape, ctx)
        return self._masked(x, kept), state, kept

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array, Params]:
        return self._masked(dy, residual), {}

    def _masked(self, x: Array, kept: Array) -> Array:
        y = x * kept
        y *= 1 / (1 - self.rate)
        return y

    def _kept(self, x_shape: Shape, ctx: Context) -> Array:
        """Bool array of this shape (pixels..., N, C)."""
        if ctx.keys is None:
            raise ValueError("keys=None: dropout in training draws from the samples' keys; give them in the context")
        xp, C, pixels = ctx.device.xp, x_shape[-1], x_shape[:-2]
        samples = derive(xp, ctx.device.backend.from_host(ctx.keys), ctx.salt)
        keys = _spread(xp, samples[:, None], xp.arange(C, dtype=xp.uint64))
        for extent in reversed(pixels):
            keys = _spread(xp, keys, xp.arange(extent, dtype=xp.uint64).reshape(-1, *(1,) * keys.ndim))
        return (uniform(xp, keys) >= self.rate).reshape(x_shape)


def _spread(xp: Any, keys: Array, numbers: Array) -> Array:
    """Independent keys for every pair (broadcast) of a key and a number: `derive` with an array of salts."""
    return mix64(xp, keys + (2 * numbers + 1) * xp.uint64(_ODD))
