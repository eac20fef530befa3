"""Parts of a network's gradients that are known while the way back goes on: those of its last layers come first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from daskcnn.arrays import Array
from daskcnn.nn import Params, Sequential, State, StepPace, leaves
from daskcnn.nn.vector import Layout

LEAST = 64 << 10
"""Bytes from which a part is worth a message of its own."""
MOST = 8
"""Parts of a vector, at most about this many."""
TellPart: TypeAlias = Callable[[int, int], None]
"""Takes the place lo…hi of a part of the gradients that is complete."""
TellStep: TypeAlias = Callable[[int, StepPace, int, int], None]
"""Takes the samples of a step, its pace, and the place lo…hi of a part of its gradients that is complete."""


@dataclass(frozen=True)
class GradientPart:
    """The place lo…hi of the gradients of some layers, and the path of the one whose are found last."""

    lo: int
    hi: int
    last: str


def parts_of(model: Sequential, layout: Layout) -> tuple[GradientPart, ...]:
    """Return the parts, from the vector's end on. None has the gradients of the first layer, which are found last.

    A network has none where gradients of a layer are known later than its way back: with tied or frozen layers.
    """
    if model.ties or model.frozen:
        return ()
    children = [(name, [*each]) for name, each in groupby(layout.places(), lambda item: item[0].partition("/")[0])]
    least = max(LEAST, layout.nbytes // MOST) / layout.nbytes * layout.size
    parts, hi = list[GradientPart](), layout.size
    for name, places in reversed(children[1:]):
        if hi - (lo := places[0][1].start) >= least:
            parts.append(GradientPart(lo, hi, name))
            hi = lo
    return tuple(parts)


def ahead_of(model: Sequential, layout: Layout) -> float:
    """Return the part of the vector that goes ahead on a processor."""
    return sum(part.hi - part.lo for part in parts_of(model, layout)) / layout.size


class GrowingGradients:
    """Gradients of a step, written to `vector` as they are found.

    vector: (size,), on the host; behind the parameters it is given the change of what layers keep. tell: is called with
    each part once it is complete.
    """

    def __init__(
        self, parts: Sequence[GradientPart], layout: Layout, vector: Array, weights: Array, tell: TellPart
    ) -> None:
        self._parts, self._layout, self._vector, self._weights = [*parts], layout, vector, weights
        self._places, self._tell = dict(layout.places()), tell
        self.written: set[str] = set()
        """Paths of the parameters whose gradients are there."""

    def scored(self, loss: Array, state: State) -> None:
        """Take in the loss, and what layers keep from now on. No part is told of a loss that is not finite."""
        if not math.isfinite(float(loss)):
            self._parts.clear()
        at = self._layout.parameter_size
        for _, leaf in leaves(state):
            self._vector[at : at + leaf.size] = leaf.reshape(-1) - self._weights[at : at + leaf.size]
            at += leaf.size

    def found(self, name: str, gradients: Params) -> None:
        """Take in the gradients of the layer of this name."""
        if not self._parts:
            return
        for path, leaf in leaves(gradients, f"{name}/"):
            self._vector[self._places[path]] = leaf.reshape(-1)
            self.written.add(path)
        if name == self._parts[0].last:
            part = self._parts.pop(0)
            self._tell(part.lo, part.hi)
