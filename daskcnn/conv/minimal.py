"""Minimal filtering: Winograd's convolution as matrices, and as expressions over whole arrays.

m outputs of a correlation with r taps are y = Aᵀ[(G g) ⊙ (Bᵀ d)] for m + r - 1 inputs d (Lavin and Gray, Fast
Algorithms for Convolutional Neural Networks, 2015). A and G evaluate polynomials of m and r coefficients at the
points, ∞ last; B interpolates. In two dimensions each matrix is applied along the height and along the width, and ⊙ is
one product of matrices over the channels for each pair of points. GPUs run the expressions, and the compiled loops are
held to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
import numpy.typing as npt

from daskcnn.arrays import Array, Device
from daskcnn.conv.spec import ConvSpec, Shape4

Matrix = npt.NDArray[np.float64]

POINTS: dict[int, tuple[tuple[float, ...], tuple[float, ...]]] = {
    4: ((0, 1, -1), (1, 1 / 2, 1 / 2, 1)),
    6: ((0, 1, -1, 1 / 2, -2), (1, 1 / 6, 1 / 6, 16 / 15, 1 / 30, 1)),
    8: ((0, 1, -1, 2, -2, 1 / 2, -1 / 2), (1, 2 / 9, 2 / 9, 1 / 360, 1 / 360, 16 / 45, 16 / 45, 1)),
}
"""The finite points by their number with ∞, and the factors moved from Bᵀ to G, which make Bᵀ's numbers short.

1/2 and -2 round half as much as 2 and -2 (Barabasz et al., Error Analysis and Improving the Accuracy of Winograd
Convolution for Deep Neural Networks, 2020).
"""


@dataclass(frozen=True)
class Minimal:
    """F(m×m, r×r): tiles of m×m outputs of r×r taps."""

    outputs: int
    taps: int

    @property
    def points(self) -> int:
        """Points along one axis, as many as a tile has inputs."""
        return self.outputs + self.taps - 1

    @cached_property
    def a(self) -> Matrix:
        """A (points, outputs)."""
        return self._powers(self.outputs)

    @cached_property
    def g(self) -> Matrix:
        """G (points, taps)."""
        return np.array(POINTS[self.points][1])[:, None] * self._powers(self.taps)

    @cached_property
    def bt(self) -> Matrix:
        """Bᵀ (points, points)."""
        return np.linalg.inv(self._powers(self.points)).T / np.array(POINTS[self.points][1])[:, None]

    def kernel_matrix(self, turned: bool) -> Matrix:
        """Return G (points, taps), or that of kernels turned by 180°."""
        return self.g[:, ::-1] if turned else self.g

    def _powers(self, coefficients: int) -> Matrix:
        finite = np.array(POINTS[self.points][0])[:, None] ** np.arange(coefficients)
        return np.vstack([finite, np.eye(coefficients)[-1]])


@dataclass(frozen=True, slots=True)
class Correlation:
    """A correlation of stride 1: shapes of input and output, and the rows and columns of zeros before the input.

    A negative number of zeros leaves rows of the input out.
    """

    x_shape: Shape4
    y_shape: Shape4
    pad: tuple[int, int]
    dtype: str

    @classmethod
    def forward(cls, spec: ConvSpec) -> Correlation:
        """Return y = x ⋆ w."""
        return cls(spec.x_shape, spec.y_shape, spec.pad, spec.dtype)

    @classmethod
    def data(cls, spec: ConvSpec) -> Correlation:
        """Return the gradient of x: dy correlated with the kernels turned by 180°."""
        pad = spec.R - 1 - spec.pad[0], spec.S - 1 - spec.pad[1]
        return cls(spec.y_shape, spec.x_shape, pad, spec.dtype)

    def tiles(self, f: Minimal) -> tuple[int, int]:
        """Return the numbers of tiles along the height and along the width."""
        return -(-self.y_shape[0] // f.outputs), -(-self.y_shape[1] // f.outputs)


def transform_kernels(f: Minimal, w: Array, turned: bool, device: Device) -> Array:
    """Return the kernels (R, S, C, K), or those turned by 180°, at their points: (points², C, K)."""
    R, S, C, K = w.shape
    return _applied(f.kernel_matrix(turned), w.reshape(R * S, C, K), device)


def correlate(f: Minimal, c: Correlation, x: Array, u: Array, device: Device) -> Array:
    """Return y (out_H, out_W, N, K) from x (H, W, N, C) and kernels at their points (points², C, K)."""
    (th, tw), m, (h, w, N, K) = c.tiles(f), f.outputs, c.y_shape
    v = _applied(f.bt, _tiles(x, c.pad, (th, tw), m, f.points, device), device)
    y = _applied(f.a.T, device.xp.matmul(v, u), device).reshape(m, m, th, tw, N, K)
    whole = y.transpose(2, 0, 3, 1, 4, 5).reshape(th * m, tw * m, N, K)
    return device.xp.ascontiguousarray(whole[:h, :w])


def correlate_filter(f: Minimal, c: Correlation, x: Array, dy: Array, device: Device) -> Array:
    """Return dw (R, S, C, K) from x (H, W, N, C) and dy (out_H, out_W, N, K)."""
    v = _applied(f.bt, _tiles(x, c.pad, c.tiles(f), f.outputs, f.points, device), device)
    z = _applied(f.a, _tiles(dy, (0, 0), c.tiles(f), f.outputs, f.outputs, device), device)
    dw = _applied(f.g.T, device.xp.matmul(v.swapaxes(1, 2), z), device)
    return dw.reshape(f.taps, f.taps, *dw.shape[1:])


def _applied(matrix: Matrix, tiles: Array, device: Device) -> Array:
    """Apply a matrix along the height and along the width of tiles (height·width, …, channels)."""
    both = device.backend.from_host(np.kron(matrix, matrix).astype(tiles.dtype))
    return device.xp.matmul(both, tiles.reshape(len(tiles), -1)).reshape(len(both), *tiles.shape[1:])


def _tiles(x: Array, pad: tuple[int, int], tiles: tuple[int, int], apart: int, size: int, device: Device) -> Array:
    """Return tiles size × size (size², tiles·N, C) of x, `apart` pixels apart, with zeros beyond the map."""
    (th, tw), (H, W, N, C) = tiles, x.shape
    extent = [(n - 1) * apart + size for n in tiles]
    padded = device.xp.zeros((*extent, N, C), x.dtype)
    (own_h, h), (own_w, w) = (_overlap(*a) for a in zip(pad, extent, (H, W), strict=True))
    padded[own_h, own_w] = x[h, w]
    parts = [
        padded[i : i + (th - 1) * apart + 1 : apart, j : j + (tw - 1) * apart + 1 : apart]
        for i, j in product(range(size), repeat=2)
    ]
    return device.xp.stack(parts).reshape(size * size, th * tw * N, C)


def _overlap(pad: int, extent: int, size: int) -> tuple[slice, slice]:
    """Return where a source of this size lies in an extent that begins `pad` before it: in the extent, and its part."""
    low = max(0, pad)
    high = max(low, min(extent, pad + size))
    return slice(low, high), slice(low - pad, high - pad)
