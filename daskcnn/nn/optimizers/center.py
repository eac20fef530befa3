"""The steps of a center whose replicas hand in gradients: the optimizer's, made once for all of them, on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from daskcnn.arrays import Array, Device
from daskcnn.nn.optimizers.descent import Descent, Span
from daskcnn.nn.optimizers.optimizer import OptimizerState, StepPace
from daskcnn.nn.vector import Layout

OWN: Final = "optimizer."
"""Begins the names of the optimizer's vectors among those that a server keeps. No rule may have such names."""
_STEPS: Final = f"{OWN}steps"


@dataclass(frozen=True)
class CenterDescent:
    """Steps a center (size,), parameters and then what layers keep besides, by gradients of all its replicas.

    Gradients (size,) have the change of what layers keep behind those of the parameters. The optimizer's vectors
    are a dictionary: each (parameters,), and the number of steps so far, a vector of one number.
    """

    descent: Descent
    spans: tuple[Span, ...]
    parameters: int

    @classmethod
    def of(cls, descent: Descent, layout: Layout) -> CenterDescent:
        """Return the steps of a network of this layout."""
        return cls(descent, descent.spans(layout), layout.parameter_size)

    @property
    def _names(self) -> list[str]:
        return [f"{OWN}{name}" for name in self.descent.optimizer.vectors]

    @property
    def splits(self) -> bool:
        """True if a part of the center can step without the others: no norm of whole arrays is needed."""
        return not self.descent.optimizer.by_tensor and self.descent.clip is None

    def part(self, lo: int, hi: int) -> CenterDescent:
        """Return the steps of the numbers lo…hi of the center."""
        cut = ((max(at.start, lo) - lo, min(at.stop, hi) - lo, how) for at, how in self.spans)
        spans = tuple(Span(slice(start, stop), how) for start, stop, how in cut if start < stop)
        return replace(self, spans=spans, parameters=min(max(self.parameters - lo, 0), hi - lo))

    def begin(self, center: Array) -> dict[str, Array]:
        """Return the optimizer's vectors before the first step from this center."""
        return self.kept(self.descent.optimizer.init(center[: self.parameters]))

    def step(
        self, center: Array, kept: Mapping[str, Array], gradients: Array, pace: Sequence[float]
    ) -> tuple[Array, dict[str, Array]]:
        """Return the new center and the optimizer's new vectors, both of new arrays. The gradients may be scaled.

        pace: the learning rate, and the part (0…1) of the run that was made before.
        """
        n = self.parameters
        new = np.concatenate([center[:n], center[n:] + gradients[n:]])
        state = self.state_of(kept, center.dtype)
        made = self.descent.step(new, gradients[:n], state, self.spans, StepPace(*pace), _host())
        return new, self.kept(made)

    def state_of(self, kept: Mapping[str, Array], dtype: npt.DTypeLike) -> OptimizerState:
        """Return the optimizer's state of these vectors."""
        rows = [kept[name] for name in self._names]
        vectors = np.array(rows, dtype) if rows else np.empty((0, self.parameters), dtype)
        return OptimizerState(vectors, int(kept[_STEPS][0]))

    def kept(self, state: OptimizerState) -> dict[str, Array]:
        """Return the vectors of an optimizer's state by name, as a server keeps them."""
        return dict(zip(self._names, state.vectors, strict=True)) | {_STEPS: np.array([state.count], np.float64)}


@cache
def _host() -> Device:
    return Device()
