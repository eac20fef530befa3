"""The exponential average of the weights that an optimizer passes through (Polyak and Juditsky 1992)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from daskcnn.arrays import Array, Device
from daskcnn.nn.optimizers.lookahead import Around
from daskcnn.nn.optimizers.optimizer import Loop, OneStep, OptimizerState


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
        from daskcnn.compiled.optimizer import toward

        average, new_average = step.rows[-1], step.new_vectors[-1]
        (share,) = step.scalars(self._part(step))

        def follow(part: slice) -> None:
            toward(average, step.new_params, share, new_average, new_average, part.start, part.stop)

        return [*self.inner.loops(self.of_inner(step), device), follow]
