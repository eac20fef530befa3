"""Passes over whole maps on processors, and sums over pixels and samples by channel (the last axis).

Sums are taken over fixed parts, so that they do not depend on the number of threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from daskcnn import compiled
from daskcnn.arrays import Array, Device
from daskcnn.compiled.program import LEAST_PART, PARTS, RUN

NONE = -1
"""No activation."""
THREAD_PARTS = 2
"""Fewest parts of a map for each thread of a chain, worth calling one."""
THREAD_NUMBERS = 1 << 14
"""Fewest numbers for each thread of a pass that does little with each."""


@dataclass(frozen=True)
class Scaling:
    """Numbers (C,) of y = (x - mean) · factor + shift; `rest` is what rounding left of the mean, deviation 1 / σ."""

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


class Pass(ABC):
    """A pass of a map x through a run of layers by compiled loops. A scaling, if there is one, comes first."""

    @abstractmethod
    def forward(self, scaling: Scaling | None) -> Array:
        """Return y."""

    @abstractmethod
    def sums(self, dy: Array, scaling: Scaling) -> tuple[Array, Array]:
        """Return the sums (C,) over pixels and samples of d, the scaling's output's gradient, and of d·(x - mean)."""

    @abstractmethod
    def backward(self, dy: Array, scaling: Scaling | None, back: Scaling | None) -> Array:
        """Return dx. With a scaling it is d·factor + (x - mean)·by_x + by_all, factor and shift of `back`."""


class MapCut(NamedTuple):
    """The cut of a map's numbers: numbers that a loop takes at once, a multiple of C; runs of these; runs of a part.

    Parts are the same for any number of threads.
    """

    run: int
    runs: int
    size: int

    @classmethod
    def of(cls, run: int, runs: int, numbers: int) -> MapCut:
        """Return the cut of a map of this many numbers."""
        return cls(run, runs, -(-runs // max(1, min(PARTS, numbers // LEAST_PART))))


@dataclass
class WholePass(Pass):
    """A pass of a whole map by one loop over its numbers. Runs of numbers are shared out in fixed parts."""

    x: Array
    device: Device

    @property
    @abstractmethod
    def _cut(self) -> MapCut:
        """The cut of maps of this shape."""

    def _each(self, call: Callable[[int, int], None]) -> None:
        """Call the loop for ranges of runs, on threads."""
        cut, pool = self._cut, self.device.pool
        if pool.threads == 1:
            call(0, cut.runs)
        else:
            parts = pool.slices(-(-cut.runs // cut.size))
            pool.map(lambda part: call(part.start * cut.size, min(cut.runs, part.stop * cut.size)), parts)

    def _add_up(self, call: Callable[..., None]) -> tuple[Array, Array]:
        """Call the loop for ranges of parts, on threads; return the sums of what it adds up, (C,) each."""
        cut, pool = self._cut, self.device.pool
        parts = np.empty((-(-cut.runs // cut.size), 2, self.x.shape[-1]))

        def work(part: slice) -> None:
            scratch = self.device.workspace.take(f"sums {pool.thread}", (2, cut.run), self.x.dtype)
            call(parts, cut.size, part.start, part.stop, scratch)

        pool.map(work, pool.slices(len(parts)))
        total, product = parts.sum(axis=0)
        return total, product

    def _tiled(self, scaling: Scaling | None, back: Scaling | None) -> Array:
        run = self._cut.run
        if scaling is None:
            return _unscaled(run, self.x.dtype)
        return np.tile(rows_of(scaling, back), run // self.x.shape[-1])


@lru_cache
def _unscaled(run: int, dtype: np.dtype[Any]) -> Array:
    """Return the rows by which nothing is scaled."""
    rows = np.zeros((5, run), dtype)
    rows[1] = 1
    return rows


@dataclass
class ScaledPass(WholePass):
    """A pass through a scaling, a sum with another map, and, if it is rectified, a ReLU."""

    rectified: bool

    def forward(self, scaling: Scaling | None, other: Array | None = None) -> Array:
        """Return y = (x - mean)·factor + shift + other, rectified or not."""
        y, tiled = np.empty(self.x.shape, self.x.dtype), self._tiled(scaling, None)
        x, added, out = self._flat(self.x, other, y)
        self._each(lambda *runs: compiled.scaled.forward(x, tiled, added, self.rectified, out, *self._numbers(*runs)))
        return y

    def sums(self, dy: Array, scaling: Scaling, y: Array | None = None, d: Array | None = None) -> tuple[Array, Array]:
        """Return the sums. d is dy, and 0 where a ReLU's output is 0.

        y, d: the output, and where d is written to; given where a ReLU follows a sum.
        """
        x, behind, change, out = self._flat(self.x, y, dy, d)
        own = x, self._tiled(scaling, None), behind, change, self.rectified, out
        run = self._cut.run
        return self._add_up(lambda parts, size, *part: compiled.scaled.sums(*own, parts, size * run, *part))

    def backward(self, dy: Array, scaling: Scaling | None, back: Scaling | None) -> Array:
        """Return dx, where nothing was added or no ReLU followed."""
        dx, tiled = np.empty(self.x.shape, self.x.dtype), self._tiled(scaling, back)
        x, change, out = self._flat(self.x, dy, dx)
        self._each(lambda *runs: compiled.scaled.backward(x, tiled, change, self.rectified, out, *self._numbers(*runs)))
        return dx

    @property
    def _cut(self) -> MapCut:
        return _scaled_cut(self.x.size, self.x.shape[-1])

    def _numbers(self, first: int, last: int) -> tuple[int, int]:
        """Return the first and the last number of these runs."""
        run = self._cut.run
        return first * run, min(self.x.size, last * run)

    def _flat(self, *arrays: Array | None) -> list[Array]:
        """Return the arrays as vectors, empty ones for those that are None."""
        none, contiguous = np.empty(0, self.x.dtype), self.device.backend.contiguous
        return [none if a is None else contiguous(a).reshape(-1) for a in arrays]


@dataclass
class PooledPass(WholePass):
    """A pass of x (H, W, N, C) through a scaling or none, an activation or none, and a pool of windows of 2×2 pixels.

    The map is contiguous. A ReLU may lie before or behind the greatest number of a window. A scaling goes with greatest
    numbers alone, of maps whose pixels all lie in windows.
    """

    pool: int
    activation: int = NONE

    def forward(self, scaling: Scaling | None) -> Array:
        """Return y."""
        H, W, *rest = self.x.shape
        y, tiled = np.empty((H // 2, W // 2, *rest), self.x.dtype), self._tiled(scaling, None)
        x, out = _lines(self.x), _lines(y)
        self._each(lambda lo, hi: compiled.pooled.forward(self.pool, self.activation, x, tiled, out, lo, hi))
        return y

    def sums(self, dy: Array, scaling: Scaling) -> tuple[Array, Array]:
        """Return the sums. d is dy where x is the greatest of its window and, with a ReLU, above 0; elsewhere 0."""
        own = self.activation, _lines(self.x), self._tiled(scaling, None), _lines(self.device.backend.contiguous(dy))
        return self._add_up(lambda *part: compiled.pooled.sums(*own, *part))

    def backward(self, dy: Array, scaling: Scaling | None, back: Scaling | None) -> Array:
        """Return dx."""
        H, W = self.x.shape[:2]
        dx = (np.zeros if H % 2 or W % 2 else np.empty)(self.x.shape, self.x.dtype)
        x, change, out = _lines(self.x), _lines(self.device.backend.contiguous(dy)), _lines(dx)
        own = self.pool, self.activation, scaling is not None, x, self._tiled(scaling, back), change, out
        self._each(lambda lo, hi: compiled.pooled.backward(*own, lo, hi))
        return dx

    @property
    def _cut(self) -> MapCut:
        return _pooled_cut(self.x.shape)


@lru_cache(maxsize=1024)
def _scaled_cut(numbers: int, C: int) -> MapCut:
    run = C * max(1, RUN // C)
    return MapCut.of(run, -(-numbers // run), numbers)


@lru_cache(maxsize=1024)
def _pooled_cut(shape: tuple[int, int, int, int]) -> MapCut:
    H, W, N, C = shape
    run = C * min(N, max(1, RUN // C))
    return MapCut.of(run, (H // 2) * (W // 2) * -(-N * C // run), prod(shape))


def _lines(a: Array) -> Array:
    """Return a map with samples and channels as one axis."""
    H, W, N, C = a.shape
    return a.reshape(H, W, N * C)


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
    """Return mean, what rounding leaves of it, and variance about it, of each channel of x (..., N, C): (C,) each."""
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
