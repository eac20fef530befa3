"""What a network must know of the images it was trained on, as a checkpoint keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from daskcnn.errors import DataError
from daskcnn.store import Described
from daskcnn.store.manifest import MAX_CHUNK_BYTES, Deviation, Level


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
            found = _Record.model_validate(record)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise _damaged(f"{where} = {first['input']!r:.60}: {first['msg']}") from error
        H, W, C = found.shape
        if H * W * C > MAX_CHUNK_BYTES:
            raise _damaged(f"images of shape {found.shape} are larger than {MAX_CHUNK_BYTES:,} bytes")
        if len(found.mean) != C:
            raise _damaged(f"{len(found.mean)} channel means for {C} channels")
        return cls(tuple(found.classes), (H, W, C), np.array(found.mean), found.deviation)


class _Record(BaseModel):
    """What `to_dict` keeps."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    classes: Annotated[list[str], FailFast(), Field(min_length=2, max_length=256)]
    shape: Annotated[list[Annotated[int, Field(ge=1, le=1 << 20)]], FailFast(), Field(min_length=3, max_length=3)]
    mean: Annotated[list[Level], FailFast()]
    deviation: Deviation


def _damaged(what: str) -> DataError:
    return DataError(
        "checkpoint", f"its description of the images is damaged ({what})", "take another checkpoint of the run"
    )
