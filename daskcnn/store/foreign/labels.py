"""Labels as people have them, integers, names, or rows of 0 and 1, into numbers of classes or rows of 0 and 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.errors import DataError
from daskcnn.store.chunk_facts import class_counts
from daskcnn.store.chunk_source import Indices
from daskcnn.store.foreign.array import read_labels
from daskcnn.store.manifest import MOST_CLASSES, Labelling, sha256

_MOST = 1 << 53
"""The largest whole number that all real types can tell from its neighbours."""
_REMEDY = "give one integer or string for each image, or a row of 0 and 1"
_ASK = "set labelling to 'classes' if each row is one class, or to 'several' if each column is a label of its own"


@dataclass(frozen=True, slots=True)
class Labelled:
    """Numbers of classes (N,), or (N, L) uint8 of 0 and 1, and the names of the classes, or of the L labels."""

    values: npt.NDArray[Any]
    classes: tuple[str, ...]

    @property
    def kind(self) -> Labelling:
        """The kind of the labels."""
        return "several" if self.values.ndim == 2 else "classes"

    @property
    def digest(self) -> str:
        """SHA-256 of classes and labels."""
        return sha256("\n".join((*self.classes, sha256(self.values))).encode())

    def counts(self, samples: Indices) -> tuple[int, ...]:
        """Return the samples of each class among these, or with each of several labels."""
        return class_counts(self.values[samples], len(self.classes))


def as_told(labels: npt.NDArray[Any], labelling: Labelling | None) -> npt.NDArray[Any]:
    """Return labels as (N,), one class a sample, or as rows (N, L) of several labels; one column is (N,).

    labelling : the meaning of rows. None: several labels a sample. Raises DataError then where every row has exactly
    one 1, which may be one class a sample as well; and for labels that are not what `labelling` says.
    """
    if labels.ndim == 1 and labelling == "several":
        raise DataError("labels", "one for each image, and labelling is 'several'", "give rows of 0 and 1")
    if labels.ndim != 2 or labelling == "several":
        return labels
    if labels.shape[1] == 1:
        return labels[:, 0]
    ones = labels == 1
    one_hot = (ones | (labels == 0)).all(axis=1) & (ones.sum(axis=1) == 1)
    if labelling == "classes":
        if not one_hot.all():
            row = int(np.flatnonzero(~one_hot)[0])
            reason = f"sample {row} has {labels[row].tolist()!r:.60}, and labelling is 'classes'"
            raise DataError("labels", reason, "give rows with exactly one 1 and else 0")
        return ones.argmax(axis=1)
    if len(labels) and one_hot.all():
        reason = f"every row of {labels.shape[1]} columns has exactly one 1: one class a sample, or several labels"
        raise DataError("labels", reason, _ASK)
    return labels


def plain(labels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return labels (N,) of Python's own texts or integers as NumPy's, others as they are."""
    if labels.dtype.kind in "OT" and all(isinstance(value, str) for value in labels.tolist()):
        return labels.astype(object).astype(str)  # NumPy's own texts (kind T) have no width to cast by
    if labels.dtype.kind == "O" and all(map(_is_whole, labels.tolist())):
        return labels.astype(np.int64)
    return labels


def _is_whole(value: object) -> bool:
    return type(value) is int and -_MOST <= value <= _MOST


def numbered(
    labels: npt.NDArray[Any], classes: Sequence[str] | None = None, labelling: Labelling | None = None
) -> Labelled:
    """Return labels, (N,) integers, strings or booleans, or (N, L) of 0 and 1, by number; rows as `as_told`.

    The names of the classes are in the order of the numbers or columns. Without them the classes are the values that
    there are, sorted; columns are called by their numbers. Raises DataError naming the first sample that has no label.
    """
    labels = as_told(labels, labelling)
    if classes is not None:
        _check_names(classes)
    if labels.ndim == 2:
        rows, names = _rows(labels), tuple(map(str, range(labels.shape[1]) if classes is None else classes))
        if len(names) != labels.shape[1]:
            reason = f"{len(names)} names for labels with {labels.shape[1]} columns"
            raise DataError("classes", reason, "give a name for each column, in their order")
        return Labelled(rows, names)
    if labels.ndim != 1:
        raise DataError("labels", f"an array of shape {labels.shape}", _REMEDY)
    labels = plain(labels)
    if labels.dtype.kind == "f":
        labels = whole(labels)
    if labels.dtype.kind not in "iubU":
        raise DataError("labels", _no_label(labels), _REMEDY)
    return _by_name(labels, classes) if classes is not None else _by_value(labels)


