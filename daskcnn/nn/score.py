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

    correct: right answers; None where the loss knows none. classes: what the AUC is made of, where it was asked for; a
    sum has it where every part has. answers: how many a sample has that may be right: 1, or as many as it has labels.
    """

    loss_sum: float
    correct: int | None
    samples: int
    classes: ClassScores | None = field(default=None, compare=False, repr=False)
    answers: int = 1

    @classmethod
    def of_batch(cls, loss: float, right: int | None, labels: Any) -> Score:
        """The score of a batch with these labels, as `Loss` has them, from its mean loss and its right answers."""
        samples = labels.shape[2] if labels.ndim == 4 else len(labels)
        return cls(loss * samples, right, samples, answers=labels.shape[1] if labels.ndim == 2 else 1)

    def __add__(self, other: Score) -> Score:
        total = self.loss_sum + other.loss_sum, self._correct_with(other), self.samples + other.samples
        return Score(*total, self._classes_with(other), max(self.answers, other.answers))

    def _correct_with(self, other: Score) -> int | None:
        return None if self.correct is None or other.correct is None else self.correct + other.correct

    def _classes_with(self, other: Score) -> ClassScores | None:
        if not (self.samples and other.samples):
            return self.classes or other.classes
        return self.classes + other.classes if self.classes and other.classes else None

    @property
    def loss(self) -> float:
        """Mean loss of a sample; NaN without samples."""
        return self.loss_sum / self.samples if self.samples else math.nan

    @property
    def accuracy(self) -> float | None:
        """Share of right answers; 0 without samples, None where the loss knows no right answers."""
        if self.correct is None:
            return None
        return self.correct / (self.samples * self.answers) if self.samples else 0.0

    @property
    def quality(self) -> float:
        """How good the network is, 0 to 1, higher is better: the accuracy, or without one 1 / (1 + loss).

        Rules weigh by it, checkpoints and early stopping go by it. A loss that is no number counts as 0.
        """
        if (accuracy := self.accuracy) is not None:
            return accuracy
        return 0.0 if math.isnan(self.loss) else 1 / (1 + max(0.0, self.loss))

    @property
    def judged(self) -> Judged:
        """As events have it; without samples nothing is known."""
        if not self.samples:
            return Judged(accuracy=None, loss=None, auc=None)
        return Judged(accuracy=self.accuracy, loss=self.loss, auc=self.classes and self.classes.auc)
