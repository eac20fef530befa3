"""Mirror images."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from daskcnn.store.augmentation.step import Chance, Moves, MovingStep


class Mirror(MovingStep):
    """Mirror half of the images, left to right."""

    name: ClassVar[str] = "mirror"
    draws: ClassVar[int] = 1
    alternate: bool = Field(
        False,
        description="Whether each sample is mirrored in every second pass, in even or odd ones by a hash of its number "
        "(airbench94, Jordan 2024). Otherwise chance decides in each pass.",
    )

    def move(self, chance: Chance, shape: tuple[int, int]) -> Moves:
        """Return columns from right to left for the images that are mirrored."""
        mirrored = chance.turns() if self.alternate else chance.numbers[0] >= 0.5
        return Moves(columns=mirrored * (shape[1] - 1), ways=1 - 2 * mirrored)
