"""Divergence: a run goes back to its last good weights once, with a lower learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from daskcnn.errors import Diverged
from daskcnn.training.coordinator.looks import Look
from daskcnn.training.guessing import Guessing

LOWER = 1 / 3
"""Factor of the learning rate behind a divergence."""


@dataclass
class Divergence:
    """How often a run may still go back, and at which rate it trains.

    Attributes
    ----------
    lowers : whether the job lets it go back.
    scale : factor of the learning rate; below 1 once the run went back.
    """

    lowers: bool
    scale: float = 1.0

    @classmethod
    def from_book(cls, book: Mapping[str, Any], *, lowers: bool) -> Divergence:
        """What a checkpoint's book says: a run that went back before it was resumed does not go back again."""
        return cls(lowers, float(book.get("rate_scale", 1.0)))

    def book(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"rate_scale": self.scale}

    def goes_back(self) -> bool:
        """Whether the run goes back now; if so at a third of the rate."""
        if not self.lowers or self.scale < 1.0:
            return False
        self.scale *= LOWER
        return True

    def ruined(self, look: Look, guess: Guessing | None) -> Diverged | None:
        """What is wrong with a center that is worth less than the initial weights, where the run may go back."""
        if not self.lowers or self.scale < 1.0:
            return None
        finite = math.isfinite(look.center.loss_sum)
        if finite and (guess is None or not guess.ruined(look.center, look.trained)):
            return None
        value = f"loss = {look.center.loss:.4g} on the validation samples"
        return Diverged(value, "training diverged", "lower train.lr")

    def warning(self, error: Diverged, place: str) -> str:
        """What the log says where the run goes back. place: the state that it goes back to."""
        return f"{error.value or error.reason}: training diverged; back to {place}, with a third of the learning rate"

    def last(self, error: Diverged) -> Diverged:
        """The error that ends the run."""
        if self.scale == 1.0:
            return error
        remedy = (
            "a third of the rate was tried, and diverged too; lower train.lr to a tenth, and look for pixels that are "
            "far too large (`daskcnn data show`)"
        )
        return Diverged(error.value, error.reason, remedy)
