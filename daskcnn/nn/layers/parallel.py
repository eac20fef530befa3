"""Layers of several paths that begin at the same input: residual blocks, branches side by side, sums of branches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import numpy as np

from daskcnn.arrays import Array, Device
from daskcnn.nn.layer import Context, Initializer, Layer, LayerError, Params, Shape, Start, State, glorot_uniform
from daskcnn.nn.layers.conv import Conv
from daskcnn.nn.local import LocalLayer, ScalingLayer
from daskcnn.nn.scaled import THREAD_NUMBERS, ScaledPass
from daskcnn.nn.sequential import Sequential

Path = tuple[str, Sequential | None]
"""A path by name; None passes the input on as it is."""


class Parallel(Layer):
    """Base of layers whose paths all take the layer's input, and whose outputs are joined: by default, added.

    params, state and gradients are dicts by path. The residual holds each path's, and the channels that each put out.
    """

    _remedy: ClassVar[str] = ""

    @property
    @abstractmethod
    def paths(self) -> tuple[Path, ...]:
        """The paths in the order in which they are joined."""

    def _out_shape(self, shapes: Sequence[tuple[str, Shape]]) -> Shape:
        """Return the shape that paths of these names and shapes are joined to. Raises ValueError where they differ."""
        (first, shape), *others = shapes
        for name, other in others:
            if other != shape:
                remedy = f"a sum needs equal shapes{self._remedy}"
                raise ValueError(f"{first} gives {_times(shape)} and {name} {_times(other)}: {remedy}")
        return shape

    def _join(self, parts: Sequence[Array], given: Array, device: Device) -> Array:
        """Return the outputs joined. `given` is the layer's input, which is not written to."""
        path = self.paths[0][1]
        # nothing else needs the output of layers of these kinds, which keep their input alone
        fresh = path is not None and isinstance(path.layers[-1][1], Conv | LocalLayer | ScalingLayer)
        return added(parts, given if fresh else parts[0], device)

    def _split(self, dy: Array, channels: Sequence[int], device: Device) -> list[Array]:
        """Return the part of the gradient that belongs to each path."""
        return [dy] * len(channels)

    def children(self, in_shape: Shape) -> Iterator[tuple[str, Layer, Shape]]:
        """Yield the paths that have layers."""
        return ((name, path, in_shape) for name, path in self.paths if path is not None)

    def out_shape(self, in_shape: Shape) -> Shape:
        """Return the shape of the joined outputs. Raises ValueError if a path does not fit, or paths do not."""
        shapes = []
        for name, path in self.paths:
            try:
                shapes.append((name, in_shape if path is None else path.out_shape(in_shape)))
            except ValueError as error:
                raise LayerError.inside(name, error) from error
        return self._out_shape(shapes)

    def numbers(self, in_shape: Shape) -> int:
        """Return the numbers of all paths."""
        return sum(path.numbers(shape) for _, path, shape in self.children(in_shape))

    def init(self, rng: np.random.Generator, in_shape: Shape, *, initial: Initializer = glorot_uniform) -> Start:
        """Return params and state of the paths by name, leaving out those without any, and the output's shape."""
        params: Params = {}
        state: State = {}
        for name, path, shape in self.children(in_shape):
            own, kept, _ = path.init(rng, shape, initial=initial)
            params |= {name: own} if own else {}
            state |= {name: kept} if kept else {}
        return params, state, self.out_shape(in_shape)

    @property
    def mixes_samples(self) -> bool:
        """True if any path does."""
        return any(path is not None and path.mixes_samples for _, path in self.paths)

    def initial_before(self, after: Initializer) -> Initializer:
        """Return the initializer that the first path asks for."""
        _, path = self.paths[0]
        return after if path is None else path.initial_before(after)

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Any]:
        """Return (y, new state, residual)."""
        new_state: State = {}
        parts, residuals = [], []
        for name, path in self.paths:
            y, residual = x, None
            if path is not None:
                y, kept, residual = path.forward(params.get(name, {}), state.get(name, {}), x, ctx.child(name))
                new_state |= {name: kept} if kept else {}
            parts.append(y)
            residuals.append(residual)
        channels = [part.shape[-1] for part in parts]
        return self._join(parts, x, ctx.device), new_state, (residuals, channels) if ctx.training else None

    def backward(self, params: Params, residual: Any, dy: Array, ctx: Context) -> tuple[Array | None, Params]:
        """Return (dx, gradients): dx is the sum of the paths'."""
        residuals, channels = residual
        grads: Params = {}
        dxs: list[Array] = []
        for (name, path), kept, part in zip(self.paths, residuals, self._split(dy, channels, ctx.device), strict=True):
            dx: Array | None = part
            if path is not None:
                own = params.get(name, {})
                dx, found = path.backward(own, kept, part, ctx.child(name, need_dx=ctx.need_dx))
                grads |= {name: found} if own else {}
            dxs += [dx] if dx is not None else []
        return added(dxs, dy, ctx.device) if ctx.need_dx else None, grads


