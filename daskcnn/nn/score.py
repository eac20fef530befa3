"""What a network makes of some samples."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Score:
    """Summed loss and right answers over `samples`; adds up over parts of a split."""

    loss_sum: float
    correct: int
    samples: int

    def __add__(self, other: Score) -> Score:
        return Score(self.loss_sum + other.loss_sum, self.correct + other.correct, self.samples + other.samples)

    @property
    def loss(self) -> float:
        return self.loss_sum / self.samples if self.samples else math.nan

    @property
    def accuracy(self) -> float:
        return self.correct / self.samples if self.samples else 0.0
