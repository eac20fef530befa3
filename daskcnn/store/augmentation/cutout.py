"""Squares that are cut out of images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
from pydantic import Field

from daskcnn.store.augmentation.step import Chance, Pictures, Step
from daskcnn.store.dataset import Described


class Cutout(Step):
    """Set a square of each image to 0, the mean (DeVries and Taylor 2017).

    Its centre is any pixel, so at an edge less than the square is cut out.
    """

    name: ClassVar[str] = "cutout"
    draws: ClassVar[int] = 2
    size: int = Field(ge=1, description="Pixels of the square's side.")

    def apply(self, pictures: Pictures, chance: Chance) -> Pictures:
        """Cut the squares out in place."""
        from daskcnn.compiled import augmentation

        sides = np.array(pictures.x.shape[:2])
        first = (chance.numbers.T * sides).astype(np.int64) - self.size // 2
        boxes = np.concatenate([first.clip(0), (first + self.size).clip(max=sides)], axis=1)
        augmentation.erase(pictures.x, np.ascontiguousarray(boxes))
        return pictures

    def problems(self, images: Described) -> Iterator[str]:
        """Refuse squares that may cover the whole image."""
        if self.size > (side := min(images.shape[:2])):
            yield f"size = {self.size}: the square is larger than images of {side} pixels; use at most {side}"
