"""Dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from daskcnn.arrays import Array, derive, mix64, uniform
from daskcnn.nn.layer import Residual, Shape
from daskcnn.nn.local import BlockSteps, LocalLayer

_ODD = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Dropout(LocalLayer):
    """Zeroes each number with probability `rate` in training and scales the others by 1 / (1 - rate).

    The mask depends only on the sample's key, the layer's path, the pixel and the channel. It does not depend
    on the batch or on the worker. Outside training the layer is the identity.
    """

    rate: float

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1:
            raise ValueError(f"rate={self.rate}: Dropout needs 0 <= rate < 1, the part that is zeroed")

    def out_shape(self, in_shape: Shape) -> Shape:
        """Return the shape of the input."""
        return in_shape

    def window(self, in_shape: Shape) -> int | None:
        """Return 1: each number depends on one number."""
        return 1

    @property
    def reach(self) -> int | None:
        """0: each channel depends on itself alone."""
        return 0

    def block_forward(self, x: Array, block: BlockSteps) -> tuple[Array, Residual]:
        """Note the mask and y; the residual is the mask, None outside training."""
        if not block.training:
            return x, None
        pixels = () if block.vectors else (block.link.side,) * 2
        kept = block.do(self._draw, block, block.link.salt, pixels, out=block.take(x.shape, bool))
        return self._masked(x, kept, block), kept

    def block_backward(self, residual: Residual, dy: Array, block: BlockSteps) -> Array:
        """Note dx: dy under the mask of the forward pass."""
        return self._masked(dy, residual, block)

    def _masked(self, x: Array, kept: Array, block: BlockSteps) -> Array:
        y = block.do(block.xp.multiply, x, kept, out=block.result(x.shape))
        return block.do(block.xp.multiply, y, 1 / (1 - self.rate), out=y)

    def _draw(self, block: BlockSteps, salt: int, sides: tuple[int, ...], *, out: Array) -> None:
        """Write which numbers (h, w, n, C) are kept. `sides` are the pixels per pixel of the chain's output."""
        if block.keys is None:
            raise ValueError("keys=None: dropout in training draws from the samples' keys; give them in the context")
        xp, first = block.xp, block.channel
        keys = _spread(
            xp, derive(xp, block.keys, salt)[:, None], xp.arange(first, first + out.shape[-1], dtype=xp.uint64)
        )
        for pixels, side in zip((block.part.columns, block.part.rows), sides, strict=False):
            numbers = xp.arange(pixels.start * side, pixels.stop * side, dtype=xp.uint64)
            keys = _spread(xp, keys, numbers.reshape(-1, *(1,) * keys.ndim))
        out[...] = (uniform(xp, keys) >= self.rate).reshape(out.shape)


def _spread(xp: Any, keys: Array, numbers: Array) -> Array:
    """Return independent keys for every (broadcast) pair of a key and a number: `derive` with an array of salts."""
    return mix64(xp, keys + (2 * numbers + 1) * xp.uint64(_ODD))
