"""Mean and deviation of every channel, added up chunk by chunk.

Sums of integers are exact, so they do not depend on how the samples are cut into chunks. Those of real numbers are
joined by Chan's formula (Chan, Golub and LeVeque 1979) and depend on the order of the chunks in their last bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Moments:
    """What mean and deviation are made of, channel by channel.

    Attributes
    ----------
    counts : pixels
    sums : of the pixels; of real numbers their mean
    squares : sums of squares; of real numbers of the distances from their mean
    exact : whether the pixels are integers
    """

    counts: tuple[int, ...]
    sums: tuple[Any, ...]
    squares: tuple[Any, ...]
    exact: bool

    @classmethod
    def none(cls) -> Moments:
        """The moments of no pixel at all."""
        return cls((), (), (), True)

    @classmethod
    def of(cls, pixels: Numbers, missing: npt.NDArray[np.bool_] | None = None) -> Moments:
        """The moments of pixels (…, C), without those that are missing."""
        channels = [_channel(pixels, missing, c) for c in range(pixels.shape[-1])]
        exact = pixels.dtype.kind in "iu"
        counts, sums, squares = zip(*map(_exact if exact else _real, channels), strict=True)
        return cls(counts, sums, squares, exact)

    def __add__(self, other: Moments) -> Moments:
        if not self.counts or not other.counts:
            return self if self.counts else other
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        if self.exact:
            sums = tuple(a + b for a, b in zip(self.sums, other.sums, strict=True))
            squares = tuple(a + b for a, b in zip(self.squares, other.squares, strict=True))
            return Moments(counts, sums, squares, True)
        means, squares = zip(*map(_joined, self._channels(), other._channels()), strict=True)
        return Moments(counts, means, squares, False)

    def _channels(self) -> zip[tuple[int, Any, Any]]:
        return zip(self.counts, self.sums, self.squares, strict=True)

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean of every channel; 0 where there is no pixel."""
        if not self.exact:
            return tuple(map(float, self.sums))
        return tuple(s / n if n else 0.0 for n, s in zip(self.counts, self.sums, strict=True))

    @property
    def deviation(self) -> tuple[float, ...]:
        """Standard deviation of every channel; 0 where all of its pixels are the same."""
        if not self.exact:
            return tuple(sqrt(q / n) if n else 0.0 for n, _, q in self._channels())
        return tuple(sqrt((q * n - s * s) / n**2) if n else 0.0 for n, s, q in self._channels())


def _channel(pixels: Numbers, missing: npt.NDArray[np.bool_] | None, c: int) -> Numbers:
    values = pixels[..., c]
    return values.ravel() if missing is None else values[~missing[..., c]]


def _exact(values: Numbers) -> tuple[int, int, int]:
    if values.dtype == np.uint8:
        counts = np.bincount(values, minlength=256)
        grey = np.arange(256)
        return values.size, int(counts @ grey), int(counts @ grey**2)
    wide = values.astype(np.int64)  # at most 2^26 values of 2^32 when squared: a chunk has 128 MiB
    return values.size, int(wide.sum()), int(wide @ wide)


def _real(values: Numbers) -> tuple[int, float, float]:
    if not values.size:
        return 0, 0.0, 0.0
    mean = float(values.mean(dtype=np.float64))
    away = values.astype(np.float64) - mean
    return values.size, mean, float(away @ away)


def _joined(one: tuple[int, float, float], other: tuple[int, float, float]) -> tuple[float, float]:
    n, m = one[0], other[0]
    if not n or not m:
        return (one if n else other)[1:]
    apart = other[1] - one[1]
    return one[1] + apart * m / (n + m), one[2] + other[2] + apart * apart * n * m / (n + m)
