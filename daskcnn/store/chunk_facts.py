"""The facts of a chunk that a manifest keeps, found once, where the chunk is written: checksums, counts, moments.

Sums of integers are exact, so they do not depend on how the samples are cut into chunks. Those of real numbers are
joined by Chan's formula (Chan, Golub and LeVeque 1979) and depend on the order of the chunks in their last bits.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import isfinite, sqrt
from operator import add
from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.errors import DataError

Numbers = npt.NDArray[Any]
Images = npt.NDArray[Any]
"""Images (N, H, W, C) of one of the number types of a data set, or labels."""
LARGEST = 1e30
"""The largest size of a pixel: float32 has room for it, and float64 for sums of its squares."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums of pixels and of their squares by channel, which mean and deviation follow from; exact for integers.

    If the pixels are real numbers, `sums` are the means, and `squares` the sums of the squared distances from them.
    """

    counts: tuple[int, ...] = ()
    sums: tuple[Any, ...] = ()
    squares: tuple[Any, ...] = ()
    exact: bool = True

    @classmethod
    def of(cls, pixels: Numbers, missing: npt.NDArray[np.bool_] | None = None) -> Moments:
        """Return the moments of pixels (…, C), without those that are missing."""
        every = range(pixels.shape[-1])
        channels = [pixels[..., c].ravel() if missing is None else pixels[..., c][~missing[..., c]] for c in every]
        exact = pixels.dtype.kind in "iu"
        counts, sums, squares = zip(*map(_exact if exact else _real, channels), strict=True)
        return cls(counts, sums, squares, exact)

    def __add__(self, other: Moments) -> Moments:
        if not self.counts or not other.counts:
            return self if self.counts else other
        counts = tuple(map(add, self.counts, other.counts))
        if self.exact:
            return Moments(counts, tuple(map(add, self.sums, other.sums)), tuple(map(add, self.squares, other.squares)))
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
    if values.min() == values.max():  # the mean's rounding error is no deviation
        return values.size, float(values[0]), 0.0
    mean = float(values.mean(dtype=np.float64))
    away = values.astype(np.float64) - mean
    return values.size, mean, float(away @ away)


def _joined(one: tuple[int, float, float], other: tuple[int, float, float]) -> tuple[float, float]:
    n, m = one[0], other[0]
    if not n or not m:
        return (one if n else other)[1:]
    apart = other[1] - one[1]
    return one[1] + apart * m / (n + m), one[2] + other[2] + apart * apart * n * m / (n + m)


@dataclass(frozen=True, slots=True)
class ChunkFacts:
    """A chunk's part of the manifest: the SHA-256 of its arrays, and what counts and statistics are added up from."""

    samples: int
    images: str
    labels: str
    weights: str
    class_counts: tuple[int, ...]
    moments: Moments


def chunk_facts(
    images: Images,
    labels: npt.NDArray[Any],
    weights: npt.NDArray[np.float32] | None = None,
    *,
    classes: int,
    nodata: float | None = None,
    where: str = "",
    first: int = 0,
) -> ChunkFacts:
    """Return the facts of a chunk: images (n, H, W, C), labels (n,) or (n, L), weights (n,).

    `nodata` stands for no data; then NaN does too, and neither counts in the statistics. `where`, the array, and
    `first`, the chunk's first sample, are for messages. Raises DataError as `check_finite`.
    """
    missing = missing_pixels(images, nodata)
    check_finite(images, missing, where=where, first=first)
    return ChunkFacts(
        len(images),
        sha256(images),
        sha256(labels),
        "" if weights is None else sha256(weights.astype(np.float32, copy=False)),
        class_counts(labels, classes),
        Moments.of(images, missing),
    )


def sha256(data: Any) -> str:
    """Return the hexadecimal SHA-256 of bytes, or of an array in its order of rows."""
    plain: Any = np.ascontiguousarray(data) if isinstance(data, np.ndarray) else data
    return hashlib.sha256(plain).hexdigest()


def class_counts(labels: npt.NDArray[Any], classes: int) -> tuple[int, ...]:
    """Return the samples of each class among labels (N,), or with each label among rows (N, L) of 0 and 1."""
    counts = labels.sum(axis=0, dtype=np.int64) if labels.ndim == 2 else np.bincount(labels, minlength=classes)
    return tuple(counts.tolist())


def missing_pixels(images: Images, nodata: float | None) -> npt.NDArray[np.bool_] | None:
    """Return where images have no data, as a mask of their shape; None if they have data everywhere."""
    if nodata is None:
        return None
    mark = mark_of(nodata, images.dtype)
    missing = np.zeros(images.shape, bool) if mark is None else images == mark
    if images.dtype.kind == "f":
        missing |= np.isnan(images)
    return missing if missing.any() else None


def mark_of(nodata: float, dtype: np.dtype[Any]) -> float | None:
    """Return the value that stands for no data as images of this type have it, rounded to a real type.

    None where the type has no room for it: then it is in no image.
    """
    if dtype.kind != "f":
        return nodata
    with np.errstate(over="ignore"):
        found = float(dtype.type(nodata))
    return found if isfinite(found) else None


def check_finite(
    images: Images, missing: npt.NDArray[np.bool_] | None, *, where: str, first: int, option: str = "nodata"
) -> None:
    """Raise DataError naming the first sample and channel that is not finite, or too large to be computed with.

    What is missing may be anything. option: what sets the value that stands for no data, for messages.
    """
    if images.dtype.kind != "f":
        return
    largest = min(LARGEST, float(np.finfo(images.dtype).max))
    wrong = ~((images >= -largest) & (images <= largest))
    if missing is not None:
        wrong &= ~missing
    if not wrong.any():
        return
    sample, row, column, channel = np.argwhere(wrong)[0].tolist()
    value = float(images[sample, row, column, channel])
    reason = f"sample {first + sample}, channel {channel}, pixel ({row}, {column}) is {value}"
    if np.isnan(value):
        raise DataError(where, reason, f"set {option} to any number such as -9999, and NaN stands for no data too")
    if np.isfinite(value):
        remedy = f"scale the images, or set {option} to this value if it stands for no data"
        raise DataError(where, f"{reason}, more than {LARGEST:g} in size", remedy)
    raise DataError(where, reason, "replace it in the images")
