"""Pooling: each window of size×size pixels, every `stride` pixels, becomes one pixel; or a whole map does.

Pixels in no window are ignored.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from daskcnn.arrays import Array
from daskcnn.compiled.program import AVERAGE, L2, MAX, Operation
from daskcnn.nn.layer import Context, Layer, Params, Residual, Shape, State, check_at_least, map_shape
from daskcnn.nn.local import LocalLayer


@dataclass(frozen=True)
class _Pool(LocalLayer):
    """Base of the pools. As array expressions, a window is size² strided views of the map, one for each place."""

    code: ClassVar[int]
    size: int
    stride: int | None = None
    """Pixels from one window to the next; None for the size."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "size", *(("stride",) if self.stride is not None else ()))

    @abstractmethod
    def reduce(self, places: list[Array], xp: Any) -> tuple[Array, Residual]:
        """Return y of the windows whose pixels `places` holds, one array per place, and what `spread` needs."""

    @abstractmethod
    def spread(self, residual: Residual, dy: Array, place: int) -> Array:
        """Return the gradient of the pixels at a place."""

    @property
    def step(self) -> int:
        """Pixels from one window to the next."""
        return self.size if self.stride is None else self.stride

    def out_shape(self, in_shape: Shape) -> Shape:
        H, W, C = map_shape(self, in_shape)
        if self.size > min(H, W):
            raise ValueError(f"size={self.size}: the window is larger than the map, {H}x{W}; use a smaller one")
        return (H - self.size) // self.step + 1, (W - self.size) // self.step + 1, C

    def operation(self, ctx: Context) -> Operation:
        return Operation(self.code, size=self.size, step=self.step)

    def array_forward(self, x: Array, ctx: Context) -> tuple[Array, Residual]:
        y, kept = self.reduce(self._places(x), ctx.device.xp)
        return y, (x.shape, kept)

    def array_backward(self, residual: Residual, dy: Array, ctx: Context) -> Array:
        x_shape, kept = residual
        dx = ctx.device.xp.zeros(x_shape, dy.dtype)
        for i, place in enumerate(self._places(dx)):
            place += self.spread(kept, dy, i)
        return dx

    def _places(self, x: Array) -> list[Array]:
        """Return for each place in the window its pixels: (out_H, out_W, N, C), views of x."""
        H, W, _ = self.out_shape((*x.shape[:2], x.shape[3]))
        step, places = self.step, range(self.size)
        bottom, right = (H - 1) * step + 1, (W - 1) * step + 1
        return [x[i : i + bottom : step, j : j + right : step] for i in places for j in places]


@dataclass(frozen=True)
class MaxPool(_Pool):
    """Greatest number of the window. The gradient goes to the first of equal pixels, by rows."""

    code = MAX

    def reduce(self, places: list[Array], xp: Any) -> tuple[Array, Residual]:
        """Keep the place of the greatest number."""
        number = np.min_scalar_type(len(places) - 1).type
        y, first = places[0], xp.zeros(places[0].shape, number)
        for i, place in enumerate(places[1:], 1):
            first = xp.where(place > y, number(i), first)
            y = xp.maximum(y, place)
        return y.copy() if len(places) == 1 else y, first

    def spread(self, residual: Array, dy: Array, place: int) -> Array:
        """Return dy where the greatest number is at this place."""
        return dy * (residual == place)


@dataclass(frozen=True)
class AveragePool(_Pool):
    """Mean of the window."""

    code = AVERAGE

    def reduce(self, places: list[Array], xp: Any) -> tuple[Array, Residual]:
        """Keep nothing."""
        return sum(places[1:], start=places[0]) * (1 / self.size**2), None

    def spread(self, residual: None, dy: Array, place: int) -> Array:
        """Return dy / size²."""
        return dy * (1 / self.size**2)


@dataclass(frozen=True)
class L2Pool(_Pool):
    """Square root of the sum of the window's squares. Where the root is 0 the gradient is 0."""

    code = L2

    def reduce(self, places: list[Array], xp: Any) -> tuple[Array, Residual]:
        """Keep the pixels and y."""
        y = xp.sqrt(sum(place * place for place in places))
        return y, (places, y)

    def spread(self, residual: tuple[list[Array], Array], dy: Array, place: int) -> Array:
        """Return dy · x / y, 0 where y is 0."""
        places, y = residual
        return dy * places[place] / (y + (y == 0))


@dataclass(frozen=True)
class GlobalPool(Layer):
    """Mean of each channel over its whole map: (H, W, N, C) to (N, C). Lin, Chen and Yan 2014, section 3.2."""

    reach = 0

    def out_shape(self, in_shape: Shape) -> Shape:
        """Return (C,). Raises ValueError for a vector."""
        return map_shape(self, in_shape)[2:]

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Residual]:
        """Return the means; the residual is x's shape."""
        pixels = x.reshape(-1, *x.shape[2:])
        total = pixels.sum(axis=0, dtype=np.float64) if len(pixels) > 1 else pixels[0]
        return (total / len(pixels)).astype(x.dtype), state, x.shape

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array, Params]:
        """Return dy / (H · W) at every pixel."""
        dx = ctx.device.xp.empty(residual, dy.dtype)
        dx[...] = dy * (1 / (residual[0] * residual[1]))
        return dx, {}
