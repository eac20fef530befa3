"""Labels of somebody else's array as numbers of classes, or as rows of 0 and 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.errors import DataError, escaped
from daskcnn.store.chunk_source import Indices
from daskcnn.store.foreign_array import read_labels
from daskcnn.store.manifest import MOST_CLASSES, Labelling, sha256


@dataclass(frozen=True)
class Labelled:
    """Labels of all samples.

    Attributes
    ----------
    classes : names, by number
    values : what stands for each class in the array, in the same order; None for several labels
    codes : (N,) uint8 or uint16, or (N, L) uint8 of 0 and 1
    """

    classes: tuple[str, ...]
    values: npt.NDArray[Any] | None
    codes: npt.NDArray[Any]

    @property
    def kind(self) -> Labelling:
        """What a label is."""
        return "several" if self.codes.ndim == 2 else "classes"

    @property
    def digest(self) -> str:
        """SHA-256 of classes and labels."""
        return sha256("\n".join((*self.classes, sha256(np.ascontiguousarray(self.codes)))).encode())

    def counts(self, samples: Indices) -> tuple[int, ...]:
        """Samples of each class among these, or with each of several labels."""
        codes = self.codes[samples]
        if codes.ndim == 2:
            return tuple(codes.sum(axis=0, dtype=np.int64).tolist())
        return tuple(np.bincount(codes, minlength=len(self.classes)).tolist())


def labelled(path: str, like: Labelled | None) -> Labelled:
    """Read labels; classes are sorted, or those of other labels that these belong with. Raises DataError."""
    found = read_labels(path)
    if found.ndim == 2:
        return _several(path, found, like)
    if like is not None and like.values is None:
        raise DataError(
            path, "one class for each sample, and several labels for those to train on", "give the same kind"
        )
    values = np.unique(found) if like is None else like.values
    assert values is not None
    if len(values) > MOST_CLASSES:
        raise DataError(path, f"{len(values):,} classes, more than the {MOST_CLASSES:,} allowed", "give class labels")
    codes = np.minimum(np.searchsorted(values, found), len(values) - 1)
    if (strange := np.flatnonzero(values[codes] != found)).size:
        reason = f"sample {strange[0]} is of class {str(found[strange[0]])!r:.80}, which no training sample is of"
        raise DataError(path, reason, "leave it out of the test part, or give training samples of it")
    names = tuple(escaped(str(value)) for value in values) if like is None else like.classes
    return Labelled(names, values, codes.astype(np.uint8 if len(values) <= 256 else np.uint16))


def _several(path: str, found: npt.NDArray[Any], like: Labelled | None) -> Labelled:
    if like is not None and (like.values is not None or like.codes.shape[1] != found.shape[1]):
        raise DataError(path, "other labels than those to train on", "give the same kind, in the same order")
    if found.shape[1] > MOST_CLASSES:
        raise DataError(path, f"{found.shape[1]:,} labels, more than the {MOST_CLASSES:,} allowed", "give fewer")
    if (wrong := np.argwhere((found != 0) & (found != 1))).size:
        sample, label = wrong[0].tolist()
        reason = f"sample {sample}, label {label} is {found[sample, label]}, and not 0 or 1"
        raise DataError(path, reason, "give one class for each sample, (N,), or rows of 0 and 1, (N, L)")
    return Labelled(tuple(map(str, range(found.shape[1]))), None, found.astype(np.uint8))
