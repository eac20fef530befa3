"""Convolution of maps with few channels, such as images, as its definition has it: sums over taps, kept in registers.

Columns would hold R·S·C numbers for each output pixel, and BLAS would copy them once more. A network's first layer
needs no gradient of its data; where another layer does, it is made as `im2col` does.
"""

from __future__ import annotations

from math import prod

import numpy as np

from daskcnn import compiled
from daskcnn.arrays import ROUNDING, Array, Device
from daskcnn.compiled.sizes import LANES, ROWS
from daskcnn.conv.im2col import Im2col, taps
from daskcnn.conv.spec import ConvSpec, Direction, Prepared, Work

CHANNELS = 8
"""Most channels. More were not measured; their products are deeper, which suits BLAS better."""
PARTS = 8
"""Partial sums of a kernel gradient, for threads to share. They are the same for any number of threads."""
TOGETHER_BYTES = 16 << 10
"""Bytes of a pixel's changes that are added up at once: half of a first-level cache."""
THREAD_FLOPS = 2_500_000
"""Fewest operations of a thread: at 30 to 80 GFLOP/s a few times the 25 µs that calling one takes."""


class DirectSums:
    """Sums in registers. Supports one group of up to CHANNELS channels, and a multiple of LANES kernels."""

    name = "direct"
    version = 1
    rounding = 2e-6

    def __init__(self) -> None:
        self._columns = Im2col()

    def supports(self, spec: ConvSpec) -> bool:
        """Return True for few channels, and kernels that fill registers, in float32 and float64."""
        if spec.groups != 1 or spec.C > CHANNELS or spec.dtype not in ("float32", "float64"):
            return False
        return spec.K % LANES == 0

    def workspace(self, spec: ConvSpec) -> int:
        """Return the bytes of partial sums and of places, or what the gradient of the data needs."""
        return max(self._columns.workspace(spec), ROUNDING + _sum_bytes(spec) + _own_bytes(spec))

    def work(self, spec: ConvSpec, direction: Direction) -> tuple[Work, ...]:
        """Return the sums of the direction."""
        moved = sum(prod(shape) for shape in (spec.x_shape, spec.w_shape, spec.y_shape)) * spec.itemsize
        sums = Work("sums", spec.flops, moved)
        data = self._columns.data_work(spec)
        return {"forward": (sums,), "backward": (*data, sums), "backward_filter": (sums,)}[direction]

    def prepare(self, spec: ConvSpec, w: Array, device: Device, *, keep: bool = False) -> Prepared:
        """Return the kernels themselves, contiguous."""
        return device.backend.contiguous(w)

    def forward(
        self, spec: ConvSpec, x: Array, prepared: Prepared, device: Device, *, bias: Array | None = None
    ) -> Array:
        """Return y (out_H, out_W, N, K)."""
        if not device.backend.compiled:
            return self._columns.forward(spec, x, prepared, device, bias=bias)
        x, y, step = device.backend.contiguous(x), np.empty(spec.y_shape, spec.dtype), taps(spec)
        w, shift = prepared.reshape(-1, spec.K), np.zeros(spec.K, spec.dtype)
        if bias is not None:
            shift[:] = bias
        threads = _begin(spec, 0, spec.out_H, device)

        def some(i: int) -> None:
            met, samples = _integers(f"met{i}", 2, len(w), device), _integers(f"samples{i}", 3, spec.N, device)
            first, last = spec.out_H * i // threads, spec.out_H * (i + 1) // threads
            compiled.direct.correlate(x, w, shift, y, step, first, last, met, samples)

        device.pool.map(some, range(threads))
        return y

    def backward_data(self, spec: ConvSpec, dy: Array, prepared: Prepared, device: Device) -> Array:
        """Return dx (H, W, N, C), by `im2col`."""
        return self._columns.backward_data(spec, dy, prepared, device)

    def backward_filter(self, spec: ConvSpec, x: Array, dy: Array, device: Device) -> Array:
        """Return dw (R, S, C, K), a sum of parts in an order that does not depend on the threads."""
        if not device.backend.compiled:
            return self._columns.backward_filter(spec, x, dy, device)
        x, dy, parts, step = device.backend.contiguous(x), device.backend.contiguous(dy), _parts(spec), taps(spec)
        threads, size = _begin(spec, _sum_bytes(spec), parts, device), spec.R * spec.S * spec.C
        sums = device.workspace.take("direct.sums", (parts, size, spec.K), spec.dtype)
        together = max(1, min(spec.N, TOGETHER_BYTES // (spec.K * spec.itemsize)))

        def some(i: int) -> None:
            met = _integers(f"met{i}", 2, size, device)
            samples = device.workspace.take(f"direct.samples{i}", (2, together), np.intp)
            own = device.workspace.take(f"direct.own{i}", (size, spec.K), spec.dtype)
            first, last = parts * i // threads, parts * (i + 1) // threads
            compiled.direct.correlate_filter(x, dy, sums, step, together, first, last, met, samples, own)

        device.pool.map(some, range(threads))
        return sums.sum(axis=0).reshape(spec.w_shape)

    def backward(self, spec: ConvSpec, x: Array, dy: Array, prepared: Prepared, device: Device) -> tuple[Array, Array]:
        """Return (dx, dw), computed one after the other: they share no work."""
        return self.backward_data(spec, dy, prepared, device), self.backward_filter(spec, x, dy, device)


def _begin(spec: ConvSpec, held: int, most: int, device: Device) -> int:
    """Begin a pass that holds `held` bytes, and return its threads: as many as pay, and as there is memory for."""
    own, room = _own_bytes(spec), device.workspace_limit - ROUNDING - held
    threads = max(1, min(device.pool.threads, most, spec.flops // THREAD_FLOPS, room // own))
    device.workspace.recycle(held + threads * own + ROUNDING)
    return threads


def _integers(name: str, kinds: int, count: int, device: Device) -> Array:
    """Return memory for places of several kinds, of whole tiles."""
    return device.workspace.take(f"direct.{name}", (kinds, -(-count // ROWS) * ROWS), np.intp)


def _parts(spec: ConvSpec) -> int:
    """Return the number of partial sums of a kernel gradient."""
    return min(PARTS, spec.out_H)


def _sum_bytes(spec: ConvSpec) -> int:
    return _parts(spec) * prod(spec.w_shape) * spec.itemsize


def _own_bytes(spec: ConvSpec) -> int:
    """Return the bytes of a thread: places of taps and samples, and sums of its own."""
    places = spec.R * spec.S * spec.C + spec.N + 2 * ROWS
    return 3 * places * np.dtype(np.intp).itemsize + prod(spec.w_shape) * spec.itemsize
