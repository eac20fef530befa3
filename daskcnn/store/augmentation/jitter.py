"""Random brightness, contrast and saturation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
from pydantic import Field

from daskcnn.store.augmentation.step import Chance, Pictures, Step
from daskcnn.store.dataset import Described


class Jitter(Step):
    """Change brightness, contrast and saturation, in this order, each by a factor between 1 - a and 1 + a.

    Brightness multiplies the pixels as they are stored. Contrast multiplies their distance from the mean of the image's
    channel, saturation that from the pixel's grey (0.299 R + 0.587 G + 0.114 B). Whole numbers stay in the range of
    their type.
    """

    name: ClassVar[str] = "jitter"
    draws: ClassVar[int] = 3
    brightness: float = Field(0.0, ge=0, le=1, description="a of the factor on brightness.")
    contrast: float = Field(0.0, ge=0, le=1, description="a of the factor on contrast.")
    saturation: float = Field(0.0, ge=0, le=1, description="a of the factor on saturation. For three channels only.")

    def apply(self, pictures: Pictures, chance: Chance) -> Pictures:
        """Change the colours in place."""
        from daskcnn.compiled import augmentation

        x, images = pictures.x, pictures.images
        most = np.array([self.brightness, self.contrast, self.saturation])
        factors = 1 + most * (2 * chance.numbers.T.astype(np.float64) - 1)
        limits = np.array([-np.inf, np.inf])
        if images.dtype.kind in "iu":
            limits[:] = np.iinfo(images.dtype).min, np.iinfo(images.dtype).max
        lines = np.empty((2, *x.shape[2:]))
        mean, deviation = np.array(images.mean), np.array(images.deviation)  # which may be views that cannot be written
        augmentation.recolour(x, np.ascontiguousarray(factors), mean, deviation, limits, lines)
        return pictures

    def problems(self, images: Described) -> Iterator[str]:
        """Refuse saturation where a pixel has no colour."""
        if self.saturation and images.shape[2] != 3:
            channels = f"{images.shape[2]} channel{'s' * (images.shape[2] != 1)}"
            yield f"saturation = {self.saturation:g}: colours have three channels, these images {channels}; remove it"
