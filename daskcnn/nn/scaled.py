"""Maps that are shifted and scaled by channel, on processors: with a map added to them, and a ReLU behind.

Sums over the pixels and samples of maps and vectors, channel by channel (the last axis).

On processors they are compiled loops over fixed parts, so that sums do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from daskcnn import compiled
from daskcnn.arrays import Array, Device
from daskcnn.compiled.program import LEAST_PART, PARTS, RUN

THREAD_PARTS = 2
"""Fewest parts of a map for each thread of a chain, worth calling one."""
THREAD_NUMBERS = 1 << 14
"""Fewest numbers for each thread of a pass that does little with each."""


@dataclass(frozen=True)
class Scaling:
    """What batch normalising does to x: y = (x - mean) · factor + shift, each (C,).

    `rest` is what rounding left of the mean, and `deviation` the inverse of x's standard deviation.
    """

    mean: Array
    rest: Array
    deviation: Array
    factor: Array
    shift: Array


def rows_of(scaling: Scaling, back: Scaling | None) -> Array:
    """Return what the loops take by channel, (5, C): `tiled` of `compiled.batchnorm`, without its sums."""
    none = np.zeros_like(scaling.mean)
    by_x, by_all = (none, none) if back is None else (back.factor, back.shift)
    return np.stack([scaling.mean, scaling.factor, scaling.shift, by_x, by_all])


@dataclass(frozen=True)
class ScaledPass:
    """A pass of a whole map x through a scaling, a sum, and, if it is rectified, a ReLU: one loop over its numbers."""

    x: Array
    device: Device
    rectified: bool

    def forward(self, scaling: Scaling, other: Array | None = None) -> Array:
        """Return y = (x - mean)·factor + shift + other, rectified or not."""
        y, tiled = np.empty(self.x.shape, self.x.dtype), self._tiled(rows_of(scaling, None))
        added = self._none if other is None else self._flat(other)
        out = y.reshape(-1)
        self._each(lambda lo, hi: compiled.scaled.forward(self._numbers, tiled, added, self.rectified, out, lo, hi))
        return y

    def sums(self, dy: Array, scaling: Scaling, y: Array | None = None) -> tuple[Array, Array, Array]:
        """Return the sums over pixels and samples of d and of d·(x - mean), each (C,), and d where y is given.

        d is dy, and 0 where a ReLU's output is 0. y: the output, if something was added to it; else dy is returned.
        """
        keeps = self.rectified and y is not None
        change = np.empty_like(dy, order="C") if keeps else dy
        tiled, parts = self._tiled(rows_of(scaling, None)), np.empty((self._parts, 2, self.x.shape[-1]))
        behind = self._flat(y) if y is not None else self._none
        own = self._numbers, tiled, behind, self._flat(dy), self.rectified, change.reshape(-1) if keeps else self._none

        def add_up(part: slice) -> None:
            scratch = self.device.workspace.take(f"sums {self.device.pool.thread}", (2, self._run), self.x.dtype)
            compiled.scaled.sums(*own, parts, self._size, part.start, part.stop, scratch)

        self.device.pool.map(add_up, self._slices)
        total, product = parts.sum(axis=0)
        return total, product, change

    def backward(self, dy: Array, scaling: Scaling, back: Scaling) -> Array:
        """Return dx = d·factor + (x - mean)·by_x + by_all; back: its factor is by_x, its shift by_all."""
        dx, tiled = np.empty(self.x.shape, self.x.dtype), self._tiled(rows_of(scaling, back))
        change, out = self._flat(dy), dx.reshape(-1)
        self._each(lambda lo, hi: compiled.scaled.backward(self._numbers, tiled, change, self.rectified, out, lo, hi))
        return dx

    @cached_property
    def _numbers(self) -> Array:
        return self._flat(self.x)

    @property
    def _none(self) -> Array:
        return np.empty(0, self.x.dtype)

    def _flat(self, a: Array) -> Array:
        return self.device.backend.contiguous(a).reshape(-1)

    @cached_property
    def _run(self) -> int:
        """Numbers that the loops take at once: of whole pixels' samples or of a part of them."""
        C = self.x.shape[-1]
        return int(C * max(1, RUN // C))

    @cached_property
    def _size(self) -> int:
        """Numbers of a part, the same for any number of threads: sums are taken part by part."""
        wanted = max(1, min(PARTS, self.x.size // LEAST_PART))
        return -(-self.x.size // (wanted * self._run)) * self._run

    @property
    def _parts(self) -> int:
        return -(-self.x.size // self._size)

    @property
    def _slices(self) -> list[slice]:
        return self.device.pool.slices(self._parts, at_least=-(-THREAD_NUMBERS // self._size))

    def _tiled(self, rows: Array) -> Array:
        return np.tile(rows, self._run // self.x.shape[-1])

    def _each(self, call: Callable[[int, int], None]) -> None:
        """Call the loop for ranges of numbers, on threads."""

        def work(part: slice) -> None:
            call(part.start * self._size, min(self.x.size, part.stop * self._size))

        self.device.pool.map(work, self._slices)


CHANNEL_RUN = 1024
"""About how many numbers are added to as many sums at once: enough for vectors, few enough for the first cache."""


def channel_sum(x: Array, device: Device) -> Array:
    """Return the sum of x (..., N, C) over all axes but the last: (C,)."""
    if not device.backend.compiled:
        return x.sum(axis=tuple(range(x.ndim - 1)))
    C = x.shape[-1]
    run = _run(C)
    flat = device.backend.contiguous(x).reshape(-1)
    parts = np.empty((-(-x.size // (compiled.runs.RUNS * run)), C))

    def work(part: slice) -> None:
        scratch = device.workspace.take(f"sums {device.pool.thread}", (run,), x.dtype)
        compiled.runs.channel_sums(flat, C, run, part.start, part.stop, parts, scratch)

    device.pool.map(work, device.pool.slices(len(parts)))
    return parts.sum(axis=0).astype(x.dtype)


def moments(x: Array, device: Device) -> tuple[Array, Array, Array]:
    """Return mean, what rounding leaves of it, and variance of each channel of x (..., N, C): (C,) each.

    Squares are taken about the mean, so they are exact however far it lies from 0.
    """
    if not device.backend.compiled:
        axes = tuple(range(x.ndim - 1))
        mean = x.mean(axis=axes)
        rest = (x - mean).mean(axis=axes)
        return mean, rest, ((x - mean - rest) ** 2).mean(axis=axes)
    C, count = x.shape[-1], prod(x.shape[:-1])
    run = _run(C)
    flat = device.backend.contiguous(x).reshape(-1)
    parts, whole = np.empty((compiled.batchnorm.part_count(x.size, run), 2, C)), np.empty((2, C))

    def work(part: slice) -> None:
        scratch = device.workspace.take(f"moments {device.pool.thread}", (3, run), x.dtype)
        compiled.batchnorm.moments(flat, C, run, part.start, part.stop, parts, scratch)

    device.pool.map(work, device.pool.slices(len(parts), at_least=-(-THREAD_NUMBERS // compiled.batchnorm.PART)))
    compiled.batchnorm.joined(parts, C, run, count, whole)
    mean = whole[0].astype(x.dtype)
    return mean, (whole[0] - mean).astype(x.dtype), whole[1].astype(x.dtype)


def _run(C: int) -> int:
    """Return a multiple of C."""
    return max(1, CHANNEL_RUN // C) * C
