"""The result of judging a network on some samples."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from daskcnn.events import Judged
from daskcnn.nn.auc import ClassScores


@dataclass(frozen=True, slots=True)
class Score:
    """Summed loss and right answers over `samples`; adds up over parts of a split.

    classes: what the AUC is made of, where it was asked for; a sum has it where every part has. answers: how many a
    sample has that may be right: 1, or as many as it has labels.
    """

    loss_sum: float
    correct: int
    samples: int
    classes: ClassScores | None = field(default=None, compare=False, repr=False)
    answers: int = 1

    @classmethod
    def of_batch(cls, loss: float, right: int, labels: Any) -> Score:
        """The score of a batch with these labels, (N,) or (N, L), from its mean loss and number of right answers."""
        return cls(loss * len(labels), right, len(labels), answers=labels.shape[1] if labels.ndim == 2 else 1)

    def __add__(self, other: Score) -> Score:
        total = self.loss_sum + other.loss_sum, self.correct + other.correct, self.samples + other.samples
        return Score(*total, self._classes_with(other), max(self.answers, other.answers))

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
        return self.correct / (self.samples * self.answers) if self.samples else 0.0

    @property
    def judged(self) -> Judged:
        """As events have it; without samples nothing is known."""
        if not self.samples:
            return Judged(accuracy=None, loss=None, auc=None)
        return Judged(accuracy=self.accuracy, loss=self.loss, auc=self.classes and self.classes.auc)
