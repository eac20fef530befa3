"""The result of judging a network on some samples."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Score:
    """Summed loss and number of right answers over `samples`. Scores of parts of a split can be added."""

    loss_sum: float
    correct: int
    samples: int

    def __add__(self, other: Score) -> Score:
        return Score(self.loss_sum + other.loss_sum, self.correct + other.correct, self.samples + other.samples)

    @property
    def loss(self) -> float:
        """Mean loss of a sample; NaN without samples."""
        return self.loss_sum / self.samples if self.samples else math.nan

    @property
    def accuracy(self) -> float:
        """Share of right answers; 0 without samples."""
        return self.correct / self.samples if self.samples else 0.0
