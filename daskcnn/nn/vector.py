"""Parameters, state and gradients as nested dicts of arrays, and as the flat vector that checkpoints hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise, starmap
from math import prod
from typing import Any

import numpy as np

from daskcnn.arrays import Array, Device
from daskcnn.nn.layer import Layer, Params, Shape, Start, State


def leaves(tree: dict[str, Any], path: str = "") -> Iterator[tuple[str, Array]]:
    """Yield every array with its path ("conv1/w"), in the order of the dicts."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{name}/")
        else:
            yield f"{path}{name}", value


def inside(tree: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the part of a tree that belongs to the layer of this path; empty where it has none."""
    for name in path.split("/"):
        tree = tree.get(name, {})
    return tree


def map_leaves(function: Callable[[Array], Any], tree: dict[str, Any]) -> dict[str, Any]:
    """Return the same nesting with `function` of every array."""
    return {
        name: map_leaves(function, value) if isinstance(value, dict) else function(value)
        for name, value in tree.items()
    }


_LARGE = 1 << 20
"""From this size in bytes, copying an array takes longer than handing the work to threads."""


@dataclass(frozen=True)
class Layout:
    """The order of the arrays, by paths such as "conv1/w", in the vector: first `parameters` parameters, then state."""

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    dtype: str
    parameters: int

    @classmethod
    def of(cls, params: Params, state: State) -> Layout:
        """Return the layout of these. Raises ValueError if dtypes differ, or a parameter has the name of a state."""
        named = [*leaves(params), *leaves(state)]
        names = tuple(name for name, _ in named)
        dtypes = {leaf.dtype.name for _, leaf in named}
        if len(dtypes) != 1:
            raise ValueError(f"dtypes {sorted(dtypes)}: a vector needs exactly one; cast the network to it first")
        if len(set(names)) < len(names):
            raise ValueError(f"names {names}: a parameter and a state share one; rename one of them in the layer")
        return cls(names, tuple(leaf.shape for _, leaf in named), dtypes.pop(), sum(1 for _ in leaves(params)))

    @property
    def size(self) -> int:
        """Numbers in the vector."""
        return self._edges[-1]

    @property
    def parameter_size(self) -> int:
        """Numbers of the vector's leading part, the parameters, which the optimiser updates."""
        return self._edges[self.parameters]

    @property
    def besides(self) -> tuple[slice, ...]:
        """The places of what layers keep besides parameters, such as running statistics."""
        return (slice(self.parameter_size, self.size),)

    @property
    def nbytes(self) -> int:
        """Bytes of the vector."""
        return self.size * np.dtype(self.dtype).itemsize

    @cached_property
    def _edges(self) -> list[int]:
        return list(accumulate((prod(shape) for shape in self.shapes), initial=0))

    def places(self) -> Iterator[tuple[str, slice]]:
        """Yield every parameter's path and place in the vector, in order."""
        return zip(self.names[: self.parameters], starmap(slice, pairwise(self._edges)), strict=False)

    def spans(self, layers: Collection[str]) -> tuple[slice, ...]:
        """Return the places in the vector of the layers of these paths, with their state. Neighbours are joined."""
        found = list[slice]()
        for name, (start, stop) in zip(self.names, pairwise(self._edges), strict=True):
            if name.rpartition("/")[0] in layers and start < stop:
                joined = found and found[-1].stop == start
                found[-1:] = [slice(found[-1].start, stop)] if joined else [*found[-1:], slice(start, stop)]
        return tuple(found)

    def flatten(
        self,
        params: Params,
        state: State,
        *,
        xp: Any = np,
        out: Array | None = None,
        device: Device | None = None,
        but: Collection[str] = (),
    ) -> Array:
        """Return these as a vector (size,); gradients with an empty state give (parameter_size,).

        The vector is written to `out` if given, on the threads of `device` if given, `but` for the arrays of these
        paths. Raises ValueError if params and state do not have this layout.
        """
        named = [*leaves(params), *leaves(state)]
        found, expected = [(name, leaf.shape) for name, leaf in named], list(zip(self.names, self.shapes, strict=True))
        if found not in (expected, expected[: self.parameters]):
            wrong = next((pair for pair in zip(found, expected, strict=False) if pair[0] != pair[1]), "their number")
            raise ValueError(f"arrays do not fit the layout: {wrong} (found, expected); the network is another one")
        vector = xp.empty(self._edges[len(named)], self.dtype) if out is None else out
        for (name, leaf), (start, stop) in zip(named, pairwise(self._edges), strict=False):
            if name not in but:
                _copy(leaf.reshape(-1), vector[start:stop], device)
        return vector

    def views(self, vector: Array) -> tuple[Params, State]:
        """Return (params, state) as views of the vector: writing to one writes to the other."""
        if vector.shape != (self.size,):
            raise ValueError(f"vector of shape {vector.shape}: this layout has {self.size} numbers")
        own = zip(self.names, self.shapes, pairwise(self._edges), strict=True)
        named = [(name, vector[start:stop].reshape(shape)) for name, shape, (start, stop) in own]
        return _nested(named[: self.parameters]), _nested(named[self.parameters :])

    def rows(self, vectors: Array) -> Params:
        """Return views of vectors (k, parameter_size), nested like the parameters; each of shape (k, *its own)."""
        own = zip(self.places(), self.shapes, strict=False)
        return _nested([(name, vectors[:, at].reshape(len(vectors), *shape)) for (name, at), shape in own])


class _Zeros(np.random.Generator):
    """A generator whose weights are zeros without memory of their own, where shapes alone count."""

    def normal(self, loc: Any = 0.0, scale: Any = 1.0, size: Any = None) -> Any:
        return np.broadcast_to(np.zeros(()), size)

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        return np.broadcast_to(np.zeros(()), size)


def undrawn(layer: Layer, in_shape: Shape) -> Start:
    """Return what `init` returns, with zeros in place of random numbers. They take neither time nor memory."""
    return layer.init(_Zeros(np.random.PCG64(0)), in_shape)


def layout_of(model: Layer, in_shape: Shape, dtype: str) -> Layout:
    """Return the layout of a network for images of this shape, without drawing its weights.

    Raises ValueError for a network without parameters.
    """
    params, state, _ = undrawn(model, in_shape)
    if next(leaves(params), None) is None:
        raise ValueError("no layer has parameters, so nothing can be trained; add one that has, such as conv or dense")
    return replace(Layout.of(params, state), dtype=dtype)


def _copy(source: Array, target: Array, device: Device | None) -> None:
    """Copy vectors, large ones on the device's threads."""

    def copy(part: slice) -> None:
        target[part] = source[part]

    if device is None or source.nbytes < _LARGE:
        copy(slice(None))
    else:
        device.pool.map(copy, device.pool.slices(source.size))


def _nested(named: list[tuple[str, Array]]) -> dict[str, Any]:
    """Return {"conv1": {"w": ...}} from [("conv1/w", ...)]."""
    tree: dict[str, Any] = {}
    for path, leaf in named:
        *parents, last = path.split("/")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = leaf
    return tree
