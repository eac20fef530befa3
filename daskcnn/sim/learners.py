"""Learners of a simulation: nothing is learnt where only time matters; else the numbers are those of a cluster."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from daskcnn.nn.score import Score
from daskcnn.partition.rounds import Round
from daskcnn.ps import Local, UpdateRule, Vector
from daskcnn.training.replica import Replica, Trained
from daskcnn.training.round_steps import steps_of_round


@dataclass(frozen=True, slots=True)
class Learnt:
    """Sums of a round so far: loss and right answers over its samples, the last rate. None: not known."""

    score: Score | None = None
    lr: float | None = None


NOTHING = Learnt()


class Learner(Protocol):
    """A replica's arithmetic. weights: trained in place, but for the places that are frozen."""

    weights: Vector
    frozen: tuple[slice, ...]

    def begin(self, round_: Round, local: Local, scale: float) -> None:
        """Take up a round. scale: of the learning rate."""
        ...

    def train(self, steps: int) -> Learnt:
        """Go on to this step of the round."""
        ...

    def judge(self, lo: int, hi: int, weights: Vector | None = None) -> Score | None:
        """The score of these weights, or its own, on samples lo…hi of the training part; None: not known.

        That of given weights has what their AUC is made of.
        """
        ...


class TimingOnly:
    """Learns nothing: a vector of one number stands for the weights."""

    def __init__(self) -> None:
        self.weights = np.zeros(1, np.float32)
        self.frozen: tuple[slice, ...] = ()

    def begin(self, round_: Round, local: Local, scale: float) -> None:
        """Do nothing."""
        return

    def train(self, steps: int) -> Learnt:
        """Learn nothing."""
        return NOTHING

    def judge(self, lo: int, hi: int, weights: Vector | None = None) -> Score | None:
        """No score is known."""
        return None


class Training:
    """Real arithmetic: the replica of a cluster, a step at a time."""

    def __init__(self, replica: Replica, rule: UpdateRule) -> None:
        self._replica, self._rule = replica, rule
        self.weights: Vector = replica.weights
        self.frozen = replica.frozen
        self._steps: Generator[Trained, None, None] | None = None
        self._taken = self._samples = 0
        self._learnt = NOTHING

    def begin(self, round_: Round, local: Local, scale: float) -> None:
        """Take up a round; the one before ends."""
        self.close()
        self._steps = steps_of_round(self._replica, self._rule, round_, local, scale=scale)
        self._taken, self._samples = 0, round_.samples

    def train(self, steps: int) -> Learnt:
        """Make the steps up to this one of the round."""
        assert self._steps is not None, "begun"
        while self._taken < steps:
            trained = next(self._steps)
            self._taken, self._learnt = self._taken + 1, Learnt(trained.score, trained.lr)
            if trained.score.samples == self._samples:
                self.close()
        return self._learnt

    def judge(self, lo: int, hi: int, weights: Vector | None = None) -> Score | None:
        """Judge these weights, or the replica's own, on samples lo…hi of the training part."""
        whole = None if weights is None else self._replica.job.data.validation
        return self._replica.evaluate(self._replica.dataset.train, lo, hi, weights=weights, whole=whole)

    def close(self) -> None:
        """End the round under way, with the thread that loads for it."""
        if self._steps is not None:
            self._steps.close()
