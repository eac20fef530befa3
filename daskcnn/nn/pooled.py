"""Maps of whose windows of 2×2 pixels one number is left, on processors: one loop over a map's numbers, both ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from daskcnn.arrays import Array, Device
from daskcnn.compiled.program import AVERAGE, LEAST_PART, MAX, PARTS, RELU, RUN, TANH, Operation
from daskcnn.nn.scaled import THREAD_NUMBERS, Scaling, rows_of

NONE = -1
"""No activation."""
_KINDS = {
    (MAX,): (MAX, NONE),
    (RELU, MAX): (MAX, RELU),
    (MAX, RELU): (MAX, RELU),
    (AVERAGE,): (AVERAGE, NONE),
    (RELU, AVERAGE): (AVERAGE, RELU),
    (TANH, AVERAGE): (AVERAGE, TANH),
}
"""Pool and activation of a chain's operations. A ReLU and a greatest number may change places."""


@dataclass(frozen=True)
class PooledPass:
    """A pass of a map x (H, W, N, C) through batch normalising, an activation and a pool, or a part of these."""

    x: Array
    device: Device
    pool: int
    activation: int

    @classmethod
    def of(cls, operations: Sequence[Operation], x: Array, device: Device, *, scaled: bool) -> PooledPass | None:
        """Return the pass of these operations behind batch normalising, if it is `scaled`; None if there is none."""
        kind = _KINDS.get(tuple(operation.code for operation in operations))
        if kind is None or x.ndim != 4 or min(x.shape[:2]) < 2:
            return None
        if not all((o.size, o.step) == (2, 2) for o in operations if o.code in (MAX, AVERAGE)):
            return None
        pixels_left_out = x.shape[0] % 2 or x.shape[1] % 2
        if scaled and (kind[0] == AVERAGE or pixels_left_out):
            return None
        return cls(device.backend.contiguous(x), device, *kind)

    def forward(self, scaling: Scaling | None) -> Array:
        """Return y."""
        from daskcnn.compiled import pooled

        y, tiled = np.empty(self._out_shape, self.x.dtype), self._tiled(scaling, None)
        x, out = _runs_of(self.x), _runs_of(y)
        self._each(lambda lo, hi: pooled.forward(self.pool, self.activation, x, tiled, out, lo, hi))
        return y

    def sums(self, dy: Array, scaling: Scaling) -> tuple[Array, Array, Array]:
        """Return the sums over pixels and samples of d and of d·(x - mean), each (C,), and dy.

        d is dy where x is the greatest of its window and, behind a ReLU, above 0; elsewhere 0.
        """
        from daskcnn.compiled import pooled

        tiled, parts = self._tiled(scaling, None), np.empty((-(-self._runs // self._size), 2, self.x.shape[-1]))
        x, change = _runs_of(self.x), self._map(dy)

        def add_up(part: slice) -> None:
            scratch = self.device.workspace.take(f"sums {self.device.pool.thread}", (2, self._run), self.x.dtype)
            pooled.sums(self.activation, x, tiled, change, parts, self._size, part.start, part.stop, scratch)

        self.device.pool.map(add_up, self._slices)
        total, product = parts.sum(axis=0)
        return total, product, dy

    def backward(self, dy: Array, scaling: Scaling | None, back: Scaling | None) -> Array:
        """Return dx; with a scaling d·factor + (x - mean)·by_x + by_all, by_x being back's factor, by_all its shift."""
        from daskcnn.compiled import pooled

        H, W = self.x.shape[:2]
        dx = (np.zeros if H % 2 or W % 2 else np.empty)(self.x.shape, self.x.dtype)
        kind = self.pool, self.activation, scaling is not None
        own = _runs_of(self.x), self._tiled(scaling, back), self._map(dy), _runs_of(dx)
        self._each(lambda lo, hi: pooled.backward(*kind, *own, lo, hi))
        return dx

    @property
    def _out_shape(self) -> tuple[int, ...]:
        H, W, *rest = self.x.shape
        return H // 2, W // 2, *rest

    def _map(self, dy: Array) -> Array:
        return _runs_of(self.device.backend.contiguous(dy))

    @cached_property
    def _run(self) -> int:
        """Numbers of a run: of whole samples."""
        N, C = self.x.shape[2:]
        return int(C * min(N, max(1, RUN // C)))

    @property
    def _runs(self) -> int:
        H, W, N, C = self._out_shape
        return H * W * -(-N * C // self._run)

    @cached_property
    def _size(self) -> int:
        """Runs of a part, the same for any number of threads: sums are taken part by part."""
        return -(-self._runs // max(1, min(PARTS, self.x.size // LEAST_PART)))

    @property
    def _slices(self) -> list[slice]:
        parts = -(-self._runs // self._size)
        return self.device.pool.slices(parts, at_least=-(-THREAD_NUMBERS * parts // self.x.size))

    def _tiled(self, scaling: Scaling | None, back: Scaling | None) -> Array:
        if scaling is None:
            return _unscaled(self._run, self.x.dtype)
        return np.tile(rows_of(scaling, back), self._run // self.x.shape[-1])

    def _each(self, call: Callable[[int, int], None]) -> None:
        """Call the loop for ranges of runs, on threads."""

        def work(part: slice) -> None:
            call(part.start * self._size, min(self._runs, part.stop * self._size))

        self.device.pool.map(work, self._slices)


def _runs_of(a: Array) -> Array:
    """Return a map with samples and channels as one axis."""
    return a.reshape(*a.shape[:2], -1)


@lru_cache
def _unscaled(run: int, dtype: np.dtype[Any]) -> Array:
    """Return the rows by which nothing is scaled."""
    rows = np.zeros((5, run), dtype)
    rows[1] = 1
    return rows
