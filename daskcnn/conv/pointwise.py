"""Convolution by kernels of one pixel: a product of the map's pixels, which lie as rows of channels, and the kernels.

Nothing is expanded. Where the stride leaves pixels out, those that count are copied side by side first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from daskcnn.arrays import ROUNDING, Array, Backend, Device
from daskcnn.conv.spec import LONGEST, ConvAlgorithm, Convolution, ConvSpec, Direction, Prepared, Work, ranges_of

BLOCK = 1 << 18
"""Numbers of a block's pixels and outputs: about what the second-level cache holds."""
PARTS = 8
"""Partial sums of a kernel gradient, for threads to share. They are the same for any number of threads."""
THREAD_FLOPS = 2_500_000
"""Fewest operations of a thread, as in `im2col`."""


class Pointwise(ConvAlgorithm):
    """One product of matrices. Supports kernels of one pixel, without padding, and any stride."""

    name = "pointwise"
    version = 2
    rounding = 2e-6

    def supports(self, spec: ConvSpec) -> bool:
        return spec.R == spec.S == spec.groups == 1 and spec.pad == spec.pad_end == (0, 0)

    def workspace(self, spec: ConvSpec) -> int:
        """Return the bytes of a row's pixels, where a stride leaves some out, of a block's gradient and of one sum."""
        return ROUNDING + (_row(spec) + 2 * spec.C * spec.K) * spec.itemsize

    def work(self, spec: ConvSpec, direction: Direction) -> tuple[Work, ...]:
        pixels = prod(spec.y_shape[:3])
        forward, dx, dw = (
            Work("products", spec.flops, spec.moved, sizes)
            for sizes in ((pixels, spec.C, spec.K), (pixels, spec.K, spec.C), (spec.C, pixels, spec.K))
        )
        return {"forward": (forward,), "backward": (dx, dw), "backward_filter": (dw,)}[direction]

    def bind(self, spec: ConvSpec, backend: Backend, limit: int) -> Convolution:
        return (_PixelBlocks if backend.compiled else _PixelProducts)(spec, limit)


class _PixelProducts(Convolution):
    """One product of the whole map."""

    def prepare(self, w: Array, device: Device, *, keep: bool = False) -> Prepared:
        """Return the kernels as a matrix (C, K)."""
        return device.backend.contiguous(w)[0, 0]

    def forward(self, x: Array, prepared: Prepared, device: Device, *, bias: Array | None = None) -> Array:
        y = device.xp.matmul(self._pixels(x), prepared)
        return (y if bias is None else y + bias).reshape(self.spec.y_shape)

    def backward_data(self, dy: Array, prepared: Prepared, device: Device) -> Array:
        """Return dx (H, W, N, C), 0 where the stride leaves a pixel out."""
        spec, dx = self.spec, self._zeros(device)
        found = device.xp.matmul(dy.reshape(-1, spec.K), prepared.T)
        dx[:: spec.stride[0], :: spec.stride[1]] = found.reshape(*spec.y_shape[:3], spec.C)
        return dx

    def backward_filter(self, x: Array, dy: Array, device: Device) -> Array:
        return device.xp.matmul(self._pixels(x).T, dy.reshape(-1, self.spec.K)).reshape(self.spec.w_shape)

    def _pixels(self, x: Array) -> Array:
        return _matrix(x[:: self.spec.stride[0], :: self.spec.stride[1]])

    def _zeros(self, device: Device) -> Array:
        """Return memory for dx: zeros if the stride leaves pixels out."""
        made = device.xp.empty if self.spec.stride == (1, 1) else device.xp.zeros
        return made(self.spec.x_shape, self.spec.dtype)


