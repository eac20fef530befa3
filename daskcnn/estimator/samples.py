"""Samples of an estimator: shapes, number types, labels and weights as a data set can hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from daskcnn.datasets.own_data import OwnData
from daskcnn.store.manifest import Dtype

ImageShape = tuple[int, int, int]

_STORED = get_args(Dtype)


@dataclass(frozen=True)
class FitSamples:
    """Samples of a fit, with what an estimator keeps of them: the classes, the images' shape, names of the features."""

    data: OwnData
    classes: npt.NDArray[Any]
    shape: ImageShape
    names: npt.NDArray[Any] | None


def stored_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Return the number type that a data set keeps such images in: the type itself, or the smallest that holds it.

    Integers of 32 and 64 bits become float64. Raises ValueError for a type that is not of real numbers.
    """
    found = np.dtype(dtype)
    if found.kind not in "buif":
        raise ValueError(f"X has dtype {found}: images are real numbers; convert them")
    if found.newbyteorder("=").name in _STORED:
        return found.newbyteorder("=")
    return next((np.dtype(name) for name in _STORED if np.can_cast(found, name, "safe")), np.dtype("float64"))


def image_shape_of(shape: Sequence[int], wanted: Any) -> ImageShape:
    """Return (H, W, C) of the images in an array (N, features), (N, H, W) or (N, H, W, C).

    Two dimensions are 1 × features × 1 where no shape, (H, W, C) or (H, W), is wanted. Raises ValueError where the
    array does not have images of the wanted shape.
    """
    asked: ImageShape | None = None
    if wanted is not None:
        sizes = tuple(wanted) if np.iterable(wanted) and not isinstance(wanted, str) else ()
        if len(sizes) not in (2, 3) or not all(isinstance(size, int | np.integer) and size > 0 for size in sizes):
            raise ValueError(f"image_shape={wanted!r:.60}: give (height, width) or (height, width, channels)")
        H, W, C = (*(int(size) for size in sizes), 1)[:3]
        asked = (H, W, C)
    if len(shape) == 2:
        found = asked or (1, int(shape[1]), 1)
        if prod(found) != shape[1]:
            raise ValueError(f"X has {shape[1]} features, image_shape={found} has {prod(found)}; correct image_shape")
        return found
    if len(shape) not in (3, 4):
        raise ValueError(f"Expected 2D array, or images of 3 or 4 dimensions, got X of shape {tuple(shape)}")
    found = (int(shape[1]), int(shape[2]), int(shape[3]) if len(shape) == 4 else 1)
    if asked is not None and asked != found:
        raise ValueError(f"X has images of shape {found}, image_shape={asked}; leave image_shape out")
    return found


def as_images(X: Any, shape: ImageShape) -> Any:
    """Return the array as (N, H, W, C), in a number type that a data set keeps; a Dask array stays one."""
    images = X if X.shape[1:] == shape else X.reshape((X.shape[0], *shape))
    return images.astype(stored_dtype(X.dtype), copy=False)


def no_labels(y: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return True for each label that is none: NaN, an infinity, NaT of a date, None, or a missing value of pandas."""
    if y.dtype.kind == "O":
        return np.array([_is_none(label) for label in y.tolist()], bool)
    if y.dtype.kind in "mM":
        return np.isnat(y)
    return ~np.isfinite(y) if y.dtype.kind == "f" else np.zeros(y.shape, bool)


def _is_none(label: Any) -> bool:
    # a comparison with pandas.NA is neither true nor false
    return label is None or type(label).__name__ in ("NAType", "NaTType") or label != label


def encode_labels(y: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Return the sorted classes, and each label's place among them. Raises ValueError for one class only."""
    classes, labels = np.unique(y, return_inverse=True)
    if len(classes) < 2:
        only = classes[:1].tolist()[0]
        raise ValueError(f"y has 1 class ({only!r}): a classifier needs samples of 2 classes or more")
    return classes, labels.reshape(-1)


def class_names(classes: npt.NDArray[Any]) -> tuple[str, ...]:
    """Return the classes' names in the data set: as they print, or numbered where two print alike."""
    names = tuple(str(each) for each in classes.tolist())
    return names if len(set(names)) == len(names) else tuple(f"{i}: {name}" for i, name in enumerate(names))


def checked_weights(weights: Any, samples: int) -> npt.NDArray[np.float32] | None:
    """Return one weight a sample, (N,); None where all samples count alike.

    Raises ValueError unless there is one for each sample, all are finite, none is negative and one is above zero.
    """
    if weights is None:
        return None
    found = np.asarray(weights)
    if found.ndim == 0:
        found = np.full(samples, found)
    if found.ndim != 1:
        raise ValueError(f"sample_weight has shape {found.shape}: Sample weights must be 1D array or scalar")
    if len(found) != samples:
        raise ValueError(f"sample_weight has shape {found.shape}, X has {samples} samples; give one for each sample")
    found = found.astype(np.float64)
    if not (np.isfinite(found).all() and (found >= 0).all()):
        raise ValueError("sample_weight: weights are finite numbers of 0 or more; correct those that are not")
    if not found.any():
        raise ValueError("sample_weight: every weight is zero; give one sample at least a weight above 0")
    return None if (found == found[0]).all() else found.astype(np.float32)


def held_out(samples: int, fraction: Any) -> int:
    """Return the size of the validation part: this fraction of the samples, at least one; one is left to train on.

    Raises ValueError unless the fraction lies between 0 and 1.
    """
    if not (isinstance(fraction, int | float | np.number) and 0 < fraction < 1):
        raise ValueError(f"validation_fraction={fraction!r:.60}: give a number between 0 and 1")
    return min(max(1, round(samples * fraction)), samples - 1)
