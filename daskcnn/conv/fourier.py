"""The matrices of a convolution by real discrete Fourier transforms.

Every fast convolution is bilinear, y = Cᵀ[(A x) ⊙ (B w)], where ⊙ is one matrix product over the channels for every
frequency. Its two adjoints are the same matrices transposed. Here A, B and C are two-dimensional DFTs of real maps,
separable: along the height, then along the width. A complex frequency has two rows, re and im. The cyclic length along
an axis is size + pad, as wrapped numbers may fall on outputs that are not used. A large map may be cut into overlapping
tiles, which makes its convolution one of many small maps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.arrays import Array
from daskcnn.conv.spec import ConvSpec, Pair

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Axis:
    """One axis of a convolution of stride 1: numbers, taps, padding at either end, and more at the end alone."""

    size: int
    taps: int
    pad: int
    end: int = 0

    @property
    def out(self) -> int:
        """Outputs of a tile."""
        return self.size + 2 * self.pad + self.end - self.taps + 1

    @property
    def length(self) -> int:
        """The shortest cyclic convolution whose used outputs are all right."""
        return self.size + min(self.pad + self.end, self.taps - 1)


@dataclass(frozen=True)
class Side:
    """The transform of one operand: along its height (length, h), then along its width.

    real (width's length, w): for each real row. pairs (2 · width's length, 2·w): for each pair of rows re, im.
    """

    height: npt.NDArray[Any]
    real: npt.NDArray[Any]
    pairs: npt.NDArray[Any]


@dataclass(frozen=True)
class Fourier:
    """The transforms of the map, the kernels and (transposed) the output, each to `Tiling.rows` rows.

    units : (frequencies, 2), the first row of a frequency, and how many it has: 1 if it is real, else 2
    """

    map: Side
    kernels: Side
    output: Side
    units: npt.NDArray[np.int64]


def fourier(height: Axis, width: Axis, dtype: str) -> Fourier:
    """Return the transforms for these axes."""

    def side(along_height: Matrix, along_width: tuple[Matrix, Matrix]) -> Side:
        return Side(*(np.ascontiguousarray(m, dtype) for m in (along_height, *along_width)))

    def forth(h: int, w: int, sign: int) -> Side:
        H, W = np.arange(h, dtype=float), np.arange(w, dtype=float)
        return side(_along_height(height.length, H, sign), _along_width(width.length, W, sign))

    h, w = height.length, width.length
    of_real = [1] * _reals(w) + [2] * ((w - _reals(w)) // 2)
    sizes = np.array(of_real * _reals(h) + [2] * (w * ((h - _reals(h)) // 2)))
    return Fourier(
        forth(height.size, width.size, -1),
        forth(height.taps, width.taps, 1),  # conjugated: a correlation
        side(_back_along_height(height), _back_along_width(width)),
        np.stack([np.cumsum(sizes) - sizes, sizes], axis=1),
    )


def _reals(length: int) -> int:
    """Return the number of real frequencies of a real DFT: 0, and half the length if that is whole."""
    return 2 - length % 2


def _frequencies(length: int) -> tuple[list[int], list[int]]:
    """Return the real frequencies, and one of each conjugate pair."""
    return [0, length // 2][: _reals(length)], list(range(1, (length + 1) // 2))


def _waves(length: int, frequencies: list[int], positions: Matrix, sign: int) -> npt.NDArray[np.complex128]:
    """Return exp(±2πi f p / length): (frequencies, positions)."""
    turns = np.multiply.outer(np.array(frequencies, dtype=float), positions) % length
    return np.exp(sign * 2j * np.pi / length * turns)


def _along_height(length: int, positions: Matrix, sign: int) -> Matrix:
    """Return (length, positions): real frequencies, then re and im of the others."""
    real, half = (_waves(length, f, positions, sign) for f in _frequencies(length))
    return np.concatenate([real.real, _rows(half.real, half.imag)])


def _along_width(length: int, positions: Matrix, sign: int) -> tuple[Matrix, Matrix]:
    """Return the transforms of real rows (length, positions) and of pairs re, im (2·length, 2·positions)."""
    every = _waves(length, list(range(length)), positions, sign)
    re, im = np.hstack([every.real, -every.imag]), np.hstack([every.imag, every.real])
    return _along_height(length, positions, sign), _rows(re, im)


def _back_along_height(axis: Axis) -> Matrix:
    """Return the inverse of `_along_height`, transposed: (length, out)."""
    real, half = (_asked_for(axis, f) for f in _frequencies(axis.length))
    return np.concatenate([real.real, _rows(2 * half.real, -2 * half.imag)])


def _back_along_width(axis: Axis) -> tuple[Matrix, Matrix]:
    """Return the inverse of `_along_width`, transposed."""
    every = _asked_for(axis, list(range(axis.length)))
    re = np.hstack([every.real, every.imag])  # what re of a product adds to re and im of the result
    im = np.hstack([-every.imag, every.real])
    return _back_along_height(axis), _rows(re, im)


def _asked_for(axis: Axis, frequencies: list[int]) -> npt.NDArray[np.complex128]:
    """Return the waves at the outputs over the length, zero where the kernel does not reach the map."""
    positions = np.arange(axis.out, dtype=float) - axis.pad
    reached = (positions > -axis.taps) & (positions < axis.size)
    return _waves(axis.length, frequencies, positions, 1) * reached / axis.length


def _rows(*parts: Matrix) -> Matrix:
    """Return matrices of one shape as one, their rows taken in turn."""
    return np.stack(parts, axis=1).reshape(-1, parts[0].shape[1])


@dataclass(frozen=True)
class Tiling:
    """`spec`, of stride 1, in tiles of `size` outputs a side; one tile for the whole map if size is None."""

    spec: ConvSpec
    size: int | None

    @cached_property
    def outs(self) -> tuple[int, int]:
        """Outputs of a tile."""
        size = self.size or max(self.spec.out_H, self.spec.out_W)
        return min(size, self.spec.out_H), min(size, self.spec.out_W)

    @cached_property
    def grid(self) -> tuple[int, int]:
        """Tiles along the height and the width."""
        (h, w), s = self.outs, self.spec
        return -(-s.out_H // h), -(-s.out_W // w)

    @cached_property
    def tiles(self) -> int:
        """Tiles of a map."""
        return self.grid[0] * self.grid[1]

    @cached_property
    def axes(self) -> tuple[Axis, Axis]:
        """The axes of a tile, which contains its padding, or of the whole map."""
        s, (h, w) = self.spec, self.outs
        if self.size is None:
            return Axis(s.H, s.R, s.pad[0], s.pad_end[0]), Axis(s.W, s.S, s.pad[1], s.pad_end[1])
        return Axis(h + s.R - 1, s.R, 0), Axis(w + s.S - 1, s.S, 0)

    @cached_property
    def rows(self) -> int:
        """Points of a tile in the frequency domain."""
        return self.axes[0].length * self.axes[1].length

    @property
    def kernel_numbers(self) -> int:
        """Numbers of the kernels' transform."""
        return self.rows * self.spec.C * self.spec.K

    # --- as array expressions ---

    def cut(self, x: Array, xp: Any) -> Array:
        """Return the part of x (H, W, N, C) that each tile reads: (h, w, tiles · N, C), with zeros beyond the map."""
        return self._parts(x, self.spec.pad, self._padded, self.reads, xp)

    def split(self, dy: Array, xp: Any) -> Array:
        """Return the outputs of each tile of dy (out_H, out_W, N, K): (h, w, tiles · N, K), with zeros beyond."""
        (h, w), (down, across) = self.outs, self.grid
        return self._parts(dy, (0, 0), (down * h, across * w), self.outs, xp)

    def _parts(self, a: Array, before: Pair, extent: Pair, size: Pair, xp: Any) -> Array:
        """Return the part of this size of each tile, of a map with zeros before it and up to `extent`."""
        (top, left), (height, width), (h, w) = before, extent, size
        whole = xp.zeros((height, width, *a.shape[2:]), a.dtype)
        rows, cols = min(a.shape[0], height - top), min(a.shape[1], width - left)
        whole[top : top + rows, left : left + cols] = a[:rows, :cols]
        tiles = [whole[i : i + h, j : j + w] for i, j in self._corners]
        return xp.stack(tiles, axis=2).reshape(h, w, -1, a.shape[3])

    def join(self, tiles: Array, xp: Any) -> Array:
        """Invert `split`."""
        (h, w), (down, across) = self.outs, self.grid
        parts = tiles.reshape(h, w, self.tiles, self.spec.N, -1)
        whole = xp.empty((down * h, across * w, *parts.shape[3:]), tiles.dtype)
        for t, (i, j) in enumerate(self._corners):
            whole[i : i + h, j : j + w] = parts[:, :, t]
        return xp.ascontiguousarray(whole[: self.spec.out_H, : self.spec.out_W])

    def add_up(self, dtiles: Array, xp: Any) -> Array:
        """Apply the adjoint of `cut`: gradients of the same pixels from several tiles are added."""
        s, (top, left), (h, w) = self.spec, self.spec.pad, self.reads
        parts = dtiles.reshape(h, w, self.tiles, s.N, -1)
        whole = xp.zeros((max(self._padded[0], top + s.H), max(self._padded[1], left + s.W), *parts.shape[3:]), s.dtype)
        for t, (i, j) in enumerate(self._corners):
            whole[i : i + h, j : j + w] += parts[:, :, t]
        return xp.ascontiguousarray(whole[top : top + s.H, left : left + s.W])

    @property
    def reads(self) -> tuple[int, int]:
        """Rows and columns that a tile reads: enough for the whole correlation."""
        return self.outs[0] + self.spec.R - 1, self.outs[1] + self.spec.S - 1

    @property
    def _padded(self) -> tuple[int, int]:
        """Rows and columns that all tiles read together."""
        (h, w), (down, across) = self.outs, self.grid
        return down * h + self.spec.R - 1, across * w + self.spec.S - 1

    @property
    def _corners(self) -> list[tuple[int, int]]:
        (h, w), (down, across) = self.outs, self.grid
        return [(i * h, j * w) for i, j in product(range(down), range(across))]
