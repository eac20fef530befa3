"""The facts of the images that a network was trained on, as a checkpoint keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from daskcnn.documents import first_problem
from daskcnn.errors import DataError
from daskcnn.store.dataset import SMALLEST_DEVIATION, Described
from daskcnn.store.manifest import MAX_CHUNK_BYTES, MOST_CLASSES, Deviations, Dtype, Fit, Labelling, Level, ValueRange


@dataclass(frozen=True)
class Facts:
    """A `store.Described` that a checkpoint keeps."""

    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    mean: npt.NDArray[np.float64]
    deviation: npt.NDArray[np.float64]
    dtype: np.dtype[Any] = field(default_factory=lambda: np.dtype("uint8"))
    labels: Labelling = "classes"
    nodata: float | None = None
    fit: Fit | None = None
    value_range: ValueRange | None = None

    @classmethod
    def of(cls, images: Described) -> Facts:
        """Return the facts of a data set."""
        numbers = images.mean, images.deviation, images.dtype
        of_files = images.fit, images.value_range
        return cls(images.classes, images.shape, *numbers, images.labels, images.nodata, *of_files)

    def to_dict(self) -> dict[str, Any]:
        """Return the facts in a form that JSON can keep."""
        numbers = {"mean": self.mean.tolist(), "deviation": self.deviation.tolist(), "dtype": self.dtype.name}
        labelling = {"labels": self.labels, "nodata": self.nodata, "fit": self.fit}
        ranged = {} if self.value_range is None else {"value_range": list(self.value_range)}
        return {"classes": list(self.classes), "shape": list(self.shape), **numbers, **labelling, **ranged}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Facts:
        """Invert `to_dict`. Raises DataError if the record is damaged."""
        try:
            found = _Record.model_validate(record)
        except ValidationError as error:
            raise _damaged(str(first_problem(error))) from error
        H, W, C = found.shape
        dtype = np.dtype(found.dtype)
        if H * W * C * dtype.itemsize > MAX_CHUNK_BYTES:
            raise _damaged(f"images of shape {found.shape} are larger than {MAX_CHUNK_BYTES:,} bytes")
        # one number for all channels, as version 0.1.0 kept it
        deviation = found.deviation if isinstance(found.deviation, tuple) else (found.deviation,) * C
        for what, numbers in (("means", found.mean), ("deviations", deviation)):
            if len(numbers) != C:
                raise _damaged(f"{len(numbers)} channel {what} for {C} channels")
        if min(deviation) < SMALLEST_DEVIATION:
            raise _damaged(f"a channel's deviation is {min(deviation)}")
        statistics, of_files = (np.array(found.mean), np.array(deviation)), (found.fit, found.value_range)
        return cls(tuple(found.classes), (H, W, C), *statistics, dtype, found.labels, found.nodata, *of_files)


class _Record(BaseModel):
    """The form that `to_dict` returns."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    classes: Annotated[list[str], FailFast(), Field(min_length=1, max_length=MOST_CLASSES)]
    shape: Annotated[list[Annotated[int, Field(ge=1, le=1 << 20)]], FailFast(), Field(min_length=3, max_length=3)]
    mean: Annotated[list[Level], FailFast()]
    deviation: Deviations
    dtype: Dtype = "uint8"
    labels: Labelling = "classes"
    nodata: float | None = None
    fit: Fit | None = None
    value_range: ValueRange | None = None


def _damaged(what: str) -> DataError:
    reason = f"its description of the images is damaged ({what})"
    return DataError("checkpoint", reason, "take another checkpoint of the run")
