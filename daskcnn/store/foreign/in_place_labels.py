"""Labels of somebody else's array as numbers of classes, or as rows of 0 and 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.errors import DataError
from daskcnn.store.chunk_source import Indices
from daskcnn.store.foreign.array import read_labels
from daskcnn.store.labels import numbered, whole
from daskcnn.store.manifest import Labelling, sha256


@dataclass(frozen=True)
class ArrayLabels:
    """Labels of all samples of an array.

    Attributes
    ----------
    classes : names, by number
    codes : (N,) uint8 or uint16, or (N, L) uint8 of 0 and 1
    """

    classes: tuple[str, ...]
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


def array_labels(path: str, like: ArrayLabels | None) -> ArrayLabels:
    """Read labels; the classes are the sorted values, or those of other labels that these belong with.

    Raises DataError naming the path.
    """
    found = read_labels(path)
    if like is not None and found.shape[1:] != like.codes.shape[1:]:
        raise DataError(path, "other labels a sample than those to train on", "give the same kind, in the same order")
    try:
        if found.ndim == 1 and found.dtype.kind == "f":
            found = whole(found)
        if like is None or found.ndim == 2:
            known = numbered(found, None if like is None else like.classes)
        else:
            known = numbered(found.astype(np.str_), like.classes)
    except DataError as error:
        if like is None:
            raise DataError(path, error.reason, error.remedy) from error
        reason = f"{error.reason} (those of the labels to train on)"
        raise DataError(path, reason, "correct it, or train on images of its class too") from error
    few = found.ndim == 2 or len(known.classes) <= 256
    return ArrayLabels(known.classes, known.values.astype(np.uint8 if few else np.uint16))
