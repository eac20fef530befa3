"""Larger maps from small ones, for decoders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from daskcnn.arrays import Array
from daskcnn.nn.layer import Context, Layer, Params, Residual, Shape, State, check_at_least, map_shape


@dataclass(frozen=True)
class Upsample(Layer):
    """Maps `factor` times as high and as wide: (H, W, N, C) to (factor·H, factor·W, N, C).

    `mode` "nearest" repeats each pixel. "bilinear" interpolates between the centers of pixels, and holds the value
    beyond the outermost ones (PyTorch's `align_corners=False`).
    """

    factor: int = 2
    mode: Literal["nearest", "bilinear"] = "nearest"

    def __post_init__(self) -> None:
        check_at_least(self, 1, "factor")

    def out_shape(self, in_shape: Shape) -> Shape:
        """Return (factor·H, factor·W, C). Raises ValueError for a vector."""
        H, W, C = map_shape(self, in_shape)
        return self.factor * H, self.factor * W, C

    @property
    def reach(self) -> int | None:
        """0: each channel depends on itself alone."""
        return 0

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        """Return the larger map; nothing is kept."""
        xp, f = ctx.device.xp, self.factor
        if self.mode == "bilinear":
            taller = _stretched(x, f, xp)
            return _turned(_stretched(_turned(taller), f, xp), xp), state, None
        H, W, N, C = x.shape
        y = xp.empty((H, f, W, f, N, C), x.dtype)
        y[...] = x[:, None, :, None]
        return y.reshape(H * f, W * f, N, C), state, None

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array, Params]:
        """Return dx: the sum of dy over the pixels that each pixel was spread to, by its share in them."""
        xp, f = ctx.device.xp, self.factor
        if self.mode == "bilinear":
            narrower = _turned(_shrunk(_turned(dy), f, xp))
            return _shrunk(narrower, f, xp), {}
        H, W, N, C = dy.shape
        parts = dy.reshape(H // f, f, W // f, f, N, C)
        dx = parts[:, 0, :, 0].copy()
        for place in range(1, f * f):
            dx += parts[:, place // f, :, place % f]
        return dx, {}


def _turned(x: Array, xp: Any = None) -> Array:
    """Return a view of the map with rows and columns exchanged; of one in C order if `xp` is given."""
    y = x.swapaxes(0, 1)
    return y if xp is None else xp.ascontiguousarray(y)


def _share(phase: int, factor: int) -> float:
    """Return how far a row of this phase (0 to factor - 1) lies behind its pixel's center, in pixels: -1/2 to 1/2."""
    return (phase + 0.5) / factor - 0.5


def _stretched(x: Array, factor: int, xp: Any) -> Array:
    """Return x with `factor` rows for each, interpolated: those before a row's center lean on the row before."""
    before, after = xp.concatenate([x[:1], x[:-1]]), xp.concatenate([x[1:], x[-1:]])
    y = xp.empty((len(x), factor, *x.shape[1:]), x.dtype)
    for phase in range(factor):
        share = _share(phase, factor)
        y[:, phase] = (1 - abs(share)) * x + abs(share) * (before if share < 0 else after)
    return y.reshape(len(x) * factor, *x.shape[1:])


def _shrunk(dy: Array, factor: int, xp: Any) -> Array:
    """Return the gradient of the rows that `_stretched` was given."""
    parts = dy.reshape(len(dy) // factor, factor, *dy.shape[1:])
    dx = xp.zeros(parts[:, 0].shape, dy.dtype)
    for phase in range(factor):
        share, part = _share(phase, factor), parts[:, phase]
        dx += (1 - abs(share)) * part
        lent = abs(share) * part
        if share < 0:
            dx[:-1] += lent[1:]
            dx[:1] += lent[:1]
        else:
            dx[1:] += lent[:-1]
            dx[-1:] += lent[-1:]
    return dx
