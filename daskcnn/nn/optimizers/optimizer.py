"""The interface of an optimizer: a pure step over parameters, gradients and its own state, all flat vectors.

Norms of gradients and weights are the same to the bit for any number of threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from daskcnn import compiled
from daskcnn.arrays import Array, Device

AT_LEAST = 1 << 14
"""Fewest parameters for each thread: their step takes about as long as calling it."""
Loop: TypeAlias = Callable[[slice], None]
"""Steps a part of the vectors by a compiled loop."""


@dataclass(frozen=True)
class OptimizerState:
    """The state's vectors (k, parameters), in the order of `Optimizer.vectors`, and steps so far."""

    vectors: Array
    count: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the vectors."""
        return int(self.vectors.nbytes)

    def part(self, columns: slice) -> OptimizerState:
        """Return the state of these parameters alone, as a view."""
        return OptimizerState(self.vectors[:, columns], self.count)

    def moved(self, move: Callable[[Array], Array]) -> OptimizerState:
        """Return the state with its vectors moved to another memory."""
        return OptimizerState(move(self.vectors), self.count)

    @property
    def without_vectors(self) -> OptimizerState:
        """The state without its vectors, where they need not travel."""
        return OptimizerState(self.vectors[:0], self.count)


class StepPace(NamedTuple):
    """The learning rate of a step, and the part (0…1) of the run that was made before it."""

    lr: float
    progress: float = 0.0


@dataclass(frozen=True)
class OneStep:
    """One step on vectors of one length n, contiguous and of the device; the new ones may be the old ones.

    rows: the state's vectors (n,). count: steps before this one. progress: part (0…1) of the run that was made before
    it. decays: whether the weights decay. new_params, new_vectors: (n,) and (k, n), to be written.
    """

    params: Array
    grads: Array
    rows: tuple[Array, ...]
    count: int
    lr: float
    progress: float
    decays: bool
    new_params: Array
    new_vectors: Array

    def scalars(self, *values: float) -> Iterator[Any]:
        """Yield numbers in the dtype of the vectors, as the loops take them."""
        return (self.params.dtype.type(value) for value in values)


class Optimizer(ABC):
    """Base of all optimizers. A subclass is a frozen dataclass of options without hidden state.

    usual_rate: of a job that gives none. rate_power: power of the batch size by which the rate grows, 1 where a step is
    linear in the gradient (Goyal et al. 2017), 0.5 where it is divided by the gradient's root mean square (Malladi et
    al. 2022).
    """

    usual_rate: ClassVar[float]
    rate_power: ClassVar[float] = 1.0

    @property
    @abstractmethod
    def vectors(self) -> tuple[str, ...]:
        """Names of the state's vectors, as checkpoints have them."""

    @property
    def by_tensor(self) -> bool:
        """True if a step needs whole parameter arrays, each by itself, for their norms."""
        return False

    def init(self, params: Array, xp: Any = np) -> OptimizerState:
        """Return the state before the first step from these parameters (n,), in the memory of `xp`."""
        return OptimizerState(xp.zeros((len(self.vectors), len(params)), params.dtype))

    def restarted(self, state: OptimizerState, params: Array) -> OptimizerState:
        """Return the state, which may be written to, where others have changed the parameters."""
        return state

    def exchanged(self, weights: Array, state: OptimizerState) -> tuple[Array, OptimizerState]:
        """Return weights (size,) that stand for the network, and a state, instead of those that are trained; and back.

        Most optimizers train the very weights that stand for the network.
        """
        return weights, state

    def step(
        self,
        params: Array,
        grads: Array,
        state: OptimizerState,
        lr: float,
        device: Device,
        *,
        progress: float = 0.0,
        decays: bool = True,
        out: tuple[Array, Array] | None = None,
    ) -> OptimizerState:
        """Make one step, in place unless `out` is given, and return the new state; `grads` stays as it is.

        Parameters
        ----------
        params, grads : (n,), of the device. They are one whole parameter array where `by_tensor` asks for that.
        progress : part (0…1) of the run that was made before this step
        decays : whether the weights decay
        out : where the new parameters (n,) and vectors (k, n) go; the old ones then stay unchanged
        """
        new_params, new_vectors = out or (params, state.vectors)
        p, g, *rows = (device.backend.contiguous(vector) for vector in (params, grads, *state.vectors))
        step = OneStep(p, g, tuple(rows), state.count, lr, progress, decays, new_params, new_vectors)
        if device.backend.compiled:
            for loop in self.loops(step, device):
                device.pool.map(loop, device.pool.slices(len(params), at_least=AT_LEAST))
        else:
            self.by_arrays(step, device)
        return OptimizerState(new_vectors, state.count + 1)

    @abstractmethod
    def by_arrays(self, step: OneStep, device: Device) -> None:
        """Make the step by array expressions over `device.xp`."""

    @abstractmethod
    def loops(self, step: OneStep, device: Device) -> Sequence[Loop]:
        """Return the compiled loops, one after the other, that make the step on parts of the vectors."""


BLOCK = 1 << 15
"""Numbers that are added up by one thread, whichever it is; the blocks' sums are then added up in their order."""


def sum_of_squares(vector: Array, device: Device) -> Any:
    """Return the sum of the squares of a vector (n,) of the device, in float64; 0-d, and on the device."""
    if not device.backend.compiled:
        return device.xp.sum(device.xp.square(vector), dtype="float64")
    own = device.backend.contiguous(vector)
    sums = np.empty(-(-len(own) // BLOCK))
    parts = device.pool.slices(len(sums))
    device.pool.map(lambda part: compiled.updates.squares(own, BLOCK, sums, part.start, part.stop), parts)
    return sums.sum()


def clip(grads: Array, places: Iterable[slice], most: float, device: Device) -> None:
    """Scale the gradients at these places so that their norm, all taken together, is at most `most`, in place.

    Pascanu, Mikolov and Bengio 2013, algorithm 1. On a GPU the scale stays on the device.
    """
    parts, xp = [grads[place] for place in places], device.xp
    norm = xp.sqrt(sum(sum_of_squares(part, device) for part in parts))
    scale = (most / xp.maximum(norm, most)).astype(grads.dtype)
    if device.backend.compiled and scale == 1:
        return
    for part in parts:

        def scaled(cut: slice, part: Array = part) -> None:
            part[cut] *= scale

        device.pool.map(scaled, device.pool.slices(len(part), at_least=BLOCK))
