"""Convolution by kernels of one pixel: a product of the map's pixels, which lie as rows of channels, and the kernels.

Nothing is expanded. Where the stride leaves pixels out, those that count are copied side by side first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from daskcnn.arrays import ROUNDING, Array, Device
from daskcnn.conv.spec import LONGEST, ConvSpec, Direction, Prepared, Work, ranges_of

BLOCK = 1 << 18
"""Numbers of a block's pixels and outputs: about what the second-level cache holds."""
PARTS = 8
"""Partial sums of a kernel gradient, for threads to share. They are the same for any number of threads."""
THREAD_FLOPS = 2_500_000
"""Fewest operations of a thread, as in `im2col`."""


class Pointwise:
    """One product of matrices. Supports kernels of one pixel, without padding, and any stride."""

    name = "pointwise"
    version = 2
    rounding = 2e-6

    def supports(self, spec: ConvSpec) -> bool:
        """Return True for 1×1 kernels of one group without padding."""
        return spec.R == spec.S == spec.groups == 1 and spec.pad == spec.pad_end == (0, 0)

    def workspace(self, spec: ConvSpec) -> int:
        """Return the bytes of a row's pixels, where a stride leaves some out, of a block's gradient and of one sum."""
        return ROUNDING + (_row(spec) + 2 * spec.C * spec.K) * spec.itemsize

    def work(self, spec: ConvSpec, direction: Direction) -> tuple[Work, ...]:
        """Return the products of the direction."""
        moved = sum(prod(shape) for shape in (spec.x_shape, spec.w_shape, spec.y_shape)) * spec.itemsize
        pixels = prod(spec.y_shape[:3])
        forward = Work("products", spec.flops, moved, (pixels, spec.C, spec.K))
        dx = Work("products", spec.flops, moved, (pixels, spec.K, spec.C))
        dw = Work("products", spec.flops, moved, (spec.C, pixels, spec.K))
        return {"forward": (forward,), "backward": (dx, dw), "backward_filter": (dw,)}[direction]

    def prepare(self, spec: ConvSpec, w: Array, device: Device, *, keep: bool = False) -> Prepared:
        """Return the kernels as a matrix (C, K)."""
        return device.backend.contiguous(w)[0, 0]

    def forward(
        self, spec: ConvSpec, x: Array, prepared: Prepared, device: Device, *, bias: Array | None = None
    ) -> Array:
        """Return y (out_H, out_W, N, K)."""
        if not device.backend.compiled:
            y = device.xp.matmul(_pixels(spec, x), prepared)
            return (y if bias is None else y + bias).reshape(spec.y_shape)
        way, x, y = _Blocks.of(spec, device), device.backend.contiguous(x), np.empty(spec.y_shape, spec.dtype)

        def some(rows: slice, own: Array) -> None:
            out = _matrix(y[rows])
            np.matmul(_gathered(spec, x, rows, own), prepared, out=out)
            if bias is not None:
                out += bias

        way.share(some)
        return y

    def backward_data(self, spec: ConvSpec, dy: Array, prepared: Prepared, device: Device) -> Array:
        """Return dx (H, W, N, C), 0 where the stride leaves a pixel out."""
        whole = spec.stride == (1, 1)
        dx = (device.xp.empty if whole else device.xp.zeros)(spec.x_shape, spec.dtype)
        if not device.backend.compiled:
            found = device.xp.matmul(dy.reshape(-1, spec.K), prepared.T)
            dx[:: spec.stride[0], :: spec.stride[1]] = found.reshape(*spec.y_shape[:3], spec.C)
            return dx
        way, dy = _Blocks.of(spec, device), device.backend.contiguous(dy)

        def some(rows: slice, own: Array) -> None:
            if whole:
                np.matmul(_matrix(dy[rows]), prepared.T, out=_matrix(dx[rows]))
                return
            found = own[: (rows.stop - rows.start) * _row(spec)].reshape(-1, *spec.y_shape[1:3], spec.C)
            np.matmul(_matrix(dy[rows]), prepared.T, out=_matrix(found))
            dx[_strided(spec, rows)] = found

        way.share(some)
        return dx

    def backward_filter(self, spec: ConvSpec, x: Array, dy: Array, device: Device) -> Array:
        """Return dw (1, 1, C, K), summed over parts of the map in an order that does not depend on the threads."""
        if not device.backend.compiled:
            return device.xp.matmul(_pixels(spec, x).T, dy.reshape(-1, spec.K)).reshape(spec.w_shape)
        size = spec.C * spec.K
        room = (device.workspace_limit - ROUNDING) // spec.itemsize - _row(spec) - size
        parts = max(1, min(PARTS, spec.out_H, room // size))
        way = _Blocks.of(spec, device, sums=parts * size, more=size)
        sums = device.workspace.take("pointwise.sums", (parts, spec.C, spec.K), spec.dtype)
        x, dy = device.backend.contiguous(x), device.backend.contiguous(dy)

        def add_up(part: int, own: Array) -> None:
            product = own[-size:].reshape(spec.C, spec.K)
            sums[part] = 0
            for rows in way.blocks[len(way.blocks) * part // parts : len(way.blocks) * (part + 1) // parts]:
                pixels, changes = _gathered(spec, x, rows, own), _matrix(dy[rows])
                for some in ranges_of(len(pixels), LONGEST):
                    np.matmul(pixels[some].T, changes[some], out=product)
                    sums[part] += product

        way.share(add_up, range(parts))
        return sums.sum(axis=0).reshape(spec.w_shape)

    def backward(self, spec: ConvSpec, x: Array, dy: Array, prepared: Prepared, device: Device) -> tuple[Array, Array]:
        """Return (dx, dw), computed one after the other: they share no work."""
        return self.backward_data(spec, dy, prepared, device), self.backward_filter(spec, x, dy, device)


@dataclass(frozen=True)
class _Blocks:
    """Output rows of every block, the threads that share them, and scratch memory of each."""

    blocks: list[slice]
    device: Device
    scratch: list[Array]

    @classmethod
    def of(cls, spec: ConvSpec, device: Device, *, sums: int = 0, more: int = 0) -> _Blocks:
        """Begin a pass that holds `sums` numbers, and `more` of each thread beside a block's pixels.

        Blocks depend on the limit, not on the number of threads.
        """
        row, room = _row(spec), (device.workspace_limit - ROUNDING) // spec.itemsize - sums
        rows = max(1, min(spec.out_H, BLOCK // (spec.out_W * spec.N * (spec.C + spec.K))))
        rows = max(1, min(rows, (room - more) // row)) if row else rows
        threads, each = max(1, min(device.pool.threads, spec.flops // THREAD_FLOPS)), rows * row + more
        threads = max(1, min(threads, room // each)) if each else threads
        device.workspace.recycle((sums + threads * each) * spec.itemsize + ROUNDING)
        scratch = [device.workspace.take(f"pointwise.rows{i}", (each,), spec.dtype) for i in range(threads)]
        return cls(ranges_of(spec.out_H, rows), device, scratch)

    def share(self, work: Callable[[Any, Array], None], items: Any = None) -> None:
        """Call `work` of every block, or of each of these items, on the threads, with a thread's scratch memory."""
        every, threads = list(self.blocks if items is None else items), len(self.scratch)

        def own(thread: int) -> None:
            for item in every[len(every) * thread // threads : len(every) * (thread + 1) // threads]:
                work(item, self.scratch[thread])

        self.device.pool.map(own, range(threads), threads=threads)


def _row(spec: ConvSpec) -> int:
    """Return the numbers of scratch memory of an output row: of its pixels, where a stride leaves some out."""
    return 0 if spec.stride == (1, 1) else spec.out_W * spec.N * spec.C


def _matrix(a: Array) -> Array:
    return a.reshape(-1, a.shape[-1])


def _strided(spec: ConvSpec, rows: slice) -> tuple[slice, slice]:
    """Return where the pixels below these output rows lie."""
    down, right = spec.stride
    return slice(rows.start * down, (rows.stop - 1) * down + 1, down), slice(0, (spec.out_W - 1) * right + 1, right)


def _gathered(spec: ConvSpec, x: Array, rows: slice, own: Array) -> Array:
    """Return the pixels (pixels, C) below these output rows, copied side by side where a stride leaves some out."""
    if spec.stride == (1, 1):
        return _matrix(x[rows])
    found = own[: (rows.stop - rows.start) * _row(spec)].reshape(-1, *spec.y_shape[1:3], spec.C)
    found[...] = x[_strided(spec, rows)]
    return _matrix(found)


def _pixels(spec: ConvSpec, x: Array) -> Array:
    """Return the pixels that outputs lie on, (pixels, C)."""
    return _matrix(x[:: spec.stride[0], :: spec.stride[1]])
