"""What is kept of a chunk in the manifest, and what makes a chunk unfit: looked at once, where it is written."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.errors import DataError
from daskcnn.store.moments import Moments

Images = npt.NDArray[Any]
"""Images (N, H, W, C) of one of the number types of a data set, or labels."""
LARGEST = 1e30
"""The largest size of a pixel: float32 has room for it, and float64 for sums of its squares."""


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

    Parameters
    ----------
    nodata : the value that stands for no data; then NaN does too, and neither counts in the statistics
    where : the array, for messages
    first : the chunk's first sample, for messages

    Raises
    ------
    DataError : for NaN without a `nodata`, for infinities, and for what is larger than `LARGEST`, with sample and
        channel
    """
    missing = missing_pixels(images, nodata)
    check_finite(images, missing, where=where, first=first)
    images, labels = np.ascontiguousarray(images), np.ascontiguousarray(labels)
    counts = labels.sum(axis=0, dtype=np.int64) if labels.ndim == 2 else np.bincount(labels, minlength=classes)
    return ChunkFacts(
        len(images),
        _sha256(images),
        _sha256(labels),
        "" if weights is None else _sha256(np.ascontiguousarray(weights, np.float32)),
        tuple(counts.tolist()),
        Moments.of(images, missing),
    )


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


def _sha256(data: npt.NDArray[Any]) -> str:
    return hashlib.sha256(data).hexdigest()  # type: ignore[arg-type]  # a contiguous array is a buffer
