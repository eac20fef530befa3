"""A convolution problem: shapes, stride, padding and dtype, checked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Shape4 = tuple[int, int, int, int]


@dataclass(frozen=True)
class ConvSpec:
    """Correlate maps x (H, W, N, C) with kernels w (R, S, C, K), giving y (out_H, out_W, N, K).

    N samples, H×W map, C input channels, K kernels of R×S. Raises ValueError for a problem without an output.
    """

    N: int
    H: int
    W: int
    C: int
    K: int
    R: int
    S: int
    stride: tuple[int, int] = (1, 1)
    pad: tuple[int, int] = (0, 0)
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("N", "H", "W", "C", "K", "R", "S"):
            _at_least(name, getattr(self, name), 1)
        for axis, stride, pad in zip("HW", self.stride, self.pad, strict=True):
            _at_least(f"stride along {axis}", stride, 1)
            _at_least(f"pad along {axis}", pad, 0)
        if np.dtype(self.dtype).kind != "f":
            raise ValueError(f"dtype={self.dtype}: a convolution needs floats; use float32 or float64")
        _fits("H", self.H, self.R, self.pad[0])
        _fits("W", self.W, self.S, self.pad[1])

    @property
    def out_H(self) -> int:
        """Output rows."""
        return (self.H + 2 * self.pad[0] - self.R) // self.stride[0] + 1

    @property
    def out_W(self) -> int:
        """Output columns."""
        return (self.W + 2 * self.pad[1] - self.S) // self.stride[1] + 1

    @property
    def x_shape(self) -> Shape4:
        """(H, W, N, C)."""
        return self.H, self.W, self.N, self.C

    @property
    def w_shape(self) -> Shape4:
        """(R, S, C, K)."""
        return self.R, self.S, self.C, self.K

    @property
    def y_shape(self) -> Shape4:
        """(out_H, out_W, N, K)."""
        return self.out_H, self.out_W, self.N, self.K

    @property
    def itemsize(self) -> int:
        """Bytes per number."""
        return np.dtype(self.dtype).itemsize

    @property
    def flops(self) -> int:
        """Floating-point operations of one direction; multiply and add count as two, and padding is included."""
        return 2 * self.out_H * self.out_W * self.N * self.K * self.R * self.S * self.C


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}={value}: a convolution needs at least {least}; give {least} or more")


def _fits(axis: str, size: int, kernel: int, pad: int) -> None:
    if kernel > size + 2 * pad:
        raise ValueError(
            f"kernel of {kernel} along {axis}: the map is {size}, {size + 2 * pad} with its padding; "
            f"use a smaller kernel or pad by at least {(kernel - size + 1) // 2}"
        )
