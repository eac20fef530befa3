"""Steps of a whole network: an optimizer, and the treatment of each parameter."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import NamedTuple

from daskcnn.arrays import Array, Device
from daskcnn.nn.optimizers.optimizer import Optimizer, OptimizerState, StepPace, clip
from daskcnn.nn.vector import Layout


class Treatment(NamedTuple):
    """The treatment of parameters in a step: the factor of the learning rate, and whether they decay."""

    rate: float = 1.0
    decays: bool = True


class Span(NamedTuple):
    """Neighbouring parameters of the flat vector that are treated alike."""

    at: slice
    treatment: Treatment


@dataclass(frozen=True)
class Gradients:
    """Gradients as a flat vector (n,), but for large ones, which stay `apart`, by their places' starts in it."""

    vector: Array
    apart: Mapping[int, Array]

    def __getitem__(self, at: slice) -> Array:
        """Return the gradients of a span, which is one large parameter or has none."""
        found = self.apart.get(at.start)
        return self.vector[at] if found is None else found


@dataclass(frozen=True)
class Descent:
    """An optimizer for a network whose parameters are not all treated alike. Paths are those of `Layout`.

    Attributes
    ----------
    frozen : paths of the layers that stay as they are
    rates : patterns of layers' paths, with the factor of their learning rate; of several the last one counts
    decay_all : whether biases and parameters of normalising decay too
    clip : largest norm of the gradients of all parameters that are trained; None: any
    """

    optimizer: Optimizer
    frozen: frozenset[str] = frozenset()
    rates: tuple[tuple[str, float], ...] = ()
    decay_all: bool = True
    clip: float | None = None

    def treatment(self, path: str) -> Treatment | None:
        """Return what is done to the parameters of this path; None: they are frozen."""
        layers = layers_of(path)
        if not self.frozen.isdisjoint(layers):
            return None
        found = [rate for pattern, rate in self.rates if any(fnmatchcase(layer, pattern) for layer in layers)]
        # the weights of layers are called w; others are biases, and what normalising scales and shifts by
        return Treatment(found[-1] if found else 1.0, self.decay_all or path.rpartition("/")[2] == "w")

    def spans(self, layout: Layout, alone: Collection[str] = ()) -> tuple[Span, ...]:
        """Return the parameters that are trained. Neighbours are joined, unless the optimizer needs each by itself.

        alone: paths of parameters that have spans of their own.
        """
        found, joins = list[Span](), False
        for path, at in layout.places():
            treatment, joinable = self.treatment(path), not self.optimizer.by_tensor and path not in alone
            if treatment is None or at.start == at.stop:
                continue
            if joins and joinable and found[-1] == (slice(found[-1].at.start, at.start), treatment):
                found[-1] = Span(slice(found[-1].at.start, at.stop), treatment)
            else:
                found.append(Span(at, treatment))
            joins = joinable
        return tuple(found)

    def step(
        self,
        weights: Array,
        grads: Array | Gradients,
        state: OptimizerState,
        spans: Sequence[Span],
        pace: StepPace,
        device: Device,
    ) -> OptimizerState:
        """Make one step of the parameters (n,), which come first in the weights, in place; return the new state.

        The gradients (n,) are scaled in place where their norm is too large; they are then one vector.
        """
        if self.clip is not None:
            assert not isinstance(grads, Gradients), "the norm is that of all"
            clip(grads, (span.at for span in spans), self.clip, device)
        for at, (rate, decays) in spans:
            args = weights[at], grads[at], state.part(at), pace.lr * rate, device
            self.optimizer.step(*args, progress=pace.progress, decays=decays)
        return OptimizerState(state.vectors, state.count + 1)


def layers_of(path: str) -> list[str]:
    """Return the paths of the layers that a parameter is of, the outermost first: of a/b/w they are a and a/b."""
    return list(accumulate(path.split("/")[:-1], "{}/{}".format))


def unmet(patterns: Iterable[str], layout: Layout) -> Iterator[str]:
    """Yield the patterns that meet no layer with parameters."""
    layers = {layer for path, _ in layout.places() for layer in layers_of(path)}
    return (pattern for pattern in patterns if not any(fnmatchcase(layer, pattern) for layer in layers))
