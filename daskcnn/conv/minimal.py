"""Minimal filtering: Winograd's convolution as matrices, and as expressions over whole arrays.

m outputs of a correlation with r taps are y = Aᵀ[(G g) ⊙ (Bᵀ d)] for m + r - 1 inputs d (Lavin and Gray, Fast
Algorithms for Convolutional Neural Networks, 2015). A and G evaluate polynomials of m and r coefficients at the
points, ∞ last; B interpolates. In two dimensions each matrix is applied along the height and along the width, and ⊙ is
one product of matrices over the channels for each pair of points. GPUs run the expressions, and they are the reference
of the compiled loops.

With a stride of 2 the even inputs meet the outer two of three taps as with a stride of 1, and the odd inputs meet the
middle one. Each of these is a point by itself, and all share the middle tap's kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
import numpy.typing as npt

from daskcnn.arrays import Array, Device
from daskcnn.compiled.sizes import Tile
from daskcnn.conv.spec import ConvSpec, Kernels, Shape4, Transforming

Matrix = npt.NDArray[np.float64]

POINTS: dict[int, tuple[tuple[float, ...], tuple[float, ...]]] = {
    4: ((0, 1, -1), (1, 1 / 2, 1 / 2, 1)),
    5: ((0, 1, -1, 2), (1 / 2, 1 / 2, 1 / 6, 1 / 6, 1)),
    6: ((0, 1, -1, 1 / 2, -2), (1, 1 / 6, 1 / 6, 16 / 15, 1 / 30, 1)),
    8: ((0, 1, -1, 2, -2, 1 / 2, -1 / 2), (1, 2 / 9, 2 / 9, 1 / 360, 1 / 360, 16 / 45, 16 / 45, 1)),
}
"""The finite points by their number with ∞, and the factors moved from Bᵀ to G, which make Bᵀ's numbers short.

