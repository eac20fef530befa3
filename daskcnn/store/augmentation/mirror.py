"""Mirror images."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from daskcnn.store.augmentation.step import Chance, Move, MovingStep


class Mirror(MovingStep):
    """Mirror half of the images, left to right."""

    name: ClassVar[str] = "mirror"
    draws: ClassVar[int] = 1
    alternate: bool = Field(
        False,
        description="Whether each sample is mirrored in every second pass, in even or odd ones by a hash of its number "
        "(airbench94, Jordan 2024). Otherwise chance decides in each pass.",
    )

    def move(self, chance: Chance, shape: tuple[int, int]) -> Move:
        """Return columns from right to left for the images that are mirrored."""
        mirrored = chance.turns() if self.alternate else chance.numbers(1)[0] >= 0.5
        columns, ways = np.where(mirrored, shape[1] - 1, 0), np.where(mirrored, -1, 1)
        return Move(np.stack([np.zeros_like(columns), columns, ways], axis=1))