class _PixelBlocks(_PixelProducts):
    """Products of blocks of output rows, which threads share. Blocks do not depend on the number of threads."""

    def __init__(self, spec: ConvSpec, limit: int) -> None:
        super().__init__(spec, limit)
        self._row, self._size, room = _row(spec), spec.C * spec.K, (limit - ROUNDING) // spec.itemsize
        self._parts = max(1, min(PARTS, spec.out_H, (room - self._row - self._size) // self._size))
        self._rows = self._rows_within(room)
        self._rows_of_sums = self._rows_within(room - self._parts * self._size - self._size)

    def _rows_within(self, room: int) -> int:
        """Return the rows of a block, whose pixels take at most `room` numbers."""
        spec = self.spec
        rows = max(1, min(spec.out_H, BLOCK // (spec.out_W * spec.N * (spec.C + spec.K))))
        return max(1, min(rows, room // self._row)) if self._row else rows

    def forward(self, x: Array, prepared: Prepared, device: Device, *, bias: Array | None = None) -> Array:
        spec, own = self.spec, self._rows * self._row
        x, y, threads = device.backend.contiguous(x), np.empty(spec.y_shape, spec.dtype), self._begin(device, own)

        def some(rows: slice, scratch: Array) -> None:
            out = _matrix(y[rows])
            np.matmul(self._gathered(x, rows, scratch), prepared, out=out)
            if bias is not None:
                out += bias

        self._share(some, ranges_of(spec.out_H, self._rows), own, threads, device)
        return y

    def backward_data(self, dy: Array, prepared: Prepared, device: Device) -> Array:
        own = self._rows * self._row
        dx, dy, threads = self._zeros(device), device.backend.contiguous(dy), self._begin(device, own)

        def some(rows: slice, scratch: Array) -> None:
            found = self._pixels_below(rows, scratch) if self._row else dx[rows]
            np.matmul(_matrix(dy[rows]), prepared.T, out=_matrix(found))
            if self._row:
                dx[self._strided(rows)] = found

        self._share(some, ranges_of(self.spec.out_H, self._rows), own, threads, device)
        return dx

    def backward_filter(self, x: Array, dy: Array, device: Device) -> Array:
        """Return dw (1, 1, C, K), a sum of parts of the map."""
        spec, parts, size = self.spec, self._parts, self._size
        own, blocks = self._rows_of_sums * self._row + size, ranges_of(spec.out_H, self._rows_of_sums)
        x, dy, threads = *map(device.backend.contiguous, (x, dy)), self._begin(device, own, held=parts * size)
        sums = device.workspace.take("pointwise.sums", (parts, spec.C, spec.K), spec.dtype)

        def add_up(part: int, scratch: Array) -> None:
            product = scratch[-size:].reshape(spec.C, spec.K)
            sums[part] = 0
            for rows in blocks[len(blocks) * part // parts : len(blocks) * (part + 1) // parts]:
                pixels, changes = self._gathered(x, rows, scratch), _matrix(dy[rows])
                for some in ranges_of(len(pixels), LONGEST):
                    np.matmul(pixels[some].T, changes[some], out=product)
                    sums[part] += product

        self._share(add_up, range(parts), own, threads, device)
        return sums.sum(axis=0).reshape(spec.w_shape)

    def _begin(self, device: Device, own: int, *, held: int = 0) -> int:
        """Begin a pass that holds `held` numbers, and `own` on each thread; return its threads."""
        item, most = self.spec.itemsize, self.spec.flops // THREAD_FLOPS
        return self.begin(device, most=most, own=own * item, held=held * item)

    def _share(
        self, work: Callable[[Any, Array], None], items: Sequence[Any], own: int, threads: int, device: Device
    ) -> None:
        """Call `work` of every item, on the threads, with `own` numbers of a thread's scratch memory."""

        def some(first: int, last: int, i: int) -> None:
            scratch = device.workspace.take(f"pointwise.rows{i}", (own,), self.spec.dtype)
            for item in items[first:last]:
                work(item, scratch)

        device.pool.share(some, len(items), threads)

    def _strided(self, rows: slice) -> tuple[slice, slice]:
        """Return where the pixels below these output rows lie."""
        down, right = self.spec.stride
        width = (self.spec.out_W - 1) * right + 1
        return slice(rows.start * down, (rows.stop - 1) * down + 1, down), slice(0, width, right)

    def _pixels_below(self, rows: slice, scratch: Array) -> Array:
        """Return scratch memory (rows, columns, N, C) for the pixels below these output rows."""
        found = scratch[: (rows.stop - rows.start) * self._row]
        return found.reshape(-1, *self.spec.y_shape[1:3], self.spec.C)

    def _gathered(self, x: Array, rows: slice, scratch: Array) -> Array:
        """Return the pixels (pixels, C) below these output rows, copied side by side where a stride leaves some out."""
        if not self._row:
            return _matrix(x[rows])
        found = self._pixels_below(rows, scratch)
        found[...] = x[self._strided(rows)]
        return _matrix(found)


def _row(spec: ConvSpec) -> int:
    """Return the numbers of scratch memory of an output row: of its pixels, where a stride leaves some out."""
    return 0 if spec.stride == (1, 1) else spec.out_W * spec.N * spec.C


def _matrix(a: Array) -> Array:
    return a.reshape(-1, a.shape[-1])