@dataclass(frozen=True)
class Residual(Parallel):
    """y = path(x) + shortcut(x), where the shortcut is x itself by default (He et al. 2016, eq. 1 and 2)."""

    path: Sequential
    shortcut: Sequential | None = None
    _remedy = "; a shortcut of a 1×1 convolution can change channels and stride"

    @property
    def paths(self) -> tuple[Path, ...]:
        """The path and the shortcut."""
        return ("path", self.path), ("shortcut", self.shortcut)

    def mapped(self, function: Callable[[str, Any], Any]) -> Residual:
        """Return both changed by `function`."""
        changed: dict[str, Any] = {name: path and function(name, path) for name, path in self.paths}
        return Residual(**changed)

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Any]:
        """Return (y, new state, residual)."""
        if ctx.device.backend.compiled and self.ends_scaled:
            return NormalisedSum(self, rectified=False).forward(params, state, x, ctx)
        return super().forward(params, state, x, ctx)

    def backward(self, params: Params, residual: Any, dy: Array, ctx: Context) -> tuple[Array | None, Params]:
        """Return (dx, gradients)."""
        if ctx.device.backend.compiled and self.ends_scaled:
            return NormalisedSum(self, rectified=False).backward(params, residual, dy, ctx)
        return super().backward(params, residual, dy, ctx)

    @property
    def ends_scaled(self) -> bool:
        """True if the path ends with batch normalising behind other layers, none of which lends its weights."""
        *before, (_, last) = self.path.layers
        return bool(before) and isinstance(last, ScalingLayer) and not self.path.ties

    def with_relu(self) -> Layer | None:
        """Return the block with the ReLU in the pass that adds, if its path ends with batch normalising."""
        return NormalisedSum(self, rectified=True) if self.ends_scaled else None


