"""Optimizers around another one: Lookahead, and the average of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from daskcnn import compiled
from daskcnn.arrays import Array, Device
from daskcnn.nn.optimizers.optimizer import Loop, OneStep, Optimizer, OptimizerState


@dataclass(frozen=True)
class Around(Optimizer):
    """Base of what goes around another optimizer and keeps one more vector, the last of the state."""

    inner: Optimizer

    @property
    def by_tensor(self) -> bool:
        """As the inner optimizer."""
        return self.inner.by_tensor

    def init(self, params: Array, xp: Any = np) -> OptimizerState:
        """Return the inner optimizer's state, and the parameters."""
        inner = self.inner.init(params, xp)
        return OptimizerState(xp.concatenate([inner.vectors, params[None]]), inner.count)

    def restarted(self, state: OptimizerState, params: Array) -> OptimizerState:
        """Restart the inner optimizer; what goes around it may do more."""
        inner = self.inner.restarted(OptimizerState(state.vectors[:-1], state.count), params)
        return OptimizerState(state.vectors, inner.count)

    @staticmethod
    def of_inner(step: OneStep) -> OneStep:
        """Return the inner optimizer's part of a step."""
        return replace(step, rows=step.rows[:-1], new_vectors=step.new_vectors[:-1])


@dataclass(frozen=True)
class Lookahead(Around):
    """After every `steps` steps the weights go back to `alpha` of the way that they have come since the last time.

    The slow weights, where they go on from, are one more vector of the state. They begin where the weights do.
    With `last`, the part of the way goes from `alpha` there in the course of the run, by the third power of its
    progress (airbench94, Jordan 2024): weights run free at first, and in the end they are an average.
    """

    steps: int = 5
    alpha: float = 0.5
    last: float | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps={self.steps}: Lookahead needs 1 or more")
        for name, part in (("alpha", self.alpha), ("last", self.alpha if self.last is None else self.last)):
            if not 0 < part <= 1:
                raise ValueError(f"{name}={part}: Lookahead needs 0 < {name} <= 1")

    def kept(self, progress: float) -> float:
        """Return the part of the way that is kept when this part (0…1) of the run is made."""
        last = self.alpha if self.last is None else self.last
        return self.alpha + (last - self.alpha) * min(1.0, progress) ** 3

    @property
    def vectors(self) -> tuple[str, ...]:
        """Those of the inner optimizer, and the slow weights."""
        return (*self.inner.vectors, "slow")

    def restarted(self, state: OptimizerState, params: Array) -> OptimizerState:
        """Go on from these parameters as slow weights."""
        state.vectors[-1] = params
        return super().restarted(state, params)

    def by_arrays(self, step: OneStep, device: Device) -> None:
        """Make the inner step; when it is time, slow + alpha · (weights - slow) is where both go on."""
        self.inner.by_arrays(self.of_inner(step), device)
        slow, new_slow = step.rows[-1], step.new_vectors[-1]
        new_slow[...] = slow
        if (step.count + 1) % self.steps == 0:
            step.new_params[...] = new_slow[...] = slow + self.kept(step.progress) * (step.new_params - slow)

    def loops(self, step: OneStep, device: Device) -> Sequence[Loop]:
        """Return the inner loops, and one that goes back."""
        slow, new_slow = step.rows[-1], step.new_vectors[-1]
        (alpha,) = step.scalars(self.kept(step.progress))

        def back(part: slice) -> None:
            if (step.count + 1) % self.steps:
                new_slow[part] = slow[part]
            else:
                compiled.updates.toward(slow, step.new_params, alpha, new_slow, step.new_params, part.start, part.stop)

        return [*self.inner.loops(self.of_inner(step), device), back]


@dataclass(frozen=True)
class Averaged(Around):
    """The weights go as the inner optimizer has them; their average, one more vector of the state, follows them.

    After t steps the average keeps the part min(decay, (1 + t) / (10 + t)) of itself at a step, so that it leaves the
    random weights behind soon.
    """

    decay: float = 0.999

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay={self.decay}: the average needs 0 <= decay < 1")

    @property
    def vectors(self) -> tuple[str, ...]:
        """Those of the inner optimizer, and what checkpoints keep in place of the average, which is their weights."""
        return (*self.inner.vectors, "trained")

    def exchanged(self, weights: Array, state: OptimizerState) -> tuple[Array, OptimizerState]:
        """Let average and trained parameters change places: the average stands for the network."""
        other, vectors, n = weights.copy(), state.vectors.copy(), state.vectors.shape[1]
        other[:n], vectors[-1] = state.vectors[-1], weights[:n]
        return other, OptimizerState(vectors, state.count)

    def _part(self, step: OneStep) -> float:
        """Return how much of the new weights goes into the average."""
        made = step.count + 1
        return 1 - min(self.decay, (1 + made) / (10 + made))

    def by_arrays(self, step: OneStep, device: Device) -> None:
        """Make the inner step; average + part · (weights - average)."""
        self.inner.by_arrays(self.of_inner(step), device)
        average, new_average = step.rows[-1], step.new_vectors[-1]
        new_average[...] = average + self._part(step) * (step.new_params - average)

    def loops(self, step: OneStep, device: Device) -> Sequence[Loop]:
        """Return the inner loops, and one that averages."""
        average, new_average = step.rows[-1], step.new_vectors[-1]
        own = average, step.new_params, *step.scalars(self._part(step)), new_average, new_average
        inner = self.inner.loops(self.of_inner(step), device)
        return [*inner, lambda part: compiled.updates.toward(*(*own, part.start, part.stop))]
