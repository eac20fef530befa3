"""Random shifts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from daskcnn.store.augmentation.step import Border, Chance, Moves, MovingStep, shifted
from daskcnn.store.dataset import Described


class Translate(MovingStep):
    """Shift an image by up to `pixels` in both directions, by whole pixels."""

    name: ClassVar[str] = "translate"
    draws: ClassVar[int] = 2
    pixels: int = Field(2, ge=1, description="Pixels of the largest shift, each way.")
    border: Border = Field(
        "reflect",
        description="What moves in: `reflect`, the image mirrored at its outermost pixels, or `zeros`, the mean.",
    )

    def move(self, chance: Chance, shape: tuple[int, int]) -> Moves:
        """Return shifts by up to `pixels` each way."""
        return shifted(chance, self.pixels, self.border)

    def problems(self, images: Described) -> Iterator[str]:
        """Refuse shifts by more than there is to mirror, or to be seen."""
        if self.pixels >= (side := min(images.shape[:2])):
            yield f"pixels = {self.pixels}: an image of {side} pixels has no more to show; use at most {side - 1}"