@dataclass(frozen=True)
class NormalisedSum(Layer):
    """A block that ends with batch normalising, on processors: that, the sum and a ReLU (`rectified`) in one pass."""

    block: Residual
    rectified: bool

    def out_shape(self, in_shape: Shape) -> Shape:
        """Return the shape of the sum."""
        return self.block.out_shape(in_shape)

    @cached_property
    def _body(self) -> Sequential:
        """The path without its last layer."""
        return replace(self.block.path, layers=self.block.path.layers[:-1])

    def forward(self, params: Params, state: State, x: Array, ctx: Context) -> tuple[Array, State, Any]:
        """Return (y, new state, residual)."""
        own, kept, path = params.get("path", {}), state.get("path", {}), ctx.child("path")
        z, moved, of_body = self._body.forward(own, kept, x, path)
        name, norm = self.block.path.layers[-1]
        assert isinstance(norm, ScalingLayer), "the block ends with one"
        scaling, of_norm = norm.scaling(own.get(name, {}), kept.get(name, {}), z, path.child(name))
        new = {"path": moved | {name: of_norm}}
        other, of_shortcut, shortcut = x, None, self.block.shortcut
        if shortcut is not None:
            own, kept = params.get("shortcut", {}), state.get("shortcut", {})
            other, moved, of_shortcut = shortcut.forward(own, kept, x, ctx.child("shortcut"))
            new |= {"shortcut": moved} if moved else {}
        y = ScaledPass(z, ctx.device, self.rectified).forward(scaling, other)
        return y, new, (of_body, of_shortcut, z, scaling, y if self.rectified else None) if ctx.training else None

    def backward(self, params: Params, residual: Any, dy: Array, ctx: Context) -> tuple[Array | None, Params]:
        """Return (dx, gradients)."""
        of_body, of_shortcut, z, scaling, y = residual
        (name, norm), own = self.block.path.layers[-1], params.get("path", {})
        assert isinstance(norm, ScalingLayer), "the block ends with one"
        way = ScaledPass(z, ctx.device, self.rectified)
        change = np.empty_like(dy, order="C") if self.rectified else dy
        total, product = way.sums(dy, scaling, y, change if self.rectified else None)
        of_norm, back = norm.gradients(own.get(name, {}), scaling, total, product, z.size // z.shape[-1])
        dz = ScaledPass(z, ctx.device, rectified=False).backward(change, scaling, back)
        dx, grads = self._body.backward(own, of_body, dz, ctx.child("path", need_dx=ctx.need_dx))
        if of_norm and name not in self.block.path.frozen:
            grads |= {name: of_norm}
        found = {"path": grads} if own else {}
        other: Array | None = change
        if self.block.shortcut is not None:
            own, inner = params.get("shortcut", {}), ctx.child("shortcut", need_dx=ctx.need_dx)
            other, grads = self.block.shortcut.backward(own, of_shortcut, change, inner)
            found |= {"shortcut": grads} if own else {}
        if not ctx.need_dx:
            return None, found
        assert dx is not None, "asked for"
        assert other is not None, "asked for"
        return added([dx, other], dy, ctx.device), found


@dataclass(frozen=True)
class _Branches(Parallel):
    """Branches by number: branch1, branch2, … An empty one passes the input on."""

    branches: tuple[Sequential | None, ...]

    def __post_init__(self) -> None:
        if len(self.branches) < 2:
            raise ValueError(f"branches={len(self.branches)}: there must be two at least; [] passes the input on")

    @property
    def paths(self) -> tuple[Path, ...]:
        """The branches."""
        return tuple((f"branch{i}", branch) for i, branch in enumerate(self.branches, 1))

    def mapped(self, function: Callable[[str, Any], Any]) -> Any:
        """Return the branches changed by `function`."""
        return type(self)(tuple(path and function(name, path) for name, path in self.paths))


@dataclass(frozen=True)
class Branches(_Branches):
    """The branches' outputs side by side, along the channels (Szegedy et al. 2015, Fig. 2)."""

    def _out_shape(self, shapes: Sequence[tuple[str, Shape]]) -> Shape:
        (first, shape), *others = shapes
        for name, other in others:
            if other[:-1] != shape[:-1]:
                raise ValueError(f"{first} gives {_times(shape)} and {name} {_times(other)}: only channels may differ")
        return *shape[:-1], sum(one[-1] for _, one in shapes)

    def _join(self, parts: Sequence[Array], given: Array, device: Device) -> Array:
        y = device.xp.empty((*parts[0].shape[:-1], sum(part.shape[-1] for part in parts)), parts[0].dtype)

        def write(task: tuple[Array, slice]) -> None:
            part, channels = task
            y[..., channels] = part

        device.pool.map(write, list(zip(parts, _slices([part.shape[-1] for part in parts]), strict=True)))
        return y

    def _split(self, dy: Array, channels: Sequence[int], device: Device) -> list[Array]:
        return device.pool.map(lambda part: device.xp.ascontiguousarray(dy[..., part]), _slices(channels))


@dataclass(frozen=True)
class Add(_Branches):
    """The sum of the branches' outputs, which are of one shape."""


def added(parts: Sequence[Array], given: Array, device: Device) -> Array:
    """Return the sum of arrays of one shape, in their order: in the first one's memory, unless that is `given`'s."""
    total, *others = parts
    if not device.backend.compiled:
        for other in others:
            total = total + other
        return total
    out = np.empty_like(total, order="C") if np.may_share_memory(total, given) else total
    if not out.flags.c_contiguous:
        out = np.ascontiguousarray(out)
    flat, first = out.reshape(-1), device.backend.contiguous(total).reshape(-1)
    rest = [device.backend.contiguous(other).reshape(-1) for other in others]

    def add(part: slice) -> None:
        np.add(first[part], rest[0][part], out=flat[part])
        for other in rest[1:]:
            np.add(flat[part], other[part], out=flat[part])

    device.pool.map(add, device.pool.slices(flat.size, at_least=THREAD_NUMBERS))
    return out


def _times(shape: Shape) -> str:
    return "×".join(map(str, shape))


def _slices(channels: Sequence[int]) -> list[slice]:
    return [slice(a, b) for a, b in pairwise(accumulate(channels, initial=0))]
