"""A convolution problem: shapes, stride, padding and dtype, checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd

import numpy as np

Shape4 = tuple[int, int, int, int]


@dataclass(frozen=True)
class ConvSpec:
    """Correlate maps x (H, W, N, C) with kernels w (R, S, C / groups, K), giving y (out_H, out_W, N, K).

    N samples, H×W map, C input channels, K kernels of R×S. Raises ValueError for a problem without an output.

    Attributes
    ----------
    stride : rows and columns from one output to the next
    pad : rows of zeros above and below the map, columns at its left and right
    dilation : rows and columns from one tap of a kernel to the next
    groups : equal parts of the channels and of the kernels, in order; a kernel sees the channels of its group alone
    pad_end : rows of zeros below the map and columns at its right, beside those of `pad`
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
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    pad_end: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        for name in ("N", "H", "W", "C", "K", "R", "S", "groups"):
            _at_least(name, getattr(self, name), 1)
        for name, least in (("stride", 1), ("pad", 0), ("dilation", 1), ("pad_end", 0)):
            for axis, value in zip("HW", getattr(self, name), strict=True):
                _at_least(f"{name} along {axis}", value, least)
        for what, count in (("input channels", self.C), ("kernels", self.K)):
            check_divides(self.groups, what, count)
        if np.dtype(self.dtype).kind != "f":
            raise ValueError(f"dtype={self.dtype}: a convolution needs floats; use float32 or float64")
        for axis, size, taps, out in (("H", self.H, self.R, self.out_H), ("W", self.W, self.S, self.out_W)):
            if out < 1:
                raise _too_large(axis, size, taps, self)

    @property
    def out_H(self) -> int:
        """Output rows."""
        return (self.padded[0] - self.extent[0]) // self.stride[0] + 1

    @property
    def out_W(self) -> int:
        """Output columns."""
        return (self.padded[1] - self.extent[1]) // self.stride[1] + 1

    @property
    def extent(self) -> tuple[int, int]:
        """Rows and columns from a kernel's first tap to its last, both included."""
        return (self.R - 1) * self.dilation[0] + 1, (self.S - 1) * self.dilation[1] + 1

    @property
    def padded(self) -> tuple[int, int]:
        """Rows and columns of the map with its padding."""
        return self.H + 2 * self.pad[0] + self.pad_end[0], self.W + 2 * self.pad[1] + self.pad_end[1]

    @property
    def x_shape(self) -> Shape4:
        """(H, W, N, C)."""
        return self.H, self.W, self.N, self.C

    @property
    def w_shape(self) -> Shape4:
        """(R, S, C / groups, K)."""
        return self.R, self.S, self.C // self.groups, self.K

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
        return 2 * self.out_H * self.out_W * self.N * self.K * self.R * self.S * (self.C // self.groups)

    @cached_property
    def group(self) -> ConvSpec:
        """The problem of one group: its channels and its kernels."""
        return replace(self, C=self.C // self.groups, K=self.K // self.groups, groups=1)


def check_divides(groups: int, what: str, count: int) -> None:
    """Raise ValueError where this number of channels or kernels cannot be cut into equal groups."""
    if count % groups:
        raise ValueError(
            f"groups={groups}: {count} {what} cannot be cut into {groups} equal groups; "
            f"use a number that divides {count}, such as {gcd(groups, count)}"
        )


Pair = tuple[int, int]


def same_padding(size: Pair, taps: Pair, stride: Pair, dilation: Pair) -> tuple[Pair, Pair]:
    """Return `pad` and `pad_end` for ceil(size / stride) outputs: half of the zeros before the map, the rest behind."""
    zeros = [
        max(0, (-(-n // step) - 1) * step + (kernel - 1) * apart + 1 - n)
        for n, kernel, step, apart in zip(size, taps, stride, dilation, strict=True)
    ]
    return (zeros[0] // 2, zeros[1] // 2), (zeros[0] % 2, zeros[1] % 2)


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}={value}: a convolution needs at least {least}; give {least} or more")


def _too_large(axis: str, size: int, taps: int, spec: ConvSpec) -> ValueError:
    i = "HW".index(axis)
    extent, padded, dilation = spec.extent[i], spec.padded[i], spec.dilation[i]
    dilated = f", {extent} with dilation {dilation}," if dilation > 1 else ""
    remedy = "use a smaller kernel or" if dilation == 1 else "use a smaller kernel or dilation, or"
    return ValueError(
        f"kernel of {taps}{dilated} along {axis}: the map is {size}, {padded} with its padding; "
        f"{remedy} pad by at least {(extent - size - spec.pad_end[i] + 1) // 2}"
    )