1/2 and -2 round half as much as 2 and -2 (Barabasz et al., Error Analysis and Improving the Accuracy of Winograd
Convolution for Deep Neural Networks, 2020).
"""


@dataclass(frozen=True, eq=False)
class Minimal:
    """F(m×m, r×r): tiles of m×m outputs of r×r taps, `stride` pixels of the input apart.

    tile: what a tile has along one axis. a: A (points, outputs). g: G (kernels, taps). bt: Bᵀ (points, inputs).
    backward: the tiles of the input's gradient, with the kernels turned by 180°; None: the same.
    """

    tile: Tile
    taps: int
    stride: int
    a: Matrix
    g: Matrix
    bt: Matrix
    backward: Minimal | None = None

    @classmethod
    def of(cls, outputs: int, taps: int) -> Minimal:
        """Return F(m×m, r×r) with a stride of 1: as many inputs as points, each of which has kernels of its own."""
        points, (finite, factors) = outputs + taps - 1, POINTS[outputs + taps - 1]

        def powers(coefficients: int) -> Matrix:
            return np.vstack([np.array(finite)[:, None] ** np.arange(coefficients), np.eye(coefficients)[-1]])

        column, tile = np.array(factors)[:, None], Tile(points, outputs, points, points, outputs)
        return cls(tile, taps, 1, powers(outputs), column * powers(taps), np.linalg.inv(powers(points)).T / column)

    @classmethod
    def halving(cls, m: int) -> Minimal:
        """Return F(m×m, 3×3) with a stride of 2: m + 1 points of the even inputs, and the m odd inputs."""
        outer, identity = cls.of(m, 2), np.eye(m)
        points, own = 2 * m + 1, m + 1
        g, bt, a = np.zeros((own + 1, 3)), np.zeros((points, points)), np.zeros((points, 2 * m))
        g[:own, ::2], g[own, 1] = outer.g, 1
        bt[:own, ::2], bt[own:, 1::2] = outer.bt, identity
        # the gradient of every second input is the outer taps', that of the others an output's times the middle tap
        a[:own, 1::2], a[own:, ::2] = outer.a, identity
        back = cls(Tile(own, m, points, own + 1, 2 * m), 3, 1, a, g, np.vstack([outer.bt, np.eye(m, own)]))
        return cls(Tile(points, 2 * m, points, own + 1, m), 3, 2, np.vstack([outer.a, identity]), g, bt, back)

    @cached_property
    def kernels_of(self) -> list[int]:
        """The number of the kernels at each pair of points."""
        kernels = self.tile.kernels
        own = [min(p, kernels - 1) for p in range(self.tile.points)]
        return [i * kernels + j for i, j in product(own, repeat=2)]

    def kernel_numbers(self, spec: ConvSpec) -> int:
        """Return the numbers of the kernels at their points."""
        return self.tile.kernels**2 * spec.C * spec.K

    def kernel_matrix(self, turned: bool) -> Matrix:
        """Return G (kernels, taps), or that of kernels turned by 180°."""
        return self.g[:, ::-1] if turned else self.g


@dataclass(frozen=True, slots=True)
class Correlation:
    """A convolution or its adjoint: shapes, and rows and columns of zeros before the input; below 0, those left out."""

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
        """Return the gradient of x: dy with the kernels turned by 180°. With a stride of 2 the padding is odd."""
        (top, left), plain = spec.pad, spec.stride == (1, 1)
        pad = (spec.R - 1 - top, spec.S - 1 - left) if plain else (-(top // 2), -(left // 2))
        return cls(spec.y_shape, spec.x_shape, pad, spec.dtype)

    def tiles(self, f: Minimal) -> tuple[int, int]:
        """Return the numbers of tiles along the height and along the width."""
        return -(-self.y_shape[0] // f.tile.outputs), -(-self.y_shape[1] // f.tile.outputs)


class AtPoints(Transforming):
    """A convolution by tiles, brought to points: `f` and `there` make y and dw, `back` and `data` make dx."""

    def __init__(self, f: Minimal, spec: ConvSpec, limit: int) -> None:
        super().__init__(spec, limit, f.kernel_numbers(spec))
        self.f, self.back = f, f.backward or f
        self.there, self.data = Correlation.forward(spec), Correlation.data(spec)


class PointExpressions(AtPoints):
    """Minimal filtering as expressions over whole arrays."""

    def forward(self, x: Array, prepared: Kernels, device: Device, *, bias: Array | None = None) -> Array:
        u = self._transformed(prepared.w, device) if prepared.transformed is None else prepared.transformed
        y = _correlate(self.f, self.there, x, u, device)
        return y if bias is None else y + bias

    def backward_data(self, dy: Array, prepared: Kernels, device: Device) -> Array:
        u = self._transformed(prepared.w, device, turned=True)
        return _correlate(self.back, self.data, dy, u.swapaxes(1, 2), device)

    def backward_filter(self, x: Array, dy: Array, device: Device) -> Array:
        f, c = self.f, self.there
        v = _applied(f.bt, _tiles(x, c.pad, c.tiles(f), f.tile.step, f.tile.inputs, device), device)
        z = _applied(f.a, _tiles(dy, (0, 0), c.tiles(f), f.tile.outputs, f.tile.outputs, device), device)
        own = f.kernels_of[: f.tile.points]
        return _applied(f.g[own].T, device.xp.matmul(v.swapaxes(1, 2), z), device).reshape(self.spec.w_shape)

    def _transformed(self, w: Array, device: Device, *, turned: bool = False) -> Array:
        """Return the kernels (R, S, C, K), or those turned by 180°, at their points: (kernels², C, K)."""
        f, (R, S, C, K) = self.back if turned else self.f, w.shape
        return _applied(f.kernel_matrix(turned), w.reshape(R * S, C, K), device)


def _correlate(f: Minimal, c: Correlation, x: Array, u: Array, device: Device) -> Array:
    """Return y (out_H, out_W, N, K) from x (H, W, N, C) and kernels at their points (kernels², C, K)."""
    (th, tw), m, (h, w, N, K) = c.tiles(f), f.tile.outputs, c.y_shape
    v = _applied(f.bt, _tiles(x, c.pad, (th, tw), f.tile.step, f.tile.inputs, device), device)
    y = _applied(f.a.T, device.xp.matmul(v, u[f.kernels_of]), device).reshape(m, m, th, tw, N, K)
    whole = y.transpose(2, 0, 3, 1, 4, 5).reshape(th * m, tw * m, N, K)
    return device.xp.ascontiguousarray(whole[:h, :w])


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
    """Return the place of a source of this size in an extent that begins `pad` before it, and its part there."""
    low = max(0, pad)
    high = max(low, min(extent, pad + size))
    return slice(low, high), slice(low - pad, high - pad)
