"""What a part came to: probabilities, and labels where they are known. Workers send it, the driver keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.trained.predictions.sources import Part


@dataclass(frozen=True, slots=True)
class Predicted:
    """The predictions of a part.

    Attributes
    ----------
    probabilities : (n, classes) float32; NaN for a file that could not be read
    labels : (n,) or (n, L), None where none are known
    bad : what is said of files that could not be read
    """

    probabilities: npt.NDArray[np.float32]
    labels: npt.NDArray[Any] | None
    bad: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a table.

    Attributes
    ----------
    key : "sample" or "file"
    split : whether a column names the part of the data set
    classes : names of the classes that have probabilities
    labels : names that labels stand for, None where none are known
    several : whether a sample may have any number of the labels
    """

    key: str
    split: bool
    classes: tuple[str, ...]
    labels: tuple[str, ...] | None
    several: bool = False

    @property
    def names(self) -> list[str]:
        """Names of all columns, in order."""
        split, label = ["part"] if self.split else [], [] if self.labels is None else ["label"]
        return [*split, self.key, *label, "predicted", *self.probabilities]

    @property
    def probabilities(self) -> list[str]:
        """Names of the columns of probabilities."""
        return [f"p_{text(name)}" for name in self.classes]

    def keys(self, part: Part) -> list[Any]:
        """Return the samples' numbers in their part of the data set, or the files' paths."""
        return [text(file) for file in part.files] if self.key == "file" else list(range(part.lo, part.hi))

    def label_texts(self, found: Predicted) -> list[str]:
        """Return the names of the labels of each sample."""
        assert self.labels is not None, "known"
        assert found.labels is not None, "known"
        if found.labels.ndim == 2:
            return [_joined(self.labels, row) for row in found.labels]
        return [text(self.labels[number]) for number in found.labels]

    def predicted_texts(self, found: Predicted) -> list[str]:
        """Return the name of the likeliest class of each sample, or of all labels of at least one half.

        It is empty for a file that could not be read.
        """
        if self.several:
            return [_joined(self.classes, row >= 0.5) for row in found.probabilities]
        return ["" if number < 0 else text(self.classes[number]) for number in likeliest(found)]


def likeliest(found: Predicted) -> npt.NDArray[np.int64]:
    """Return the number of the likeliest class of each sample, -1 for a file that could not be read."""
    numbers = np.where(np.isnan(found.probabilities), -1, found.probabilities).argmax(axis=1)
    return np.where(np.isnan(found.probabilities).all(axis=1), -1, numbers)


def text(name: str) -> str:
    """Return a name as UTF-8 can have it: bytes of a path that are none appear as escapes."""
    return name.encode("utf-8", "backslashreplace").decode()


def _joined(names: Sequence[str], chosen: npt.NDArray[Any]) -> str:
    return ";".join(text(name) for name, yes in zip(names, chosen, strict=True) if yes)
