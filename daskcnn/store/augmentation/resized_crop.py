"""Random parts of images, enlarged to their size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, Field, field_validator

from daskcnn.store.augmentation.step import Array, Chance, Pictures, Step
from daskcnn.store.dataset import Described


def _as_pair(value: Any) -> Any:
    """Take a list for a tuple, as TOML and JSON have no other, and whole numbers for fractions."""
    if not isinstance(value, list | tuple):
        return value
    return tuple(float(each) if type(each) is int else each for each in value)


Part = Annotated[float, Field(gt=0, le=1)]
Ratio = Annotated[float, Field(ge=0.01, le=100)]


class ResizedCrop(Step):
    """Cut out a rectangle of random area, shape and place, and enlarge it to the image (Szegedy et al. 2015, §6).

    Sides longer than the image's are cut to it. Pixels in between are bilinear.
    """

    name: ClassVar[str] = "resized-crop"
    draws: ClassVar[int] = 4
    scale: Annotated[tuple[Part, Part], BeforeValidator(_as_pair)] = Field(
        (0.25, 1.0), description="Smallest and largest area, as parts of the image's."
    )
    ratio: Annotated[tuple[Ratio, Ratio], BeforeValidator(_as_pair)] = Field(
        (0.75, 1.333),
        description="Smallest and largest width ÷ height, drawn evenly by its logarithm.",
    )

    @field_validator("scale", "ratio")
    @classmethod
    def _in_order(cls, pair: tuple[float, float]) -> tuple[float, float]:
        if pair[0] > pair[1]:
            raise ValueError("the smallest comes first; swap the two")
        return pair

    def boxes(self, chance: Chance, shape: tuple[int, int]) -> npt.NDArray[np.float64]:
        """Return the rectangles (N, 4): first row, first column, height and width, in pixels."""
        area, ratio, row, column = chance.numbers.astype(np.float64)
        area = self.scale[0] + area * (self.scale[1] - self.scale[0])
        low, high = np.log(self.ratio)
        H, W = shape
        side, stretch = np.sqrt(area * H * W), np.exp((low + ratio * (high - low)) / 2)
        height, width = np.minimum(H, side / stretch), np.minimum(W, side * stretch)
        return np.stack([row * (H - height), column * (W - width), height, width], axis=1)

    def apply(self, pictures: Pictures, chance: Chance) -> Pictures:
        """Enlarge the rectangles."""
        from daskcnn.compiled import augmentation

        H, W = pictures.x.shape[:2]
        row, column, height, width = self.boxes(chance, (H, W)).T
        y = np.empty_like(pictures.x)
        rows, columns = between(H, row, height, y.dtype), between(W, column, width, y.dtype)
        augmentation.resample(pictures.x, *rows, *columns, y)
        return replace(pictures, x=y)

    def problems(self, images: Described) -> Iterator[str]:
        """Refuse rectangles of less than a pixel."""
        H, W = images.shape[:2]
        if self.scale[0] * H * W < 1:
            yield f"scale = {list(self.scale)}: may leave less than a pixel of {H}x{W}; raise its first number"


def between(
    size: int, first: npt.NDArray[np.float64], length: npt.NDArray[np.float64], dtype: np.dtype[Any]
) -> tuple[npt.NDArray[np.int64], Array]:
    """Return where the centres of `size` pixels lie in a stretch of an axis of as many.

    Two arrays (size, N): the pixel before each, and the part of the way to the next one. Beyond the outermost centres
    lies their own value.
    """
    at = first + (np.arange(size)[:, None] + 0.5) * (length / size) - 0.5
    at = at.clip(0, size - 1)
    before = at.astype(np.int64)
    return before, (at - before).astype(dtype)
