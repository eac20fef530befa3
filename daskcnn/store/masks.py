"""Masked arrays of images: what is masked is no data."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.errors import DataError
from daskcnn.store.chunk_facts import LARGEST, Images, mark_of

_REAL = 1e20
"""NumPy's own fill value of real numbers."""


def own_nodata(images: Any, dtype: np.dtype[Any]) -> float | None:
    """Return the fill value of a masked array, NumPy's or Dask's, as the number that stands for no data in it.

    None for other arrays, where nothing is masked, and where the type that images are kept in has no room for it.
    """
    like = getattr(images, "_meta", images)
    if not isinstance(like, np.ma.MaskedArray) or like.dtype.kind not in "buif":
        return None
    if like is images and not np.ma.is_masked(images):
        return None
    value = float(like.fill_value)
    if dtype.kind == "f":
        return value if abs(value) <= LARGEST else _REAL
    return value if has_room(dtype, value) else None


def has_room(dtype: np.dtype[Any], value: float) -> bool:
    """Return True if integers or truth values of this type can be this number."""
    lo, hi = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return value == round(value) and lo <= value <= hi


def filled(images: npt.NDArray[Any], nodata: float | None, *, own: bool = False, option: str = "nodata") -> Images:
    """Return images of NumPy as a plain array: what is masked is NaN, or of integers the number `nodata`.

    Parameters
    ----------
    nodata : the number that stands for no data, if there is one.
    own : whether the number is the mask's own, which pixels that are not masked must not be.
    option : what sets the number, for messages.

    Raises
    ------
    DataError : integers are masked and cannot be the number, or the mask's own number is a pixel that is not masked.
    """
    dtype = images.dtype
    if dtype.kind not in "buif":
        return np.asarray(images)
    data, mask = np.ma.getdata(images, subok=False), np.ma.getmask(images)
    if own and nodata is not None and (seen := int(((data == mark_of(nodata, dtype)) & ~mask).sum())):
        reason = f"{seen:,} pixels that are not masked are {nodata:g}, the fill value of those that are"
        raise DataError("images", reason, f"set {option} to a number that is in no image")
    if not (count := int(mask.sum())):
        return data
    if dtype.kind == "f":
        return np.where(mask, dtype.type(np.nan), data)
    if nodata is None or not has_room(dtype, nodata):
        reason = "no number stands for no data" if nodata is None else f"no {dtype.name} is {nodata:g}, no data"
        remedy = f"set {option} to a {dtype.name} that is in no image, or give real numbers"
        raise DataError("images", f"{count:,} pixels are masked, and {reason}", remedy)
    return np.where(mask, dtype.type(nodata), data)
