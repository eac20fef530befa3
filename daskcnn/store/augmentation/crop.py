"""Random crops of padded images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from daskcnn.store.augmentation.step import Chance, Moves, MovingStep, shifted
from daskcnn.store.dataset import Described


class Crop(MovingStep):
    """Pad an image with zeros on all sides, and cut one of its own size out of that (He et al. 2016, §4.2).

    Zero is the mean. Theano-MPI, Alg. 1, crops sub-images out of larger images instead.
    """

    name: ClassVar[str] = "crop"
    draws: ClassVar[int] = 2
    pixels: int = Field(4, ge=1, description="Pixels that are padded on each side.")

    def move(self, chance: Chance, shape: tuple[int, int]) -> Moves:
        """Return shifts by up to `pixels` each way, zeros moving in."""
        return shifted(chance, self.pixels, "zeros")

    def problems(self, images: Described) -> Iterator[str]:
        """Refuse crops that may have nothing of the image."""
        if self.pixels >= (side := min(images.shape[:2])):
            yield f"pixels = {self.pixels}: nothing of an image of {side} pixels may be left; use at most {side - 1}"
