"""The matrices of a convolution by real discrete Fourier transforms, with three multiplications per complex product.

Every fast convolution is bilinear, y = Cᵀ[(A x) ⊙ (B w)], where ⊙ is one matrix product over the channels for every
row. Its two adjoints are the same matrices transposed. Here A, B and C are two-dimensional DFTs of real maps,
separable: along the height, then along the width. A complex frequency has three rows in A and B: re, im and re + im. C
combines the three products (Karatsuba): re = t1 - t2, im = t3 - t1 - t2.

The cyclic length along an axis need not hold the whole convolution: wrapped numbers may fall on outputs that
are not used. So size + pad is enough (16 + 2 rather than 16 + 4 for 5 taps with padding 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from daskcnn.arrays import Array, Backend

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Axis:
    """One axis of a convolution of stride 1: numbers in the map, taps of the kernel, padding at either end."""

    size: int
    taps: int
    pad: int

    @property
    def out(self) -> int:
        """Numbers in the output."""
        return self.size + 2 * self.pad - self.taps + 1

    @property
    def length(self) -> int:
        """The shortest cyclic convolution whose used outputs are all right."""
        return self.size + min(self.pad, self.taps - 1)


@dataclass(frozen=True)
class Side:
    """The transform of one operand: along its height, then along its width for real and for complex rows of that.

    Attributes
    ----------
    height : (length, h)
    real : (rows, w), for each real row
    pairs : (rows, 2·w), for each pair of rows re, im
    """

    height: Array
    real: Array
    pairs: Array


@dataclass(frozen=True)
class Frequencies:
    """Number of rows of each kind that DFTs of these lengths (height, width) have.

    Rows are ordered: `reals` blocks of `real_rows`, then `pairs` blocks of `pair_rows`.
    """

    length: tuple[int, int]

    @property
    def reals(self) -> int:
        """Real frequencies along the height."""
        return _reals(self.length[0])

    @property
    def pairs(self) -> int:
        """Complex frequencies along the height."""
        return (self.length[0] - self.reals) // 2

    @property
    def real_rows(self) -> int:
        """Rows of a real frequency: along the width one for every real frequency and three for every complex one."""
        return _reals(self.length[1]) + 3 * ((self.length[1] - _reals(self.length[1])) // 2)

    @property
    def pair_rows(self) -> int:
        """Rows of a complex frequency: along the width all are complex."""
        return 3 * self.length[1]

    @property
    def rows(self) -> int:
        """Rows of all frequencies: each is one matrix product over the channels."""
        return self.reals * self.real_rows + self.pairs * self.pair_rows


@dataclass(frozen=True)
class Fourier(Frequencies):
    """The transforms of the map, the kernels and (transposed) the output."""

    map: Side
    kernels: Side
    output: Side


@lru_cache(maxsize=256)
def fourier(height: Axis, width: Axis, dtype: str, backend: Backend) -> Fourier:
    """Return the transforms for these axes, in the backend's memory."""

    def side(along_height: Matrix, along_width: tuple[Matrix, Matrix]) -> Side:
        return Side(*(backend.from_host(m.astype(dtype)) for m in (along_height, *along_width)))

    def forth(h: int, w: int, sign: int) -> Side:
        H, W = np.arange(h, dtype=float), np.arange(w, dtype=float)
        return side(_along_height(height.length, H, sign), _along_width(width.length, W, sign))

    return Fourier(
        (height.length, width.length),
        forth(height.size, width.size, -1),
        forth(height.taps, width.taps, 1),  # conjugated: a correlation
        side(_back_along_height(height), _back_along_width(width)),
    )


def _reals(length: int) -> int:
    """Return how many frequencies of a real DFT are real: 0, and half the length if that is whole."""
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
    """Return the transforms of real rows (real_rows, positions) and of pairs re, im (pair_rows, 2·positions)."""
    real, half = (_waves(length, f, positions, sign) for f in _frequencies(length))
    every = _waves(length, list(range(length)), positions, sign)
    re, im = np.hstack([every.real, -every.imag]), np.hstack([every.imag, every.real])
    return np.concatenate([real.real, _rows(half.real, half.imag, half.real + half.imag)]), _rows(re, im, re + im)


def _back_along_height(axis: Axis) -> Matrix:
    """Return the inverse of `_along_height`, transposed: (length, out)."""
    real, half = (_asked_for(axis, f) for f in _frequencies(axis.length))
    return np.concatenate([real.real, _rows(2 * half.real, -2 * half.imag)])


def _back_along_width(axis: Axis) -> tuple[Matrix, Matrix]:
    """Return the inverse of `_along_width` from the three products of a complex row, transposed."""
    real, half = (_asked_for(axis, f) for f in _frequencies(axis.length))
    every = _asked_for(axis, list(range(axis.length)))
    re = np.hstack([every.real, every.imag])  # what re of a product adds to re and im of the result
    im = np.hstack([-every.imag, every.real])
    of_real = _rows(*(2 * m for m in _of_products(half.real, -half.imag)))
    return np.concatenate([real.real, of_real]), _rows(*_of_products(re, im))


def _of_products(re: Matrix, im: Matrix) -> tuple[Matrix, Matrix, Matrix]:
    """Turn the weights of re and im into those of t1, t2, t3: re = t1 - t2, im = t3 - t1 - t2."""
    return re - im, -re - im, im


def _asked_for(axis: Axis, frequencies: list[int]) -> npt.NDArray[np.complex128]:
    """Return the waves at the outputs over the length, zero where the kernel does not reach the map."""
    positions = np.arange(axis.out, dtype=float) - axis.pad
    reached = (positions > -axis.taps) & (positions < axis.size)
    return _waves(axis.length, frequencies, positions, 1) * reached / axis.length


def _rows(*parts: Matrix) -> Matrix:
    """Return matrices of one shape as one, their rows taken in turn."""
    return np.stack(parts, axis=1).reshape(-1, parts[0].shape[1])
