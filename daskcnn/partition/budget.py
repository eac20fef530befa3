"""How many samples a round may still present."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from daskcnn.partition.proportional import proportional


@dataclass(frozen=True, slots=True)
class Budget:
    """Presentations of a sample still to be made. They add up to samples · epochs exactly.

    With growing allocations the early rounds present fewer than all samples, so there are more rounds than epochs.
    BPT-CNN eq. 6 rounds their number down, which loses samples; here the last round is cut instead.
    """

    left: int

    @classmethod
    def of(cls, samples: int, epochs: int) -> Budget:
        """Return the budget of a run. Raises ValueError if there is nothing to present."""
        if samples < 1 or epochs < 1:
            raise ValueError(f"samples={samples}, epochs={epochs}: nothing to train on; both must be 1 or more")
        return cls(samples * epochs)

    @property
    def spent(self) -> bool:
        """Whether no presentation is left."""
        return self.left == 0

    def round(self, sizes: Mapping[str, int]) -> tuple[dict[str, int], Budget]:
        """Return the samples each worker presents in a synchronous round of all, and the budget after it.

        The last round is cut in proportion. If fewer presentations are left than workers, some workers present none.
        """
        wanted = sum(sizes.values())
        if wanted <= self.left:
            return dict(sizes), Budget(self.left - wanted)
        return dict(zip(sizes, proportional(self.left, list(sizes.values())), strict=True)), Budget(0)

    def one(self, size: int) -> tuple[int, Budget]:
        """Return the samples one worker presents in its own next round (0: it is done), and the budget after it."""
        now = min(size, self.left)
        return now, Budget(self.left - now)

    def returned(self, number: int) -> Budget:
        """Return the budget with presentations that a lost worker did not make; other workers make them."""
        return Budget(self.left + number)
