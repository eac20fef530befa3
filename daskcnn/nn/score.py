"""The result of judging a network on some samples."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from daskcnn.events import Judged
from daskcnn.nn.auc import ClassScores


@dataclass(frozen=True, slots=True)
class Score:
    """Summed loss and right answers over `samples`; adds up over parts of a split.

    classes: what the AUC is made of, where it was asked for; a sum has it where every part has.
    """

    loss_sum: float
    correct: int
    samples: int
    classes: ClassScores | None = field(default=None, compare=False, repr=False)

    def __add__(self, other: Score) -> Score:
        total = self.loss_sum + other.loss_sum, self.correct + other.correct, self.samples + other.samples
        return Score(*total, self._classes_with(other))

    def _classes_with(self, other: Score) -> ClassScores | None:
        if not (self.samples and other.samples):
            return self.classes or other.classes
        return self.classes + other.classes if self.classes and other.classes else None

    @property
    def loss(self) -> float:
        """Mean loss of a sample; NaN without samples."""
        return self.loss_sum / self.samples if self.samples else math.nan

    @property
    def accuracy(self) -> float:
        """Share of right answers; 0 without samples."""
        return self.correct / self.samples if self.samples else 0.0

    @property
    def judged(self) -> Judged:
        """As events have it; without samples nothing is known."""
        if not self.samples:
            return Judged(accuracy=None, loss=None, auc=None)
        return Judged(accuracy=self.accuracy, loss=self.loss, auc=self.classes and self.classes.auc)
