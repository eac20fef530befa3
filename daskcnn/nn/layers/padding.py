"""Zeros around a map, or behind its channels."""

from __future__ import annotations

from dataclasses import dataclass

from daskcnn.arrays import Array
from daskcnn.nn.layer import Context, Layer, Params, Residual, Shape, State, check_at_least, map_shape


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
        (rows, columns, channels), xp = self.out_shape((H, W, C)), ctx.device.xp
        y = xp.zeros((rows, columns, N, channels), x.dtype)
        y[self._inner(x.shape)] = x
        return y, state, x.shape

    def backward(self, params: Params, residual: Residual, dy: Array, ctx: Context) -> tuple[Array, Params]:
        """Return what of dy lies where x did."""
        return ctx.device.xp.ascontiguousarray(dy[self._inner(residual)]), {}

    def _inner(self, shape: Shape) -> tuple[slice, ...]:
        H, W, _, C = shape
        return slice(self.size, self.size + H), slice(self.size, self.size + W), slice(None), slice(C)
