"""Layers that move numbers and compute none: to vectors, to maps, zeros around them, larger maps."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from daskcnn.arrays import Array
from daskcnn.nn.layer import Context, Layer, Params, Residual, Shape, State, check_at_least, map_shape


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
    # even a single pixel's is copied, which reshape alone would not
    return x.transpose(2, 0, 1, 3).copy(order="C").reshape(N, H * W * C)


def as_map(y: Array, shape: Shape) -> Array:
    """Return a copy of vectors (N, H·W·C) as a map of this shape (H, W, N, C)."""
    H, W, N, C = shape
    return y.reshape(N, H, W, C).transpose(1, 2, 0, 3).copy(order="C")


@dataclass(frozen=True)
class Reshape(Layer):
    """(N, H·W·C) to (H, W, N, C), the inverse of `Flatten`: channels vary fastest, then columns, then rows."""

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
        H, W, C = self.shape
        return as_map(x, (H, W, len(x), C)), state, None

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array, Params]:
        """Return a copy of dy as vectors."""
        return as_vectors(dy), {}


@dataclass(frozen=True)
class Pad(Layer):
    """`size` rows and columns of zeros on each side of a map, and `channels` channels of zeros behind its own.

    Behind a ReLU, zeros around a map are to `maxpool` what its own padding is elsewhere. Zero channels are the shortcut
    without parameters of He et al. 2016, section 3.3, option A.
    """

    size: int = 0
    channels: int = 0

    def __post_init__(self) -> None:
        check_at_least(self, 0, "size", "channels")
        if not self.size and not self.channels:
            raise ValueError("size=0, channels=0: Pad needs one of them above 0")

    def out_shape(self, in_shape: Shape) -> Shape:
        """Return the shape of the larger map. Raises ValueError for a vector."""
        H, W, C = map_shape(self, in_shape)
        return H + 2 * self.size, W + 2 * self.size, C + self.channels

    @property
    def reach(self) -> int | None:
        """0: each channel depends on itself alone; None where there are more of them behind."""
        return None if self.channels else 0

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        """Return x among zeros; the residual is its shape."""
        H, W, N, C = x.shape
        rows, columns, channels = self.out_shape((H, W, C))
        y = ctx.device.xp.zeros((rows, columns, N, channels), x.dtype)
        y[self._inner(x.shape)] = x
        return y, state, x.shape

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array, Params]:
        """Return what of dy lies where x did."""
        return ctx.device.xp.ascontiguousarray(dy[self._inner(residual)]), {}

    def _inner(self, shape: Shape) -> tuple[slice, ...]:
        H, W, _, C = shape
        return slice(self.size, self.size + H), slice(self.size, self.size + W), slice(None), slice(C)


@dataclass(frozen=True)
class Upsample(Layer):
    """Maps `factor` times as high and as wide: (H, W, N, C) to (factor·H, factor·W, N, C).

    `mode` "nearest" repeats each pixel. "bilinear" interpolates between the centers of pixels, and holds the value
    beyond the outermost ones (PyTorch's `align_corners=False`).
    """

    factor: int = 2
    mode: Literal["nearest", "bilinear"] = "nearest"
    reach = 0

    def __post_init__(self) -> None:
        check_at_least(self, 1, "factor")

    def out_shape(self, in_shape: Shape) -> Shape:
        """Return (factor·H, factor·W, C). Raises ValueError for a vector."""
        H, W, C = map_shape(self, in_shape)
        return self.factor * H, self.factor * W, C

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        """Return the larger map; nothing is kept."""
        xp, f = ctx.device.xp, self.factor
        if self.mode == "bilinear":
            taller = _stretched(x, f, xp).swapaxes(0, 1)
            return xp.ascontiguousarray(_stretched(taller, f, xp).swapaxes(0, 1)), state, None
        H, W, N, C = x.shape
        y = xp.empty((H, f, W, f, N, C), x.dtype)
        y[...] = x[:, None, :, None]
        return y.reshape(H * f, W * f, N, C), state, None

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array, Params]:
        """Return dx: the sum of dy over the pixels that each pixel was spread to, by its share in them."""
        xp, f = ctx.device.xp, self.factor
        if self.mode == "bilinear":
            narrower = _shrunk(dy.swapaxes(0, 1), f, xp).swapaxes(0, 1)
            return _shrunk(narrower, f, xp), {}
        H, W, N, C = dy.shape
        parts = dy.reshape(H // f, f, W // f, f, N, C)
        dx = parts[:, 0, :, 0].copy()
        for place in range(1, f * f):
            dx += parts[:, place // f, :, place % f]
        return dx, {}


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
