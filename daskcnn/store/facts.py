"""What a network must know of the images it was trained on, as a checkpoint keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from daskcnn.errors import DataError
from daskcnn.store import Described


@dataclass(frozen=True)
class Facts:
    """A `store.Described` that a checkpoint keeps."""

    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    mean: npt.NDArray[np.float64]
    deviation: float

    @classmethod
    def of(cls, images: Described) -> Facts:
        """Return the facts of a data set."""
        return cls(images.classes, images.shape, images.mean, images.deviation)

    def to_dict(self) -> dict[str, Any]:
        """Return the facts in a form that JSON can keep."""
        shape, mean = list(self.shape), [float(m) for m in self.mean]
        return {"classes": list(self.classes), "shape": shape, "mean": mean, "deviation": self.deviation}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Facts:
        """Invert `to_dict`. Raises DataError if the record is damaged."""
        try:
            H, W, C = map(int, record["shape"])
            mean, deviation = np.array([float(m) for m in record["mean"]]), float(record["deviation"])
            return cls(tuple(map(str, record["classes"])), (H, W, C), mean, deviation)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"checkpoint: its description of the images is damaged ({error})") from error
