"""The sources of a module as a user writes it: a rule, a partitioner, and a layer with a learnt parameter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from daskcnn import modules
from daskcnn.job.own_members import REGISTRIES

NAME = "my_daskcnn_module"
SOURCE = '''
from dataclasses import dataclass

import numpy as np

from daskcnn.nn.layer import Layer
from daskcnn.nn.layers import LAYERS
from daskcnn.partition import PARTITIONERS
from daskcnn.partition.partitioner import IDPA
from daskcnn.ps import RULES, Merge, UpdateRule


class Median(UpdateRule):
    """The median of all replicas' weights, number by number."""

    barrier = True

    def payload(self, local):
        return local.weights

    def merge(self, center, state, pushes, view):
        return Merge(np.median([push.payload for push in pushes], axis=0).astype(center.dtype), state)


@dataclass(frozen=True)
class Gentle(IDPA):
    """Parts by the root of speed."""

    laws = frozenset({"complete"})

    def weights(self, seconds):
        return [weight**0.5 for weight in super().weights(seconds)]


@dataclass(frozen=True)
class Slope(Layer):
    """x where it is positive, else a learnt factor of the channel times x."""

    first: float = 0.25
    reach = 0

    def numbers(self, in_shape):
        return in_shape[-1]

    def init(self, rng, in_shape, *, initial=None):
        return {"slope": np.full(in_shape[-1], self.first)}, {}, in_shape

    def forward(self, params, state, x, ctx):
        return ctx.device.xp.where(x > 0, x, params["slope"] * x), state, x

    def backward(self, params, residual, dy, ctx):
        xp, x = ctx.device.xp, residual
        inner = tuple(range(x.ndim - 1))
        return xp.where(x > 0, dy, params["slope"] * dy), {"slope": xp.where(x > 0, 0, x * dy).sum(axis=inner)}


RULES["median"] = Median
PARTITIONERS["gentle"] = Gentle
LAYERS["slope"] = Slope
'''


def write_module(folder: Path, source: str = SOURCE, name: str = NAME) -> Path:
    """Write the module into the folder, where it is not looked for by itself."""
    path = folder / f"{name}.py"
    path.write_text(source)
    return path


@contextmanager
def forgotten(*names: str) -> Iterator[None]:
    """Forget inside and afterwards what modules of these names, or of the usual one, have added to this process."""
    before, path = {kind: dict(registry) for kind, registry in REGISTRIES.items()}, list(sys.path)
    try:
        yield
    finally:
        for name in names or (NAME,):
            sys.modules.pop(name, None)
        for kind, registry in REGISTRIES.items():
            registry.clear()
            registry.update(before[kind])
        sys.path[:] = path
        modules._folders.clear()
