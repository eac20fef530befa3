"""How many samples a round may still present."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from daskcnn.partition.proportional import proportional


@dataclass(frozen=True, slots=True)
class Budget:
    """Presentations of a sample still to be made. They add up to samples · epochs exactly.

    With growing allocations the early rounds present fewer than all samples, so there are more rounds than epochs
    (BPT-CNN eq. 6, whose floor loses samples); here the last round is cut instead.
    """

    left: int

    @classmethod
    def of(cls, samples: int, epochs: int) -> Budget:
        """Raises ValueError where there is nothing to present."""
        if samples < 1 or epochs < 1:
            raise ValueError(f"samples={samples}, epochs={epochs}: nothing to train on; both must be 1 or more")
        return cls(samples * epochs)

    @property
    def spent(self) -> bool:
        return self.left == 0

    def round(self, sizes: Mapping[str, int]) -> tuple[dict[str, int], Budget]:
        """Samples each worker presents in a synchronous round of all, and what is left then.

        The last round is cut in proportion, to nothing for some where fewer presentations are left than workers.
        """
        wanted = sum(sizes.values())
        if wanted <= self.left:
            return dict(sizes), Budget(self.left - wanted)
        return dict(zip(sizes, proportional(self.left, list(sizes.values())), strict=True)), Budget(0)

    def one(self, size: int) -> tuple[int, Budget]:
        """Samples one worker presents in its own next round (0: it is done), and what is left then."""
        now = min(size, self.left)
        return now, Budget(self.left - now)

    def returned(self, number: int) -> Budget:
        """Presentations that were not made after all, because their worker was lost: others make them."""
        return Budget(self.left + number)