def _no_label(labels: npt.NDArray[Any]) -> str:
    """Return words on labels that are none: of objects the first that is no text or integer, or not like sample 0."""
    values = labels.tolist()
    if labels.dtype.kind not in "OT":
        return f"{labels.dtype} such as {values[:1]!r:.60}"
    kinds = [str if isinstance(value, str) else int if _is_whole(value) else None for value in values]
    sample = next(i for i, kind in enumerate(kinds) if kind is None or kind is not kinds[0])
    return f"sample {sample} has {values[sample]!r:.60}"


def whole(labels: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return real labels (N,) as integers. Raises DataError naming the first that is no whole number, such as NaN."""
    wrong = ~((labels == np.rint(labels)) & (np.abs(labels) <= _MOST))
    if wrong.any():
        sample = int(np.flatnonzero(wrong)[0])
        raise DataError("labels", f"sample {sample} has {labels[sample].item()}, which is no whole number", _REMEDY)
    return labels.astype(np.int64)


def _check_names(classes: Sequence[str]) -> None:
    seen = set[str]()
    for name in map(str, classes):
        if name in seen:
            raise DataError("classes", f"{name!r:.60} stands there twice", "give each class a name of its own")
        seen.add(name)


def _rows(labels: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    wrong = ~((labels == 0) | (labels == 1))
    if labels.shape[1] == 0 or wrong.any():
        reason = f"an array of shape {labels.shape}"
        if wrong.any():
            sample, column = np.argwhere(wrong)[0].tolist()
            reason = f"sample {sample}, column {column} has {labels[sample, column]!s:.40}"
        raise DataError("labels", reason, "several labels a sample are rows of 0 and 1; one class a sample is (N,)")
    return labels.astype(np.uint8)


def _by_value(labels: npt.NDArray[Any]) -> Labelled:
    found, values = np.unique(labels, return_inverse=True)
    if len(found) > MOST_CLASSES:
        raise DataError("labels", f"{len(found):,} different values", f"at most {MOST_CLASSES:,} classes are possible")
    return Labelled(values.reshape(-1).astype(np.int64), tuple(map(str, found.tolist())))


def _by_name(labels: npt.NDArray[Any], classes: Sequence[str]) -> Labelled:
    names = tuple(map(str, classes))
    if labels.dtype.kind != "U":
        values = labels.astype(np.int64)
        wrong = (values < 0) | (values >= len(names))
    else:
        place = {name: index for index, name in enumerate(names)}
        values = np.array([place.get(label, -1) for label in labels.tolist()], np.int64)
        wrong = values < 0
    if wrong.any():
        sample = int(np.flatnonzero(wrong)[0])
        reason = f"sample {sample} has {labels[sample].item()!r:.60}, which is none of {len(names)} classes"
        raise DataError("labels", reason, "add it to the classes, or correct the label")
    return Labelled(values, names)


def array_labels(path: str, like: Labelled | None, labelling: Labelling | None = None) -> Labelled:
    """Read the labels of an array, as uint8 or uint16. The classes are the sorted values, or those of `like`."""
    found = read_labels(path)
    if like is not None:
        labelling = like.kind if found.ndim == 2 else None
    try:
        found = as_told(found, labelling)
    except DataError as error:
        raise DataError(path, error.reason, error.remedy) from error
    if like is not None and found.shape[1:] != like.values.shape[1:]:
        raise DataError(path, "other labels a sample than those to train on", "give the same kind, in the same order")
    try:
        if found.ndim == 1 and found.dtype.kind == "f":
            found = whole(found)
        if found.ndim == 2:
            known = numbered(found, None if like is None else like.classes, "several")
        elif like is None:
            known = numbered(found)
        else:
            known = numbered(found.astype(np.str_), like.classes)
    except DataError as error:
        if like is None:
            raise DataError(path, error.reason, error.remedy) from error
        reason = f"{error.reason} (those of the labels to train on)"
        raise DataError(path, reason, "correct it, or train on images of its class too") from error
    few = found.ndim == 2 or len(known.classes) <= 256
    return Labelled(known.values.astype(np.uint8 if few else np.uint16), known.classes)
