"""Dropout."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np

from daskcnn.arrays import Array, derive, mix64, uniform
from daskcnn.compiled.program import DROPOUT, Operation
from daskcnn.nn.layer import Context, Keys, Residual, Shape
from daskcnn.nn.local import LocalLayer

_ODD = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Dropout(LocalLayer):
    """Zeroes each number with probability `rate` in training and scales the others by 1 / (1 - rate).

    The mask depends only on the sample's key, the layer's path, the pixel and the channel. It does not depend
    on the batch or on the worker. Outside training the layer is the identity.
    """

    code = DROPOUT
    rate: float

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1:
            raise ValueError(f"rate={self.rate}: Dropout needs 0 <= rate < 1, the part that is zeroed")

    def operation(self, ctx: Context) -> Operation | None:
        """Return the operation in training. Raises ValueError if the context has no keys."""
        if not ctx.training:
            return None
        _keys(ctx)
        # what `uniform` gives is a multiple of 2^-24: it reaches the rate from this multiple on
        threshold = ceil(float(np.float32(self.rate)) * (1 << 24))
        return Operation(DROPOUT, (1 / (1 - self.rate),), salt=ctx.salt, threshold=threshold)

    def array_forward(self, x: Array, ctx: Context) -> tuple[Array, Residual]:
        """Return the numbers that are kept, scaled; the residual is the mask, None outside training."""
        if not ctx.training:
            return x.copy(), None
        mask = self._mask(x.shape, ctx)
        return x * mask * (1 / (1 - self.rate)), mask

    def array_backward(self, residual: Residual, dy: Array, ctx: Context) -> Array:
        """Return dy under the mask of the forward pass."""
        return dy * residual * (1 / (1 - self.rate))

    def _mask(self, shape: Shape, ctx: Context) -> Array:
        """Return which numbers (H, W, N, C) or (N, F) are kept."""
        xp, first = ctx.device.xp, ctx.channel
        keys = derive(xp, ctx.device.backend.from_host(_keys(ctx)), ctx.salt)[:, None]
        keys = _spread(xp, keys, xp.arange(first, first + shape[-1], dtype=xp.uint64))
        for extent in reversed(shape[:-2]):
            keys = _spread(xp, keys, xp.arange(extent, dtype=xp.uint64).reshape(-1, *(1,) * keys.ndim))
        return (uniform(xp, keys) >= self.rate).reshape(shape)


def _keys(ctx: Context) -> Keys:
    if ctx.keys is None:
        raise ValueError("keys=None: dropout in training draws from the samples' keys; give them in the context")
    return ctx.keys


def _spread(xp: Any, keys: Array, numbers: Array) -> Array:
    """Return independent keys for every (broadcast) pair of a key and a number: `derive` with an array of salts."""
    return mix64(xp, keys + (2 * numbers + 1) * xp.uint64(_ODD))
